from __future__ import annotations

import json
from typing import Any

import pytest

from nsa.train.config import DataConfig
from nsa.train.data import (
    ByteTokenizer,
    DataBundle,
    TextSource,
    bundle,
    make_tokenizer,
    open_data,
)
from nsa.train.data.documents import corpus_files, split_documents
from tests.train.data.data_sets import write_folder


def open_text(config: DataConfig, seq_len: int = 128, **how: Any) -> tuple[DataBundle, Any, Any]:
    data = open_data(config, seed=how.pop("seed", 1), seq_len=seq_len, **how)
    assert isinstance(data.train, TextSource)
    assert isinstance(data.validation, TextSource)
    assert json.loads(json.dumps(data.description)) == data.description
    return data, data.train, data.validation


@pytest.mark.parametrize("tokenizer", ["byte", "gpt2", "bpe"])
def test_corpus_opens_with_every_tokenizer(tokenizer):
    data, *sources = open_text(DataConfig(tokenizer=tokenizer, bpe_vocab_size=512))
    split = split_documents(corpus_files().documents, 0.1)
    for side, source in zip(("train", "validation"), sources, strict=True):
        texts = [document.text for document in getattr(split, side)]
        size = sum(map(len, texts))
        assert data.tokenizer.decode(source.tokens) == b"".join(texts)
        assert (source.tokens == data.tokenizer.separator_id).sum() == len(texts)
        assert int(source.token_bytes[source.tokens].sum()) == size
        found = [data.description[f"{side}_{name}"] for name in ("bytes", "documents", "windows")]
        assert found == [size, len(texts), source.num_sequences(128)]
    assert data.description["vocab_size"] == data.tokenizer.vocab_size
    assert data.description["validation_names"] == ["macbeth.txt"]
    assert "Public domain" in data.description["provenance"]


def test_hash_follows_the_text_and_its_division(tmp_path):
    hashes = set()
    for number, texts in enumerate((["a" * 200, "b" * 200], ["a" * 200 + "b" * 200])):
        folder = write_folder(tmp_path / str(number), "txt", texts)
        description = open_text(DataConfig("folder", str(folder)), 8)[0].description
        hashes.add((description["train_sha256"], description["validation_sha256"]))
    assert len(hashes) == 2


def test_bpe_learns_from_training_text_alone(tmp_path, monkeypatch):
    """A word that only the validation text has must not become a token."""
    path = tmp_path / "text.txt"
    path.write_text("common words here\n" * 900 + "zyzzyva quixotic\n" * 100)
    given: list[bytes] = []

    def spy(config, texts):
        given.extend(texts)
        return make_tokenizer(config, given)

    monkeypatch.setattr(bundle, "make_tokenizer", spy)
    config = DataConfig("folder", str(path), tokenizer="bpe", bpe_vocab_size=270)
    data, _, validation = open_text(config, 64)
    assert b"zyzzyva" not in b"".join(given)
    assert b"zyzzyva" in data.tokenizer.decode(validation.tokens)
    assert len(data.tokenizer.encode("zyzzyva")) == 7
    assert len(data.tokenizer.encode("common")) < 6


def test_run_folder_tokenizer_is_taken_as_it_is(tmp_path):
    path = tmp_path / "tokenizer.json"
    config = DataConfig(tokenizer="bpe", bpe_vocab_size=400)
    first = open_text(config)[0]
    first.tokenizer.save(path)
    assert open_text(config, run_folder_tokenizer=path)[0].description == first.description
    ByteTokenizer(separator=False).save(path)
    for changed, message in (
        (DataConfig(tokenizer="gpt2"), r"be of the configured kind \(gpt2\), got byte"),
        (DataConfig(), "have a separator if and only if the data are text"),
    ):
        with pytest.raises(ValueError, match=f"run_folder_tokenizer must {message}"):
            open_text(changed, run_folder_tokenizer=path)


@pytest.mark.parametrize(("size", "side"), [(101, "validation"), (901, "train")])
def test_text_shorter_than_a_window_names_the_sizes(size, side, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("x" * 1000)
    config = DataConfig("folder", str(path))
    assert open_text(config, 100)[0].description["validation_windows"] == 1
    message = rf"seq_len must be below the {size} tokens of the {side} text \({size - 1} bytes\)"
    with pytest.raises(ValueError, match=message):
        open_text(config, size)


def test_standard_library_opens():
    data, train, _ = open_text(DataConfig("stdlib"), 2048)
    description = data.description
    assert b"\xff" not in train.tokens.tobytes()
    assert description["split_rule"] == "documents"
    assert 0.09 < description["validation_share"] <= 0.1
    assert description["train_bytes"] > 3_000_000
    assert "Python Software Foundation License" in description["provenance"]
