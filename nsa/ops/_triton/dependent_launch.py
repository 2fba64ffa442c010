"""Programmatic dependent launch: a kernel starts while the one before it still runs.

From compute capability 9.0 on, in decode steps of few tokens, whose kernels leave room on the GPU.
A kernel that is launched so must wait, in all its programs, before it touches anything that another
kernel of the stream writes or may still read: then the next one, which waits for its end alone, has
waited for all before.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

# Tokens of all sequences in a step up to which it pays.
FEW_TOKENS = 8


def starts_early(x: Tensor, tokens: int) -> bool:
    """Option ``launch_pdl`` of a launch on the device of x, in a step of so many tokens."""
    return tokens <= FEW_TOKENS and x.is_cuda and _device_starts_early(x.device.index)


@cache
def _device_starts_early(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)


@triton.jit
def wait_for_inputs():
    """Let the next kernel start, and wait until the one before has ended.

    Without the option ``launch_pdl`` nothing happens.
    """
    if cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
