"""Compression: blocks of l tokens, d apart, become one key and one value each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.errors import check
from nsa.ops._backend import choose_backend, reads_contents
from nsa.ops._checks import check_cu_seqlens, check_cu_seqlens_contents, check_heads
from nsa.ops._packed import compressed_cu_seqlens
from nsa.ops._sequences import Sequences, pack
from nsa.ops.compression.ops import compress_op, gather_blocks_op
from nsa.ops.compression.reference import (
    PhiWeights,
    compress_reference,
    compressed_positions_reference,
    rotated_place,
)
from nsa.rope import Rope, apply_rope
from nsa.stages import COMPRESSION, in_stage

__all__ = ["PhiWeights", "check_weights", "compress", "compressed_positions", "run_compress"]


def compress(
    x: Tensor,
    weights: PhiWeights | None,
    config: NSAConfig,
    cu_seqlens: Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Compress raw keys or raw values (phi of Eq. 7, arXiv:2502.11089).

    Block i of a sequence covers its tokens ``[i * d, i * d + l)`` and exists when it is complete.
    Keys are compressed before they are rotated; rotate row r of the result at
    ``compressed_positions(...)[r]``.

    Args:
        x: raw keys or values, packed ``[S, Hkv, D]`` or dense ``[B, S, Hkv, D]``.
        weights: parameters of phi for keys or for values; None for ``mean``.
        config: the sparse pattern.
        cu_seqlens: int32 ``[B + 1]`` offsets of the sequences; None means one sequence.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        y ``[S // d, Hkv, D]`` (packed in any case; rows from ``cu_seqlens_cmp[-1]`` on are zero and
        never read) and ``cu_seqlens_cmp`` int32 ``[B + 1]``, the offsets of the sequences' blocks
        in y.

    Raises:
        ValueError: shapes, dtypes or offsets do not fit.
    """
    name = "compress"
    check(x.ndim in (3, 4), name, "x", "have shape [S, Hkv, D] or [B, S, Hkv, D]", tuple(x.shape))
    backend = choose_backend(name, backend, x, "x")
    check_heads(name, "x", x, config.num_kv_heads, x.shape[-1], x)
    sequences = _open_sequences(name, x, cu_seqlens)
    check_weights(name, "weights", weights, config, x.shape[-1])
    y = run_compress(pack(x), weights, config, sequences, None, backend)
    return y, compressed_cu_seqlens(sequences.cu_k, config)


def _open_sequences(name: str, x: Tensor, cu_seqlens: Tensor | None) -> Sequences:
    if x.ndim == 4:
        check(
            cu_seqlens is None,
            name,
            "cu_seqlens",
            "be left out with a dense batch [B, S, H, D]",
            "a tensor",
        )
        return Sequences(None, x.shape[0], x.shape[1], x.shape[1], x.device)
    if cu_seqlens is None:
        return Sequences(None, 1, x.shape[0], x.shape[0], x.device)
    check_cu_seqlens(name, "cu_seqlens", cu_seqlens, x.device)
    if reads_contents(cu_seqlens):
        check_cu_seqlens_contents(name, "cu_seqlens", cu_seqlens, x.shape[0])
    return Sequences(
        (cu_seqlens, cu_seqlens), cu_seqlens.shape[0] - 1, x.shape[0], x.shape[0], x.device
    )


@in_stage(COMPRESSION)
def run_compress(
    x: Tensor,
    weights: PhiWeights | None,
    config: NSAConfig,
    sequences: Sequences,
    rope: Rope | None,
    backend: str,
) -> Tensor:
    """See :func:`compress`; inputs are packed and checked, the backend is chosen. With ``rope`` the result is rotated."""
    if backend == "triton" and config.phi != "mlp":
        return compress_op(
            x,
            None if weights is None else weights.weight,
            *_where(config, sequences),
            *_rotation(config, rope),
        )
    with torch.autocast(x.device.type, enabled=False):
        if backend == "triton":
            assert weights is not None
            y = _compress_mlp(x, weights, config, sequences)
        else:
            y, _ = compress_reference(x, weights, config, sequences.cu_k)
        return (
            y
            if rope is None
            else apply_rope(y, compressed_positions(config, sequences.cu_k, y.shape[0]), rope)
        )


def _where(config: NSAConfig, sequences: Sequences) -> tuple[Any, ...]:
    _, cu_k, num_sequences, _, len_k = sequences.kernel_arguments()
    cu_cmp, len_cmp = sequences.kernel_blocks(config)
    return (
        cu_k,
        cu_cmp,
        num_sequences,
        len_k,
        len_cmp,
        config.compress_block_size,
        config.compress_stride,
    )


def _rotation(config: NSAConfig, rope: Rope | None) -> tuple[str, int]:
    return ("", 0) if rope is None else (rope.text, rotated_place(config))


def _compress_mlp(
    x: Tensor, weights: PhiWeights, config: NSAConfig, sequences: Sequences
) -> Tensor:
    """phi ``mlp`` by matrix products: ``(block + position) W1 = block W1 + position W1``, the second term once a head."""
    assert weights.position is not None and weights.w1 is not None and weights.w2 is not None
    where = _where(config, sequences)
    blocks = gather_blocks_op(x, *where)  # [Hkv, C, l, D]
    # [Hkv, 1, hidden]
    bias = weights.position.flatten(1)[:, None].to(weights.w1.dtype) @ weights.w1
    hidden = torch.baddbmm(bias.to(x.dtype), blocks.flatten(2), weights.w1.to(x.dtype))
    update = torch.nn.functional.silu(hidden) @ weights.w2.to(x.dtype)  # [Hkv, C, D]
    cu_cmp, num_sequences, len_cmp = where[1], where[2], where[4]
    owned = torch.arange(blocks.shape[1], device=x.device) < (
        num_sequences * len_cmp if cu_cmp is None else cu_cmp[-1]
    )
    return compress_op(x, None, *where, *_rotation(config, None)) + torch.where(
        owned[:, None, None], update.transpose(0, 1), 0
    )


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


def check_weights(
    function: str, argument: str, weights: PhiWeights | None, config: NSAConfig, size: int
) -> None:
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
        check(
            shape == expected.get(name),
            function,
            f"{argument}.{name}",
            f"{rule} for phi {config.phi}",
            shape,
        )
