"""Sampled rows of the compression, with rotation."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import silu

from nsa.config import NSAConfig
from nsa.ops._packed import compressed_cu_seqlens, locate
from nsa.ops.compression.reference import PhiWeights, compress_reference, rotated_place
from nsa.rope import Rope, apply_rope
from nsa.testing.sampled.gate import compute_dtype

# Blocks that are compressed at a time.
PART_BLOCKS = 2**13


@dataclass(frozen=True)
class SampledCompression:
    """Compression of packed raw keys or values, computed row by row.

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
    def _cu_cmp(self) -> Tensor:
        return compressed_cu_seqlens(self.cu_seqlens, self.config)

    @property
    def num_blocks(self) -> int:
        """Compressed blocks of all sequences."""
        return int(self._cu_cmp[-1])

    @torch.no_grad()
    def at_blocks(self, blocks: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """``y`` ``[R, Hkv, D]`` of the packed compressed rows ``blocks``."""
        y = self.x.new_empty(blocks.numel(), *self.x.shape[1:], dtype=dtype)
        for rows in _parts(blocks.numel(), blocks.device):
            part = blocks[rows]
            y[rows] = self._phi(self.x[self._tokens(part)], part, self._weights(dtype), dtype)
        return {"y": y}

    @torch.enable_grad()
    def at_tokens(self, tokens: Tensor, dtype: torch.dtype, dy: Tensor) -> dict[str, Tensor]:
        """``dx`` ``[R, Hkv, D]`` of the packed ``tokens``, from ``dy`` of all compressed rows."""
        blocks, exists = self.blocks_of(tokens)
        dx = self.x.new_zeros(tokens.numel(), *self.x.shape[1:], dtype=compute_dtype(dtype))
        every = exists.nonzero()[:, 0]  # a row of `tokens` for each block that holds it
        for part in _parts(every.numel(), every.device):
            rows, block = every[part], blocks[exists][part]
            index = self._tokens(block)  # [R, l]
            x = self.x.detach()[index].to(dtype).requires_grad_()
            y = self._phi(x, block, self._weights(dtype), dtype)
            (gradient,) = torch.autograd.grad(y, x, dy[block].to(dtype))
            dx.index_add_(0, rows, gradient[index == tokens[rows, None]].to(dx.dtype))
        return {"dx": dx.to(dtype)}

    @torch.enable_grad()
    def weight_gradients(self, dtype: torch.dtype, dy: Tensor) -> dict[str, Tensor]:
        """Gradients of the parameters of phi by name, from all blocks; none for ``mean``."""
        weights = self._weights(dtype)
        if weights is None:
            return {}
        leaves = {name: x.requires_grad_() for name, x in vars(weights).items() if x is not None}
        total = {
            name: torch.zeros_like(leaf, dtype=compute_dtype(dtype))
            for name, leaf in leaves.items()
        }
        for block in _parts(self.num_blocks, self.x.device):
            y = self._phi(self.x.detach()[self._tokens(block)], block, weights, dtype)
            gradients = torch.autograd.grad(y, list(leaves.values()), dy[block].to(dtype))
            for name, gradient in zip(leaves, gradients, strict=True):
                total[name] += gradient
        return {name: gradient.to(leaves[name].dtype) for name, gradient in total.items()}

    def blocks_of(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Packed compressed rows that hold each token, ``[R, l / d]``, and which of them exist."""
        stride = self.config.compress_stride
        back = torch.arange(self.config.compress_block_size // stride, device=tokens.device)
        sequence, inside, _ = locate(self.x.shape[0], self.cu_seqlens)
        cu_cmp, sequence = self._cu_cmp.long(), sequence[tokens]
        first, end = cu_cmp[sequence, None], cu_cmp[sequence + 1, None]
        block = first + (inside[tokens] // stride)[:, None] - back
        return block.clamp(min=0), (block >= first) & (block < end)

    def _place(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Sequence of compressed rows, and their first tokens inside it."""
        stride = self.config.compress_stride
        sequence, inside, _ = locate(self.x.shape[0] // stride, self._cu_cmp)
        return sequence[blocks], inside[blocks] * stride

    def _tokens(self, blocks: Tensor) -> Tensor:
        """Packed tokens of compressed rows, ``[R, l]``."""
        sequence, first = self._place(blocks)
        offset = torch.arange(self.config.compress_block_size, device=blocks.device)
        return (self.cu_seqlens.long()[sequence] + first)[:, None] + offset

    def _weights(self, dtype: torch.dtype) -> PhiWeights | None:
        if self.weights is None:
            return None
        # A weighted sum takes its weights as they are stored; matrix products take them in the
        # dtype of the tokens.
        as_stored = self.config.phi == "linear" and dtype != torch.float64
        given = {field.name: getattr(self.weights, field.name) for field in fields(PhiWeights)}
        return PhiWeights(
            **{
                name: None if x is None else x.detach().to(x.dtype if as_stored else dtype)
                for name, x in given.items()
            }
        )

    def _phi(
        self, x: Tensor, blocks: Tensor, weights: PhiWeights | None, dtype: torch.dtype
    ) -> Tensor:
        """Tokens ``[R, l, Hkv, D]`` of compressed rows, one row each: a block is a sequence."""
        x, config = x.to(dtype), self.config
        if config.phi == "mlp" and dtype in (torch.float16, torch.bfloat16):
            assert weights is not None
            y = _plain_mlp(x, weights)
        else:
            block = torch.arange(x.shape[0] + 1, device=x.device, dtype=torch.int32)
            cu_seqlens = block * config.compress_block_size
            y = compress_reference(x.flatten(0, 1), weights, config, cu_seqlens)[0][: x.shape[0]]
        if self.rope is None:
            return y
        _, first = self._place(blocks)
        return apply_rope(y, first + rotated_place(config), self.rope)


def _parts(count: int, device: torch.device) -> tuple[Tensor, ...]:
    """``0 .. count - 1`` in parts; none without any."""
    return torch.arange(count, device=device).split(PART_BLOCKS) if count else ()


def _plain_mlp(x: Tensor, weights: PhiWeights) -> Tensor:
    """phi ``mlp`` of blocks ``[R, l, Hkv, D]`` in their dtype, each product rounded by itself."""
    assert weights.position is not None and weights.w1 is not None and weights.w2 is not None
    placed = x.transpose(1, 2) + weights.position
    hidden = torch.einsum("che,heo->cho", placed.flatten(2), weights.w1)
    out = torch.einsum("cho,hod->chd", silu(hidden), weights.w2)
    return x.float().mean(1).to(x.dtype) + out
