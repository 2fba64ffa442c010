"""``nsa bench scaling``: steps of the trainer on several processes, and the communication that computation does not hide."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from nsa.bench.attention import release_memory
from nsa.bench.communication import Communication, communication
from nsa.bench.rows import Origin, origin
from nsa.bench.table import align
from nsa.bench.targets import speed_up_target
from nsa.errors import check
from nsa.train import environment
from nsa.train.config import TrainConfig
from nsa.train.distributed.launch import Launch, check_platform, communication_settings
from nsa.train.distributed.processes import Processes, join
from nsa.train.execution.precision import choose_device
from nsa.train.run_folder import RunFolder
from nsa.train.telemetry.throughput import MIB
from nsa.train.trainer import Trainer
from nsa.train.watch.out_of_memory import check_run_fits

PROFILED_STEPS = 3
_EXCHANGES = 50
_HEADER = (
    "strategy",
    "gradients",
    "bucket MiB",
    "processes",
    "step ms",
    "tokens/s",
    "of one",
    "must",
    "sent ms",
    "exposed ms",
    "idle ms",
    "MiB",
    "loss",
)


@dataclass(frozen=True)
class ScalingPlan:
    """What is to be measured.

    Attributes:
        name: of the configuration.
        config: the run; its global batch is divided among the processes that there are.
        buckets_mib: sizes of DDP's buckets to try; empty leaves that of the configuration.
        warmup: steps before anything is looked at.
        steps: timed steps.
        out: JSONL file to append to; None keeps the rows to itself.
        commit: to record where the checkout has no git.
    """

    name: str
    config: TrainConfig
    buckets_mib: Sequence[float] = ()
    warmup: int = 10
    steps: int = 20
    out: Path | None = None
    commit: str | None = None


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
    """The same global batch on another number of processes, in micro-batches of at most as many windows as before.

    Raises:
        ValueError: it cannot be divided.
    """
    windows, rest = divmod(config.global_batch, world_size)
    rule = f"be a multiple of the number of processes ({world_size}), so that none is without work"
    check(rest == 0, "nsa bench scaling", "global_batch", rule, config.global_batch)
    micro_batch = max(size for size in range(1, config.micro_batch + 1) if windows % size == 0)
    return replace(config, world_size=world_size, micro_batch=micro_batch, accumulation=windows // micro_batch)


def bench_scaling(plan: ScalingPlan, launch: Launch) -> None:
    """Measure, print and write rows; every process of the launch comes here, the main one speaks.

    Raises:
        ValueError: the configuration does not fit the launch.
    """
    check_platform("nsa bench scaling")
    config = divided(plan.config, launch.world_size)
    buckets = plan.buckets_mib or [config.parallel.bucket_mib]
    parallel = [replace(config.parallel, bucket_mib=size) for size in buckets]
    device = choose_device(config.device, launch.local_rank)
    check_run_fits("nsa bench scaling", config, device)
    here = origin(device, plan.commit)
    rows = []
    with join(launch, device) as processes:
        for setting in parallel:
            last = plan.warmup + PROFILED_STEPS + plan.steps
            run = replace(
                config, parallel=setting, steps=max(config.steps, last + 1), log_every=0, eval_windows=0, sample_tokens=0,
                checkpoint_every=0,
            )  # fmt: skip
            row = _measure(plan, run, processes, device, here)
            if not processes.is_main:
                continue
            rows.append(row)
            print(f"{row.strategy}, bucket {row.bucket_mib:g} MiB, {row.processes} processes: {row.step_ms:.2f} ms", flush=True)
            if plan.out is not None:
                plan.out.parent.mkdir(parents=True, exist_ok=True)
                with plan.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(dataclasses.asdict(row)) + "\n")
        if processes.is_main:
            print("\n" + scaling_table(rows if plan.out is None else read_scaling_rows(plan.out)), flush=True)


def read_scaling_rows(path: Path) -> list[ScalingRow]:
    """Rows of a file that this command wrote."""
    return [ScalingRow(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def scaling_table(rows: Sequence[ScalingRow]) -> str:
    """Rows as text.

    ``of one`` is the speed over that of one process with the same code, configuration, global batch and way to run a step;
    ``must`` what it should be at least, where there is a target.
    """

    def of(row: ScalingRow) -> tuple[Any, ...]:
        step = (row.compile, row.cuda_graphs, row.compute_dtype, row.checkpointing)
        return row.config, row.global_batch, row.seq_len, *step, row.gpu, row.commit

    alone = {of(row): row.tokens_per_s for row in rows if row.processes == 1}
    lines: list[tuple[str, ...]] = [_HEADER]
    for row in rows:
        optional = (row.communication_ms, row.exposed_ms, row.idle_ms)
        speed_up = row.tokens_per_s / alone[of(row)] if of(row) in alone else None
        lines.append((
            row.strategy, "bf16" if row.gradient_compression == "bf16" else "fp32", f"{row.bucket_mib:g}", str(row.processes),
            f"{row.step_ms:.2f}", f"{row.tokens_per_s:,.0f}", "" if speed_up is None else f"{speed_up:.2f}",
            _verdict(row, speed_up),
            *("" if value is None else f"{value:.2f}" for value in optional),
            "" if row.peak_mib is None else f"{row.peak_mib:,.0f}", f"{row.loss_nats:.4f}",
        ))  # fmt: skip
    return "\n".join(align(lines))


def _verdict(row: ScalingRow, speed_up: float | None) -> str:
    must = speed_up_target(row.gpu, row.config, row.processes)
    if must is None or speed_up is None:
        return ""
    return f"{must:g} {'pass' if speed_up >= must else 'FAIL'}"


class _MeasuredError(Exception):
    """All steps that were wanted are done; leaves the run before it writes a checkpoint that nobody wants."""


class _Clock:
    """Follows a run by its signs of life: warm-up, steps under the profiler, timed steps."""

    def __init__(self, device: torch.device, warmup: int, steps: int) -> None:
        self._device, self._warmup, self._begin_step = device, warmup, warmup + PROFILED_STEPS
        self._end_step, self._step, self._begin = warmup + PROFILED_STEPS + steps, -1, 0.0
        self._profile: profile | None = None
        self.seconds, self.communication = 0.0, Communication(0.0, 0.0, 0.0)

    def beat(self, phase: str, step: int, limit_s: float) -> None:
        """A sign of life, as the trainer gives it; the first one of a step counts."""
        if step <= self._step:
            return
        self._step = step
        if step == self._warmup and self._device.type == "cuda":
            torch.cuda.synchronize()
            self._profile = profile(activities=[ProfilerActivity.CUDA])
            self._profile.start()
        elif step == self._begin_step:
            self._read_profile()
            self._begin = time.perf_counter()
        elif step == self._end_step:
            self._wait()
            self.seconds = time.perf_counter() - self._begin
            raise _MeasuredError

    def _read_profile(self) -> None:
        self._wait()
        if self._profile is None:
            return
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            self.communication = communication(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])
        self._profile = None
        torch.cuda.reset_peak_memory_stats(self._device)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def _measure(plan: ScalingPlan, config: TrainConfig, processes: Processes, device: torch.device, here: Origin) -> ScalingRow:
    torch.compiler.reset()  # each setting compiles the same code anew
    clock = _Clock(device, plan.warmup, plan.steps)
    with _shared_folder(processes) as folder:
        with processes.main_first():
            path = folder / "run"
            run_folder = RunFolder.create(path, config) if processes.is_main else RunFolder.open(path)
        trainer = Trainer(config, run_folder, processes=processes, beat=clock.beat, stops_at_once=True)
        with suppress(_MeasuredError):
            trainer.run()
    cuda = device.type == "cuda"
    sums = processes.total(*map(round, dataclasses.astuple(clock.communication)))
    sent_ms, exposed_ms, idle_ms = (total / processes.world_size / PROFILED_STEPS / 1000 for total in sums)
    (peak,) = processes.largest(torch.cuda.max_memory_allocated(device) if cuda else 0)
    parallel, tokens = config.parallel, plan.steps * config.global_batch * config.seq_len
    row = ScalingRow(
        config=plan.name, processes=processes.world_size, strategy=parallel.strategy,
        gradient_compression=parallel.gradient_compression, gather_dtype=parallel.gather_dtype, bucket_mib=parallel.bucket_mib,
        static_graph=parallel.static_graph, compile_layers=parallel.compile_layers,
        checkpointing=config.checkpointing.policy, compile=config.compile, cuda_graphs=config.cuda_graphs,
        compute_dtype=config.compute_dtype, seq_len=config.seq_len, global_batch=config.global_batch,
        micro_batch=config.micro_batch, accumulation=config.accumulation,
        parameters=trainer.model.num_parameters()["total"], step_ms=round(1000 * clock.seconds / plan.steps, 4),
        tokens_per_s=round(tokens / clock.seconds, 1), communication_ms=round(sent_ms, 4) if cuda else None,
        exposed_ms=round(exposed_ms, 4) if cuda else None, idle_ms=round(idle_ms, 4) if cuda else None,
        exchange_us=round(_exchange_us(processes), 1),
        peak_mib=round(peak / MIB, 1) if cuda else None, loss_nats=round(trainer.state.progress.window.loss_nats, 6),
        nccl=environment.nccl(), nccl_settings=communication_settings(), **dataclasses.asdict(here),
    )  # fmt: skip
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


@contextmanager
def _shared_folder(processes: Processes) -> Iterator[Path]:
    """A folder for the processes of one machine, removed when all have left."""
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        if processes.world_size > 1:
            dist.broadcast_object_list(shared)
        yield Path(shared[0])
        processes.wait_for_all()
