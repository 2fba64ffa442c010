"""Backend choice: the reference, or Triton kernels on a GPU or in the interpreter."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from nsa.errors import check, fail

# The kernels and their tiles rely on bf16 matmuls and asynchronous copies.
LEAST_CAPABILITY = (8, 0)


@cache
def capability(index: int | None) -> tuple[int, int] | None:
    """Compute capability of a CUDA device, cached per process; None without CUDA.

    A fake tensor may claim a CUDA device on a machine without a GPU.
    """
    return torch.cuda.get_device_capability(index) if torch.cuda.is_available() else None


def is_too_old(index: int | None) -> bool:
    """Whether this CUDA device is too old for the kernels."""
    found = capability(index)
    return found is not None and found < LEAST_CAPABILITY


@cache
def has_triton() -> bool:
    """Whether Triton is installed; it does not support Windows or macOS."""
    return find_spec("triton") is not None


def check_kernels_run(argument: str, index: int | None, hint: str) -> None:
    """Raise if the GPU is too old for the kernels or Triton is not installed.

    ``torch.compile`` evaluates it while tracing; it adds nothing to the graph.

    Args:
        argument: name of the argument that specifies the device.
        index: index of the CUDA device; None means the current one.
        hint: suggested alternative, a full sentence.

    Raises:
        ValueError: the GPU is older than compute capability 8.0, or Triton is not installed.
    """
    if not has_triton():
        rule = "be on a CPU where Triton is not installed"
        fail(argument, rule, f"a GPU on {sys.platform}", hint)
    if is_too_old(index):
        pairs = (LEAST_CAPABILITY, capability(index) or ())
        least, found = (".".join(map(str, pair)) for pair in pairs)
        rule = f"be on a GPU of compute capability {least} or above for the Triton kernels"
        name = torch.cuda.get_device_name(index)
        fail(argument, rule, f"{name} of {found}", f"{hint} Or take a newer GPU.")


# Same effect as torch.compiler.assume_constant_result, without importing the compiler.
check_kernels_run._dynamo_marked_constant = True  # type: ignore[attr-defined]


BACKENDS = ("auto", "reference", "triton")

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_NO_KERNELS = 'Ask for backend="reference", or compute on a CPU.'


def choose_backend(backend: str, x: Tensor, argument: str = "q") -> str:
    """Return the backend for inputs like ``x``.

    ``auto`` depends only on the device; an explicit request never falls back. Error messages call
    ``x`` by the name ``argument``.
    """
    check(backend in BACKENDS, "backend", f"be one of {', '.join(BACKENDS)}", backend)
    if backend == "auto":
        backend = "triton" if on_gpu(x) else "reference"
    if backend == "triton":
        rule = "be bfloat16, float16 or float32 for the Triton kernels"
        hint = 'Or ask for backend="reference".'
        check(x.dtype in KERNEL_DTYPES, argument, rule, x.dtype, hint)
        if x.device.type == "cuda":
            check_kernels_run(argument, x.device.index, _NO_KERNELS)
        if not on_gpu(x) and not torch.compiler.is_compiling():
            rule = 'lie on a CUDA GPU for backend="triton"'
            check(kernels_run_on_cpu(), argument, rule, x.device)
    return backend


_as_on_gpu = False


def on_gpu(x: Tensor) -> bool:
    """Whether ``x`` is on a CUDA GPU, or is treated as if it were."""
    return x.device.type == "cuda" or _as_on_gpu


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Context manager: treat tensors as if they were on a GPU.

    Kernels are chosen and no tensor contents are read. Use it with fake tensors only, so that no
    kernel actually runs.
    """
    global _as_on_gpu
    before, _as_on_gpu = _as_on_gpu, True
    try:
        yield
    finally:
        _as_on_gpu = before


def kernels_run_on_cpu() -> bool:
    """Whether Triton interprets kernels in this process, as in the tests."""
    if not has_triton():
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def reads_contents(index: Tensor) -> bool:
    """Whether the values of an index tensor can be read without a device synchronization."""
    return index.device.type == "cpu" and not on_gpu(index) and not torch.compiler.is_compiling()
