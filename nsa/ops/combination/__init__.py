"""Gated sum of the branches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nsa.config import BRANCHES
from nsa.errors import check
from nsa.ops._backend import choose_backend
from nsa.ops._layout import cdiv, next_power_of_2
from nsa.ops._masked_attention import accumulate_dtype
from nsa.ops._plan import once
from nsa.ops._register import register
from nsa.stages import GATES, in_stage

if TYPE_CHECKING:
    from nsa.ops._triton.kernel import Launch

__all__ = ["combine"]

BLOCK_ROWS = 16


def _present(*outputs: Tensor | None) -> dict[int, Tensor]:
    """Outputs of the enabled branches, by their column in the gates."""
    return {column: x.contiguous() for column, x in enumerate(outputs) if x is not None}


def run_combine(
    out_cmp: Tensor | None, out_slc: Tensor | None, out_win: Tensor | None, gates: Tensor
) -> Tensor:
    """Run the kernel of :func:`combine`, for use inside another operator."""
    from nsa.ops.combination.kernels import combine_fwd_kernel

    branches = _present(out_cmp, out_slc, out_win)
    out = _fake(out_cmp, out_slc, out_win, gates)
    if out.numel():
        launch = once(lambda: _launch(combine_fwd_kernel, out, ON=tuple(branches)))
        launch(gates.contiguous(), (*branches.values(),), out, out.numel() // out.shape[-1])
    return out


def _backward(*inputs: Any) -> list[Tensor]:
    """Gradients of the enabled branches and of the gates."""
    from nsa.ops.combination.kernels import combine_bwd_kernel

    *outputs, gates, dout = inputs
    branches, (*grads, dgates) = _present(*outputs), _fake_backward(*inputs)
    if dout.numel():
        on = {"ON": tuple(branches), "OFF": tuple({0, 1, 2} - {*branches})}
        launch = once(lambda: _launch(combine_bwd_kernel, dout, **on))
        given = (gates.contiguous(), (*branches.values(),), dout.contiguous())
        launch(*given, tuple(grads), dgates, dout.numel() // dout.shape[-1])
    return [*grads, dgates]


def _launch(kernel: Any, out: Tensor, **constants: Any) -> Launch:
    """Launch over the rows of an output or its gradient."""
    from nsa.ops._triton.kernel import Launch

    size = out.shape[-1]
    constants |= {"DV": size, "BLOCK_R": BLOCK_ROWS, "BLOCK_DV": next_power_of_2(size)}
    return Launch(kernel, (cdiv(out.numel() // size, BLOCK_ROWS),), **constants, num_warps=4)


def _fake(*inputs: Tensor | None) -> Tensor:
    like = next(x for x in inputs if x is not None)
    return like.new_empty(like.shape)


def _fake_backward(*inputs: Tensor | None) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in inputs[:-1] if x is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    grads = iter(combine_backward_op(*ctx.saved_tensors, dout))
    return tuple(None if x is None else next(grads) for x in ctx.saved_tensors)


_ARGUMENTS = "Tensor? out_cmp, Tensor? out_slc, Tensor? out_win, Tensor gates"
combine_op = register(
    "combine",
    f"({_ARGUMENTS}) -> Tensor",
    run_combine,
    _fake,
    setup_context=_setup_context,
    backward=_differentiate,
)
combine_backward_op = register(
    "combine_backward", f"({_ARGUMENTS}, Tensor dout) -> Tensor[]", _backward, _fake_backward
)


@in_stage(GATES)
def combine(
    out_cmp: Tensor | None,
    out_slc: Tensor | None,
    out_win: Tensor | None,
    gates: Tensor,
    *,
    backend: str = "auto",
) -> Tensor:
    """Gated sum of the branches (Eq. 5, arXiv:2502.11089).

    Args:
        out_cmp: output of the compressed branch ``[..., Hq, Dv]``; None if the branch is disabled.
        out_slc: output of the selected branch, likewise.
        out_win: output of the window, likewise.
        gates: activated gates ``[..., Hq, 3]``, order (cmp, slc, win).
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        ``[..., Hq, Dv]``, summed in fp32 (fp64 for fp64 inputs), in the dtype of the branches.

    Raises:
        ValueError: no branch is given, or shapes differ.
    """
    branches = {f"out_{BRANCHES[i]}": x for i, x in _present(out_cmp, out_slc, out_win).items()}
    check(len(branches) > 0, "out_cmp, out_slc, out_win", "not all be None", None)
    first, like = next(iter(branches.items()))
    for argument, out in branches.items():
        rule = f"have shape {tuple(like.shape)} like {first}"
        check(out.shape == like.shape, argument, rule, tuple(out.shape))
    expected, shape = (*like.shape[:-1], 3), tuple(gates.shape)
    check(shape == expected, "gates", f"have shape {expected}", shape)
    if choose_backend(backend, like, first) == "triton":
        return combine_op(out_cmp, out_slc, out_win, gates)
    with torch.autocast(gates.device.type, enabled=False):
        return combine_reference((out_cmp, out_slc, out_win), gates)


def combine_reference(
    branches: tuple[Tensor | None, Tensor | None, Tensor | None], gates: Tensor
) -> Tensor:
    """See :func:`nsa.combine`; ``branches`` are (cmp, slc, win)."""
    on = [(out, gates[..., index, None]) for index, out in enumerate(branches) if out is not None]
    dtype = accumulate_dtype(on[0][0])
    total = sum(out.to(dtype) * gate.to(dtype) for out, gate in on)
    assert isinstance(total, Tensor)
    return total.to(on[0][0].dtype)
