"""Kernel that splits a projection into rotated heads and gates, or merges their gradients.

All jitted functions work on the tokens ``row`` ``[R]`` of a program, valid if ``ok``. ``x_row``
``[R, 1]`` points to their rows of the product x ``[T, columns]``.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops._layout import ALIGNMENT, cdiv, next_power_of_2, padded
from nsa.ops._plan import Constants, is_fake, once
from nsa.ops._triton.kernel import Launch, kernel, starts_early, wait_for_inputs
from nsa.ops._triton.tiles import VARYING, cos_sin, load_fp32, token_positions
from nsa.ops.projection.layout import Columns
from nsa.rope import Rope, frequency_table

# Columns with padding are a multiple of this.
ALIGNED = tl.constexpr(ALIGNMENT)


# Most tokens of a call, tokens per program, and programs that share the heads of the same tokens:
# more of them for short inputs, where programs are too few to hide memory latency, and even more in
# a decode step.
FEW_TOKENS = 64
PROGRAMS = (FEW_TOKENS, 4, 16), (16_384, 32, 8), (inf, 32, 2)


class Part(NamedTuple):
    """Adjacent heads of a projection, copied between x and a tensor ``[T, heads, size]``.

    Attributes:
        start: first column.
        heads: number of heads.
        size: columns of each head.
        rotary: number of rotated columns of a head.
        rope: index of the frequencies.
        block: unrotated columns of a head, padded to a power of two.
        tensor: index of the tensor.
        plain: index of a tensor that is added without rotation in the backward, or -1.
    """

    start: int
    heads: int
    size: int
    rotary: int
    rope: int
    block: int
    tensor: int
    plain: int


@dataclass(frozen=True)
class Plan(Constants):
    """Column layout, as compile-time constants.

    Attributes:
        parts: parts that are copied.
        used: columns of all parts and gates.
        padding: padding columns after the used ones.
        halves: numbers of frequencies.
    """

    parts: tuple[Part, ...]
    used: int
    padding: int
    halves: tuple[int, ...]


@triton.jit
def move_heads(
    x_row,
    tensor_ptrs,
    row,
    ok,
    cosine,
    sine,
    PLAN: tl.constexpr,
    NUMBER: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """Copy this program's heads of one part from x to a tensor of heads, or back."""
    PART: tl.constexpr = PLAN.parts[NUMBER]
    HEADS: tl.constexpr = PART.heads
    SIZE: tl.constexpr = PART.size
    ROTARY: tl.constexpr = PART.rotary
    HALF: tl.constexpr = ROTARY // 2
    begin = row[:, None] * (HEADS * SIZE)
    plain = None if PART.plain < 0 else tensor_ptrs[PART.plain] + begin
    source = x_row + PART.start
    target = tensor_ptrs[PART.tensor] + begin
    if BACKWARD:
        source, target = target, source
    # Start each part at a different program to balance the work.
    programs = tl.num_programs(1)
    first_head = tl.program_id(1) + programs - PART.start // SIZE % programs
    for head in tl.range(first_head % programs, HEADS, programs):
        if HALF > 0:
            i = tl.arange(0, BLOCK_HALF)[None, :]
            mask = ok[:, None] & (i < HALF)
            at = head * SIZE + i
            first = load_fp32(source + at, mask)  # [R, BLOCK_HALF]
            second = load_fp32(source + at + HALF, mask)
            put(target, plain, at, first * cosine - second * sine, mask)
            put(target, plain, at + HALF, second * cosine + first * sine, mask)
        if ROTARY < SIZE:
            j = ROTARY + tl.arange(0, PART.block)[None, :]
            mask = ok[:, None] & (j < SIZE)
            at = head * SIZE + j
            put(target, plain, at, load_fp32(source + at, mask), mask)


@triton.jit
def put(target, plain, at, x, mask):
    """Store x, plus the values at ``plain`` if given."""
    if plain is not None:
        x += load_fp32(plain + at, mask)
    tl.store(target + at, x, mask=mask)


@triton.jit
def gate_logit(x_row, bias_ptr, head, mask, BRANCH: tl.constexpr, GATES: tl.constexpr):
    """Gate logits ``[R, BLOCK_H]`` of one enabled branch."""
    column = head * len(GATES.branches) + BRANCH
    bias = load_fp32(bias_ptr + column, head < GATES.heads)
    return load_fp32(x_row + column, mask) + bias


