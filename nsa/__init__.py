"""Native Sparse Attention for PyTorch (arXiv:2502.11089)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsa.attention import check_inputs, native_sparse_attention
    from nsa.cache import LayerCache, NSACache
    from nsa.config import NSAConfig, RopeScaling
    from nsa.module import NativeSparseAttention
    from nsa.ops._sequences import Sequences
    from nsa.ops.combination import combine
    from nsa.ops.compression import PhiWeights, compress, compressed_positions
    from nsa.ops.index_loss import index_loss
    from nsa.ops.range import compressed_attention, window_attention
    from nsa.ops.selected import selected_attention
    from nsa.ops.selection import blocks_to_ranges, select_blocks
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
    "index_loss",
    "native_sparse_attention",
    "select_blocks",
    "selected_attention",
    "window_attention",
]

_HOMES = (
    "attention",
    "cache",
    "config",
    "module",
    "ops.combination",
    "ops.compression",
    "ops.index_loss",
    "ops.range",
    "ops.selected",
    "ops.selection",
    "rope",
)


def __getattr__(name: str) -> object:
    """Load PyTorch and the operators at the first use of a public name.

    Many commands of the command line answer without them.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for module in _HOMES:
        found = vars(import_module(f"{__name__}.{module}"))
        globals().update({public: found[public] for public in __all__ if public in found})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
