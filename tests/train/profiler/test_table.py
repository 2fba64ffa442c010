"""Time by stage and memory by module, of traces in which every microsecond is known."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path
from typing import Any

import pytest

import nsa.ops
from nsa import stages
from nsa.train.profiler.table import (
    IDLE,
    OTHER,
    PRODUCTS,
    UNATTRIBUTED,
    kernels_text,
    stage_of_kernel,
    stage_table,
    table_text,
)
from nsa.train.profiler.trace import MODULE, STAGE, Event, ModuleMemory, module_memory, parse_trace

MAIN, AUTOGRAD = 1, 2


class HandMade:
    """Records of a trace as PyTorch's profiler exports them; times in microseconds."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.origin = 0.0
        self._numbers = itertools.count()

    def add(self, name: str, begin: float, end: float, category: str, **more: Any) -> None:
        times = {"ts": self.origin + begin, "dur": end - begin, "ph": "X", "tid": MAIN}
        self.records.append({"name": name, "cat": category, "args": {}, **times, **more})

    def host(self, name: str, begin: float, end: float, thread: int = MAIN) -> None:
        self.add(name, begin, end, "cpu_op", tid=thread)

    def mark(self, name: str, begin: float, end: float) -> None:
        self.add(name, begin, end, "user_annotation")

    def launch(self, at: float, *kernels: tuple[str, float, float], stream: int = 7) -> None:
        """A call of the host and the kernels that it launches: name, begin, end."""
        args = {"correlation": next(self._numbers)}
        self.add("cudaLaunchKernel", at, at + 0.5, "cuda_runtime", args=args)
        for name, begin, end in kernels:
            self.add(name, begin, end, "kernel", args=args, tid=stream)

    def backward_of(self, forward: float, backward: float) -> None:
        number = next(self._numbers)
        self.add("fwdbwd", forward, forward, "fwdbwd", ph="s", id=number)
        self.add("fwdbwd", backward, backward, "fwdbwd", ph="f", id=number, tid=AUTOGRAD)

    def memory(self, at: float, change: int, device: int = 0) -> None:
        args = {"Bytes": change, "Device Type": device}
        self.add("[memory]", at, at, "cpu_instant_event", args=args)


def steps_on_a_gpu(number: int) -> HandMade:
    """Steps of 100 microseconds: a replayed graph, kernels on two streams, communication."""
    hand = HandMade()
    for step in range(number):
        hand.origin = 100.0 * step
        hand.mark(f"ProfilerStep#{step}", 0, 100)
        hand.mark(STAGE + stages.DATA, 0, 10)
        hand.launch(
            12,
            ("nvjet_sm90_tst", 14, 24),
            ("triton_poi_fused_silu_4", 24, 26),
            ("range_fwd_kernel_window", 28, 34),
            ("range_dq_kernel_window", 44, 54),
            ("void at::native::radix_sort", 54, 62),
            ("unknown", 62, 63),
        )
        hand.launch(13, ("select_kernel", 30, 32), stream=8)
        hand.launch(14, ("ncclDevKernel_AllReduce", 55, 70), stream=20)
        hand.mark(STAGE + stages.OPTIMIZER, 70, 80)
        hand.launch(71, ("nvjet_sm90_tst", 72, 80))
    return hand


def rows(table: dict[str, Any]) -> dict[str, float]:
    return {row["stage"]: round(1000 * row["total_ms"], 6) for row in table["stages"]}


GOLDEN = """\
2 steps, 0.100 ms per step; 0.090 ms without the profiler

stage                                             ms    share
scores + selection                             0.001     1.0%
window                                         0.005     5.0%
window, backward                               0.010    10.0%
matrix products                                0.010    10.0%
other compiled and PyTorch kernels             0.010    10.0%
optimizer                                      0.008     8.0%
communication                                  0.007     7.0%
data                                           0.010    10.0%
unattributed                                   0.001     1.0%
idle                                           0.038    38.0%
sum                                            0.100   100.0%
communication behind other kernels, not in the sum: 0.008 ms
"""


def test_steps_on_a_gpu() -> None:
    table = stage_table(parse_trace(steps_on_a_gpu(3).records))
    assert table_text({**table, "unprofiled_step_ms": 0.09}) == GOLDEN
    assert (table["device"], table["steps"]) == ("gpu", 2)
    assert sum(row["total_ms"] for row in table["stages"]) == pytest.approx(table["step_ms"])
    (update,) = (one for one in table["kernels"] if one["stage"] == stages.OPTIMIZER)
    assert (update["name"], update["calls_per_step"]) == ("nvjet_sm90_tst", 1)
    assert update["ms_per_step"] == pytest.approx(0.008)
    assert kernels_text(table, 1).count("\n") == 2


