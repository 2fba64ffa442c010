"""Text in, batches out: documents, tokenizers, splits, windows, sampler, batches.

The path of a training run::

    data = open_data(config.data, seed=config.seed, seq_len=config.seq_len)      # DataBundle
    data.tokenizer.save(run_folder / "tokenizer.json")                           # later runs pass it as run_folder_tokenizer
    data.train, data.validation                                                  # TokenSource each
    data.description                                                             # JSON-able: counts, hashes, source and licence

    sampler = data.sampler(seq_len, seed)                                        # state_dict(): integers
    indices = sampler.next_windows(micro_batch, rank=0, world_size=1)            # advances by micro_batch * world_size
    batch = collate(data.train, indices, seq_len, document_mask=True).to(device)

    for batch in validation_batches(data.validation, seq_len, micro_batch, num_windows, document_mask=True):
        ...                                                                      # windows 0 .. num_windows - 1 in order

    bigram_bits_per_byte(data.train, data.validation)                            # text sources; the baseline to beat

:func:`prepare` turns a data set into shards, :func:`open_shards` checks and opens them. Neither ``datasets`` nor ``tiktoken``
is imported before it is needed, and ``datasets`` never in the process that trains.

A :class:`Batch` has ``tokens`` int64 ``[T]``, ``targets`` int64 ``[T]`` (-100 where nothing is predicted), ``cu_seqlens``
int32 ``[N + 1]``, ``max_seqlen`` int (``seq_len``: an upper bound), ``num_bytes`` int (bytes of text that the counted targets
spell) and ``num_targets`` int. A :class:`Tokenizer` has ``kind``, ``vocab_size``, ``separator_id``, ``token_bytes``,
``fingerprint``, ``encode``, ``decode`` (bytes) and ``save``; :func:`load_tokenizer` reads what ``save`` wrote.
"""

from nsa.train.data.batch import IGNORED_TARGET, Batch, collate, validation_batches
from nsa.train.data.bigram import bigram_bits_per_byte
from nsa.train.data.bundle import DataBundle, open_data
from nsa.train.data.documents import Document, TextFiles, corpus_files, fault_of_text, folder_files, stdlib_files
from nsa.train.data.preparation import PrepareConfig, prepare
from nsa.train.data.sampler import Sampler
from nsa.train.data.shards import ShardError, ShardFolder, ShardSource, open_shards
from nsa.train.data.source import DataUnavailableError, TextSource, TokenSource
from nsa.train.data.split import Piece, Split, check_disjoint, split_documents
from nsa.train.data.stream import DocumentReader, Origin
from nsa.train.data.stream_source import StreamSampler, StreamSource
from nsa.train.data.synthetic import SyntheticSource
from nsa.train.data.tokenizer import ByteTokenizer, SubwordTokenizer, Tokenizer, load_tokenizer, make_tokenizer

__all__ = [
    "IGNORED_TARGET",
    "Batch",
    "ByteTokenizer",
    "DataBundle",
    "DataUnavailableError",
    "Document",
    "DocumentReader",
    "Origin",
    "Piece",
    "PrepareConfig",
    "Sampler",
    "ShardError",
    "ShardFolder",
    "ShardSource",
    "Split",
    "StreamSampler",
    "StreamSource",
    "SubwordTokenizer",
    "SyntheticSource",
    "TextFiles",
    "TextSource",
    "TokenSource",
    "Tokenizer",
    "bigram_bits_per_byte",
    "check_disjoint",
    "collate",
    "corpus_files",
    "fault_of_text",
    "folder_files",
    "load_tokenizer",
    "make_tokenizer",
    "open_data",
    "open_shards",
    "prepare",
    "split_documents",
    "stdlib_files",
    "validation_batches",
]
