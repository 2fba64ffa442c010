from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.errors import UserError
from nsa.train.config import DataConfig
from nsa.train.data import ByteTokenizer, Origin, StreamSource, collate
from nsa.train.data.documents import side_of
from nsa.train.data.stream import BEGINNING, StreamSampler, read_validation
from tests.train.data.data_sets import make_texts, write_folder, write_jsonl

TEXTS = make_texts(2500, longest=6)
SHARE = 0.2
TRAIN = np.frombuffer(
    b"".join(t.encode() + b"\0" for t in TEXTS if side_of(t.encode(), SHARE) == "train"),
    np.uint8,
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("source") / "set", "jsonl", TEXTS)


def config_of(source: Path, wanted: int = 1) -> DataConfig:
    path = str(source)
    return DataConfig("stream", path, validation_fraction=SHARE, validation_tokens=wanted)


def stream(source: Path) -> StreamSource:
    return StreamSource(Origin(str(source)), ByteTokenizer(), config_of(source))


def tokens_at(start: int, stop: int) -> np.ndarray:
    """Of the training documents over and over."""
    return TRAIN[np.arange(start, stop) % len(TRAIN)]


def test_windows_are_the_training_documents_over_and_over(source: Path) -> None:
    made, seq_len = stream(source), 1000
    for index in range(2 * len(TRAIN) // seq_len):
        window = made.window(seq_len, index)
        assert window.dtype == np.int64
        assert np.array_equal(window, tokens_at(index * seq_len, (index + 1) * seq_len + 1))
    with pytest.raises(
        ValueError,
        match=r"StreamSource\.window: index must be at least \d+, windows do not come back, got 0",
    ):
        made.window(seq_len, 0)
    made.close()


@settings(max_examples=12)
@given(data=st.data())
def test_state_resumes_exactly_at_every_window(data: st.DataObject, source: Path) -> None:
    """At any position, in any epoch; the state is plain integers."""
    seq_len, position = data.draw(st.integers(1, 3000)), data.draw(st.integers(0, 60))
    first = stream(source)
    sampler = StreamSampler(first, seq_len)
    for _ in range(position):
        (index,) = sampler.next_windows(1)
        first.window(seq_len, index)
    state = json.loads(json.dumps(sampler.state_dict()))
    assert set(state) == {"position", *BEGINNING}
    assert state["position"] == position
    second = stream(source)
    resumed = StreamSampler(second, seq_len)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    for _ in range(3):
        (index,) = resumed.next_windows(1)
        assert np.array_equal(
            second.window(seq_len, index),
            tokens_at(index * seq_len, (index + 1) * seq_len + 1),
        )
    assert sampler.state_dict() == state  # setting one moves no other
    first.close()
    second.close()


def test_two_samplers_of_one_stream_follow_each_other(source: Path) -> None:
    """One draws ahead, the other is told how far training has come."""
    made = stream(source)
    ahead, behind = StreamSampler(made, 100), StreamSampler(made, 100)
    batches = []
    for _ in range(5):
        batches.append(collate(made, ahead.next_windows(3), 100, document_mask=True))
        behind.load_state_dict(ahead.state_dict())
        assert behind.state_dict() == ahead.state_dict()
    assert np.array_equal(
        np.concatenate([batch.tokens.numpy() for batch in batches]),
        tokens_at(0, 1500),
    )
    made.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_windows(source: Path, world_size: int) -> None:
    """Each rank reads the stream and takes its own windows; the state is that of all of them."""
    ranks = [stream(source) for _ in range(world_size)]
    samplers = [StreamSampler(rank, 50) for rank in ranks]
    drawn = []
    for _ in range(4):
        for rank, sampler in enumerate(samplers):
            indices = sampler.next_windows(2, rank=rank, world_size=world_size)
            drawn += [ranks[rank].window(50, index)[:-1] for index in indices]
    assert np.array_equal(np.concatenate(drawn), tokens_at(0, 4 * 2 * world_size * 50))
    assert len({json.dumps(sampler.state_dict()) for sampler in samplers}) == 1
    for made in ranks:
        made.close()


def test_validation_documents_are_the_first_ones(source: Path) -> None:
    expected = [text for text in map(str.encode, TEXTS) if side_of(text, SHARE) == "validation"]
    sizes = np.cumsum([len(text) + 1 for text in expected])
    for wanted in (1, 500, int(sizes[-1]), 10**9):
        config = config_of(source, wanted)
        _, rows, tokens = read_validation(Origin(str(source)), ByteTokenizer(), config)
        kept = expected[: int(np.searchsorted(sizes, wanted)) + 1]
        assert tokens.tobytes() == b"".join(text + b"\0" for text in kept)
        assert [row.num_bytes for row in rows] == list(map(len, kept))


def test_data_without_training_text_are_an_error(tmp_path: Path) -> None:
    made = stream(write_jsonl(tmp_path / "a.jsonl", ["", "", ""]))
    with pytest.raises(
        UserError,
        match=r"data\.path must hold training text, got none in .*a\.jsonl",
    ):
        made.window(10, 0)
