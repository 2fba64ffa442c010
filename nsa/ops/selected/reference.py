"""Attention over the tokens of selected blocks (Eq. 5, branch slc): the specification."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from nsa.config import NSAConfig
from nsa.ops._chunks import Part, concatenated, is_long, parts
from nsa.ops._masked_attention import (
    accumulate_dtype,
    masked_attention,
    max_blocks,
    padded_positions,
    visible_tokens,
)
from nsa.ops._operator import Call
from nsa.ops._packed import pad
from nsa.ops._sequences import Sequences
from nsa.ops.selected.types import SelectedInputs

_GATHERED = 16  # queries whose selected keys and values are copied at once


def visible_selected(block_indices: Tensor, config: NSAConfig, sequences: Sequences) -> Tensor:
    """Causal mask of the tokens of the selected blocks, bool ``[B, Hkv, T, S]``.

    Ids outside ``0 .. t // l'`` are ignored.
    """
    num_blocks = max_blocks(sequences, config)
    # [B, Hkv, T, n]
    ids = pad(block_indices.long(), sequences.cu_q, sequences.max_q).transpose(1, 2)
    current = (padded_positions(sequences) // config.block_size)[:, None, :, None]
    # Absent ids go to an extra column, which no token reads.
    column = torch.where((ids >= 0) & (ids <= current), ids, num_blocks)
    selected = torch.zeros(*ids.shape[:3], num_blocks + 1, dtype=torch.bool, device=ids.device)
    selected = selected.scatter(-1, column, True)
    causal = visible_tokens(sequences)[:, None]
    # A shift instead of `//` or `repeat_interleave`, which lowers to it: Inductor (torch 2.13)
    # omits its last tokens on a CPU.
    block = torch.arange(causal.shape[-1], device=ids.device) >> config.block_size.bit_length() - 1
    return selected[..., block] & causal


def selected_attention_reference(inputs: SelectedInputs, call: Call) -> tuple[Tensor, Tensor]:
    """See :func:`nsa.selected_attention`; inputs are packed and validated."""
    q, k, v, block_indices = inputs
    if is_long(call, q, k, v, with_few=True):

        def gathered(part: Part) -> tuple[Tensor, Tensor]:
            chunk = q[part.queries], k[part.keys], v[part.keys], block_indices[part.queries]
            return _selected_by_gather(*chunk, part.call.config.block_size, call.softmax_scale)

        sequences = parts(call, queries=call.sequences.max_q)
        gathered_out, gathered_lse = concatenated(gathered, sequences)
        return gathered_out, gathered_lse
    visible = visible_selected(block_indices, call.config, call.sequences)
    out, lse = masked_attention(q, k, v, visible, call)
    assert out is not None
    return out, lse


def _selected_by_gather(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, size: int, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of one sequence over copies of the selected keys and values.

    The last query has the position of the last key; blocks have ``size`` tokens.
    """
    dtype, (length, num_kv_heads, _) = accumulate_dtype(q), k.shape
    num_blocks = -(-length // size)
    # Whole blocks are fewer rows, but their layout is a copy of all keys and values.
    by_block = q.shape[0] * block_indices.shape[2] > num_blocks
    keys, values = (_rows(x.to(dtype), size if by_block else 1) for x in (k, v))
    head = torch.arange(num_kv_heads, device=q.device)[:, None]
    offset = torch.arange(size, device=q.device)
    outs, lses = list[Tensor](), list[Tensor]()
    positions = torch.arange(length - q.shape[0], length, device=q.device)[:, None, None]
    # Reused memory: the system clears new memory, which takes longer than the copies.
    copy = keys.new_empty(0), values.new_empty(0)
    for rows, blocks, position in zip(
        *(x.split(_GATHERED) for x in (q, block_indices, positions)), strict=True
    ):
        ids = blocks.long().sort(-1).values
        present = (ids >= 0) & (ids <= position // size)
        present[..., 1:] &= ids[..., 1:] != ids[..., :-1]
        hidden = ~present[..., None] | (ids[..., None] * size + offset > position[..., None])
        ids = ids.clamp(0, num_blocks - 1)
        tokens = (ids[..., None] * size + offset).clamp(max=length - 1)
        index = ids + head * num_blocks if by_block else tokens * num_kv_heads + head[..., None]
        chosen_k, chosen_v = (
            torch.index_select(x, 0, index.flatten(), out=memory.resize_(0)).view(
                -1, ids.shape[2] * size, y.shape[2]
            )
            for x, memory, y in zip((keys, values), copy, (k, v), strict=True)
        )
        heads = rows.to(dtype).mul(softmax_scale).reshape(len(chosen_k), -1, q.shape[2])
        scores = heads @ chosen_k.transpose(1, 2)
        scores = scores.masked_fill_(hidden.reshape(len(chosen_k), 1, -1), -torch.inf)
        lse = scores.logsumexp(-1, keepdim=True)
        # A finite value for a query without keys: -inf - -inf would be NaN.
        weights = (scores - lse.clamp(min=torch.finfo(dtype).min)).exp_()
        outs.append((weights @ chosen_v).to(q.dtype).reshape(*rows.shape[:2], v.shape[2]))
        lses.append(lse.reshape(rows.shape[:2]))
    return torch.cat(outs), torch.cat(lses)


def _rows(x: Tensor, size: int) -> Tensor:
    """Rows of keys or values ``[S, Hkv, D]``: tokens by KV heads, or KV heads by blocks."""
    if size == 1:
        return x.reshape(-1, x.shape[2])
    x = functional.pad(x, (0, 0, 0, 0, 0, -x.shape[0] % size)).transpose(0, 1)
    return x.reshape(-1, size * x.shape[2])
