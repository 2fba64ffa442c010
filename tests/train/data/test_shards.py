from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa.errors import UserError
from nsa.train.data import (
    ByteTokenizer,
    DataUnavailableError,
    ShardSource,
    TextSource,
    open_shards,
)
from nsa.train.data import shards as shards_module
from nsa.train.data.documents import SIDES
from nsa.train.data.shards import (
    INDEX,
    PROGRESS,
    STAMP,
    TOKENIZER,
    ShardFolder,
    ShardWriter,
    with_digest,
)

BYTES = ByteTokenizer()


def write(writer: ShardWriter, documents: list[np.ndarray]) -> None:
    for document in documents:
        writer.append(document)


@pytest.fixture
def folder(tmp_path):
    """Prepared data without a preparation: byte tokens, no test split."""
    texts = {"train": [b"%d " % i * (1 + i % 9) for i in range(50)], "validation": [b"text"] * 9}
    folder, sides = tmp_path / "set", {}
    folder.mkdir()
    for side in SIDES[:2]:
        writer = ShardWriter(folder, side, 256, shard_tokens=100)
        write(writer, BYTES.encode_documents(texts[side]))
        sides[side] = {"shards": writer.finish()}
    BYTES.save(folder / TOKENIZER)
    tokenizer = {"fingerprint": BYTES.fingerprint}
    write_index(folder, {"format": 1, "tokenizer": tokenizer, "sides": sides})
    return folder


@given(data=st.data())
def test_sequences_are_those_of_the_text_however_it_was_written(data, tmp_path_factory):
    """Shards of any size; a writer that continues after a commit removes what came after it."""
    lengths = data.draw(st.lists(st.integers(2, 30), min_size=2, max_size=30))
    shard_tokens, seq_len = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 50))
    cut = data.draw(st.integers(0, len(lengths)))
    more = data.draw(st.integers(cut, len(lengths)))
    texts = [bytes([1 + i % 255]) * (length - 1) for i, length in enumerate(lengths)]
    documents = BYTES.encode_documents(texts)
    folders = [tmp_path_factory.mktemp("set") for _ in range(2)]
    whole, first = (ShardWriter(folder, "train", 256, shard_tokens) for folder in folders)
    write(whole, documents)
    write(first, documents[:cut])
    committed = json.loads(json.dumps(first.commit()))
    write(first, documents[cut:more])
    first.commit()
    second = ShardWriter(folders[1], "train", 256, shard_tokens, committed)
    assert (second.total("tokens"), second.total("documents")) == (sum(lengths[:cut]), cut)
    write(second, documents[cut:])
    shards = second.finish()
    assert shards == whole.finish()
    assert all(shard["tokens"] >= shard_tokens for shard in shards[:-1])
    files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders]
    assert files[0] == files[1]
    index = {"sides": {"train": {"shards": shards}}}
    source = ShardSource(ShardFolder(folders[1], index, BYTES), "train")
    expected = TextSource(documents, 0, BYTES.token_bytes)
    assert source.num_tokens == expected.num_tokens
    for number in range(expected.num_sequences(seq_len)):
        assert np.array_equal(source.sequence(seq_len, number), expected.sequence(seq_len, number))
    assert source.most_sequences(seq_len, 3) == expected.most_sequences(seq_len, 3)
    assert source.document_starts().tolist() == expected.document_starts().tolist()
    path = folders[1] / "train-00000.tokens"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(
        UserError, match=r"00000\.tokens must have the \d+ bytes written .*, got \d"
    ):
        ShardWriter(folders[1], "train", 256, shard_tokens, shards)
    for folder in folders:
        shutil.rmtree(folder)


def write_index(folder: Path, index: dict[str, Any]) -> None:
    (folder / INDEX).write_text(json.dumps(with_digest(index)))


def test_folders_without_prepared_data_are_named(tmp_path):
    message = r"index\.json must exist, got nothing\. Make it with: nsa data prepare"
    with pytest.raises(DataUnavailableError, match=message):
        open_shards(tmp_path / "gone")
    (tmp_path / PROGRESS).write_text("{}")
    message = r"index\.json must exist, got an interrupted preparation\. Give the same"
    with pytest.raises(UserError, match=message):
        open_shards(tmp_path)


def test_contents_are_verified_once_and_after_every_change(folder, monkeypatch, caplog):
    caplog.set_level("INFO", logger="nsa")
    for verify, number in ((False, 1), (False, 1), (True, 2)):
        open_shards(folder, verify=verify)
        assert caplog.text.count("verifying") == number
    path = folder / "train-00001.tokens"
    times, raw = path.stat(), path.read_bytes()
    path.write_bytes(raw[:-1] + b"\1")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # the change leaves one trace
    with pytest.raises(UserError, match=r"train-00001\.tokens must have the SHA-256 of index\.js"):
        open_shards(folder)
    path.write_bytes(raw)

    def refuse(path, text):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shards_module, "replace_text", refuse)
    for _ in range(2):
        open_shards(folder)
    assert caplog.text.count("verifying") == 5
    assert f"{STAMP} cannot be written (Permission denied)" in caplog.text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (INDEX, "{", "be JSON with the SHA-256 that it says, got a damaged file"),
        (INDEX, '{"format": 1, "sha256": "0"}', "be JSON with the SHA-256 that it says"),
        (INDEX, {"format": 2}, "be of format 1, got 2"),
        (INDEX, {"tokenizer": {"fingerprint": "0"}}, "have the fingerprint of index.json"),
        ("train-00001.tokens", "x", r"have \d+ bytes, as index\.json says, got 1"),
        ("validation-00000.offsets", "", r"have \d+ bytes, as index\.json says, got 0"),
        (TOKENIZER, "{", "be a JSON file, got"),
    ],
)
def test_damaged_files_are_refused(name, content, message, folder):
    path = folder / name
    if isinstance(content, dict):
        write_index(folder, json.loads(path.read_text()) | content)
    else:
        path.write_text(content)
    with pytest.raises(UserError, match=f"must {message}") as caught:
        open_shards(folder)
    assert (TOKENIZER if "fingerprint" in message else name) in str(caught.value)
