"""The branches and their gated sum as one registered operator, after compression."""

from __future__ import annotations

from torch import Tensor

from nsa.config import NSAConfig
from nsa.ops._sequences import Sequences
from nsa.ops.attention.ops import attention_op

__all__ = ["run_attention"]


def run_attention(
    q: Tensor,
    q_cmp: Tensor | None,
    k_cmp: Tensor | None,
    v_cmp: Tensor | None,
    k_slc: Tensor | None,
    v_slc: Tensor | None,
    k_win: Tensor | None,
    v_win: Tensor | None,
    gates: Tensor,
    config: NSAConfig,
    sequences: Sequences,
    softmax_scale: float,
    algorithm: str,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Whole attention by kernels; inputs are packed and checked.

    Args:
        q: rotated queries ``[T, Hq, D]``.
        q_cmp: queries of the compressed branch and of the scores; None means ``q``.
        k_cmp: compressed keys, rotated, ``[C, Hkv, D]``; None where nothing is scored.
        v_cmp: compressed values ``[C, Hkv, Dv]``; None where the branch is off, and so the others.
        k_slc: rotated keys of the selected branch ``[S, Hkv, D]``.
        v_slc: values of the selected branch ``[S, Hkv, Dv]``.
        k_win: rotated keys of the window ``[S, Hkv, D]``.
        v_win: values of the window ``[S, Hkv, Dv]``.
        gates: ``[T, Hq, 3]``.
        config: the sparse pattern.
        sequences: where the sequences lie.
        softmax_scale: factor on all scores.
        algorithm: of the selected branch, see :func:`nsa.selected_attention`.

    Returns:
        out ``[T, Hq, Dv]``; the choice int32 ``[T, Hkv, n]``, None without the selected branch; and
        the counters by which its algorithm was chosen (see :func:`nsa.ops.statistics.add_statistics`): 0
        where shapes alone chose it, None without the branch.
    """
    *offsets, num_sequences, len_q, len_k = sequences.kernel_arguments()
    lengths = (num_sequences, len_q, len_k)
    given = (q, q_cmp, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates)
    out, _, _, block_indices, _, _, _, union, _, _ = attention_op(
        *given, *offsets, sequences.cu_cmp, *lengths, config.text, softmax_scale, algorithm
    )
    return out, None if k_slc is None else block_indices, union if union.numel() else None
