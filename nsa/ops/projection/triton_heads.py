"""Columns of a projection as heads, rotated on the way, and gates; backward is the same the other way round."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops._triton.kernel import kernel
from nsa.ops._triton.rotation import cos_sin
from nsa.ops._triton.tiles import VARYING


@triton.jit
def token_positions(
    positions_ptr, cu_ptr, row, ok, len_x, num_sequences, search_steps, BLOCK_R: tl.constexpr
):  # fmt: skip
    """Position of each of the rows inside its sequence: given, or by where the sequences lie."""
    if positions_ptr is not None:
        position = tl.load(positions_ptr + row, mask=ok, other=0).to(tl.int32)
    elif cu_ptr is None:
        position = (row % tl.maximum(len_x, 1)).to(tl.int32)
    else:
        # The last sequence that begins at the row or before it, bit by bit.
        sequence = tl.zeros([BLOCK_R], tl.int32)
        start = tl.zeros([BLOCK_R], tl.int32)
        for step in tl.range(0, search_steps):
            later = sequence + (1 << (search_steps - 1 - step))
            begin = tl.load(cu_ptr + later, mask=later < num_sequences, other=0)
            found = (later < num_sequences) & (begin <= row)
            sequence = tl.where(found, later, sequence)
            start = tl.where(found, begin, start)
        position = (row - start).to(tl.int32)
    return position


@triton.jit
def move_heads(
    source, target, ok, cosine, sine, HEADS: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """This program's heads of one part, from rows at ``source`` ``[R, 1]`` to rows at ``target``, added there if ``ADD``."""
    HALF: tl.constexpr = ROTARY // 2
    for head in tl.range(tl.program_id(1), HEADS, tl.num_programs(1)):
        if ROTARY > 0:
            i = tl.arange(0, BLOCK_HALF)
            mask = ok[:, None] & (i < HALF)[None, :]
            at = head * D + i[None, :]
            first = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)  # [R, HALF]
            second = tl.load(source + at + HALF, mask=mask, other=0.0).to(tl.float32)
            put(target + at, first * cosine - second * sine, mask, ADD)
            put(target + at + HALF, second * cosine + first * sine, mask, ADD)
        if ROTARY < D:
            j = ROTARY + tl.arange(0, BLOCK_REST)
            rest = ok[:, None] & (j < D)[None, :]
            at = head * D + j[None, :]
            put(target + at, tl.load(source + at, mask=rest, other=0.0), rest, ADD)


