from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa.train.data import ByteTokenizer, DataUnavailableError, ShardError, ShardFolder, TextSource, open_shards
from nsa.train.data import shards as shards_module
from nsa.train.data.shard_writer import ShardWriter
from nsa.train.data.shards import INDEX, OFFSET_DTYPE, PROGRESS, STAMP, TOKENIZER, Shard, index_digest, shard_dtype
from nsa.train.data.tokenise import SIDES

TOKENIZER_USED = ByteTokenizer()


def write_shards(folder: Path, documents: dict[str, list[bytes]], shard_tokens: int) -> Path:
    """Prepared data without a preparation: byte tokens."""
    folder.mkdir()
    sides: dict[str, Any] = {}
    for side in SIDES:
        writer = ShardWriter(folder, side, np.dtype("u1"), shard_tokens, None)
        texts = documents[side]
        if texts:
            joined = b"".join(text + b"\0" for text in texts)
            writer.append(np.frombuffer(joined, np.uint8), np.array([len(text) + 1 for text in texts]))
        sides[side] = {
            "tokens": writer.num_tokens,
            "documents": writer.num_documents,
            "text_bytes": 0,
            "shards": writer.finish(),
        }
    TOKENIZER_USED.save(folder / TOKENIZER)
    named = {"kind": "byte", "vocab_size": 256, "separator_id": 0, "fingerprint": TOKENIZER_USED.fingerprint}
    source = dict.fromkeys(("name", "subset", "split", "revision", "licence"), "x")
    request = {"validation_fraction": 0.1}
    write_index(folder, {"format": 1, "request": request, "source": source, "tokenizer": named, "sides": sides})
    return folder


def write_index(folder: Path, index: dict[str, Any]) -> None:
    (folder / INDEX).write_text(json.dumps({**index, "sha256": index_digest(index)}))


def as_text_source(documents: list[bytes]) -> TextSource:
    return TextSource(TOKENIZER_USED.encode_batch(documents), 0, TOKENIZER_USED.token_bytes)


DOCUMENTS = {"train": [b"%d " % i * (1 + i % 9) for i in range(50)], "validation": [b"held %d" % i for i in range(9)]}


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    shard_tokens=st.integers(1, 60),
    cuts=st.lists(st.integers(0, 40), max_size=5),
    seq_len=st.integers(1, 50),
)
def test_windows_are_those_of_the_text_however_it_was_written(
    lengths: list[int], shard_tokens: int, cuts: list[int], seq_len: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Shards of any size, documents in batches of any size, windows across shards."""
    folder = tmp_path_factory.mktemp("set")
    documents = [bytes([1 + i % 255]) * (length - 1) for i, length in enumerate(lengths)]
    writer = ShardWriter(folder, "train", np.dtype("u1"), shard_tokens, None)
    borders = sorted({0, len(lengths), *(cut for cut in cuts if cut < len(lengths))})
    for first, last in itertools.pairwise(borders):
        tokens = np.frombuffer(b"".join(text + b"\0" for text in documents[first:last]), np.uint8)
        writer.append(tokens, np.array(lengths[first:last]))
    shards = writer.finish()
    opened = ShardFolder(folder, {}, {"train": tuple(Shard(**shard) for shard in shards)}, TOKENIZER_USED)
    source, expected = opened.source("train"), as_text_source(documents)
    assert source.num_tokens == sum(lengths)
    assert source.num_windows(seq_len) == expected.num_windows(seq_len)
    for number in range(source.num_windows(seq_len)):
        window = source.window(seq_len, number)
        assert window.dtype == np.int64
        assert np.array_equal(window, expected.window(seq_len, number))
    assert source.most_sequences(seq_len, 3) == expected.most_sequences(seq_len, 3)
    assert np.array_equal(source.tokens(0, 10**9), expected.tokens)
    check_shards(folder, shards, shard_tokens)
    shutil.rmtree(folder)


def check_shards(folder: Path, shards: list[dict[str, Any]], shard_tokens: int) -> None:
    """Each begins with a document, all but the last reach the size, and offsets point behind separators."""
    assert [shard["name"] for shard in shards] == [f"train-{i:05d}" for i in range(len(shards))]
    for number, shard in enumerate(shards):
        tokens = np.fromfile(folder / f"{shard['name']}.tokens", np.uint8)
        offsets = np.fromfile(folder / f"{shard['name']}.offsets", OFFSET_DTYPE)
        assert (len(tokens), len(offsets)) == (shard["tokens"], shard["documents"])
        assert offsets.tolist() == [0, *(np.flatnonzero(tokens == 0)[:-1] + 1)]
        assert number == len(shards) - 1 or offsets[-1] < shard_tokens <= len(tokens)


@given(data=st.data())
def test_writer_continues_from_every_commit(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever was written after the commit, torn or whole, is gone, and the files become those of a single run."""
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=2, max_size=20))
    shard_tokens, cut = data.draw(st.integers(1, 40)), data.draw(st.integers(0, len(lengths)))
    tokens = np.arange(sum(lengths), dtype=np.uint16)
    folders = [tmp_path_factory.mktemp("set") for _ in range(2)]
    whole = ShardWriter(folders[0], "train", np.dtype("<u2"), shard_tokens, None)
    whole.append(tokens, np.array(lengths))
    first, border = ShardWriter(folders[1], "train", np.dtype("<u2"), shard_tokens, None), sum(lengths[:cut])
    first.append(tokens[:border], np.array(lengths[:cut], dtype=np.int64))
    committed = json.loads(json.dumps(first.commit()))
    more = data.draw(st.integers(cut, len(lengths)))
    first.append(tokens[border : sum(lengths[:more])], np.array(lengths[cut:more], dtype=np.int64))
    first.close()
    second = ShardWriter(folders[1], "train", np.dtype("<u2"), shard_tokens, committed)
    assert (second.num_tokens, second.num_documents) == (border, cut)
    second.append(tokens[border:], np.array(lengths[cut:], dtype=np.int64))
    assert second.finish() == whole.finish()
    contents = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders]
    assert contents[0] == contents[1]
    for folder in folders:
        shutil.rmtree(folder)


