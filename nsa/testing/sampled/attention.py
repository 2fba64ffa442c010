"""Sampled rows of the branches: each is softmax attention over a list of keys for every query.

Results of a few queries need their lists alone. Gradients of a few keys need lse and delta of every
query that sees one of them; these are computed, too, a part of the queries at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.ops._packed import compressed_cu_seqlens
from nsa.testing.sampled.gate import Offsets, compute_dtype

# Elements of all temporaries of one part together: 1 GiB in fp64.
PART_ELEMENTS = 2**27
LOG2_E, LN_2 = math.log2(math.e), math.log(2.0)  # softmax in base 2, as kernels take it
# Queries for which it is decided at a time whether they see a sampled key.
SEARCH_ROWS = 2**16


# --- Which keys a query sees
# `rows` are packed queries [R] of one sequence, `t` their positions.
# - `list_len`: keys that one list takes in memory, at most, in a sequence of `num_keys` keys.
# - `lists`: keys [R, Hkv, K] and which of them count, bool of the same shape. R or Hkv is 1 where
#   all lists are alike; the first dimension of the mask is always R.
# - `sees`: whether each query sees each of `keys` [m], bool [R, Hkv or 1, m].


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
    """Tokens of the blocks named by ``block_indices`` ``[T, Hkv, n]``.

    Ids outside ``0 .. t // l'`` are absent.
    """

    block_indices: Tensor
    block_size: int

    def list_len(self, num_keys: int) -> int:  # noqa: D102
        return self.block_indices[0].numel() * self.block_size

    def _present(self, rows: Tensor, t: Tensor) -> Tensor:
        ids = self.block_indices[rows].long()
        return torch.where((ids >= 0) & (ids <= (t // self.block_size)[:, None, None]), ids, -1)

    def lists(self, rows: Tensor, t: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:  # noqa: D102
        ids = self._present(rows, t)[..., None]  # [R, Hkv, n, 1]
        index = ids * self.block_size + torch.arange(self.block_size, device=t.device)
        visible = (ids >= 0) & (index <= t[:, None, None, None])
        return torch.where(visible, index, 0).flatten(2), visible.flatten(2)

    def sees(self, rows: Tensor, t: Tensor, keys: Tensor) -> Tensor:  # noqa: D102
        blocks, selected = keys // self.block_size, torch.tensor(False, device=t.device)
        for ids in self._present(rows, t).unbind(2):  # one at a time, for the memory
            selected = selected | (ids[..., None] == blocks)
        return selected & (keys <= t[:, None])[:, None]


Visibility = WindowKeys | CompressedKeys | SelectedKeys


# --- One part of the rows
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None,
    lists: tuple[Tensor, Tensor],
    scale: float,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Attention of the rows ``q`` ``[R, Hq, D]`` over lists of keys; with ``dout`` also dq."""
    compute, (index, visible), num_kv_heads = compute_dtype(dtype), lists, k.shape[1]
    q = q.to(compute).unflatten(1, (num_kv_heads, -1))  # [R, Hkv, G, D]
    head = torch.arange(num_kv_heads, device=q.device)[:, None]
    keys, values = (x[index, head].to(compute) for x in (k, v))  # [R or 1, Hkv, K, D]
    shape = "rhkd"
    if len(index) == 1:
        keys, values, shape = keys[0], values[0], "hkd"
    scores = torch.einsum(f"rhgd,{shape}->rhgk", q, keys) * (scale * LOG2_E)
    scores.masked_fill_(~visible[:, :, None], -torch.inf)
    row_max = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(compute).min)
    weights = torch.exp2(scores - row_max)
    total = weights.sum(-1, keepdim=True)
    out = torch.einsum(f"rhgk,{shape}->rhgd", weights.to(dtype).to(compute), values)
    out = (out / torch.where(total > 0, total, 1.0)).to(dtype)
    lse = (row_max + total.log2()) * LN_2
    found = {"out": out.flatten(1, 2), "lse": lse.flatten(1)}
    if dout is None:
        return found
    dout = dout.unflatten(1, (num_kv_heads, -1))
    delta = (out.to(compute) * dout).sum(-1, keepdim=True)
    weights = torch.exp2(scores.sub_(_for_weights(lse) * LOG2_E))
    weights.mul_(torch.einsum(f"rhgd,{shape}->rhgk", dout, values).sub_(delta))
    dq = torch.einsum(f"rhgk,{shape}->rhgd", weights.to(dtype).to(compute), keys) * scale
    return {**found, "delta": delta.flatten(1), "dq": dq.flatten(1, 2).to(dtype)}