def test_a_single_step_ends_with_its_last_kernel_or_its_host() -> None:
    table = stage_table(parse_trace(steps_on_a_gpu(1).records))
    assert (table["steps"], table["step_ms"]) == (1, pytest.approx(0.086))
    assert sum(rows(table).values()) == pytest.approx(86)


def test_steps_on_a_cpu_are_divided_by_ranges() -> None:
    hand = HandMade()
    for step in range(2):
        hand.origin = 100.0 * step
        hand.mark(f"ProfilerStep#{step}", 0, 100)
        hand.mark(STAGE + stages.DATA, 0, 10)
        hand.mark(STAGE + stages.FORWARD, 10, 40)
        hand.mark(STAGE + stages.MLP, 12, 30)
        hand.host("aten::linear", 13, 29)
        hand.host("aten::mm", 14, 28)
        hand.mark(STAGE + stages.BACKWARD, 40, 90)
        hand.host("aten::mm", 41, 51)
        hand.host("aten::mm", 0, 99, thread=AUTOGRAD)
    table = stage_table(parse_trace(hand.records))
    assert rows(table) == {
        stages.MLP: 18,
        stages.REST: 12,
        stages.BACKWARD: 50,
        stages.DATA: 10,
        UNATTRIBUTED: 0,
        IDLE: 10,
    }
    found = {
        (one["name"], one["stage"]): (one["calls_per_step"], round(1000 * one["ms_per_step"], 6))
        for one in table["kernels"]
    }
    assert found == {
        ("aten::mm", stages.MLP): (1, 14),
        ("aten::mm", stages.BACKWARD): (1, 10),
        ("aten::linear", stages.MLP): (1, 2),
    }


# Kernels of decoding, which no training step launches.
DECODING = ("decode_", "linear_")


def test_every_kernel_of_the_package_has_a_stage() -> None:
    found = set()
    for path in Path(nsa.ops.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                found.add(f"{node.name}_window" if node.name.startswith("range_") else node.name)
    found = {name for name in found if not name.startswith(DECODING)}
    assert len(found) > 20
    unknown = {
        name
        for name in found
        if stage_of_kernel(Event(name, 0, 1, 7), []) in (UNATTRIBUTED, PRODUCTS)
    }
    assert unknown == set()


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("selected_gather_bwd_kernel", f"{stages.SELECTED}, backward"),
        ("selected_merge_dq_kernel", f"{stages.SELECTED}, backward"),
        ("selected_merge_out_kernel", stages.SELECTED),
        ("range_fwd_kernel_compressed", stages.COMPRESSED),
        ("select_kernel", stages.SELECTION),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma", f"{stages.DENSE}, backward"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", stages.DENSE),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>", PRODUCTS),
        ("triton_tem_fused_mm_3", PRODUCTS),
        ("triton_red_fused__fused_rms_norm_backward_add_2", OTHER),
        ("void at::native::vectorized_elementwise_kernel<4>", OTHER),
        ("Memcpy HtoD (Pinned -> Device)", stages.DATA),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", stages.COMMUNICATION),
    ],
)
def test_a_kernel_finds_its_stage_by_its_name(name: str, stage: str) -> None:
    assert stage_of_kernel(Event(name, 0, 1, 7), []) == stage


def test_memory_of_modules() -> None:
    hand = HandMade()
    hand.mark(STAGE + stages.FORWARD, 0, 50)
    hand.mark(MODULE + "layer", 1, 40)
    hand.mark(MODULE + "layer.mlp", 10, 30)
    hand.host("aten::mm", 11, 20)
    hand.memory(5, 100)
    hand.memory(12, 1000)
    hand.memory(15, -300)
    hand.memory(16, 7, device=1)
    hand.mark(STAGE + stages.BACKWARD, 50, 90)
    hand.backward_of(11, 60)
    hand.memory(61, 400)
    hand.host("Recomputed", 70, 71, AUTOGRAD)
    hand.mark(MODULE + "again", 66, 68)
    hand.memory(67, 1)
    hand.backward_of(45, 65)
    hand.memory(80, 9999)  # after all modules
    hand.backward_of(46, 79)
    assert module_memory(parse_trace(hand.records), "cpu", 50) == [
        ModuleMemory("layer", forward_peak=1150, backward_peak=1250, kept=800),
        ModuleMemory("layer.mlp", forward_peak=1150, backward_peak=1250, kept=700),
        ModuleMemory("again", backward_peak=1251),
    ]
