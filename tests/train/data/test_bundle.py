from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nsa.train.config import DataConfig
from nsa.train.data import ByteTokenizer, TextSource, bundle, collate, make_tokenizer, open_data
from nsa.train.data.documents import corpus_files, split_documents


@pytest.mark.parametrize("tokenizer", ["byte", "gpt2", "bpe"])
def test_corpus_opens_with_every_tokenizer(tokenizer: Any) -> None:
    data = open_data(DataConfig(tokenizer=tokenizer, bpe_vocab_size=512), seed=1, seq_len=128)
    assert isinstance(data.train, TextSource)
    assert isinstance(data.validation, TextSource)
    split = split_documents(corpus_files().documents, 0.1)
    for side, source, pieces in (("train", data.train, split.train), ("validation", data.validation, split.validation)):
        text = b"".join(piece.text for piece in pieces)
        assert data.tokenizer.decode(source.tokens) == text
        assert int((source.tokens == data.tokenizer.separator_id).sum()) == len(pieces)
        assert int(source.token_bytes[source.tokens].sum()) == len(text)
        assert data.description[f"{side}_bytes"] == len(text)
        assert data.description[f"{side}_documents"] == len(pieces)
        assert data.description[f"{side}_tokens"] == len(source.tokens)
        assert data.description[f"{side}_windows"] == source.num_windows(128)
    assert data.description["vocab_size"] == data.tokenizer.vocab_size
    assert data.description["validation_names"] == ["macbeth.txt"]
    assert "Public domain" in data.description["provenance"]
    assert json.loads(json.dumps(data.description)) == data.description


def test_same_configuration_gives_the_same_data_whatever_the_seed() -> None:
    config = DataConfig(tokenizer="bpe", bpe_vocab_size=400)
    first, second = (open_data(config, seed=seed, seq_len=128) for seed in (1, 2))
    assert first.description == second.description
    a, b = (collate(data.train, [5], 128, document_mask=True) for data in (first, second))
    assert a.tokens.equal(b.tokens)


def test_hash_follows_the_text_and_its_division(tmp_path: Path) -> None:
    hashes = set()
    for i, texts in enumerate((["one " * 50, "two " * 50], ["one " * 50 + "two " * 50], ["one " * 50, "twO " * 50])):
        folder = tmp_path / str(i)
        folder.mkdir()
        for j, text in enumerate(texts):
            (folder / f"{j}.txt").write_text(text)
        description = open_data(DataConfig(source="folder", path=str(folder)), seed=0, seq_len=8).description
        hashes.add((description["train_sha256"], description["validation_sha256"]))
    assert len(hashes) == 3


def test_bpe_learns_from_training_text_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A word that only the held-out tail has must not become a token."""
    path = tmp_path / "text.txt"
    path.write_text("common words here\n" * 900 + "zyzzyva quixotic\n" * 100)
    config = DataConfig(source="folder", path=str(path), tokenizer="bpe", bpe_vocab_size=270)
    given: list[bytes] = []

    def spy(config: DataConfig, texts: list[bytes]) -> object:
        given.extend(texts)
        return make_tokenizer(config, given)

    monkeypatch.setattr(bundle, "make_tokenizer", spy)
    data = open_data(config, seed=0, seq_len=64)
    assert b"zyzzyva" not in b"".join(given)
    assert isinstance(data.validation, TextSource)
    assert b"zyzzyva" in data.tokenizer.decode(data.validation.tokens)
    assert len(data.tokenizer.encode("zyzzyva")) == 7
    assert len(data.tokenizer.encode("common")) < 6


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_run_folder_tokenizer_is_taken_as_it_is(tokenizer: Any, tmp_path: Path) -> None:
    config = DataConfig(tokenizer=tokenizer, bpe_vocab_size=400)
    first = open_data(config, seed=1, seq_len=128)
    first.tokenizer.save(tmp_path / "tokenizer.json")
    second = open_data(config, seed=1, seq_len=128, run_folder_tokenizer=tmp_path / "tokenizer.json")
    assert second.description == first.description
    with pytest.raises(ValueError, match=rf"run_folder_tokenizer must be of the configured kind \(gpt2\), got {tokenizer}"):
        open_data(DataConfig(tokenizer="gpt2"), seed=1, seq_len=128, run_folder_tokenizer=tmp_path / "tokenizer.json")


@pytest.mark.parametrize(("source", "separator"), [("corpus", False), ("copy", True)])
def test_run_folder_tokenizer_of_the_other_sort_is_an_error(source: Any, separator: bool, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    ByteTokenizer(separator=separator).save(path)
    with pytest.raises(ValueError, match="run_folder_tokenizer must have a separator if and only if the data are text"):
        open_data(DataConfig(source=source), seed=1, seq_len=128, run_folder_tokenizer=path)
    ByteTokenizer(separator=not separator).save(path)
    assert open_data(DataConfig(source=source), seed=1, seq_len=128, run_folder_tokenizer=path).tokenizer.kind == "byte"


def test_text_shorter_than_a_window_names_the_sizes(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("x" * 1000)
    config = DataConfig(source="folder", path=str(path))
    assert open_data(config, seed=0, seq_len=100).description["validation_windows"] == 1
    with pytest.raises(
        ValueError, match=r"seq_len must be below the 101 tokens of the validation text \(100 bytes\), got 101\. Take more"
    ):
        open_data(config, seed=0, seq_len=101)
    with pytest.raises(
        ValueError, match=r"seq_len must be below the 901 tokens of the training text \(900 bytes\), got 901\. Take more"
    ):
        open_data(config, seed=0, seq_len=901)


def test_standard_library_opens() -> None:
    data = open_data(DataConfig(source="stdlib"), seed=0, seq_len=2048)
    assert data.description["split_rule"] == "documents"
    assert 0.09 < data.description["validation_share"] <= 0.1
    assert data.description["train_bytes"] > 3_000_000
    assert "Python Software Foundation License" in data.description["provenance"]
    assert isinstance(data.train, TextSource)
    assert np.all(np.diff(np.flatnonzero(data.train.tokens == 0)) > 0)
