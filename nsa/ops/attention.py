"""Attention branches and their gated sum, without compression.

``nsa::attention`` runs them as one operator with kernels. Its forward runs the operators of the
branches, the window concurrently with the others. The backward is fused: the kernels of each branch
read the gradient of the gated sum, apply the branch's gate and compute the gate's gradient (the row
sum that a softmax gradient needs anyway), and add their dQ to that of the previous branch. The
gradient of a branch's output is never written.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.ops._checks import check_keys, check_queries
from nsa.ops._layout import Gated, rows
from nsa.ops._operator import Call, KeyRange, register_attention
from nsa.ops._plan import once
from nsa.ops._side_stream import fork_join
from nsa.ops.combination import combine, run_combine
from nsa.ops.range import run_compressed_attention, run_window_attention
from nsa.ops.range.types import RangeInputs, RangeResults
from nsa.ops.selected import SelectedInputs, run_selected_attention
from nsa.ops.selected.types import SelectedResults
from nsa.ops.selection import run_select_blocks
from nsa.ops.selection.reference import SelectionInputs, new_selection
from nsa.stages import COMPRESSED, GATES, SELECTED, SELECTION, WINDOW, stage


class BranchInputs(NamedTuple):
    """Inputs of the three branches and their gated sum. Tensors of a disabled branch are None.

    Attributes:
        q: rotated queries ``[T, Hq, D]``.
        q_cmp: queries of the compressed branch and the block scores; None means ``q``.
        k_cmp: compressed keys, rotated, ``[C, Hkv, D]``; None if no blocks are scored.
        v_cmp: compressed values ``[C, Hkv, Dv]``.
        k_slc: rotated keys of the selected branch ``[S, Hkv, D]``.
        v_slc: values of the selected branch ``[S, Hkv, Dv]``.
        k_win: rotated keys of the window ``[S, Hkv, D]``; None also if the operator's window has
            the keys and values of the selected branch, see :meth:`windowed`.
        v_win: values of the window ``[S, Hkv, Dv]``.
        gates: ``[T, Hq, 3]``.
        q_idx: rotated index queries, see :func:`nsa.native_sparse_attention`; None without an
            index.
        k_idx: rotated index keys.
    """

    q: Tensor
    q_cmp: Tensor | None
    k_cmp: Tensor | None
    v_cmp: Tensor | None
    k_slc: Tensor | None
    v_slc: Tensor | None
    k_win: Tensor | None
    v_win: Tensor | None
    gates: Tensor
    q_idx: Tensor | None = None
    k_idx: Tensor | None = None

    @property
    def scoring_queries(self) -> Tensor:
        """Queries of the compressed branch and the scores of compressed keys."""
        return self.q if self.q_cmp is None else self.q_cmp

    def scored(self, call: Call, lse: Tensor | None) -> tuple[SelectionInputs, Call]:
        """Inputs of the selection, and its call; ``lse`` is that of the compressed branch."""
        if self.q_idx is not None and self.k_idx is not None:
            call = replace(call, softmax_scale=call.config.index_dim**-0.5)
            return SelectionInputs(self.q_idx, self.k_idx, None), call
        if call.config.scores != "compressed":
            assert self.k_slc is not None
            return SelectionInputs(self.q, self.k_slc, None), call
        assert self.k_cmp is not None
        return SelectionInputs(self.scoring_queries, self.k_cmp, lse), call

    @property
    def compressed(self) -> RangeInputs | None:
        """Inputs of the compressed branch; if only lse is needed, the keys serve as values."""
        if self.k_cmp is None:
            return None
        values = self.k_cmp if self.v_cmp is None else self.v_cmp
        return RangeInputs(self.scoring_queries, self.k_cmp, values)

    def shared(self) -> BranchInputs:
        """Drop keys and values of a window that has those of the selected branch."""
        if self.k_slc is not None and self.k_win is self.k_slc and self.v_win is self.v_slc:
            return self._replace(k_win=None, v_win=None)
        return self

    def windowed(self, call: Call) -> BranchInputs:
        """The inverse of :meth:`shared`."""
        if "win" in call.config.branches and self.k_win is None:
            return self._replace(k_win=self.k_slc, v_win=self.v_slc)
        return self

    def summed(self) -> BranchInputs:
        """Gradients of :meth:`shared` inputs: the sum of those of both branches, if both exist."""
        for total, of_window in ((self.k_slc, self.k_win), (self.v_slc, self.v_win)):
            if total is not None and of_window is not None:
                total += of_window
        return self._replace(k_win=None, v_win=None)

    @property
    def window(self) -> RangeInputs | None:
        """Inputs of the window."""
        if self.k_win is None or self.v_win is None:
            return None
        return RangeInputs(self.q, self.k_win, self.v_win)

    def selected(self, block_indices: Tensor) -> SelectedInputs | None:
        """Inputs of the selected branch."""
        if self.k_slc is None or self.v_slc is None:
            return None
        return SelectedInputs(self.q, self.k_slc, self.v_slc, block_indices)


class AttentionResult(NamedTuple):
    """Results of attention besides gradients.

    Attributes:
        out: ``[T, Hq, Dv]``.
        block_indices: the selected blocks, int32 ``[T, Hkv, n]``; None without the selected branch.
        tile_stats: int64 ``[2]``: counters that determined the algorithm of the selected branch, 0
            if it was determined by shapes alone; None without the branch and for the reference.
        lse_slc, order: see ``AttentionResults``; None like ``tile_stats``.
    """

    out: Tensor
    block_indices: Tensor | None
    tile_stats: Tensor | None = None
    lse_slc: Tensor | None = None
    order: Tensor | None = None


class AttentionResults(NamedTuple):
    """Result and tensors saved for the backward; those of a disabled branch are empty.

    Attributes:
        out: the gated sum ``[T, Hq, Dv]``.
        out_cmp, lse_cmp: results of the compressed branch.
        block_indices: the selected blocks.
        out_slc, lse_slc, order, tile_stats: results of the selected branch, see
            ``SelectedResults``.
        out_win, lse_win: results of the window.
    """

    out: Tensor
    out_cmp: Tensor
    lse_cmp: Tensor
    block_indices: Tensor
    out_slc: Tensor
    lse_slc: Tensor
    order: Tensor
    tile_stats: Tensor
    out_win: Tensor
    lse_win: Tensor

    @property
    def compressed(self) -> RangeResults:
        """Results of the compressed branch."""
        return RangeResults(self.out_cmp, self.lse_cmp)

    @property
    def selected(self) -> SelectedResults:
        """Results of the selected branch."""
        return SelectedResults(self.out_slc, self.lse_slc, self.order, self.tile_stats)

    @property
    def window(self) -> RangeResults:
        """Results of the window."""
        return RangeResults(self.out_win, self.lse_win)


def _branch_results(inputs: BranchInputs, call: Call) -> AttentionResults:
    """Allocate the results of the branches; only shapes and devices are read."""
    made: dict[str, Tensor] = {}
    if (compressed := inputs.compressed) is not None:
        made["out_cmp"], made["lse_cmp"] = RangeResults.new(compressed.q, compressed.v)
    if inputs.k_slc is not None and inputs.v_slc is not None:
        blocks = new_selection(inputs.q, call.config)
        results = SelectedResults.new(inputs.q, inputs.v_slc, blocks, call.algorithm)
        made["block_indices"], made["out_slc"], made["lse_slc"], *rest = blocks, *results
        made["order"], made["tile_stats"] = rest
    if (window := inputs.window) is not None:
        made["out_win"], made["lse_win"] = RangeResults.new(window.q, window.v)
    names = AttentionResults._fields
    return AttentionResults(*(made[x] if x in made else inputs.q.new_empty(0) for x in names))


def _finished(inputs: BranchInputs, results: AttentionResults, out: Tensor) -> AttentionResults:
    """Set the gated sum, and drop the output of a compressed branch that only scores blocks."""
    out_cmp = out.new_empty(0) if inputs.v_cmp is None else results.out_cmp
    return results._replace(out=out, out_cmp=out_cmp)


def _fake(inputs: BranchInputs, call: Call) -> AttentionResults:
    inputs = inputs.windowed(call)
    out = inputs.q.new_empty(*inputs.q.shape[:2], call.config.value_dim)
    return _finished(inputs, _branch_results(inputs, call), out)


def _forward(inputs: BranchInputs, call: Call) -> AttentionResults:
    from nsa.ops.range.launch import range_forward
    from nsa.ops.selected.launch import selected_forward
    from nsa.ops.selection.launch import run_selection

    inputs = inputs.windowed(call)
    _check_numbers(inputs)
    # Before the fork: offsets that the side stream reads, and memory for its results.
    if inputs.k_cmp is not None:
        call = replace(call, sequences=call.sequences.with_blocks(call.config))
    results = _branch_results(inputs, call)
    compressed, window = inputs.compressed, inputs.window
    selected = inputs.selected(results.block_indices)
    both = (compressed is not None or selected is not None) and window is not None
    with fork_join(inputs.q.device, enabled=both) as streams:
        with streams.on_side():
            if compressed is not None:
                with stage(COMPRESSED):
                    range_forward(compressed, KeyRange.of_blocks(call), results.compressed)
            if selected is not None:
                with stage(SELECTION):
                    scored = inputs.scored(call, results.lse_cmp)
                    run_selection(*scored, results.block_indices)
                with stage(SELECTED):
                    selected_forward(selected, call, results.selected, unique=True)
        if window is not None:
            with stage(WINDOW):
                range_forward(window, KeyRange.of_window(call), results.window)
    with stage(GATES):
        out_cmp = None if inputs.v_cmp is None else results.out_cmp
        out_slc = None if selected is None else results.out_slc
        out_win = None if window is None else results.out_win
        out = run_combine(out_cmp, out_slc, out_win, inputs.gates)
    return _finished(inputs, results, out)


def _check_numbers(inputs: BranchInputs) -> None:
    """Check index limits under the names of the caller's arguments, which differ by branch."""
    check_queries(inputs.q)
    for argument in ("k_slc", "k_win"):
        k = getattr(inputs, argument)
        if k is not None:
            check_keys(argument, k)


