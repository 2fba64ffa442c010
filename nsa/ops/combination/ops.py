"""``nsa::combine``: launchers of its kernels, and its registration with PyTorch.

Triton is imported at the first launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from nsa.ops._plan import once
from nsa.ops._register import register

if TYPE_CHECKING:
    from nsa.ops._triton.kernel import Launch

BLOCK_ROWS = 16


def present(*outputs: Tensor | None) -> tuple[list[Tensor], list[int]]:
    """Outputs of the enabled branches, and their columns in the gates."""
    found = {column: x.contiguous() for column, x in enumerate(outputs) if x is not None}
    return [*found.values()], [*found]


def run_combine(
    out_cmp: Tensor | None, out_slc: Tensor | None, out_win: Tensor | None, gates: Tensor
) -> Tensor:
    """Run the kernel of :func:`nsa.combine`, for use inside another operator."""
    return _forward(*present(out_cmp, out_slc, out_win), gates)


def _forward(branches: list[Tensor], columns: list[int], gates: Tensor) -> Tensor:
    from nsa.ops.combination.kernels import combine_fwd_kernel

    out = _fake(branches, columns, gates)
    if out.numel():
        launch = once(lambda: _launch(combine_fwd_kernel, out, ON=tuple(columns)))
        launch(gates.contiguous(), tuple(branches), out, out.numel() // out.shape[-1])
    return out


def _backward(
    branches: list[Tensor], columns: list[int], gates: Tensor, dout: Tensor
) -> list[Tensor]:
    """Gradients of the branches and of the gates."""
    from nsa.ops.combination.kernels import combine_bwd_kernel

    *grads, dgates = _fake_backward(branches, columns, gates, dout)
    if dout.numel():
        on, off = tuple(columns), tuple({0, 1, 2} - {*columns})
        launch = once(lambda: _launch(combine_bwd_kernel, dout, ON=on, OFF=off))
        launch(
            gates.contiguous(),
            tuple(branches),
            dout.contiguous(),
            tuple(grads),
            dgates,
            dout.numel() // dout.shape[-1],
        )
    return [*grads, dgates]


def _launch(kernel: Any, out: Tensor, **constants: Any) -> Launch:
    """Launch over the rows of an output or its gradient."""
    from nsa.ops._layout import cdiv, next_power_of_2
    from nsa.ops._triton.kernel import Launch

    size = out.shape[-1]
    constants |= {"DV": size, "BLOCK_R": BLOCK_ROWS, "BLOCK_DV": next_power_of_2(size)}
    return Launch(kernel, (cdiv(out.numel() // size, BLOCK_ROWS),), **constants, num_warps=4)


def _fake(branches: list[Tensor], columns: list[int], gates: Tensor) -> Tensor:
    return branches[0].new_empty(branches[0].shape)


def _fake_backward(
    branches: list[Tensor], columns: list[int], gates: Tensor, dout: Tensor
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (*branches, gates)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    branches, ctx.columns, gates = inputs
    ctx.save_for_backward(gates, *branches)


def _differentiate(ctx: Any, dout: Tensor) -> tuple[list[Tensor], None, Tensor]:
    gates, *branches = ctx.saved_tensors
    *grads, dgates = combine_backward_op(branches, ctx.columns, gates, dout)
    return grads, None, dgates


_ARGUMENTS = "Tensor[] branches, int[] columns, Tensor gates"
combine_op = register(
    "combine",
    f"({_ARGUMENTS}) -> Tensor",
    _forward,
    _fake,
    setup_context=_setup_context,
    backward=_differentiate,
)
combine_backward_op = register(
    "combine_backward", f"({_ARGUMENTS}, Tensor dout) -> Tensor[]", _backward, _fake_backward
)
