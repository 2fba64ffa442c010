"""The whole, the choice and the packing on random small configurations and lengths."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nsa import (
    NSAConfig,
    Rope,
    blocks_to_ranges,
    compress,
    compressed_attention,
    select_blocks,
    selected_attention,
)
from nsa.config import BRANCHES
from nsa.ops.selection.reference import choose_blocks
from tests import oracle
from tests.ops.cases import Batch, array, make_batch, near, offsets
from tests.ops.whole import make, run, run_oracle

PATTERNS = [
    (8, 4, 16),
    (4, 4, 16),
    (16, 4, 16),
    (8, 8, 16),
    (16, 16, 16),
    (16, 8, 32),
    (32, 16, 32),
    (12, 4, 16),
]
SWITCHES = [BRANCHES, BRANCHES, BRANCHES, ("cmp", "slc"), ("slc", "win"), ("slc",), ("cmp", "win")]


@st.composite
def configs(draw: st.DrawFn) -> NSAConfig:
    l, d, l_sel = draw(st.sampled_from(PATTERNS))
    init, local = draw(st.integers(0, 2)), draw(st.integers(1, 2))
    kv_heads = draw(st.integers(1, 2))
    return NSAConfig(
        num_heads=kv_heads * draw(st.sampled_from([1, 2, 3])),
        num_kv_heads=kv_heads,
        head_dim=16,
        value_dim=draw(st.sampled_from([16, 32])),
        compress_block_size=l,
        compress_stride=d,
        block_size=l_sel,
        num_selected_blocks=init + local + draw(st.integers(0, 2)),
        num_init_blocks=init,
        num_local_blocks=local,
        window_size=draw(st.sampled_from([1, 5, 16, 40])),
        branches=draw(st.sampled_from(SWITCHES)),
        phi=draw(st.sampled_from(["mean", "linear", "mlp"])),
        compress_hidden_size=3,
        compress_rope=draw(st.sampled_from(["middle", "start", "none"])),
        rope_theta=256.0,
        rotary_dim=draw(st.sampled_from([None, 8])) if draw(st.booleans()) else None,
    )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """A long sequence, sparse for most configs, among up to three others, often of lengths at the edges of blocks."""
    config = draw(configs())
    length = st.one_of(
        st.integers(0, 40), st.sampled_from([7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65])
    )
    lengths_k = draw(st.lists(length, max_size=3))
    lengths_k.insert(draw(st.integers(0, len(lengths_k))), draw(st.integers(120, 170)))
    lengths_q = [draw(st.one_of(st.just(n), st.just(n), st.integers(0, n))) for n in lengths_k]
    return make_batch(config, lengths_k, lengths_q, seed=draw(st.integers(0, 2**31)))


def frequencies(config: NSAConfig) -> Rope:
    return Rope.from_config(config)


@settings(max_examples=200)
@given(batch=batches())
def test_the_whole_matches_the_oracle(batch):
    inputs = make(batch)
    near(
        run(batch.config, inputs, frequencies(batch.config), **batch.kwargs),
        run_oracle(batch, inputs)[0],
        2e-12,
    )


@settings(max_examples=100)
@given(batch=batches(), data=st.data())
def test_the_future_changes_nothing(batch, data):
    """For a token of one sequence: later tokens of it and all other sequences get other values."""
    before = make(batch)
    sequence = data.draw(st.integers(0, len(batch.lengths_k) - 1))
    rows, tokens, _ = batch.slices[sequence]
    num_rows = rows.stop - rows.start
    assume(num_rows > 0)
    row = data.draw(st.integers(0, num_rows - 1))
    t = batch.lengths_k[sequence] - num_rows + row
    after = make(batch)
    for name, x in after.tensors.items():
        start, kept = (rows.start, row + 1) if name in ("q", "gates") else (tokens.start, t + 1)
        x[start : start + kept] = before.tensors[name][start : start + kept]
    if after.q_cmp is not None and before.q_cmp is not None:
        after.q_cmp[rows.start : rows.start + row + 1] = before.q_cmp[
            rows.start : rows.start + row + 1
        ]
    after.phi_k, after.phi_v = before.phi_k, before.phi_v
    results = [
        run(batch.config, x, frequencies(batch.config), **batch.kwargs)[rows][: row + 1]
        for x in (before, after)
    ]
    assert torch.equal(*results)


@settings(max_examples=60)
@given(batch=batches())
def test_packed_equals_separate(batch):
    inputs = make(batch)
    together = run(batch.config, inputs, frequencies(batch.config), **batch.kwargs)
    for b, (rows, tokens, _) in enumerate(batch.slices):
        part = make(batch)
        part.tensors = {
            n: x[rows if n in ("q", "gates") else tokens] for n, x in inputs.tensors.items()
        }
        part.phi_k, part.phi_v = inputs.phi_k, inputs.phi_v
        part.q_cmp = None if inputs.q_cmp is None else inputs.q_cmp[rows]
        alone = make_batch(batch.config, (batch.lengths_k[b],), (batch.lengths_q[b],))
        near(
            run(batch.config, part, frequencies(batch.config), **alone.kwargs),
            array(together[rows]),
            2e-12,
        )


@settings(max_examples=300)
@given(
    seed=st.integers(0, 2**31),
    num_levels=st.sampled_from([1, 2, 3, 10, 1000]),
    num_rows=st.integers(1, 12),
    num_keys=st.integers(12, 300),
    init=st.integers(0, 4),
    local=st.integers(1, 4),
    free=st.integers(0, 4),
)
def test_the_choice_matches_a_sort(seed, num_levels, num_rows, num_keys, init, local, free):
    """Scores from few levels tie often."""
    n = init + local + free
    config = NSAConfig(num_heads=2, num_kv_heads=2, block_size=16, compress_block_size=16, compress_stride=4,
                       num_selected_blocks=n, num_init_blocks=init, num_local_blocks=local)  # fmt: skip
    num_blocks = -(-num_keys // 16)
    scores = (
        np.random.default_rng(seed).integers(0, num_levels, (num_rows, 2, num_blocks)).astype(float)
    )
    positions = torch.arange(num_keys - num_rows, num_keys)
    actual = choose_blocks(torch.from_numpy(scores), positions, config)
    np.testing.assert_array_equal(
        actual.numpy(), oracle.choose(scores, num_keys, n, init, local, 16)
    )


@settings(max_examples=60)
@given(batch=batches())
def test_chosen_ranges_hold_the_tokens_that_are_attended_to(batch):
    """Attention over the tokens of blocks_to_ranges(select_blocks(...)) is the selected branch."""
    q, k, v, k_cmp = batch.q(), batch.k(), batch.v(), batch.compressed(16)
    _, lse = compressed_attention(q, k_cmp, None, batch.config, **batch.kwargs)
    ids = select_blocks(q, k_cmp, lse, batch.config, **batch.kwargs)
    out, _ = selected_attention(q, k, v, ids, batch.config, **batch.kwargs)
    ranges = blocks_to_ranges(ids, batch.config, **batch.kwargs).numpy()
    for rows, tokens, _ in batch.slices:
        visible = tokens_of(ranges[rows])
        near(
            out[rows],
            oracle.attention(array(q)[rows], array(k)[tokens], array(v)[tokens], visible)[0],
            2e-12,
        )


def tokens_of(ranges: np.ndarray) -> oracle.Visible:
    """The tokens of the ranges [T, Hkv, n, 2]; an unused range (-1, -1) has none."""
    return lambda r, g: [token for start, end in ranges[r, g] for token in range(start, end)]


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=6), pattern=st.sampled_from(PATTERNS)
)
def test_rows_of_compressed_keys(lengths, pattern):
    """Offsets count the complete blocks of each sequence, and S // d rows are enough for any lengths."""
    l, d, l_sel = pattern
    config = NSAConfig(num_heads=1, num_kv_heads=1, head_dim=16, value_dim=16, compress_block_size=l, compress_stride=d,
                       block_size=l_sel)  # fmt: skip
    x = torch.ones(sum(lengths), 1, 16).double()
    y, cu = compress(x, None, config, offsets(lengths))
    counts = [oracle.num_compressed(n, l, d) for n in lengths]
    assert cu.tolist() == [0, *np.cumsum(counts)]
    assert y.shape[0] == sum(lengths) // d >= sum(counts)
    assert torch.equal(y[: sum(counts)], torch.ones(sum(counts), 1, 16).double())
