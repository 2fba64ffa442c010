"""``nsa::combine``, registered with PyTorch: schema, fake, autograd. Triton is loaded when an operator first runs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nsa.ops._register import register


def run_combine(
    out_cmp: Tensor | None, out_slc: Tensor | None, out_win: Tensor | None, gates: Tensor
) -> Tensor:
    """The kernel of the registered operator."""
    from nsa.ops.combination.triton_fwd import combine_forward

    return combine_forward(_contiguous(out_cmp, out_slc, out_win), gates.contiguous())


def _backward(
    out_cmp: Tensor | None,
    out_slc: Tensor | None,
    out_win: Tensor | None,
    gates: Tensor,
    dout: Tensor,
) -> list[Tensor]:
    from nsa.ops.combination.triton_fwd import combine_backward

    grads, dgates = combine_backward(
        _contiguous(out_cmp, out_slc, out_win), gates.contiguous(), dout.contiguous()
    )
    return [*(grad for grad in grads if grad is not None), dgates]


def _contiguous(*branches: Tensor | None) -> Any:
    return tuple(None if x is None else x.contiguous() for x in branches)


def _fake(*inputs: Tensor | None) -> Tensor:
    first = next(x for x in inputs[:3] if x is not None)
    return first.new_empty(first.shape)


def _fake_backward(*inputs: Tensor | None) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in inputs[:4] if x is not None]


def _setup_context(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    inputs = ctx.saved_tensors
    grads = iter(combine_backward_op(*inputs, dout))
    return tuple(None if x is None else next(grads) for x in inputs)


_BRANCHES = "Tensor? out_cmp, Tensor? out_slc, Tensor? out_win, Tensor gates"
combine_op = register(
    "combine",
    f"({_BRANCHES}) -> Tensor",
    run_combine,
    _fake,
    setup_context=_setup_context,
    backward=_differentiate,
)
combine_backward_op = register(
    "combine_backward", f"({_BRANCHES}, Tensor dout) -> Tensor[]", _backward, _fake_backward
)
