"""Replay of an operator's launches.

What a call does on the device follows from the shapes of its arguments, so Python works it out
once per shape. The second call with the same shapes is recorded: kernels and their arguments,
operators of PyTorch (most of them allocate), streams and events, and where memory is freed. The
recording becomes a function with one line per step, in which an address is an integer. Later calls
run this function: the same kernels in the same order, with memory allocated and freed at the same
places, for a fraction of the host time.

A recording may depend on shapes, strides, dtypes, devices, alignment, autocast and arguments that
are not tensors. It must not depend on the contents of a tensor; a launcher never reads them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from nsa import stages
from nsa.ops._backend import kernels_run_on_cpu, on_gpu

# Programs kept per function. Beyond that all are dropped: shapes that never come back would
# otherwise fill the memory.
MOST_PROGRAMS = 256
# Descriptors kept for an argument; beyond that all are dropped.
MOST_DESCRIPTORS = 256
# Triton compiles another kernel for addresses that are not multiples of 16 bytes, and tensor
# descriptors need such multiples.
ALIGNMENT = 16

_FREED = "freed"  # in place of a stream: a step that frees memory
_current = threading.local()
Program = Callable[..., Any]
# Those of every replayed function. None: called once with such arguments, and not recorded yet.
PROGRAMS: list[dict[tuple[Any, ...], Program | None]] = []
_aten = torch.ops.aten
_EMPTY = (
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
)
_ZEROS = (_aten.zeros.default, _aten.new_zeros.default, _aten.zeros_like.default)
# Python functions that cost the host less than calling these operators by name.
_FUNCTIONS = {
    _aten.copy_.default: Tensor.copy_,
    _aten.cumsum.out: torch.cumsum,
    _aten.mm.default: torch.mm,
    _aten.sort.stable: torch.sort,
    _aten.t.default: torch.t,
}


def cuda_device(x: Tensor) -> int | None:
    """Index of the CUDA device of a tensor; None on another device."""
    return x.get_device() if x.is_cuda else None


def recorder() -> Recorder | None:
    """The recorder that is active in this thread, or None."""
    return getattr(_current, "recorder", None)


def replayed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a launcher: replays its launches from the third call with the same shapes on.

    The function takes tensors, None, numbers, text, and lists or tuples of these by position. It
    returns a tensor, None, or a list or tuple of them. On a CPU, replay is used where Triton's
    interpreter runs the kernels.
    """
    programs: dict[tuple[Any, ...], Program | None] = {}
    PROGRAMS.append(programs)

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        key: list[Any] = []
        tensors: list[Tensor] = []
        _describe(arguments, key, tensors)
        if not _may_replay(tensors):
            return function(*arguments)
        kind = tensors[0].device.type
        key.append(torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind))
        identities = [id(x) for x in tensors]
        if len(set(identities)) < len(identities):
            key += [identities.index(x) for x in identities]
        known = tuple(key)
        program = programs.get(known)
        if program is not None:
            return program(*tensors)
        if known in programs:
            program, result = record(function, arguments, tensors)
            programs[known] = program
            return result
        if len(programs) >= MOST_PROGRAMS:
            programs.clear()
        programs[known] = None
        return function(*arguments)

    run.programs = programs  # type: ignore[attr-defined]
    return run


def _describe(arguments: Iterable[Any], key: list[Any], tensors: list[Tensor]) -> None:
    """Add what launches may depend on to the key, and collect the tensors."""
    for x in arguments:
        if isinstance(x, Tensor):
            tensors.append(x)
            key += (x.dtype, x.shape, x.stride(), x.data_ptr() % ALIGNMENT, x.get_device())
        elif isinstance(x, list | tuple):
            key.append(len(x))
            _describe(x, key, tensors)
        else:
            key += (type(x), x)


def _may_replay(tensors: list[Tensor]) -> bool:
    """Whether kernels will be launched, and nothing asks for the launcher itself to run.

    A profiler's stages, Triton's launch hooks and a search for tiles do.
    """
    if not tensors or stages.has_listener() or recorder() is not None:
        return False
    if not (on_gpu(tensors[0]) or kernels_run_on_cpu()):
        return False
    hooks, tuning = _triton()
    has_hooks = hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls
    return not (has_hooks or tuning.tiles_are_chosen())


@functools.cache
def _triton() -> tuple[Any, Any]:
    """Triton's runtime settings and the tuning module, imported at the first launch."""
    import triton

    from nsa.ops._triton import tuning

    return triton.knobs.runtime, tuning


