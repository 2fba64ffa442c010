"""``nsa::project``: launcher of its kernel, and its registration with PyTorch.

Triton is imported at the first launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

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

    ``bias`` is the gate bias; in the backward, the buffer of :func:`_sums`, if any.
    """
    if not x.shape[0]:
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


def _sums(num_tokens: int, bias: Tensor) -> Tensor:
    """Allocate the gradient of the bias summed over each program's tokens, fp32 ``[n, N]``."""
    block_rows, _ = _programs(num_tokens)
    return bias.new_empty(-(-num_tokens // block_rows), bias.shape[0], dtype=torch.float32)


def _forward(x: Tensor, weights: list[Tensor], bias: Tensor | None, *rest: Any) -> list[Tensor]:
    return split_product(torch.mm(x, packed(weights, x.dtype).t()), bias, *rest)


def split_product(product: Tensor, bias: Tensor | None, *rest: Any) -> list[Tensor]:
    """Heads and gates of the product with the packed weights."""
    found, tokens = _results(product, [], bias, *rest), Tokens(*rest)
    heads, gates = (found, None) if bias is None else (found[:-1], found[-1])
    _launch(product, heads, gates, None, bias, tokens, backward=False)
    return found


def _results(x: Tensor, weights: list[Tensor], bias: Tensor | None, *rest: Any) -> list[Tensor]:
    """Allocate the heads, and the gates if there are any."""
    columns = Columns.from_text(Tokens(*rest).columns)
    found = [x.new_empty(x.shape[0], part.number, part.size) for _, part, _ in columns.outputs()]
    if columns.gates is not None:
        found.append(x.new_empty(x.shape[0], columns.gates.heads, 3, dtype=torch.float32))
    return found


def _merge(
    grads: list[Tensor], bias: Tensor | None, gates: Tensor | None, needs_bias: bool, *rest: Any
) -> list[Tensor]:
    """Gradients of the product ``[T, N]``, including padding, and of the bias, if it is needed."""
    tokens, heads = Tokens(*rest), [grad.contiguous() for grad in grads]
    num_tokens, used = heads[0].shape[0], sum(Columns.from_text(tokens.columns).sizes)
    dproduct = heads[0].new_empty(num_tokens, padded(used))
    dgates = None if gates is None else heads.pop()
    sums = None if bias is None or not needs_bias else _sums(num_tokens, bias)
    _launch(dproduct, heads, gates, dgates, sums, tokens, backward=True)
    if bias is None or sums is None:
        return [dproduct, dproduct.new_empty(0)]
    return [dproduct, sums.sum(0).to(bias.dtype)]


def _merge_fake(
    grads: list[Tensor], bias: Tensor | None, gates: Tensor | None, needs_bias: bool, *rest: Any
) -> list[Tensor]:
    columns = padded(sum(Columns.from_text(Tokens(*rest).columns).sizes))
    dproduct = grads[0].new_empty(grads[0].shape[0], columns)
    dbias = bias.new_empty(bias.shape) if bias is not None and needs_bias else grads[0].new_empty(0)
    return [dproduct, dbias]


def _backward(
    grads: list[Tensor],
    x: Tensor,
    weights: list[Tensor],
    bias: Tensor | None,
    gates: Tensor | None,
    needs: list[bool],
    *rest: Any,
) -> list[Tensor]:
    """Gradients of x, of the packed weights and of the bias.

    Gradients that are not needed are empty.
    """
    dproduct, dbias = _merge(grads, bias, gates, needs[2], *rest)
    dx = torch.mm(dproduct, packed(weights, x.dtype)) if needs[0] else x.new_empty(0)
    dweight = weights[0].new_empty(0)
    if needs[1]:
        dweight = torch.mm(dproduct.t(), x).to(dweight.dtype)
    return [dx, dweight, dbias]


def _gradients(
    grads: list[Tensor],
    x: Tensor,
    weights: list[Tensor],
    bias: Tensor | None,
    gates: Tensor | None,
    needs: list[bool],
    *rest: Any,
) -> list[Tensor]:
    rows = padded(sum(Columns.from_text(Tokens(*rest).columns).sizes))
    dx = x.new_empty(x.shape if needs[0] else 0)
    dweight = weights[0].new_empty((rows, x.shape[1]) if needs[1] else 0)
    dbias = bias.new_empty(bias.shape) if bias is not None and needs[2] else x.new_empty(0)
    return [dx, dweight, dbias]


def _setup_project(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weights, bias, before, cu, *ctx.rest = inputs
    gates = None if bias is None else output[-1]
    ctx.save_for_backward(x, bias, before, cu, gates, *weights)


def _differentiate_project(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    x, bias, before, cu, gates, *weights = ctx.saved_tensors
    needs_x, needs_weights, needs_bias = ctx.needs[:3]
    needs = [needs_x, any(needs_weights), needs_bias]
    dx, dweight, dbias = project_backward_op(
        list(grads), x, weights, bias, gates, needs, before, cu, *ctx.rest
    )
    dweights, start = list[Tensor | None](), 0
    for weight, needed in zip(weights, needs_weights, strict=True):
        dweights.append(dweight[start : start + weight.shape[0]] if needed else None)
        start += weight.shape[0]
    gradients = (dx if needs_x else None, dweights, dbias if needs_bias else None)
    return *gradients, *((None,) * (2 + len(ctx.rest)))


def _setup_split(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    product, bias, before, cu, *ctx.rest = inputs
    ctx.num_columns = product.shape[1]
    ctx.save_for_backward(bias, before, cu, None if bias is None else output[-1])


def _differentiate_split(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    bias, before, cu, gates = ctx.saved_tensors
    needs_product, needs_bias = ctx.needs[:2]
    dproduct, dbias = split_backward_op(list(grads), bias, gates, needs_bias, before, cu, *ctx.rest)
    gradients = (
        dproduct[:, : ctx.num_columns] if needs_product else None,
        dbias if needs_bias else None,
    )
    return *gradients, *((None,) * (2 + len(ctx.rest)))


_TOKENS = "Tensor? before, Tensor? cu, SymInt num_sequences, SymInt length, str columns, str rope"
project_op = register(
    "project",
    f"(Tensor x, Tensor[] weights, Tensor? bias, {_TOKENS}) -> Tensor[]",
    _forward,
    _results,
    setup_context=_setup_project,
    backward=_differentiate_project,
)
project_backward_op = register(
    "project_backward",
    "(Tensor[] grads, Tensor x, Tensor[] weights, Tensor? bias, Tensor? gates, bool[] needs, "
    f"{_TOKENS}) -> Tensor[]",
    _backward,
    _gradients,
)
split_op = register(
    "split",
    f"(Tensor product, Tensor? bias, {_TOKENS}) -> Tensor[]",
    split_product,
    lambda product, *rest: _results(product, [], *rest),
    setup_context=_setup_split,
    backward=_differentiate_split,
)
split_backward_op = register(
    "split_backward",
    f"(Tensor[] grads, Tensor? bias, Tensor? gates, bool needs_bias, {_TOKENS}) -> Tensor[]",
    _merge,
    _merge_fake,
)
