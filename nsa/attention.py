"""Native Sparse Attention as one function, and checks of index tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.errors import check, fail
from nsa.ops._backend import choose_backend, reads_contents
from nsa.ops._checks import (
    check_block_indices,
    check_cu_seqlens,
    check_cu_seqlens_contents,
    check_heads,
    check_pair,
    check_same_count,
    scale_of,
)
from nsa.ops._masked_attention import accumulate_dtype
from nsa.ops._operator import Call
from nsa.ops._packed import query_positions
from nsa.ops._sequences import Sequences, open_sequences, pack
from nsa.ops.attention import AttentionResult, BranchInputs, run_attention
from nsa.ops.compression import PhiWeights, Raw, check_weights, run_compress
from nsa.ops.statistics import add_statistics
from nsa.rope import Rope

Phi = tuple[PhiWeights, PhiWeights]
# Called with the inputs and the block indices [T, Hkv, n] (None if slc is disabled).
Observer = Callable[[BranchInputs, Tensor | None], None]


class AttentionInputs(NamedTuple):
    """Packed inputs of attention, see :func:`native_sparse_attention`.

    Tensors of a disabled branch are None.

    Attributes:
        q: rotated queries ``[T, Hq, D]``.
        k_cmp_raw: unrotated keys of the compressed branch and of the scores ``[S, Hkv, D]``.
        v_cmp_raw: values of the compressed branch ``[S, Hkv, Dv]``.
        k_slc: rotated keys of the selected branch.
        v_slc: values of the selected branch.
        k_win: rotated keys of the window.
        v_win: values of the window.
        gates: ``[T, Hq, 3]``; None means 1 / the number of branches.
        phi: parameters of the compression of keys and of values.
        q_cmp: queries of the compressed branch and of the scores; None means ``q``.
        q_idx: rotated index queries; None without an index.
        k_idx: rotated index keys.
    """

    q: Tensor
    k_cmp_raw: Tensor | None
    v_cmp_raw: Tensor | None
    k_slc: Tensor | None
    v_slc: Tensor | None
    k_win: Tensor | None
    v_win: Tensor | None
    gates: Tensor | None
    phi: Phi | None
    q_cmp: Tensor | None = None
    q_idx: Tensor | None = None
    k_idx: Tensor | None = None


def native_sparse_attention(
    q: Tensor,
    k_cmp_raw: Tensor | None,
    v_cmp_raw: Tensor | None,
    k_slc: Tensor | None,
    v_slc: Tensor | None,
    k_win: Tensor | None,
    v_win: Tensor | None,
    gates: Tensor,
    phi: Phi | None,
    config: NSAConfig,
    *,
    q_cmp: Tensor | None = None,
    q_idx: Tensor | None = None,
    k_idx: Tensor | None = None,
    rope: Rope | None = None,
    softmax_scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    sequences: Sequences | None = None,
    backend: str = "auto",
) -> Tensor:
    """Native Sparse Attention: the gated sum of three views of the past (Eq. 5, arXiv:2502.11089).

    Args:
        q: rotated queries, packed ``[T, Hq, D]`` or dense ``[B, T, Hq, D]``; keys and values
            likewise.
        k_cmp_raw: unrotated keys of the compressed branch and of the scores, ``[S, Hkv, D]``.
        v_cmp_raw: values of the compressed branch ``[S, Hkv, Dv]``.
        k_slc: rotated keys of the selected branch ``[S, Hkv, D]``.
        v_slc: values of the selected branch ``[S, Hkv, Dv]``.
        k_win: rotated keys of the window ``[S, Hkv, D]``. If ``k_win`` and ``v_win`` are the
            objects ``k_slc`` and ``v_slc``, the backward may process both branches in one pass.
        v_win: values of the window ``[S, Hkv, Dv]``.
        gates: activated gates ``[T, Hq, 3]``, order (cmp, slc, win), none below 0. On a GPU this is
            not checked (see :func:`check_inputs`); there a gate below 0 makes gradients NaN.
        phi: parameters of the compression of keys and of values; None for phi ``mean``.
        config: the sparse pattern. Inputs of a disabled branch are ignored and may be None.
        q_cmp: queries of the compressed branch and of the scores; None means ``q``. With
            ``compress_rope="none"`` pass the unrotated queries.
        q_idx: rotated index queries ``[T, Hkv * index_heads, index_dim]``, or ``[T, index_heads,
            index_dim]`` with ``index_keys="shared"``; given with scores ``index`` only. They and
            ``k_idx`` get gradients of zero.
        k_idx: rotated index keys ``[S, Hkv, index_dim]``, or ``[S, 1, index_dim]``.
        rope: rotates the compressed keys; None when nothing is rotated.
        softmax_scale: factor on all scores, but those of an index, whose factor is
            ``index_dim ** -0.5``; None means ``D ** -0.5``.
        cu_seqlens_q: int32 ``[B + 1]`` offsets of the queries; None means one sequence.
        cu_seqlens_k: int32 ``[B + 1]`` offsets of the keys; None means those of the queries.
        max_seqlen_q: at least the longest sequence in queries. Pass it when sequences are much
            shorter than the total number of tokens. With None the reference reads it from the
            offsets; kernels assume one sequence of all tokens, to avoid a device synchronisation.
            Results are equal, but tiles, partial sums of dK and dV and their memory are sized for
            one long sequence, and the selected branch prepares both of its algorithms instead of
            the tiled one alone.
        max_seqlen_k: at least the longest sequence in keys; None means ``max_seqlen_q`` if
            queries and keys have the same offsets.
        sequences: replaces the previous four arguments, from :meth:`nsa.Sequences.packed` or
            :meth:`nsa.Sequences.padded`; queries and keys are then the same tokens.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        ``[T, Hq, Dv]`` (``[B, T, Hq, Dv]`` for a dense batch) in the dtype of ``q``.

    Raises:
        ValueError: a tensor of an enabled branch or of the index is missing; there are index
            tensors without an index; shapes, dtypes or offsets do not match.
    """
    backend = choose_backend(backend, q)
    of_branches = (k_cmp_raw, v_cmp_raw, k_slc, v_slc, k_win, v_win)
    keys = _check_inputs_of_branches(config, q, gates, *of_branches)
    _check_index(config, q, keys, q_idx, k_idx)
    offsets = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    sequences = open_sequences(q, keys, *offsets, backend, sequences)
    if rope is not None:
        rule = f"have an even dim of at most head_dim ({config.head_dim})"
        check(rope.dim <= config.head_dim and rope.dim % 2 == 0, "rope", rule, rope.dim)
    q_cmp = _compressed_queries(q, q_cmp, rope, config)
    phi_k, phi_v = (None, None) if phi is None else phi
    if config.compresses_keys:
        check_weights("phi[0]", phi_k, config, config.head_dim)
    if "cmp" in config.branches:
        check_weights("phi[1]", phi_v, config, config.value_dim)
    given = (q, *of_branches, gates, q_idx, k_idx)
    *packed, q_idx, k_idx = (None if x is None else pack(x) for x in given)
    inputs = AttentionInputs._make((*packed, phi, q_cmp, q_idx, k_idx))
    if k_win is k_slc and v_win is v_slc:
        inputs = inputs._replace(k_win=inputs.k_slc, v_win=inputs.v_slc)
    call = Call(config, sequences, scale_of(config, softmax_scale))
    return sequences.restore(attend(inputs, call, rope=rope, backend=backend).out)


def attend(
    inputs: AttentionInputs,
    call: Call,
    *,
    rope: Rope | None,
    statistics: Tensor | None = None,
    observer: Observer | None = None,
    backend: str = "auto",
) -> AttentionResult:
    """:func:`native_sparse_attention` for packed inputs that have been validated.

    Args:
        inputs: packed inputs.
        call: the sparse pattern, the sequences and the factor on all scores.
        rope: rotates the compressed keys.
        statistics: tensor from :func:`nsa.ops.statistics.new_statistics`, to which statistics of
            the gates and the selected blocks are added on the device.
        observer: called with the inputs of the branches and the selected blocks that were used.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        The output ``[T, Hq, Dv]`` in the dtype of ``q``, and the selected blocks.
    """
    config = call.config
    backend = choose_backend(backend, inputs.q)
    if config.compresses_keys:
        call = replace(call, sequences=call.sequences.with_blocks(config))
    branches = compress_inputs(inputs, call, rope, backend)
    result = run_attention(branches, call, backend)
    if statistics is not None:
        from nsa.ops._triton.tuning import scatter_of

        size, index = max(config.head_dim, config.value_dim), inputs.q.device.index
        where = (size, inputs.q.element_size(), index if inputs.q.is_cuda else None)
        threshold = scatter_of("selected_attention_fwd", *where) * config.num_selected_blocks
        seen = (branches.gates, result.block_indices, result.tile_stats)
        add_statistics(statistics, *seen, threshold, config, call.sequences, backend)
    if observer is not None:
        observer(branches, result.block_indices)
    return result


def compress_inputs(
    inputs: AttentionInputs, call: Call, rope: Rope | None, backend: str
) -> BranchInputs:
    """Compress keys and values, and assemble the branch inputs."""
    config, sequences = call.config, call.sequences
    phi_k, phi_v = (None, None) if inputs.phi is None else inputs.phi
    rotation = None if config.compress_rope == "none" else rope
    raw: list[Raw] = []
    if config.compresses_keys:
        assert inputs.k_cmp_raw is not None
        raw.append(Raw(inputs.k_cmp_raw, phi_k, rotation))
    if "cmp" in config.branches:
        assert inputs.v_cmp_raw is not None
        raw.append(Raw(inputs.v_cmp_raw, phi_v, None))
    found = run_compress(raw, config, sequences, backend) if raw else []
    k_cmp, v_cmp = (*found, None, None)[:2]  # values are compressed with keys alone
    return branch_inputs(inputs, config, k_cmp, v_cmp)


def branch_inputs(
    inputs: AttentionInputs, config: NSAConfig, k_cmp: Tensor | None, v_cmp: Tensor | None
) -> BranchInputs:
    """Assemble the branch inputs and drop disabled branches."""
    q, gates = inputs.q, inputs.gates
    if gates is None:
        size, dtype = (*q.shape[:2], 3), accumulate_dtype(q)
        gates = q.new_full(size, 1 / config.num_branches, dtype=dtype)
    k_slc, v_slc, k_win, v_win = inputs.k_slc, inputs.v_slc, inputs.k_win, inputs.v_win
    index = (inputs.q_idx, inputs.k_idx) if config.has_index else (None, None)
    if "slc" not in config.branches:
        k_slc = v_slc = None
    if "win" not in config.branches:
        k_win = v_win = None
    of_branches = (k_cmp, v_cmp, k_slc, v_slc, k_win, v_win)
    return BranchInputs(q, inputs.q_cmp, *of_branches, gates, *index)


def check_inputs(
    config: NSAConfig,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    block_indices: Tensor | None = None,
    gates: Tensor | None = None,
) -> None:
    """Check the contents of index tensors, on any device; on a GPU this waits for the device.

    Args:
        config: the sparse pattern.
        cu_seqlens_q: int32 ``[B + 1]`` offsets of the queries.
        cu_seqlens_k: int32 ``[B + 1]`` offsets of the keys; None means those of the queries.
        block_indices: integer ``[T, Hkv, n]``, packed.
        gates: ``[T, Hq, 3]``.

    Raises:
        ValueError: offsets do not start at 0 or they decrease; a sequence has more queries than
            keys; a query selects a block twice; a gate is below 0.
    """
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    num_queries = None if block_indices is None else block_indices.shape[0]
    for argument, offsets, num_tokens in (
        ("cu_seqlens_q", cu_seqlens_q, num_queries),
        ("cu_seqlens_k", cu_seqlens_k, None),
    ):
        check_cu_seqlens(argument, offsets, offsets.device, num_tokens)
        check_cu_seqlens_contents(argument, offsets, num_tokens)
    check_same_count(cu_seqlens_q, cu_seqlens_k)
    check_pair(cu_seqlens_q, cu_seqlens_k)
    if gates is not None:
        _check_gates(gates)
    if block_indices is None:
        return
    check_block_indices(block_indices, config)
    check(
        block_indices.ndim == 3,
        "block_indices",
        "be packed [T, Hkv, n]",
        tuple(block_indices.shape),
    )
    positions = query_positions(block_indices.shape[0], cu_seqlens_q, cu_seqlens_k)[:, None, None]
    present = (block_indices >= 0) & (block_indices <= positions // config.block_size)
    ids = torch.where(present, block_indices, -1).sort(-1).values
    repeated = (ids[..., 1:] == ids[..., :-1]) & (ids[..., 1:] >= 0)
    if repeated.any():
        token, head, slot = (int(x) for x in repeated.nonzero()[0])
        where = f"block {int(ids[token, head, slot])} twice at query {token}, KV head {head}"
        fail("block_indices", "name a block at most once for each query and KV head", where)


def _check_inputs_of_branches(
    config: NSAConfig, q: Tensor, gates: Tensor, *tensors: Tensor | None
) -> tuple[int, ...]:
    """Check the inputs of the enabled branches; return the leading shape of the keys."""
    check_heads("q", q, config.num_heads, config.head_dim, q)
    gate_shape = (*q.shape[:-2], config.num_heads, 3)
    if tuple(gates.shape) != gate_shape:
        fail("gates", f"have shape {gate_shape}", tuple(gates.shape))
    if reads_contents(gates):
        _check_gates(gates)
    arguments = ("k_cmp_raw", "v_cmp_raw", "k_slc", "v_slc", "k_win", "v_win")
    key_shape: tuple[int, ...] | None = None
    for argument, tensor in zip(arguments, tensors, strict=True):
        branch = argument.split("_")[1]
        if branch not in config.branches and not (
            argument == "k_cmp_raw" and config.compresses_keys
        ):
            continue
        if tensor is None:
            fail(argument, f"be given with branches {config.branches}", None)
        size = config.head_dim if argument.startswith("k") else config.value_dim
        check_heads(argument, tensor, config.num_kv_heads, size, q)
        key_shape = tuple(tensor.shape[:-2]) if key_shape is None else key_shape
        if tuple(tensor.shape[:-2]) != key_shape:
            rule = f"have as many tokens as the other keys {key_shape}"
            fail(argument, rule, tuple(tensor.shape[:-2]))
    assert key_shape is not None
    return key_shape


def _check_index(
    config: NSAConfig,
    q: Tensor,
    keys: tuple[int, ...],
    q_idx: Tensor | None,
    k_idx: Tensor | None,
) -> None:
    """Check that index queries and keys are given if and only if an index scores the blocks."""
    heads = config.scoring
    for argument, x, number, tokens in (
        ("q_idx", q_idx, heads.num_heads, tuple(q.shape[:-2])),
        ("k_idx", k_idx, heads.num_kv_heads, keys),
    ):
        if config.scores != "index":
            check(x is None, argument, f"be None with scores {config.scores}", "a tensor")
        elif config.has_index:
            if x is None:
                fail(argument, "be given with scores index", None)
            check_heads(argument, x, number, heads.head_dim, q)
            fits, rule = tuple(x.shape[:-2]) == tokens, f"have tokens {tokens}"
            check(fits, argument, rule, tuple(x.shape[:-2]))


def _check_gates(gates: Tensor) -> None:
    """Check that no gate is negative; NaN is allowed."""
    negative = gates < 0
    if negative.any():
        hint = "Give them activated, as by a sigmoid."
        fail("gates", "be at least 0", float(gates[negative][0]), hint)


def _compressed_queries(
    q: Tensor, q_cmp: Tensor | None, rope: Rope | None, config: NSAConfig
) -> Tensor | None:
    """Packed queries of the compressed branch and the scores; None means ``q``."""
    if q_cmp is None:
        rotated = rope is not None and config.compress_rope == "none" and config.compresses_keys
        check(
            not rotated,
            "q_cmp",
            "be given (the unrotated queries) with compress_rope none and a rope",
            None,
        )
        return None
    if q_cmp.shape != q.shape:
        fail("q_cmp", f"have the shape of q {tuple(q.shape)}", tuple(q_cmp.shape))
    check_heads("q_cmp", q_cmp, config.num_heads, config.head_dim, q)
    return pack(q_cmp)
