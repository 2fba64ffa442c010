"""Decode cache: what later queries still need of the past, and nothing else.

Each layer keeps, for every sequence: the rotated keys and the values of all tokens for the selected
branch; those of the last ``window_size`` tokens for the window; the compressed keys and values; and
the raw tokens from the start of the next compression block on, fewer than ``compress_block_size``.
All of it is packed, so sequences of a batch may differ in length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.attention import AttentionInputs, branch_inputs
from nsa.config import NSAConfig
from nsa.errors import check
from nsa.ops._backend import choose_backend
from nsa.ops._checks import check_cu_seqlens_contents
from nsa.ops._operator import Call
from nsa.ops._packed import compressed_cu_seqlens, lengths, locate, num_compressed
from nsa.ops._sequences import Sequences
from nsa.ops.attention import attention_by_branch
from nsa.ops.compression import compress, compressed_positions
from nsa.rope import Rope, apply_rope


@dataclass
class PackedRows:
    """Rows of several sequences, packed.

    Attributes:
        key: ``[N, Hkv, D]``.
        value: ``[N, Hkv, Dv]``; has no rows where the branch is off.
        cu_seqlens: int32 ``[B + 1]``.
    """

    key: Tensor
    value: Tensor | None
    cu_seqlens: Tensor

    def append(self, key: Tensor, value: Tensor | None, cu_seqlens: Tensor) -> PackedRows:
        """New rows behind the old ones of each sequence."""
        joined = torch.cat((self.cu_seqlens[:1], (self.cu_seqlens + cu_seqlens)[1:]))
        sequence, row, _ = locate(self.key.shape[0] + key.shape[0], joined)
        old = lengths(self.cu_seqlens)[sequence]
        from_old = self.cu_seqlens.long()[sequence] + row
        from_new = self.key.shape[0] + cu_seqlens.long()[sequence] + row - old
        index = torch.where(row < old, from_old, from_new)
        values = (
            None if self.value is None or value is None else torch.cat((self.value, value))[index]
        )
        return PackedRows(torch.cat((self.key, key))[index], values, joined)

    def last(self, counts: Tensor) -> PackedRows:
        """The last ``counts[b]`` rows of each sequence b; waits for the device."""
        kept = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
        sequence, row, _ = locate(int(kept[-1]), kept)
        index = self.cu_seqlens.long()[1:][sequence] - counts[sequence] + row
        return PackedRows(
            self.key[index], None if self.value is None else self.value[index], kept.int()
        )


class LayerCache:
    """Cache of one attention layer; see the module's description of what it holds.

    Attributes:
        slc, win, cmp, tail: :class:`PackedRows` of the selected branch, the window, the compressed
            keys (rotated) and the raw tokens that are still to be compressed; None before the first
            token, and for branches that are off.
    """

    def __init__(self, config: NSAConfig, batch_size: int) -> None:
        self.config = config
        self.batch_size = batch_size
        self.num_tokens: Tensor | None = None
        self.slc: PackedRows | None = None
        self.win: PackedRows | None = None
        self.cmp: PackedRows | None = None
        self.tail: PackedRows | None = None

    def lengths(self, cu_seqlens: Tensor) -> Tensor:
        """Tokens cached of each sequence, int64 ``[B]``, on the device of ``cu_seqlens``."""
        batch = cu_seqlens.shape[0] - 1
        check(
            batch == self.batch_size,
            "NSACache",
            "cu_seqlens",
            f"describe {self.batch_size} sequences",
            batch,
        )
        if self.num_tokens is None:
            self.num_tokens = torch.zeros(batch, dtype=torch.int64, device=cu_seqlens.device)
        return self.num_tokens

    @torch.no_grad()
    def attend(self, inputs: AttentionInputs, *, rope: Rope, cu_seqlens_q: Tensor) -> Tensor:
        """Take in new tokens, without gradients, and return their attention output ``[T, Hq, Dv]``.

        Inputs as of ``native_sparse_attention``. One call serves prefill, chunks of a prompt and
        single steps: any number of tokens for each sequence.
        """
        config = self.config
        # All that can be wrong is checked before anything is taken in: a refused call leaves the
        # cache as it was.
        check_cu_seqlens_contents("NSACache", "cu_seqlens", cu_seqlens_q, inputs.q.shape[0])
        before = self.lengths(cu_seqlens_q)
        self.num_tokens = before + lengths(cu_seqlens_q)
        cu_seqlens_k = torch.cat((before.new_zeros(1), self.num_tokens.cumsum(0))).int()
        k_cmp = v_cmp = None
        if config.scores_blocks:
            cmp = self._compress(inputs, rope, cu_seqlens_q, before)
            k_cmp, v_cmp = cmp.key, cmp.value
        call = window = _call(config, cu_seqlens_q, cu_seqlens_k)
        if "slc" in config.branches:
            assert inputs.k_slc is not None and inputs.v_slc is not None
            self.slc = _append(self.slc, inputs.k_slc, inputs.v_slc, cu_seqlens_q)
            inputs = inputs._replace(k_slc=self.slc.key, v_slc=self.slc.value)
        if "win" in config.branches:
            assert inputs.k_win is not None and inputs.v_win is not None
            tokens = _append(self.win, inputs.k_win, inputs.v_win, cu_seqlens_q)
            inputs = inputs._replace(k_win=tokens.key, v_win=tokens.value)
            # Keys that left the window shift all positions alike, which the window does not see.
            window = _call(config, cu_seqlens_q, tokens.cu_seqlens)
            self.win = tokens.last(lengths(tokens.cu_seqlens).clamp(max=config.window_size))
        backend = choose_backend("NSACache", "auto", inputs.q)
        branches = branch_inputs(inputs, config, k_cmp, v_cmp)
        return attention_by_branch(branches, call, backend, window).out

    def _compress(
        self, inputs: AttentionInputs, rope: Rope, cu_seqlens: Tensor, before: Tensor
    ) -> PackedRows:
        """All compressed blocks, with those that the new tokens complete.

        The raw tokens that the next block needs are kept.
        """
        config = self.config
        assert inputs.k_cmp_raw is not None
        waiting = _append(self.tail, inputs.k_cmp_raw, inputs.v_cmp_raw, cu_seqlens)
        phi_k, phi_v = (None, None) if inputs.phi is None else inputs.phi
        cu_new = compressed_cu_seqlens(waiting.cu_seqlens, config)
        key, _ = compress(waiting.key, phi_k, config, waiting.cu_seqlens)
        if config.compress_rope != "none":
            # The waiting tokens start where the next block starts, not at position 0.
            sequence, _, _ = locate(key.shape[0], cu_new)
            first = num_compressed(before, config)[sequence] * config.compress_stride
            key = apply_rope(
                key, first + compressed_positions(config, waiting.cu_seqlens, key.shape[0]), rope
            )
        value = None
        if waiting.value is not None:
            value, _ = compress(waiting.value, phi_v, config, waiting.cu_seqlens)
        num_new = int(cu_new[-1])
        self.cmp = _append(
            self.cmp, key[:num_new], None if value is None else value[:num_new], cu_new
        )
        self.tail = waiting.last(
            lengths(waiting.cu_seqlens) - lengths(cu_new) * config.compress_stride
        )
        return self.cmp


def _call(config: NSAConfig, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Call:
    offsets = (cu_seqlens_q, cu_seqlens_k)
    len_q, len_k = (int(lengths(cu).max()) for cu in offsets)
    where = Sequences(offsets, cu_seqlens_q.shape[0] - 1, len_q, len_k, cu_seqlens_q.device)
    return Call(config, where, config.head_dim**-0.5)


def _append(
    rows: PackedRows | None, key: Tensor, value: Tensor | None, cu_seqlens: Tensor
) -> PackedRows:
    if rows is None:
        return PackedRows(key.detach(), None if value is None else value.detach(), cu_seqlens)
    return rows.append(key, value, cu_seqlens)


class NSACache:
    """Decode cache of a model: one :class:`LayerCache` a layer.

    Args:
        config: the sparse pattern.
        num_layers: layers of the model.
        batch_size: sequences decoded together; their lengths may differ.

    Raises:
        ValueError: a number is not positive.
    """

    def __init__(self, config: NSAConfig, num_layers: int, batch_size: int = 1) -> None:
        check(num_layers > 0, "NSACache", "num_layers", "be positive", num_layers)
        check(batch_size > 0, "NSACache", "batch_size", "be positive", batch_size)
        self.layers = [
            LayerCache(config.for_layer(layer), batch_size) for layer in range(num_layers)
        ]
