"""A profile of a run while it trains: waits, warms up, records, and ends the run."""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile, schedule

from nsa.errors import check
from nsa.stages import BACKWARD, FORWARD, stage, stages_seen_by
from nsa.train.execution.precision import autocast
from nsa.train.profiler.attribution import PREFIX, Attribution, Label, product_stages
from nsa.train.profiler.memory import memory_text, module_memory, modules_marked
from nsa.train.profiler.table import StageTable, stage_table
from nsa.train.profiler.trace import read_trace
from nsa.train.trainer import Trainer

logger = logging.getLogger(__name__)

PROFILE_LIMIT_S = 900.0  # for writing a trace
SNAPSHOT_STEPS = 2
MEMORY_EVENTS = 1_000_000


class EndOfProfileError(Exception):
    """Everything is recorded; the run has no more to do."""


@dataclass(frozen=True)
class Plan:
    """What a profile records.

    Attributes:
        wait: steps before it begins.
        warmup: steps under the profiler that are not recorded.
        active: steps that are.
        nvtx: whether stages are NVTX ranges as well, and the recorded steps lie between
            cudaProfilerStart and Stop.
        memory: whether a snapshot of the allocator and the memory of each module are taken
            afterwards.
    """

    wait: int = 10
    warmup: int = 10
    active: int = 50
    nvtx: bool = False
    memory: bool = False

    def __post_init__(self) -> None:
        for name in ("wait", "warmup", "active"):
            check(
                getattr(self, name) > 0,
                "nsa profile",
                f"--{name}",
                "be positive",
                getattr(self, name),
            )

    def num_steps(self, cuda_graphs: bool) -> int:
        """Optimizer steps that it takes."""
        reference = 2 if cuda_graphs else 0
        return (
            self.wait
            + reference
            + self.warmup
            + self.active
            + (SNAPSHOT_STEPS if self.memory else 0)
        )


class Session:
    """Profiles a trainer from its ``on_step``; the main process records, the others go the same way.

    Args:
        plan: what is recorded.
        folder: for the files; it exists.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self._step_times: list[float] = []
        self._steps: Generator[None] | None = None
        self._fitted = True

    @property
    def trace(self) -> Path:
        """The recorded steps; there once all are."""
        return self.folder / "trace.json.gz"

    @property
    def _reference(self) -> Path:
        return self.folder / "reference.json.gz"

    @property
    def _modules(self) -> Path:
        return self.folder / "modules.json.gz"

    def attach(self, trainer: Trainer) -> None:
        """Begin with the next step of ``trainer``, whose ``on_step`` is :meth:`on_step`."""
        self._trainer = trainer
        self._steps = self._record_run()
        next(self._steps)

    def on_step(self) -> None:
        """After each step.

        Raises:
            EndOfProfileError: after the last.
        """
        assert self._steps is not None, "attach first"
        self._trainer.beat("profile", PROFILE_LIMIT_S)
        try:
            next(self._steps)
        except StopIteration:
            raise EndOfProfileError from None

    def close(self) -> None:
        """Stop recording, wherever the run is."""
        if self._steps is not None:
            self._steps.close()

    def _record_run(self) -> Generator[None]:
        """Everything, with a pause for each step."""
        plan, trainer = self.plan, self._trainer
        graphs = trainer.config.cuda_graphs
        if not trainer.processes.is_main:
            for _ in range(plan.num_steps(graphs)):
                yield
            if plan.memory:
                self._run_modules()
            return
        for _ in range(plan.wait):
            yield
            self._step_times.append(time.perf_counter())
        with stages_seen_by(self._range):
            if graphs:
                with trainer.launched_singly():
                    yield from self._record(self._reference, 1, 1)
            yield from self._record(self.trace, plan.warmup, plan.active)
        if plan.memory:
            yield from self._snapshot()
            self._record_modules()

    def _record(self, path: Path, warmup: int, active: int) -> Iterator[None]:
        is_main_record = path == self.trace
        with ExitStack() as stack:
            profiler = stack.enter_context(
                profile(
                    activities=self._activities(), schedule=schedule(wait=0, warmup=warmup, active=active, repeat=1),
                    record_shapes=self._trainer.config.compile, acc_events=True,
                    on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
                )
            )  # fmt: skip
            for number in range(warmup + active):
                if number == warmup and self.plan.nvtx and is_main_record:
                    torch.cuda.profiler.start()
                    stack.callback(torch.cuda.profiler.stop)
                yield
                profiler.step()

    def _activities(self) -> list[ProfilerActivity]:
        on_gpu = self._trainer.device.type == "cuda"
        return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]

    @contextmanager
    def _range(self, name: str) -> Iterator[None]:
        with ExitStack() as stack:
            if self.plan.nvtx:
                stack.enter_context(torch.cuda.nvtx.range(name))
            stack.enter_context(record_function(PREFIX + name))
            yield

    def _snapshot(self) -> Iterator[None]:
        """What the allocator does over some steps, for https://pytorch.org/memory_viz."""
        on_gpu = self._trainer.device.type == "cuda"
        if on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        for _ in range(SNAPSHOT_STEPS):
            yield
        if on_gpu:
            torch.cuda.memory._dump_snapshot(str(self.folder / "memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)

    def _record_modules(self) -> None:
        recorded = profile(activities=self._activities(), profile_memory=True, acc_events=True)
        with recorded as profiler, modules_marked(self._trainer.model):
            on_gpu = self._trainer.device.type == "cuda"
            self._allocated = torch.cuda.memory_allocated() if on_gpu else 0
            with stages_seen_by(self._range):
                self._run_modules()
        if self._fitted:
            profiler.export_chrome_trace(str(self._modules))

    def _run_modules(self) -> None:
        """Forward and backward of one micro-batch through the modules themselves."""
        trainer = self._trainer
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
            self._fitted = False
            logger.warning(
                "memory of modules: left out, the micro-batch does not fit when nothing is compiled"
            )

    # --- afterwards
    # -------------------------------------------------------------------------------------------------------
    def write(self) -> StageTable | None:
        """Read what was recorded and write the tables; None where another tool took the GPU's records away."""
        trainer = self._trainer
        if self._modules.exists():
            modules = module_memory(read_trace(self._modules), trainer.device.type, self._allocated)
            tokens = trainer.config.micro_batch * trainer.config.seq_len
            self._write_text("memory.txt", memory_text(modules, tokens))
            self._write_json("memory.json", [asdict(module) for module in modules])
            self._modules.unlink()
        trace, products = read_trace(self.trace), product_stages(trainer.model)
        if trainer.device.type == "cuda" and not trace.device:
            return None
        reference: list[Label] = []
        if self._reference.exists():
            single = read_trace(self._reference)
            reference = Attribution(single, products).micro_batch(single)
        table = stage_table(trace, Attribution(trace, products, reference))
        # Of the waiting steps the first compile; those of the second half do not.
        gaps = [
            after - before
            for before, after in zip(self._step_times, self._step_times[1:], strict=False)
        ]
        if gaps:
            table.unprofiled_step_ms = 1000 * statistics.median(gaps[len(gaps) // 2 :])
        self._write_text("stages.txt", table.text())
        self._write_text("kernels.txt", table.kernels_text())
        self._write_json("stages.json", table.to_json())
        return table

    def _write_text(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="utf-8")

    def _write_json(self, name: str, content: object) -> None:
        self._write_text(name, json.dumps(content, indent=1) + "\n")
