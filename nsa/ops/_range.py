"""Registration with PyTorch of attention in which every query sees one range of keys: the window and the compressed branch.

Triton is loaded when an operator first runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nsa.ops._limits import check_keys, check_queries
from nsa.ops._register import register

if TYPE_CHECKING:
    from nsa.ops._triton.layout import Gated
    from nsa.ops._triton.range_launch import RangeBackward

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, {extra}Tensor? cu_q, Tensor? cu_k, Tensor? cu_key, SymInt num_sequences, SymInt len_q, "
    "SymInt len_k, SymInt len_key, int size, int stride, float softmax_scale"
)


def register_range_attention(name: str, window: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """Register ``nsa::<name>`` and ``nsa::<name>_backward``.

    Args:
        name: of the operator; kernels look their tiles up by it.
        window: whether keys are tokens of a window; otherwise they are compressed blocks.

    Returns:
        The operator: ``(q [T, Hq, D], k [N, Hkv, D], v [N, Hkv, Dv], cu_q, cu_k, cu_key,
        num_sequences, len_q, len_k, len_key, size, stride, softmax_scale) -> (out [T, Hq, Dv], lse
        fp32 [T, Hq])``, see ``RangeLayout``; lse has no gradient.
    """

    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        out, lse = range_results(q, v)
        run_range_attention(name, window, q, k, v, out, lse, *rest)
        return out, lse.t()

    def backward(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        backward = new_range_backward(window, q, k, v, out, lse, dout, q.new_empty(q.shape), *rest)
        range_query_gradient(name, backward)
        return backward.dq, *range_key_gradients(name, backward)

    def fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        out, lse = range_results(q, v)
        return out, lse.t()

    def fake_backward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, cu_q, cu_k, cu_key, *ctx.rest = inputs
        ctx.save_for_backward(q, k, v, *output, cu_q, cu_k, cu_key)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, dout: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        none = (None,) * (3 + len(ctx.rest))
        if dout is None:
            return None, None, None, *none
        q, k, v, out, lse, *offsets = ctx.saved_tensors
        return *operator_backward(q, k, v, out, lse, dout, *offsets, *ctx.rest), *none

    extra = "Tensor out, Tensor lse, Tensor dout, "
    schema = f"({_ARGUMENTS.format(extra=extra)}) -> (Tensor, Tensor, Tensor)"
    operator_backward = register(f"{name}_backward", schema, backward, fake_backward)
    schema = f"({_ARGUMENTS.format(extra='')}) -> (Tensor, Tensor)"
    return register(
        name, schema, forward, fake, setup_context=setup_context, backward=differentiate
    )


def range_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for out ``[T, Hq, Dv]`` and lse fp32 ``[Hq, T]``: by head, as later kernels read it."""
    num_q, num_heads, _ = q.shape
    return q.new_empty(num_q, num_heads, v.shape[-1]), q.new_empty(
        num_heads, num_q, dtype=torch.float32
    )


def run_range_attention(
    name: str, window: bool, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> None:
    """The kernel of the registered operator ``name``; out and lse are ``range_results``, ``rest`` follows the tensors there."""
    from nsa.ops._triton.range_launch import RangeLayout, range_forward, tile_name
    from nsa.ops._triton.tuning import tile_for

    *where, softmax_scale = rest
    layout = RangeLayout(window, *where)
    check_queries(name, q)
    check_keys(name, "k" if window else "k_cmp", k, layout.stride)
    q, k, v = (rows(x) for x in (q, k, v))
    range_forward(
        q, k, v, out, lse, layout, softmax_scale, tile_for(tile_name(name, "fwd", layout), q, v)
    )


def new_range_backward(
    window: bool, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dq: Tensor, *rest: Any,
    gated: Gated | None = None,
) -> RangeBackward:  # fmt: skip
    """The backward of the registered operator whose arguments after the tensors are ``rest``, with all its memory but dk, dv.

    Args:
        window: see :func:`register_range_attention`.
        q: queries, and so the other inputs of the forward.
        k: keys.
        v: values.
        out: of the forward.
        lse: of the forward ``[T, Hq]``.
        dout: gradient of ``out``; with ``gated`` that of the branches' gated sum.
        dq: where the gradient of q goes, contiguous.
        rest: offsets, sizes and scale.
        gated: the branch's part in the gated sum.
    """
    from nsa.ops._triton.layout import Gated
    from nsa.ops._triton.range_launch import RangeBackward, RangeLayout

    *where, softmax_scale = rest
    q, k, v, dout = (rows(x) for x in (q, k, v, dout))
    layout = RangeLayout(window, *where)
    return RangeBackward.new(
        q, k, v, out, dout, by_head(lse), dq, layout, softmax_scale, gated or Gated()
    )


def range_query_gradient(name: str, backward: RangeBackward) -> None:
    """dq, and what the gradients of the keys need, by the kernel of the registered operator ``name``."""
    from nsa.ops._triton.range_launch import range_dq, tile_name
    from nsa.ops._triton.tuning import tile_for

    range_dq(backward, tile_for(tile_name(name, "dq", backward.layout), backward.q, backward.v))


def range_key_gradients(name: str, backward: RangeBackward) -> tuple[Tensor, Tensor]:
    """dk and dv, after :func:`range_query_gradient`."""
    from nsa.ops._triton.range_launch import range_dkv, tile_name
    from nsa.ops._triton.tuning import tile_for

    return range_dkv(
        backward, tile_for(tile_name(name, "dkv", backward.layout), backward.q, backward.v)
    )


def rows(x: Tensor) -> Tensor:
    """``x [N, H, D]`` as kernels read it: the last dimension contiguous, and the heads of a row within 2^31 elements.

    Kernels count rows in 64 bits and heads in 32: heads lie far apart only where they are the outer
    dimension in memory.
    """
    near = (x.shape[1] - 1) * x.stride(1) + x.shape[2] <= 2**31
    return x if near and x.stride(2) == 1 else x.contiguous()


def by_head(lse: Tensor) -> Tensor:
    """lse ``[T, Hq]`` as kernels read it, ``[Hq, T]``; that is how they wrote it, so nothing is copied then."""
    return lse.t().contiguous()
