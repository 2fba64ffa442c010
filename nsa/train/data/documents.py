"""Where text comes from: the embedded corpus, the standard library, a folder. One document is one file."""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path, PurePath

from nsa.errors import check, fail

_INSTALLED = {"site-packages", "dist-packages"}


@dataclass(frozen=True)
class Document:
    """One text.

    Attributes:
        name: where it came from, for people.
        text: its bytes: valid UTF-8, not empty, no NUL.
    """

    name: str
    text: bytes

    @cached_property
    def sha256(self) -> str:
        """Hash of the text alone, so that copies under different names are recognised."""
        return hashlib.sha256(self.text).hexdigest()

    @cached_property
    def identity(self) -> str:
        """The same, without newlines at the end of the text."""
        return identity_of(self.text)


def identity_of(text: bytes) -> str:
    """Hash of a text that is the same with and without newlines at its end."""
    return hashlib.sha256(text.rstrip(b"\r\n")).hexdigest()


class TextFiles:
    """Text files in a fixed order; iterating reads one at a time and yields a :class:`Document` each.

    Empty files hold no document and are left out. A file is no text if it is not UTF-8 or holds a NUL byte, which marks binary
    files and is the byte tokenizer's separator; what happens then depends on ``strict``.

    Attributes:
        provenance: source and licence of the text, a sentence or two.
        skipped: names of the unreadable files that the latest iteration left out; always empty under ``strict``.

    Args:
        paths: names and files.
        provenance: see above.
        strict: whether a file that is not text is an error; otherwise it is left out and listed in ``skipped``.

    Raises:
        ValueError: on iteration, for a file that is not text (under ``strict``) or when no file holds any text.
    """

    def __init__(self, paths: Sequence[tuple[str, Traversable]], provenance: str, *, strict: bool) -> None:
        self.provenance = provenance
        self.skipped: list[str] = []
        self._paths = tuple(paths)
        self._strict = strict

    def __iter__(self) -> Iterator[Document]:
        self.skipped = []
        found = False
        for name, path in self._paths:
            text, fault = _read(path)
            if fault and self._strict:
                fail("open_data", "data.path", "hold text files only", f"{fault} in {name}", "Choose files with data.pattern.")
            if fault:
                self.skipped.append(name)
            elif text:
                found = True
                yield Document(name, text)
        check(found, "open_data", "data.source", "hold text", f"{len(self._paths)} files without any")


def corpus_files() -> TextFiles:
    """The embedded corpus: eight public-domain plays, about 1 MB of English."""
    folder = files("nsa.train.data") / "corpus"
    plays = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".txt")), key=lambda entry: entry.name)
    provenance = (
        "Eight plays by William Shakespeare, from Project Gutenberg by way of the source distribution shakespeare 0.6 "
        "(Open Knowledge Foundation). Public domain. See nsa/train/data/corpus/README.md."
    )
    return TextFiles([(play.name, play) for play in plays], provenance, strict=True)


def stdlib_files() -> TextFiles:
    """The ``*.py`` files of the running Python's standard library, sorted by path; installed packages are not part of it.

    A few of its test files are deliberately not UTF-8 or hold NUL bytes; they are left out.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = (path.relative_to(root) for path in root.rglob("*.py") if path.is_file())
    names = sorted(name.as_posix() for name in found if not _INSTALLED & set(name.parts))
    provenance = f"Standard library of Python {platform.python_version()}. Python Software Foundation License."
    return TextFiles([(name, root / name) for name in names], provenance, strict=False)


def folder_files(path: str, pattern: str = "*") -> TextFiles:
    """A text file, or the files below a folder whose names match a pattern, sorted by path.

    Files and folders whose names begin with a dot are no part of it. Links to folders are not followed.

    Args:
        path: file or folder.
        pattern: glob matched at every depth, for example ``*.txt``; of no effect on a single file.

    Raises:
        ValueError: nothing exists at ``path``, or nothing matches, or the pattern is no relative glob.
    """
    root = Path(path)
    provenance = f"Text below {root.name or root}, given by the user, who knows its licence."
    if root.is_file():
        return TextFiles([(root.name, root)], provenance, strict=True)
    check(root.is_dir(), "open_data", "data.path", "name an existing file or folder", path)
    check(
        pattern != "" and not PurePath(pattern).is_absolute() and ".." not in PurePath(pattern).parts,
        "open_data", "data.pattern", "be a glob below data.path, such as *.txt", repr(pattern),
    )  # fmt: skip
    found = (entry.relative_to(root) for entry in root.rglob(pattern) if entry.is_file())
    names = sorted({name.as_posix() for name in found if not any(part.startswith(".") for part in name.parts)})
    check(bool(names), "open_data", "data.pattern", f"match a file below {path}", repr(pattern), "Hidden files do not count.")
    return TextFiles([(name, root / name) for name in names], provenance, strict=True)


def _read(path: Traversable) -> tuple[bytes, str]:
    """The bytes of a file, and what keeps them from being text: empty when nothing does."""
    try:
        text = path.read_bytes()
    except OSError as error:
        return b"", f"{error.strerror}"
    return text, fault_of_text(text)


def fault_of_text(text: bytes) -> str:
    """What keeps bytes from being the text of a :class:`Document`; empty when nothing does."""
    position = text.find(b"\0")
    if position >= 0:
        return f"a NUL byte at offset {position}"
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"bytes that are not UTF-8 at offset {error.start}"
    return ""
