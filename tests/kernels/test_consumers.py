"""Other ways to consume a choice give what the reference gives."""

from __future__ import annotations

import pytest
import torch

from nsa.bench import attention, consumers
from nsa.bench.attention import Plan, bench_attention
from nsa.bench.cases import CASES, prepare
from nsa.bench.clock import Timing
from nsa.bench.points import Point, make_tensors, parse_shape
from nsa.bench.providers import PROVIDERS, Consumer
from nsa.bench.rows import read_rows

CASE = CASES["attention.selected"]
# The last block is not full, and the last tile of the mask neither.
POINT = Point(parse_shape("6x2x16x32"), 140, 1, "random", torch.float32, torch.device("cpu"))
CONFIG = POINT.shape.config({"block_size": 16, "num_selected_blocks": 5, "compress_block_size": 8, "compress_stride": 4})


def test_runs_of_blocks_become_ranges() -> None:
    ids = torch.tensor([[5, 0, 1, 7, 6], [3, -1, -1, -1, 0], [2, 4, 3, 1, 0], [-1, -1, -1, -1, -1]], dtype=torch.int32)
    first, last = consumers.merged_ranges(ids, 16)
    assert first.tolist() == [[0, 80, 0, 0, 0], [0, 48, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert last.tolist() == [[32, 128, 0, 0, 0], [16, 64, 0, 0, 0], [80, 0, 0, 0, 0], [0, 0, 0, 0, 0]]


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(
    ("way", "mode"), [("mask", "fwd"), *((way, "fwd_bwd") for way in ("ranges", "gather", "tiled", "gathered"))]
)
def test_every_way_gives_what_the_reference_gives(way: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "_QUERIES", 100)  # more than one call
    tensors = prepare(CASE, make_tensors(POINT, CONFIG), POINT, CONFIG, "reference")
    assert (tensors["block_indices"] < 0).any()
    if mode == "fwd":  # on a CPU FlexAttention takes no tensors that want gradients
        q, k, v, block_indices = (tensors[name] for name in (*CASE.inputs, "block_indices"))
        found: tuple[torch.Tensor, ...] = (consumers.by_mask(q, k, v, block_indices, CONFIG)(),)
    else:
        found = PROVIDERS[way].work(CASE, tensors, POINT, CONFIG).run(mode)
    expected = PROVIDERS["reference"].work(CASE, tensors, POINT, CONFIG).run(mode)
    assert len(found) == len(expected) == (1 if mode == "fwd" else 4)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_a_way_passes_the_gate_of_the_command(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "time_call", lambda *_, **__: Timing(1.0, 1.0, 1.0, 1, 1, "not timed"))
    plan = Plan(
        parse_shape("2x1x16x16"), [128], tokens=128, cases=["attention.selected", "attention.window"], providers=["gather"],
        dtype=torch.float32, out=tmp_path / "rows.jsonl", budget_ms=1,
    )  # fmt: skip
    assert bench_attention(plan, torch.device("cpu"))
    rows = read_rows([tmp_path / "rows.jsonl"])
    assert [(row.case, row.provider, row.mode, row.correct) for row in rows] == [
        ("attention.selected", "gather", mode, True) for mode in ("fwd", "fwd_bwd")
    ]


@pytest.mark.parametrize(
    ("way", "kernels", "mode", "runs"),
    [
        ("mask", ["triton_tem_fused_0", "radix_sort"], "fwd_bwd", True),
        ("mask", ["fmha"], "fwd", False),
        ("ranges", ["ranges_fwd_kernel"], "fwd", True),
        ("ranges", ["ranges_fwd_kernel"], "fwd_bwd", False),
        ("gather", ["fmha"], "fwd", True),
        ("gather", ["fmha", "selected_fwd_kernel"], "fwd", False),
    ],
)
def test_a_way_must_have_run_by_its_own_kernels(way: str, kernels: list[str], mode: str, runs: bool) -> None:
    provider = PROVIDERS[way]
    assert isinstance(provider, Consumer)
    assert (provider.fault(kernels, CASE, mode) is None) == runs