@triton.jit
def put(pointers, x, mask, ADD: tl.constexpr):
    """Store, or add to what is there, in fp32."""
    if ADD:
        x = tl.load(pointers, mask=mask, other=0.0).to(tl.float32) + x.to(tl.float32)
    tl.store(pointers, x.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def gate_logit(
    x_row, bias_ptr, head, mask, BRANCH: tl.constexpr, BRANCHES: tl.constexpr, HEADS: tl.constexpr
):
    """Logits ``[R, HEADS]`` of the gates of one of the branches that are on."""
    column = head * BRANCHES + BRANCH
    bias = tl.load(bias_ptr + column, mask=head < HEADS, other=0.0).to(tl.float32)
    return tl.load(x_row + column[None, :], mask=mask, other=0.0).to(tl.float32) + bias[None, :]


@triton.jit
def open_gates(
    x_row, gates_ptr, bias_ptr, row, ok, HEADS: tl.constexpr, COLUMNS: tl.constexpr, OFF: tl.constexpr, SHARPNESS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Gates ``[T, HEADS, 3]`` from the logits at ``x_row``; ``COLUMNS`` are the branches that are on, ``OFF`` the others.

    ``SHARPNESS`` is what the logits are multiplied by before the softmax, or 0 for the sigmoid.
    """
    BRANCHES: tl.constexpr = len(COLUMNS)
    head = tl.arange(0, BLOCK_H)
    mask = ok[:, None] & (head < HEADS)[None, :]
    at = gates_ptr + (row[:, None] * HEADS + head[None, :]) * 3
    for branch in tl.static_range(len(OFF)):
        tl.store(at + OFF[branch], tl.zeros(mask.shape, tl.float32), mask=mask)
    highest = gate_logit(x_row, bias_ptr, head, mask, 0, BRANCHES, HEADS)
    total = tl.zeros(mask.shape, tl.float32)
    if SHARPNESS > 0:
        for branch in tl.static_range(1, BRANCHES):
            highest = tl.maximum(
                highest, gate_logit(x_row, bias_ptr, head, mask, branch, BRANCHES, HEADS)
            )
        for branch in tl.static_range(BRANCHES):
            logit = gate_logit(x_row, bias_ptr, head, mask, branch, BRANCHES, HEADS)
            total += tl.exp((logit - highest) * SHARPNESS)
    for branch in tl.static_range(BRANCHES):
        logit = gate_logit(x_row, bias_ptr, head, mask, branch, BRANCHES, HEADS)
        gate = tl.exp((logit - highest) * SHARPNESS) / total if SHARPNESS > 0 else tl.sigmoid(logit)
        tl.store(at + COLUMNS[branch], gate, mask=mask)


@triton.jit
def close_gates(
    x_row, gates_ptr, dgates_ptr, row, ok, HEADS: tl.constexpr, COLUMNS: tl.constexpr, SHARPNESS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Gradients of the logits, written at ``x_row``, from those of the gates."""
    BRANCHES: tl.constexpr = len(COLUMNS)
    head = tl.arange(0, BLOCK_H)
    mask = ok[:, None] & (head < HEADS)[None, :]
    at = (row[:, None] * HEADS + head[None, :]) * 3
    mean = tl.zeros(mask.shape, tl.float32)
    if SHARPNESS > 0:
        for branch in tl.static_range(BRANCHES):
            gate = tl.load(gates_ptr + at + COLUMNS[branch], mask=mask, other=0.0)
            mean += gate * tl.load(dgates_ptr + at + COLUMNS[branch], mask=mask, other=0.0)
    for branch in tl.static_range(BRANCHES):
        gate = tl.load(gates_ptr + at + COLUMNS[branch], mask=mask, other=0.0)
        dgate = tl.load(dgates_ptr + at + COLUMNS[branch], mask=mask, other=0.0)
        dlogit = gate * (dgate - mean) * SHARPNESS if SHARPNESS > 0 else gate * (1.0 - gate) * dgate
        put(x_row + (head * BRANCHES + branch)[None, :], dlogit, mask, False)


@kernel(do_not_specialize=[*VARYING, "search_steps"])
def heads_kernel(
    x_ptr, part_ptrs, gates_ptr, dgates_ptr, bias_ptr, positions_ptr, frequency_ptr, cu_ptr, len_x, num_sequences,
    search_steps, num_rows, stride_x, magnitude, position_offset,
    HEADS: tl.constexpr, SIZES: tl.constexpr, ROTARY: tl.constexpr, RESTS: tl.constexpr, STARTS: tl.constexpr,
    GATE_HEADS: tl.constexpr, GATE_START: tl.constexpr, COLUMNS: tl.constexpr, OFF: tl.constexpr, SHARPNESS: tl.constexpr,
    USED: tl.constexpr, PADDING: tl.constexpr, BACKWARD: tl.constexpr, ADD: tl.constexpr, HALF: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """All parts of ``BLOCK_R`` tokens: from columns of x ``[T, columns]`` to the parts ``[T, HEADS, SIZES]``, or back.

    ``HEADS``, ``SIZES``, ``ROTARY``, ``RESTS`` and ``STARTS`` have an entry for each part: heads,
    their size, how many of their columns are rotated, a block that holds the others, and the first
    column. ``HALF`` is the number of frequencies. Gates are of ``GATE_HEADS`` heads (0: none); the
    backward writes 0 to the ``PADDING`` columns after the ``USED`` ones.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    ok = row < num_rows
    cosine = tl.zeros([BLOCK_R, BLOCK_HALF], tl.float32)
    sine = cosine
    if frequency_ptr is not None:
        i = tl.arange(0, BLOCK_HALF)
        frequency = tl.load(frequency_ptr + i, mask=i < HALF, other=0.0)
        position = token_positions(
            positions_ptr, cu_ptr, row, ok, len_x, num_sequences, search_steps, BLOCK_R
        )
        position = (position + position_offset).to(tl.float32)
        cosine, sine = cos_sin(position[:, None] * frequency[None, :])
        cosine *= magnitude
        sine *= -magnitude if BACKWARD else magnitude
    x_row = x_ptr + row[:, None] * stride_x
    for part in tl.static_range(len(HEADS)):
        columns = x_row + STARTS[part]
        part_row = part_ptrs[part] + row[:, None] * (HEADS[part] * SIZES[part])
        if BACKWARD:
            move_heads(
                part_row,
                columns,
                ok,
                cosine,
                sine,
                HEADS[part],
                SIZES[part],
                ROTARY[part],
                BLOCK_HALF,
                RESTS[part],
                ADD,
            )
        else:
            move_heads(
                columns,
                part_row,
                ok,
                cosine,
                sine,
                HEADS[part],
                SIZES[part],
                ROTARY[part],
                BLOCK_HALF,
                RESTS[part],
                False,
            )
    if tl.program_id(1) == 0:
        if GATE_HEADS > 0:
            if BACKWARD:
                close_gates(
                    x_row + GATE_START,
                    gates_ptr,
                    dgates_ptr,
                    row,
                    ok,
                    GATE_HEADS,
                    COLUMNS,
                    SHARPNESS,
                    BLOCK_H,
                )
            else:
                open_gates(
                    x_row + GATE_START,
                    gates_ptr,
                    bias_ptr,
                    row,
                    ok,
                    GATE_HEADS,
                    COLUMNS,
                    OFF,
                    SHARPNESS,
                    BLOCK_H,
                )
        if BACKWARD and PADDING > 0:
            j = tl.arange(0, 8)
            mask = ok[:, None] & (j < PADDING)[None, :]
            tl.store(
                x_row + USED + j[None, :],
                tl.zeros(mask.shape, tl.float32).to(x_ptr.dtype.element_ty),
                mask=mask,
            )
