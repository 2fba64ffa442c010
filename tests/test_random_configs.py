"""Whole attention on random small configurations and lengths against the NumPy oracle."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from nsa import NSAConfig, Rope
from nsa.config import BRANCHES
from tests.ops.cases import Batch, make_batch, near
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
    """A long, mostly sparse sequence and up to three others, often at edges of blocks."""
    config = draw(configs())
    length = st.one_of(
        st.integers(0, 40), st.sampled_from([7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65])
    )
    lengths_k = draw(st.lists(length, max_size=3))
    lengths_k.insert(draw(st.integers(0, len(lengths_k))), draw(st.integers(120, 170)))
    lengths_q = [draw(st.one_of(st.just(n), st.just(n), st.integers(0, n))) for n in lengths_k]
    return make_batch(config, lengths_k, lengths_q, seed=draw(st.integers(0, 2**31)))


@settings(max_examples=60)
@given(batch=batches())
def test_the_whole_matches_the_oracle(batch):
    inputs = make(batch)
    out = run(batch.config, inputs, Rope.from_config(batch.config), **batch.kwargs)
    near(out, run_oracle(batch, inputs)[0], 2e-12)
