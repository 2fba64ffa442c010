"""Sampled rows of the compression, with rotation."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.ops._packed import compressed_cu_seqlens, locate
from nsa.ops.compression.reference import PhiWeights, compress_reference, rotated_place
from nsa.rope import Rope, apply_rope
from nsa.testing.sampled.gate import compute_dtype

# Blocks that are compressed at a time.
PART_BLOCKS = 2**13


@dataclass(frozen=True)
class SampledCompression:
    """Compression of packed raw keys or values, whose values can be had row by row.

    Attributes:
        x: ``[S, Hkv, D]`` in the dtype that it is stored in.
        weights: parameters of phi, or None for ``mean``.
        config: the sparse pattern.
        cu_seqlens: int32 ``[B + 1]`` offsets of the tokens.
        rope: rotates the result, or None.
    """

    x: Tensor
    weights: PhiWeights | None
    config: NSAConfig
    cu_seqlens: Tensor
    rope: Rope | None = None

    @property
    def num_blocks(self) -> int:
        """Compressed blocks of all sequences."""
        return int(compressed_cu_seqlens(self.cu_seqlens, self.config)[-1])

    @torch.no_grad()
    def at_blocks(self, blocks: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """``y`` ``[R, Hkv, D]`` of the packed compressed rows ``blocks``."""
        parts = [
            self._phi(self.x[self._tokens(part)], part, self._weights(dtype), dtype)
            for part in self._split(blocks)
        ]
        return {"y": torch.cat((self.x.new_zeros(0, *self.x.shape[1:], dtype=dtype), *parts))}

    @torch.enable_grad()
    def at_tokens(self, tokens: Tensor, dtype: torch.dtype, dy: Tensor) -> dict[str, Tensor]:
        """``dx`` ``[R, Hkv, D]`` of the packed ``tokens``, from ``dy`` of all compressed rows."""
        blocks, inside = self.blocks_of(tokens)
        dx = torch.zeros(
            tokens.numel(), *self.x.shape[1:], dtype=compute_dtype(dtype), device=self.x.device
        )
        for place in range(blocks.shape[1]):
            mine = inside[:, place].nonzero()[:, 0]
            for part in self._split(mine):
                block = blocks[part, place]
                index = self._tokens(block)  # [R, l]
                x = self.x.detach()[index].to(dtype).requires_grad_()
                self._phi(x, block, self._weights(dtype), dtype).backward(dy[block].to(dtype))
                assert x.grad is not None
                dx[part] += (x.grad * (index == tokens[part, None])[..., None, None]).sum(1)
        return {"dx": dx.to(dtype)}

    @torch.enable_grad()
    def weight_gradients(self, dtype: torch.dtype, dy: Tensor) -> dict[str, Tensor]:
        """Gradients of the parameters of phi by name, from all blocks; none for ``mean``."""
        weights = self._weights(dtype)
        leaves = (
            {} if weights is None else {f.name: getattr(weights, f.name) for f in fields(weights)}
        )
        leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items() if leaf is not None}
        if not leaves:
            return {}
        total = {
            name: torch.zeros_like(leaf, dtype=compute_dtype(dtype))
            for name, leaf in leaves.items()
        }
        for block in self._split(torch.arange(self.num_blocks, device=self.x.device)):
            y = self._phi(self.x.detach()[self._tokens(block)], block, weights, dtype)
            for name, grad in zip(
                leaves,
                torch.autograd.grad(y, list(leaves.values()), dy[block].to(dtype)),
                strict=True,
            ):
                total[name] += grad
        return {name: grad.to(leaves[name].dtype) for name, grad in total.items()}

    def blocks_of(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Packed compressed rows that hold each token, ``[R, l / d]``, and which of them exist."""
        stride, each = (
            self.config.compress_stride,
            self.config.compress_block_size // self.config.compress_stride,
        )
        cu_cmp = compressed_cu_seqlens(self.cu_seqlens, self.config).long()
        sequence, inside, _ = locate(self.x.shape[0], self.cu_seqlens)
        first, end = cu_cmp[sequence[tokens], None], cu_cmp[sequence[tokens] + 1, None]
        block = (
            first + (inside[tokens] // stride)[:, None] - torch.arange(each, device=tokens.device)
        )
        return block.clamp(min=0), (block >= first) & (block < end)

    def _split(self, blocks: Tensor) -> tuple[Tensor, ...]:
        return blocks.split(PART_BLOCKS) if blocks.numel() else ()

    def _tokens(self, blocks: Tensor) -> Tensor:
        """Packed tokens of compressed rows, ``[R, l]``."""
        sequence, inside, _ = self._place(blocks)
        start = self.cu_seqlens.long()[sequence] + inside * self.config.compress_stride
        return start[:, None] + torch.arange(self.config.compress_block_size, device=blocks.device)

    def _place(self, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sequence, inside, real = locate(self.x.shape[0] // self.config.compress_stride,
                                        compressed_cu_seqlens(self.cu_seqlens, self.config))  # fmt: skip
        return sequence[blocks], inside[blocks], real[blocks]

    def _weights(self, dtype: torch.dtype) -> PhiWeights | None:
        if self.weights is None:
            return None
        given = {f.name: getattr(self.weights, f.name) for f in fields(self.weights)}
        # A weighted sum takes its weights as they are stored; matrix products take them in the
        # dtype of the tokens.
        as_stored = self.config.phi == "linear" and dtype != torch.float64
        return PhiWeights(
            **{
                name: None if w is None else w.detach().to(w.dtype if as_stored else dtype)
                for name, w in given.items()
            }
        )

    def _phi(
        self, x: Tensor, blocks: Tensor, weights: PhiWeights | None, dtype: torch.dtype
    ) -> Tensor:
        """Tokens ``[R, l, Hkv, D]`` of the compressed rows ``blocks`` as one row each: every block is a sequence of its own."""
        x, config = x.to(dtype), self.config
        if config.phi == "mlp" and dtype in (torch.float16, torch.bfloat16):
            assert weights is not None
            y = _plain_mlp(x, weights)
        else:
            cu = (
                torch.arange(x.shape[0] + 1, device=x.device, dtype=torch.int32)
                * config.compress_block_size
            )
            y = compress_reference(x.flatten(0, 1), weights, config, cu)[0][: x.shape[0]]
        if self.rope is None:
            return y
        _, inside, _ = self._place(blocks)
        return apply_rope(y, inside * config.compress_stride + rotated_place(config), self.rope)


def _plain_mlp(x: Tensor, weights: PhiWeights) -> Tensor:
    """phi ``mlp`` of blocks ``[R, l, Hkv, D]`` in their own dtype, each product rounded as a matrix product rounds it."""
    assert weights.position is not None and weights.w1 is not None and weights.w2 is not None
    placed = x.transpose(1, 2) + weights.position
    hidden = torch.einsum("che,heo->cho", placed.flatten(2), weights.w1)
    return x.float().mean(1).to(x.dtype) + torch.einsum(
        "cho,hod->chd", torch.nn.functional.silu(hidden), weights.w2
    )
