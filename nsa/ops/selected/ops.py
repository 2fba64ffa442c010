"""``nsa::selected_attention``, registered with PyTorch. Triton is imported at the first launch."""

from __future__ import annotations

from torch import Tensor

from nsa.ops._checks import check_keys, check_numbers, check_queries
from nsa.ops._layout import Gated, rows
from nsa.ops._operator import Call, register_attention
from nsa.ops.selected.types import SelectedInputs, SelectedResults


def run_selected_forward(
    inputs: SelectedInputs, call: Call, results: SelectedResults, *, unique: bool = False
) -> None:
    """Write the results; ``unique`` tells whether no query selects a block twice."""
    from nsa.ops.selected.launch import selected_forward

    name, selections = "selected_attention", inputs.block_indices.numel()
    check_queries(name, inputs.q)
    check_keys(name, "k", inputs.k)
    counted = "selections (tokens times KV heads times slots)"
    check_numbers(name, "block_indices", selections, counted)
    selected_forward(inputs.read(), call, results, unique=unique)


def run_selected_backward(
    inputs: SelectedInputs,
    call: Call,
    results: SelectedResults,
    dout: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    *,
    gated: Gated | None = None,
    unique: bool = False,
) -> None:
    """Run the backward.

    Args:
        inputs: inputs of the forward.
        call: non-tensor arguments of the forward.
        results: results of the forward.
        dout: gradient of out; with ``gated``, that of the gated sum of the branches.
        grads: outputs for dq, dk and dv, contiguous.
        gated: gates and gradients for the backward of the gated sum.
        unique: whether no query selects a block twice, as in results of
            :func:`nsa.select_blocks`.
    """
    from nsa.ops.selected.launch import selected_backward

    gated = gated or Gated()
    selected_backward(inputs.read(), call, results, rows(dout), grads, gated, unique=unique)


def _forward(inputs: SelectedInputs, call: Call) -> SelectedResults:
    results = _new_results(inputs, call)
    run_selected_forward(inputs, call, results)
    return results


def _backward(
    inputs: SelectedInputs, results: SelectedResults, dout: Tensor, call: Call
) -> SelectedInputs:
    q, k, v, _ = inputs
    grads = (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape))
    run_selected_backward(inputs, call, results, dout, grads)
    return SelectedInputs(*grads, None)  # type: ignore[arg-type]


def _new_results(inputs: SelectedInputs, call: Call) -> SelectedResults:
    q, _, v, block_indices = inputs
    return SelectedResults.new(q, v, block_indices, call.algorithm)


selected_attention_op = register_attention(
    "selected_attention", SelectedInputs, SelectedResults, _forward, _backward, _new_results
)
