"""``nsa::window_attention`` and ``nsa::compressed_attention``, registered with PyTorch.

A query of either operator sees one range of keys. Triton is loaded when an operator first runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from nsa.ops._checks import check_keys, check_queries
from nsa.ops._operator import Call, KeyRange, register_attention
from nsa.ops._triton.layout import by_head, rows
from nsa.ops.range.reference import RangeInputs, RangeResults

if TYPE_CHECKING:
    from nsa.ops._triton.layout import Gated
    from nsa.ops.range.launch import RangeBackward


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
    from nsa.ops.range.launch import range_forward

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
    from nsa.ops.range.launch import RangeBackward

    inputs = RangeInputs(*(rows(x) for x in inputs))
    results = RangeResults(results.out, by_head(results.lse))
    gated = gated or Gated()
    return RangeBackward.new(name, inputs, results, rows(dout), dq, keys, call.softmax_scale, gated)


def range_query_gradient(backward: RangeBackward) -> None:
    """dq, and what the gradients of the keys need."""
    from nsa.ops.range.launch import range_dq

    range_dq(backward)


def range_key_gradients(backward: RangeBackward) -> tuple[Tensor, Tensor]:
    """dk and dv, after :func:`range_query_gradient`."""
    from nsa.ops.range.launch import range_dkv

    return range_dkv(backward)


window_attention_op = register_range_attention("window_attention", KeyRange.of_window)


compressed_attention_op = register_range_attention("compressed_attention", KeyRange.of_blocks)
