"""Loads that kernels outside of the attention branches share."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def load_fp32(pointers, mask):
    """Values at ``pointers`` in fp32, 0 where ``mask`` is false."""
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
