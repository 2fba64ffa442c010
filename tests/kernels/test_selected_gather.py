"""Gathered design of the selected branch, fp32 in the interpreter, against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import NSAConfig, selected_attention
from nsa.ops._triton.layout import Layout
from nsa.ops._triton.tuning import Tile
from nsa.ops.selected import gather_launch
from nsa.ops.selected.gather_launch import gather_backward
from nsa.testing import assert_within_budget, make_inputs

BLOCK = 16
PACKED = [70, 1, 0, 45]
FEWER = [20, 1, 0, 7]
TILE = Tile(16, 16, 4, 1)


def small(group: int, num_kv_heads: int = 2, n: int = 4, head_dim: int = 16, value_dim: int = 16) -> NSAConfig:
    return NSAConfig(
        num_heads=group * num_kv_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, value_dim=value_dim,
        compress_block_size=8, compress_stride=4, block_size=BLOCK, num_selected_blocks=n, window_size=32,
    )  # fmt: skip


class Case:
    """Inputs in fp64 with a random choice of blocks, and what the reference makes of them in a given dtype."""

    def __init__(
        self, config: NSAConfig, lengths_k: Sequence[int], lengths_q: Sequence[int] | None = None, skewed: bool = False
    ) -> None:
        x = make_inputs(config, lengths_k, lengths_q)
        lengths_q = lengths_q or lengths_k
        self.config = config
        self.offsets: dict[str, Any] = {"cu_seqlens_q": x.cu_seqlens_q, "cu_seqlens_k": x.cu_seqlens_k}
        self.longest = max(lengths_q), max(lengths_k)
        self.tensors = (x.q, x.k_slc, x.v_slc)
        generator = torch.Generator().manual_seed(1)
        self.d_out = torch.randn(x.q.shape[0], config.num_heads, config.value_dim, generator=generator).double()
        # Any order; some ids are above a query's own block, some are -1: both are absent.
        rows = []
        for len_q, len_k in zip(lengths_q, lengths_k, strict=True):
            candidates = max(-(-len_k // BLOCK) + 1, config.num_selected_blocks)
            weight = torch.rand(len_q, config.num_kv_heads, candidates, generator=generator)
            if skewed:
                weight[..., 1] = 2.0
                weight[..., 3:] *= 0.1
            rows.append(weight.argsort(-1, descending=True)[..., : config.num_selected_blocks] - 1)
        self.indices = torch.cat(rows).int()

    def layout(self, uniform: bool = False) -> Layout:
        cu_q, cu_k = self.offsets["cu_seqlens_q"], self.offsets["cu_seqlens_k"]
        given = (None, None) if uniform else (cu_q, cu_k)
        return Layout(*given, cu_q.shape[0] - 1, *self.longest)

    def attend(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        q, k, v = tensors
        return selected_attention(q, k, v, self.indices, self.config, **self.offsets, backend="reference")

    def reference(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """out, dq, dk, dv."""
        leaves = [x.detach().to(dtype).requires_grad_() for x in self.tensors]
        out, _ = self.attend(leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, self.d_out.to(dtype))

    def backward(self, tile: Tile = TILE, segments: int | None = None, uniform: bool = False) -> tuple[Tensor, ...]:
        """dq, dk, dv of the kernels."""
        q, k, v = (x.float() for x in self.tensors)
        out, lse = self.attend((q, k, v))
        scale = self.config.head_dim**-0.5
        return gather_backward(
            q, k, v, self.indices, out, self.d_out.float(), lse, self.layout(uniform), scale, BLOCK, tile, segments
        )


def compare(case: Case, tile: Tile = TILE, segments: int | None = None, uniform: bool = False) -> None:
    exact, plain = case.reference(torch.float64), case.reference(torch.float32)
    found = case.backward(tile, segments, uniform)
    for name, actual, baseline, oracle in zip(("dq", "dk", "dv"), found, plain[1:], exact[1:], strict=True):
        # Sums in another order than the reference's: rounding, not more, is what the larger factor leaves room for.
        assert_within_budget(actual, baseline, oracle, name, factor=4.0)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Chunks that short sequences fill, too."""
    monkeypatch.setattr(gather_launch, "CHUNK", 24)


@pytest.mark.parametrize("group", [1, 3, 6, 16])
def test_group_sizes(group):
    compare(Case(small(group), PACKED), segments=2)


@pytest.mark.parametrize("segments", [None, 1, 3, 7])
def test_segments(segments):
    compare(Case(small(3), [70, 30]), segments=segments)


def test_fewer_queries_than_keys():
    compare(Case(small(6), PACKED, FEWER), segments=2)


def test_sequences_alike():
    compare(Case(small(2), [50, 50]), segments=3, uniform=True)


def test_skewed_choice():
    compare(Case(small(2), [150], skewed=True), segments=2)
