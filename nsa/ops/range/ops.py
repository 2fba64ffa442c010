"""``nsa::window_attention`` and ``nsa::compressed_attention``, registered with PyTorch.

Triton is imported when an operator first runs.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from nsa.ops._checks import check_keys, check_queries
from nsa.ops._layout import rows
from nsa.ops._operator import Call, KeyRange, register_attention
from nsa.ops.range.reference import RangeInputs, RangeResults


def register_range_attention(
    name: str, keys_of: Callable[[Call], KeyRange]
) -> Callable[[RangeInputs, Call], RangeResults]:
    """Register ``nsa::<name>`` and ``nsa::<name>_backward``.

    Args:
        name: name of the operator, also used to look up tiles.
        keys_of: returns the keys visible to a query.
    """

    def forward(inputs: RangeInputs, call: Call) -> RangeResults:
        results = RangeResults.new(inputs.q, inputs.v)
        run_range_attention(name, inputs, keys_of(call), call.softmax_scale, results)
        return results

    def backward(
        inputs: RangeInputs, results: RangeResults, dout: Tensor, call: Call
    ) -> RangeInputs:
        from nsa.ops.range.launch import RangeBackward

        dq, keys = inputs.q.new_empty(inputs.q.shape), keys_of(call)
        made = RangeBackward.new(name, inputs, results, dout, dq, keys, call.softmax_scale)
        made.query_gradient()
        return RangeInputs(dq, *made.key_gradients())

    def fake(inputs: RangeInputs, call: Call) -> RangeResults:
        return RangeResults.new(inputs.q, inputs.v)

    return register_attention(name, RangeInputs, RangeResults, forward, backward, fake)


def run_range_attention(
    name: str, inputs: RangeInputs, keys: KeyRange, softmax_scale: float, results: RangeResults
) -> None:
    """Write the results with the kernel of the operator ``name``."""
    from nsa.ops.range.launch import range_forward

    check_queries(name, inputs.q)
    check_keys(name, "k" if keys.window else "k_cmp", inputs.k, keys.stride)
    inputs = RangeInputs(*(rows(x) for x in inputs))
    range_forward(name, inputs, results.out, results.lse.t(), keys, softmax_scale)


window_attention_op = register_range_attention("window_attention", KeyRange.of_window)
compressed_attention_op = register_range_attention("compressed_attention", KeyRange.of_blocks)
