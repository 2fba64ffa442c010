"""What is launched on a GPU that is not there: every operator, forward and backward, through its own launchers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nsa import NSAConfig, PhiWeights, Rope
from nsa.ops._boundary import Sequences
from nsa.ops.combination.ops import combine_op
from nsa.ops.compressed import run_compressed_attention
from nsa.ops.compression import run_compress
from nsa.ops.selected import run_selected_attention
from nsa.ops.selection import run_select_blocks
from nsa.ops.window import run_window_attention
from nsa.testing import packed_offsets


@dataclass(frozen=True)
class Batch:
    """Sequences of one length.

    Attributes:
        num_sequences: B.
        num_queries: of each sequence.
        num_keys: of each sequence, at least ``num_queries``.
        longest: tokens of the longest sequence that the caller promises: launchers choose kernels by it, so that few tokens
            show what many need. None makes a dense batch, otherwise it is packed.
    """

    num_sequences: int
    num_queries: int
    num_keys: int
    longest: int | None = None

    def sequences(self) -> Sequences:
        """The batch as operators take it."""
        device = torch.device("cpu")
        if self.longest is None:
            return Sequences(None, self.num_sequences, self.num_queries, self.num_keys, device, dense=True)
        queries, keys = (packed_offsets([length] * self.num_sequences) for length in (self.num_queries, self.num_keys))
        return Sequences((queries, keys), self.num_sequences, self.longest, self.longest, device)

    def queries(self, *sizes: int, dtype: torch.dtype) -> Tensor:
        """Zeros ``[T, ..]`` that want a gradient."""
        return torch.zeros(self.num_sequences * self.num_queries, *sizes, dtype=dtype, requires_grad=True)

    def keys(self, *sizes: int, dtype: torch.dtype, stride: int = 1) -> Tensor:
        """Zeros ``[S, ..]``, or ``[S // stride, ..]`` for compressed keys, that want a gradient."""
        return torch.zeros(self.num_sequences * self.num_keys // stride, *sizes, dtype=dtype, requires_grad=True)


# Packed, so short that no gradient is summed in parts; so long that it is; and with the tiles for very many compressed keys.
SHORT, PARTS, LONG = Batch(2, 64, 96, 96), Batch(2, 64, 96, 4096), Batch(2, 64, 96, 65_536)


def backward(output: Tensor, *inputs: Tensor) -> None:
    """Run the backward pass too."""
    torch.autograd.grad(output, inputs, torch.zeros_like(output))


def window(config: NSAConfig, dtype: torch.dtype, batch: Batch) -> None:
    """Kernels of the window branch."""
    q = batch.queries(config.num_heads, config.head_dim, dtype=dtype)
    k = batch.keys(config.num_kv_heads, config.head_dim, dtype=dtype)
    v = batch.keys(config.num_kv_heads, config.value_dim, dtype=dtype)
    out, _ = run_window_attention(q, k, v, config, batch.sequences(), 1.0, "triton")
    backward(out, q, k, v)


def compressed(config: NSAConfig, dtype: torch.dtype, batch: Batch) -> None:
    """Kernels of the compressed branch."""
    q = batch.queries(config.num_heads, config.head_dim, dtype=dtype)
    k = batch.keys(config.num_kv_heads, config.head_dim, dtype=dtype, stride=config.compress_stride)
    v = batch.keys(config.num_kv_heads, config.value_dim, dtype=dtype, stride=config.compress_stride)
    out, _ = run_compressed_attention(q, k, v, config, batch.sequences(), 1.0, "triton")
    assert out is not None
    backward(out, q, k, v)


def select(config: NSAConfig, dtype: torch.dtype, batch: Batch) -> None:
    """The kernel of scores and choice; with coarse blocks in the config, for both stages."""
    q = batch.queries(config.num_heads, config.head_dim, dtype=dtype)
    k = batch.keys(config.num_kv_heads, config.head_dim, dtype=dtype, stride=config.compress_stride)
    lse = batch.queries(config.num_heads, dtype=torch.float32)
    run_select_blocks(q, k, lse, config, batch.sequences(), 1.0, "triton")


def selected(config: NSAConfig, dtype: torch.dtype, batch: Batch) -> None:
    """Kernels of the selected branch."""
    q = batch.queries(config.num_heads, config.head_dim, dtype=dtype)
    k = batch.keys(config.num_kv_heads, config.head_dim, dtype=dtype)
    v = batch.keys(config.num_kv_heads, config.value_dim, dtype=dtype)
    blocks = torch.arange(config.num_selected_blocks, dtype=torch.int32).expand(q.shape[0], config.num_kv_heads, -1)
    out, _ = run_selected_attention(q, k, v, blocks, config, batch.sequences(), 1.0, "triton")
    backward(out, q, k, v)


def compress(config: NSAConfig, dtype: torch.dtype, batch: Batch) -> None:
    """Kernels of compression: keys, which are rotated, and values, which are not."""
    for size, rope in ((config.head_dim, Rope.from_config(config)), (config.value_dim, None)):
        x = batch.keys(config.num_kv_heads, size, dtype=dtype)
        weights = phi_weights(config, dtype, size)
        parameters = () if weights is None else tuple(w for w in vars(weights).values() if w is not None)
        backward(run_compress(x, weights, config, batch.sequences(), rope, "triton"), x, *parameters)


def phi_weights(config: NSAConfig, dtype: torch.dtype, size: int) -> PhiWeights | None:
    """Zeros for the parameters of phi."""

    def zeros(*sizes: int) -> Tensor:
        return torch.zeros(config.num_kv_heads, *sizes, dtype=dtype, requires_grad=True)

    length = config.compress_block_size
    if config.phi == "mean":
        return None
    if config.phi == "linear":
        return PhiWeights(weight=zeros(length, size))
    return PhiWeights(position=zeros(length, size), w1=zeros(length * size, 2 * size), w2=zeros(2 * size, size))


def combine(config: NSAConfig, dtype: torch.dtype, batch: Batch) -> None:
    """Kernels of the gated sum of the branches that are on."""
    outputs = {name: batch.queries(config.num_heads, config.value_dim, dtype=dtype) for name in config.branches}
    gates = batch.queries(config.num_heads, 3, dtype=dtype)
    out = combine_op(*(outputs.get(name) for name in ("cmp", "slc", "win")), gates)
    backward(out, *outputs.values(), gates)
