"""``nsa::attention``, registered with PyTorch: schema, fake, autograd.

Its forward is the operators, the window beside the others. Its backward is not: the kernels of each
branch take the gradient of the gated sum as it is and apply the branch's gate themselves, give the
gate's gradient by the way (it is the row sum that a softmax gradient needs anyhow), and add their
dQ to that of the branch before. So no gradient of a branch's output is ever written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.ops._limits import check_keys, check_queries
from nsa.ops._range import (
    new_range_backward,
    range_key_gradients,
    range_query_gradient,
    range_results,
    rows,
    run_range_attention,
)
from nsa.ops._register import register
from nsa.ops._sequences import Sequences
from nsa.ops._side_stream import fork_join
from nsa.ops.combination.ops import run_combine
from nsa.ops.compressed import range_arguments as compressed_arguments
from nsa.ops.selected import selected_arguments
from nsa.ops.selected.ops import new_results, no_index, run_selected_backward, run_selected_forward
from nsa.ops.selection import choice_result, run_select_blocks
from nsa.ops.window import range_arguments as window_arguments
from nsa.stages import COMPRESSED, GATES, SELECTED, WINDOW, stage

_INPUTS = (
    "Tensor q, Tensor? q_cmp, Tensor? k_cmp, Tensor? v_cmp, Tensor? k_slc, Tensor? v_slc, Tensor? k_win, Tensor? v_win, "
    "Tensor gates"
)
_SAVED = (
    "Tensor out_cmp, Tensor lse_cmp, Tensor block_indices, Tensor out_slc, Tensor lse_slc, Tensor order, Tensor union, "
    "Tensor out_win, "
    "Tensor lse_win"
)
_WHERE = (
    "Tensor? cu_q, Tensor? cu_k, Tensor? cu_cmp, SymInt num_sequences, SymInt len_q, SymInt len_k, str config, "
    "float softmax_scale, str algorithm"
)


def _open(x: Tensor, *where: Any) -> tuple[NSAConfig, Sequences, float, str]:
    """The pattern, the sequences, the scale and the algorithm of a call."""
    cu_q, cu_k, cu_cmp, num_sequences, len_q, len_k, text, softmax_scale, algorithm = where
    offsets = None if cu_q is None else (cu_q, cu_k)
    sequences = Sequences(offsets, num_sequences, len_q, len_k, x.device, cu_cmp=cu_cmp)
    return NSAConfig.from_text(text), sequences, softmax_scale, algorithm


def _check_numbers(q: Tensor, k_slc: Tensor | None, k_win: Tensor | None) -> None:
    """Under the names of the caller's arguments; the branches would call them otherwise."""
    check_queries("native_sparse_attention", q)
    for argument, k in (("k_slc", k_slc), ("k_win", k_win)):
        if k is not None:
            check_keys("native_sparse_attention", argument, k)