def _for_weights(lse: Tensor) -> Tensor:
    """lse as the exponent's subtrahend: a row without a visible key has weights 0."""
    return torch.where(lse.isinf(), torch.inf, lse)


# --- Branches
@dataclass(frozen=True)
class SampledAttention:
    """One branch over packed sequences, computed row by row; made by the functions below.

    Attributes:
        q, k, v: packed ``[T, Hq, D]``, ``[N, Hkv, D]``, ``[N, Hkv, Dv]``, in the dtype that they
            are stored in.
        visibility: which keys a query sees.
        offsets: of queries and key tokens.
        cu_key: offsets of the rows of ``k``: those of the tokens, or of the compressed blocks.
        scale: factor on the scores.
        gate: ``[T, Hq]``, or None for 1: the gradient of the branch's output is ``gate * dout``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    visibility: Visibility
    offsets: Offsets
    cu_key: list[int]
    scale: float
    gate: Tensor | None = None

    @torch.no_grad()
    def at_queries(
        self, rows: Tensor, dtype: torch.dtype, dout: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Results of the packed ``rows``.

        Returns:
            ``out`` ``[R, Hq, Dv]``, ``lse`` ``[R, Hq]`` and, with ``dout`` ``[T, Hq, Dv]``, ``dq``.
        """
        found: dict[str, Tensor] = {}
        for sequence, part in self.offsets.parts(rows, self._part_size):
            for name, x in self._run(sequence, rows[part], dtype, dout).items():
                found.setdefault(name, x.new_empty(rows.numel(), *x.shape[1:]))[part] = x
        return found

    @torch.no_grad()
    def at_keys(self, keys: Tensor, dtype: torch.dtype, dout: Tensor) -> dict[str, Tensor]:
        """Gradients of the rows ``keys`` ``[m]`` of ``k`` and ``v``, from all queries that see one.

        A query whose row of ``dout`` is 0 adds nothing and is left out: that keeps long sequences
        within reach.

        Returns:
            ``dk`` ``[m, Hkv, D]`` and ``dv`` ``[m, Hkv, Dv]``.
        """
        compute = compute_dtype(dtype)
        with_gradient = dout.flatten(1).any(1).nonzero()[:, 0]
        dk, dv = (x.new_zeros(keys.numel(), *x.shape[1:], dtype=compute) for x in (self.k, self.v))
        for sequence in range(len(self.cu_key) - 1):
            first, end = self.cu_key[sequence : sequence + 2]
            mine = ((keys >= first) & (keys < end)).nonzero()[:, 0]
            if mine.numel():
                inside = keys[mine] - first
                rows = self._seeing(sequence, with_gradient, inside)
                for _, part in self.offsets.parts(rows, self._part_size):
                    one_dk, one_dv = self._key_share(sequence, rows[part], inside, dtype, dout)
                    dk[mine] += one_dk
                    dv[mine] += one_dv
        return {"dk": dk.to(dtype), "dv": dv.to(dtype)}

    def _part_size(self, sequence: int) -> int:
        """Queries of a sequence whose temporaries fit into memory."""
        list_len = self.visibility.list_len(self.cu_key[sequence + 1] - self.cu_key[sequence])
        each = 4 * self.q.shape[1] + self.k[0:1].numel() + self.v[0:1].numel()
        return PART_ELEMENTS // (max(list_len, 1) * max(each, 1))

    def _gradient(self, rows: Tensor, dout: Tensor, dtype: torch.dtype) -> Tensor:
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
        t = self.offsets.positions(sequence, rows)
        gradient = None if dout is None else self._gradient(rows, dout, dtype)
        lists = self.visibility.lists(rows, t, end - first)
        return _attend(self.q[rows], k, v, gradient, lists, self.scale, dtype)

    def _seeing(self, sequence: int, rows: Tensor, keys: Tensor) -> Tensor:
        """Those of the packed queries ``rows`` that see at least one of a sequence's ``keys``."""
        first, end = self.offsets.q[sequence : sequence + 2]
        found = []
        for some in rows[(rows >= first) & (rows < end)].split(SEARCH_ROWS):
            sees = self.visibility.sees(some, self.offsets.positions(sequence, some), keys)
            found.append(some[sees.flatten(1).any(1)])
        return torch.cat(found)

    def _key_share(
        self, sequence: int, rows: Tensor, keys: Tensor, dtype: torch.dtype, dout: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What queries of a sequence add to dk and dv of its ``keys``: ``[m, Hkv, E]`` each."""
        compute, heads = compute_dtype(dtype), (self.k.shape[1], -1)
        found = self._run(sequence, rows, dtype, dout)
        visible = self.visibility.sees(rows, self.offsets.positions(sequence, rows), keys)
        q, gradient = self.q[rows].to(compute), self._gradient(rows, dout, dtype)
        q, gradient, lse, delta = (  # [R, Hkv, G, E]
            x.unflatten(1, heads) for x in (q, gradient, found["lse"], found["delta"])
        )
        k, v = (x[keys + self.cu_key[sequence]].to(compute) for x in (self.k, self.v))
        scores = torch.einsum("rhgd,mhd->rhgm", q, k) * (self.scale * LOG2_E)
        weights = torch.exp2(scores - _for_weights(lse)[..., None] * LOG2_E)
        weights = torch.where(visible[:, :, None], weights, 0.0)
        dv = torch.einsum("rhgm,rhgd->mhd", weights.to(dtype).to(compute), gradient)
        weights *= torch.einsum("rhgd,mhd->rhgm", gradient, v) - delta[..., None]
        dk = torch.einsum("rhgm,rhgd->mhd", weights.to(dtype).to(compute), q) * self.scale
        return dk, dv


def sampled_window(
    q: Tensor, k: Tensor, v: Tensor, config: NSAConfig, **options: Any
) -> SampledAttention:
    """Sampled rows of :func:`nsa.window_attention` over packed tensors; see there."""
    return _sampled(q, k, v, WindowKeys(config.window_size), config, **options)


def sampled_selected(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, config: NSAConfig, **options: Any
) -> SampledAttention:
    """Sampled rows of :func:`nsa.selected_attention` over packed tensors; see there."""
    visibility = SelectedKeys(block_indices, config.block_size)
    return _sampled(q, k, v, visibility, config, **options)


def sampled_compressed(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, config: NSAConfig, **options: Any
) -> SampledAttention:
    """Sampled rows of :func:`nsa.compressed_attention` over packed tensors.

    Without offsets there are as many key tokens as queries.
    """
    visibility = CompressedKeys(config.compress_block_size, config.compress_stride)
    return _sampled(q, k_cmp, v_cmp, visibility, config, **options)


def _sampled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visibility: Visibility,
    config: NSAConfig,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    softmax_scale: float | None = None,
    gate: Tensor | None = None,
) -> SampledAttention:
    compressed = isinstance(visibility, CompressedKeys)
    num_tokens = q.shape[0] if compressed else k.shape[0]
    offsets = Offsets.read(cu_seqlens_q, cu_seqlens_k, q.shape[0], num_tokens)
    cu_key = offsets.k
    if compressed:
        cu_key = compressed_cu_seqlens(torch.tensor(offsets.k), config).tolist()
    scale = config.head_dim**-0.5 if softmax_scale is None else softmax_scale
    return SampledAttention(q, k, v, visibility, offsets, cu_key, scale, gate)
