"""Text in, batches out: documents, tokenizers, splits, sequences, sampler, batches.

The path of a training run::

    data = open_data(config.data, seed=config.seed, seq_len=config.seq_len)   # DataBundle
    data.tokenizer.save(run_folder / "tokenizer.json")    # later: run_folder_tokenizer
    data.train, data.validation, data.test                # TokenSource each; test may be None
    data.description                       # JSON-able: counts, hashes, source and licence

    sampler = data.sampler(seq_len, seed)                 # state_dict(): integers
    indices = sampler.next_indices(micro_batch, rank=0, world_size=1)
    batch = collate(data.train, indices, seq_len, document_mask=True).to(device)

    for batch in validation_batches(
        data.validation, seq_len, micro_batch, num_sequences, document_mask=True
    ):
        ...                                               # sequences from all of the text

    bigram_bits_per_byte(data.train, data.validation)     # text sources; the baseline to beat

:func:`prepare` turns a data set into shards, :func:`open_shards` checks and opens them. Neither
``datasets`` nor ``tiktoken`` is imported before it is needed, and ``datasets`` never in the process
that trains.
"""

from nsa.train.data.batch import (
    IGNORED_TARGET,
    Batch,
    DataUnavailableError,
    Prefetcher,
    Sampler,
    StarvedError,
    TextSource,
    TokenSource,
    collate,
    spread,
    validation_batches,
)
from nsa.train.data.bigram import bigram_bits_per_byte
from nsa.train.data.bundle import DataBundle, open_data
from nsa.train.data.documents import Document, fault_of_text, folder_files
from nsa.train.data.local import Origin
from nsa.train.data.preparation import PrepareConfig, prepare
from nsa.train.data.shards import ShardSource, open_shards
from nsa.train.data.stream import StreamSource
from nsa.train.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, make_tokenizer

__all__ = [
    "IGNORED_TARGET",
    "Batch",
    "ByteTokenizer",
    "DataBundle",
    "DataUnavailableError",
    "Document",
    "Origin",
    "Prefetcher",
    "PrepareConfig",
    "Sampler",
    "ShardSource",
    "StarvedError",
    "StreamSource",
    "TextSource",
    "TokenSource",
    "Tokenizer",
    "bigram_bits_per_byte",
    "collate",
    "fault_of_text",
    "folder_files",
    "load_tokenizer",
    "make_tokenizer",
    "open_data",
    "open_shards",
    "prepare",
    "spread",
    "validation_batches",
]
