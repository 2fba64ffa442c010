"""Random inputs for the operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from nsa.config import NSAConfig


@dataclass(frozen=True)
class PackedInputs:
    """Packed inputs of ``native_sparse_attention``, which documents the shapes."""

    q: Tensor
    k_cmp_raw: Tensor
    v_cmp_raw: Tensor
    k_slc: Tensor
    v_slc: Tensor
    k_win: Tensor
    v_win: Tensor
    gates: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    q_idx: Tensor | None = None
    k_idx: Tensor | None = None

    def to(self, dtype: torch.dtype) -> PackedInputs:
        """Copy of the inputs rounded to ``dtype``; offsets stay int32."""
        given = {f.name: x for f in fields(self) if (x := getattr(self, f.name)) is not None}
        return PackedInputs(
            **{n: t.to(dtype) if t.dtype.is_floating_point else t for n, t in given.items()}
        )


def packed_offsets(lengths: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """``cu_seqlens`` int32 ``[B + 1]`` of sequences with these lengths, tokens."""
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def make_inputs(
    config: NSAConfig,
    lengths_k: Sequence[int],
    lengths_q: Sequence[int] | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    requires_grad: bool = False,
) -> PackedInputs:
    """Independent Gaussian queries, keys and values, uniform gates.

    Args:
        config: the sparse pattern.
        lengths_k: key tokens of each sequence.
        lengths_q: query tokens of each sequence; None means as many as keys.
        seed: seed of the generator; values differ between dtypes only by rounding.
        dtype: dtype of all float tensors.
        device: device of all tensors.
        requires_grad: whether the float tensors are leaves that require gradients.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    lengths_q = lengths_k if lengths_q is None else lengths_q

    def normal(tokens: int, heads: int, size: int) -> Tensor:
        # Drawn in fp32 for all dtypes, so that a case has the same values everywhere.
        x = torch.randn(tokens, heads, size, generator=generator, device=device)
        return x.to(dtype).requires_grad_(requires_grad)

    num_q, num_k, heads = sum(lengths_q), sum(lengths_k), config.num_kv_heads
    q = normal(num_q, config.num_heads, config.head_dim)
    k_cmp, v_cmp, k_slc, v_slc, k_win, v_win = (
        normal(num_k, heads, size) for _ in range(3) for size in (config.head_dim, config.value_dim)
    )
    gates = (
        torch.rand(num_q, config.num_heads, 3, generator=generator, device=device)
        .to(dtype)
        .requires_grad_(requires_grad)
    )
    offsets = packed_offsets(lengths_q, device), packed_offsets(lengths_k, device)
    index: tuple[Tensor, ...] = ()
    if config.has_index:
        sizes = config.scoring
        queries = normal(num_q, sizes.num_heads, sizes.head_dim)
        index = queries, normal(num_k, sizes.num_kv_heads, sizes.head_dim)
    return PackedInputs(q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates, *offsets, *index)
