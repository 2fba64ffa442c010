"""Random configurations and batches of function, module and cache: results equal the oracle's."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import nsa
from nsa import NSACache, NSAConfig
from nsa.config import BRANCHES, RopeScaling
from tests import oracle
from tests.ops import whole
from tests.ops.cases import Batch, array, make_batch, near, offsets

WIDTH = 24
PATTERNS = [(8, 4, 16), (4, 4, 16), (16, 4, 16), (8, 8, 16), (16, 8, 32), (32, 16, 32), (12, 4, 16)]
SUBSETS = [("cmp", "slc"), ("slc", "win"), ("cmp", "win"), *((branch,) for branch in BRANCHES)]
SCALINGS = [RopeScaling("linear", 2.5), RopeScaling("yarn", 4.0, 64)]


@st.composite
def configs(draw: st.DrawFn) -> NSAConfig:
    length, stride, block_size = draw(st.sampled_from(PATTERNS))
    init, local, kv_heads = (draw(st.integers(*bounds)) for bounds in ((0, 1), (1, 2), (1, 2)))
    more = draw(st.integers(0, 1))
    table = ((-1, 25, init + local), (-1, 40, init + local + more))
    values: dict[str, Any] = {
        "num_heads": kv_heads * draw(st.integers(1, 3)),
        "num_kv_heads": kv_heads,
        "head_dim": draw(st.sampled_from([16, 16, 32])),
        "value_dim": draw(st.sampled_from([16, 16, 48])),
        "compress_block_size": length,
        "compress_stride": stride,
        "block_size": block_size,
        "num_selected_blocks": init + local + more,
        "num_selected_blocks_table": draw(st.sampled_from([(), (), (), table])),
        "num_init_blocks": init,
        "num_local_blocks": local,
        "window_size": draw(st.sampled_from([1, 5, 16, 40])),
        "branches": draw(st.sampled_from([BRANCHES, BRANCHES, BRANCHES, *SUBSETS])),
        "share_kv": draw(st.booleans()),
        "phi": draw(st.sampled_from(["mean", "linear", "mlp"])),
        "compress_hidden_size": draw(st.sampled_from([None, 3])),
        "compress_rope": draw(st.sampled_from(["middle", "start", "none"])),
        "gate": draw(st.sampled_from(["sigmoid", "softmax", "fixed"])),
        "gate_hidden_size": draw(st.sampled_from([0, 5])),
        "rope_theta": 256.0,
        "rotary_dim": draw(st.sampled_from([None, 8])),
        "rope_scaling": draw(st.sampled_from([None, None, *SCALINGS])),
    }
    return NSAConfig(**values)


@st.composite
def batches(draw: st.DrawFn, config: NSAConfig) -> Batch:
    """Mostly one sequence longer than the selected blocks, among up to two others."""
    covered = config.num_selected_blocks * config.block_size
    long, short = st.integers(covered + 1, covered + 24), st.integers(1, min(covered, 200))
    lengths_k = draw(st.lists(st.integers(0, 20), max_size=2))
    longest = draw(st.one_of(long, long, long, long, short))
    lengths_k.insert(draw(st.integers(0, len(lengths_k))), longest)
    lengths_q = [draw(st.one_of(st.just(n), st.just(n), st.integers(0, n))) for n in lengths_k]
    return make_batch(config, lengths_k, lengths_q, seed=draw(st.integers(0, 2**31)))


def check_function(batch: Batch) -> None:
    inputs = whole.make(batch)
    rope = nsa.Rope.from_config(batch.config)
    out = whole.run(batch.config, inputs, rope, **batch.kwargs)
    near(out, whole.run_oracle(batch, inputs)[0], 2e-11)


def check_layer(batch: Batch, *, cached: bool) -> None:
    """The module over packed sequences, or one sequence in chunks and steps through the cache."""
    config, generator = batch.config, torch.Generator().manual_seed(int(batch.rng.integers(2**31)))
    module = nsa.NativeSparseAttention(WIDTH, config).double().requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(std=parameter[0].numel() ** -0.5, generator=generator)
    lengths = (max(batch.lengths_k),) if cached else batch.lengths_k
    x, cu = batch.normal(sum(lengths), WIDTH), offsets(lengths)
    if cached:
        cache = NSACache(config, 1, max_tokens=len(x)).layers[0]
        half, steps = len(x) // 2, min(2, len(x) // 2)
        parts = x.split([half, len(x) - half - steps, *[1] * steps])
        out = torch.cat([module(part, cache=cache) for part in parts])
    else:
        out = module(x, cu_seqlens=cu)
    weights = {name: array(value) for name, value in module.state_dict().items()}
    spans = [slice(a, b) for a, b in itertools.pairwise(cu.tolist()) if b > a]
    expected = [oracle.layer(weights, array(x[span]), config) for span in spans]
    near(out, np.concatenate(expected), 2e-11)


@pytest.mark.parametrize(
    ("number", "part"),
    [(60, 0), *(pytest.param(320, part, marks=pytest.mark.faults) for part in range(1, 9))],
)
def test_fuzz(number, part):
    """At least a third of the cases are longer than the selected blocks."""
    num_sparse = 0

    @seed(part)
    @settings(max_examples=number, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def run(data):
        nonlocal num_sparse
        config = data.draw(configs())
        batch = data.draw(batches(config))
        called = data.draw(st.sampled_from(["function", "function", "module", "cache"]))
        if called == "function":
            check_function(batch)
        else:
            check_layer(batch, cached=called == "cache")
        num_sparse += max(batch.lengths_k) > config.num_selected_blocks * config.block_size

    run()
    assert num_sparse >= number / 3
