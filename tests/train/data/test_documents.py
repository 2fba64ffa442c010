from __future__ import annotations

from pathlib import Path

import pytest

from nsa.train.config import DataConfig
from nsa.train.data import Document, folder_files, open_data
from nsa.train.data.documents import corpus_files

CORPUS = Path(__file__).parents[3] / "nsa" / "train" / "data" / "corpus"


def test_corpus_is_whole_plays_as_they_came():
    plays = {play.name: play for play in corpus_files().documents}
    note = (CORPUS / "README.md").read_text(encoding="utf-8")
    assert len(plays) == 8
    for name, play in plays.items():
        assert b"by William Shakespeare" in play.text[:200]
        assert f"`{name}`" in note
    assert sum(len(play.text) for play in plays.values()) == 1_040_696
    assert plays["hamlet.txt"].sha256.startswith("bbe5635616c6e0e0")


def test_folder_is_recursive_sorted_and_without_hidden_files(tmp_path):
    texts = {"b.txt": "second", "a.txt": "first", "deep/er/c.txt": "third"}
    hidden = dict.fromkeys((".git/index.txt", ".hidden.txt", "deep/.cache/d.txt"), "\0")
    for name, text in {**texts, "code.py": "x = 1\n", "empty.txt": "", **hidden}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = [Document(name, texts[name].encode()) for name in sorted(texts)]
    assert folder_files(str(tmp_path), "*.txt").documents == found
    names = [document.name for document in folder_files(str(tmp_path)).documents]
    assert names == ["a.txt", "b.txt", "code.py", "deep/er/c.txt"]
    assert folder_files(str(tmp_path / "b.txt")).documents == [Document("b.txt", b"second")]


@pytest.mark.parametrize(
    ("name", "content", "pattern", "message"),
    [
        (None, b"", "*", r"data\.path must name an existing file or folder, got .*gone"),
        ("a.py", b"x", "*.txt", r"data\.pattern must match a file below .*, got '\*\.txt'"),
        (".a.txt", b"x", "*.txt", r"data\.pattern must match a file below"),
        (
            "a.txt",
            b"",
            "*",
            r"data\.path must contain files with text, got 1 without any: a\.txt",
        ),
        ("a.txt", b"abc\0def", "*", "text files only, got a NUL byte at offset 3 in a.txt"),
        ("a.txt", b"caf\xe9", "*", "text files only, got bytes that are not UTF-8 at offset 3 in"),
        ("a.txt", b"x", "", r"data\.pattern must be a glob below the folder"),
        ("a.txt", b"x", "/etc/*", r"data\.pattern must be a glob below the folder"),
        ("a.txt", b"x", "../*", r"data\.pattern must be a glob below the folder"),
    ],
)
def test_unusable_folder_is_an_error_and_never_other_data(
    name, content, pattern, message, tmp_path
):
    folder = tmp_path / "gone"
    if name is not None:
        folder.mkdir()
        (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        open_data(DataConfig(source="folder", path=str(folder), pattern=pattern), seed=0, seq_len=1)
