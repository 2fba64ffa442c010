"""Time of training steps by stage. Each moment counts once, so the rows add up to the step.

On a GPU a kernel's name tells its stage, so the table is the same whether a step is launched
eagerly, compiled or replayed from CUDA graphs. Matrix products have one row and other kernels that
PyTorch compiles or brings have another: their names do not say which layer they belong to. On a CPU
the main thread's time is divided by the ranges of the stages, and the backward pass is one row.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from nsa import stages
from nsa.train.profiler.trace import STAGE, STEP, Event, Trace

PRODUCTS = "matrix products"
OTHER = "other compiled and PyTorch kernels"
IDLE, UNATTRIBUTED = "idle", "unattributed"
_BACKWARD = ", backward"

_OPERATORS = (
    ("heads_kernel", stages.PROJECTION),
    ("compress_", stages.COMPRESSION),
    (r"range_\w+_compressed", stages.COMPRESSED),
    ("select_", stages.SELECTION),
    ("selected_|(list|key|key_block|chunk)_kernel", stages.SELECTED),
    (r"range_\w+_window", stages.WINDOW),
    ("(?i:.*(flash|fmha|sdpa|cudnn))", stages.DENSE),
    ("combine_", stages.GATES),
)
_KERNELS = (
    *_OPERATORS,
    ("(?i:.*nccl)", stages.COMMUNICATION),
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
_WAITING = "waiting for data"
_MOST_KERNELS = 200  # in the table as JSON

_BEHIND = {stages.COMMUNICATION, stages.DATA}

Span = tuple[float, float, str]  # begin and end in microseconds, stage
Work = tuple[str, str, float]  # name and stage of a kernel or operator, microseconds


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
    if not trace.device:
        work = _own_times(trace, steps[0].thread)
        times = defaultdict[str, float](float)
        for _, stage, time in work:
            times[stage] += time
        return _table("cpu", len(steps), times, work)
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
    divided, hidden = _divide(spans, begin, end)
    work = [(e.name, stage, e.end - e.begin) for e, stage in kernels if begin <= e.begin < end]
    return _table("gpu", max(len(steps) - 1, 1), divided, work, hidden)


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


def _table(
    device: str,
    steps: int,
    times: Mapping[str, float],
    work: Iterable[Work],
    hidden: float = 0.0,
) -> dict[str, Any]:
    """Build the table from microseconds by stage and by kernel."""
    scale, calls = 1 / 1000 / steps, Counter[tuple[str, str]]()
    sums = defaultdict[tuple[str, str], float](float)
    for name, stage, time in work:
        if not name.startswith((STAGE, STEP)):
            calls[name, stage] += time >= 0
            sums[name, stage] += time
    shown, step = {UNATTRIBUTED: 0.0, IDLE: 0.0, **times}, sum(times.values())
    rows = [(name, shown[name]) for name in _ROWS if name in shown]
    return {
        "device": device,
        "steps": steps,
        "step_ms": step * scale,
        "stages": [{"stage": n, "total_ms": t * scale, "share": t / step} for n, t in rows],
        "hidden_communication_ms": hidden * scale,
        "kernels": [
            {"name": n, "stage": s, "calls_per_step": calls[n, s] / steps, "ms_per_step": t * scale}
            for (n, s), t in sorted(sums.items(), key=lambda one: -one[1])[:_MOST_KERNELS]
        ],
    }


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
        figures = f"{time:>11.3f}{time / table['step_ms']:>8.1%}{kernel['calls_per_step']:>9.1f}"
        lines.append(f"{figures}  {kernel['stage']:<40}{kernel['name'][:120]}")
    return "\n".join(lines) + "\n"


def _divide(spans: Iterable[Span], begin: float, end: float) -> tuple[Mapping[str, float], float]:
    """Microseconds by stage, and of communication that overlaps other kernels.

    Kernels that run at the same time share it equally. Communication and copies of data count only
    if nothing else runs.
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
