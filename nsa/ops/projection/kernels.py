"""Kernel that splits a projection into rotated heads and gates, or merges their gradients.

All functions work on the tokens ``row`` ``[R]`` of a program, valid if ``ok``. ``x_row``
``[R, 1]`` points to their rows of the product x ``[T, columns]``.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl

from nsa.ops._plan import Constants
from nsa.ops._triton.kernel import kernel, wait_for_inputs
from nsa.ops._triton.tiles import VARYING, cos_sin, load_fp32
from nsa.ops.projection.layout import ALIGNMENT

# Columns with padding are a multiple of this.
ALIGNED = tl.constexpr(ALIGNMENT)


class Part(NamedTuple):
    """Adjacent heads of a projection, copied between x and a tensor ``[T, heads, size]``.

    Attributes:
        start: first column.
        heads: number of heads.
        size: columns of each head.
        rotary: number of rotated columns of a head.
        block: unrotated columns of a head, padded to a power of two.
        tensor: index of the tensor.
        plain: index of a tensor that is added without rotation in the backward, or -1.
    """

    start: int
    heads: int
    size: int
    rotary: int
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
        half: number of frequencies.
    """

    parts: tuple[Part, ...]
    used: int
    padding: int
    half: int


@triton.jit
def token_positions(before_ptr, cu_ptr, row, ok, len_x, num_sequences, search_steps):
    """Positions of the tokens in their sequences, offset by the earlier tokens."""
    if cu_ptr is None:
        sequence = row // tl.maximum(len_x, 1)
        position = (row % tl.maximum(len_x, 1)).to(tl.int32)
    else:
        # Binary search for the last sequence that begins at or before the row.
        sequence = tl.zeros(row.shape, tl.int32)
        start = sequence
        for step in tl.range(0, search_steps):
            later = sequence + (1 << (search_steps - 1 - step))
            begin = tl.load(cu_ptr + later, mask=later < num_sequences, other=0)
            found = (later < num_sequences) & (begin <= row)
            sequence = tl.where(found, later, sequence)
            start = tl.where(found, begin, start)
        position = (row - start).to(tl.int32)
    if before_ptr is not None:
        position += tl.load(before_ptr + sequence, mask=ok, other=0).to(tl.int32)
    return position


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
    HEADS: tl.constexpr = PLAN.parts[NUMBER].heads
    SIZE: tl.constexpr = PLAN.parts[NUMBER].size
    ROTARY: tl.constexpr = PLAN.parts[NUMBER].rotary
    HALF: tl.constexpr = ROTARY // 2
    PLAIN: tl.constexpr = PLAN.parts[NUMBER].plain
    begin = row[:, None] * (HEADS * SIZE)
    plain = None if PLAIN < 0 else tensor_ptrs[PLAIN] + begin
    source = x_row + PLAN.parts[NUMBER].start
    target = tensor_ptrs[PLAN.parts[NUMBER].tensor] + begin
    if BACKWARD:
        source, target = target, source
    # Start each part at a different program to balance the work.
    programs = tl.num_programs(1)
    first_head = tl.program_id(1) + programs - PLAN.parts[NUMBER].start // SIZE % programs
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
            j = ROTARY + tl.arange(0, PLAN.parts[NUMBER].block)[None, :]
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
def open_gates(x_row, gates_ptr, bias_ptr, row, ok, GATES: tl.constexpr, BLOCK_H: tl.constexpr):
    """Compute gates ``[T, Hq, 3]`` from their logits, which begin at ``x_row``."""
    head = tl.arange(0, BLOCK_H)[None, :]
    mask = ok[:, None] & (head < GATES.heads)
    at = gates_ptr + (row[:, None] * GATES.heads + head) * 3
    for branch in tl.static_range(len(GATES.off)):
        tl.store(at + GATES.off[branch], 0.0, mask=mask)
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
        tl.store(at + GATES.branches[branch], gate, mask=mask)


@triton.jit
def close_gates(
    x_row, gates_ptr, dgates_ptr, sum_ptr, row, ok, GATES: tl.constexpr, BLOCK_H: tl.constexpr
):
    """Compute gradients of the logits, which begin at ``x_row``, from those of the gates.

    Their sums over the rows are stored at ``sum_ptr`` unless it is None.
    """
    head = tl.arange(0, BLOCK_H)[None, :]
    mask = ok[:, None] & (head < GATES.heads)
    at = (row[:, None] * GATES.heads + head) * 3
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
        if sum_ptr is not None:
            # Do not fuse the multiplication with the first addition between two lanes: each lane
            # would round only the other's product, and lanes that write the same sum would differ
            # in the last bit.
            total = tl.sum(tl.where(mask, dlogit, 0.0), 0)[None, :]
            tl.store(sum_ptr + column, total, mask=head < GATES.heads)


@kernel(do_not_specialize=[*VARYING, "search_steps"])
def heads_kernel(
    x_ptr,
    tensor_ptrs,
    gates_ptr,
    dgates_ptr,
    bias_ptr,
    before_ptr,
    frequency_ptr,
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
    cosine = tl.zeros([BLOCK_R, BLOCK_HALF], tl.float32)
    sine = cosine
    if frequency_ptr is not None:
        i = tl.arange(0, BLOCK_HALF)
        frequency = tl.load(frequency_ptr + i, mask=i < PLAN.half, other=0.0)
        position = token_positions(before_ptr, cu_ptr, row, ok, len_x, num_sequences, search_steps)
        position = (position + position_offset).to(tl.float32)
        cosine, sine = cos_sin(position[:, None] * frequency[None, :])
        cosine *= magnitude
        sine *= -magnitude if BACKWARD else magnitude
    x_row = x_ptr + row[:, None] * stride_x
    for k in tl.static_range(len(PLAN.parts)):
        move_heads(x_row, tensor_ptrs, row, ok, cosine, sine, PLAN, k, BLOCK_HALF, BACKWARD)
    if tl.program_id(1) == tl.num_programs(1) - 1:
        if GATES is not None:
            logits = x_row + PLAN.used - GATES.columns
            if BACKWARD:
                sum_ptr = bias_ptr
                if sum_ptr is not None:
                    sum_ptr += tl.program_id(0) * GATES.columns
                close_gates(logits, gates_ptr, dgates_ptr, sum_ptr, row, ok, GATES, BLOCK_H)
            else:
                open_gates(logits, gates_ptr, bias_ptr, row, ok, GATES, BLOCK_H)
        if BACKWARD and PLAN.padding > 0:
            j = tl.arange(0, ALIGNED)[None, :]
            mask = ok[:, None] & (j < PLAN.padding)
            tl.store(x_row + PLAN.used + j, 0.0, mask=mask)
