"""Launchers of the kernel of heads and gates. No autograd, no checks of user input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.ops._triton.sizes import cdiv, next_power_of_2
from nsa.ops.projection.layout import Columns, Heads, padded
from nsa.ops.projection.triton_heads import heads_kernel
from nsa.rope import Rope, frequency_table

# Tokens of a program, and the programs that share the heads of the same tokens.
BLOCK_ROWS = 32
HEAD_PROGRAMS = 2


@dataclass(frozen=True)
class Tokens:
    """Where tokens lie in their sequences.

    Attributes:
        positions: position of each ``[T]``; None: as the sequences lie.
        cu: int32 ``[B + 1]`` offsets of the sequences; None when all are alike.
        num_sequences: B.
        length: tokens of each sequence when ``cu`` is None.
    """

    positions: Tensor | None
    cu: Tensor | None
    num_sequences: int
    length: int


def open_columns(
    x: Tensor, bias: Tensor | None, columns: Columns, tokens: Tokens, rope: Rope
) -> list[Tensor]:
    """Heads ``[T, number, size]`` and gates fp32 ``[T, Hq, 3]`` from the product ``x`` ``[T, N]``."""
    heads = [x.new_empty(x.shape[0], part.number, part.size) for _, part, _ in columns.outputs()]
    gates = None
    if columns.gates is not None:
        gates = x.new_empty(x.shape[0], columns.gates.heads, 3, dtype=torch.float32)
    _launch(
        x,
        list(zip(columns.outputs(), heads, strict=True)),
        gates,
        None,
        bias,
        columns,
        tokens,
        rope,
        backward=False,
    )
    return heads if gates is None else [*heads, gates]


def close_columns(
    grads: Sequence[Tensor],
    gates: Tensor | None,
    columns: Columns,
    tokens: Tokens,
    rope: Rope,
    like: Tensor,
) -> Tensor:
    """Gradient of the product ``[T, N]`` from those of heads and gates, contiguous; dtype and device are those of ``like``."""
    dx = like.new_empty(grads[0].shape[0], padded(sum(columns.sizes)))
    # What a part is wanted for beside is added by a second launch: the first one has written the
    # other gradient by then.
    first, second = (
        list[tuple[tuple[int, Heads, bool], Tensor]](),
        list[tuple[tuple[int, Heads, bool], Tensor]](),
    )
    for output, grad in zip(columns.outputs(), grads, strict=False):  # that of the gates comes last
        _, part, rotated = output
        (second if part.rotated == "both" and rotated else first).append((output, grad))
    _launch(
        dx,
        first,
        gates,
        None if gates is None else grads[-1],
        None,
        columns,
        tokens,
        rope,
        backward=True,
    )
    if second:
        _launch(dx, second, None, None, None, columns, tokens, rope, backward=True, add=True)
    return dx


def _launch(
    x: Tensor, parts: Sequence[tuple[tuple[int, Heads, bool], Tensor]], gates: Tensor | None, dgates: Tensor | None,
    bias: Tensor | None, columns: Columns, tokens: Tokens, rope: Rope, *, backward: bool, add: bool = False,
) -> None:  # fmt: skip
    num_rows = x.shape[0]
    if num_rows == 0:
        return
    rotary = tuple(rope.dim * rotated for (_, _, rotated), _ in parts)
    sizes = tuple(part.size for (_, part, _), _ in parts)
    used, block_half = sum(columns.sizes), next_power_of_2(max(rope.dim // 2, 1))
    of_gates = columns.gates if gates is not None else None
    branches = () if of_gates is None else of_gates.branches
    sharpness = (
        0.0 if of_gates is None or of_gates.activation == "sigmoid" else 1.0 / of_gates.temperature
    )
    heads_kernel[(cdiv(num_rows, BLOCK_ROWS), HEAD_PROGRAMS)](
        x, tuple(tensor for _, tensor in parts), gates, dgates, bias, tokens.positions,
        frequency_table(rope, x.device) if any(rotary) else None, tokens.cu, tokens.length, tokens.num_sequences,
        tokens.num_sequences.bit_length(), num_rows, x.stride(0), rope.magnitude, rope.position_offset,
        HEADS=tuple(part.number for (_, part, _), _ in parts), SIZES=sizes, ROTARY=rotary,
        RESTS=tuple(next_power_of_2(max(size - turned, 1)) for size, turned in zip(sizes, rotary, strict=True)),
        STARTS=tuple(start for (start, _, _), _ in parts), GATE_HEADS=0 if of_gates is None else of_gates.heads,
        GATE_START=used - (0 if of_gates is None else of_gates.columns), COLUMNS=branches,
        OFF=tuple(branch for branch in range(3) if branch not in branches),
        SHARPNESS=sharpness, USED=used,
        PADDING=0 if add else padded(used) - used, BACKWARD=backward, ADD=add, HALF=rope.dim // 2, BLOCK_R=BLOCK_ROWS,
        BLOCK_HALF=block_half, BLOCK_H=next_power_of_2(1 if of_gates is None else of_gates.heads),
        num_warps=4 if block_half <= 64 else 8,  # cosines and sines of all tokens stay in registers
    )  # fmt: skip