NO_GRADIENTS: tuple[Tensor | None, Tensor | None] = (None, None)


def _backward(
    inputs: BranchInputs, results: AttentionResults, dout: Tensor, call: Call
) -> BranchInputs:
    """Gradients of the inputs; keys that only score blocks, and their queries, have none."""
    from nsa.ops.range.launch import RangeBackward
    from nsa.ops.selected.launch import selected_backward
    from nsa.ops.shared_kv import is_one_pass, shared_backward

    shares = inputs.k_win is None and "win" in call.config.branches
    dout, q, gates = rows(dout), rows(inputs.q), inputs.gates.contiguous()
    inputs = inputs.windowed(call)._replace(q=q, gates=gates)
    # Before the fork: everything that both streams use, including offsets and copied layouts, and
    # the side stream's results. Branches add to dq in the order compressed, window, selected.
    dq, dgates = q.new_empty(q.shape), torch.zeros_like(gates)
    dq_cmp = cmp = win = None
    adds = False
    compressed = None if inputs.v_cmp is None else inputs.compressed
    if compressed is not None:
        dq_cmp = None if inputs.q_cmp is None else q.new_empty(q.shape)
        given = (compressed, results.compressed, dout, dq if dq_cmp is None else dq_cmp)
        cmp = RangeBackward(*given, KeyRange.of_blocks(call), Gated(gates, dgates))
        adds = dq_cmp is None
    selected, window = inputs.selected(results.block_indices), inputs.window
    one_pass = shares and selected is not None and once(lambda: is_one_pass(selected, call))
    if window is not None and not one_pass:
        given, gated = (window, results.window, dout, dq), Gated(gates, dgates, adds)
        win = RangeBackward(*given, KeyRange.of_window(call), gated)
        adds = True
    dk_slc = None if selected is None else selected.k.new_empty(selected.k.shape)
    dv_slc = None if selected is None else selected.v.new_empty(selected.v.shape)
    dkv_cmp = dkv_win = NO_GRADIENTS
    # All dQ and the selected branch in sequence, concurrently with dK and dV of the ranges.
    with fork_join(inputs.q.device, enabled=[cmp, win, dk_slc].count(None) < 2) as streams:
        with streams.on_side():
            if cmp is not None:
                with stage(COMPRESSED):
                    cmp.query_gradient()
            wait_cmp = streams.record()
            if win is not None:
                with stage(WINDOW):
                    win.query_gradient()
            wait_win = streams.record()
            if selected is not None and dk_slc is not None and dv_slc is not None:
                grads, gated = (dq, dk_slc, dv_slc), Gated(gates, dgates, adds)
                slc = results.selected
                with stage(SELECTED):
                    if one_pass:
                        shared_backward(selected, call, slc, results.window, dout, grads, gated)
                    else:
                        selected_backward(selected, call, slc, dout, grads, gated, unique=True)
        wait_cmp()
        if cmp is not None:
            with stage(COMPRESSED):
                dkv_cmp = cmp.key_gradients()
        wait_win()
        if win is not None:
            with stage(WINDOW):
                dkv_win = win.key_gradients()
    found = (dq if adds or selected else None, dq_cmp, *dkv_cmp, dk_slc, dv_slc, *dkv_win, dgates)
    made = BranchInputs(*found)  # type: ignore[arg-type]
    return made.summed() if shares else made


