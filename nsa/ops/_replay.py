"""Replay of an operator's launches: what a call does on the device follows from shapes, so Python works it out once for each.

The second call with the same shapes is recorded: kernels and their arguments, PyTorch's own operators (most of them give
memory), streams and events, and where memory is let go. From this a function is made in which every step is one line and an
address is an integer. Later calls run it: the same kernels in the same order, memory made and let go at the same places, at a
small part of the host time.

What is recorded may depend on nothing but the arguments' shapes, strides, dtypes, devices, alignment and values that are no
tensors: not on the contents of a tensor, which a launcher does not look at anyway.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from nsa import stages
from nsa.ops._backend import kernels_run_on_cpu, on_gpu

# Programs of one function that are kept before all are forgotten: shapes that never come again would fill the memory.
MOST_PROGRAMS = 256
# Triton compiles anew for addresses that are no multiples of 16; tensor descriptors ask for the same.
ALIGNMENT = 16

_current = threading.local()
Program = Callable[..., Any]
_aten = torch.ops.aten
_EMPTY = (_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default, _aten.empty_strided.default)
_ZEROS = (_aten.zeros.default, _aten.new_zeros.default, _aten.zeros_like.default)
# Functions that cost less than the operators that they stand for.
_FUNCTIONS = {
    _aten.copy_.default: Tensor.copy_,
    _aten.cumsum.out: torch.cumsum,
    _aten.mm.default: torch.mm,
    _aten.sort.stable: torch.sort,
    _aten.t.default: torch.t,
}


def cuda_device(x: Tensor) -> int | None:
    """Number of the CUDA device of a tensor."""
    return x.get_device() if x.is_cuda else None


def recorder() -> Recorder | None:
    """Who records the calls of this thread; None: nobody."""
    return getattr(_current, "recorder", None)


def replayed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a launcher: from the third call with the same shapes on, its launches are replayed.

    The function takes tensors, None, numbers, text and lists or tuples of these by position, and gives tensors, None, or a list
    or tuple of them. On a CPU it is replayed where Triton's interpreter runs the kernels.
    """
    programs: dict[tuple[Any, ...], Program | None] = {}

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        key: list[Any] = []
        tensors: list[Tensor] = []
        _describe(arguments, key, tensors)
        if not _may_replay(tensors):
            return function(*arguments)
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
    """Add to the key what launches may depend on, and collect the tensors."""
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
    """Whether the function would launch kernels, nobody listens to stages or launches, and no recording is under way."""
    if not tensors or stages.heard() or recorder() is not None:
        return False
    return (on_gpu(tensors[0]) or kernels_run_on_cpu()) and not _hooked()


def _hooked() -> bool:
    """Whether launches are watched, or have other tiles than those that were recorded."""
    import triton

    from nsa.ops._triton.tuning import tiles_are_chosen

    hooks = triton.knobs.runtime
    return bool(hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls or tiles_are_chosen())


@dataclass
class Step:
    """A line of a program.

    Attributes:
        text: the line.
        makes: names that it assigns.
        needs: names that it reads.
        effect: whether it does more than to assign.
        stream: name of the stream that must be current; None where the line says itself on which stream it is.
    """

    text: str
    makes: list[str] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)
    effect: bool = True
    stream: str | None = None


