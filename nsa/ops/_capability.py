"""Which GPUs the Triton kernels run on."""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import find_spec

import torch

from nsa.errors import fail

# bf16 products and asynchronous copies, which the kernels and their tiles take for granted.
LEAST_CAPABILITY = (8, 0)


@cache
def capability(index: int | None) -> tuple[int, int] | None:
    """Compute capability of a CUDA device, asked once a process; None without CUDA.

    A fake tensor may say that it lies on a GPU where there is none.
    """
    return torch.cuda.get_device_capability(index) if torch.cuda.is_available() else None


def is_too_old(index: int | None) -> bool:
    """Whether the kernels do not run on this CUDA device."""
    found = capability(index)
    return found is not None and found < LEAST_CAPABILITY


@cache
def has_triton() -> bool:
    """Whether Triton is installed; there is none for Windows and macOS."""
    return find_spec("triton") is not None


def check_kernels_run(function: str, argument: str, index: int | None, hint: str) -> None:
    """Refuse a GPU that the kernels do not run on, and any where Triton is missing.

    ``torch.compile`` calls it while it traces and leaves nothing of it in the graph.

    Args:
        function: public name, for the message.
        argument: what lies on the device, or names it.
        index: of the CUDA device; None is the present one.
        hint: what to do instead, a sentence.

    Raises:
        ValueError: the GPU is older than compute capability 8.0, or Triton is not installed.
    """
    if not has_triton():
        rule = "be on a CPU where Triton is not installed"
        fail(function, argument, rule, f"a GPU on {sys.platform}", hint)
    if is_too_old(index):
        pairs = (LEAST_CAPABILITY, capability(index) or ())
        least, found = (".".join(map(str, pair)) for pair in pairs)
        rule = f"be on a GPU of compute capability {least} or above for the Triton kernels"
        name = torch.cuda.get_device_name(index)
        fail(function, argument, rule, f"{name} of {found}", f"{hint} Or take a newer GPU.")


# As torch.compiler.assume_constant_result does, which would import the compiler with this library.
check_kernels_run._dynamo_marked_constant = True  # type: ignore[attr-defined]
