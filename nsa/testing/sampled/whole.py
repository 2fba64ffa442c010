"""Sampled rows of the whole of Native Sparse Attention, with a given selection of blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nsa.config import BRANCHES, NSAConfig
from nsa.ops.combination import combine_reference
from nsa.ops.compression.reference import PhiWeights
from nsa.rope import Rope
from nsa.testing.inputs import PackedInputs
from nsa.testing.sampled.attention import (
    SampledAttention,
    sampled_compressed,
    sampled_selected,
    sampled_window,
)
from nsa.testing.sampled.compression import SampledCompression
from nsa.testing.sampled.gate import compute_dtype


@dataclass(frozen=True)
class SampledWhole:
    """``native_sparse_attention`` over packed inputs, computed row by row.

    Attributes:
        inputs: in the dtype that they are stored in.
        config: the sparse pattern.
        block_indices: ``[T, Hkv, n]``, the selection; None without the selected branch.
            :class:`SampledSelection` makes one in fp64.
        phi: parameters of the compression of keys and of values, or None.
        q_cmp: queries of the compressed branch, or None for those of ``inputs``.
        rope: rotates the compressed keys, or None.
        scale: factor on the scores; None means ``D ** -0.5``.
    """

    inputs: PackedInputs
    config: NSAConfig
    block_indices: Tensor | None
    phi: tuple[PhiWeights, PhiWeights] | None = None
    q_cmp: Tensor | None = None
    rope: Rope | None = None
    scale: float | None = None
    _compressed: dict[tuple[str, torch.dtype], Tensor] = field(default_factory=dict, init=False)

    @torch.no_grad()
    def at_queries(
        self, rows: Tensor, dtype: torch.dtype, dout: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Results of the packed queries ``rows``.

        Returns:
            ``out`` and, with ``dout``, the gradients of ``q``, ``gates`` and ``q_cmp``, by these
            names.
        """
        found = {
            branch: self.branch(branch, dtype).at_queries(rows, dtype, dout)
            for branch in self.config.branches
        }
        out_cmp, out_slc, out_win = outs = [found.get(name, {}).get("out") for name in BRANCHES]
        gates = self.inputs.gates[rows].to(dtype)
        result = {"out": combine_reference((out_cmp, out_slc, out_win), gates)}
        if dout is None:
            return result
        gradient = dout[rows].to(dtype)
        # A branch that is off takes no gate and gives it no gradient.
        dgates = [
            torch.zeros_like(gates[..., 0])
            if x is None
            else (x.to(compute_dtype(dtype)) * gradient).sum(-1).to(dtype)
            for x in outs
        ]
        result["gates"] = torch.stack(dgates, -1)
        shares = {branch: x["dq"] for branch, x in found.items()}
        if self.q_cmp is not None:
            result["q_cmp"] = shares.pop("cmp", torch.zeros_like(self.q_cmp[rows], dtype=dtype))
        first, *others = shares.values()
        result["q"] = sum(others, start=first)
        return result

    @torch.no_grad()
    def at_tokens(self, tokens: Tensor, dtype: torch.dtype, dout: Tensor) -> dict[str, Tensor]:
        """Gradients of the keys and values at the packed ``tokens``, by the names of ``inputs``."""
        result = {}
        for branch in self.config.branches:
            if branch != "cmp":
                found = self.branch(branch, dtype).at_keys(tokens, dtype, dout)
                result[f"k_{branch}"], result[f"v_{branch}"] = found["dk"], found["dv"]
                continue
            blocks, exists = self._compression("k").blocks_of(tokens)
            blocks = blocks[exists].unique()
            found = self.branch(branch, dtype).at_keys(blocks, dtype, dout)
            for kind in ("k", "v"):
                compression, gradient = self._compression(kind), found[f"d{kind}"]
                dy = gradient.new_zeros(compression.num_blocks, *gradient.shape[1:])
                dy[blocks] = gradient
                result[f"{kind}_cmp_raw"] = compression.at_tokens(tokens, dtype, dy)["dx"]
        return result

    def weight_gradients(self, dtype: torch.dtype, dout: Tensor) -> dict[str, Tensor]:
        """Gradients of the parameters of phi from every query, for short sequences.

        Returns:
            By name, ``phi_k.weight`` and so on.
        """
        attention = self.branch("cmp", dtype)
        every = torch.arange(attention.cu_key[-1], device=dout.device)
        gradients = attention.at_keys(every, dtype, dout)
        return {
            f"phi_{kind}.{name}": gradient
            for kind in ("k", "v")
            for name, gradient in self._compression(kind)
            .weight_gradients(dtype, gradients[f"d{kind}"])
            .items()
        }

    def _compression(self, kind: str) -> SampledCompression:
        phi_k, phi_v = (None, None) if self.phi is None else self.phi
        x, cu_seqlens, rope = self.inputs, self.inputs.cu_seqlens_k, self.rope
        if kind == "v":
            return SampledCompression(x.v_cmp_raw, phi_v, self.config, cu_seqlens)
        if self.config.compress_rope == "none":
            rope = None
        return SampledCompression(x.k_cmp_raw, phi_k, self.config, cu_seqlens, rope)

    def compressed(self, kind: str, dtype: torch.dtype) -> Tensor:
        """All compressed keys (``k``, rotated) or values (``v``) in ``dtype``, kept once made."""
        if (kind, dtype) not in self._compressed:
            compression = self._compression(kind)
            blocks = torch.arange(compression.num_blocks, device=self.inputs.q.device)
            self._compressed[kind, dtype] = compression.at_blocks(blocks, dtype)["y"]
        return self._compressed[kind, dtype]

    def branch(self, branch: str, dtype: torch.dtype) -> SampledAttention:
        """One branch; the gradient of its output is its gate times that of the whole."""
        x, config = self.inputs, self.config
        options: dict[str, Any] = {
            "cu_seqlens_q": x.cu_seqlens_q,
            "cu_seqlens_k": x.cu_seqlens_k,
            "softmax_scale": self.scale,
            "gate": x.gates[..., BRANCHES.index(branch)],
        }
        if branch == "cmp":
            q = x.q if self.q_cmp is None else self.q_cmp
            k, v = self.compressed("k", dtype), self.compressed("v", dtype)
            return sampled_compressed(q, k, v, config, **options)
        if branch == "win":
            return sampled_window(x.q, x.k_win, x.v_win, config, **options)
        assert self.block_indices is not None
        return sampled_selected(x.q, x.k_slc, x.v_slc, self.block_indices, config, **options)
