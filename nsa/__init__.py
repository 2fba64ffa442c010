"""Native Sparse Attention for PyTorch (arXiv:2502.11089)."""

from nsa.attention import check_inputs, native_sparse_attention
from nsa.cache import LayerCache, NSACache
from nsa.config import NSAConfig, RopeScaling
from nsa.module import NativeSparseAttention
from nsa.ops._boundary import Sequences
from nsa.ops.combination import combine
from nsa.ops.compressed import compressed_attention
from nsa.ops.compression import PhiWeights, compress, compressed_positions
from nsa.ops.selected import selected_attention
from nsa.ops.selection import blocks_to_ranges, select_blocks
from nsa.ops.window import window_attention
from nsa.rope import Rope, apply_rope

__version__ = "0.1.0"

__all__ = [
    "LayerCache",
    "NSACache",
    "NSAConfig",
    "NativeSparseAttention",
    "PhiWeights",
    "Rope",
    "RopeScaling",
    "Sequences",
    "apply_rope",
    "blocks_to_ranges",
    "check_inputs",
    "combine",
    "compress",
    "compressed_attention",
    "compressed_positions",
    "native_sparse_attention",
    "select_blocks",
    "selected_attention",
    "window_attention",
]
