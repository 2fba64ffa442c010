"""New tokens of a cache, any number for each sequence, by the operators of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from nsa.attention import AttentionInputs, branch_inputs
from nsa.config import NSAConfig
from nsa.ops._operator import Call
from nsa.ops._packed import locate
from nsa.ops._sequences import Sequences
from nsa.ops.attention import attention_by_branch, run_attention
from nsa.ops.compression import compress
from nsa.ops.compression.reference import rotated_place
from nsa.ops.decode.tensors import CacheTensors, NewTokens
from nsa.rope import Rope, apply_rope


@dataclass
class Step:
    """New tokens on their way through the layers.

    Attributes:
        sequences: where they lie.
        before: tokens of each sequence that were cached before.
        counts: new tokens of each sequence.
        taken: layers that have taken them in.
    """

    sequences: Sequences
    before: list[int]
    counts: list[int]
    taken: set[int]

    @property
    def after(self) -> list[int]:
        """Tokens of each sequence with the new ones."""
        return [n + count for n, count in zip(self.before, self.counts, strict=True)]


def new_tokens(inputs: AttentionInputs, tensors: CacheTensors) -> NewTokens:
    """What goes into the cache; nothing of a branch that is off."""
    x, kept = inputs, tensors[: len(NewTokens._fields)]
    given = (x.k_slc, x.v_slc, x.k_win, x.v_win, x.k_cmp_raw, x.v_cmp_raw)
    pairs = zip(given, kept, strict=True)
    return NewTokens(*(None if held is None else new for new, held in pairs))


class Chunk:
    """Any number of new tokens for each sequence, by the operators of training.

    Args:
        config: the sparse pattern of the layer.
        tensors: the layer's memory.
        step: the new tokens.
        backend: ``reference`` or ``triton``.
    """

    def __init__(self, config: NSAConfig, tensors: CacheTensors, step: Step, backend: str) -> None:
        self.config, self.tensors, self.backend = config, tensors, backend
        # Without a past the caller's own description serves; it may be that of a dense batch.
        self.alone = None if any(step.before) else step.sequences
        self.before, self.counts, self.after = step.before, step.counts, step.after
        self.device = tensors.table.device
        self.cu_new = self._offsets(self.counts)
        self.sequence, row, _ = locate(sum(self.counts), self.cu_new)
        self.position = row + self._numbers(self.before)[self.sequence]

    def attend(
        self, inputs: AttentionInputs, rope: Rope, alone: Callable[[], Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of the new tokens, which are written to the cache, and the selected blocks.

        See :meth:`nsa.LayerCache.attend`.
        """
        config, tensors = self.config, self.tensors
        new = new_tokens(inputs, tensors)
        k_cmp = v_cmp = None
        if config.scores_blocks:
            k_cmp, v_cmp = self._compress(new, inputs, rope)
        call = window = self._call(self.after)
        if tensors.k_slc is not None:
            page = self.config.block_size
            self._write(tensors.k_slc, new.k_slc, page, self.sequence, self.position)
            self._write(tensors.v_slc, new.v_slc, page, self.sequence, self.position)
            inputs = inputs._replace(
                k_slc=self._all(tensors.k_slc, new.k_slc, page, self.after),
                v_slc=self._all(tensors.v_slc, new.v_slc, page, self.after),
            )
        if tensors.k_win is not None:
            kept = [min(n, config.window_size - 1) for n in self.before]
            inputs = inputs._replace(
                k_win=self._behind(tensors.k_win, new.k_win, kept),
                v_win=self._behind(tensors.v_win, new.v_win, kept),
            )
            # Keys that left the window shift all positions alike, which the window does not see.
            window = self._call(self._with_new(kept))
        if self.alone is not None and alone is not None:
            out, ids = alone(), None
        else:
            branches = branch_inputs(inputs, config, k_cmp, v_cmp)
            if self.alone is None:
                result = attention_by_branch(branches, call, self.backend, window)
            else:
                result = run_attention(branches, call, self.backend)
            out, ids = result.out, result.block_indices
        # Last, since they forget what they held: a call that has failed may be made again.
        for name in NewTokens._fields:
            if not name.endswith("slc") and getattr(tensors, name) is not None:
                self._write_ring(getattr(tensors, name), getattr(new, name))
        return out, ids

    def _compress(
        self, new: NewTokens, inputs: AttentionInputs, rope: Rope
    ) -> tuple[Tensor, Tensor | None]:
        """All compressed blocks, with those that the new tokens complete."""
        config, tensors = self.config, self.tensors
        stride = config.compress_stride
        overlap = config.compress_block_size // stride
        done, complete = (
            [max(n // stride - overlap + 1, 0) for n in lengths]
            for lengths in (self.before, self.after)
        )
        # The tokens from the start of the next block on.
        kept = [n - c * stride for n, c in zip(self.before, done, strict=True)]
        cu = self._offsets(self._with_new(kept))
        cu_blocks = self._offsets([b - a for a, b in zip(done, complete, strict=True)])
        sequence, row, _ = locate(sum(complete) - sum(done), cu_blocks)
        block = row + self._numbers(done)[sequence]
        per_page = config.block_size // stride
        results = list[Tensor | None]()
        for name, phi in zip("kv", inputs.phi or (None, None), strict=True):
            raw, pool = getattr(tensors, f"{name}_raw"), getattr(tensors, f"{name}_cmp")
            x: Tensor | None = getattr(new, f"{name}_raw")
            if x is None or raw is None:
                results.append(None)
                continue
            y, _ = compress(self._behind(raw, x, kept), phi, config, cu, backend=self.backend)
            y = y[: block.shape[0]]
            if name == "k" and config.compress_rope != "none":
                y = apply_rope(y, block * stride + rotated_place(config), rope)
            self._write(pool, y, per_page, sequence, block + overlap - 1)
            results.append(self._all(pool, y, per_page, complete, overlap - 1))
        assert results[0] is not None
        return results[0], results[1]

    def _call(self, lengths: Sequence[int]) -> Call:
        """The new queries at the end of ``lengths[b]`` keys of each sequence b."""
        where = self.alone
        if where is None:
            offsets = (self.cu_new, self._offsets(lengths))
            most = (max(self.counts), max(lengths))
            where = Sequences(offsets, len(self.counts), *most, self.device)
        where = where.with_blocks(self.config) if self.config.scores_blocks else where
        return Call(self.config, where, self.config.head_dim**-0.5)

    def _with_new(self, kept: Sequence[int]) -> list[int]:
        return [n + count for n, count in zip(kept, self.counts, strict=True)]

    def _numbers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=self.device)

    def _offsets(self, values: Sequence[int]) -> Tensor:
        return torch.tensor([0, *accumulate(values)], dtype=torch.int32, device=self.device)

    def _slots(self, per_page: int, sequence: Tensor, row: Tensor) -> Tensor:
        """Where rows of sequences lie in a pool."""
        page = self.tensors.table[sequence, row // per_page]
        return page.long() * per_page + row % per_page

    def _write(
        self, pool: Tensor | None, x: Tensor | None, per_page: int, sequence: Tensor, row: Tensor
    ) -> None:
        """Write rows of sequences to their pages."""
        assert pool is not None and x is not None
        pool[self._slots(per_page, sequence, row)] = x

    def _all(
        self,
        pool: Tensor | None,
        new: Tensor | None,
        per_page: int,
        counts: Sequence[int],
        shift: int = 0,
    ) -> Tensor:
        """The first ``counts[b]`` rows of each sequence b, packed; ``new`` if those are all."""
        assert pool is not None and new is not None
        if new.shape[0] == sum(counts):
            return new
        sequence, row, _ = locate(sum(counts), self._offsets(counts))
        return pool[self._slots(per_page, sequence, row + shift)]

    def _behind(self, ring: Tensor | None, new: Tensor | None, kept: Sequence[int]) -> Tensor:
        """The new rows of each sequence behind the last ``kept[b]`` of its ring, packed."""
        assert ring is not None and new is not None
        if not any(kept):
            return new
        rows = ring.shape[0] // len(kept)
        counts = self._with_new(kept)
        sequence, row, _ = locate(sum(counts), self._offsets(counts))
        old = self._numbers(kept)[sequence]
        position = row - old + self._numbers(self.before)[sequence]
        from_new = ring.shape[0] + self.cu_new.long()[sequence] + row - old
        source = torch.where(row < old, sequence * rows + position % rows, from_new)
        return torch.cat((ring, new))[source]

    def _write_ring(self, ring: Tensor | None, new: Tensor | None) -> None:
        """Write the last new rows of each sequence to its ring."""
        assert ring is not None and new is not None
        rows = ring.shape[0] // len(self.counts)
        last = [min(count, rows) for count in self.counts]
        sequence, row, _ = locate(sum(last), self._offsets(last))
        behind = self._numbers(last)[sequence] - row  # 1 for the last
        position = self._numbers(self.after)[sequence] - behind
        ring[sequence * rows + position % rows] = new[self.cu_new.long()[sequence + 1] - behind]
