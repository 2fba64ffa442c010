"""Sparse attention in an existing model of Llama's layout, through transformers' interface.

python -m examples.llama    # compares a small random Llama with and without it

The model keeps its weights and gets no new ones. Only the selected branch of NSA runs, with a gate
of 1; its blocks are scored by the mean of their rotated keys. Up to n * l' tokens (the pattern's
``num_selected_blocks`` times ``block_size``) every block is selected and the logits equal those of
dense attention. Beyond that the model sees less than it was trained with: expect it to be worse
until it is trained further, and measure it. Gates, the compressed branch, the window and phi have
no place in this layout; for those, train a model with ``nsa train``.

Documents do not see each other, whether they are padded rows or are told apart by
``cu_seq_lens_q`` or ``position_ids``. With a cache, every step scores all blocks again from all
keys: this shows the mechanism, not the speed of decoding.

    register(NSAConfig(num_selected_blocks=16, block_size=64))
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="nsa")
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    LlamaConfig,
    LlamaForCausalLM,
)

from nsa import NSAConfig, native_sparse_attention


def register(pattern: NSAConfig, name: str = "nsa") -> None:
    """Register ``attn_implementation=name``; the model sets the number and size of the heads."""

    def attend(
        module: torch.nn.Module,
        query: Tensor,  # [B, Hq, T, D], rotated
        key: Tensor,  # [B, Hkv, S or more, D], rotated
        value: Tensor,  # [B, Hkv, S or more, D]
        attention_mask: Tensor,  # [B, S], of valid_columns
        scaling: float | None = None,
        position_ids: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        batch, num_heads, new, size = query.shape
        if attention_mask.ndim != 2:
            raise ValueError(f"attention_mask must be [B, S], got {attention_mask.ndim} dimensions")
        config = replace(
            pattern,
            num_heads=num_heads,
            num_kv_heads=key.shape[1],
            head_dim=size,
            value_dim=value.shape[3],
            branches=("slc",),
            phi="mean",
            compress_rope="none",  # the keys are rotated already
        )
        valid, is_new = attention_mask, attention_mask[:, -new:]
        q = query.transpose(1, 2)[is_new]
        k, v = (x[:, :, : valid.shape[1]].transpose(1, 2)[valid] for x in (key, value))
        cu_q, cu_k = documents(valid, new, position_ids, cu_seq_lens_q)
        out = q.new_zeros(batch, new, num_heads, value.shape[3])
        out[is_new] = native_sparse_attention(
            q,
            *(k, None, k, v, None, None),  # k_cmp_raw, v_cmp_raw, k_slc, v_slc, k_win, v_win
            gates=q.new_ones(*q.shape[:2], 3),
            phi=None,
            config=config,
            softmax_scale=scaling,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            max_seqlen_q=int(cu_q.diff().max()),
            max_seqlen_k=int(cu_k.diff().max()),
        )
        return out, None

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, valid_columns)


def valid_columns(
    batch_size: int,
    q_length: int,
    q_offset: int | Tensor,
    device: torch.device,
    attention_mask: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """Return which columns of the cache hold tokens, bool ``[B, S]``."""
    seen = int(q_offset) + q_length
    if attention_mask is None:
        return torch.ones(batch_size, seen, dtype=torch.bool, device=device)
    return attention_mask[:, :seen] != 0


def documents(
    valid: Tensor, new: int, position_ids: Tensor | None, cu_seq_lens_q: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the offsets of the documents among the new tokens and among all tokens.

    Args:
        valid: bool ``[B, S]``, false for padding.
        new: number of query columns, the last ones.
        position_ids: ``[B or 1, new]``.
        cu_seq_lens_q: offsets of documents in the flattened new columns.
    """
    batch, length = valid.shape
    row, column = valid.nonzero().unbind(1)
    part = torch.zeros_like(row)
    if cu_seq_lens_q is not None:
        starts = valid.new_zeros(batch * new + 1)
        starts[cu_seq_lens_q[1:-1].long()] = True
        part = pad(starts[:-1].view(batch, new).cumsum(1), (length - new, 0))[valid]
    begins = (pad(row, (1, 0), value=-1).diff() != 0) | (pad(part, (1, 0)).diff() != 0)
    if position_ids is not None:
        # Tokens before the new ones have the positions that lead up to the first new one.
        rank, position_ids = valid.cumsum(1), position_ids.expand(batch, -1)
        before = (position_ids[:, :1] - rank[:, -new, None] + rank)[:, : length - new]
        position = torch.cat((before, position_ids), dim=1)[valid]
        step = pad(position, (1, 0)).diff()
        # Positions count columns or tokens, which differ across padding.
        begins |= (step != 1) & (step != pad(column, (1, 0)).diff()) | (position == 0)
    index = begins.cumsum(0) - 1
    counts = [index[column >= length - new].bincount(minlength=int(begins.sum())), index.bincount()]
    cu_q, cu_k = (pad(count.cumsum(0), (1, 0)).int() for count in counts)
    return cu_q, cu_k


@torch.no_grad()
def main() -> None:
    """Print where the logits of the sparse and the dense model begin to differ."""
    register(NSAConfig(num_selected_blocks=4, block_size=32))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    dense = LlamaForCausalLM(config).eval()
    sparse = LlamaForCausalLM._from_config(copy.deepcopy(config), attn_implementation="nsa").eval()
    sparse.load_state_dict(dense.state_dict())
    tokens = torch.randint(256, (1, 256))
    difference = (sparse(tokens).logits - dense(tokens).logits).abs().amax(-1)[0]
    print(f"equal for the first {int((difference < 1e-5).sum())} of {tokens.shape[1]} tokens")


if __name__ == "__main__":
    main()
