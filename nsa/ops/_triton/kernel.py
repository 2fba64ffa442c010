"""Triton kernels whose launches cost the host a third of Triton's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.jit import JITFunction

from nsa.ops._replay import Descriptor, recorder

# Compiled kernels of one function that are found without Triton, before all are forgotten: sizes
# that never come again would fill the memory.
MOST_COMPILED = 1024
# Triton compiles anew for addresses that are no multiples of 16. Looked at more closely than that
# in case it ever does.
_ALIGNMENT = 128


def kernel(
    *, do_not_specialize: Sequence[str], repr: Callable[[Any], str] | None = None
) -> Callable[[Callable[..., Any]], Any]:
    """``triton.jit`` for functions that are launched: ``function[grid](*arguments, **constants)``.

    Arguments that are no constants are given by position, constants and options such as
    ``num_warps`` by name. The launch goes to the current stream of the device of the first
    argument, a tensor or its descriptor, whichever device is current.

    Args:
        do_not_specialize: parameters for whose values nothing is compiled anew.
        repr: gives the name of a compiled kernel, see ``triton.jit``.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        if triton.knobs.runtime.interpret:
            return Interpreted(triton.jit(function, do_not_specialize=do_not_specialize, repr=repr))
        return Kernel(function, do_not_specialize=do_not_specialize, repr=repr)

    return decorate


class Kernel(JITFunction[Any]):
    """A function that Triton compiles, with a shorter way to what is compiled.

    Triton looks at every argument of every launch to find the compiled kernel that is meant, which
    takes longer than the launch. Here it is found by the numbers among the arguments, and by dtype
    and alignment of the tensors: of equal keys all that Triton decides by is equal. A launch whose
    key is new is Triton's own, and so is every one while a profiler has hooks. Triton's settings
    for debugging count when a key is new.
    """

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__(function, **options)
        self._varying = [parameter.do_not_specialize for parameter in self.params]
        self._compiled: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def run(self, *args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        """Launch.

        Triton compiles for the current device and launches on it, so the device of the first
        argument is made current. Products and sums are fused: Triton 3.10 does so only if told to,
        and 3.9 warns of it.
        """
        options = {"enable_fp_fusion": True, **constants}
        first, hooks = args[0], triton.knobs.runtime
        # a tensor descriptor has a base
        device = (first if isinstance(first, Tensor) else first.base).get_device()
        if device >= 0 and not warmup and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self.run(*args, grid=grid, warmup=warmup, **constants)
        if device < 0 or warmup or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            return super().run(*args, grid=grid, warmup=warmup, **options)
        key = (device, *self._marks(args), *constants, *constants.values())
        stream = torch._C._cuda_getCurrentRawStream(device)
        found = self._compiled.get(key)
        if found is None:
            compiled = super().run(*args, grid=grid, warmup=False, **options)
            if len(self._compiled) >= MOST_COMPILED:
                self._compiled.clear()
            behind = list(self.signature.parameters.values())[len(args) :]
            rest = tuple(constants.get(parameter.name, parameter.default) for parameter in behind)
            self._compiled[key] = compiled, rest
        else:
            compiled, rest = found
            compiled.run(*_before(compiled, grid, stream), *args, *rest)
        recording = recorder()
        if recording is not None:
            recording.launch(compiled.run, _before(compiled, grid, stream), args, rest)
        return compiled

    def _marks(self, args: tuple[Any, ...]) -> list[Any]:
        """What a compiled kernel may depend on, of arguments in the order of the parameters."""
        marks: list[Any] = []
        for x, varies in zip(args, self._varying, strict=False):
            if isinstance(x, Tensor):
                marks += (x.dtype, x.data_ptr() % _ALIGNMENT)
            elif isinstance(x, tuple):
                marks += (len(x), *((y.dtype, y.data_ptr() % _ALIGNMENT) for y in x))
            # a tensor descriptor, which sees to its alignment itself
            elif hasattr(x, "block_shape"):
                marks += (x.base.dtype, *x.block_shape)
            elif varies and isinstance(x, int):
                marks.append(-(2**31) <= x < 2**31)
            else:
                marks += (type(x), x)
        return marks


def keep_descriptors() -> None:
    """Let Triton's launcher keep what it makes of a replayed tensor descriptor.

    For each launch it encodes a descriptor anew, which takes the host longer than the launch. What
    it makes of one follows from its fields alone. Versions of Triton that do this elsewhere are
    left as they are.
    """
    from triton.backends.nvidia import driver

    expand = getattr(driver, "make_tensordesc_arg", None)
    if expand is None or hasattr(expand, "keeps"):
        return

    @functools.wraps(expand)
    def kept(arg: Any, *metadata: Any) -> Any:
        if type(arg) is not Descriptor:
            return expand(arg, *metadata)
        if arg.expanded is None:
            arg.expanded = expand(arg, *metadata)
        return arg.expanded

    kept.keeps = True  # type: ignore[attr-defined]
    driver.make_tensordesc_arg = kept


keep_descriptors()


def _before(compiled: Any, grid: Any, stream: int) -> tuple[Any, ...]:
    """What a compiled kernel's launcher takes before the arguments; the last are hooks."""
    size = (*grid, 1, 1)[:3]
    return *size, stream, compiled.function, compiled.packed_metadata, None, None, None


class Interpreted:
    """A function that Triton interprets, launched as a compiled one."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            recording, call = recorder(), functools.partial(self.function[grid], **constants)
            with nullcontext() if recording is None else _disable_current_modes():
                call(*args)
            if recording is not None:
                recording.launch(call, (), args, ())

        return launch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)
