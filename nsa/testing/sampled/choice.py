"""Sampled rows of the choice of blocks, and the rule by which two implementations agree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

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
from nsa.testing.sampled.gate import offsets_on_host

# Relative distance from the n-th best score within which implementations may differ.
BOUND = 1e-5


@dataclass(frozen=True)
class Agreement:
    """How a choice compares with fp64, over queries by KV heads.

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
class _Scores:
    """fp64 scores of some rows of one sequence: positions ``[R]``, scores ``[R, Hkv, M]``, and what the first stage kept."""

    positions: Tensor
    scores: Tensor
    coarse: Tensor | None
    coarse_unsure: Tensor


@dataclass(frozen=True)
class SampledChoice:
    """The choice of blocks over packed sequences, whose fp64 values can be had row by row.

    Attributes:
        q, k_cmp: packed ``[T, Hq, D]`` and ``[C, Hkv, D]``, as stored: both implementations must
            see the same keys.
        config: the sparse pattern, options of the choice included.
        cu_q, cu_k: offsets of queries and key tokens on the host.
        scale: factor on the scores.
    """

    q: Tensor
    k_cmp: Tensor
    config: NSAConfig
    cu_q: list[int]
    cu_k: list[int]
    scale: float

    @torch.no_grad()
    def at_queries(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The fp64 choice of the packed ``rows``, int32 ``[R, Hkv, n]``, and whether it is clear, bool ``[R, Hkv]``.

        It is clear when no block within ``BOUND`` of the n-th best score was left out.
        """
        shape = (rows.numel(), self.k_cmp.shape[1])
        indices = torch.empty(
            *shape, self.config.num_selected_blocks, dtype=torch.int32, device=rows.device
        )
        clear = torch.empty(shape, dtype=torch.bool, device=rows.device)
        for part, found in self._parts(rows):
            chosen = self._chosen(found)
            nth = self._nth_best(found, chosen)
            others = found.scores.masked_fill(chosen | ~self._candidates(found), -torch.inf).amax(
                -1
            )
            indices[part] = choose_blocks(found.scores, found.positions, self.config, found.coarse)
            clear[part] = ((others < nth * (1 - BOUND)) | nth.isinf()) & ~found.coarse_unsure
        return indices, clear

    @torch.no_grad()
    def agreement(self, rows: Tensor, block_indices: Tensor) -> Agreement:
        """Compare the ``rows`` of ``block_indices`` ``[T, Hkv, n]``.

        Raises:
            AssertionError: ids do not ascend, repeat, lie outside ``0 .. t // l'``, or are not
                padded with -1 at the end.
        """
        near = against = 0
        for part, found in self._parts(rows):
            ids = block_indices[rows[part]].long()
            current = (found.positions // self.config.block_size)[:, None, None]
            follows = torch.where(
                ids[..., 1:] < 0, ids[..., 1:] == -1, ids[..., 1:] > ids[..., :-1]
            )
            follows &= (ids[..., :-1] >= 0) | (ids[..., 1:] < 0)
            assert bool(follows.all()), (
                "block_indices do not ascend, or are not padded with -1 at the end"
            )
            assert bool(((ids >= -1) & (ids <= current)).all()), (
                "block_indices hold a block outside 0 .. t // l'"
            )
            num_blocks = found.scores.shape[-1]
            actual = found.scores.new_zeros(*ids.shape[:2], num_blocks + 1, dtype=torch.bool)
            actual = actual.scatter(-1, torch.where(ids < 0, num_blocks, ids), True)[
                ..., :num_blocks
            ]
            chosen = self._chosen(found)
            nth = self._nth_best(found, chosen)[..., None]
            different = actual != chosen
            close = (
                nth.isfinite() & ~self._forced(found) & ((found.scores - nth).abs() <= BOUND * nth)
            )
            far = different & ~close
            wrong = far.any(-1) & ~found.coarse_unsure
            against += int(wrong.sum())
            near += int((different.any(-1) & ~wrong).sum())
        return Agreement(rows.numel() * self.k_cmp.shape[1], near, against)

    def _parts(self, rows: Tensor) -> Iterator[tuple[Tensor, _Scores]]:
        cu_cmp = compressed_cu_seqlens(torch.tensor(self.cu_k), self.config).tolist()
        coarse, cu_coarse = self._coarse_keys()
        sequence_of = torch.bucketize(
            rows, torch.tensor(self.cu_q[1:], device=rows.device), right=True
        )
        for sequence in sequence_of.unique().tolist():
            first, end = cu_cmp[sequence : sequence + 2]
            keys = self.k_cmp[first:end]
            means = (
                None if coarse is None else coarse[cu_coarse[sequence] : cu_coarse[sequence + 1]]
            )
            size = max(PART_ELEMENTS // (6 * self.q.shape[1] * max(end - first, 1)), 1)
            for part in (sequence_of == sequence).nonzero()[:, 0].split(size):
                yield part, self._scores(sequence, rows[part], keys, means)

    def _coarse_keys(self) -> tuple[Tensor | None, list[int]]:
        if self.config.coarse_block_size is None:
            return None, []
        cu_k = torch.tensor(self.cu_k, dtype=torch.int32, device=self.q.device)
        sequences = Sequences((cu_k, cu_k), len(self.cu_k) - 1, 0, 0, self.q.device)
        means, cu_coarse = coarse_keys(self.k_cmp, self.config, sequences)
        return means, cu_coarse.tolist()

    def _scores(self, sequence: int, rows: Tensor, keys: Tensor, means: Tensor | None) -> _Scores:
        config = self.config
        first_k, end_k = self.cu_k[sequence : sequence + 2]
        positions = rows - self.cu_q[sequence + 1] + end_k - first_k
        visible = CompressedKeys(config.compress_block_size, config.compress_stride).sees(
            rows, positions, torch.arange(keys.shape[0], device=rows.device)
        )[:, 0]
        q = self.q[rows]
        # [Hkv, G, R, C]
        exact = grouped_scores(q.double()[None], keys.double()[None], self.scale)[0]
        lse = exact.masked_fill(~visible, -torch.inf).logsumexp(-1, keepdim=True)
        if config.score_precision != "exact":
            q, keys = (rounded_for_scores(x, config) for x in (q, keys))
            exact = grouped_scores(q.double()[None], keys.double()[None], self.scale)[0]
        # [R, Hkv, C]
        group = torch.where(visible, torch.exp(exact - lse), 0.0).sum(1).transpose(0, 1)
        scores = spread(group, max(-(-(end_k - first_k) // config.block_size), 1), config)
        unsure = torch.zeros(scores.shape[:2], dtype=torch.bool, device=rows.device)
        if means is None:
            return _Scores(positions, scores, None, unsure)
        assert config.coarse_block_size is not None
        shares = torch.exp(
            grouped_scores(self.q[rows].double()[None], means.double()[None], self.scale)[0] - lse
        )
        shares = shares.sum(1).transpose(0, 1)  # [R, Hkv, complete coarse blocks]
        num_coarse = max(-(-(end_k - first_k) // config.coarse_block_size), 1)
        shares = torch.nn.functional.pad(shares, (0, num_coarse - shares.shape[-1]))
        ranked = ranked_coarse(shares, positions, config)
        kept = kept_coarse(ranked, config)
        lowest, highest = (
            ranked.masked_fill(~kept, torch.inf).amin(-1),
            ranked.masked_fill(kept, -torch.inf).amax(-1),
        )
        return _Scores(positions, scores, kept, highest >= lowest * (1 - BOUND))

    def _candidates(self, found: _Scores) -> Tensor:
        """Blocks that the first stage kept, or all up to the query's own; the forced ones are always chosen."""
        block = torch.arange(found.scores.shape[-1], device=found.scores.device)
        candidate = (block <= (found.positions // self.config.block_size)[:, None, None]).expand(
            found.scores.shape
        )
        if found.coarse is None:
            return candidate
        assert self.config.coarse_block_size is not None
        return (
            candidate
            & found.coarse[..., block * self.config.block_size // self.config.coarse_block_size]
        )

    def _chosen(self, found: _Scores) -> Tensor:
        """The fp64 choice as bool ``[R, Hkv, M]``."""
        ids = choose_blocks(found.scores, found.positions, self.config, found.coarse).long()
        num_blocks = found.scores.shape[-1]
        marked = torch.zeros(*ids.shape[:2], num_blocks + 1, dtype=torch.bool, device=ids.device)
        return marked.scatter(-1, torch.where(ids < 0, num_blocks, ids), True)[..., :num_blocks]

    def _nth_best(self, found: _Scores, chosen: Tensor) -> Tensor:
        """The lowest score that won a free place, ``[R, Hkv]``; inf where there was none."""
        return found.scores.masked_fill(~chosen | self._forced(found), torch.inf).amin(-1)

    def _forced(self, found: _Scores) -> Tensor:
        block = torch.arange(found.scores.shape[-1], device=found.scores.device)
        current = (found.positions // self.config.block_size)[:, None, None]
        return (block < self.config.num_init_blocks) | (
            block > current - self.config.num_local_blocks
        )


def sampled_choice(
    q: Tensor, k_cmp: Tensor, config: NSAConfig, *, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    softmax_scale: float | None = None,
) -> SampledChoice:  # fmt: skip
    """Sampled rows of :func:`nsa.select_blocks` over packed tensors; without offsets there are as many keys as queries."""
    cu_q, cu_k = offsets_on_host(cu_seqlens_q, cu_seqlens_k, q.shape[0], q.shape[0])
    return SampledChoice(
        q,
        k_cmp,
        config,
        cu_q,
        cu_k,
        config.head_dim**-0.5 if softmax_scale is None else softmax_scale,
    )
