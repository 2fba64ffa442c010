"""Time by stage of a training step: every moment counts once, so the rows add up to the step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from nsa import stages
from nsa.train.profiler.attribution import PREFIX, Attribution, Place
from nsa.train.profiler.trace import Event, Trace

IDLE = "idle"
UNATTRIBUTED = "unattributed"
_ROWS = (*stages.MODEL_STAGES, *stages.STEP_STAGES, UNATTRIBUTED, IDLE)
_WAITING = Place("waiting for data")
_MAX_UNATTRIBUTED = 0.05  # of a step
_MOST_KERNELS = 200  # in the table as JSON

# A stretch of time in which an event ran, and nothing inside it: from, to (microseconds), what.
Stretch = tuple[float, float, Event]


@dataclass
class Kernel:
    """A kernel, or on a CPU an operator.

    Attributes:
        name: of the kernel.
        stage: its stage; None where nothing tells.
        backward: whether the backward pass launched it.
        calls_per_step: how often it ran.
        ms_per_step: its time, milliseconds.
    """

    name: str
    stage: str | None
    backward: bool
    calls_per_step: float = 0.0
    ms_per_step: float = 0.0


@dataclass
class StageTable:
    """Where the time of the measured steps went; all times are milliseconds a step.

    Attributes:
        device: ``gpu``, or ``cpu``, where operators of the main thread stand for kernels.
        steps: steps measured.
        step_ms: a step under the profiler.
        stages: forward (or all) and backward by stage. The last two rows are ``unattributed``,
            where nothing tells the stage of what ran, and ``idle``, where nothing ran and the host
            did not wait for data.
        hidden_communication_ms: communication while other kernels ran; no part of the sum.
        kernels: the kernels, those that take most time first.
        unprofiled_step_ms: a step without the profiler; None where it was not measured.
    """

    device: str
    steps: int
    step_ms: float
    stages: dict[str, tuple[float, float]]
    hidden_communication_ms: float
    kernels: list[Kernel]
    unprofiled_step_ms: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The table as JSON."""
        rows = [
            {
                "stage": name,
                "forward_ms": forward,
                "backward_ms": backward,
                "total_ms": forward + backward,
                "share": (forward + backward) / self.step_ms,
            }
            for name, (forward, backward) in self.stages.items()
        ]
        kernels = [vars(kernel) for kernel in self.kernels[:_MOST_KERNELS]]
        return {**vars(self), "stages": rows, "kernels": kernels}

    def text(self) -> str:
        """The table as text."""
        steps = f"{self.steps} steps, {self.step_ms:.3f} ms a step"
        if self.unprofiled_step_ms is not None:
            steps += f"; {self.unprofiled_step_ms:.3f} ms without the profiler"
        heads = f"{'forward, ms':>14}{'backward, ms':>14}{'sum, ms':>12}{'share':>9}"
        lines = [steps, "", f"{'stage':<32}{heads}"]
        whole = sum(map(sum, self.stages.values()))
        for name, (forward, backward) in {**self.stages, "sum": (whole, 0.0)}.items():
            total = forward + backward
            parts = f"{forward:>14.3f}{backward:>14.3f}" if name in stages.MODEL_STAGES else ""
            lines.append(f"{name:<32}{parts:28}{total:>12.3f}{total / self.step_ms:>9.1%}")
        if self.hidden_communication_ms:
            hidden = f"{self.hidden_communication_ms:.3f} ms"
            lines.append(f"communication behind other kernels, not in the sum: {hidden}")
        if sum(self.stages[UNATTRIBUTED]) > _MAX_UNATTRIBUTED * self.step_ms:
            share = f"more than {_MAX_UNATTRIBUTED:.0%} of the step is unattributed"
            lines.append(f"{share}; most of it:")
            nowhere = [kernel for kernel in self.kernels if kernel.stage is None]
            lines += [
                f"  {kernel.ms_per_step:.3f} ms {kernel.name[:110]}" for kernel in nowhere[:5]
            ]
        return "\n".join(lines) + "\n"

    def kernels_text(self, limit: int = 40) -> str:
        """The kernels that take most time, as text."""
        what = "operator, its own time" if self.device == "cpu" else "kernel"
        lines = [f"{'ms a step':>10}{'share':>8}{'calls':>9}  {'stage':<40}{what}"]
        for kernel in self.kernels[:limit]:
            where = kernel.stage or UNATTRIBUTED
            where += ", backward" if kernel.backward else ""
            time = f"{kernel.ms_per_step:>10.3f}{kernel.ms_per_step / self.step_ms:>8.1%}"
            lines.append(f"{time}{kernel.calls_per_step:>9.1f}  {where:<40}{kernel.name[:120]}")
        return "\n".join(lines) + "\n"


