"""``nsa profile`` on a CPU, and tables of traces in which every microsecond is known."""

from __future__ import annotations

import ast
import itertools
import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import nsa.ops
from nsa import cli, stages
from nsa.train.load import to_yaml
from nsa.train.profiler import (
    MODULE,
    OTHER,
    PRODUCTS,
    STAGE,
    UNATTRIBUTED,
    Event,
    kernels_text,
    module_memory,
    parse_trace,
    stage_of_kernel,
    stage_table,
    table_text,
)
from nsa.train.trainer import Trainer
from tests.train.cases import tiny_config

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


GOLDEN_CPU = """\
2 steps, 0.100 ms per step

stage                                             ms    share
MLP                                            0.018    18.0%
embedding + norms + residual                   0.012    12.0%
backward                                       0.050    50.0%
data                                           0.010    10.0%
unattributed                                   0.000     0.0%
idle                                           0.010    10.0%
sum                                            0.100   100.0%

ms per step   share    calls  stage                                   operator, its own time
      0.014   14.0%      1.0  MLP                                     aten::mm
      0.010   10.0%      1.0  backward                                aten::mm
      0.002    2.0%      1.0  MLP                                     aten::linear
"""


def test_steps_on_a_gpu():
    table = stage_table(parse_trace(steps_on_a_gpu(3).records))
    assert table_text({**table, "unprofiled_step_ms": 0.09}) == GOLDEN
    (update,) = (one for one in table["kernels"] if one["stage"] == stages.OPTIMIZER)
    assert (update["name"], update["calls_per_step"]) == ("nvjet_sm90_tst", 1)
    assert update["ms_per_step"] == pytest.approx(0.008)
    assert kernels_text(table, 1).count("\n") == 2


def test_a_single_step_ends_with_its_last_kernel_or_its_host():
    table = stage_table(parse_trace(steps_on_a_gpu(1).records))
    assert (table["steps"], table["step_ms"]) == (1, pytest.approx(0.086))
    assert sum(row["total_ms"] for row in table["stages"]) == pytest.approx(0.086)


def test_steps_on_a_cpu_are_divided_by_ranges():
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
    table = {**stage_table(parse_trace(hand.records)), "unprofiled_step_ms": None}
    assert f"{table_text(table)}\n{kernels_text(table)}" == GOLDEN_CPU


# Kernels of decoding, which no training step launches.
DECODING = ("decode_", "linear_")


def test_every_kernel_of_the_package_has_a_stage():
    found = set()
    for path in Path(nsa.ops.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                found.add(f"{node.name}_window" if node.name.startswith("range_") else node.name)
    found = {name for name in found if not name.startswith(DECODING)}
    assert len(found) > 20
    unknown = {
        name for name in found if stage_of_kernel(Event(name, 0, 1), []) in (UNATTRIBUTED, PRODUCTS)
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
    assert stage_of_kernel(Event(name, 0, 1), []) == stage


def test_memory_of_modules():
    hand = HandMade()
    hand.mark(MODULE + "layer", 1, 40)
    hand.mark(MODULE + "layer.mlp", 10, 30)
    hand.memory(5, 100)
    hand.memory(12, 1000)
    hand.memory(15, -300)
    hand.memory(16, 7, device=1)
    hand.memory(80, 9999)  # after all modules
    found = module_memory(parse_trace(hand.records), on_gpu=False, allocated=50)
    assert [tuple(module.values()) for module in found] == [
        ("layer", 1150, 800),
        ("layer.mlp", 1150, 700),
    ]


# --- runs on a CPU --------------------------------------------------------------------------------
SHORT = ("--wait", "1", "--warmup", "1", "--active", "2", "--memory", "--log-every", "1")


def profile(tmp_path: Path, *words: str, **changes: Any) -> tuple[int, Path]:
    settings = {"steps": 40, "eval_every": 0, "checkpoint_every": 0, **changes}
    config = tmp_path / "tiny.yaml"
    config.write_text(to_yaml(tiny_config(tmp_path, **settings)))
    run = tmp_path / "run"
    return cli.main(["profile", str(config), "--run-dir", str(run), *words]), run


def test_a_run_is_recorded(tmp_path, capsys):
    code, run = profile(tmp_path, *SHORT)
    assert code == 0
    folder = run / "profile"
    found = json.loads((folder / "stages.json").read_text())
    times = {row["stage"]: row["total_ms"] for row in found["stages"]}
    assert (found["device"], found["steps"]) == ("cpu", 2)
    assert sum(times.values()) == pytest.approx(found["step_ms"])
    parts = [stages.BACKWARD, stages.OPTIMIZER, "idle"]
    parts += [stages.PROJECTION, stages.COMPRESSION, stages.COMPRESSED, stages.SELECTION]
    parts += [stages.SELECTED, stages.WINDOW, stages.GATES, stages.MLP, stages.LOSS]
    parts += [stages.REST, stages.TELEMETRY]
    assert [part for part in parts if not times[part] > 0] == []
    assert (folder / "stages.txt").read_text() in capsys.readouterr().out
    assert "aten::mm" in (folder / "kernels.txt").read_text()
    # The run ends with the profile: no checkpoint, and the rows of an ordinary run.
    assert not list((run / "checkpoints").iterdir())
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 1 + 1 + 2 + 2 + 1))
    assert "layers.0.mlp" in (folder / "memory.txt").read_text()
    modules = json.loads((folder / "memory.json").read_text())
    (mlp,) = (module for module in modules if module["name"] == "layers.0.mlp")
    # Kept are the MLP's input and two hidden tensors, and its output, which it returns: fp32, 2
    # sequences of 64 tokens.
    assert mlp["kept"] == 4 * 128 * (2 * 64 + 32)
    assert mlp["forward_peak"] >= mlp["kept"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--nvtx --active 1", "--nvtx must be left out on a CPU"),
        ("--active 0", "--active must be positive, got 0"),
        ("--active 19 --memory", "--steps must be at least 41 for this profile, got 40"),
    ],
)
def test_what_cannot_be_recorded(tmp_path, words, message, capsys):
    code, run = profile(tmp_path, *words.split())
    assert code == 2
    assert message in capsys.readouterr().err
    assert not run.exists()


def test_a_run_that_is_stopped_has_no_profile(tmp_path, monkeypatch, capsys):
    real = Trainer.train_step

    def step(trainer, *given):
        os.kill(os.getpid(), signal.SIGTERM)
        return real(trainer, *given)

    monkeypatch.setattr(Trainer, "train_step", step)
    code, run = profile(tmp_path, *SHORT)
    assert code == 1
    assert "stopped by SIGTERM after step 1" in capsys.readouterr().out
    assert not list((run / "profile").iterdir())


def test_stages_cost_nothing_without_a_listener():
    assert stages.stage(stages.MLP) is stages.stage(stages.GATES)
    assert isinstance(stages.stage(stages.MLP), nullcontext)
    heard = []

    @stages.in_stage(stages.LOSS)
    def run(x):
        with stages.stage(stages.GATES):
            return x + 1

    def listen(name):
        heard.append(name)
        return nullcontext()

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    with stages.stages_seen_by(listen):
        run(torch.zeros(()))
        compiled(torch.zeros(()))  # which has no stages inside
    run(torch.zeros(()))
    assert heard == [stages.LOSS, stages.GATES]
