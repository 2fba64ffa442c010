"""Which implementation runs: the reference, or Triton kernels on a GPU and in the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from nsa.errors import check
from nsa.ops._capability import check_kernels_run, has_triton

BACKENDS = ("auto", "reference", "triton")

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_NO_KERNELS = 'Ask for backend="reference", or compute on a CPU.'


def choose_backend(function: str, backend: str, x: Tensor, argument: str = "q") -> str:
    """The backend that runs for inputs like ``x``.

    ``auto`` looks at the device alone; an explicit request never falls back. Errors call ``x`` by
    the name of the function's ``argument``.
    """
    check(backend in BACKENDS, function, "backend", f"be one of {', '.join(BACKENDS)}", backend)
    if backend == "auto":
        backend = "triton" if on_gpu(x) else "reference"
    if backend == "triton":
        rule = "be bfloat16, float16 or float32 for the Triton kernels"
        hint = 'Or ask for backend="reference".'
        check(x.dtype in KERNEL_DTYPES, function, argument, rule, x.dtype, hint)
        if x.device.type == "cuda":
            check_kernels_run(function, argument, x.device.index, _NO_KERNELS)
        if not on_gpu(x) and not torch.compiler.is_compiling():
            rule = 'lie on a CUDA GPU for backend="triton"'
            check(kernels_run_on_cpu(), function, argument, rule, x.device)
    return backend


_as_on_gpu = False


def on_gpu(x: Tensor) -> bool:
    """Whether ``x`` lies on a CUDA GPU, or counts as if it did."""
    return x.device.type == "cuda" or _as_on_gpu


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Within, tensors count as if they lay on a GPU: kernels are chosen, and no contents are read.

    For fake tensors, which have a shape and no data, so that no kernel runs.
    """
    global _as_on_gpu
    before, _as_on_gpu = _as_on_gpu, True
    try:
        yield
    finally:
        _as_on_gpu = before


def kernels_run_on_cpu() -> bool:
    """Whether Triton interprets kernels in this process, as the tests let it."""
    if not has_triton():
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def reads_contents(index: Tensor) -> bool:
    """Whether the values of an index tensor may be looked at without waiting for a device."""
    return index.device.type == "cpu" and not on_gpu(index) and not torch.compiler.is_compiling()