@dataclass
class Step:
    """A line of a program.

    Attributes:
        text: the line.
        makes: names that it assigns.
        needs: names that it reads.
        effect: whether it does more than assign names.
        stream: name of the stream that must be current; None where the line names its stream.
    """

    text: str
    makes: list[str] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)
    effect: bool = True
    stream: str | None = None


class Recorder(TorchDispatchMode):
    """Records what a call does.

    Args:
        tensors: tensors among the arguments of the call.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.namespace: dict[str, Any] = {"empty": torch.empty_strided}
        self._names = WeakTensorKeyDictionary()
        # For each name, the tensor that owns the memory and that tensor's address.
        self._roots: dict[str, tuple[str, int]] = {}
        # Memory allocated during the call, by the name of its owner: a weak reference, and the
        # names of all tensors in it.
        self._storages: dict[str, StorageWeakRef] = {}
        self._in_storage: dict[str, list[str]] = {}
        self._streams: dict[int, str] = {}
        self._events = 0
        self._device, self._tensor_device = cuda_device(tensors[0]), tensors[0].device
        self.sides: list[str] = []
        if self._device is not None:
            self._streams[torch._C._cuda_getCurrentRawStream(self._device)] = "s0"
        self.inputs = [f"a{number}" for number in range(len(tensors))]
        for name, x in zip(self.inputs, tensors, strict=True):
            self._names[x] = name
            self._roots[name] = (name, x.data_ptr())

    def constant(self, value: Any) -> str:
        """A name for a value that is the same in every call."""
        if value is None or isinstance(value, bool | int):
            return repr(value)
        same = (name for name, other in self.namespace.items() if other is value)
        name = next(same, None)
        if name is None:
            name = f"c{len(self.namespace)}"
            self.namespace[name] = value
        return name

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._record_freed_memory()
        result = op(*args, **kwargs)
        needs: list[str] = []
        is_sequence = isinstance(result, tuple | list)
        results = result if is_sequence else (result,)
        known = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        new = [x for x in results if isinstance(x, Tensor) and all(x is not y for y in known)]
        if op in _EMPTY or op in _ZEROS:
            call = self._empty(new[0]) + ".zero_()" * (op in _ZEROS)
        else:
            given = [self._expression(x, needs) for x in args]
            given += [f"{name}={self._expression(x, needs)}" for name, x in kwargs.items()]
            call = f"{self.constant(_FUNCTIONS.get(op, op._op))}({', '.join(given)})"
        makes = [self._new(x, known) for x in new]
        if new and len(new) == len(results):
            call = f"{', '.join(makes)}{',' * is_sequence} = {call}"
        elif new:
            raise NotImplementedError(f"{op} returns some of its arguments; it cannot be replayed")
        self._add(call, makes, needs, effect=op._schema.is_mutable, stream=self._stream())
        for name in makes:
            if self._roots[name][0] == name:
                self._add(f"p{name} = {name}.data_ptr()", [f"p{name}"], [name], effect=False)
        return result

    def _empty(self, x: Tensor) -> str:
        """The allocation of a tensor like ``x``, by the call that costs the host least."""
        shape, dtype = tuple(x.shape), f"dtype={self.constant(x.dtype)}"
        if x.is_contiguous() and x.device == self._tensor_device:
            return f"a0.new_empty({shape}, {dtype})"
        return f"empty({shape}, {x.stride()}, {dtype}, device={self.constant(x.device)})"

    def _add(
        self,
        text: str,
        makes: Sequence[str] = (),
        needs: Sequence[str] = (),
        *,
        effect: bool = True,
        stream: str | None = None,
    ) -> None:
        self.steps.append(Step(text, [*makes], [*needs], effect, stream))

    def _stream(self) -> str:
        if self._device is None:
            return "s0"
        return self._streams[torch._C._cuda_getCurrentRawStream(self._device)]

    def _new(self, x: Tensor, sources: list[Tensor]) -> str:
        """A name for the result of an operator: a view of one of its arguments, or new memory."""
        name, storage = f"t{len(self._roots)}", x.untyped_storage()
        views = (y for y in sources if y.untyped_storage()._cdata == storage._cdata)
        of = next(views, None)
        root, start = (name, x.data_ptr()) if of is None else self._roots[self._name(of)]
        self._names[x], self._roots[name] = name, (root, start)
        if of is None:
            self._storages[name] = StorageWeakRef(storage)
            self._in_storage[name] = []
        if root in self._in_storage:
            self._in_storage[root].append(name)
        return name

    def _name(self, x: Tensor) -> str:
        name: str | None = self._names.get(x)
        if name is None:  # made before the call and kept for all calls, such as a table
            name = self.constant(x)
            self._names[x] = name
            self._roots[name] = (name, x.data_ptr())
            self.namespace[f"p{name}"] = x.data_ptr()
        return name

    def _expression(self, x: Any, needs: list[str]) -> str:
        """An argument of a PyTorch operator."""
        if isinstance(x, Tensor):
            needs.append(self._name(x))
            return needs[-1]
        if isinstance(x, list | tuple):
            return f"[{', '.join(self._expression(y, needs) for y in x)}]"
        return self.constant(x)

    def _address(self, x: Any, needs: list[str]) -> str:
        """An argument of a kernel. The interpreter takes tensors, a GPU their addresses."""
        if isinstance(x, Tensor):
            if not on_gpu(x):
                return self._expression(x, needs)
            root, start = self._roots[self._name(x)]
            needs.append(f"p{root}")
            offset = x.data_ptr() - start
            return f"p{root} + {offset}" if offset else f"p{root}"
        if isinstance(x, tuple):
            inner = "".join(f"{self._address(y, needs)}, " for y in x)
            return f"{self.constant(type(x))}({inner})" if hasattr(x, "_fields") else f"({inner})"
        if hasattr(x, "block_shape"):
            to_tf32 = getattr(x, "round_f32_to_tf32", False)  # Triton 3.7 and later
            of_address = Descriptors((x.shape, x.strides, x.block_shape, x.padding, to_tf32))
            return f"{self.constant(of_address)}[{self._address(x.base, needs)}]"
        return self.constant(x)

    def launch(
        self,
        call: Any,
        before: tuple[Any, ...],
        args: tuple[Any, ...],
        after: tuple[Any, ...],
    ) -> None:
        """Record the launch of a kernel.

        Args:
            call: what launches it, called as ``call(*before, *args, *after)``.
            before: grid, stream and kernel; on a GPU the fourth is the raw stream.
            args: arguments of the kernel, with its tensors.
            after: the rest of its arguments.
        """
        self._record_freed_memory()
        needs: list[str] = []
        given = [self.constant(x) for x in before]
        if self._device is not None:
            given[3] = f"r{self._stream()[1:]}"
        given += [self._address(x, needs) for x in args]
        given += [self.constant(x) for x in after]
        self._add(f"{self.constant(call)}({', '.join(given)})", needs=needs)

    def side(self, calling: torch.cuda.Stream, side: torch.cuda.Stream) -> None:
        """Record that a stream is the side stream of another one."""
        if side.cuda_stream not in self._streams:
            name = f"s{len(self._streams)}"
            self._streams[side.cuda_stream] = name
            self.sides.append(self._streams[calling.cuda_stream])

    def wait_stream(self, waiting: torch.cuda.Stream, awaited: torch.cuda.Stream) -> None:
        """Record that a stream waits for everything submitted to another one so far."""
        self._record_freed_memory()
        self.wait_event(waiting, self.event(awaited))

    def event(self, stream: torch.cuda.Stream) -> str:
        """Record an event on a stream, and return its name."""
        name, self._events = f"k{self._events}", self._events + 1
        self._add(f"{name}.record({self._streams[stream.cuda_stream]})")
        return name

    def wait_event(self, stream: torch.cuda.Stream, event: str) -> None:
        """Record that a stream waits for an event."""
        self._record_freed_memory()
        self._add(f"{event}.wait({self._streams[stream.cuda_stream]})")

    def _record_freed_memory(self) -> None:
        for root, storage in [*self._storages.items()]:
            if storage.expired():
                del self._storages[root]
                self._add("", self._in_storage[root], effect=False, stream=_FREED)

    def program(self, result: Any) -> Program:
        """The function that repeats the call with other tensors and returns its result."""
        needed: list[str] = []
        returned = self._result(result, needed)
        wanted, kept = set(needed), list[Step]()
        for step in reversed(self.steps):
            is_needed = step.effect or wanted.intersection(step.makes)
            if step.stream == _FREED or is_needed:
                wanted.update(step.needs)
                kept.append(step)
        pointers = [f"p{name} = {name}.data_ptr()" for name in self.inputs if f"p{name}" in wanted]
        made, current, lines = set[str](), "s0", [*self._stream_lines(), *pointers]
        for step in reversed(kept):
            if step.stream == _FREED:
                names = [name for name in step.makes if name in made]
                lines += [f"{' = '.join(names)} = None"] if names else []
                continue
            if step.stream not in (None, current):
                current = step.stream
                lines.append(f"set_stream({current})")
            made.update(step.makes)
            lines.append(step.text)
        if current != "s0":
            lines.append("set_stream(s0)")
        lines.append(f"return {returned}")
        if self.sides:  # after an error the calling stream waits for its sides, too
            waits = [f"s0.wait_stream(s{number})" for number in range(1, len(self.sides) + 1)]
            ends = [f"    {line}" for line in ("set_stream(s0)", *waits, "raise")]
            lines = ["try:", *(f"    {line}" for line in lines), "except BaseException:", *ends]
        head = f"def program({', '.join(self.inputs)}):"
        text = "".join(f"{line}\n" for line in (head, *(f"    {line}" for line in lines)))
        exec(compile(text, "<replay>", "exec"), self.namespace)
        program: Program = self.namespace["program"]
        program.text = text  # type: ignore[attr-defined]
        return program

    def _stream_lines(self) -> list[str]:
        """The calling stream, its side streams, their raw handles for launches, and the events.

        A program records its events anew in every call. Where two threads run it on one stream, a
        wait may be for the later record of the two, behind which lies the other.
        """
        if self._device is None:
            return []
        from nsa.ops._side_stream import side_of

        device, sides, count = self._device, [*self.sides], self._events

        @functools.cache
        def streams(raw: int) -> tuple[Any, ...]:
            found = {"s0": torch.cuda.current_stream(device)}
            for number, calling in enumerate(sides, start=1):
                found[f"s{number}"] = side_of(found[calling])
            handles = [found[f"s{number}"].cuda_stream for number in range(1, len(found))]
            return *found.values(), *handles, *(torch.cuda.Event() for _ in range(count))

        self.namespace["current"] = torch._C._cuda_getCurrentRawStream
        lines = [f"r0 = current({device})"]
        if sides:
            self.namespace |= {"streams": streams, "set_stream": torch.cuda.set_stream}
            numbers = range(1, len(sides) + 1)
            names = ["s0", *(f"s{number}" for number in numbers), *(f"r{n}" for n in numbers)]
            names += [f"k{number}" for number in range(count)]
            lines.append(f"{', '.join(names)} = streams(r0)")
        return lines

    def _result(self, x: Any, needs: list[str]) -> str:
        if isinstance(x, tuple):
            return f"({''.join(self._result(y, needs) + ', ' for y in x)})"
        return self._expression(x, needs)


class Descriptor:
    """The fields of a tensor descriptor that a launcher reads; its memory begins at ``base``.

    Attributes:
        expanded: the arguments that a launcher has made of it, see
            :func:`nsa.ops._triton.kernel.keep_descriptors`.
    """

    def __init__(
        self,
        base: int,
        shape: list[int],
        strides: list[int],
        block_shape: list[int],
        padding: str,
        to_tf32: bool,
    ) -> None:
        self.base = Place(base)
        self.shape, self.strides, self.block_shape = shape, strides, block_shape
        self.padding, self.round_f32_to_tf32 = padding, to_tf32
        self.expanded: list[Any] | None = None


class Descriptors(dict[int, Descriptor]):
    """Descriptors of one argument of one launch by address: PyTorch gives the same ones again.

    Args:
        layout: what :class:`Descriptor` takes behind the address.
    """

    def __init__(self, layout: tuple[Any, ...]) -> None:
        super().__init__()
        self._layout = layout

    def __missing__(self, address: int) -> Descriptor:
        if len(self) >= MOST_DESCRIPTORS:
            self.clear()
        made = self[address] = Descriptor(address, *self._layout)
        return made


class Place:
    """An address in the form in which launchers read that of a tensor."""

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        """The address."""
        return self.address


def record(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    tensors: list[Tensor],
) -> tuple[Program, Any]:
    """Call the function once; return a program that repeats the call, and the result."""
    active = Recorder(tensors)
    _current.recorder = active
    try:
        with active:
            result = function(*arguments)
    finally:
        _current.recorder = None
    return active.program(result), result
