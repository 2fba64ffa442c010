"""Attention over the tokens of selected blocks (Eq. 5, branch slc): the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.ops._masked_attention import masked_attention, max_blocks, padded_positions, visible_tokens
from nsa.ops._operator import Call
from nsa.ops._packed import pad
from nsa.ops._sequences import Sequences
from nsa.ops.selected.types import SelectedInputs


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
    visible = visible_selected(block_indices, call.config, call.sequences)
    out, lse = masked_attention(q, k, v, visible, call)
    assert out is not None
    return out, lse
