"""Time per stage of a training step: every moment of the steps counts once, so that the rows add up to the step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nsa import stages
from nsa.train.profiler.attribution import PREFIX, Attribution, Place
from nsa.train.profiler.trace import Event, Trace

IDLE = "idle"
UNATTRIBUTED = "unattributed"
MAX_UNATTRIBUTED = 0.05  # of a step
MOST_KERNELS = 200  # in the table as JSON

# A stretch of time in which something ran: from, to, in microseconds, what, and where it belongs.
Stretch = tuple[float, float, str, Place]


@dataclass
class Kernel:
    """A kernel, or on a CPU an operator, over the measured steps.

    Attributes:
        name: of the kernel.
        place: where it belongs.
        calls: how often it ran.
        time_us: time in it, summed up.
    """

    name: str
    place: Place
    calls: int = 0
    time_us: float = 0.0


@dataclass
class StageTable:
    """Where the time of the measured steps went; all times are milliseconds a step.

    Attributes:
        device: ``gpu``, or ``cpu``, where operators of the main thread stand for kernels.
        steps: steps measured.
        step_ms: a step under the profiler.
        unprofiled_step_ms: a step without it, for comparison; None where it was not measured.
        stages: forward (or all) and backward by stage.
        idle_ms: no kernel ran, and the host did not wait for data.
        unattributed_ms: something ran of which nothing tells where it belongs.
        hidden_communication_ms: communication beside other kernels; no part of the sum.
        kernels: the kernels, most time first.
    """

    device: str
    steps: int
    step_ms: float
    stages: dict[str, tuple[float, float]]
    idle_ms: float
    unattributed_ms: float
    hidden_communication_ms: float
    kernels: list[Kernel] = field(default_factory=list)
    unprofiled_step_ms: float | None = None

    @property
    def total_ms(self) -> float:
        """The sum of all rows, which is the step."""
        return sum(map(sum, self.stages.values())) + self.idle_ms + self.unattributed_ms

    @property
    def unattributed_share(self) -> float:
        """Share of the step that belongs nowhere."""
        return self.unattributed_ms / self.step_ms

    def to_json(self) -> dict[str, Any]:
        """The table as JSON."""
        rows = [
            {"stage": name, "forward_ms": first, "backward_ms": back, "total_ms": first + back,
             "share": (first + back) / self.step_ms}
            for name, (first, back) in self.stages.items()
        ]  # fmt: skip
        rows += [
            {
                "stage": name,
                "forward_ms": value,
                "backward_ms": 0.0,
                "total_ms": value,
                "share": value / self.step_ms,
            }
            for name, value in ((UNATTRIBUTED, self.unattributed_ms), (IDLE, self.idle_ms))
        ]
        kernels = [
            {"name": k.name, "stage": k.place.stage, "backward": k.place.backward, "calls_per_step": k.calls / self.steps,
             "ms_per_step": k.time_us / 1000 / self.steps}
            for k in self.kernels[:MOST_KERNELS]
        ]  # fmt: skip
        return {
            "device": self.device, "steps": self.steps, "step_ms": self.step_ms, "unprofiled_step_ms": self.unprofiled_step_ms,
            "stages": rows, "hidden_communication_ms": self.hidden_communication_ms, "kernels": kernels,
        }  # fmt: skip

    def text(self) -> str:
        """The table as text."""
        without = (
            ""
            if self.unprofiled_step_ms is None
            else f"; {self.unprofiled_step_ms:.3f} ms without the profiler"
        )
        lines = [f"{self.steps} steps, {self.step_ms:.3f} ms a step{without}", ""]
        lines.append(
            f"{'stage':<32}{'forward, ms':>14}{'backward, ms':>14}{'sum, ms':>12}{'share':>9}"
        )
        for row in self.to_json()["stages"]:
            both = row["stage"] in stages.MODEL_STAGES
            parts = f"{row['forward_ms']:>14.3f}{row['backward_ms']:>14.3f}" if both else " " * 28
            lines.append(f"{row['stage']:<32}{parts}{row['total_ms']:>12.3f}{row['share']:>9.1%}")
        lines.append(f"{'sum':<60}{self.total_ms:>12.3f}{self.total_ms / self.step_ms:>9.1%}")
        if self.hidden_communication_ms:
            lines.append(
                f"communication behind other kernels, not in the sum: {self.hidden_communication_ms:.3f} ms"
            )
        if self.unattributed_share > MAX_UNATTRIBUTED:
            largest = [kernel for kernel in self.kernels if kernel.place.stage is None][:5]
            lines.append(
                f"more than {MAX_UNATTRIBUTED:.0%} of the step is unattributed; the most of it:"
            )
            lines += [
                f"  {kernel.time_us / 1000 / self.steps:.3f} ms {kernel.name[:110]}"
                for kernel in largest
            ]
        return "\n".join(lines) + "\n"

    def kernels_text(self, limit: int = 40) -> str:
        """The kernels that take most time, as text."""
        what = "operator, its own time" if self.device == "cpu" else "kernel"
        lines = [f"{'ms a step':>10}{'share':>8}{'calls':>9}  {'stage':<40}{what}"]
        for kernel in self.kernels[:limit]:
            time_ms = kernel.time_us / 1000 / self.steps
            where = f"{kernel.place.stage or UNATTRIBUTED}{', backward' if kernel.place.backward else ''}"
            calls = kernel.calls / self.steps
            lines.append(
                f"{time_ms:>10.3f}{time_ms / self.step_ms:>8.1%}{calls:>9.1f}  {where:<40}{kernel.name[:120]}"
            )
        return "\n".join(lines) + "\n"


def stage_table(trace: Trace, attribution: Attribution) -> StageTable:
    """Time per stage over the steps of a trace.

    On a GPU a step reaches from its first kernel to the first kernel of the next one; the last step
    only ends the one before it, unless it is the only one. On a CPU it reaches from its beginning
    on the main thread to its end.
    """
    if trace.device:
        begin, end, steps = _device_window(trace, attribution)
        events = trace.device
        stretches = [(e.begin, e.end, e.name, attribution.place(e)) for e in events]
    else:
        begin, end, steps = (
            attribution.steps[0][0],
            attribution.steps[-1][1],
            len(attribution.steps),
        )
        events = [event for event in trace.host[attribution.thread] if _is_work(event)]
        stretches = _own_time(trace, attribution)
    stretches = [
        (max(s[0], begin), min(s[1], end), s[2], s[3])
        for s in stretches
        if s[1] > begin and s[0] < end
    ]
    waits = [
        (event.begin, event.end)
        for event in trace.host[attribution.thread]
        if event.name == PREFIX + stages.DATA and event.end > begin and event.begin < end
    ]
    times, hidden = _sweep(stretches, waits, begin, end)
    per_step = 1 / 1000 / steps
    known = (*stages.MODEL_STAGES, *(name for name in stages.STEP_STAGES))
    table = {
        name: (times.pop((name, False), 0.0) * per_step, times.pop((name, True), 0.0) * per_step)
        for name in known
        if (name, False) in times or (name, True) in times
    }
    idle, unattributed = times.pop((IDLE, False), 0.0), times.pop((UNATTRIBUTED, False), 0.0)
    assert not times, f"stages that nobody knows: {times}"
    return StageTable(
        "gpu" if trace.device else "cpu", steps, (end - begin) * per_step, table, idle * per_step, unattributed * per_step,
        hidden * per_step, _kernels(stretches, [(e.name, attribution.place(e)) for e in events if begin <= e.begin < end]),
    )  # fmt: skip


def _device_window(trace: Trace, attribution: Attribution) -> tuple[float, float, int]:
    firsts: list[float] = []
    for begin, end in attribution.steps:
        launched = (
            e.begin
            for e in trace.device
            if e.category == "kernel" and e.launch is not None and begin <= e.launch.begin < end
        )
        first = next(launched, None)
        assert first is not None, "a step launched no kernel"
        firsts.append(first)
    if len(firsts) == 1:
        return firsts[0], max(trace.device[-1].end, attribution.steps[0][1]), 1
    return firsts[0], firsts[-1], len(firsts) - 1


def _own_time(trace: Trace, attribution: Attribution) -> list[Stretch]:
    """Stretches in which an operator of the main thread ran and no other one inside it."""
    found: list[Stretch] = []
    open_events: list[Event] = []
    at = 0.0

    def until(time: float) -> None:
        nonlocal at
        if open_events and time > at and _is_work(open_events[-1]):
            found.append((at, time, open_events[-1].name, attribution.place(open_events[-1])))
        at = max(at, time)

    for event in trace.host[attribution.thread]:
        while open_events and open_events[-1].end <= event.begin:
            until(open_events[-1].end)
            open_events.pop()
        until(event.begin)
        open_events.append(event)
    while open_events:
        until(open_events[-1].end)
        open_events.pop()
    return found


def _is_work(event: Event) -> bool:
    """Whether a host event computes, or names a stage inside of one that does; others are Python."""
    around = next((e for e in event.around() if not e.name.startswith(PREFIX)), event)
    return around.category == "cpu_op" or around.name.startswith("## Call CompiledFxGraph")


def _sweep(
    stretches: Sequence[Stretch], waits: Sequence[tuple[float, float]], begin: float, end: float
) -> tuple[dict[tuple[str, bool], float], float]:
    """Microseconds by (stage, backward), and those of communication behind other work.

    Where several stretches overlap, the moment is shared among them; communication and copies of
    data count only where nothing else runs.
    """
    points: list[tuple[float, int, tuple[str, bool]]] = []
    waiting = ("waiting", False)
    for first, last, _, place in stretches:
        key = (place.stage or UNATTRIBUTED, place.backward)
        points += [(first, 1, key), (last, -1, key)]
    for first, last in waits:
        points += [(max(first, begin), 1, waiting), (min(last, end), -1, waiting)]
    points.sort(key=lambda point: (point[0], point[1]))
    times: dict[tuple[str, bool], float] = defaultdict(float)
    active: dict[tuple[str, bool], int] = defaultdict(int)
    communication, hidden, at = (stages.COMMUNICATION, False), 0.0, begin
    behind = {communication, (stages.DATA, False)}
    for time, change, key in [*points, (end, 0, waiting)]:
        span = time - at
        if span > 0:
            running = {k: n for k, n in active.items() if n > 0 and k != waiting}
            working = {k: n for k, n in running.items() if k not in behind} or running
            for k, n in working.items():
                times[k] += span * n / sum(working.values())
            if communication in running and communication not in working:
                hidden += span
            if not running:
                times[(stages.DATA if active[waiting] > 0 else IDLE, False)] += span
            at = time
        active[key] += change
    return dict(times), hidden


def _kernels(stretches: Sequence[Stretch], calls: Sequence[tuple[str, Place]]) -> list[Kernel]:
    found = {
        (name, place): Kernel(name, place, number)
        for (name, place), number in Counter(calls).items()
    }
    for first, last, name, place in stretches:
        found.setdefault((name, place), Kernel(name, place)).time_us += last - first
    return sorted(found.values(), key=lambda kernel: -kernel.time_us)
