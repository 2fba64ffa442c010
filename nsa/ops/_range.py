"""Attention in which every query sees one range of keys: the window and the compressed branch.

Triton is loaded when an operator first runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.ops._limits import check_keys, check_queries
from nsa.ops._operator import Call, register_attention
from nsa.ops._sequences import Sequences

if TYPE_CHECKING:
    from nsa.ops._triton.layout import Gated
    from nsa.ops._triton.range_launch import RangeBackward


class RangeInputs(NamedTuple):
    """Queries ``[T, Hq, D]``, keys ``[N, Hkv, D]`` and values ``[N, Hkv, Dv]``."""

    q: Tensor
    k: Tensor
    v: Tensor


class RangeResults(NamedTuple):
    """out ``[T, Hq, Dv]`` and lse fp32 ``[T, Hq]``, a view of ``[Hq, T]``, as kernels read it."""

    out: Tensor
    lse: Tensor

    @classmethod
    def new(cls, q: Tensor, v: Tensor) -> RangeResults:
        """Memory for the results of such queries and values."""
        num_q, num_heads, _ = q.shape
        out = q.new_empty(num_q, num_heads, v.shape[-1])
        return cls(out, q.new_empty(num_heads, num_q, dtype=torch.float32).t())


@dataclass(frozen=True)
class KeyRange:
    """Which keys a query sees.

    Attributes:
        sequences: where the sequences lie.
        window: whether keys are tokens of a window; otherwise they are compressed blocks.
        cu_key: offsets of the keys; None when all sequences are alike.
        len_key: keys of each sequence when all are alike, otherwise at least the most.
        size: window size, or compression block size.
        stride: compression stride; 1 for the window.
    """

    sequences: Sequences
    window: bool
    cu_key: Tensor | None
    len_key: int
    size: int
    stride: int

    @classmethod
    def of_window(cls, call: Call) -> KeyRange:
        """The last ``window_size`` tokens."""
        where = call.sequences
        cu_k = None if where.offsets is None else where.offsets[1]
        return cls(where, True, cu_k, where.len_k, call.config.window_size, 1)

    @classmethod
    def of_blocks(cls, call: Call) -> KeyRange:
        """The compressed blocks that lie wholly in the past."""
        config = call.config
        cu_cmp, most = call.sequences.kernel_blocks(config)
        sizes = (config.compress_block_size, config.compress_stride)
        return cls(call.sequences, False, cu_cmp, most, *sizes)

    def of_coarse(self, config: NSAConfig, cu_coarse: Tensor) -> KeyRange:
        """The coarse blocks of which a query sees every compressed key, from those keys' range."""
        assert config.coarse_block_size is not None
        width = config.coarse_block_size
        return KeyRange(
            self.sequences,
            False,
            None if self.cu_key is None else cu_coarse,
            self.len_key * self.stride // width,
            width + self.size - self.stride,
            width,
        )

    def arguments(self) -> tuple[Tensor | int | None, ...]:
        """``cu_q, cu_k, cu_key, len_q, len_k, len_key, num_sequences``: what every kernel takes."""
        cu_q, cu_k, len_q, len_k, num_sequences = self.sequences.arguments()
        return cu_q, cu_k, self.cu_key, len_q, len_k, self.len_key, num_sequences


def register_range_attention(
    name: str, keys_of: Callable[[Call], KeyRange]
) -> Callable[[RangeInputs, Call], RangeResults]:
    """Register ``nsa::<name>`` and ``nsa::<name>_backward``.

    Args:
        name: of the operator; kernels look their tiles up by it.
        keys_of: which keys a query sees.
    """

    def forward(inputs: RangeInputs, call: Call) -> RangeResults:
        results = RangeResults.new(inputs.q, inputs.v)
        run_range_attention(name, inputs, keys_of(call), call.softmax_scale, results)
        return results

    def backward(
        inputs: RangeInputs, results: RangeResults, dout: Tensor, call: Call
    ) -> RangeInputs:
        dq = inputs.q.new_empty(inputs.q.shape)
        backward = new_range_backward(name, inputs, results, dout, dq, keys_of(call), call)
        range_query_gradient(backward)
        return RangeInputs(dq, *range_key_gradients(backward))

    def fake(inputs: RangeInputs, call: Call) -> RangeResults:
        return RangeResults.new(inputs.q, inputs.v)

    return register_attention(name, RangeInputs, RangeResults, forward, backward, fake)


def run_range_attention(
    name: str, inputs: RangeInputs, keys: KeyRange, softmax_scale: float, results: RangeResults
) -> None:
    """Fill the results by the kernel of the operator ``name``."""
    from nsa.ops._triton.range_launch import range_forward

    check_queries(name, inputs.q)
    check_keys(name, "k" if keys.window else "k_cmp", inputs.k, keys.stride)
    inputs = RangeInputs(*(rows(x) for x in inputs))
    range_forward(name, inputs, results.out, results.lse.t(), keys, softmax_scale)


def new_range_backward(
    name: str,
    inputs: RangeInputs,
    results: RangeResults,
    dout: Tensor,
    dq: Tensor,
    keys: KeyRange,
    call: Call,
    gated: Gated | None = None,
) -> RangeBackward:
    """The backward of the operator ``name``, with all its memory but dk and dv.

    Args:
        name: of the operator.
        inputs: of the forward.
        results: of the forward.
        dout: gradient of ``out``; with ``gated`` that of the branches' gated sum.
        dq: where the gradient of q goes, contiguous.
        keys: which keys a query sees.
        call: of the forward.
        gated: the branch's part in the gated sum.
    """
    from nsa.ops._triton.layout import Gated
    from nsa.ops._triton.range_launch import RangeBackward

    inputs = RangeInputs(*(rows(x) for x in inputs))
    results = RangeResults(results.out, by_head(results.lse))
    gated = gated or Gated()
    return RangeBackward.new(name, inputs, results, rows(dout), dq, keys, call.softmax_scale, gated)


def range_query_gradient(backward: RangeBackward) -> None:
    """dq, and what the gradients of the keys need."""
    from nsa.ops._triton.range_launch import range_dq

    range_dq(backward)


def range_key_gradients(backward: RangeBackward) -> tuple[Tensor, Tensor]:
    """dk and dv, after :func:`range_query_gradient`."""
    from nsa.ops._triton.range_launch import range_dkv

    return range_dkv(backward)


def rows(x: Tensor) -> Tensor:
    """``x [N, H, D]`` as kernels read it: heads contiguous, those of a row within 2^31 elements.

    Kernels count rows in 64 bits and heads in 32: heads lie far apart only where they are the outer
    dimension in memory.
    """
    near = (x.shape[1] - 1) * x.stride(1) + x.shape[2] <= 2**31
    return x if near and x.stride(2) == 1 else x.contiguous()


def by_head(lse: Tensor) -> Tensor:
    """lse ``[T, Hq]`` as kernels read it, ``[Hq, T]``; they wrote it so, then nothing is copied."""
    return lse.t().contiguous()
