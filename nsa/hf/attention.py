"""Sparse attention in other models of transformers, through its attention interface."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from nsa.attention import AttentionInputs, attend
from nsa.config import NSAConfig
from nsa.errors import check
from nsa.ops._operator import Call
from nsa.ops._packed import num_compressed, query_positions
from nsa.ops._sequences import Sequences

_OF_MODEL = ("num_heads", "num_kv_heads", "head_dim", "value_dim")
# Scores that need no parameters. The keys are rotated already.
_FIXED: dict[str, Any] = {"scores": "token_max", "phi": "mean", "compress_rope": "none"}
# Arguments of attention functions that would change the result.
_REFUSED = ("dropout", "sliding_window", "softcap", "s_aux")


def register(name: str = "nsa", **changes: Any) -> None:
    """Register ``attn_implementation=name`` for models in the layout of Llama.

    The model keeps its weights and gets no new ones: all branches use its rotated keys and values,
    blocks are scored by their best token (``scores="token_max"``), and each branch has the gate 1 /
    number of branches. With ``branches=("slc",)`` the result is that of dense attention as long as
    every block is selected, that is up to ``num_selected_blocks * block_size`` tokens. Beyond that
    the model sees less than it was trained with: train it further, and measure it.

    Padding and packed documents, given by ``attention_mask``, ``position_ids`` or
    ``cu_seq_lens_q``, are supported. Any cache of transformers works.

    Args:
        name: name of the implementation.
        changes: fields of :class:`nsa.NSAConfig`, for example ``block_size``,
            ``num_selected_blocks``, ``window_size`` and ``branches`` (default ``("slc", "win")``).
            The model sets the number and size of the heads; scores are fixed.

    Raises:
        ValueError: a field is not valid, fixed, or set by the model.
    """
    for field in (*_OF_MODEL, *_FIXED):
        check(field not in changes, field, "be left out", changes.get(field))
    pattern = NSAConfig(**{"branches": ("slc", "win"), **changes, **_FIXED})

    def attention(
        module: nn.Module,
        query: Tensor,  # [B, Hq, T, D], rotated
        key: Tensor,  # [B, Hkv, S or more, D], rotated
        value: Tensor,  # [B, Hkv, S or more, D]
        attention_mask: Tensor,  # [B, S], from _valid_columns
        scaling: float | None = None,
        position_ids: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        for argument in _REFUSED:
            given = others.get(argument)
            fits = given is None or (not isinstance(given, Tensor) and given == 0)
            check(fits, argument, "be left out or 0", given)
        is_causal = others.get("is_causal", getattr(module, "is_causal", True))
        check(is_causal, "is_causal", "be true", is_causal)
        dimensions = attention_mask.ndim
        check(dimensions == 2, "attention_mask", "be [B, S]", f"{dimensions} dimensions")
        batch, num_heads, new, size = query.shape
        heads: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": key.shape[1]}
        config = replace(pattern, **heads, head_dim=size, value_dim=value.shape[3])
        valid, is_new = attention_mask, attention_mask[:, -new:]
        q = query.transpose(1, 2)[is_new]
        k, v = (x[:, :, : valid.shape[1]].transpose(1, 2)[valid] for x in (key, value))
        sequences = _documents(valid, new, position_ids, cu_seq_lens_q)
        module.keys_read = _count_keys(config, sequences)
        inputs = AttentionInputs(q, k, v, k, v, k, v, None, None)
        call = Call(config, sequences, size**-0.5 if scaling is None else scaling)
        found = attend(inputs, call, rope=None).out
        out = found.new_zeros(batch, new, *found.shape[1:])
        out[is_new] = found
        return out, None

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, _valid_columns)


def keys_read(model: PreTrainedModel) -> list[float]:
    """Mean number of keys that a query read in each layer's last call.

    A query reads all keys before it to score blocks, the values of the selected ones, and the keys
    of the other branches. Dense attention reads (T + 1) / 2 keys, and as many values, of T tokens.
    Waits for the device.

    Args:
        model: model that has run with a registered implementation.
    """
    found = [float(m.keys_read) for m in model.modules() if hasattr(m, "keys_read")]
    rule = "have run with attention from nsa.hf.register"
    check(bool(found), "model", rule, type(model).__name__)
    return found


def _count_keys(config: NSAConfig, sequences: Sequences) -> Tensor:
    """Mean number of keys read by a query."""
    seen = query_positions(int(sequences.num_tokens or 0), sequences.cu_q, sequences.cu_k) + 1
    keys = {
        "cmp": num_compressed(seen, config),
        "slc": seen,
        "win": seen.clamp(max=config.window_size),
    }
    return torch.stack([keys[branch] for branch in config.branches]).sum(0).double().mean()


def _valid_columns(
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


@lru_cache(maxsize=4)  # all layers of a model pass the same tensors
def _documents(
    valid: Tensor, new: int, position_ids: Tensor | None, cu_seq_lens_q: Tensor | None
) -> Sequences:
    """Return the documents of the new tokens and of all tokens. Waits for the device.

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
    num_tokens, lengths = int(cu_q[-1]), [int(cu.diff().max()) for cu in (cu_q, cu_k)]
    return Sequences(
        (cu_q, cu_k), len(cu_q) - 1, lengths[0], lengths[1], cu_q.device, num_tokens=num_tokens
    )
