"""``nsa profile``: time of training steps by stage, and memory by module.

Each moment counts once, so the rows of the table add up to the step. On a GPU a kernel's name tells
its stage, so the table is the same whether a step is launched eagerly, compiled or replayed from
CUDA graphs. Matrix products have one row and other kernels that PyTorch compiles or brings have
another: their names do not say which layer they belong to. On a CPU the main thread's time is
divided by the ranges of the stages, and the backward pass is one row.
"""

from __future__ import annotations

import gzip
import json
import logging
import math
import re
import statistics
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.nn.modules import module as hooks
from torch.profiler import ProfilerActivity, profile, schedule

from nsa import stages
from nsa.files import replace_text
from nsa.train.execution.precision import autocast
from nsa.train.trainer import Trainer, TrainingStoppedError

logger = logging.getLogger(__name__)

STAGE, MODULE, STEP = "stage: ", "module: ", "ProfilerStep#"  # prefixes of ranges
PRODUCTS = "matrix products"
OTHER = "other compiled and PyTorch kernels"
IDLE, UNATTRIBUTED = "idle", "unattributed"
_BACKWARD, _WAITING = ", backward", "waiting for data"
_SNAPSHOT_STEPS = 2
_MEMORY_EVENTS = 1_000_000
_MOST_KERNELS = 200  # in the table as JSON

_OPERATORS = (
    ("heads_kernel", stages.PROJECTION),
    ("compress_", stages.COMPRESSION),
    (r"range_\w+_compressed", stages.COMPRESSED),
    ("select_|token_lse_|index_loss_", stages.SELECTION),
    ("selected_|(list|key|key_block|chunk)_kernel", stages.SELECTED),
    (r"range_\w+_window", stages.WINDOW),
    ("(?i:.*(flash|fmha|sdpa|cudnn))", stages.DENSE),
    ("combine_", stages.GATES),
)
_KERNELS = (
    *_OPERATORS,
    ("(?i:.*nccl)", stages.COMMUNICATION),
    ("muon_", stages.OPTIMIZER),
    ("Memcpy HtoD", stages.DATA),
    ("Memcpy DtoH|add_statistics_kernel", stages.TELEMETRY),
    ("(?i:.*(gemm|gemv|nvjet|xmma|cutlass|splitk))|triton_tem_", PRODUCTS),
    ("sum_rows_kernel|triton_|.*(at::|at_cuda_detail|cub::)|Mem(set|cpy)", OTHER),
    ("", UNATTRIBUTED),
)
_BACKWARD_KERNELS = re.compile(r".*(_(dq|dkv|dx|dw|delta|reduce)_|bwd|bprop|dot_do)")
_TRAINER = (stages.DATA, stages.OPTIMIZER, stages.TELEMETRY)  # stages outside the passes
_ROWS = (
    *(row for _, stage in _OPERATORS for row in (stage, stage + _BACKWARD)),
    *(stages.MLP, stages.LOSS, stages.REST, stages.BACKWARD, PRODUCTS, OTHER),
    *(stages.OPTIMIZER, stages.COMMUNICATION, stages.DATA, stages.TELEMETRY, UNATTRIBUTED, IDLE),
)
_BEHIND = {stages.COMMUNICATION, stages.DATA}  # count only if nothing else runs

Work = tuple[str, str, float]  # name and stage of a kernel or operator, microseconds


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
    with ExitStack() as stack:
        stack.enter_context(stages.stages_seen_by(_nvtx_range if plan.nvtx else _range))
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


def _range(name: str) -> record_function:
    return record_function(STAGE + name)


@contextmanager
def _nvtx_range(name: str) -> Iterator[None]:
    with torch.cuda.nvtx.range(name), _range(name):
        yield


def _record_modules(trainer: Trainer, activities: list[ProfilerActivity], folder: Path) -> None:
    path = folder / "modules.json.gz"
    with (
        _modules_marked(trainer.model),
        profile(activities=activities, profile_memory=True, acc_events=True) as profiler,
    ):
        allocated = torch.cuda.memory_allocated() if trainer.device.type == "cuda" else 0
        fitted = _run_modules(trainer)
    if not fitted:
        return
    profiler.export_chrome_trace(str(path))
    modules = module_memory(_read_trace(path), trainer.device.type == "cuda", allocated)
    path.unlink()
    tokens = trainer.config.micro_batch * trainer.config.seq_len
    replace_text(folder / "memory.txt", memory_text(modules, tokens))
    replace_text(folder / "memory.json", json.dumps(modules, indent=1) + "\n")


