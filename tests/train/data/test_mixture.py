"""Several sources in one run: shares, order, and states that continue exactly."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from nsa.train.config import DataConfig, PartConfig, RecallConfig
from nsa.train.data import ByteTokenizer, DataBundle, TextSource, batch, collate, open_data
from nsa.train.data.mixture import MixtureSource
from tests.train.cases import write_text


def sources(*texts: bytes) -> list[TextSource]:
    """One text each, whose bytes tell it apart."""
    tokenizer = ByteTokenizer()
    return [TextSource([np.frombuffer(text, np.uint8)], 0, tokenizer.token_bytes) for text in texts]


def drawn(source: MixtureSource, seed: int, number: int) -> bytes:
    """First byte of each sequence."""
    indices = source.sampler(64, seed).next_indices(number)
    return bytes(int(source.sequence(64, index)[0]) for index in indices)


def test_sequences_are_drawn_by_weight():
    """Each source in its own random order, epoch after epoch."""
    number, weights = 8000, (5.0, 2.0, 1.0)
    parts = sources(b"a" * 9000, b"b" * 3000, b"c" * 700)
    source = MixtureSource(parts, weights)
    found = drawn(source, 3, number)
    for letter, weight in zip(b"abc", weights, strict=True):
        share = weight / 8
        error = math.sqrt(share * (1 - share) / number)
        assert abs(found.count(letter) / number - share) < 4 * error
    assert found == drawn(source, 3, number)
    assert found != drawn(source, 4, number)
    taken = source.sampler(64, 3).next_indices(number)
    for part, text in enumerate(parts):
        order = [index // 3 for index in taken if index % 3 == part]
        size = text.num_sequences(64)
        assert sorted(order[:size]) == list(range(size))
        assert order == text.sampler(64, 3 + part).next_indices(len(order))


def test_an_epoch_of_a_part_is_ordered_once(monkeypatch):
    """However many parts there are: the order of a large source takes long."""
    order = Mock(side_effect=batch._order)
    monkeypatch.setattr(batch, "_order", order)
    source = MixtureSource(sources(*[b"a" * 64 * 300] * 4), [1.0] * 4)
    source.sampler(64, 1).next_indices(400)
    assert sorted(call.args for call in order.call_args_list) == [
        (299, seed, 0) for seed in (1, 2, 3, 4)
    ]


def mixed(path: Path, *parts: PartConfig, **settings: Any) -> DataBundle:
    config = DataConfig(source="folder", path=str(write_text(path)), mixture=parts, **settings)
    return open_data(config, seed=5, seq_len=128)


@pytest.mark.parametrize("second", ["folder", "stream"])
def test_ranks_and_resumption(tmp_path, second):
    """The same sequences in the same order on any number of ranks, and from any state on."""
    other = PartConfig(2, second, str(write_text(tmp_path / "other")), recall=RecallConfig())

    def opened() -> DataBundle:
        return mixed(tmp_path / "text", PartConfig(), other)

    def tokens(data: DataBundle, indices: list[int]) -> list[int]:
        batch = collate(data.train, indices, 128, document_mask=True)
        return batch.tokens.reshape(-1, 128).tolist()

    alone = opened()
    sampler, expected, states = alone.sampler(128, 5), [], []
    for _ in range(6):
        states.append(json.loads(json.dumps(sampler.state_dict())))
        expected.append(tokens(alone, sampler.next_indices(4)))
    ranks = [(data := opened(), data.sampler(128, 5)) for _ in range(2)]
    for step in range(6):
        found = []
        for rank, (data, one) in enumerate(ranks):
            found += tokens(data, one.next_indices(2, rank=rank, world_size=2))
        assert found == expected[step]
        assert ranks[0][1].state_dict() == ranks[1][1].state_dict()
    for step in (1, 4):
        resumed = opened()
        again = resumed.sampler(128, 5)
        again.load_state_dict(states[step])
        assert again.state_dict() == states[step]
        assert tokens(resumed, again.next_indices(4)) == expected[step]
    with pytest.raises(ValueError, match=r"seed must equal this run's \(6\), got 5"):
        alone.sampler(128, 6).load_state_dict(states[0])


def test_documents_that_fit_into_a_micro_batch():
    """The bound holds for any sequences of the parts together."""
    texts = [b"a" * 500 + b"b\0" * 30 + b"a" * 700, b"c" * 64 + b"d\0e\0" * 16 + b"c" * 640]
    source = MixtureSource(sources(*texts), [1.0, 1.0])
    most = source.most_sequences(64, 2)
    every = [2 * index + part for part, text in enumerate(source.parts) for index in range(11)]
    counts = sorted(
        collate(source, [index], 64, document_mask=True).num_sequences for index in every
    )
    assert most is not None
    assert sum(counts[-2:]) <= most <= 1.1 * sum(counts[-2:])


def test_a_part_takes_what_it_does_not_set(tmp_path):
    path = str(write_text(tmp_path))
    recall = RecallConfig(0.25)
    config = DataConfig(
        source="folder",
        path=path,
        pattern="0*.txt",
        validation_fraction=0.2,
        mixture=(PartConfig(3), PartConfig(recall=recall), PartConfig(source="corpus")),
    )
    first, second, third = config.parts
    assert first == DataConfig("folder", path, "0*.txt", validation_fraction=0.2)
    assert second == DataConfig("folder", path, "0*.txt", validation_fraction=0.2, recall=recall)
    assert third == DataConfig("corpus", validation_fraction=0.2)
    assert first.parts == [first]


def test_validation_and_description(tmp_path):
    """Validation text is that of the first part; a resumed run compares the text of all parts."""
    other = write_text(tmp_path / "other")
    for number in range(9):
        (other / f"more-{number}.txt").write_text(f"{number} of another length " * 40)
    part = PartConfig(source="folder", path=str(other), recall=RecallConfig())
    path = tmp_path / "text"
    data, alone = mixed(path, PartConfig(), part), mixed(path)
    assert data.validation.sequence(64, 0).tolist() == alone.validation.sequence(64, 0).tolist()
    assert isinstance(data.train, MixtureSource)
    assert data.train.text is not None
    (second,) = data.description.pop("mixture")
    assert data.description == alone.description
    assert second["train_sha256"] != alone.description["train_sha256"]


def test_mistakes_name_the_part():
    for settings, message in (
        ({"mixture": [{"weight": 0}]}, "weight must be positive, got 0.0"),
        ({"mixture": [{}, {"path": "x"}]}, r"mixture\.1\.path must be given with source folder"),
        ({"mixture": [{"source": "copy"}]}, "source must be corpus, stdlib, folder, shards"),
        ({"source": "copy", "mixture": [{}]}, r"mixture must be left at \(\) with source copy"),
    ):
        with pytest.raises(ValueError, match=message):
            DataConfig(**settings)
