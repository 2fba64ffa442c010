"""Attention of one sequence in fp64, on sampled queries and keys: what a figure's result is compared with.

The same lines also give the baseline of the error budget: fp32 arithmetic that rounds where a kernel of the tested dtype must
(probabilities and score gradients before a matrix product, results).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.ops.selection.reference import choose_blocks, overlap_stencil

Round = Callable[[Tensor], Tensor]
_CHUNK_ELEMENTS = 2**26

# Two scores closer than this (relative) may be ranked either way; see docs/semantics.md.
CLOSE = 1e-5


@dataclass(frozen=True)
class Arithmetic:
    """How numbers are computed with.

    Attributes:
        dtype: of sums, products and the exponential.
        stored: what is stored, or enters a matrix product, is rounded to it; None rounds nothing.
    """

    dtype: torch.dtype
    stored: torch.dtype | None = None

    def of(self, x: Tensor) -> Tensor:
        """Inputs, to compute with."""
        return x.detach().to(self.dtype)

    def round(self, x: Tensor) -> Tensor:
        """A value as it is stored."""
        return x if self.stored is None else x.to(self.stored).to(self.dtype)


EXACT = Arithmetic(torch.float64)


@dataclass(frozen=True)
class Branch:
    """One view of a sequence.

    Attributes:
        k: ``[N, Hkv, D]``
        v: ``[N, Hkv, Dv]``
        sees: ``(positions [R], keys [J]) -> bool [R, Hkv or 1, J]``.
        near: ``positions [R] -> keys [R, Hkv or 1, K]``, among them all that a query sees, none twice (what lies outside is
            clamped and not seen); None stands for all N.
        scale: softmax scale.
    """

    k: Tensor
    v: Tensor
    sees: Callable[[Tensor, Tensor], Tensor]
    near: Callable[[Tensor], Tensor] | None
    scale: float

    def rows(
        self, q: Tensor, t: Tensor, dout: Tensor | None, r: Round
    ) -> Iterator[tuple[slice, Tensor, Tensor, Tensor | None]]:
        """Results of queries in chunks.

        Args:
            q: ``[R, Hq, D]``
            t: their positions.
            dout: gradient of the output ``[R, Hq, Dv]``; None leaves dq out.
            r: rounding.

        Yields:
            Slice of the rows, out ``[., Hq, Dv]``, lse ``[., Hq]`` (-inf where nothing is seen), dq ``[., Hq, D]`` or None.
        """
        size = self._chunk_rows(q.shape[1])
        for at in range(0, len(t), size):
            now = slice(at, at + size)
            out, lse, dq = self._chunk(q[now], t[now], None if dout is None else dout[now], r)
            yield now, out, lse, dq

    def _chunk(self, q: Tensor, t: Tensor, dout: Tensor | None, r: Round) -> tuple[Tensor, Tensor, Tensor | None]:
        k, v, seen = self._keys(t)
        p, lse = self._probabilities(q, k, seen)
        out = r(r(p) @ v)
        dq = None
        if dout is not None:
            dout = dout.unflatten(1, (self.k.shape[1], -1))
            delta = (dout * out).sum(-1, keepdim=True)
            dq = r(r(p * (dout @ v.transpose(-1, -2) - delta)) @ k * self.scale).flatten(1, 2)
        return out.flatten(1, 2), lse[..., 0].flatten(1, 2), dq

    def _probabilities(self, q: Tensor, k: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Softmax weights ``[R, Hkv, G, K]``, and lse ``[R, Hkv, G, 1]``."""
        scores = q.unflatten(1, (self.k.shape[1], -1)) @ k.transpose(-1, -2) * self.scale
        scores = scores.masked_fill(~seen[:, :, None], -torch.inf)
        lse = scores.logsumexp(-1, keepdim=True)
        return torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)), lse

    def group_probabilities(self, q: Tensor, t: Tensor) -> Tensor:
        """Weights of all keys, summed over the heads of a group: ``[R, Hkv, N]`` (Eqs. 8 and 10)."""
        parts = []
        for rows, at in zip(q.split(self._chunk_rows(q.shape[1])), t.split(self._chunk_rows(q.shape[1])), strict=True):
            k, _, seen = self._keys(at)
            parts.append(self._probabilities(rows, k, seen)[0].sum(2))
        return torch.cat(parts)

    def _chunk_rows(self, num_heads: int) -> int:
        """Queries at a time, so that no tensor has more than about ``_CHUNK_ELEMENTS`` elements."""
        if self.near is None:
            return max(1, _CHUNK_ELEMENTS // max(self.k.shape[0] * num_heads, 1))
        keys = self.near(torch.zeros(1, dtype=torch.long, device=self.k.device)).shape[-1]
        return max(1, _CHUNK_ELEMENTS // (keys * max(num_heads, 2 * self.k.shape[1] * self.k.shape[2])))

    def _keys(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values ``[R or 1, Hkv, K, D]``, and which are seen ``[R, Hkv or 1, K]``."""
        if self.near is None:
            every = torch.arange(self.k.shape[0], device=t.device)
            return self.k.transpose(0, 1)[None], self.v.transpose(0, 1)[None], self.sees(t, every)
        index = self.near(t)  # [R, Hkv or 1, K]
        inside = (index >= 0) & (index < self.k.shape[0])
        index = index.clamp(0, self.k.shape[0] - 1)
        seen = inside & (index <= t[:, None, None])  # ``near`` names windows and chosen blocks whole: only the future is left
        head = torch.arange(self.k.shape[1], device=t.device)[None, :, None]
        index = index.expand(-1, self.k.shape[1], -1)
        return self.k[index, head], self.v[index, head], seen

    def key_gradients(self, q: Tensor, dout: Tensor, t: Tensor, keys: Tensor, r: Round) -> tuple[Tensor, Tensor]:
        """dk ``[J, Hkv, D]`` and dv ``[J, Hkv, Dv]`` of sampled keys, from every query that sees one of them.

        Args:
            q: all queries of the sequence ``[T, Hq, D]``
            dout: gradient of the branch's output ``[T, Hq, Dv]``.
            t: their positions.
            keys: sampled keys ``[J]``.
            r: rounding.
        """
        heads = self.k.shape[1]
        k, v = self.k[keys].transpose(0, 1)[None], self.v[keys].transpose(0, 1)[None]  # [1, Hkv, J, D]
        dk = torch.zeros(heads, len(keys), self.k.shape[2], dtype=q.dtype, device=q.device)
        dv = torch.zeros(heads, len(keys), self.v.shape[2], dtype=q.dtype, device=q.device)
        some = torch.cat([self.sees(part, keys).any(-1).any(-1) for part in t.split(2**14)]).nonzero()[:, 0]
        q, dout, t = q[some], dout[some], t[some]
        for now, out, lse, _ in self.rows(q, t, None, r):
            rows, grads = q[now].unflatten(1, (heads, -1)), dout[now].unflatten(1, (heads, -1))
            delta = (grads * out.unflatten(1, (heads, -1))).sum(-1, keepdim=True)
            seen = self.sees(t[now], keys)[:, :, None]
            scores = rows @ k.transpose(-1, -2) * self.scale - lse.unflatten(1, (heads, -1))[..., None]
            p = torch.where(seen, torch.exp(torch.where(seen, scores, 0.0)), 0.0)  # [R, Hkv, G, J]
            ds = p * (grads @ v.transpose(-1, -2) - delta)
            dk += torch.einsum("rhgj,rhgd->hjd", r(ds), rows) * self.scale
            dv += torch.einsum("rhgj,rhgd->hjd", r(p), grads)
        return r(dk.transpose(0, 1)), r(dv.transpose(0, 1))


def dense_branch(k: Tensor, v: Tensor, scale: float) -> Branch:
    """All tokens up to the query's own."""
    return Branch(k, v, lambda t, keys: (keys <= t[:, None])[:, None], None, scale)


def window_branch(k: Tensor, v: Tensor, config: NSAConfig, scale: float) -> Branch:
    """Tokens ``max(0, t - w + 1) .. t``."""
    size = config.window_size

    def sees(t: Tensor, keys: Tensor) -> Tensor:
        return ((keys <= t[:, None]) & (keys > t[:, None] - size))[:, None]

    def near(t: Tensor) -> Tensor:
        return (t[:, None] - torch.arange(size, device=t.device))[:, None]

    return Branch(k, v, sees, near, scale)


def compressed_branch(k: Tensor, v: Tensor, config: NSAConfig, scale: float) -> Branch:
    """Blocks that lie wholly in the past: ``i * d + l - 1 <= t``."""

    def sees(t: Tensor, keys: Tensor) -> Tensor:
        return (keys * config.compress_stride + config.compress_block_size - 1 <= t[:, None])[:, None]

    return Branch(k, v, sees, None, scale)


def selected_branch(k: Tensor, v: Tensor, chosen: Tensor, config: NSAConfig, scale: float) -> Branch:
    """Tokens up to the query's own in the blocks ``chosen`` ``[T, Hkv, n]`` of the query at row t."""
    size = config.block_size

    def sees(t: Tensor, keys: Tensor) -> Tensor:
        found = (chosen[t][..., None] == keys // size).any(-2)  # [R, Hkv, J]
        return found & (keys <= t[:, None])[:, None]

    def near(t: Tensor) -> Tensor:
        blocks = chosen[t].long()
        tokens = blocks[..., None] * size + torch.arange(size, device=t.device)
        return torch.where(blocks[..., None] < 0, -1, tokens).flatten(-2)

    return Branch(k, v, sees, near, scale)


def exact_choice(p: Tensor, t: Tensor, num_blocks: int, config: NSAConfig) -> tuple[Tensor, Tensor]:
    """The choice by fp64 scores, whatever approximation the pattern asks for.

    Args:
        p: of :meth:`Branch.group_probabilities` over the compressed keys.
        t: positions of the queries ``[R]``.
        num_blocks: M.
        config: the sparse pattern.

    Returns:
        Which blocks are chosen, bool ``[R, Hkv, M]``, and for which the order is too close to call: their score is within 1e-5
        (relative) of the n-th best.
    """
    stencil = overlap_stencil(config)
    step = config.block_size // config.compress_stride
    padded = torch.nn.functional.pad(p, (-min(stencil), max(num_blocks * step - p.shape[-1], 0) + max(stencil)))
    scores = sum(weight * padded[..., offset - min(stencil) :: step][..., :num_blocks] for offset, weight in stencil.items())
    assert isinstance(scores, Tensor)
    plain = replace(config, coarse_block_size=None, num_coarse_blocks=0, score_precision="exact")
    ids = choose_blocks(scores, t, plain).long()
    chosen = chosen_mask(ids, num_blocks)
    current = (t // config.block_size)[:, None, None]
    block = torch.arange(num_blocks, device=t.device)
    forced = (block < config.num_init_blocks) | (block > current - config.num_local_blocks)
    worst = torch.where(chosen & ~forced, scores, torch.inf).amin(-1, keepdim=True)
    close = ~forced & (block <= current) & ((scores - worst).abs() <= CLOSE * worst.abs()) & (worst < torch.inf)
    return chosen, close


def chosen_mask(block_indices: Tensor, num_blocks: int) -> Tensor:
    """Indices ``[..., n]`` as a mask ``[..., M]``; absent ids are ignored."""
    column = torch.where(block_indices < 0, num_blocks, block_indices.long())
    mask = torch.zeros(*block_indices.shape[:-1], num_blocks + 1, dtype=torch.bool, device=block_indices.device)
    return mask.scatter(-1, column, True)[..., :num_blocks]
