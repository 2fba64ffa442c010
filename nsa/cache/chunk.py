"""Append any number of new tokens per sequence to a cache, with the training operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nsa.attention import AttentionInputs, branch_inputs
from nsa.cache.places import Places
from nsa.config import NSAConfig
from nsa.ops._operator import Call
from nsa.ops._sequences import Sequences, block_sizes
from nsa.ops.attention import attention_by_branch, run_attention
from nsa.ops.compression import Raw, run_compress
from nsa.ops.decode import CacheTensors, NewTokens
from nsa.rope import Rope


@dataclass
class Step:
    """State of one step while the layers process its new tokens.

    Attributes:
        sequences: the sequences of the new tokens.
        before: tokens of each sequence cached before the step.
        counts: new tokens of each sequence.
        taken: layers that have finished the step.
        places: cache index tensors by device and block sizes, if the training operators are used.
    """

    sequences: Sequences
    before: list[int]
    counts: list[int]
    taken: set[int]
    places: dict[tuple[Any, ...], Places] = field(default_factory=dict)

    @property
    def after(self) -> list[int]:
        """Length of each sequence after the step."""
        return [n + count for n, count in zip(self.before, self.counts, strict=True)]


def new_tokens(inputs: AttentionInputs, tensors: CacheTensors) -> NewTokens:
    """Inputs that the cache stores; None for a disabled branch."""
    x, kept = inputs, tensors[: len(NewTokens._fields)]
    given = (x.k_slc, x.v_slc, x.k_win, x.v_win, x.k_cmp_raw, x.v_cmp_raw, x.k_idx)
    pairs = zip(given, kept, strict=True)
    return NewTokens(*(None if held is None else new for new, held in pairs))


class Chunk:
    """Any number of new tokens per sequence, computed with the training operators.

    Args:
        config: the sparse pattern of the layer.
        tensors: the layer's memory.
        step: the new tokens.
        sequences: their sequences, on the layer's device.
        backend: ``reference`` or ``triton``.
    """

    def __init__(
        self,
        config: NSAConfig,
        tensors: CacheTensors,
        step: Step,
        sequences: Sequences,
        backend: str,
    ) -> None:
        self.config, self.tensors, self.backend = config, tensors, backend
        table = tensors.table
        sizes = (config.block_size, *block_sizes(config), config.compresses_keys)
        if (key := (table.device, *sizes)) not in step.places:
            # Without cached tokens use the caller's sequences, which may be a dense batch.
            alone = None if any(step.before) else sequences
            step.places[key] = Places(config, table, step.before, step.counts, alone)
        self.places = step.places[key]
        self._new: NewTokens
        # Writes to pools that are deferred until after attention.
        self._later = list[tuple[Tensor, Tensor, Callable[[], Tensor]]]()

    def attend(
        self, inputs: AttentionInputs, rope: Rope, alone: Callable[[], Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        """Write the new tokens to pages; return their attention output and block indices.

        Cached tokens are not overwritten before :meth:`write_rings`, so a call that raised can be
        repeated. See :meth:`nsa.LayerCache.attend`.
        """
        config, tensors, places = self.config, self.tensors, self.places
        inputs, k_cmp, v_cmp = self._take(inputs, rope)
        new = self._new
        call = window = self._call(places.after)
        if tensors.k_win is not None:
            kept = [min(n, config.window_size - 1) for n in places.before]
            inputs = inputs._replace(
                k_win=self._behind(tensors.k_win, new.k_win, kept),
                v_win=self._behind(tensors.v_win, new.v_win, kept),
            )
            # Omitting keys before the window shifts all positions equally, without effect.
            window = self._call(places.with_new(kept))
        if places.sequences is not None and alone is not None:
            out, ids = alone(), None
        else:
            branches = branch_inputs(inputs, config, k_cmp, v_cmp)
            if places.sequences is None:
                result = attention_by_branch(branches, call, self.backend, window)
            else:
                result = run_attention(branches, call, self.backend)
            out, ids = result.out, result.block_indices
        # After attention, so that the GPU is busy while the host prepares the writes.
        self._write_later()
        return out, ids

    def write(self, inputs: AttentionInputs, rope: Rope) -> None:
        """Write the new tokens to pages, as :meth:`attend` does."""
        self._take(inputs, rope)
        self._write_later()

    def write_rings(self) -> None:
        """Write the last new tokens to the rings, over older ones."""
        for name in NewTokens._fields:
            if name.endswith(("win", "raw")) and getattr(self.tensors, name) is not None:
                self._write_ring(getattr(self.tensors, name), getattr(self._new, name))

    def _take(
        self, inputs: AttentionInputs, rope: Rope
    ) -> tuple[AttentionInputs, Tensor | None, Tensor | None]:
        """Inputs with keys and values of all tokens, except the window's; compressed ones."""
        tensors, places = self.tensors, self.places
        new = self._new = new_tokens(inputs, tensors)
        k_cmp = v_cmp = None
        if self.config.compresses_keys:
            k_cmp, v_cmp = self._compress(new, inputs, rope)
        of_tokens = dict[str, Any]()
        for name in ("k_slc", "v_slc", "k_idx"):
            if (pool := getattr(tensors, name)) is not None:
                rest = (lambda: places.new, places.all_tokens)
                of_tokens[name] = self._with_past(pool, getattr(new, name), *rest)
        return inputs._replace(**of_tokens), k_cmp, v_cmp

    def _write_later(self) -> None:
        for pool, x, slots in self._later:
            _put(pool, slots(), x)

    def _call(self, lengths: Sequence[int]) -> Call:
        """Call for the new queries, which are the last of ``lengths[b]`` keys in sequence b."""
        config = self.config
        return Call(config, self.places.queries(lengths), config.head_dim**-0.5)

    def _compress(
        self, new: NewTokens, inputs: AttentionInputs, rope: Rope
    ) -> tuple[Tensor, Tensor | None]:
        """All compressed keys and values, including blocks that the new tokens complete."""
        config, tensors, places = self.config, self.tensors, self.places
        rotation = None if config.compress_rope == "none" else rope
        phi_k, phi_v = inputs.phi or (None, None)
        given = [
            (tensors.k_raw, new.k_raw, phi_k, rotation),
            (tensors.v_raw, new.v_raw, phi_v, None),
        ]
        raw = [
            Raw(self._behind(ring, x, places.unfinished), phi, turned)
            for ring, x, phi, turned in given
            if x is not None and ring is not None
        ]
        where = places.unfinished_and_new
        found = run_compress(raw, config, where, self.backend, places.starts)
        k_cmp, *v_cmp = (
            self._with_past(
                pool, y[: places.num_new_blocks], lambda: places.new_blocks, places.all_blocks
            )
            for pool, y in zip((tensors.k_cmp, tensors.v_cmp), found, strict=False)
        )
        return k_cmp, v_cmp[0] if v_cmp else None

    def _with_past(
        self,
        pool: Tensor | None,
        new: Tensor | None,
        slots: Callable[[], Tensor],
        everything: Tensor | slice | None,
    ) -> Tensor:
        """Write new rows to their pages (deferred if there are no older rows); return all rows."""
        assert pool is not None and new is not None
        if everything is None:
            self._later.append((pool, new, slots))
            return new
        _put(pool, slots(), new)
        return pool[everything]

    def _behind(self, ring: Tensor | None, new: Tensor | None, kept: Sequence[int]) -> Tensor:
        """Last ``kept[b]`` rows of each sequence's ring followed by its new rows, packed."""
        assert ring is not None and new is not None
        source = self.places.behind(ring.shape[0] // len(kept), kept)
        return new if source is None else torch.cat((ring, new))[source]

    def _write_ring(self, ring: Tensor, new: Tensor) -> None:
        """Write the last new rows of each sequence to its ring."""
        slots, source = self.places.last(ring.shape[0] // len(self.places.counts))
        _put(ring, slots, new[source])


def _put(target: Tensor, rows: Tensor, new: Tensor) -> None:
    """``target[rows] = new``, with 8-byte elements if the layout allows it."""
    size = target.element_size()
    is_whole = target.shape[-1] * size % 8 == 0 == new.storage_offset() * size % 8
    if is_whole and new.is_contiguous() and new.stride(-1) == 1:  # empty: any stride
        target, new = target.view(torch.int64), new.view(torch.int64)
    target[rows] = new