def _forward(
    q: Tensor, q_cmp: Tensor | None, k_cmp: Tensor | None, v_cmp: Tensor | None, k_slc: Tensor | None, v_slc: Tensor | None,
    k_win: Tensor | None, v_win: Tensor | None, gates: Tensor, *where: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    config, sequences, softmax_scale, algorithm = _open(q, *where)
    _check_numbers(q, k_slc, k_win)
    q_cmp = q if q_cmp is None else q_cmp
    out_cmp = lse_cmp = block_indices = slc = out_win = lse_win = None
    # Before the fork: offsets that the side stream reads, and memory for what it gives.
    if k_cmp is not None:
        # For lse alone the keys stand in for the values.
        v = k_cmp if v_cmp is None else v_cmp
        cmp = range_results(q_cmp, v)
        out_cmp, lse_cmp = None if v_cmp is None else cmp[0], cmp[1].t()
        blocks = sequences.kernel_blocks(config)
    if k_slc is not None and v_slc is not None:
        block_indices = choice_result(q, k_slc, config.num_selected_blocks)
        rest = (*selected_arguments(config, sequences), softmax_scale, algorithm)
        with stage(SELECTED):
            slc = new_results(q, k_slc, v_slc, block_indices, *rest)
    with fork_join(q.device, enabled=k_cmp is not None and k_win is not None) as streams:
        with streams.on_side():
            if k_cmp is not None and lse_cmp is not None:
                where_cmp = (*compressed_arguments(config, sequences, blocks), softmax_scale)
                with stage(COMPRESSED):
                    run_range_attention(
                        "compressed_attention", False, q_cmp, k_cmp, v, *cmp, *where_cmp
                    )
                if (
                    k_slc is not None
                    and v_slc is not None
                    and slc is not None
                    and block_indices is not None
                ):
                    run = (config, sequences, softmax_scale, "triton")
                    run_select_blocks(q_cmp, k_cmp, lse_cmp, *run, blocks=blocks, out=block_indices)
                    with stage(SELECTED):
                        run_selected_forward(
                            q, k_slc, v_slc, block_indices, slc, *rest, unique=True
                        )
        if k_win is not None and v_win is not None:
            out_win, by_head = range_results(q, v_win)
            lse_win, where_win = by_head.t(), (*window_arguments(config, sequences), softmax_scale)
            with stage(WINDOW):
                run_range_attention(
                    "window_attention", True, q, k_win, v_win, out_win, by_head, *where_win
                )
    with stage(GATES):
        out = run_combine(out_cmp, None if slc is None else slc[0], out_win, gates)
    saved = (out_cmp, lse_cmp, block_indices, *(slc or (None,) * 4), out_win, lse_win)
    return out, *(q.new_empty(0) if x is None else x for x in saved)


def _backward(
    q: Tensor, q_cmp: Tensor | None, k_cmp: Tensor | None, v_cmp: Tensor | None, k_slc: Tensor | None, v_slc: Tensor | None,
    k_win: Tensor | None, v_win: Tensor | None, gates: Tensor, out_cmp: Tensor, lse_cmp: Tensor, block_indices: Tensor,
    out_slc: Tensor, lse_slc: Tensor, order: Tensor, union: Tensor, out_win: Tensor, lse_win: Tensor, dout: Tensor, *where: Any,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the inputs that are given, in their order."""
    from nsa.ops._triton.layout import Gated

    config, sequences, softmax_scale, algorithm = _open(q, *where)
    q, dout, gates = rows(q), rows(dout), gates.contiguous()
    # Before the fork: all that both streams touch, offsets and copies in another layout among it,
    # and what the side gives. Branches add to dq in this order: compressed, window, selected.
    dq, dgates = q.new_empty(q.shape), torch.zeros_like(gates)
    dq_cmp = None if q_cmp is None or v_cmp is None else q.new_empty(q.shape)
    cmp = win = slc = dk_cmp = dv_cmp = dk_win = dv_win = None
    adds = False
    if k_cmp is not None and v_cmp is not None:
        rest = (*compressed_arguments(config, sequences), softmax_scale)
        given = (
            q if q_cmp is None else q_cmp,
            k_cmp,
            v_cmp,
            out_cmp,
            lse_cmp,
            dout,
            dq if dq_cmp is None else dq_cmp,
        )
        cmp = new_range_backward(False, *given, *rest, gated=Gated(gates, dgates))
        adds = dq_cmp is None
    if k_win is not None and v_win is not None:
        rest = (*window_arguments(config, sequences), softmax_scale)
        given = (q, k_win, v_win, out_win, lse_win, dout, dq)
        win = new_range_backward(True, *given, *rest, gated=Gated(gates, dgates, adds))
        adds = True
    if k_slc is not None and v_slc is not None:
        slc = dq, k_slc.new_empty(k_slc.shape), v_slc.new_empty(v_slc.shape)
    # All dQ and the selected branch, one after the other; meanwhile dK and dV of the ranges.
    with fork_join(q.device, enabled=[cmp, win, slc].count(None) < 2) as streams:
        with streams.on_side():
            if cmp is not None:
                with stage(COMPRESSED):
                    range_query_gradient("compressed_attention", cmp)
            wait_cmp = streams.record()
            if win is not None:
                with stage(WINDOW):
                    range_query_gradient("window_attention", win)
            wait_win = streams.record()
            if k_slc is not None and v_slc is not None and slc is not None:
                results = (out_slc, lse_slc, order, union)
                call: Any = (q, k_slc, v_slc, block_indices, results, dout, slc)
                rest = (*selected_arguments(config, sequences), softmax_scale, algorithm)
                with stage(SELECTED):
                    run_selected_backward(
                        *call, *rest, gated=Gated(gates, dgates, adds), unique=True
                    )
        wait_cmp()
        if cmp is not None:
            with stage(COMPRESSED):
                dk_cmp, dv_cmp = range_key_gradients("compressed_attention", cmp)
        wait_win()
        if win is not None:
            with stage(WINDOW):
                dk_win, dv_win = range_key_gradients("window_attention", win)
    inputs = (q, q_cmp, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win)
    of_queries = (dq if adds or slc is not None else None, dq_cmp)
    found = (*of_queries, dk_cmp, dv_cmp, *(slc or (None,) * 3)[1:], dk_win, dv_win)
    # Keys that only score blocks have no gradient through them, and neither have their queries.
    grads = [
        torch.zeros_like(x) if dx is None else dx
        for x, dx in zip(inputs, found, strict=True)
        if x is not None
    ]
    return [*grads, dgates]


def _fake(
    q: Tensor, q_cmp: Tensor | None, k_cmp: Tensor | None, v_cmp: Tensor | None, k_slc: Tensor | None, v_slc: Tensor | None,
    k_win: Tensor | None, v_win: Tensor | None, gates: Tensor, *where: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    cu_q, cu_k, _, *lengths, text, softmax_scale, algorithm = where
    config = NSAConfig.from_text(text)
    num_q, num_heads = q.shape[:2]
    off = (q.new_empty(0), q.new_empty(0))
    lse = q.new_empty(num_q, num_heads, dtype=torch.float32)
    lse_range = q.new_empty(num_heads, num_q, dtype=torch.float32).t()
    out = q.new_empty(num_q, num_heads, config.value_dim)
    indices = q.new_empty(num_q, config.num_kv_heads, config.num_selected_blocks, dtype=torch.int32)
    index = no_index(indices, cu_q, cu_k, *lengths, config.block_size, softmax_scale, algorithm)
    return (
        out,
        off[0] if v_cmp is None else torch.empty_like(out),
        off[0] if k_cmp is None else lse_range,
        *(
            (off[0], off[0], off[0], *off)
            if k_slc is None
            else (indices, torch.empty_like(out), lse, *index)
        ),
        *(off if k_win is None else (torch.empty_like(out), torch.empty_like(lse_range))),
    )


def _fake_backward(*arguments: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in arguments[:9] if x is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.rest = inputs[12:]
    ctx.save_for_backward(*inputs[:9], *output[1:], *inputs[9:12])  # the last are offsets
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    none = (None,) * (3 + len(ctx.rest))
    *saved, cu_q, cu_k, cu_cmp = ctx.saved_tensors
    if dout is None:
        return *((None,) * 9), *none
    grads = iter(attention_backward_op(*saved, dout, cu_q, cu_k, cu_cmp, *ctx.rest))
    return *(None if x is None else next(grads) for x in saved[:9]), *none


attention_op = register(
    "attention", f"({_INPUTS}, {_WHERE}) -> (Tensor, {_SAVED})", _forward, _fake, setup_context=_setup_context,
    backward=_differentiate,
)  # fmt: skip
attention_backward_op = register(
    "attention_backward",
    f"({_INPUTS}, {_SAVED}, Tensor dout, {_WHERE}) -> Tensor[]",
    _backward,
    _fake_backward,
)
