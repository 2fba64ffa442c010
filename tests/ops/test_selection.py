"""Scores of blocks and their choice (Eqs. 8 to 12) against the oracle."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nsa import NSAConfig, compressed_attention, select_blocks
from nsa.ops._sequences import Sequences
from nsa.ops.selection.reference import block_scores, choose_blocks
from tests import oracle
from tests.ops.cases import (
    BATCHES,
    SHORT,
    Batch,
    array,
    disagreements,
    make_batch,
    named_batch,
    near,
    small,
    stack,
)

PATTERNS = {
    "small": small(),
    "paper": small(
        compress_block_size=32, compress_stride=16, block_size=64, num_selected_blocks=4
    ),
    "no overlap": small(
        compress_block_size=16, compress_stride=16, block_size=32, num_selected_blocks=3
    ),
    "long blocks": small(
        compress_block_size=32, compress_stride=4, block_size=32, num_selected_blocks=4
    ),
    "equal sizes": small(
        compress_block_size=16, compress_stride=4, block_size=16, num_selected_blocks=4
    ),
    "l is 3 d": small(
        compress_block_size=24, compress_stride=8, block_size=32, num_selected_blocks=3
    ),
}


def library_scores(batch: Batch, q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    _, lse = compressed_attention(q, k, None, batch.config, softmax_scale=scale, **batch.kwargs)
    offsets = batch.kwargs["cu_seqlens_q"], batch.kwargs["cu_seqlens_k"]
    sequences = Sequences(
        offsets, len(batch.lengths_k), max(batch.lengths_q), max(batch.lengths_k), q.device
    )
    return block_scores(
        q, k, lse, batch.config, sequences, batch.config.head_dim**-0.5 if scale is None else scale
    )


def oracle_scores(batch: Batch, q: Tensor, k: Tensor, scale: float | None = None) -> np.ndarray:
    """[T, Hkv, M of the longest sequence], 0 behind a sequence's own blocks."""
    config = batch.config
    most = -(-max(batch.lengths_k) // config.block_size)

    def one(rows: slice, tokens: slice, blocks: slice) -> tuple[np.ndarray]:
        sizes = (config.compress_block_size, config.compress_stride, config.block_size)
        scores = oracle.block_scores(
            array(q)[rows], array(k)[blocks], tokens.stop - tokens.start, *sizes, scale
        )
        return (np.pad(scores, ((0, 0), (0, 0), (0, most - scores.shape[2]))),)

    return stack(batch, one)[0]


def oracle_choice(batch: Batch, scores: np.ndarray) -> np.ndarray:
    config = batch.config
    sizes = (
        config.num_selected_blocks,
        config.num_init_blocks,
        config.num_local_blocks,
        config.block_size,
    )
    return stack(
        batch,
        lambda rows, tokens, _: (oracle.choose(scores[rows], tokens.stop - tokens.start, *sizes),),
    )[0]


def choice(batch: Batch, q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    _, lse = compressed_attention(q, k, None, batch.config, softmax_scale=scale, **batch.kwargs)
    return select_blocks(q, k, lse, batch.config, softmax_scale=scale, **batch.kwargs)


# --------------------------------------------------------------------------------------------------------------
# scores


@pytest.mark.parametrize("name", BATCHES)
def test_scores_match_the_oracle(name):
    batch = named_batch(name)
    q, k = batch.q(), batch.compressed(16)
    near(library_scores(batch, q, k), oracle_scores(batch, q, k))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_scores_of_other_patterns(pattern):
    batch = make_batch(PATTERNS[pattern], (300, 129), (300, 20))
    q, k = batch.q(), batch.compressed(16)
    near(library_scores(batch, q, k, 0.4), oracle_scores(batch, q, k, 0.4))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_scores_of_a_group_sum_to_its_probability(pattern):
    """G * l / d for t >= l - 1, nothing before: no probability is lost or invented."""
    config = PATTERNS[pattern]
    batch = make_batch(config, (300,))
    total = library_scores(batch, batch.q(), batch.compressed(16)).sum(-1)
    l, d = config.compress_block_size, config.compress_stride
    wanted = np.where(batch.positions >= l - 1, config.group_size * l / d, 0.0)
    near(total, np.broadcast_to(wanted[:, None], (300, 2)))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_stencil_is_the_overlap_of_tokens(pattern):
    """All probability on one compression block: its score goes to the selection blocks that share tokens with it."""
    config = PATTERNS[pattern]
    l, d, l_sel = config.compress_block_size, config.compress_stride, config.block_size
    batch = make_batch(config, (300,), (1,))
    num_cmp = batch.num_cmp[0]
    for i in range(num_cmp):
        k = torch.zeros(300 // d, 2, 16).double()
        k[i] = 1.0
        scores = library_scores(batch, torch.full((1, 4, 16), 30.0).double(), k)
        for j in range(-(-300 // l_sel)):
            shared = sum(
                1 for token in range(i * d, i * d + l) if j * l_sel <= token < (j + 1) * l_sel
            )
            near(scores[0, :, j], np.full(2, config.group_size * shared / d))


def test_the_stencil_of_the_paper():
    """l, d, l' = 32, 16, 64: weights 1, 2, 2, 2, 1 over i = 4j - 1 .. 4j + 3."""
    assert [oracle.overlap(i, 3, 32, 16, 64) / 16 for i in range(10, 17)] == [0, 1, 2, 2, 2, 1, 0]


def test_scores_do_not_depend_on_the_place_in_a_tile():
    """Equal terms give bitwise equal scores: with q = 0 all inner blocks that are wholly visible tie exactly."""
    for dtype, pattern in itertools.product((torch.float64, torch.float32), PATTERNS):
        config = PATTERNS[pattern]
        batch = make_batch(config, (900,), (1,))
        scores = library_scores(
            batch, torch.zeros(1, 4, 16, dtype=dtype), batch.compressed(16).to(dtype)
        )
        inner = scores[0, :, 1 : 900 // config.block_size - 2]
        assert inner.shape[-1] >= 10
        assert bool((inner == inner[:, :1]).all()), pattern


# --------------------------------------------------------------------------------------------------------------
# choice


def chosen(scores: Any, positions: list[int], config: NSAConfig) -> list[list[int]]:
    """The choice from hand-made scores [T, M] of one group."""
    given = torch.tensor(scores, dtype=torch.float64)[:, None].expand(-1, config.num_kv_heads, -1)
    block_indices = choose_blocks(given, torch.tensor(positions), config)
    assert block_indices.dtype == torch.int32
    assert torch.equal(block_indices, block_indices[:, :1].expand_as(block_indices))
    return block_indices[:, 0].tolist()


@pytest.mark.parametrize(
    ("scores", "n", "init", "local", "wanted"),
    [
        # The last of eight candidates is the query's own block.
        ([1, 2, 3, 4, 5, 6, 7, 8], 4, 1, 2, [0, 5, 6, 7]),
        ([1, 9, 3, 9, 5, 9, 7, 8], 4, 1, 2, [0, 1, 6, 7]),  # a tie of three for one place
        ([1, 3, 9, 9, 9, 2, 7, 8], 5, 1, 2, [0, 2, 3, 6, 7]),  # a tie of three for two places
        ([0, 0, 0, 0, 0, 0, 0, 0], 6, 1, 2, [0, 1, 2, 3, 6, 7]),  # nothing but ties
        ([9, 9, 9, 9, 9, 9, 9, 9], 3, 1, 2, [0, 6, 7]),  # all forced, no free place
        ([9, 1, 1, 1, 1, 2, 1, 0], 3, 0, 1, [0, 5, 7]),  # nothing forced at the start
        ([0, 1, 1, 1, 1, 2, 1, 9], 3, 0, 1, [1, 5, 7]),  # block 0 competes like any other
        ([0, 0, 5, 5, 4, 4, 0, 0], 4, 2, 1, [0, 1, 2, 7]),
        ([0, 0, 0, 0, 0, 0, 0, 1], 4, 0, 3, [0, 5, 6, 7]),
        ([0, 5, 0, 6, 0, 6, 0, 1], 8, 1, 2, [0, 1, 2, 3, 4, 5, 6, 7]),  # exactly n candidates
        ([0, 5, 0, 6, 0, 6, 0, 1], 10, 1, 2, [0, 1, 2, 3, 4, 5, 6, 7, -1, -1]),  # fewer than n
    ],
)
def test_choice_by_hand(scores, n, init, local, wanted):
    config = small(num_selected_blocks=n, num_init_blocks=init, num_local_blocks=local)
    for t in (112, 120, 127):
        assert chosen([scores], [t], config) == [wanted]


def test_future_blocks_are_no_candidates():
    config = small(num_selected_blocks=3)
    assert chosen([[0, 1, 2, 3, 99, 99]], [63], config) == [[0, 2, 3]]
    assert chosen([[0, 1, 2, 3, 99, 99]], [64], config) == [[0, 3, 4]]


@pytest.mark.parametrize(
    ("t", "wanted"),
    [
        (0, [0, -1, -1, -1]),
        (15, [0, -1, -1, -1]),
        (16, [0, 1, -1, -1]),  # first and most recent coincide
        (31, [0, 1, -1, -1]),
        (32, [0, 1, 2, -1]),
        (48, [0, 1, 2, 3]),
        (64, [0, 1, 3, 4]),  # the first query with a choice: one free place, tie to the lower id
    ],
)
def test_first_blocks_of_a_sequence(t, wanted):
    assert chosen([[0.0] * 8], [t], small()) == [wanted]


@pytest.mark.parametrize(
    ("init", "local", "wanted"),
    [
        (3, 3, [0, 1, 2, 3, 4, -1, -1]),
        (0, 3, [0, 1, 2, 3, 4, -1, -1]),
    ],
)
def test_forced_blocks_that_coincide_leave_their_place(init, local, wanted):
    """Five candidates, three forced at each end: block 2 is forced twice and takes one place."""
    config = small(num_selected_blocks=7, num_init_blocks=init, num_local_blocks=local)
    assert chosen([[0.0] * 5], [79], config) == [wanted]
    narrow = small(num_selected_blocks=6, num_init_blocks=3, num_local_blocks=3)
    assert chosen([[0, 0, 0, 1, 2, 0, 0]], [111], narrow) == [[0, 1, 2, 4, 5, 6]]


def test_choice_with_many_ties_matches_the_oracle():
    """Integer scores from a small range: a tie in nearly every row."""
    rng = np.random.default_rng(0)
    for n, init, local in (
        (1, 0, 1),
        (2, 0, 1),
        (4, 1, 2),
        (5, 0, 3),
        (6, 3, 3),
        (7, 2, 1),
        (16, 1, 2),
    ):
        config = small(num_selected_blocks=n, num_init_blocks=init, num_local_blocks=local)
        scores = rng.integers(0, 4, size=(257, 2, 17)).astype(float)
        wanted = oracle.choose(scores, 257, n, init, local, 16)
        actual = choose_blocks(torch.from_numpy(scores), torch.arange(257), config)
        np.testing.assert_array_equal(actual.numpy(), wanted)


@pytest.mark.parametrize("name", BATCHES)
def test_choice_matches_the_oracle(name):
    batch = named_batch(name)
    q, k = batch.q(), batch.compressed(16)
    actual = choice(batch, q, k)
    assert actual.dtype == torch.int32
    assert tuple(actual.shape) == (sum(batch.lengths_q), 2, 4)
    np.testing.assert_array_equal(actual.numpy(), oracle_choice(batch, oracle_scores(batch, q, k)))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("init", "local"), [(0, 1), (2, 1), (1, 2)])
def test_choice_of_other_patterns(pattern, init, local):
    config = PATTERNS[pattern]
    config = small(
        compress_block_size=config.compress_block_size,
        compress_stride=config.compress_stride,
        block_size=config.block_size,
        num_selected_blocks=config.num_selected_blocks,
        num_init_blocks=init,
        num_local_blocks=local,
    )
    batch = make_batch(config, (577, 140), (40, 140))
    q, k = batch.q(), batch.compressed(16)
    wanted = oracle_choice(batch, oracle_scores(batch, q, k, 0.4))
    np.testing.assert_array_equal(choice(batch, q, k, 0.4).numpy(), wanted)


def test_every_short_length_alone():
    for length in SHORT:
        batch = make_batch(small(num_selected_blocks=3), (length,), seed=length)
        q, k = batch.q(), batch.compressed(16)
        _, lse = compressed_attention(q, k, None, batch.config)
        actual = select_blocks(q, k, lse, batch.config)
        np.testing.assert_array_equal(
            actual.numpy(), oracle_choice(batch, oracle_scores(batch, q, k))
        )


@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 8, 12, 16])
def test_the_whole_group_votes(group):
    batch = make_batch(small(num_heads=2 * group), (160,))
    q, k = batch.q(), batch.compressed(16)
    near(library_scores(batch, q, k), oracle_scores(batch, q, k))
    np.testing.assert_array_equal(
        choice(batch, q, k).numpy(), oracle_choice(batch, oracle_scores(batch, q, k))
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("init", [0, 1])
def test_query_of_zero_takes_the_lowest_ids(init, dtype):
    """q = 0: every visible compressed block weighs the same, all inner blocks tie. Block 0 lacks the share of i = -1."""
    batch = make_batch(small(num_init_blocks=init), (257,))
    q = torch.zeros(257, 4, 16, dtype=dtype)
    actual = choice(batch, q, batch.compressed(16).to(dtype))
    for t in range(80, 257):
        c = t // 16
        wanted = [0, 1, c - 1, c] if init else [1, 2, c - 1, c]
        assert actual[t].tolist() == [wanted, wanted], t


@pytest.mark.parametrize("name", BATCHES)
def test_form_of_the_result(name):
    """Ascending, unique, forced blocks in, padded at the end, as many as there is room for."""
    batch = named_batch(name)
    actual = choice(batch, batch.q(), batch.compressed(16))
    for r, t in enumerate(batch.positions):
        current = int(t) // 16
        for row in actual[r].tolist():
            present = [b for b in row if b != -1]
            assert row == present + [-1] * (4 - len(present))
            assert present == sorted(set(present))
            assert len(present) == min(4, current + 1)
            assert {0, max(current - 1, 0), current} <= set(present) <= set(range(current + 1))


def test_dense_equals_packed():
    batch = make_batch(small(), (130, 130))
    q, k = batch.q(), batch.compressed(16)
    packed = choice(batch, q, k)
    dense_q = q.unflatten(0, (2, 130))
    _, lse = compressed_attention(dense_q, k, None, batch.config)
    assert torch.equal(select_blocks(dense_q, k, lse, batch.config), packed.unflatten(0, (2, 130)))


def test_no_gradient_flows_through_the_choice():
    batch = named_batch("packed")
    q, k = batch.q().requires_grad_(), batch.compressed(16).requires_grad_()
    assert not choice(batch, q, k).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_low_precision_choice_follows_the_agreement_rule(dtype):
    """Scores are fp32: from the same stored keys, only blocks within 1e-5 of the n-th best may differ."""
    batch = make_batch(small(), (257, 130, 200))
    q, k = batch.q().to(dtype), batch.compressed(16).to(dtype)
    scores = oracle_scores(batch, q, k)
    allowed, against = disagreements(choice(batch, q, k), scores, batch.positions, batch.config)
    assert against == 0
    assert allowed <= 1


def test_the_agreement_rule_notices_a_wrong_choice():
    batch = make_batch(small(), (257,))
    q, k = batch.q(), batch.compressed(16)
    scores = oracle_scores(batch, q, k)
    right = choice(batch, q, k)
    assert disagreements(right, scores, batch.positions, batch.config) == (0, 0)
    other = choice(batch, 1.02 * q + 0.02 * batch.q(), k)
    assert disagreements(other, scores, batch.positions, batch.config)[1] > 0
    dropped = right.clone()
    dropped[200, 0, 3] = -1
    assert disagreements(dropped, scores, batch.positions, batch.config) == (0, 1)


def test_oracle_leaves_no_overlap_out():
    """The oracle adds only blocks near j; all others share no token with j."""
    for l, d, l_sel in ((8, 4, 16), (32, 16, 64), (32, 4, 32), (24, 8, 32), (16, 16, 16)):
        for j in range(6):
            near_j = set(range(max(0, (j * l_sel - l) // d), ((j + 1) * l_sel) // d + 1))
            assert {i for i in range(60) if oracle.overlap(i, j, l, d, l_sel)} <= near_j