class Recorder(TorchDispatchMode):
    """Notes what a call does.

    Args:
        tensors: the call's tensors.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.namespace: dict[str, Any] = {"empty": torch.empty_strided, "Descriptor": Descriptor}
        self._names = WeakTensorKeyDictionary()
        # Of each tensor by name: the one whose memory it lies in, and the first byte.
        self._roots: dict[str, tuple[str, int]] = {}
        # Memory made since: whether it still lives, and all that lies in it.
        self._storages: dict[str, StorageWeakRef] = {}
        self._in_storage: dict[str, list[str]] = {}
        self._streams: dict[int, str] = {}
        self._device = cuda_device(tensors[0])
        self.sides: list[str] = []
        if self._device is not None:
            self._streams[torch._C._cuda_getCurrentRawStream(self._device)] = "s0"
        self.inputs = [f"a{number}" for number in range(len(tensors))]
        for name, x in zip(self.inputs, tensors, strict=True):
            self._names[x] = name
            self._roots[name] = (name, x.data_ptr())

    def constant(self, value: Any) -> str:
        """A name for a value that stays the same in all calls."""
        if value is None or isinstance(value, bool | int):
            return repr(value)
        name = next((name for name, other in self.namespace.items() if other is value), None)
        if name is None:
            name = f"c{len(self.namespace)}"
            self.namespace[name] = value
        return name

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._note_memory_let_go()
        result = op(*args, **kwargs)
        needs: list[str] = []
        results = result if isinstance(result, tuple | list) else (result,)
        known = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        new = [x for x in results if isinstance(x, Tensor) and not any(x is y for y in known)]
        if op in _EMPTY or op in _ZEROS:
            call = self._empty(new[0]) + ".zero_()" * (op in _ZEROS)
        else:
            given = [self._expression(x, needs) for x in args]
            given += [f"{name}={self._expression(x, needs)}" for name, x in kwargs.items()]
            call = f"{self.constant(_FUNCTIONS.get(op, op._op))}({', '.join(given)})"
        makes = [self._new(x, known) for x in new]
        if new and len(new) == len(results):
            call = f"{', '.join(makes)}{',' * (isinstance(result, tuple | list))} = {call}"
        elif new:
            raise NotImplementedError(f"replay of {op}, which gives some of its arguments")
        self._add(call, makes, needs, effect=op._schema.is_mutable, stream=self._stream())
        for name in makes:
            if self._roots[name][0] == name:
                self._add(f"p{name} = {name}.data_ptr()", [f"p{name}"], [name], effect=False)
        return result

    def _empty(self, x: Tensor) -> str:
        """Memory like ``x``, by the fastest way that PyTorch has."""
        if x.is_contiguous():
            return f"a0.new_empty({tuple(x.shape)}, dtype={self.constant(x.dtype)})"
        return f"empty({tuple(x.shape)}, {x.stride()}, dtype={self.constant(x.dtype)}, device={self.constant(x.device)})"

    def _add(self, text: str, makes: list[str], needs: list[str], *, effect: bool = True, stream: str | None = None) -> None:
        self.steps.append(Step(text, makes, needs, effect, stream))

    def _stream(self) -> str:
        if self._device is None:
            return "s0"
        return self._streams[torch._C._cuda_getCurrentRawStream(self._device)]

    def _new(self, x: Tensor, sources: list[Tensor]) -> str:
        """A name for a tensor that an operator made of others: in the memory of one of them, or in its own."""
        name, storage = f"t{len(self._roots)}", x.untyped_storage()
        of = next((y for y in sources if y.untyped_storage()._cdata == storage._cdata), None)
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
        if name is None:  # made before the call, for all calls: a table
            name = self.constant(x)
            self._names[x] = name
            self._roots[name] = (name, x.data_ptr())
            self.namespace[f"p{name}"] = x.data_ptr()
        return name

    def _expression(self, x: Any, needs: list[str]) -> str:
        """An argument of an operator of PyTorch."""
        if isinstance(x, Tensor):
            needs.append(self._name(x))
            return needs[-1]
        if isinstance(x, list | tuple):
            return f"[{', '.join(self._expression(y, needs) for y in x)}]"
        return self.constant(x)

    def _address(self, x: Any, needs: list[str]) -> str:
        """An argument of a kernel: tensors by address on a GPU; the interpreter takes them as they are."""
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
            layout = (x.shape, x.strides, x.block_shape, x.padding, getattr(x, "round_f32_to_tf32", False))
            return f"Descriptor({self._address(x.base, needs)}, *{self.constant(layout)})"
        return self.constant(x)

    def launch(self, call: Any, before: tuple[Any, ...], args: tuple[Any, ...], after: tuple[Any, ...]) -> None:
        """Note the launch of a kernel: ``call(*before, *args, *after)``; on a GPU the fourth of ``before`` is the stream."""
        self._note_memory_let_go()
        needs: list[str] = []
        given = [self.constant(x) for x in before]
        if self._device is not None:
            given[3] = f"r{self._stream()[1:]}"
        given += [self._address(x, needs) for x in args]
        given += [self.constant(x) for x in after]
        self._add(f"{self.constant(call)}({', '.join(given)})", [], needs)

    def side(self, calling: torch.cuda.Stream, side: torch.cuda.Stream) -> None:
        """Note that a stream is the side stream of another one."""
        if side.cuda_stream not in self._streams:
            name = f"s{len(self._streams)}"
            self._streams[side.cuda_stream] = name
            self.sides.append(self._streams[calling.cuda_stream])

    def wait_stream(self, waiting: torch.cuda.Stream, awaited: torch.cuda.Stream) -> None:
        """Note that a stream waits for all that another one was given before."""
        self._note_memory_let_go()
        self._add(f"{self._streams[waiting.cuda_stream]}.wait_stream({self._streams[awaited.cuda_stream]})", [], [])

    def event(self, stream: torch.cuda.Stream) -> str:
        """Note an event; its name."""
        name = f"e{len(self.steps)}"
        self._add(f"{name} = {self._streams[stream.cuda_stream]}.record_event()", [], [])
        return name

    def wait_event(self, stream: torch.cuda.Stream, event: str) -> None:
        """Note that a stream waits for an event."""
        self._note_memory_let_go()
        self._add(f"{self._streams[stream.cuda_stream]}.wait_event({event})", [], [])

    def _note_memory_let_go(self) -> None:
        for root, storage in [*self._storages.items()]:
            if storage.expired():
                del self._storages[root]
                self.steps.append(Step("", self._in_storage[root], [], effect=False, stream="free"))

    def program(self, result: Any) -> Program:
        """The function that does the same for other tensors, and gives its result."""
        needed: list[str] = []
        returned = self._result(result, needed)
        wanted, kept = set(needed), list[Step]()
        for step in reversed(self.steps):
            if step.stream == "free" or step.effect or wanted.intersection(step.makes):
                wanted.update(step.needs)
                kept.append(step)
        pointers = [f"p{name} = {name}.data_ptr()" for name in self.inputs if f"p{name}" in wanted]
        made, current, lines = set[str](), "s0", [*self._stream_lines(), *pointers]
        for step in reversed(kept):
            if step.stream == "free":
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
        if self.sides:
            ends = ["set_stream(s0)", *(f"s0.wait_stream(s{number})" for number in range(1, len(self.sides) + 1)), "raise"]
            lines = ["try:", *(f"    {line}" for line in lines), "except BaseException:", *(f"    {line}" for line in ends)]
        text = f"def program({', '.join(self.inputs)}):\n" + "".join(f"    {line}\n" for line in lines)
        exec(compile(text, "<replay>", "exec"), self.namespace)
        program: Program = self.namespace["program"]
        program.text = text  # type: ignore[attr-defined]
        return program

    def _stream_lines(self) -> list[str]:
        """The calling stream, its side streams, and what launches take of them."""
        if self._device is None:
            return []
        from nsa.ops._side_stream import side_of

        device = self._device
        self.namespace |= {"current": torch._C._cuda_getCurrentRawStream, "set_stream": torch.cuda.set_stream}
        lines = [f"r0 = current({device})"]
        if self.sides:
            self.namespace |= {"stream": functools.cache(lambda raw: torch.cuda.current_stream(device)), "side_of": side_of}
            lines.append("s0 = stream(r0)")
        for number, calling in enumerate(self.sides, start=1):
            lines += [f"s{number} = side_of({calling})", f"r{number} = s{number}.cuda_stream"]
        return lines

    def _result(self, x: Any, needs: list[str]) -> str:
        if isinstance(x, tuple):
            return f"({''.join(self._result(y, needs) + ', ' for y in x)})"
        return self._expression(x, needs)


class Descriptor:
    """What a kernel's launcher reads of a tensor descriptor whose memory begins at ``base``."""

    def __init__(
        self, base: int, shape: list[int], strides: list[int], block_shape: list[int], padding: str, to_tf32: bool
    ) -> None:
        self.base = Place(base)
        self.shape, self.strides, self.block_shape = shape, strides, block_shape
        self.padding, self.round_f32_to_tf32 = padding, to_tf32


class Place:
    """An address as launchers of kernels read it."""

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        """The address."""
        return self.address


def record(function: Callable[..., Any], arguments: tuple[Any, ...], tensors: list[Tensor]) -> tuple[Program, Any]:
    """Call the function, and the program that does the same."""
    noting = Recorder(tensors)
    _current.recorder = noting
    try:
        with noting:
            result = function(*arguments)
    finally:
        _current.recorder = None
    return noting.program(result), result
