"""The references, like kernels: the error budget and the properties of docs/semantics.md."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.ops.cases import SMALL, small
from tests.ops.properties import *  # noqa: F403
from tests.ops.properties import Setting, equal_bits, run_rows, tokens_of
from tests.ops.public import RUNS, Case

CONFIG = small(num_heads=6, phi="linear")
CASES = {
    "packed": Case(CONFIG, (130, 0, 1, 257, 8), backend="reference"),
    "fewer queries": Case(CONFIG, (257, 160, 7, 64), (9, 130, 7, 0), backend="reference"),
    "dense": Case(CONFIG, (130, 130), dense=True, backend="reference"),
    "fp16": Case(CONFIG, (130, 9), dtype=torch.float16, backend="reference"),
    "bf16": Case(CONFIG, (130, 9), dtype=torch.bfloat16, backend="reference"),
}
ONE = Case(SMALL, (257,), backend="reference")
PACKED = Case(SMALL, (130, 140, 257), backend="reference")
SETTING = Setting(
    CASES,
    {"fp32": ONE},
    one=257,
    times=(200, 203, 204, 207, 208, 223, 224, 240, 255),
    packed=(130, 140, 257),
    covered=64,
    left_out=frozenset({"gathered", "shared"}),  # algorithms of the kernels
    fewer=(0, 197),
)


@pytest.mark.parametrize("name", ["selected", "window", "whole"])
def test_dense_batch_with_fewer_queries(name):
    RUNS[name](dataclasses.replace(CASES["dense"], lengths_q=(9, 9))).check()


# G, D, Dv and the dtype of heads that share one KV head
SIZES = [
    *((group, 16, 32, torch.float32) for group in (1, 3, 16)),
    *((2, *dims, torch.bfloat16) for dims in ((64, 64), (192, 128), (16, 256))),
    (64, 16, 32, torch.float16),
]


@pytest.mark.parametrize(("group", "dim", "value_dim", "dtype"), SIZES)
@pytest.mark.parametrize("name", ["compressed", "selected", "window", "whole"])
def test_sizes_of_heads(name, group, dim, value_dim, dtype):
    config = small(num_heads=group, num_kv_heads=1, head_dim=dim, value_dim=value_dim)
    RUNS[name](Case(config, (130,), dtype=dtype, backend="reference")).check()


@pytest.mark.parametrize("name", ["compressed", "selected", "window"])
def test_large_scores_in_low_precision(name):
    """Scores of about 100: softmax without its maximum would overflow."""
    case = dataclasses.replace(CASES["fp16"], config=small())
    x = case.inputs()
    results = RUNS[name](case, dataclasses.replace(x, q=100 * x.q))
    assert bool(results.of_queries["out"].isfinite().all())
    results.check()


def test_strides_and_autocast(operator):
    """Inputs are not changed, may be strided, and autocast does not lower the precision."""
    x = tokens_of(PACKED)
    before = {key: tensor.clone() for key, tensor in x.items()}
    expected = run_rows(operator, x, PACKED)
    assert all(torch.equal(tensor, before[key]) for key, tensor in x.items())
    wide = {key: torch.cat((y, y), dim=1)[:, : y.shape[1]] for key, y in x.items()}
    assert not wide["q"].is_contiguous()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = run_rows(operator, x, PACKED)
    for wanted, strided, lowered in zip(
        expected, run_rows(operator, wide, PACKED), under, strict=True
    ):
        assert equal_bits(wanted, lowered)
        torch.testing.assert_close(strided, wanted, rtol=1e-5, atol=1e-6)


def test_the_pattern_is_truly_sparse():
    """From 130 tokens on n * l' <= S / 2 and w <= S / 4: full coverage would hide mistakes."""
    assert SMALL.num_selected_blocks * SMALL.block_size <= 130 / 2
    assert SMALL.window_size <= 130 / 4