def test_writer_refuses_files_that_lack_what_was_committed(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "train", np.dtype("u1"), 4, None)
    writer.append(np.ones(6, np.uint8), np.array([4, 2]))
    committed = writer.commit()
    writer.close()
    with (tmp_path / "train-00001.tokens").open("r+b") as file:
        file.truncate(1)
    with pytest.raises(ShardError, match=r"train-00001\.tokens must have the 2 bytes written before the interruption, got 1"):
        ShardWriter(tmp_path, "train", np.dtype("u1"), 4, committed)
    (tmp_path / "train-00000.offsets").unlink()
    with pytest.raises(ShardError, match=r"train-00000\.offsets must have the 8 bytes written before .*, got nothing"):
        ShardWriter(tmp_path, "train", np.dtype("u1"), 4, committed)


def test_tokens_on_disk_are_little_endian() -> None:
    assert [shard_dtype(size).str for size in (256, 257, 65536, 65537)] == ["|u1", "<u2", "<u2", "<u4"]


def test_contents_are_verified_once_and_after_every_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_shards(tmp_path / "set", DOCUMENTS, 100)
    read: list[str] = []
    real = shards_module._sha256

    def spy(path: Path) -> str:
        read.append(path.name)
        return real(path)

    monkeypatch.setattr(shards_module, "_sha256", spy)
    opened = open_shards(folder)
    assert sorted(read) == sorted(opened.files())
    assert opened.source("train").num_tokens == sum(len(text) + 1 for text in DOCUMENTS["train"])
    read.clear()
    open_shards(folder)
    assert not read
    open_shards(folder, verify=True)
    assert sorted(read) == sorted(opened.files())
    read.clear()
    times = (folder / "train-00001.tokens").stat()
    raw = (folder / "train-00001.tokens").read_bytes()
    (folder / "train-00001.tokens").write_bytes(raw[:-1] + b"\1")
    os.utime(folder / "train-00001.tokens", ns=(times.st_atime_ns, times.st_mtime_ns))  # the change leaves no trace but one
    with pytest.raises(ShardError, match=r"train-00001\.tokens must have the SHA-256 of index\.json, got other content"):
        open_shards(folder)
    assert read


def test_folder_without_write_permission_is_verified_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    folder = write_shards(tmp_path / "set", DOCUMENTS, 100)

    def refuse(path: Path, text: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shards_module, "replace_text", refuse)
    with caplog.at_level("INFO", logger="nsa"):
        for _ in range(2):
            open_shards(folder)
    assert caplog.text.count("verifying") == 2
    assert f"{STAMP} cannot be written (Permission denied)" in caplog.text


def test_what_is_no_prepared_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        DataUnavailableError, match=r"gone/index\.json must exist, got nothing\. Make it with: nsa data prepare"
    ):
        open_shards(tmp_path / "gone")
    (tmp_path / PROGRESS).write_text("{}")
    with pytest.raises(ShardError, match=r"index\.json must exist, got an interrupted preparation\. Give the same"):
        open_shards(tmp_path)


def test_wrong_indexes_are_refused(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "set", DOCUMENTS, 100)
    good = json.loads((folder / INDEX).read_text())
    for text, message in (
        ("{", r"index\.json must be JSON, got a damaged file"),
        ("[1]", r"index\.json must hold what its own SHA-256 says"),
        (json.dumps({**good, "format": 2}), r"index\.json must hold what its own SHA-256 says"),
    ):
        (folder / INDEX).write_text(text)
        with pytest.raises(ShardError, match=message):
            open_shards(folder)
    write_index(folder, {**good, "format": 2})
    with pytest.raises(ShardError, match=r"index\.json must be of format 1, got 2"):
        open_shards(folder)
    write_index(folder, {**good, "tokenizer": {**good["tokenizer"], "fingerprint": "0"}})
    with pytest.raises(ShardError, match=r"tokenizer\.json must have the fingerprint of index\.json \(0\)"):
        open_shards(folder)
    shard = good["sides"]["train"]["shards"][0]
    for change in (
        {"name": "../elsewhere"},
        {"tokens": "many"},
        {"documents": 0},
        {"more": 1},
        {"tokens": shard["tokens"] + 1},
    ):
        sides = {**good["sides"], "train": {**good["sides"]["train"], "shards": [{**shard, **change}]}}
        write_index(folder, {**good, "sides": sides})
        with pytest.raises(ShardError, match=r"index\.json must have the fields that docs/data\.md lists"):
            open_shards(folder)
    other = write_shards(tmp_path / "other", {**DOCUMENTS, "train": [*DOCUMENTS["train"], b"more"]}, 100)
    shutil.copy(other / INDEX, folder / INDEX)
    with pytest.raises(ShardError, match=r"train-\d+\.tokens must have \d+ bytes, as index\.json says, got \d+"):
        open_shards(folder)
