from __future__ import annotations

import math

import numpy as np
import pytest

from nsa.train.config import DataConfig
from nsa.train.data import collate, open_data
from nsa.train.data.synthetic import SyntheticSource

SHORTEST = {"uniform": 1, "copy": 2, "induction": 7, "needle": 17}


def known_answer(task: str, seen: list[int]) -> int | None:
    """The next token by the task's rule from the tokens before; None where it says nothing."""
    target = len(seen)
    if task == "copy" and 0 in seen:
        half = seen.index(0)
        return seen[target - half - 1] if target <= 2 * half else None
    if task == "induction" and target % 2 == 1:
        earlier = [i for i in range(0, target - 1, 2) if seen[i] == seen[-1]]
        return seen[earlier[0] + 1] if earlier else None
    if task == "needle" and seen.count(0) == 2:
        first, second = (i for i, token in enumerate(seen) if token == 0)
        return seen[first + target - second]
    return None


@pytest.mark.parametrize("task", ["copy", "induction", "needle"])
@pytest.mark.parametrize("seq_len", [17, 18, 64, 255])
def test_exactly_the_targets_with_a_known_answer_count(task, seq_len):
    source = SyntheticSource(task, "train", seed=1)
    for index in (0, 1, 77, source.num_sequences(seq_len) - 1):
        values = source.sequence(seq_len, index).tolist()
        assert len(values) == seq_len + 1
        assert {*values} <= {*range(256)}
        answers = [known_answer(task, values[:target]) for target in range(1, seq_len + 1)]
        counted = source.target_mask(seq_len, index)
        assert counted.tolist() == [answer is not None for answer in answers]
        assert counted.any()
        for answer, token in zip(answers, values[1:], strict=True):
            assert answer in (None, token)


def test_bytes_and_depths_are_uniform():
    needle = SyntheticSource("needle", "train", seed=1)
    depths = {needle.sequence(40, i).tolist().index(0) for i in range(800)}
    assert depths == set(range(41 - 2 * 9 + 1))
    source = SyntheticSource("uniform", "train", seed=1)
    tokens = np.concatenate([source.sequence(4096, i) for i in range(64)])
    counts = np.bincount(tokens, minlength=256) * 256 / len(tokens)
    assert 0.8 < counts.min() < counts.max() < 1.2
    assert source.target_mask(4096, 0).all()
    batch = collate(source, [0, 1], 64, document_mask=True)
    bits = source.ideal_loss * batch.num_targets / math.log(2)
    assert bits / batch.num_bytes == pytest.approx(8, abs=1e-12)
    assert batch.cu_seqlens.tolist() == [0, 64, 128]  # byte 0 is a byte like any other here


@pytest.mark.parametrize("task", SHORTEST)
def test_sequences_have_any_order_and_none_is_in_two_splits(task):
    train, again = (SyntheticSource(task, "train", seed=4) for _ in range(2))
    last = train.sequence(64, 900_000)
    assert np.array_equal(again.sequence(64, 900_000), last)
    others = SyntheticSource(task, "validation", seed=4), SyntheticSource(task, "train", seed=5)
    splits = [{source.sequence(64, i).tobytes() for i in range(200)} for source in (train, *others)]
    assert len(set.union(*splits)) == 600


@pytest.mark.parametrize(("task", "seq_len"), SHORTEST.items())
def test_tasks_are_opened_by_name(task, seq_len):
    """The shortest sequence works and a shorter one is an error."""
    data = open_data(DataConfig(source=task), seed=3, seq_len=seq_len)
    assert collate(data.train, [0], seq_len, document_mask=True).num_targets > 0
    assert data.description["synthetic"] is True
    assert data.description["ideal_loss_nats"] == (math.log(256) if task == "uniform" else 0)
    assert data.tokenizer.separator_id is None
    for config, length, message in (
        (DataConfig(task), seq_len - 1, f"seq_len must be at least {seq_len} for {task}, got"),
        (DataConfig(task, tokenizer="gpt2"), 32, f"data.tokenizer must be byte for .* {task}"),
    ):
        with pytest.raises(ValueError, match=message):
            open_data(config, seed=3, seq_len=length)