def stage_table(trace: Trace, attribution: Attribution) -> StageTable:
    """Time by stage over the steps of a trace.

    On a GPU a step lasts from its first kernel to the first kernel of the next one; the last step
    only ends the one before it, unless it is the only one. On a CPU it lasts from its begin on the
    main thread to its end.
    """
    if trace.device:
        begin, end, steps = _device_span(trace, attribution)
        stretches = [(event.begin, event.end, event) for event in trace.device]
    else:
        begin, end = attribution.steps[0][0], attribution.steps[-1][1]
        steps = len(attribution.steps)
        stretches = list(_own_time(trace.host[attribution.thread]))
    waits = [
        (event.begin, event.end, event)
        for event in trace.host[attribution.thread]
        if event.name == PREFIX + stages.DATA
    ]
    stretches, waits = ([*_clipped(part, begin, end)] for part in (stretches, waits))
    places = [(first, last, attribution.place(event)) for first, last, event in stretches]
    places += [(first, last, _WAITING) for first, last, _ in waits]
    times, hidden = _sweep(places, begin, end)
    per_step = 1 / 1000 / steps
    table = {
        name: (times[Place(name)] * per_step, times[Place(name, True)] * per_step)
        for name in _ROWS
        if times.keys() & {Place(name), Place(name, True)} or name in (UNATTRIBUTED, IDLE)
    }
    kernels: dict[tuple[str, Place], Kernel] = {}
    for first, last, event in stretches:
        place = attribution.place(event)
        new = Kernel(event.name, place.stage, place.backward)
        kernel = kernels.setdefault((event.name, place), new)
        kernel.ms_per_step += (last - first) * per_step
        kernel.calls_per_step += (first == event.begin) / steps
    return StageTable(
        "gpu" if trace.device else "cpu",
        steps,
        (end - begin) * per_step,
        table,
        hidden * per_step,
        sorted(kernels.values(), key=lambda kernel: -kernel.ms_per_step),
    )


def _device_span(trace: Trace, attribution: Attribution) -> tuple[float, float, int]:
    """Begin and end of the measured steps, and their number."""
    kernels = [event for event in trace.device if event.category == "kernel" and event.launch]
    firsts = [
        next(event.begin for event in kernels if event.launch and begin <= event.launch.begin < end)
        for begin, end in attribution.steps
    ]
    if len(firsts) == 1:
        return firsts[0], max(trace.device[-1].end, attribution.steps[0][1]), 1
    return firsts[0], firsts[-1], len(firsts) - 1


def _clipped(stretches: Iterable[Stretch], begin: float, end: float) -> Iterator[Stretch]:
    for first, last, event in stretches:
        if last > begin and first < end:
            yield max(first, begin), min(last, end), event


def _own_time(events: Iterable[Event]) -> Iterator[Stretch]:
    """Stretches in which an operator of a thread ran and no other one inside it."""
    running: list[Event] = []
    at = 0.0

    def until(time: float) -> Iterator[Stretch]:
        nonlocal at
        if running and time > at and _is_work(running[-1]):
            yield at, time, running[-1]
        at = max(at, time)

    def close(time: float) -> Iterator[Stretch]:
        while running and running[-1].end <= time:
            yield from until(running[-1].end)
            running.pop()

    for event in events:
        yield from close(event.begin)
        yield from until(event.begin)
        running.append(event)
    yield from close(float("inf"))


def _is_work(event: Event) -> bool:
    """Whether a host event computes, or names a stage inside one that does; others are Python."""
    outer = next((e for e in event.ancestors() if not e.name.startswith(PREFIX)), event)
    return outer.category == "cpu_op" or outer.name.startswith("## Call CompiledFxGraph")


def _sweep(
    places: Iterable[tuple[float, float, Place]], begin: float, end: float
) -> tuple[dict[Place, float], float]:
    """Microseconds by place, and those of communication while other kernels ran.

    Where several stretches overlap, the moment is shared among them; communication and copies of
    data count only where nothing else runs.
    """
    points = [(end, 0, _WAITING)]
    for first, last, place in places:
        key = Place(place.stage or UNATTRIBUTED, place.backward)
        points += [(first, 1, key), (last, -1, key)]
    times: dict[Place, float] = defaultdict(float)
    active: dict[Place, int] = defaultdict(int)
    communication, hidden, at = Place(stages.COMMUNICATION), 0.0, begin
    behind = {communication, Place(stages.DATA)}
    for time, change, key in sorted(points, key=lambda point: point[:2]):
        span, at = time - at, time
        running = {k: n for k, n in active.items() if n > 0 and k != _WAITING}
        working = {k: n for k, n in running.items() if k not in behind} or running
        for k, n in working.items():
            times[k] += span * n / sum(working.values())
        if communication in running and communication not in working:
            hidden += span
        if not running:
            times[Place(stages.DATA if active[_WAITING] > 0 else IDLE)] += span
        active[key] += change
    return times, hidden
