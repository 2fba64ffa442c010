"""Scores of blocks and the selection of the best (Eqs. 8 to 12) against the NumPy oracle."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nsa import compressed_attention, select_blocks
from nsa.ops._operator import Call
from nsa.ops._packed import query_positions
from nsa.ops._sequences import Sequences
from nsa.ops.selection import SelectionInputs
from nsa.ops.selection.reference import (
    block_scores,
    choose_blocks,
    random_scores,
    token_max_scores,
)
from tests import oracle
from tests.ops.cases import BATCHES, SHORT, Batch, array, make_batch, near, small, stack


def pattern(l: int, d: int, block_size: int, num_blocks: int) -> dict[str, int]:
    sizes = {"compress_block_size": l, "compress_stride": d, "block_size": block_size}
    return {**sizes, "num_selected_blocks": num_blocks}


PATTERNS = {
    "small": pattern(8, 4, 16, 4),
    "paper": pattern(32, 16, 64, 4),
    "no overlap": pattern(16, 16, 32, 3),
    "long blocks": pattern(32, 4, 32, 4),
    "equal sizes": pattern(16, 4, 16, 4),
    "l is 3 d": pattern(24, 8, 32, 3),
}


SCORES = ("compressed", "token_max")
FP8 = {"scores": "token_max", "score_precision": "fp8"}
INDEX: dict[str, dict[str, Any]] = {
    "index": {"scores": "index", "index_dim": 32},
    "index, 3 heads, fp8": {
        **{"scores": "index", "index_dim": 48, "index_heads": 3, "score_precision": "fp8"},
    },
    "shared index": {
        **{"scores": "index", "index_dim": 16, "index_heads": 2, "index_keys": "shared"},
    },
}


def scores_and_selection(
    batch: Batch, q: Tensor, k: Tensor, scale: float | None = None, packed: bool = True
) -> tuple[Tensor, Tensor]:
    config, lse = batch.config, None
    offsets: Any = batch.kwargs if packed else {}
    if config.scores == "compressed":
        _, lse = compressed_attention(q, k, None, config, softmax_scale=scale, **offsets)
    selected = select_blocks(q, k, lse, config, softmax_scale=scale, **offsets)
    lengths = max(batch.lengths_q), max(batch.lengths_k)
    cu = batch.kwargs["cu_seqlens_q"], batch.kwargs["cu_seqlens_k"]
    sequences = Sequences(cu, len(batch.lengths_k), *lengths, q.device)
    used = q.shape[-1] ** -0.5 if scale is None else scale
    if config.scores == "random":
        positions = query_positions(q.shape[0], *cu)
        blocks = max(2, -(-lengths[1] // config.block_size))
        return random_scores(positions, config.num_kv_heads, blocks), selected
    if lse is None:
        inputs, call = SelectionInputs(q, k, None), Call(config, sequences, used)
        return token_max_scores(inputs, call), selected
    return block_scores(q, k, lse, config, sequences, used), selected


def keys_of(batch: Batch) -> Tensor:
    return batch.compressed(16) if batch.config.scores == "compressed" else batch.k()


def check(
    batch: Batch, scale: float | None = None, packed: bool = True, loud: float = 1.0
) -> Tensor:
    """Compare with the oracle; return the scores. Queries are ``loud`` times the usual ones."""
    config = batch.config
    q, k = batch.index() if config.has_index else (batch.q(), keys_of(batch))
    q, k = (loud * q).requires_grad_(), k.requires_grad_()
    most = max(2, -(-max(batch.lengths_k) // config.block_size))
    forced = config.num_init_blocks, config.num_local_blocks

    def one(rows: slice, tokens: slice, blocks: slice) -> tuple[np.ndarray, np.ndarray]:
        """Scores, 0 behind a sequence's own blocks, and what is selected from them."""
        sizes = (config.compress_block_size, config.compress_stride, config.block_size)
        num_keys = tokens.stop - tokens.start
        if config.scores in ("token_max", "index"):
            fp8 = config.score_precision == "fp8"
            rest = *forced, config.block_size, scale, fp8
            given = array(q)[rows], array(k)[tokens], config.num_kv_heads
            scores = oracle.token_scores(*given, *rest)
        elif config.scores == "random":
            positions = range(num_keys - (rows.stop - rows.start), num_keys)
            scores = oracle.random_scores(positions, config.num_kv_heads, most)
        else:
            scores = oracle.block_scores(array(q)[rows], array(k)[blocks], num_keys, *sizes, scale)
        selected = oracle.choose(
            scores, num_keys, config.num_selected_blocks, *forced, config.block_size
        )
        return np.pad(scores, ((0, 0), (0, 0), (0, most - scores.shape[2]))), selected

    scores, selected = scores_and_selection(batch, q, k, scale, packed)
    wanted_scores, wanted = stack(batch, one)
    near(scores.expand(-1, config.num_kv_heads, -1), wanted_scores)
    assert selected.dtype == torch.int32
    assert not selected.requires_grad
    np.testing.assert_array_equal(selected.numpy(), wanted)
    return scores.detach()


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(
    "changes",
    [{}, {"scores": "token_max"}, FP8, {"scores": "random"}, *INDEX.values()],
    ids=str,
)
def test_matches_the_oracle(changes, name):
    check(make_batch(small(**changes), *BATCHES[name]))


