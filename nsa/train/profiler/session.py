"""A profile of a run while it trains: waits, warms up, records, and ends the run."""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile, schedule

from nsa.files import replace_text
from nsa.stages import BACKWARD, FORWARD, stage, stages_seen_by
from nsa.train.execution.precision import autocast
from nsa.train.profiler.table import kernels_text, stage_table, table_text
from nsa.train.profiler.trace import STAGE, memory_text, module_memory, modules_marked, read_trace
from nsa.train.trainer import Trainer, TrainingStoppedError

logger = logging.getLogger(__name__)

_SNAPSHOT_STEPS = 2
_MEMORY_EVENTS = 1_000_000


@dataclass(frozen=True)
class Plan:
    """Schedule and contents of a profile.

    Attributes:
        wait: steps before the profiler starts.
        warmup: steps under the profiler that are not recorded.
        active: steps that are recorded.
        nvtx: whether stages are NVTX ranges as well, and the recorded steps lie between
            cudaProfilerStart and cudaProfilerStop.
        memory: whether a snapshot of the allocator and the memory of each module are recorded
            afterwards.
    """

    wait: int = 10
    warmup: int = 10
    active: int = 50
    nvtx: bool = False
    memory: bool = False

    @property
    def num_steps(self) -> int:
        """Optimizer steps that the profile takes."""
        return self.wait + self.warmup + self.active + _SNAPSHOT_STEPS * self.memory


def record(trainer: Trainer, plan: Plan, folder: Path) -> Generator[None]:
    """Record a run; the main process records, the other ranks stay synchronized.

    Args:
        trainer: the run; its ``on_step`` continues this generator.
        plan: schedule and contents.
        folder: existing folder for the files.

    Raises:
        TrainingStoppedError: after the last step.
    """
    if not trainer.processes.is_main:
        for _ in range(plan.num_steps):
            yield
        if plan.memory:
            _run_modules(trainer)
        raise TrainingStoppedError("the profile is recorded")
    on_gpu, step_times = trainer.device.type == "cuda", list[float]()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] * on_gpu)]
    for _ in range(plan.wait):
        yield
        step_times.append(time.perf_counter())
    with stages_seen_by(_listener(plan.nvtx)), ExitStack() as stack:
        profiler = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=plan.warmup, active=plan.active, repeat=1),
            acc_events=True,
            on_trace_ready=lambda done: done.export_chrome_trace(str(folder / "trace.json.gz")),
        )
        stack.enter_context(profiler)
        for number in range(plan.warmup + plan.active):
            if number == plan.warmup and plan.nvtx:
                torch.cuda.profiler.start()
                stack.callback(torch.cuda.profiler.stop)
            yield
            profiler.step()
    if plan.memory:
        if on_gpu:  # for https://pytorch.org/memory_viz
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
        for _ in range(_SNAPSHOT_STEPS):
            yield
        if on_gpu:
            torch.cuda.memory._dump_snapshot(str(folder / "memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        _record_modules(trainer, activities, folder)
    _write_tables(folder, step_times, on_gpu)
    raise TrainingStoppedError(f"the profile is recorded in {folder}")


def _listener(nvtx: bool) -> Any:
    @contextmanager
    def enter(name: str) -> Iterator[None]:
        with ExitStack() as stack:
            if nvtx:
                stack.enter_context(torch.cuda.nvtx.range(name))
            stack.enter_context(record_function(STAGE + name))
            yield

    return enter


def _record_modules(trainer: Trainer, activities: list[ProfilerActivity], folder: Path) -> None:
    path = folder / "modules.json.gz"
    with (
        stages_seen_by(_listener(False)),
        modules_marked(trainer.model),
        profile(activities=activities, profile_memory=True, acc_events=True) as profiler,
    ):
        allocated = torch.cuda.memory_allocated() if trainer.device.type == "cuda" else 0
        fitted = _run_modules(trainer)
    if not fitted:
        return
    profiler.export_chrome_trace(str(path))
    modules = module_memory(read_trace(path), trainer.device.type, allocated)
    path.unlink()
    tokens = trainer.config.micro_batch * trainer.config.seq_len
    replace_text(folder / "memory.txt", memory_text(modules, tokens))
    _write_json(folder / "memory.json", [asdict(module) for module in modules])


def _run_modules(trainer: Trainer) -> bool:
    """One micro-batch forward and backward through the modules; False if it does not fit."""
    batch = trainer.next_batches()[0].to(trainer.device)
    try:
        with torch.compiler.set_stance("force_eager"):
            with stage(FORWARD), autocast(trainer.device, trainer.config.compute_dtype):
                total = trainer.strategy.loss(
                    batch.tokens, batch.targets, batch.cu_seqlens, batch.max_seqlen
                )
            with stage(BACKWARD):
                total.backward()
    except torch.OutOfMemoryError:
        why = "the micro-batch does not fit when nothing is compiled"
        logger.warning("memory of modules: left out, %s", why)
        return False
    return True


def _write_tables(folder: Path, step_times: list[float], on_gpu: bool) -> None:
    trace = read_trace(folder / "trace.json.gz")
    if on_gpu and not trace.device:
        reads = "another tool, such as nsys, reads the GPU's records of this process"
        logger.warning("the trace contains no kernel: %s", reads)
        return
    # The first waiting steps compile; steps of the second half do not.
    gaps = [after - before for before, after in pairwise(step_times)]
    unprofiled = 1000 * statistics.median(gaps[len(gaps) // 2 :]) if gaps else None
    table = {**stage_table(trace), "unprofiled_step_ms": unprofiled}
    replace_text(folder / "stages.txt", table_text(table))
    replace_text(folder / "kernels.txt", kernels_text(table))
    _write_json(folder / "stages.json", table)


def _write_json(path: Path, content: object) -> None:
    replace_text(path, json.dumps(content, indent=1) + "\n")
