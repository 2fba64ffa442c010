"""Triton kernels that are launched with little host time."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa.ops._layout import block_of
from nsa.ops._triton.tuning import Tile

# Tensor descriptors that are remembered.
MAX_DESCRIPTORS = 1024


def kernel(
    *, do_not_specialize: Sequence[str], repr: Callable[[Any], str] | None = None
) -> Callable[[Callable[..., Any]], Any]:
    """``triton.jit`` for functions that are launched: ``function[grid](*arguments, **constants)``.

    Tensors and numbers are passed by position, constants and options such as ``num_warps`` by name.
    The launch goes to the current stream of the device of the first argument, a tensor or its
    descriptor, whichever device is current.

    Args:
        do_not_specialize: parameters whose values never cause another compilation.
        repr: returns the name of a compiled kernel, see ``triton.jit``.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        make = triton.jit if triton.knobs.runtime.interpret else Kernel
        return make(function, do_not_specialize=do_not_specialize, repr=repr)

    return decorate


class Kernel(JITFunction[Any]):
    """A function that Triton compiles for the device of its first argument."""

    def run(self, *args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        """Launch.

        Triton compiles for the current device and launches on it, so the device of the first
        argument is made current. Products and sums are fused: Triton 3.10 does so only if told to,
        and 3.9 warns of it.
        """
        options = {"enable_fp_fusion": True, **constants}
        device = device_of(args)
        if device < 0 or warmup or device == torch.cuda.current_device():
            return super().run(*args, grid=grid, warmup=warmup, **options)
        with torch.cuda.device(device):
            return super().run(*args, grid=grid, warmup=warmup, **options)


def device_of(args: tuple[Any, ...]) -> int:
    """Return the index of the CUDA device of the first argument, -1 on a CPU."""
    first = args[0]  # a tensor descriptor has a base
    index: int = (first if isinstance(first, Tensor) else first.base).get_device()
    return index


class Launch:
    """A kernel with its grid and constants, launched as ``launch(*arguments)``.

    Triton inspects every argument of every launch to find the compiled kernel, which takes longer
    than the launch. A launch that is part of a plan (:func:`nsa.ops._plan.once`) always has the
    same shapes, dtypes and alignment, so Triton finds the kernel at the first call, and later calls
    launch it directly on the current stream.

    Args:
        kernel: decorated with :func:`kernel`.
        grid: programs in up to three dimensions.
        constants: arguments by name, behind those by position, and options such as ``num_warps``.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], **constants: Any) -> None:
        self._kernel, self._grid, self._constants = kernel, grid, constants
        self._compiled: Any = None
        self._direct: tuple[Any, ...] | None = None

    def __call__(self, *args: Any) -> None:
        if self._direct is not None:
            run, grid, device, launcher, rest = self._direct
            run(*grid, torch._C._cuda_getCurrentRawStream(device), *launcher, *args, *rest)
        elif self._compiled is not None:
            self._direct = self._prepare(args)
            self(*args)
        else:  # interpreted kernels have no compiled form
            self._compiled = self._kernel[self._grid](*args, **self._constants)

    def _prepare(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Everything that a direct launch needs besides stream and arguments."""
        compiled, behind = self._compiled, list(self._kernel.signature.parameters.values())
        rest = (self._constants.get(x.name, x.default) for x in behind[len(args) :])
        launcher = (compiled.function, compiled.packed_metadata, None, None, None)
        return compiled.run, (*self._grid, 1, 1)[:3], device_of(args), launcher, tuple(rest)


class Address:
    """The memory of a tensor descriptor, which it does not keep alive."""

    def __init__(self, address: int, dtype: torch.dtype, device: int) -> None:
        self.address, self.dtype, self.device = address, dtype, device

    def data_ptr(self) -> int:
        """Return the address."""
        return self.address

    def get_device(self) -> int:
        """Return the index of the CUDA device."""
        return self.device


def describe(x: Tensor, block_shape: tuple[int, ...]) -> TensorDescriptor:
    """Return a descriptor of a tensor, the same one each time for the same memory and shape."""
    if triton.knobs.runtime.interpret:
        return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block_shape))
    where = (x.data_ptr(), x.dtype, x.get_device())
    return _described(*where, tuple(x.shape), x.stride(), block_shape)


@functools.lru_cache(MAX_DESCRIPTORS)
def _described(
    address: int,
    dtype: torch.dtype,
    device: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    block_shape: tuple[int, ...],
) -> TensorDescriptor:
    base: Any = Address(address, dtype, device)
    return TensorDescriptor(base, list(shape), list(strides), list(block_shape))


def keep_encoded_descriptors() -> None:
    """Let Triton's launcher keep the encoded form of the descriptors of :func:`describe`.

    Otherwise it encodes a descriptor at each launch, which takes longer than the launch. Versions
    of Triton that encode elsewhere are left alone.
    """
    from triton.backends.nvidia import driver

    encode = getattr(driver, "make_tensordesc_arg", None)
    if encode is None or hasattr(encode, "keeps"):
        return

    @functools.wraps(encode)
    def kept(arg: Any, *metadata: Any) -> Any:
        if type(arg.base) is not Address:
            return encode(arg, *metadata)
        if not hasattr(arg, "encoded"):
            arg.encoded = encode(arg, *metadata)
        return arg.encoded

    kept.keeps = True  # type: ignore[attr-defined]
    driver.make_tensordesc_arg = kept


keep_encoded_descriptors()


# Programmatic dependent launch: a kernel starts while the one before it still runs. From compute
# capability 9.0 on, in decode steps. A kernel that is launched so must wait, in all its programs,
# before it touches anything that another kernel of the stream writes or may still read: then the
# next one, which waits for its end alone, has waited for all before.
#
# Programs that start early are placed where there is room, not evenly: a kernel that moves much
# memory is slower for it, and is launched so in the smallest steps alone.


def starts_early(x: Tensor) -> bool:
    """Option ``launch_pdl`` of a launch on the device of x."""
    return x.is_cuda and _device_starts_early(x.device.index)


@cache
def _device_starts_early(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)


@triton.jit
def wait_for_inputs(AT_ONCE: tl.constexpr = True):
    """Wait until the kernel before has ended, if this one was launched early.

    The next one may start at once, or with ``AT_ONCE`` false at :func:`let_next_start`.
    """
    if cuda_capability_geq(9, 0):
        if AT_ONCE:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start():
    """Let the next kernel start as soon as all programs have come here."""
    if cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_launch_dependents()


def fitting(tile: Tile, *sources: Tensor) -> Tile:
    """The tile; without descriptors where tensors do not lie in steps of 16 bytes, as they need."""
    steps = [x.data_ptr() for x in sources] + [
        stride * x.element_size() for x in sources for stride in x.stride()[:-1]
    ]
    aligned = all(step > 0 and step % 16 == 0 for step in steps)
    return tile if aligned or not tile.tma else tile._replace(tma=False)


def source(x: Tensor, rows: int, tile: Tile) -> Tensor | TensorDescriptor:
    """``x [N, H, D]`` as a kernel loads ``rows`` rows of one head: by pointers or a descriptor."""
    if not tile.tma:
        return x
    return describe(x, (rows, 1, block_of(x.shape[-1])))
