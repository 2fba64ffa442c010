"""``nsa bench scaling``: steps of the trainer on several processes, and exposed communication."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nsa.bench.clock import release_memory
from nsa.bench.rows import Origin, Results
from nsa.bench.subjects import as_measured
from nsa.bench.table import align, field, number, table, verdicts
from nsa.bench.targets import outcomes_of
from nsa.bench.train_run import measure_steps
from nsa.errors import check
from nsa.train import environment
from nsa.train.config import TrainConfig
from nsa.train.distributed.launch import Launch, check_platform, communication_settings
from nsa.train.distributed.processes import Processes, join
from nsa.train.execution.precision import choose_device
from nsa.train.watch.out_of_memory import check_run_fits

PROFILED_STEPS = 3
_EXCHANGES = 50
# What runs on the GPU, by the categories of PyTorch's traces.
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
# Settings that a row repeats.
_OF_THE_RUN = (
    "compile",
    "cuda_graphs",
    "compute_dtype",
    "seq_len",
    "global_batch",
    "micro_batch",
    "accumulation",
)


@dataclass(frozen=True)
class ScalingPlan:
    """What is to be measured.

    Attributes:
        name: of the configuration.
        config: the run; its global batch is divided among the processes that there are.
        buckets_mib: sizes of DDP's buckets to try; empty leaves that of the configuration.
        warmup: steps before the profiled ones.
        steps: timed steps.
        out: JSONL file to append to; None keeps the rows to itself.
        commit: to record where the checkout has no git.
    """

    name: str
    config: TrainConfig
    buckets_mib: Sequence[float]
    warmup: int
    steps: int
    out: Path | None
    commit: str | None


@dataclass(frozen=True)
class ScalingRow(Origin):
    """One setting on one number of processes; ``docs/parallel.md`` explains the fields."""

    config: str
    processes: int
    strategy: str
    gradient_compression: str
    gather_dtype: str
    bucket_mib: float
    static_graph: bool
    compile_layers: bool
    checkpointing: str
    compile: bool
    cuda_graphs: bool
    compute_dtype: str
    seq_len: int
    global_batch: int
    micro_batch: int
    accumulation: int
    parameters: int
    step_ms: float
    tokens_per_s: float
    communication_ms: float | None
    exposed_ms: float | None
    exchange_us: float
    peak_mib: float | None
    loss_nats: float
    nccl: str | None
    nccl_settings: dict[str, str]
    idle_ms: float | None = None  # rows of 2026-11-21 and before have none


def divided(config: TrainConfig, world_size: int) -> TrainConfig:
    """The same global batch on another number of processes, in micro-batches of at most as before.

    Raises:
        ValueError: it cannot be divided.
    """
    windows, remainder = divmod(config.global_batch, world_size)
    rule = f"be a multiple of the number of processes ({world_size}), so that all have work"
    check(remainder == 0, "nsa bench scaling", "global_batch", rule, config.global_batch)
    sizes = range(1, config.micro_batch + 1)
    micro_batch = max(size for size in sizes if windows % size == 0)
    accumulation = windows // micro_batch
    return replace(
        config,
        world_size=world_size,
        micro_batch=micro_batch,
        accumulation=accumulation,
    )


def bench_scaling(plan: ScalingPlan, launch: Launch) -> None:
    """Measure, print and write rows; every process of the launch comes here, the main one prints.

    Raises:
        ValueError: the configuration does not fit the launch.
    """
    check_platform("nsa bench scaling")
    config = divided(plan.config, launch.world_size)
    device = choose_device(config.device, launch.local_rank)
    check_run_fits("nsa bench scaling", config, device)
    config = as_measured(config, plan.warmup, plan.steps + PROFILED_STEPS)
    config = replace(config, log_every=0)
    with join(launch, device) as processes:
        results = None
        if processes.is_main:
            results = Results(ScalingRow, plan.out, device, plan.commit)
        for size in plan.buckets_mib or [config.parallel.bucket_mib]:
            run = replace(config, parallel=replace(config.parallel, bucket_mib=size))
            found = _measure(plan, run, processes, device)
            if results is not None:
                results.add(_progress, **found)
        if results is not None:
            known = [] if plan.out is None else read_scaling_rows(plan.out)
            results.finish(lambda rows: scaling_table(known or rows))


def _progress(row: ScalingRow) -> str:
    how = f"{row.strategy}, bucket {row.bucket_mib:g} MiB, {row.processes} processes"
    return f"{how}: {row.step_ms:.2f} ms"


def read_scaling_rows(path: Path) -> list[ScalingRow]:
    """Rows of a file that this command wrote."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [ScalingRow(**json.loads(line)) for line in lines]


