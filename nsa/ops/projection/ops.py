"""``nsa::project``: launcher of its kernel, and its registration with PyTorch.

Triton is imported at the first launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from nsa.ops._plan import once
from nsa.ops._register import register
from nsa.ops.projection.layout import Columns, packed, padded
from nsa.rope import Rope, frequency_table

if TYPE_CHECKING:
    from nsa.ops._triton.kernel import Launch

# Tokens per program, and programs that share the heads of the same tokens: more of them for short
# inputs, where programs are too few to hide memory latency, and even more in a decode step.
BLOCK_ROWS, HEAD_PROGRAMS = 32, 2
SOME_TOKENS, SOME_HEAD_PROGRAMS = 16_384, 8
FEW_TOKENS, FEW_ROWS, FEW_HEAD_PROGRAMS = 64, 4, 16


class Tokens(NamedTuple):
    """The last arguments of the operators.

    Attributes:
        before: number of earlier tokens of each sequence, int32 ``[B]``; None means 0.
        cu: int32 ``[B + 1]`` offsets of the sequences; None if all have equal length.
        num_sequences: B.
        length: tokens of each sequence if ``cu`` is None.
        columns: :attr:`Columns.text`.
        rope: :attr:`Rope.text`.
    """

    before: Tensor | None
    cu: Tensor | None
    num_sequences: int
    length: int
    columns: str
    rope: str

    @property
    def num_columns(self) -> int:
        """Columns of the product, including padding."""
        return padded(sum(Columns.from_text(self.columns).sizes))


def _launch(
    x: Tensor,
    tensors: list[Tensor],
    gates: Tensor | None,
    dgates: Tensor | None,
    bias: Tensor | None,
    tokens: Tokens,
    *,
    backward: bool,
) -> None:
    """Split x ``[T, N]`` into heads ``[T, number, size]`` and gates ``[T, Hq, 3]``, or merge them.

    ``bias`` is the gate bias; in the backward, the buffer of its sums, if any.
    """
    if _is_fake(x) or not x.shape[0]:
        return
    rope = Rope.from_text(tokens.rope)
    turns, launch = once(lambda: _plan(x, tokens, backward=backward))
    launch(
        x,
        tuple(tensors),
        gates,
        dgates,
        bias,
        tokens.before,
        frequency_table(rope, x.device) if turns else None,
        tokens.cu,
        tokens.length,
        tokens.num_sequences,
        tokens.num_sequences.bit_length(),
        x.shape[0],
        x.stride(0),
        rope.magnitude,
        rope.position_offset,
    )


def _is_fake(x: Tensor) -> bool:
    return isinstance(x, FakeTensor) or x.is_meta


def _plan(x: Tensor, tokens: Tokens, *, backward: bool) -> tuple[bool, Launch]:
    """Whether anything is rotated, and the launch of the kernel."""
    from nsa.ops._layout import cdiv, next_power_of_2
    from nsa.ops._triton.kernel import Launch, starts_early
    from nsa.ops.projection.kernels import Part, Plan, heads_kernel

    columns, rope = Columns.from_text(tokens.columns), Rope.from_text(tokens.rope)
    parts = list[Part]()
    for tensor, (start, part, rotated) in enumerate(columns.outputs()):
        # In the backward one pass over the columns adds both gradients.
        both = backward and part.rotated == "both"
        if rotated or not both:
            rotary = rope.dim * rotated
            block = next_power_of_2(max(part.size - rotary, 1))
            plain = tensor - 1 if both else -1
            parts.append(Part(start, part.number, part.size, rotary, block, tensor, plain))
    used, block_half = sum(columns.sizes), next_power_of_2(max(rope.dim // 2, 1))
    turns = any(part.rotary for part in parts)
    block_rows, programs = _programs(x.shape[0])
    is_few = x.shape[0] <= FEW_TOKENS
    return turns, Launch(
        heads_kernel,
        (cdiv(x.shape[0], block_rows), programs),
        PLAN=Plan(tuple(parts), used, padded(used) - used, rope.dim // 2),
        GATES=columns.gates,
        BACKWARD=backward,
        BLOCK_R=block_rows,
        BLOCK_HALF=block_half,
        BLOCK_H=1 if columns.gates is None else next_power_of_2(columns.gates.heads),
        # A decode step launches little else; in training other streams are involved.
        launch_pdl=tokens.before is not None and is_few and starts_early(x),
        # Cosines and sines of all tokens stay in registers.
        num_warps=(4 if block_half <= 64 else 8) if block_rows == BLOCK_ROWS else 1,
    )


def _programs(num_tokens: int) -> tuple[int, int]:
    """Tokens per program, and programs that share the heads of the same tokens."""
    if num_tokens <= FEW_TOKENS:
        return FEW_ROWS, FEW_HEAD_PROGRAMS
    return BLOCK_ROWS, SOME_HEAD_PROGRAMS if num_tokens <= SOME_TOKENS else HEAD_PROGRAMS


def _forward(x: Tensor, weights: list[Tensor], bias: Tensor | None, *rest: Any) -> list[Tensor]:
    """Heads, and the gates if there are any."""
    product = torch.mm(x, packed(weights, x.dtype).t()) if weights else x
    tokens, gates = Tokens(*rest), None
    columns = Columns.from_text(tokens.columns)
    heads = [x.new_empty(x.shape[0], part.number, part.size) for _, part, _ in columns.outputs()]
    if columns.gates is not None:
        gates = x.new_empty(x.shape[0], columns.gates.heads, 3, dtype=torch.float32)
    _launch(product, heads, gates, None, bias, tokens, backward=False)
    return heads if gates is None else [*heads, gates]


def _backward(
    grads: list[Tensor],
    x: Tensor | None,
    weights: list[Tensor],
    bias: Tensor | None,
    gates: Tensor | None,
    needs: list[bool],
    *rest: Any,
) -> list[Tensor]:
    """Gradients of x, of the packed weights and of the bias; empty if they are not needed.

    Without weights the first is that of the product, including padding.
    """
    tokens, heads = Tokens(*rest), [grad.contiguous() for grad in grads]
    num_tokens, sums = heads[0].shape[0], None
    dproduct = heads[0].new_empty(num_tokens, tokens.num_columns)
    if bias is not None and needs[2]:  # the gradient of the bias by program, fp32 [n, N]
        # A number of programs that depends on the length would be a guard of torch.compile.
        programs = 1 if _is_fake(dproduct) else -(-num_tokens // _programs(num_tokens)[0])
        sums = bias.new_empty(programs, bias.shape[0], dtype=torch.float32)
    dgates = None if gates is None else heads.pop()
    _launch(dproduct, heads, gates, dgates, sums, tokens, backward=True)
    empty = dproduct.new_empty(0)
    dbias = empty if bias is None or sums is None else sums.sum(0).to(bias.dtype)
    if x is None:
        return [dproduct, empty, dbias]
    dx = torch.mm(dproduct, packed(weights, x.dtype)) if needs[0] else empty
    dweight = torch.mm(dproduct.t(), x).to(weights[0].dtype) if needs[1] else empty
    return [dx, dweight, dbias]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weights, bias, before, cu, *ctx.rest = inputs
    ctx.num_columns = x.shape[1]
    gates = None if bias is None else output[-1]
    ctx.save_for_backward(x if weights else None, bias, before, cu, gates, *weights)


def _differentiate(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    x, bias, before, cu, gates, *weights = ctx.saved_tensors
    needs_x, needs_weights, needs_bias = ctx.needs[:3]
    needs = [needs_x, bool(weights) and any(needs_weights), needs_bias]
    dx, dweight, dbias = project_backward_op(
        list(grads), x, weights, bias, gates, needs, before, cu, *ctx.rest
    )
    dweights, start = list[Tensor | None](), 0
    for weight, needed in zip(weights, needs_weights or (), strict=True):
        dweights.append(dweight[start : start + weight.shape[0]] if needed else None)
        start += weight.shape[0]
    gradients = (dx[:, : ctx.num_columns] if needs_x else None, dweights or None)
    return *gradients, dbias if needs_bias else None, *((None,) * (2 + len(ctx.rest)))


_TOKENS = "Tensor? before, Tensor? cu, SymInt num_sequences, SymInt length, str columns, str rope"
project_op = register(
    "project",
    f"(Tensor x, Tensor[] weights, Tensor? bias, {_TOKENS}) -> Tensor[]",
    _forward,
    _forward,
    setup_context=_setup,
    backward=_differentiate,
)
project_backward_op = register(
    "project_backward",
    "(Tensor[] grads, Tensor? x, Tensor[] weights, Tensor? bias, Tensor? gates, bool[] needs, "
    f"{_TOKENS}) -> Tensor[]",
    _backward,
    _backward,
)
