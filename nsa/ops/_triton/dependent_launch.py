"""Programmatic dependent launch: a kernel starts while the one before it still runs.

From compute capability 9.0 on, in decode steps. A kernel that is launched so must wait, in all its
programs, before it touches anything that another kernel of the stream writes or may still read:
then the next one, which waits for its end alone, has waited for all before.

Programs that come early lie where there is room, not evenly: a kernel that moves much memory is
slower for it, and is launched so in the smallest steps alone.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq


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