@triton.jit
def move_gates(
    x_row,
    gates_ptr,
    dgates_ptr,
    bias_ptr,
    row,
    ok,
    GATES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """Compute gates ``[T, Hq, 3]`` from their logits, which begin at ``x_row``.

    In the backward compute the gradients of the logits from those of the gates, and store their
    sums over the rows at ``bias_ptr`` unless it is None.
    """
    head = tl.arange(0, BLOCK_H)[None, :]
    mask = ok[:, None] & (head < GATES.heads)
    at = (row[:, None] * GATES.heads + head) * 3
    if BACKWARD:
        mean = 0.0
        if GATES.sharpness > 0:
            for branch in tl.static_range(len(GATES.branches)):
                gate = load_fp32(gates_ptr + at + GATES.branches[branch], mask)
                mean += gate * load_fp32(dgates_ptr + at + GATES.branches[branch], mask)
        for branch in tl.static_range(len(GATES.branches)):
            gate = load_fp32(gates_ptr + at + GATES.branches[branch], mask)
            dgate = load_fp32(dgates_ptr + at + GATES.branches[branch], mask)
            if GATES.sharpness > 0:
                dlogit = gate * (dgate - mean) * GATES.sharpness
            else:
                dlogit = gate * (1.0 - gate) * dgate
            column = head * len(GATES.branches) + branch
            tl.store(x_row + column, dlogit, mask=mask)
            if bias_ptr is not None:
                # Do not fuse the multiplication with the first addition between two lanes: each
                # lane would round only the other's product, and lanes that write the same sum would
                # differ in the last bit.
                total = tl.sum(tl.where(mask, dlogit, 0.0), 0)[None, :]
                tl.store(bias_ptr + column, total, mask=head < GATES.heads)
    else:
        gates_ptr += at
        for branch in tl.static_range(len(GATES.off)):
            tl.store(gates_ptr + GATES.off[branch], 0.0, mask=mask)
        for branch in tl.static_range(len(GATES.branches)):
            logit = gate_logit(x_row, bias_ptr, head, mask, branch, GATES)
            if GATES.sharpness > 0:
                total = 0.0
                for other in tl.static_range(len(GATES.branches)):
                    difference = gate_logit(x_row, bias_ptr, head, mask, other, GATES) - logit
                    total += tl.exp(difference * GATES.sharpness)
                gate = 1.0 / total
            else:
                gate = tl.sigmoid(logit)
            tl.store(gates_ptr + GATES.branches[branch], gate, mask=mask)


@kernel(do_not_specialize=[*VARYING, "search_steps"])
def heads_kernel(
    x_ptr,
    tensor_ptrs,
    gates_ptr,
    dgates_ptr,
    bias_ptr,
    before_ptr,
    frequency_ptrs,
    cu_ptr,
    len_x,
    num_sequences,
    search_steps,
    num_rows,
    stride_x,
    magnitude,
    position_offset,
    PLAN: tl.constexpr,
    GATES: tl.constexpr,
    BACKWARD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Convert x ``[T, columns]`` to tensors of heads and gates, or back.

    Program (i, j) handles the i-th ``BLOCK_R`` tokens and every num_programs-th head; the last j
    also handles the gates and, in the backward, zeroes the padding columns. ``GATES`` are the last
    used columns, or None. In the backward ``bias_ptr`` receives the gradient of the bias, summed
    over the tokens of each i: fp32 ``[programs, GATES.columns]``, or is None.
    """
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    ok = row < num_rows
    i = tl.arange(0, BLOCK_HALF)
    position = token_positions(before_ptr, cu_ptr, row, ok, len_x, num_sequences, search_steps)
    position = (position + position_offset).to(tl.float32)
    x_row = x_ptr + row[:, None] * stride_x
    for n in tl.static_range(len(PLAN.halves)):
        frequency = tl.load(frequency_ptrs[n] + i, mask=i < PLAN.halves[n], other=0.0)
        cosine, sine = cos_sin(position[:, None] * frequency[None, :])
        cosine *= magnitude
        sine *= -magnitude if BACKWARD else magnitude
        for k in tl.static_range(len(PLAN.parts)):
            if PLAN.parts[k].rope == n:
                move_heads(x_row, tensor_ptrs, row, ok, cosine, sine, PLAN, k, BLOCK_HALF, BACKWARD)
    if tl.program_id(1) == tl.num_programs(1) - 1:
        if GATES is not None:
            logits = x_row + PLAN.used - GATES.columns
            if BACKWARD and bias_ptr is not None:
                bias_ptr += tl.program_id(0) * GATES.columns
            move_gates(logits, gates_ptr, dgates_ptr, bias_ptr, row, ok, GATES, BLOCK_H, BACKWARD)
        if BACKWARD and PLAN.padding > 0:
            j = tl.arange(0, ALIGNED)[None, :]
            mask = ok[:, None] & (j < PLAN.padding)
            tl.store(x_row + PLAN.used + j, 0.0, mask=mask)


def move(
    x: Tensor,
    tensors: list[Tensor],
    gates: Tensor | None,
    dgates: Tensor | None,
    bias: Tensor | None,
    tokens: tuple[Any, ...],
    *,
    backward: bool,
) -> None:
    """Split x ``[T, N]`` into heads ``[T, number, size]`` and gates ``[T, Hq, 3]``, or merge them.

    ``bias`` is the gate bias; in the backward, its gradient, if needed. ``tokens`` are the last
    arguments of the operators.
    """
    if is_fake(x):
        return
    before, cu, num_sequences, length, *texts = tokens
    columns, rope = Columns.from_text(texts[0]), Rope.from_text(texts[1])
    if backward and bias is not None:
        tiles = cdiv(x.shape[0], programs_of(x.shape[0])[0])
        dbias, bias = bias, bias.new_empty(tiles, bias.shape[0], dtype=torch.float32)
    if x.shape[0]:
        launch, dims = once(lambda: _plan(x, columns, rope, before is not None, backward))
        launch(
            x,
            tuple(tensors),
            gates,
            dgates,
            bias,
            before,
            tuple(frequency_table(rope, x.device, dim) for dim in dims),
            cu,
            length,
            num_sequences,
            num_sequences.bit_length(),
            x.shape[0],
            x.stride(0),
            rope.magnitude,
            rope.position_offset,
        )
    if backward and bias is not None:
        dbias.copy_(bias.sum(0))


def _plan(
    x: Tensor, columns: Columns, rope: Rope, is_decoding: bool, backward: bool
) -> tuple[Launch, list[int]]:
    """Return the launch of the kernel, and the different numbers of rotated columns of a head."""
    dims = list(dict.fromkeys([rope.dim, *(part.rotary or rope.dim for part in columns.parts)]))
    parts, tensor = list[Part](), 0
    for start, heads in zip(accumulate(columns.sizes, initial=0), columns.parts, strict=False):
        # In the backward one pass over the columns adds both gradients.
        both = backward and len(heads.outputs) > 1
        for rotated in heads.outputs:
            if rotated or not both:
                dim = heads.rotary or rope.dim
                rotary, plain = dim * rotated, tensor - 1 if both else -1
                block = next_power_of_2(max(heads.size - rotary, 1))
                sizes = (heads.number, heads.size, rotary, dims.index(dim), block)
                parts.append(Part(start, *sizes, tensor, plain))
            tensor += 1
    used, halves = sum(columns.sizes), tuple(dim // 2 for dim in dims)
    block_half = next_power_of_2(max(*halves, 1))
    block_rows, programs = programs_of(x.shape[0])
    launch = Launch(
        heads_kernel,
        (cdiv(x.shape[0], block_rows), programs),
        PLAN=Plan(tuple(parts), used, padded(used) - used, halves),
        GATES=columns.gates,
        BACKWARD=backward,
        BLOCK_R=block_rows,
        BLOCK_HALF=block_half,
        BLOCK_H=1 if columns.gates is None else next_power_of_2(columns.gates.heads),
        # A decode step launches little else; in training other streams are involved.
        launch_pdl=is_decoding and x.shape[0] <= FEW_TOKENS and starts_early(x),
        # Cosines and sines of all tokens stay in registers.
        num_warps=1 if x.shape[0] <= FEW_TOKENS else 4 if block_half <= 64 else 8,
    )
    return launch, dims


def programs_of(num_tokens: int) -> tuple[int, int]:
    """Tokens per program, and programs that share the heads of the same tokens."""
    return next((rows, programs) for most, rows, programs in PROGRAMS if num_tokens <= most)
