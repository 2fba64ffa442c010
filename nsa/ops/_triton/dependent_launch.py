"""Programmatic dependent launch: a kernel starts while the one before it still runs.

From compute capability 9.0 on. A kernel that is launched so must wait before it touches anything
that another kernel of the stream may write or still read, in all its programs: then the next one,
which waits for its end alone, has waited for all before.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq

# About one for each multiprocessor of an H100 or H200.
FEW_PROGRAMS = tl.constexpr(128)


def starts_early(x: Tensor) -> bool:
    """Option ``launch_pdl`` of a launch on the device of x."""
    return x.is_cuda and _device_starts_early(x.device.index)


@cache
def _device_starts_early(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)


@triton.jit
def wait_for_inputs(AT_ONCE: tl.constexpr = False):
    """Wait until the kernel before has ended.

    The next one may start at once if this one leaves room on the GPU, or if told so; otherwise it
    would only be in the way, until :func:`let_next_start`.
    """
    if cuda_capability_geq(9, 0):
        if AT_ONCE or tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2) <= FEW_PROGRAMS:
            gdc_launch_dependents()
        gdc_wait()


@triton.jit
def let_next_start():
    """Let the next kernel start as soon as all programs have come here."""
    if cuda_capability_geq(9, 0):
        gdc_launch_dependents()


@triton.jit
def prefetch(ptr, at, mask):
    """Bring the lines of 128 bytes of ``ptr + at`` into the L2 cache, without waiting for them."""
    if cuda_capability_geq(9, 0):
        address = tl.where(mask, ptr + at, ptr).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [address],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