def _run_modules(trainer: Trainer) -> bool:
    """One micro-batch forward through the modules; False if it does not fit."""
    batch = trainer.next_batches()[0].to(trainer.device)
    try:
        with (
            torch.compiler.set_stance("force_eager"),
            autocast(trainer.device, trainer.config.compute_dtype),
        ):
            trainer.strategy.loss(batch.tokens, batch.targets, batch.cu_seqlens, batch.max_seqlen)
    except torch.OutOfMemoryError:
        why = "the micro-batch does not fit when nothing is compiled"
        logger.warning("memory of modules: left out, %s", why)
        return False
    return True


def _write_tables(folder: Path, step_times: list[float], on_gpu: bool) -> None:
    trace = _read_trace(folder / "trace.json.gz")
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
    replace_text(folder / "stages.json", json.dumps(table, indent=1) + "\n")


# --- traces ---------------------------------------------------------------------------------------
class Event(NamedTuple):
    """An operator, a range or a kernel; times are microseconds.

    Attributes:
        name: name in the trace.
        begin: start time.
        end: end time.
        thread: thread of the host, or stream of the device.
        launched: time of a kernel's launch on the host; infinite if the trace does not contain it.
    """

    name: str
    begin: float
    end: float
    thread: Any = None
    launched: float = math.inf


@dataclass
class Trace:
    """Events of a trace, ordered by start time; outer events come before those they contain.

    Attributes:
        host: operators and ranges of all threads.
        device: kernels, copies and fills.
        allocations: changes of allocated memory: time, whether on the GPU, bytes.
    """

    host: list[Event] = field(default_factory=list)
    device: list[Event] = field(default_factory=list)
    allocations: list[tuple[float, bool, int]] = field(default_factory=list)

    def ranges(self, prefix: str) -> list[Event]:
        """Host events whose names begin with a prefix."""
        return [event for event in self.host if event.name.startswith(prefix)]


def _read_trace(path: Path) -> Trace:
    return parse_trace(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])


def parse_trace(records: Iterable[dict[str, Any]]) -> Trace:
    """Convert the ``traceEvents`` of a Chrome trace."""
    trace, launches = Trace(), dict[float, float]()
    for record in records:
        category, args, name = record.get("cat"), record.get("args", {}), str(record.get("name"))
        begin, correlation = float(record.get("ts", 0)), args.get("correlation", -1)
        end = begin + float(record.get("dur", 0))
        event = Event(name, begin, end, record.get("tid"), correlation)
        if category in ("cpu_op", "user_annotation"):
            trace.host.append(event)
        elif category in ("cuda_runtime", "cuda_driver"):
            launches[correlation] = begin
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            trace.device.append(event)
        elif name == "[memory]":
            trace.allocations.append((begin, args["Device Type"] == 1, int(args["Bytes"])))
    trace.device = [e._replace(launched=launches.get(e.launched, math.inf)) for e in trace.device]
    trace.host.sort(key=lambda event: (event.begin, -event.end))
    trace.device.sort(key=lambda event: event.begin)
    trace.allocations.sort()
    return trace


# --- time by stage --------------------------------------------------------------------------------
def stage_table(trace: Trace) -> dict[str, Any]:
    """Time by stage over the steps of a trace, in milliseconds per step.

    On a GPU a step lasts from its first kernel to the first kernel of the next one; the last step
    only ends the one before it, unless it is the only one.

    Returns:
        ``device``, ``steps`` (their number), ``step_ms``, ``stages`` (rows that add up to the
        step), ``hidden_communication_ms`` (communication while other kernels ran, not in the rows)
        and ``kernels``, longest first; on a CPU operators with their own time. The row
        ``unattributed`` is time of kernels with an unknown name. ``idle`` is time without a kernel
        in which the host does not wait for data; on a CPU, time outside all stages.
    """
    steps = trace.ranges(STEP)
    number, hidden = len(steps), 0.0
    if trace.device:
        times, hidden, work = _of_kernels(trace, steps)
        number = max(number - 1, 1)
    else:
        work = _own_times(trace, steps[0].thread)
        times = _sums((stage, time) for _, stage, time in work)
    scale, step = 1 / 1000 / number, sum(times.values())
    work = [one for one in work if not one[0].startswith((STAGE, STEP))]
    calls = Counter((name, stage) for name, stage, time in work if time >= 0)
    kernels = _sums(((name, stage), time) for name, stage, time in work)
    rows = {UNATTRIBUTED: 0.0, IDLE: 0.0, **times}
    return {
        "device": "gpu" if trace.device else "cpu",
        "steps": number,
        "step_ms": step * scale,
        "stages": [
            {"stage": name, "total_ms": rows[name] * scale, "share": rows[name] / step}
            for name in _ROWS
            if name in rows
        ],
        "hidden_communication_ms": hidden * scale,
        "kernels": [
            {
                "name": name,
                "stage": stage,
                "calls_per_step": calls[name, stage] / number,
                "ms_per_step": time * scale,
            }
            for (name, stage), time in sorted(kernels.items(), key=lambda one: -one[1])
        ][:_MOST_KERNELS],
    }


