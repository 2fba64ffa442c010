from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nsa.errors import UserError
from nsa.train.config import DataConfig
from nsa.train.data import ByteTokenizer, Origin, StreamSource, collate
from nsa.train.data.documents import SIDES, side_of
from nsa.train.data.stream import BEGINNING, StreamSampler, read_held_out
from tests.train.data.data_sets import make_texts, write_folder, write_jsonl

TEXTS = make_texts(2500, longest=6)
SHARE, TEST_SHARE = 0.2, 0.1
DOCUMENTS: dict[str, list[bytes]] = {
    side: [t.encode() for t in TEXTS if side_of(t.encode(), SHARE, TEST_SHARE) == side]
    for side in SIDES
}
TRAIN = np.frombuffer(b"".join(text + b"\0" for text in DOCUMENTS["train"]), np.uint8)
Open = Callable[[], StreamSource]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("source") / "set", "jsonl", TEXTS)


def config_of(source: Path, wanted: int = 1) -> DataConfig:
    return DataConfig(
        "stream",
        str(source),
        validation_fraction=SHARE,
        test_fraction=TEST_SHARE,
        validation_tokens=wanted,
    )


@pytest.fixture
def stream(source):
    """Makes streams, and closes them after the test."""
    made: list[StreamSource] = []

    def open_stream():
        made.append(StreamSource(Origin(str(source)), ByteTokenizer(), config_of(source)))
        return made[-1]

    yield open_stream
    for opened in made:
        opened.close()


def tokens_at(start: int, stop: int) -> list[int]:
    """Of the training documents over and over."""
    return TRAIN[np.arange(start, stop) % len(TRAIN)].tolist()


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seq_len=st.integers(1, 3000), position=st.integers(0, 60))
def test_state_resumes_exactly_at_every_sequence(seq_len, position, stream):
    """At any position, in any epoch; the state is plain integers."""
    first, second = stream(), stream()
    sampler, resumed = StreamSampler(first, seq_len), StreamSampler(second, seq_len)
    for _ in range(position):
        (index,) = sampler.next_indices(1)
        first.sequence(seq_len, index)
    state = json.loads(json.dumps(sampler.state_dict()))
    assert set(state) == {"position", "seq_len", *BEGINNING}
    assert state["position"] == position
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    for expected in range(position, position + 3):
        assert resumed.next_indices(1) == [expected]
        tokens = tokens_at(expected * seq_len, (expected + 1) * seq_len + 1)
        assert second.sequence(seq_len, expected).tolist() == tokens
    assert sampler.state_dict() == state  # setting one moves no other
    first.close()
    second.close()


def test_ranks_share_the_sequences(stream):
    """Each rank reads the stream and takes its own sequences; all have the same state.

    Another sampler of the same stream is told how far training has come.
    """
    ranks = [(made := stream(), StreamSampler(made, 50)) for _ in range(3)]
    drawn, behind = [], StreamSampler(ranks[0][0], 50)
    for _ in range(4):
        for rank, (made, sampler) in enumerate(ranks):
            indices = sampler.next_indices(2, rank=rank, world_size=3)
            drawn += collate(made, indices, 50, document_mask=True).tokens.tolist()
        behind.load_state_dict(ranks[0][1].state_dict())
        assert all(sampler.state_dict() == behind.state_dict() for _, sampler in ranks)
    assert drawn == tokens_at(0, 4 * 2 * 3 * 50)


@pytest.mark.parametrize("test_share", [0.0, TEST_SHARE])
def test_held_out_documents_are_the_first_ones(source, test_share):
    """Validation is the same with and without a test split."""
    sides = SIDES[1:] if test_share else SIDES[1:2]
    totals = [sum(len(text) + 1 for text in DOCUMENTS[side]) for side in sides]
    for wanted in (1, 500, *totals, 10**9):
        config = replace(config_of(source, wanted), test_fraction=test_share)
        _, held_out = read_held_out(Origin(str(source)), ByteTokenizer(), config)
        assert tuple(held_out) == sides
        for side, rows in held_out.items():
            sizes = np.cumsum([len(text) + 1 for text in DOCUMENTS[side]])
            kept = DOCUMENTS[side][: int(np.searchsorted(sizes, wanted)) + 1]
            assert [row.tokens.tobytes() for row in rows] == [text + b"\0" for text in kept]


def test_data_without_training_text_are_an_error(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["", "", ""])
    made = StreamSource(Origin(str(path)), ByteTokenizer(), config_of(path))
    message = r"data\.path must contain training text, got none in .*a\.jsonl"
    with pytest.raises(UserError, match=message):
        made.sequence(10, 0)
