"""Compression: blocks of l tokens, d apart, become one key and one value each."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.errors import check
from nsa.ops._boundary import check_cu_seqlens, check_cu_seqlens_contents, check_heads, choose_backend, pack, reads_contents
from nsa.ops.compression.reference import PhiWeights, compress_reference, compressed_positions_reference

__all__ = ["PhiWeights", "check_weights", "compress", "compressed_positions"]


def compress(
    x: Tensor,
    weights: PhiWeights | None,
    config: NSAConfig,
    cu_seqlens: Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Compress raw keys or raw values (phi of Eq. 7, arXiv:2502.11089).

    Block i of a sequence covers its tokens ``[i * d, i * d + l)`` and exists when it is complete. Keys are compressed before
    they are rotated; rotate row r of the result at ``compressed_positions(...)[r]``.

    Args:
        x: raw keys or values, packed ``[S, Hkv, D]`` or dense ``[B, S, Hkv, D]``.
        weights: parameters of phi for keys or for values; None for ``mean``.
        config: the sparse pattern.
        cu_seqlens: int32 ``[B + 1]`` offsets of the sequences; None means one sequence.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        y ``[S // d, Hkv, D]`` (packed in any case; rows from ``cu_seqlens_cmp[-1]`` on are zero and never read) and
        ``cu_seqlens_cmp`` int32 ``[B + 1]``, the offsets of the sequences' blocks in y.

    Raises:
        ValueError: shapes, dtypes or offsets do not fit.
    """
    choose_backend("compress", backend)
    check(x.ndim in (3, 4), "compress", "x", "have shape [S, Hkv, D] or [B, S, Hkv, D]", tuple(x.shape))
    check_heads("compress", "x", x, config.num_kv_heads, x.shape[-1], x)
    if x.ndim == 4:
        check(cu_seqlens is None, "compress", "cu_seqlens", "be left out with a dense batch [B, S, H, D]", "a tensor")
        cu_seqlens = torch.arange(x.shape[0] + 1, dtype=torch.int32, device=x.device) * x.shape[1]
    elif cu_seqlens is None:
        cu_seqlens = torch.tensor([0, x.shape[0]], dtype=torch.int32, device=x.device)
    else:
        check_cu_seqlens("compress", "cu_seqlens", cu_seqlens, x.device)
        if reads_contents(cu_seqlens):
            check_cu_seqlens_contents("compress", "cu_seqlens", cu_seqlens, x.shape[0])
    check_weights("compress", "weights", weights, config, x.shape[-1])
    with torch.autocast(x.device.type, enabled=False):
        return compress_reference(pack(x), weights, config, cu_seqlens)


def compressed_positions(config: NSAConfig, cu_seqlens: Tensor, num_rows: int) -> Tensor:
    """Position inside its sequence at which each compressed key is rotated.

    Args:
        config: the sparse pattern; ``compress_rope`` says where in the block.
        cu_seqlens: int32 ``[B + 1]`` offsets of the tokens.
        num_rows: rows of the compressed keys, ``S // d``.

    Returns:
        int64 ``[num_rows]``; arbitrary in rows that no block owns.
    """
    return compressed_positions_reference(config, cu_seqlens, num_rows)


def check_weights(function: str, argument: str, weights: PhiWeights | None, config: NSAConfig, size: int) -> None:
    """The parameters of phi fit the config and the head size."""
    num_heads, length = config.num_kv_heads, config.compress_block_size
    hidden = config.compress_hidden_size or 2 * size
    expected: dict[str, tuple[int, ...]] = {}
    if config.phi == "linear":
        expected = {"weight": (num_heads, length, size)}
    elif config.phi == "mlp":
        expected = {
            "position": (num_heads, length, size),
            "w1": (num_heads, length * size, hidden),
            "w2": (num_heads, hidden, size),
        }
    for name in ("weight", "position", "w1", "w2"):
        tensor = None if weights is None else getattr(weights, name)
        shape = None if tensor is None else tuple(tensor.shape)
        rule = f"have shape {expected[name]}" if name in expected else "be None"
        check(shape == expected.get(name), function, f"{argument}.{name}", f"{rule} for phi {config.phi}", shape)