@pytest.mark.parametrize(("init", "local"), [(0, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("scores", SCORES)
def test_other_patterns(scores, name, init, local):
    forced = {"num_init_blocks": init, "num_local_blocks": local}
    config = small(**PATTERNS[name], **forced, scores=scores)
    check(make_batch(config, (300, 140), (40, 140)), 0.4)


@pytest.mark.parametrize("scores", SCORES)
def test_every_short_length_alone(scores):
    for length in SHORT:
        batch = make_batch(small(num_selected_blocks=3, scores=scores), (length,), seed=length)
        check(batch, packed=False)


@pytest.mark.parametrize("group", [1, 3, 8, 12])
@pytest.mark.parametrize("scores", SCORES)
def test_the_whole_group_votes(scores, group):
    check(make_batch(small(num_heads=2 * group, scores=scores), (160,)))


@pytest.mark.parametrize("changes", [{"scores": "token_max"}, FP8], ids=str)
def test_large_products_by_tokens(changes):
    """Some weights would overflow fp32: they count exp(80), and the others still differ."""
    scores = check(make_batch(small(**changes), (257,)), loud=30.0)
    most = 2 * math.exp(80)  # of two heads
    limited = scores >= most / 2
    assert bool(limited.any())
    assert float(scores.max()) <= most * (1 + 1e-12)
    assert scores[~limited].unique().numel() > 1000


def test_random_blocks_are_uniform():
    """Each of 61 blocks is among the best 8 of 8 / 61 of the queries, within 5 deviations."""
    scores = random_scores(torch.arange(1000, 5000), 2, 61)
    assert scores.shape == (4000, 2, 61)
    ranks = scores.argsort(-1).argsort(-1)
    chosen = (ranks >= 61 - 8).double().mean((0, 1))
    deviation = math.sqrt(8 / 61 * (53 / 61) / 8000)
    assert (chosen - 8 / 61).abs().max() < 5 * deviation


def test_a_wrong_call_by_tokens():
    batch = make_batch(small(scores="token_max"), (40,))
    with pytest.raises(ValueError, match="lse must be None with scores token_max"):
        select_blocks(batch.q(), batch.k(), torch.zeros(40, 4), batch.config)
    with pytest.raises(ValueError, match=r"k_cmp must .*, got"):
        select_blocks(batch.q(), batch.k()[:, :1], None, batch.config)
    config = small(**INDEX["shared index"])
    with pytest.raises(ValueError, match=r"k_cmp must have shape \[tokens, 1, 16\]"):
        select_blocks(batch.normal(40, 2, 16), batch.k(), None, config)
    with pytest.raises(ValueError, match="lse must have shape"):
        select_blocks(batch.q(), batch.compressed(16), None, small())


def test_the_stencil_of_the_paper():
    """l, d, l' = 32, 16, 64: weights 1, 2, 2, 2, 1 over i = 4j - 1 .. 4j + 3."""
    assert [oracle.overlap(i, 3, 32, 16, 64) / 16 for i in range(10, 17)] == [0, 1, 2, 2, 2, 1, 0]


@pytest.mark.parametrize("scores", SCORES)
def test_scores_do_not_depend_on_the_place_in_a_tile(scores):
    """Equal terms give the same bits: with q = 0 all wholly visible inner blocks tie exactly."""
    for dtype, name in itertools.product((torch.float64, torch.float32), PATTERNS):
        config = small(**PATTERNS[name], scores=scores)
        batch = make_batch(config, (900,), (1,))
        q = torch.zeros(1, 4, 16, dtype=dtype)
        found, selected = scores_and_selection(batch, q, keys_of(batch).to(dtype))
        inner = found[0, :, 1 : 900 // config.block_size - 2]
        assert inner.shape[-1] >= 10
        assert bool((inner == inner[:, :1]).all()), name
        free = config.num_selected_blocks - 3
        # The first block is forced, then ties go to the lower id.
        assert selected[0, 0, : 1 + free].tolist() == [*range(1 + free)], name


ZEROS = [0] * 8


@pytest.mark.parametrize(
    ("t", "scores", "n", "init", "local", "wanted"),
    [
        # Of eight candidates the last is the query's own block.
        (120, [1, 3, 9, 9, 9, 2, 7, 8], 5, 1, 2, [0, 2, 3, 6, 7]),  # a tie of three for two places
        (127, ZEROS, 6, 1, 2, [0, 1, 2, 3, 6, 7]),  # nothing but ties
        (127, [0, 1, 1, 1, 1, 2, 1, 9], 3, 0, 1, [1, 5, 7]),  # block 0 competes like any other
        (127, [0, 5, 0, 6, 0, 6, 0, 1], 10, 1, 2, [*range(8), -1, -1]),  # fewer than n
        # The first query of a sequence: the current block is always there.
        (0, ZEROS, 4, 1, 2, [0, -1, -1, -1]),
        # Blocks of the future are no candidates.
        (64, [0, 1, 2, 3, 99, 99], 3, 1, 2, [0, 3, 4]),
        # Of five candidates three are forced at each end: block 2 takes one place.
        (79, ZEROS, 7, 3, 3, [0, 1, 2, 3, 4, -1, -1]),
    ],
)
def test_by_hand(t, scores, n, init, local, wanted):
    """One query at ``t``, and scores that are the same for all groups."""
    config = small(num_selected_blocks=n, num_init_blocks=init, num_local_blocks=local)
    given = torch.tensor(scores).double().expand(1, config.num_kv_heads, -1)
    assert choose_blocks(given, torch.tensor([t]), config).tolist() == [[wanted, wanted]]


@settings(max_examples=200)
@given(
    seed=st.integers(0, 2**31),
    num_levels=st.sampled_from([1, 2, 3, 10, 1000]),
    num_rows=st.integers(1, 12),
    num_keys=st.integers(12, 300),
    init=st.integers(0, 4),
    local=st.integers(1, 4),
    free=st.integers(0, 4),
)
def test_many_ties(seed, num_levels, num_rows, num_keys, init, local, free):
    """Scores from few levels tie often."""
    n = init + local + free
    config = small(num_selected_blocks=n, num_init_blocks=init, num_local_blocks=local)
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, num_levels, (num_rows, 2, -(-num_keys // 16))).astype(float)
    positions = torch.arange(num_keys - num_rows, num_keys)
    actual = choose_blocks(torch.from_numpy(scores), positions, config)
    wanted = oracle.choose(scores, num_keys, n, init, local, 16)
    np.testing.assert_array_equal(actual.numpy(), wanted)
