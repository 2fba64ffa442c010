from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from nsa.train.config import DataConfig
from nsa.train.data import Document, corpus_files, folder_files, open_data, stdlib_files

CORPUS = Path(__file__).parents[3] / "nsa" / "train" / "data" / "corpus"


def make_tree(root: Path) -> Path:
    for name, text in {
        "b.txt": "second",
        "a.txt": "first",
        "deep/er/c.txt": "third",
        "code.py": "x = 1\n",
        "empty.txt": "",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    for hidden in (".git/index.txt", ".hidden.txt", "deep/.cache/d.txt"):
        path = root / hidden
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\0\xff")
    return root


def test_corpus_is_whole_plays_as_they_came() -> None:
    plays = list(corpus_files())
    assert len(plays) == 8
    assert sum(len(play.text) for play in plays) == 1_040_696
    for play in plays:
        opening, ending = play.text[:200].decode("ascii"), play.text[-400:].decode("ascii")
        assert "by William Shakespeare" in opening
        assert "Exeunt" in ending or "Exit" in ending or "set me free" in ending or "THE END" in ending
        for act in (rb"(?mi)^ *act (i|1)\b", rb"(?mi)^ *act (v|5)\b"):
            assert re.search(act, play.text), play.name
    assert hashlib.sha256(next(p for p in plays if p.name == "hamlet.txt").text).hexdigest().startswith("bbe5635616c6e0e0")


def test_corpus_note_lists_every_play_with_its_size() -> None:
    note = (CORPUS / "README.md").read_text(encoding="utf-8")
    assert "public domain" in note
    for play in corpus_files():
        row = next(line for line in note.splitlines() if f"`{play.name}`" in line)
        assert f"{len(play.text):,}" in row


def test_stdlib_is_sorted_and_skips_what_is_no_text() -> None:
    files = stdlib_files()
    documents = list(files)
    names = [document.name for document in documents]
    assert names == sorted(names)
    assert {"json/decoder.py", "argparse.py"} <= set(names)
    assert not [name for name in names if "site-packages" in name or "dist-packages" in name]
    assert all(b"\0" not in document.text and document.text.decode("utf-8") for document in documents)
    root = Path(sysconfig.get_paths()["stdlib"])
    assert not set(files.skipped) & set(names)
    for name in files.skipped:
        raw = (root / name).read_bytes()
        assert b"\0" in raw or "\ufffd" in raw.decode("utf-8", errors="replace")
    assert [document.sha256 for document in files] == [document.sha256 for document in documents]


def test_skipped_files_are_listed_once_per_iteration(tmp_path: Path) -> None:
    make_tree(tmp_path)
    files = folder_files(str(tmp_path), "*.py")
    (tmp_path / "code.py").write_bytes(b"\xff")
    files._strict = False
    for _ in range(2):
        with pytest.raises(ValueError, match="hold text"):
            list(files)
        assert files.skipped == ["code.py"]


def test_folder_is_recursive_sorted_and_without_hidden_files(tmp_path: Path) -> None:
    make_tree(tmp_path)
    assert list(folder_files(str(tmp_path), "*.txt")) == [
        Document("a.txt", b"first"),
        Document("b.txt", b"second"),
        Document("deep/er/c.txt", b"third"),
    ]
    assert [document.name for document in folder_files(str(tmp_path))] == ["a.txt", "b.txt", "code.py", "deep/er/c.txt"]
    assert list(folder_files(str(tmp_path / "b.txt"))) == [Document("b.txt", b"second")]


def test_files_are_read_one_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"text")
    (tmp_path / "b").write_bytes(b"not\0text")
    reader = iter(folder_files(str(tmp_path)))
    assert next(reader).name == "a"
    with pytest.raises(ValueError, match="hold text files only, got a NUL byte at offset 3 in b"):
        next(reader)


def nothing(root: Path) -> Path:
    return root / "gone"


def without_match(root: Path) -> Path:
    (root / "a.py").write_text("x")
    return root


def only_hidden(root: Path) -> Path:
    (root / ".a.txt").write_text("x")
    return root


def only_empty(root: Path) -> Path:
    (root / "a.txt").write_text("")
    return root


def with_nul(root: Path) -> Path:
    (root / "a.txt").write_bytes(b"abc\0def")
    return root


def not_utf8(root: Path) -> Path:
    (root / "a.txt").write_bytes(b"caf\xe9")
    return root


@pytest.mark.parametrize(
    ("make", "pattern", "message"),
    [
        (nothing, "*.txt", r"data\.path must name an existing file or folder, got .*gone"),
        (without_match, "*.txt", r"data\.pattern must match a file below .*, got '\*\.txt'"),
        (only_hidden, "*.txt", r"data\.pattern must match a file below"),
        (only_empty, "*.txt", r"data\.source must hold text, got 1 files without any"),
        (with_nul, "*.txt", r"data\.path must hold text files only, got a NUL byte at offset 3 in a\.txt"),
        (not_utf8, "*.txt", r"data\.path must hold text files only, got bytes that are not UTF-8 at offset 3 in a\.txt"),
        (only_empty, "", r"data\.pattern must be a glob below data\.path"),
        (only_empty, "/etc/*", r"data\.pattern must be a glob below data\.path"),
        (only_empty, "../*", r"data\.pattern must be a glob below data\.path"),
    ],
)
def test_unusable_folder_is_an_error_and_never_other_data(
    make: Callable[[Path], Path], pattern: str, message: str, tmp_path: Path
) -> None:
    config = DataConfig(source="folder", path=str(make(tmp_path)), pattern=pattern)
    with pytest.raises(ValueError, match=message):
        open_data(config, seed=0, seq_len=1)
