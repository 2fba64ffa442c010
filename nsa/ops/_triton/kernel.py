"""Kernel decorator and launch classes with low host overhead."""

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

# Size of the descriptor cache.
MAX_DESCRIPTORS = 1024


def kernel(
    *, do_not_specialize: Sequence[str], repr: Callable[[Any], str] | None = None
) -> Callable[[Callable[..., Any]], Any]:
    """``triton.jit`` for kernels launched as ``function[grid](*arguments, **constants)``.

    Tensors and numbers are positional; constants and options such as ``num_warps`` are keywords.
    The launch uses the current stream of the device of the first argument, a tensor or its
    descriptor, even if another device is current.

    Args:
        do_not_specialize: parameters whose values never trigger another compilation.
        repr: returns the name of a compiled kernel, see ``triton.jit``.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        make = triton.jit if triton.knobs.runtime.interpret else Kernel
        return make(function, do_not_specialize=do_not_specialize, repr=repr)

    return decorate


class Kernel(JITFunction[Any]):
    """JIT function that compiles and launches on the device of its first argument."""

    def run(self, *args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        """Launch the kernel.

        Triton compiles for the current device and launches on it, so the device of the first
        argument is made current. Fused multiply-add is enabled explicitly: Triton 3.10 requires it,
        and 3.9 warns otherwise.
        """
        options = {"enable_fp_fusion": True, **constants}
        device = device_of(args)
        if device < 0 or warmup or device == torch.cuda.current_device():
            return super().run(*args, grid=grid, warmup=warmup, **options)
        with torch.cuda.device(device):
            return super().run(*args, grid=grid, warmup=warmup, **options)


def device_of(args: tuple[Any, ...]) -> int:
    """Return the CUDA device index of the first argument, -1 on a CPU."""
    first = args[0]  # a tensor descriptor has a base
    index: int = (first if isinstance(first, Tensor) else first.base).get_device()
    return index


class Launch:
    """A kernel with its grid and constants, launched as ``launch(*arguments)``.

    For every launch Triton inspects all arguments to find the compiled kernel, which takes longer
    than the launch itself. A launch in a plan (:func:`nsa.ops._plan.once`) always has the same
    shapes, dtypes and alignment, so only the first call looks up the kernel; later calls launch it
    directly on the current stream.

    Args:
        kernel: decorated with :func:`kernel`.
        grid: number of programs in up to three dimensions.
        constants: keyword arguments after the positional ones, and options such as ``num_warps``.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], **constants: Any) -> None:
        self._kernel, self._grid, self._constants = kernel, grid, constants
        self._compiled: Any = None
        self._direct: tuple[Any, ...] | None = None

    def __call__(self, *args: Any) -> None:
        if self._direct is not None:
            run, grid, device, launcher, rest = self._direct
            run(*grid, torch._C._cuda_getCurrentRawStream(device), *launcher, *args, *rest)
        elif self._compiled is not None and device_of(args) >= 0:
            self._direct = self._prepare(args)
            self(*args)
        else:  # interpreted kernels have no compiled form; on a CPU, they are compiled alone
            self._compiled = self._kernel[self._grid](*args, **self._constants)

    def _prepare(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Everything that a direct launch needs besides the stream and the arguments."""
        compiled, behind = self._compiled, list(self._kernel.signature.parameters.values())
        rest = (self._constants.get(x.name, x.default) for x in behind[len(args) :])
        launcher = (compiled.function, compiled.packed_metadata, None, None, None)
        return compiled.run, (*self._grid, 1, 1)[:3], device_of(args), launcher, tuple(rest)


class Address:
    """Exposes an address as ``data_ptr()`` to Triton; does not keep the memory alive."""

    def __init__(self, address: int, dtype: torch.dtype, device: int) -> None:
        self.address, self.dtype, self.device = address, dtype, device

    def data_ptr(self) -> int:
        """Return the address."""
        return self.address

    def get_device(self) -> int:
        """Return the index of the CUDA device."""
        return self.device


def describe(x: Tensor, block_shape: tuple[int, ...]) -> TensorDescriptor:
    """Return the descriptor of a tensor, cached by address and shape."""
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
    """Make Triton's launcher cache the encoded form of the descriptors of :func:`describe`.

    Otherwise it encodes each descriptor at every launch, which takes longer than the launch.
    Versions of Triton that encode elsewhere are not patched.
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


# Programmatic dependent launch: a kernel starts while the previous one is still running. Used in
# decode steps from compute capability 9.0 on. All programs of such a kernel must wait before they
# access anything that another kernel of the stream writes or may still read. The next kernel waits
# only for this one, and thereby for all earlier ones. The scan of a step reads rows that earlier
# steps cached before it waits: the append before it lets it start only after its own wait.
#
# Programs that start early are distributed unevenly over the multiprocessors. This slows down
# memory-bound kernels, so they use it only in the smallest steps.


EARLY_WITHOUT_GPU = False  # for recorded launches


def starts_early(x: Tensor) -> bool:
    """Whether to set the launch option ``launch_pdl`` on the device of x."""
    return _device_starts_early(x.device.index) if x.is_cuda else EARLY_WITHOUT_GPU


@cache
def _device_starts_early(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)


@triton.jit
def wait_for_inputs(AT_ONCE: tl.constexpr = True):
    """Wait until the previous kernel has ended, if this one was launched early.

    The next kernel may start at once or, if ``AT_ONCE`` is false, at :func:`let_next_start`.
    """
    if cuda_capability_geq(9, 0):
        if AT_ONCE:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start():
    """Allow the next kernel to start once all programs have called this."""
    if cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_launch_dependents()


def fitting(tile: Tile, *sources: Tensor) -> Tile:
    """The tile, without tensor descriptors unless all tensors are 16-byte aligned."""
    steps = [x.data_ptr() for x in sources] + [
        stride * x.element_size() for x in sources for stride in x.stride()[:-1]
    ]
    aligned = all(step > 0 and step % 16 == 0 for step in steps)
    return tile if aligned or not tile.tma else tile._replace(tma=False)


def source(x: Tensor, rows: int, tile: Tile) -> Tensor | TensorDescriptor:
    """Kernel argument for loads of ``rows`` rows of one head: ``x [N, H, D]`` or a descriptor."""
    if not tile.tma:
        return x
    return describe(x, (rows, 1, block_of(x.shape[-1])))
