"""A profile of a run while it trains: waits, warms up, records, and ends the run."""

from __future__ import annotations

import itertools
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
from nsa.files import replace_text
from nsa.stages import BACKWARD, FORWARD, stage, stages_seen_by
from nsa.train.execution.precision import autocast
from nsa.train.profiler.attribution import PREFIX, Attribution, Labels, product_stages
from nsa.train.profiler.memory import memory_text, module_memory, modules_marked
from nsa.train.profiler.table import StageTable, stage_table
from nsa.train.profiler.trace import read_trace
from nsa.train.trainer import Trainer

logger = logging.getLogger(__name__)

_LIMIT_S = 900.0  # for writing a trace
_SNAPSHOT_STEPS = 2
_MEMORY_EVENTS = 1_000_000


class EndOfProfileError(Exception):
    """Everything is recorded; the run ends here."""


@dataclass(frozen=True)
class Plan:
    """What a profile records.

    Attributes:
        wait: steps before the profiler starts.
        warmup: steps under the profiler that are not recorded.
        active: steps that are recorded.
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
            steps = getattr(self, name)
            check(steps > 0, "nsa profile", f"--{name}", "be positive", steps)

    def num_steps(self, cuda_graphs: bool) -> int:
        """Optimizer steps that it takes."""
        more = 2 * cuda_graphs + _SNAPSHOT_STEPS * self.memory
        return self.wait + self.warmup + self.active + more


class Session:
    """Profiles a trainer from its ``on_step``; the main process records, the others keep in step.

    Args:
        plan: what is recorded.
        folder: for the files; it exists.

    Attributes:
        trace: file with the recorded steps; there once all are.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self.trace, self._reference = folder / "trace.json.gz", folder / "reference.json.gz"
        self._step_times: list[float] = []
        self._steps: Generator[None] | None = None

    def attach(self, trainer: Trainer) -> None:
        """Begin with the next step of ``trainer``, whose ``on_step`` is :meth:`on_step`."""
        self._trainer, self._on_gpu = trainer, trainer.device.type == "cuda"
        self._steps = self._record_main() if trainer.processes.is_main else self._keep_in_step()
        next(self._steps)

    def on_step(self) -> None:
        """Called after each step.

        Raises:
            EndOfProfileError: after the last.
        """
        assert self._steps is not None, "attach first"
        self._trainer.beat("profile", _LIMIT_S)
        try:
            next(self._steps)
        except StopIteration:
            raise EndOfProfileError from None

    def close(self) -> None:
        """Stop recording, wherever the run is."""
        if self._steps is not None:
            self._steps.close()

    # Both generators pause once for each step.
    def _keep_in_step(self) -> Generator[None]:
        for _ in range(self.plan.num_steps(self._trainer.config.cuda_graphs)):
            yield
        if self.plan.memory:
            self._run_modules()

    def _record_main(self) -> Generator[None]:
        plan = self.plan
        for _ in range(plan.wait):
            yield
            self._step_times.append(time.perf_counter())
        with stages_seen_by(self._range):
            if self._trainer.config.cuda_graphs:
                with self._trainer.launched_singly():
                    yield from self._record(self._reference, 1, 1)
            yield from self._record(self.trace, plan.warmup, plan.active)
        if plan.memory:
            yield from self._snapshot()
            with stages_seen_by(self._range):
                self._record_modules()

    def _record(self, path: Path, warmup: int, active: int) -> Iterator[None]:
        with ExitStack() as stack:
            profiler = profile(
                activities=self._activities,
                schedule=schedule(wait=0, warmup=warmup, active=active, repeat=1),
                record_shapes=self._trainer.config.compile,
                acc_events=True,
                on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
            )
            stack.enter_context(profiler)
            for number in range(warmup + active):
                if number == warmup and self.plan.nvtx and path == self.trace:
                    torch.cuda.profiler.start()
                    stack.callback(torch.cuda.profiler.stop)
                yield
                profiler.step()

    @property
    def _activities(self) -> list[ProfilerActivity]:
        return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]

    @contextmanager
    def _range(self, name: str) -> Iterator[None]:
        with ExitStack() as stack:
            if self.plan.nvtx:
                stack.enter_context(torch.cuda.nvtx.range(name))
            stack.enter_context(record_function(PREFIX + name))
            yield

    def _snapshot(self) -> Iterator[None]:
        """What the allocator does over some steps, for https://pytorch.org/memory_viz."""
        if self._on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
        for _ in range(_SNAPSHOT_STEPS):
            yield
        if self._on_gpu:
            torch.cuda.memory._dump_snapshot(str(self.folder / "memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)

    def _record_modules(self) -> None:
        trainer, path = self._trainer, self.folder / "modules.json.gz"
        recorded = profile(activities=self._activities, profile_memory=True, acc_events=True)
        with recorded as profiler, modules_marked(trainer.model):
            allocated = torch.cuda.memory_allocated() if self._on_gpu else 0
            fitted = self._run_modules()
        if not fitted:
            return
        profiler.export_chrome_trace(str(path))
        modules = module_memory(read_trace(path), trainer.device.type, allocated)
        path.unlink()
        tokens = trainer.config.micro_batch * trainer.config.seq_len
        self._write_text("memory.txt", memory_text(modules, tokens))
        self._write_json("memory.json", [asdict(module) for module in modules])

    def _run_modules(self) -> bool:
        """One micro-batch forward and backward through the modules; False if it does not fit."""
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
            why = "the micro-batch does not fit when nothing is compiled"
            logger.warning("memory of modules: left out, %s", why)
            return False
        return True

    def write(self) -> StageTable | None:
        """Write the tables; None where another tool took the GPU's records away."""
        trace, products = read_trace(self.trace), product_stages(self._trainer.model)
        if self._on_gpu and not trace.device:
            return None
        reference: Labels = ()
        if self._reference.exists():
            single = read_trace(self._reference)
            reference = Attribution(single, products).micro_batch(single)
        table = stage_table(trace, Attribution(trace, products, reference))
        # The first of the waiting steps compile; those of the second half do not.
        gaps = [after - before for before, after in itertools.pairwise(self._step_times)]
        if gaps:
            table.unprofiled_step_ms = 1000 * statistics.median(gaps[len(gaps) // 2 :])
        self._write_text("stages.txt", table.text())
        self._write_text("kernels.txt", table.kernels_text())
        self._write_json("stages.json", table.to_json())
        return table

    def _write_text(self, name: str, text: str) -> None:
        replace_text(self.folder / name, text)

    def _write_json(self, name: str, content: object) -> None:
        self._write_text(name, json.dumps(content, indent=1) + "\n")
