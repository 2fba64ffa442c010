"""Sampled rows of the selection, and the rule by which two implementations agree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa.config import NSAConfig
from nsa.ops._masked_attention import grouped_scores
from nsa.ops._packed import compressed_cu_seqlens
from nsa.ops._sequences import Sequences
from nsa.ops.selection.reference import (
    choose_blocks,
    coarse_keys,
    kept_coarse,
    ranked_coarse,
    rounded_for_scores,
    spread,
)
from nsa.testing.sampled.attention import PART_ELEMENTS, CompressedKeys
from nsa.testing.sampled.gate import Offsets

# Relative distance from the n-th best score within which implementations may differ.
BOUND = 1e-5


def assert_legal(block_indices: Tensor, positions: Tensor, config: NSAConfig) -> None:
    """Fail unless ids ascend, end in -1 where there are fewer, and lie in ``0 .. t // l'``.

    Args:
        block_indices: ``[..., R, Hkv, n]``.
        positions: of the queries, ``[R]``.
        config: the sparse pattern.
    """
    before, after = block_indices[..., :-1], block_indices[..., 1:]
    follows = torch.where(after < 0, after == -1, (after > before) & (before >= 0))
    assert bool(follows.all()), "block_indices: not ascending with -1 at the end"
    current = (positions // config.block_size)[:, None, None]
    inside = (block_indices >= -1) & (block_indices <= current)
    assert bool(inside.all()), "block_indices: a block outside 0 .. t // l'"


@dataclass(frozen=True)
class Agreement:
    """How a selection compares with fp64, over queries by KV heads.

    Attributes:
        rows: how many were compared.
        near: of them, those that differ only in blocks whose fp64 score is within ``BOUND`` of the
            n-th best: left out.
        against: of them, those that differ in another block.
    """

    rows: int
    near: int
    against: int


@dataclass(frozen=True)
class _Part:
    """The fp64 selection of some rows of one sequence; M blocks.

    Attributes:
        places: in the sampled rows.
        positions: ``[R]``.
        scores: ``[R, Hkv, M]``.
        candidates: bool ``[R, Hkv, M]``, those that the first stage kept, or all up to the query's
            own; the forced ones are always selected.
        indices: int32 ``[R, Hkv, n]``.
        selected: bool ``[R, Hkv, M]``.
        forced: bool ``[R, 1, M]``.
        nth_best: the lowest score that won a free place, ``[R, Hkv, 1]``; inf where there was none.
        unsure: bool ``[R, Hkv]``, where rounding decides between two blocks of the first stage.
    """

    places: Tensor
    positions: Tensor
    scores: Tensor
    candidates: Tensor
    indices: Tensor
    selected: Tensor
    forced: Tensor
    nth_best: Tensor
    unsure: Tensor


@dataclass(frozen=True)
class SampledSelection:
    """The selection over packed sequences, computed in fp64 row by row.

    Attributes:
        q, k_cmp: packed ``[T, Hq, D]`` and ``[C, Hkv, D]``, as stored: both implementations must
            see the same keys.
        config: the sparse pattern, options of the selection included.
        offsets: of queries and key tokens.
        scale: factor on the scores.
    """

    q: Tensor
    k_cmp: Tensor
    config: NSAConfig
    offsets: Offsets
    scale: float

    @torch.no_grad()
    def at_queries(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The fp64 selection of the packed ``rows``.

        Returns:
            Block indices, int32 ``[R, Hkv, n]``, and whether they are clear, bool ``[R, Hkv]``: no
            block within ``BOUND`` of the n-th best score was left out.
        """
        shape = (rows.numel(), self.k_cmp.shape[1])
        indices = rows.new_empty(*shape, self.config.num_selected_blocks, dtype=torch.int32)
        clear = rows.new_empty(shape, dtype=torch.bool)
        for part in self._parts(rows):
            left_out = part.candidates & ~part.selected
            best = part.scores.masked_fill(~left_out, -torch.inf).amax(-1)
            nth_best = part.nth_best[..., 0]
            indices[part.places] = part.indices
            sure = (best < nth_best * (1 - BOUND)) | nth_best.isinf()
            clear[part.places] = sure & ~part.unsure
        return indices, clear

    @torch.no_grad()
    def agreement(self, rows: Tensor, block_indices: Tensor) -> Agreement:
        """Compare the ``rows`` of ``block_indices`` ``[T, Hkv, n]``.

        Raises:
            AssertionError: the ids are not legal, see :func:`assert_legal`.
        """
        near = against = 0
        for part in self._parts(rows):
            ids = block_indices[rows[part.places]].long()
            assert_legal(ids, part.positions, self.config)
            different = _marked(ids, part.scores.shape[-1]) != part.selected
            distance = (part.scores - part.nth_best).abs()
            close = distance <= BOUND * part.nth_best
            close &= part.nth_best.isfinite() & ~part.forced
            wrong = (different & ~close).any(-1) & ~part.unsure
            against += int(wrong.sum())
            near += int((different.any(-1) & ~wrong).sum())
        return Agreement(rows.numel() * self.k_cmp.shape[1], near, against)

    def _parts(self, rows: Tensor) -> Iterator[_Part]:
        cu_cmp = compressed_cu_seqlens(torch.tensor(self.offsets.k), self.config).tolist()
        coarse, cu_coarse = self._coarse_keys()

        def size_of(sequence: int) -> int:
            num_keys = cu_cmp[sequence + 1] - cu_cmp[sequence]
            return PART_ELEMENTS // (6 * self.q.shape[1] * max(num_keys, 1))

        for sequence, places in self.offsets.parts(rows, size_of):
            keys = self.k_cmp[slice(*cu_cmp[sequence : sequence + 2])]
            means = None
            if coarse is not None:
                means = coarse[slice(*cu_coarse[sequence : sequence + 2])]
            yield self._part(sequence, places, rows[places], keys, means)

    def _coarse_keys(self) -> tuple[Tensor | None, list[int]]:
        if self.config.coarse_block_size is None:
            return None, []
        cu_k = torch.tensor(self.offsets.k, dtype=torch.int32, device=self.q.device)
        sequences = Sequences((cu_k, cu_k), len(cu_k) - 1, 0, 0, self.q.device)
        means, cu_coarse = coarse_keys(self.k_cmp, self.config, sequences)
        return means, cu_coarse.tolist()

    def _part(
        self, sequence: int, places: Tensor, rows: Tensor, keys: Tensor, means: Tensor | None
    ) -> _Part:
        config, num_keys = self.config, self.offsets.k[sequence + 1] - self.offsets.k[sequence]
        positions = self.offsets.positions(sequence, rows)
        pattern = CompressedKeys(config.compress_block_size, config.compress_stride)
        index = torch.arange(keys.shape[0], device=rows.device)
        visible = pattern.sees(rows, positions, index)[:, 0]

        def logits(q: Tensor, k: Tensor) -> Tensor:  # [Hkv, G, R, C]
            return grouped_scores(q.double()[None], k.double()[None], self.scale)[0]

        q = self.q[rows]
        exact = logits(q, keys)
        lse = exact.masked_fill(~visible, -torch.inf).logsumexp(-1, keepdim=True)
        if config.score_precision != "exact":
            exact = logits(rounded_for_scores(q, config), rounded_for_scores(keys, config))
        group = torch.where(visible, torch.exp(exact - lse), 0.0).sum(1).transpose(0, 1)
        num_blocks = max(-(-num_keys // config.block_size), 1)
        scores = spread(group, num_blocks, config)  # [R, Hkv, M]
        current = (positions // config.block_size)[:, None, None]
        block = torch.arange(num_blocks, device=rows.device)
        candidates = (block <= current).expand(scores.shape)
        unsure, kept = scores.new_zeros(scores.shape[:2], dtype=torch.bool), None
        if means is not None:
            assert config.coarse_block_size is not None
            shares = torch.exp(logits(q, means) - lse).sum(1).transpose(0, 1)
            num_coarse = max(-(-num_keys // config.coarse_block_size), 1)
            shares = pad(shares, (0, num_coarse - shares.shape[-1]))
            ranked = ranked_coarse(shares, positions, config)  # [R, Hkv, coarse blocks]
            kept = kept_coarse(ranked, config)
            lowest = ranked.masked_fill(~kept, torch.inf).amin(-1)
            unsure = ranked.masked_fill(kept, -torch.inf).amax(-1) >= lowest * (1 - BOUND)
            coarse_of_block = block * config.block_size // config.coarse_block_size
            candidates = candidates & kept[..., coarse_of_block]
        indices = choose_blocks(scores, positions, config, kept)
        selected = _marked(indices.long(), num_blocks)
        forced = (block < config.num_init_blocks) | (block > current - config.num_local_blocks)
        nth_best = scores.masked_fill(~selected | forced, torch.inf).amin(-1, keepdim=True)
        return _Part(
            places, positions, scores, candidates, indices, selected, forced, nth_best, unsure
        )


def _marked(ids: Tensor, num_blocks: int) -> Tensor:
    """Block indices ``[R, Hkv, n]`` as bool ``[R, Hkv, M]``."""
    marked = ids.new_zeros(*ids.shape[:2], num_blocks + 1, dtype=torch.bool)
    return marked.scatter(-1, torch.where(ids < 0, num_blocks, ids), True)[..., :num_blocks]


def sampled_selection(
    q: Tensor,
    k_cmp: Tensor,
    config: NSAConfig,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    softmax_scale: float | None = None,
) -> SampledSelection:
    """Sampled rows of :func:`nsa.select_blocks` over packed tensors.

    Without offsets there are as many key tokens as queries.
    """
    offsets = Offsets.read(cu_seqlens_q, cu_seqlens_k, q.shape[0], q.shape[0])
    scale = config.head_dim**-0.5 if softmax_scale is None else softmax_scale
    return SampledSelection(q, k_cmp, config, offsets, scale)