attention_op = register_attention(
    "attention", BranchInputs, AttentionResults, _forward, _backward, _fake, reads_out=False
)


def attention_by_branch(
    inputs: BranchInputs, call: Call, backend: str, window_call: Call | None = None
) -> AttentionResult:
    """Attention of packed, validated inputs; backend ``reference`` is the specification.

    ``window_call`` is that of the window branch if its keys are other tokens, as with a cache.
    """
    out_cmp = lse = out_slc = out_win = block_indices = None
    if inputs.k_cmp is not None:
        given = (inputs.scoring_queries, inputs.k_cmp, inputs.v_cmp)
        out_cmp, lse = run_compressed_attention(*given, call, backend)
    if inputs.k_slc is not None:
        block_indices = run_select_blocks(*inputs.scored(call, lse), backend)
        if (selected := inputs.selected(block_indices)) is not None:
            out_slc, _ = run_selected_attention(selected, call, backend)
    if (window := inputs.window) is not None:
        out_win, _ = run_window_attention(window, window_call or call, backend)
    out = combine(out_cmp, out_slc, out_win, inputs.gates, backend=backend)
    return AttentionResult(out, block_indices)


def run_attention(inputs: BranchInputs, call: Call, backend: str) -> AttentionResult:
    """Attention of packed, validated inputs; backend ``triton`` runs one fused operator."""
    if backend == "reference":
        if inputs.q_idx is not None and inputs.k_idx is not None:
            # Gradients of zero instead of None, as from the operator.
            none = (inputs.q_idx[:0].flatten(), inputs.k_idx[:0].flatten())
            gates = torch.cat((inputs.gates.flatten(), *none)).view_as(inputs.gates)
            inputs = inputs._replace(gates=gates)
        return attention_by_branch(inputs, call, backend)
    results = attention_op(inputs.shared(), call)
    if inputs.k_slc is None:
        return AttentionResult(results.out, None)
    found = (results.out, results.block_indices, results.tile_stats)
    return AttentionResult(*found, results.lse_slc, results.order)
