"""Shared by tests of operators: the small pattern, random tensors, comparison with the oracle."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nsa import NSAConfig
from nsa.config import BRANCHES
from tests import oracle

# The small pattern: truly sparse from 128 tokens on (n * l' = 64 <= S / 2 and w = 32 <= S / 4).
# Value heads differ from key heads. With this base the rotary frequencies are powers of two, so
# that fp32 angles are exact and fp64 comparisons mean fp64.
SMALL = NSAConfig(
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    value_dim=32,
    compress_block_size=8,
    compress_stride=4,
    block_size=16,
    num_selected_blocks=4,
    window_size=32,
    rope_theta=256.0,
)

# All sets of branches.
SUBSETS = [tuple(c) for size in (1, 2, 3) for c in itertools.combinations(BRANCHES, size)]

SHORT = (0, 1, 7, 8, 9, 15, 16, 17, 33)

# name: (key tokens, query tokens or None for as many); all but "short" contain a truly
# sparse sequence.
BATCHES: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    "one": ((257,), None),
    "edge": ((128,), None),
    "packed": ((130, 0, 1, 257, 8), None),
    "chunks": ((257, 160, 7, 64), (9, 130, 7, 0)),
    "steps": ((200, 131, 257), (1, 1, 1)),
    "short": (SHORT, None),
}


def small(**changes: Any) -> NSAConfig:
    """The small pattern with changes."""
    return dataclasses.replace(SMALL, **changes)


def offsets(lengths: Sequence[int]) -> Tensor:
    """cu_seqlens of these lengths."""
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sequences of one call, and random tensors over their tokens."""

    config: NSAConfig
    lengths_k: tuple[int, ...]
    lengths_q: tuple[int, ...]
    rng: np.random.Generator

    @property
    def kwargs(self) -> dict[str, Any]:
        return {"cu_seqlens_q": offsets(self.lengths_q), "cu_seqlens_k": offsets(self.lengths_k)}

    @property
    def num_cmp(self) -> list[int]:
        """Compressed blocks of each sequence."""
        return [
            oracle.num_compressed(n, self.config.compress_block_size, self.config.compress_stride)
            for n in self.lengths_k
        ]

    @property
    def slices(self) -> list[tuple[slice, slice, slice]]:
        """Query rows, key tokens and compressed rows of each sequence."""
        columns = [
            offsets(lengths).tolist() for lengths in (self.lengths_q, self.lengths_k, self.num_cmp)
        ]
        bounds = [[slice(a, b) for a, b in itertools.pairwise(c)] for c in columns]
        return list(zip(*bounds, strict=True))

    @property
    def positions(self) -> np.ndarray:
        """Position of each query row in its sequence."""
        pairs = zip(self.lengths_q, self.lengths_k, strict=True)
        return np.concatenate([np.arange(0), *(np.arange(s - t, s) for t, s in pairs)])

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.from_numpy(self.rng.standard_normal(shape) * scale)

    def q(self, scale: float = 1.5) -> Tensor:
        """Queries, somewhat peaked so that softmax is far from uniform."""
        return self.normal(
            sum(self.lengths_q), self.config.num_heads, self.config.head_dim, scale=scale
        )

    def k(self) -> Tensor:
        return self.normal(sum(self.lengths_k), self.config.num_kv_heads, self.config.head_dim)

    def index(self) -> tuple[Tensor, Tensor]:
        """Index queries and keys."""
        heads = self.config.scoring
        q = self.normal(sum(self.lengths_q), heads.num_heads, heads.head_dim, scale=1.5)
        return q, self.normal(sum(self.lengths_k), heads.num_kv_heads, heads.head_dim)

    def v(self) -> Tensor:
        return self.normal(sum(self.lengths_k), self.config.num_kv_heads, self.config.value_dim)

    def compressed(self, size: int) -> Tensor:
        """[S // d, Hkv, size]: real rows random, the others NaN, since they must not be read."""
        rows = self.normal(
            sum(self.lengths_k) // self.config.compress_stride, self.config.num_kv_heads, size
        )
        rows[sum(self.num_cmp) :] = torch.nan
        return rows

    def gates(self) -> Tensor:
        return torch.from_numpy(
            self.rng.uniform(size=(sum(self.lengths_q), self.config.num_heads, 3))
        )

    def block_indices(self, num_blocks: int | None = None) -> Tensor:
        """Unique ids in any order, about a quarter absent: negative, in the future, far outside."""
        n = self.config.num_selected_blocks if num_blocks is None else num_blocks
        rows = np.empty((len(self.positions), self.config.num_kv_heads, n), dtype=np.int32)
        for r, t in enumerate(self.positions):
            current = int(t) // self.config.block_size
            absent = [-1, -7, -(2**31), current + 1, current + 2, 10**6, 2**31 - 1]
            for g in range(self.config.num_kv_heads):
                present = self.rng.permutation(current + 1)[: self.rng.integers(0, n + 1)].tolist()
                filled = present + self.rng.choice(absent, n - len(present)).tolist()
                rows[r, g] = self.rng.permutation(filled)
        return torch.from_numpy(rows)


def make_batch(
    config: NSAConfig,
    lengths_k: Sequence[int],
    lengths_q: Sequence[int] | None = None,
    seed: int = 0,
) -> Batch:
    lengths_k = tuple(lengths_k)
    return Batch(
        config,
        lengths_k,
        lengths_k if lengths_q is None else tuple(lengths_q),
        np.random.default_rng(seed),
    )


def array(x: Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def near(actual: Tensor | None, expected: np.ndarray, tolerance: float = 1e-12) -> None:
    """Equal to the oracle but for rounding, with infinities at the same places and no NaN."""
    assert actual is not None
    assert tuple(actual.shape) == expected.shape
    finite = expected[np.isfinite(expected)]
    scale = max(1.0, float(np.abs(finite).max())) if finite.size else 1.0
    assert not bool(actual.isnan().any())
    np.testing.assert_allclose(array(actual), expected, rtol=0, atol=tolerance * scale)


def stack(batch: Batch, one: Callable[[slice, slice, slice], Any]) -> list[np.ndarray]:
    """The arrays that ``one`` returns for the slices of each sequence, joined along the tokens."""
    parts = [one(*slices) for slices in batch.slices]
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


def leaf(x: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """A copy that collects gradients."""
    return x.detach().to(dtype).clone().requires_grad_()


def grad(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def plain_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """A branch in the plainest PyTorch, in the dtype of its inputs, softmax statistics in fp32.

    ``visible`` is bool [T, Hkv, S]. The error of this is the budget of low-precision results. The
    division comes last, as in every attention that streams over keys: by torch.softmax the gradient
    of a row with one key would be 0 without rounding.
    """
    group = q.shape[1] // k.shape[1]
    mask = visible.repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,shd->ths", q, k.repeat_interleave(group, dim=1)) * scale
    scores = scores.float().masked_fill(~mask, -1e30)
    weights = torch.exp(scores - scores.detach().amax(-1, keepdim=True)) * mask
    total = weights.sum(-1, keepdim=True)
    out = torch.einsum("ths,shd->thd", weights.to(q.dtype), v.repeat_interleave(group, dim=1))
    return (out / torch.where(total > 0, total, 1.0)).to(q.dtype)
