"""Chrome traces of PyTorch's profiler, and the memory of modules that they record."""

from __future__ import annotations

import gzip
import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.autograd.profiler import record_function
from torch.nn.modules import module as hooks

from nsa.stages import BACKWARD

STAGE, MODULE, STEP = "stage: ", "module: ", "ProfilerStep#"  # prefixes of ranges
MIB = 2**20
_DEVICE_TYPES = {"cpu": 0, "cuda": 1}  # numbers in a trace


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
    thread: Any
    launched: float = math.inf


@dataclass
class Trace:
    """Events of a trace, ordered by start time; outer events come before those they contain.

    Attributes:
        host: operators and ranges of all threads.
        device: kernels, copies and fills.
        allocations: changes of allocated memory: time, type of the device (0 CPU, 1 GPU), bytes.
        backward: start times of operators in the forward pass and of their backward operators.
    """

    host: list[Event] = field(default_factory=list)
    device: list[Event] = field(default_factory=list)
    allocations: list[tuple[float, int, int]] = field(default_factory=list)
    backward: list[tuple[float, float]] = field(default_factory=list)

    def ranges(self, prefix: str) -> list[Event]:
        """Host events whose names begin with a prefix."""
        return [event for event in self.host if event.name.startswith(prefix)]


def read_trace(path: Path) -> Trace:
    """Read a gzipped trace file."""
    return parse_trace(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])


def parse_trace(records: Iterable[dict[str, Any]]) -> Trace:
    """Convert the ``traceEvents`` of a Chrome trace."""
    trace, launches = Trace(), dict[float, float]()
    flows: dict[str, dict[int, float]] = {"s": {}, "f": {}}
    for record in records:
        category, args = record.get("cat"), record.get("args", {})
        name, begin = str(record.get("name")), float(record.get("ts", 0))
        end, correlation = begin + float(record.get("dur", 0)), args.get("correlation", -1)
        event = Event(name, begin, end, record.get("tid"), correlation)
        if category in ("cpu_op", "user_annotation"):
            trace.host.append(event)
        elif category in ("cuda_runtime", "cuda_driver"):
            launches[correlation] = begin
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            trace.device.append(event)
        elif category == "fwdbwd":
            flows[record["ph"]][record["id"]] = begin
        elif name == "[memory]":
            trace.allocations.append((begin, int(args["Device Type"]), int(args["Bytes"])))
    trace.device = [e._replace(launched=launches.get(e.launched, math.inf)) for e in trace.device]
    trace.host.sort(key=lambda event: (event.begin, -event.end))
    trace.device.sort(key=lambda event: event.begin)
    trace.allocations.sort()
    trace.backward = [(flows["s"][n], at) for n, at in flows["f"].items() if n in flows["s"]]
    return trace


@dataclass
class ModuleMemory:
    """Memory of one module over a forward and a backward pass, in bytes.

    Attributes:
        name: name of the module in the model.
        forward_peak: largest allocated memory of the process during the module's forward pass.
        backward_peak: largest allocated memory of the process during its backward pass.
        kept: memory that its forward pass left allocated.
    """

    name: str
    forward_peak: int = 0
    backward_peak: int = 0
    kept: int = 0


@contextmanager
def modules_marked(model: nn.Module) -> Iterator[None]:
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


def module_memory(trace: Trace, device: str, allocated: int) -> list[ModuleMemory]:
    """Memory by module, in the order of their forward passes.

    A module's backward pass lasts from the first backward operator of its forward operators until
    the backward operator that follows the last one. It includes the recomputed forward pass.

    Args:
        trace: trace of a step with marked modules and allocations.
        device: ``cpu`` or ``cuda``.
        allocated: bytes allocated when the trace began.
    """
    times, levels = [float("-inf")], [allocated]
    for time, kind, change in trace.allocations:
        if kind == _DEVICE_TYPES[device]:
            times.append(time)
            levels.append(levels[-1] + change)

    def between(begin: float, end: float) -> list[int]:
        return levels[bisect_right(times, begin) - 1 : bisect_right(times, end)]

    found: dict[str, ModuleMemory] = {}
    (backward,) = trace.ranges(STAGE + BACKWARD)
    starts = sorted([*(at for _, at in trace.backward), backward.end])
    for mark in trace.ranges(MODULE):
        memory = found.setdefault(mark.name, ModuleMemory(mark.name.removeprefix(MODULE)))
        linked = [at for begin, at in trace.backward if mark.begin <= begin < mark.end]
        if mark.begin < backward.begin:
            inside = between(mark.begin, mark.end)
            memory.forward_peak, memory.kept = max(inside), inside[-1] - inside[0]
        else:
            linked.append(mark.begin)
        if linked:
            inside = between(min(linked), starts[bisect_right(starts, max(linked))])
            memory.backward_peak = max(memory.backward_peak, *inside)
    return list(found.values())


def memory_text(modules: list[ModuleMemory], tokens: int) -> str:
    """The modules as a text table."""
    how = "launched without torch.compile and CUDA graphs"
    lines = [
        f"one micro-batch of {tokens:,} tokens, {how}; MiB",
        f"{'module':<44}{'peak forward':>14}{'peak backward':>15}{'kept':>11}",
    ]
    for memory in modules:
        peaks = f"{memory.forward_peak / MIB:>14.1f}{memory.backward_peak / MIB:>15.1f}"
        lines.append(f"{memory.name:<44}{peaks}{memory.kept / MIB:>11.1f}")
    return "\n".join(lines) + "\n"