def scaling_table(rows: Sequence[ScalingRow]) -> str:
    """Rows as text.

    ``of one`` is the speed over that of one process with the same code, configuration, global batch
    and way to run a step.
    """

    def of(row: ScalingRow) -> tuple[Any, ...]:
        step = (row.compile, row.cuda_graphs, row.compute_dtype, row.checkpointing)
        return row.config, row.global_batch, row.seq_len, *step, row.gpu, row.commit

    alone = {of(row): row.tokens_per_s for row in rows if row.processes == 1}

    def speed_up(row: ScalingRow) -> float | None:
        return row.tokens_per_s / alone[of(row)] if of(row) in alone else None

    cells = {
        "strategy": field("strategy"),
        "gradients": lambda row: "bf16" if row.gradient_compression == "bf16" else "fp32",
        "bucket MiB": field("bucket_mib", "g"),
        "processes": field("processes"),
        "step ms": field("step_ms", ".2f"),
        "tokens/s": field("tokens_per_s", ",.0f"),
        "of one": lambda row: number(speed_up(row), ".2f"),
        "sent ms": field("communication_ms", ".2f"),
        "exposed ms": field("exposed_ms", ".2f"),
        "idle ms": field("idle_ms", ".2f"),
        "MiB": field("peak_mib", ",.0f"),
        "loss": field("loss_nats", ".4f"),
        "target": lambda row: verdicts(outcomes_of(row, lambda _: speed_up(row))),
    }
    return "\n".join(align(table(cells, rows)))


@dataclass(frozen=True)
class Communication:
    """Of one GPU, microseconds.

    Attributes:
        total_us: time in which a kernel of NCCL ran, waiting for slower processes included.
        exposed_us: the part of it in which nothing else ran on the GPU.
        idle_us: time between the first and the last kernel in which nothing ran: the GPU waited for
            its host.
    """

    total_us: float
    exposed_us: float
    idle_us: float


def communication(events: Iterable[Mapping[str, Any]]) -> Communication:
    """Communication in a trace of one process.

    Args:
        events: ``traceEvents`` of a Chrome trace as PyTorch's profiler writes it: ``ts`` and
            ``dur`` in microseconds, ``cat`` and ``name``. Those of the host are left out, and so
            are copies and kernels without duration.
    """
    found: list[tuple[float, float, bool]] = []
    for event in events:
        if event.get("cat") in _ON_DEVICE and event.get("ph", "X") == "X":
            begin = float(event["ts"])
            sends = "nccl" in str(event["name"]).lower()
            found.append((begin, begin + float(event["dur"]), sends))
    sent, computed = (_covered(one for one in found if one[2] is sends) for sends in (True, False))
    ran = _covered(found)
    span = max(one[1] for one in found) - min(one[0] for one in found) if found else 0.0
    return Communication(sent, ran - computed, span - ran)


def _covered(intervals: Iterable[tuple[float, float, bool]]) -> float:
    """Length of the union of intervals ``begin, end``."""
    total, reached = 0.0, float("-inf")
    for begin, end, _ in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _communication(trace: Any) -> Communication:
    """What the profiler saw; without one, nothing."""
    if trace is None:
        return Communication(0.0, 0.0, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        return communication(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def _measure(
    plan: ScalingPlan,
    config: TrainConfig,
    processes: Processes,
    device: torch.device,
) -> dict[str, Any]:
    """What a row says."""
    found, trainer = measure_steps(
        config, device, plan.warmup, plan.steps, processes=processes, profiled=PROFILED_STEPS
    )
    (peak,) = processes.largest(round(found.peak_mib or 0))
    totals = processes.total(*map(round, dataclasses.astuple(_communication(found.trace))))
    each = 1000 * processes.world_size * PROFILED_STEPS
    cuda = device.type == "cuda"
    sent_ms, exposed_ms, idle_ms = (total / each if cuda else None for total in totals)
    row = {
        **{name: getattr(config, name) for name in _OF_THE_RUN},
        **dataclasses.asdict(config.parallel),
        "config": plan.name,
        "processes": processes.world_size,
        "checkpointing": config.checkpointing.policy,
        "parameters": trainer.model.num_parameters()["total"],
        "step_ms": 1000 * found.seconds / plan.steps,
        "tokens_per_s": plan.steps * config.global_batch * config.seq_len / found.seconds,
        "communication_ms": sent_ms,
        "exposed_ms": exposed_ms,
        "idle_ms": idle_ms,
        "exchange_us": _exchange_us(processes),
        "peak_mib": float(peak) if cuda else None,
        "loss_nats": trainer.state.progress.window.loss_nats,
        "nccl": environment.nccl(),
        "nccl_settings": communication_settings(),
    }
    del trainer
    release_memory(device)
    return row


def _exchange_us(processes: Processes) -> float:
    """What the hosts need to agree on a number, as they do twice a step while the device works."""
    processes.wait_for_all()
    begin = time.perf_counter()
    for _ in range(_EXCHANGES):
        processes.largest(0)
    return 1e6 * (time.perf_counter() - begin) / _EXCHANGES