def _sums(pairs: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    found = defaultdict[Any, float](float)
    for name, value in pairs:
        found[name] += value
    return found


def _of_kernels(
    trace: Trace, steps: Sequence[Event]
) -> tuple[Mapping[str, float], float, list[Work]]:
    """Microseconds by stage and of hidden communication, and the kernels of the steps."""
    firsts = [
        next(kernel.begin for kernel in trace.device if step.begin <= kernel.launched < step.end)
        for step in steps
    ]
    begin, end = firsts[0], firsts[-1]
    if len(steps) == 1:
        end = max(trace.device[-1].end, steps[0].end)
    ranges = [event for event in trace.ranges(STAGE) if event.name.removeprefix(STAGE) in _TRAINER]
    kernels = [(kernel, stage_of_kernel(kernel, ranges)) for kernel in trace.device]
    spans = [(event.begin, event.end, stage) for event, stage in kernels]
    spans += [(e.begin, e.end, _WAITING) for e in ranges if e.name == STAGE + stages.DATA]
    work = [(e.name, stage, e.end - e.begin) for e, stage in kernels if begin <= e.begin < end]
    return *_divide(spans, begin, end), work


def stage_of_kernel(kernel: Event, ranges: Sequence[Event]) -> str:
    """Stage of a kernel by its name or, for PyTorch's kernels, by the range around its launch.

    Args:
        kernel: the kernel.
        ranges: ranges of the trainer's stages, ordered by start time.
    """
    stage = next(stage for pattern, stage in _KERNELS if re.match(pattern, kernel.name))
    if stage in (PRODUCTS, OTHER, UNATTRIBUTED):
        before = bisect_right(ranges, kernel.launched, key=lambda event: event.begin)
        inside = [event for event in ranges[:before][-1:] if kernel.launched < event.end]
        return inside[0].name.removeprefix(STAGE) if inside else stage
    return stage + _BACKWARD * bool(_BACKWARD_KERNELS.match(kernel.name))


def _divide(
    spans: Iterable[tuple[float, float, str]], begin: float, end: float
) -> tuple[Mapping[str, float], float]:
    """Microseconds by stage, and of communication that overlaps other kernels.

    Kernels that run at the same time share it equally. Communication and copies of data count only
    if nothing else runs.

    Args:
        spans: begin, end and stage of kernels and of waits for data.
        begin: start of the first step.
        end: end of the last step.
    """
    points = [(begin, 0, IDLE), (end, 0, IDLE)]
    for first, last, stage in spans:
        if last > begin and first < end:
            points += [(max(first, begin), 1, stage), (min(last, end), -1, stage)]
    times, active, hidden = defaultdict[str, float](float), Counter[str](), 0.0
    for (at, change, stage), (then, _, _) in pairwise(sorted(points)):
        active[stage] += change
        running = [name for name in active.elements() if name != _WAITING]
        counted = [name for name in running if name not in _BEHIND] or running
        counted = counted or [stages.DATA if active[_WAITING] > 0 else IDLE]
        for name in counted:
            times[name] += (then - at) / len(counted)
        if stages.COMMUNICATION in set(running).difference(counted):
            hidden += then - at
    return times, hidden


def _own_times(trace: Trace, thread: Any) -> list[Work]:
    """Own time of each event in the steps of a thread: those it contains are subtracted."""
    work, running = [], list[tuple[Event, str]]()
    for event in (event for event in trace.host if event.thread == thread):
        while running and running[-1][0].end <= event.begin:
            running.pop()
        time, stage = event.end - event.begin, IDLE
        if running:
            outer, stage = running[-1]
            work.append((outer.name, stage, -time))
        if event.name.startswith(STAGE):
            stage = event.name.removeprefix(STAGE).replace(stages.FORWARD, stages.REST)
        if running or event.name.startswith(STEP):
            work.append((event.name, stage, time))
            running.append((event, stage))
    return work


def table_text(table: Mapping[str, Any]) -> str:
    """The stages of a table as text."""
    unprofiled = table["unprofiled_step_ms"]
    steps = f"{table['steps']} steps, {table['step_ms']:.3f} ms per step"
    steps += f"; {unprofiled:.3f} ms without the profiler" if unprofiled else ""
    whole = {"stage": "sum", "total_ms": table["step_ms"], "share": 1.0}
    lines = [steps, "", f"{'stage':<40}{'ms':>12}{'share':>9}"]
    for row in (*table["stages"], whole):
        lines.append(f"{row['stage']:<40}{row['total_ms']:>12.3f}{row['share']:>9.1%}")
    if hidden := table["hidden_communication_ms"]:
        lines.append(f"communication behind other kernels, not in the sum: {hidden:.3f} ms")
    return "\n".join(lines) + "\n"


def kernels_text(table: Mapping[str, Any], limit: int = 40) -> str:
    """The longest kernels of a table as text."""
    what = "operator, its own time" if table["device"] == "cpu" else "kernel"
    lines = [f"{'ms per step':>11}{'share':>8}{'calls':>9}  {'stage':<40}{what}"]
    for kernel in table["kernels"][:limit]:
        time = kernel["ms_per_step"]
        values = f"{time:>11.3f}{time / table['step_ms']:>8.1%}{kernel['calls_per_step']:>9.1f}"
        lines.append(f"{values}  {kernel['stage']:<40}{kernel['name'][:120]}")
    return "\n".join(lines) + "\n"


# --- memory by module -----------------------------------------------------------------------------
@contextmanager
def _modules_marked(model: nn.Module) -> Iterator[None]:
    """Context manager that makes the forward pass of every module a range of the trace.

    The hooks are PyTorch's global ones: projections refuse hooks of their own.
    """
    names = {module: name or "model" for name, module in model.named_modules()}
    ranges: list[record_function] = []

    def enter(module: nn.Module, args: Any) -> None:
        if module in names:
            ranges.append(record_function(MODULE + names[module]))
            ranges[-1].__enter__()

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if module in names:
            ranges.pop().__exit__(None, None, None)

    with (
        hooks.register_module_forward_pre_hook(enter),
        hooks.register_module_forward_hook(leave),
    ):
        yield


def module_memory(trace: Trace, on_gpu: bool, allocated: int) -> list[dict[str, Any]]:
    """Memory by module over a forward pass, in the order of their begins.

    Args:
        trace: trace of a forward pass with marked modules and allocations.
        on_gpu: whether memory of the GPU is counted, otherwise of the host.
        allocated: bytes allocated when the trace began.

    Returns:
        For each module its ``name``, the largest allocated memory of the process during its forward
        pass (``forward_peak``) and the memory that the pass left allocated (``kept``), in bytes.
    """
    times, levels = [-math.inf], [allocated]
    for at, is_gpu, change in trace.allocations:
        if is_gpu == on_gpu:
            times.append(at)
            levels.append(levels[-1] + change)

    found = []
    for mark in trace.ranges(MODULE):
        first, last = bisect_right(times, mark.begin) - 1, bisect_right(times, mark.end)
        inside = levels[first:last]
        sizes = {"forward_peak": max(inside), "kept": inside[-1] - inside[0]}
        found.append({"name": mark.name.removeprefix(MODULE), **sizes})
    return found


def memory_text(modules: Iterable[Mapping[str, Any]], tokens: int) -> str:
    """The modules as a text table."""
    lines = [
        f"forward pass of one micro-batch of {tokens:,} tokens without torch.compile; MiB",
        f"{'module':<44}{'peak forward':>14}{'kept':>11}",
    ]
    for memory in modules:
        peak, kept = memory["forward_peak"] / 2**20, memory["kept"] / 2**20
        lines.append(f"{memory['name']:<44}{peak:>14.1f}{kept:>11.1f}")
    return "\n".join(lines) + "\n"
