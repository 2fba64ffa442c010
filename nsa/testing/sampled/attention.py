"""Sampled rows of the branches: each is softmax attention over a list of keys for every query.

Results of a few queries need their lists alone. Gradients of a few keys need lse and delta of every
query that sees one of them; these are computed, too, a part of the queries at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.ops._packed import compressed_cu_seqlens
from nsa.testing.sampled.gate import compute_dtype, offsets_on_host

# Elements of all temporaries of one part together: 1 GiB in fp64.
PART_ELEMENTS = 2**27
LOG2_E, LN_2 = math.log2(math.e), math.log(2.0)  # softmax in base 2, as kernels take it
# Queries that are asked at a time whether they see a sampled key.
SEARCH_ROWS = 2**16


# ------------------------------------------------------------------------------------------- which
# keys a query sees


class Visibility(Protocol):
    """Which keys of its sequence a query sees. ``rows`` are packed queries ``[R]`` of one sequence, ``t`` their positions."""

    def list_len(self, num_keys: int) -> int:
        """Keys that one list takes in memory, at most, in a sequence of ``num_keys`` keys."""
        ...

    def lists(self, rows: Tensor, t: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
        """Keys ``[R, Hkv, K]`` (1 for R or Hkv where all are alike), and which of them count, bool ``[R, Hkv or 1, K]``."""
        ...

    def sees(self, rows: Tensor, t: Tensor, keys: Tensor) -> Tensor:
        """Whether each query sees each of ``keys`` ``[m]``, bool ``[R, Hkv or 1, m]``."""
        ...


@dataclass(frozen=True)
class WindowKeys:
    """Tokens ``max(0, t - size + 1) .. t``."""

    size: int

    def list_len(self, num_keys: int) -> int:  # noqa: D102
        return min(self.size, num_keys)

    def lists(self, rows: Tensor, t: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:  # noqa: D102
        index = (t[:, None] - torch.arange(self.list_len(num_keys), device=t.device))[:, None]
        return index.clamp(min=0), index >= 0

    def sees(self, rows: Tensor, t: Tensor, keys: Tensor) -> Tensor:  # noqa: D102
        return ((keys <= t[:, None]) & (keys > t[:, None] - self.size))[:, None]


@dataclass(frozen=True)
class CompressedKeys:
    """Compressed blocks that lie wholly in the past."""

    size: int
    stride: int

    def list_len(self, num_keys: int) -> int:  # noqa: D102
        return num_keys

    def lists(self, rows: Tensor, t: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:  # noqa: D102
        most = (int(t.max()) + 1 - self.size) // self.stride + 1
        index = torch.arange(max(min(most, num_keys), 1), device=t.device)  # a list is never empty
        return index[None, None], self.sees(rows, t, index)

    def sees(self, rows: Tensor, t: Tensor, keys: Tensor) -> Tensor:  # noqa: D102
        return (keys * self.stride + self.size - 1 <= t[:, None])[:, None]


@dataclass(frozen=True)
class SelectedKeys:
    """Tokens of the blocks named by ``block_indices`` ``[T, Hkv, n]``; ids outside ``0 .. t // l'`` are absent."""

    block_indices: Tensor
    block_size: int

    def list_len(self, num_keys: int) -> int:  # noqa: D102
        return self.block_indices.shape[1] * self.block_indices.shape[2] * self.block_size

    def _present(self, rows: Tensor, t: Tensor) -> Tensor:
        ids = self.block_indices[rows].long()
        return torch.where((ids >= 0) & (ids <= (t // self.block_size)[:, None, None]), ids, -1)

    def lists(self, rows: Tensor, t: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:  # noqa: D102
        ids = self._present(rows, t)[..., None]  # [R, Hkv, n, 1]
        index = ids * self.block_size + torch.arange(self.block_size, device=t.device)
        visible = (ids >= 0) & (index <= t[:, None, None, None])
        return torch.where(visible, index, 0).flatten(2), visible.flatten(2)

    def sees(self, rows: Tensor, t: Tensor, keys: Tensor) -> Tensor:  # noqa: D102
        ids = self._present(rows, t)
        blocks = keys // self.block_size
        chosen = torch.zeros(*ids.shape[:2], keys.numel(), dtype=torch.bool, device=t.device)
        for place in range(ids.shape[2]):
            chosen |= ids[:, :, place, None] == blocks
        return chosen & (keys <= t[:, None])[:, None]


# -------------------------------------------------------------------------------------------------
# one part of the rows


def _by_head(x: Tensor, num_kv_heads: int, num_lists: int) -> Tensor:
    """``[R, Hq, E]`` as ``[P, Hkv, R / P * G, E]``: the rows that share a list and a KV head lie together."""
    num_rows, num_heads, size = x.shape
    x = x.reshape(num_lists, num_rows // num_lists, num_kv_heads, num_heads // num_kv_heads, size)
    return x.transpose(1, 2).reshape(num_lists, num_kv_heads, -1, size)


def _by_row(x: Tensor, num_rows: int) -> Tensor:
    """Inverse of :func:`_by_head`."""
    num_lists, num_kv_heads, _, size = x.shape
    x = x.reshape(num_lists, num_kv_heads, num_rows // num_lists, -1, size)
    return x.transpose(1, 2).reshape(num_rows, -1, size)


def _mask_by_head(visible: Tensor, group_size: int, num_lists: int) -> Tensor:
    """bool ``[R, Hkv or 1, K]`` as ``[P, Hkv or 1, R / P * G, K]``."""
    num_rows, heads, num_keys = visible.shape
    visible = visible.view(num_lists, num_rows // num_lists, heads, 1, num_keys).transpose(1, 2)
    return visible.expand(-1, -1, -1, group_size, -1).reshape(num_lists, heads, -1, num_keys)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None,
    index: Tensor,
    visible: Tensor,
    scale: float,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Attention of the rows ``q`` ``[R, Hq, D]`` over lists of rows of a sequence's ``k`` and ``v``; with ``dout`` also dq."""
    compute, (num_rows, num_heads, _), num_lists = compute_dtype(dtype), q.shape, index.shape[0]
    num_kv_heads = k.shape[1]
    head = torch.arange(num_kv_heads, device=q.device)[:, None]
    keys, values = (x[index, head].to(compute) for x in (k, v))  # [P, Hkv, K, D]
    scores = _by_head(q.to(compute), num_kv_heads, num_lists) @ keys.mT * (scale * LOG2_E)
    scores.masked_fill_(~_mask_by_head(visible, num_heads // num_kv_heads, num_lists), -torch.inf)
    row_max = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(compute).min)
    weights = torch.exp2(scores - row_max)
    total = weights.sum(-1, keepdim=True)
    out = (weights.to(dtype).to(compute) @ values / torch.where(total > 0, total, 1.0)).to(dtype)
    lse = (row_max + total.log2()) * LN_2
    found = {"out": _by_row(out, num_rows), "lse": _by_row(lse, num_rows)[..., 0]}
    if dout is None:
        return found
    rows = _by_head(dout, num_kv_heads, num_lists)
    delta = (out.to(compute) * rows).sum(-1, keepdim=True)
    weights = torch.exp2(scores.sub_(_for_weights(lse) * LOG2_E))
    weights.mul_((rows @ values.mT).sub_(delta))
    dq = weights.to(dtype).to(compute) @ keys * scale
    return {
        **found,
        "delta": _by_row(delta, num_rows)[..., 0],
        "dq": _by_row(dq, num_rows).to(dtype),
    }


def _for_weights(lse: Tensor) -> Tensor:
    """lse as the exponent's subtrahend: a row without a visible key has weights 0."""
    return torch.where(lse.isinf(), torch.inf, lse)


# ------------------------------------------------------------------------------------------------------------
# branches


@dataclass(frozen=True)
class SampledAttention:
    """One branch over packed sequences, whose values can be had row by row. Made by the functions below.

    Attributes:
        q, k, v: packed ``[T, Hq, D]``, ``[N, Hkv, D]``, ``[N, Hkv, Dv]``, in the dtype that they
            are stored in.
        visibility: which keys a query sees.
        cu_q, cu_k: offsets of queries and key tokens on the host.
        cu_key: offsets of the rows of ``k``: those of the tokens, or of the compressed blocks.
        scale: factor on the scores.
        gate: ``[T, Hq]``, or None for 1: the gradient of the branch's output is ``gate * dout``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    visibility: Visibility
    cu_q: list[int]
    cu_k: list[int]
    cu_key: list[int]
    scale: float
    gate: Tensor | None = None

    @torch.no_grad()
    def at_queries(
        self, rows: Tensor, dtype: torch.dtype, dout: Tensor | None = None
    ) -> dict[str, Tensor]:
        """``out`` ``[R, Hq, Dv]``, ``lse`` ``[R, Hq]`` and, with ``dout`` ``[T, Hq, Dv]``, ``dq`` of the packed ``rows``."""
        found: dict[str, Tensor] = {}
        for sequence, part in self._parts(rows):
            for name, x in self._run(sequence, rows[part], dtype, dout).items():
                found.setdefault(name, x.new_empty(rows.numel(), *x.shape[1:]))[part] = x
        return found

    @torch.no_grad()
    def at_keys(self, keys: Tensor, dtype: torch.dtype, dout: Tensor) -> dict[str, Tensor]:
        """``dk`` ``[m, Hkv, D]`` and ``dv`` ``[m, Hkv, Dv]`` of the rows ``keys`` of ``k``, from every query that sees them.

        A query whose row of ``dout`` is 0 gives nothing and costs nothing: that keeps long
        sequences within reach.
        """
        compute = compute_dtype(dtype)
        givers = dout.flatten(1).any(1).nonzero()[:, 0]
        dk, dv = (x.new_zeros(keys.numel(), *x.shape[1:], dtype=compute) for x in (self.k, self.v))
        for sequence in range(len(self.cu_q) - 1):
            first, end = self.cu_key[sequence : sequence + 2]
            mine = ((keys >= first) & (keys < end)).nonzero()[:, 0]
            if mine.numel():
                inside = keys[mine] - first
                observers = self._observers(sequence, givers, inside)
                for _, part in self._parts(observers):
                    one_dk, one_dv = self._key_share(sequence, observers[part], inside, dtype, dout)
                    dk[mine] += one_dk
                    dv[mine] += one_dv
        return {"dk": dk.to(dtype), "dv": dv.to(dtype)}

    def _positions(self, sequence: int, rows: Tensor) -> Tensor:
        return rows - self.cu_q[sequence + 1] + self.cu_k[sequence + 1] - self.cu_k[sequence]

    def _parts(self, rows: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Sequence, and places in ``rows`` of some of its rows: few enough for the temporaries."""
        sequence_of = torch.bucketize(
            rows, torch.tensor(self.cu_q[1:], device=rows.device), right=True
        )
        num_heads, num_kv_heads, sizes = (
            self.q.shape[1],
            self.k.shape[1],
            self.k.shape[-1] + self.v.shape[-1],
        )
        for sequence in sequence_of.unique().tolist():
            list_len = self.visibility.list_len(self.cu_key[sequence + 1] - self.cu_key[sequence])
            each = max(list_len, 1) * (4 * num_heads + num_kv_heads * sizes)
            yield from (
                (sequence, part)
                for part in (sequence_of == sequence)
                .nonzero()[:, 0]
                .split(max(PART_ELEMENTS // each, 1))
            )

    def _grad_of(self, rows: Tensor, dout: Tensor, dtype: torch.dtype) -> Tensor:
        one = dout[rows].to(compute_dtype(dtype))
        if self.gate is not None:
            one = one * self.gate[rows, :, None].to(one.dtype)
        return one.to(dtype).to(one.dtype)

    def _run(
        self, sequence: int, rows: Tensor, dtype: torch.dtype, dout: Tensor | None
    ) -> dict[str, Tensor]:
        first, end = self.cu_key[sequence : sequence + 2]
        k, v = (
            x[first:end] if end > first else x.new_zeros(1, *x.shape[1:]) for x in (self.k, self.v)
        )
        index, visible = self.visibility.lists(rows, self._positions(sequence, rows), end - first)
        grad = None if dout is None else self._grad_of(rows, dout, dtype)
        return _attend(self.q[rows], k, v, grad, index, visible, self.scale, dtype)

    def _observers(self, sequence: int, rows: Tensor, keys: Tensor) -> Tensor:
        """Those of the packed queries ``rows`` that lie in a sequence and see at least one of its ``keys``."""
        mine = rows[(rows >= self.cu_q[sequence]) & (rows < self.cu_q[sequence + 1])]
        seen = [
            some[
                self.visibility.sees(some, self._positions(sequence, some), keys).flatten(1).any(1)
            ]
            for some in mine.split(SEARCH_ROWS)
        ]
        return torch.cat(seen)

    def _key_share(
        self, sequence: int, rows: Tensor, keys: Tensor, dtype: torch.dtype, dout: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What the queries ``rows`` give to dk and dv of the ``keys`` ``[m]`` of their sequence: ``[m, Hkv, E]`` each."""
        compute, num_kv_heads = compute_dtype(dtype), self.k.shape[1]
        found = self._run(sequence, rows, dtype, dout)
        visible = self.visibility.sees(rows, self._positions(sequence, rows), keys)
        # [Hkv or 1, R * G, m]
        visible = _mask_by_head(visible, self.q.shape[1] // num_kv_heads, 1)[0]
        q, grad, lse, delta = (
            _by_head(x, num_kv_heads, 1)[0]  # [Hkv, R * G, E]
            for x in (
                self.q[rows].to(compute), self._grad_of(rows, dout, dtype), found["lse"][..., None], found["delta"][..., None]
            )
        )  # fmt: skip
        # [Hkv, m, E]
        k, v = (
            x[keys + self.cu_key[sequence]].to(compute).transpose(0, 1) for x in (self.k, self.v)
        )
        scores = q @ k.mT * (self.scale * LOG2_E)
        weights = torch.where(visible, torch.exp2(scores - _for_weights(lse) * LOG2_E), 0.0)
        dv = weights.to(dtype).to(compute).mT @ grad
        dk = (weights * (grad @ v.mT - delta)).to(dtype).to(compute).mT @ q * self.scale
        return dk.transpose(0, 1), dv.transpose(0, 1)


def sampled_window(
    q: Tensor, k: Tensor, v: Tensor, config: NSAConfig, *, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, softmax_scale: float | None = None, gate: Tensor | None = None,
) -> SampledAttention:  # fmt: skip
    """Sampled rows of :func:`nsa.window_attention` over packed tensors; see there."""
    cu_q, cu_k = offsets_on_host(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0])
    scale = config.head_dim**-0.5 if softmax_scale is None else softmax_scale
    return SampledAttention(q, k, v, WindowKeys(config.window_size), cu_q, cu_k, cu_k, scale, gate)


def sampled_selected(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, config: NSAConfig, *, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, softmax_scale: float | None = None, gate: Tensor | None = None,
) -> SampledAttention:  # fmt: skip
    """Sampled rows of :func:`nsa.selected_attention` over packed tensors; see there."""
    cu_q, cu_k = offsets_on_host(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0])
    scale = config.head_dim**-0.5 if softmax_scale is None else softmax_scale
    return SampledAttention(
        q, k, v, SelectedKeys(block_indices, config.block_size), cu_q, cu_k, cu_k, scale, gate
    )


def sampled_compressed(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, config: NSAConfig, *, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, softmax_scale: float | None = None, gate: Tensor | None = None,
) -> SampledAttention:  # fmt: skip
    """Sampled rows of :func:`nsa.compressed_attention` over packed tensors; without offsets S is T."""
    cu_q, cu_k = offsets_on_host(cu_seqlens_q, cu_seqlens_k, q.shape[0], q.shape[0])
    scale = config.head_dim**-0.5 if softmax_scale is None else softmax_scale
    visibility = CompressedKeys(config.compress_block_size, config.compress_stride)
    cu_cmp = compressed_cu_seqlens(torch.tensor(cu_k), config).tolist()
    return SampledAttention(q, k_cmp, v_cmp, visibility, cu_q, cu_k, cu_cmp, scale, gate)
