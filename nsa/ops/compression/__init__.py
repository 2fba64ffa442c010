"""Compression: each block of l tokens, with stride d, becomes one key and one value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.errors import check
from nsa.ops._backend import choose_backend
from nsa.ops._checks import check_heads
from nsa.ops._packed import compressed_cu_seqlens
from nsa.ops._sequences import Sequences, pack
from nsa.ops.compression.ops import compress_op
from nsa.ops.compression.reference import (
    PhiWeights,
    compress_reference,
    compressed_positions,
    rotated_place,
)
from nsa.rope import Rope, apply_rope
from nsa.stages import COMPRESSION, in_stage

__all__ = ["PhiWeights", "Raw", "check_weights", "compress", "compressed_positions", "run_compress"]


def compress(
    x: Tensor,
    weights: PhiWeights | None,
    config: NSAConfig,
    cu_seqlens: Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Compress raw keys or raw values (phi of Eq. 7, arXiv:2502.11089).

    Block i of a sequence covers its tokens ``[i * d, i * d + l)``; incomplete blocks do not exist.
    Keys are compressed before rotation; rotate row r of the result at position
    ``compressed_positions(...)[r]``.

    Args:
        x: raw keys or values, packed ``[S, Hkv, D]`` or dense ``[B, S, Hkv, D]``.
        weights: parameters of phi for keys or for values; None for ``mean``.
        config: the sparse pattern.
        cu_seqlens: int32 ``[B + 1]`` offsets of the sequences; None means one sequence.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        y ``[S // d, Hkv, D]`` (always packed; rows from ``cu_seqlens_cmp[-1]`` on are zero and
        never read) and ``cu_seqlens_cmp`` int32 ``[B + 1]``, the offsets of the sequences' blocks
        in y.

    Raises:
        ValueError: shapes, dtypes or offsets do not match.
    """
    dense = x.ndim == 4
    check(x.ndim in (3, 4), "x", "have shape [S, Hkv, D] or [B, S, Hkv, D]", tuple(x.shape))
    backend = choose_backend(backend, x, "x")
    check_heads("x", x, config.num_kv_heads, x.shape[-1], x)
    if cu_seqlens is None:
        batch, length = x.shape[:2] if dense else (1, x.shape[0])
        sequences = Sequences(None, batch, length, length, x.device)
    else:
        rule = "be left out with a dense batch [B, S, H, D]"
        check(not dense, "cu_seqlens", rule, "a tensor")
        sequences = Sequences.packed(cu_seqlens, num_tokens=x.shape[0], device=x.device)
    check_weights("weights", weights, config, x.shape[-1])
    (y,) = run_compress([Raw(pack(x), weights, None)], config, sequences, backend)
    num_rows = math.prod(x.shape[:-2]) // config.compress_stride
    y = y[:num_rows] if y.shape[0] > num_rows else y
    return y, compressed_cu_seqlens(sequences.cu_k, config)


class Raw(NamedTuple):
    """Keys or values to be compressed.

    Attributes:
        x: packed ``[S, Hkv, D]``.
        weights: parameters of phi; None for ``mean``.
        rope: rotation of the result; None for none.
    """

    x: Tensor
    weights: PhiWeights | None
    rope: Rope | None


@in_stage(COMPRESSION)
def run_compress(
    raw: Sequence[Raw],
    config: NSAConfig,
    sequences: Sequences,
    backend: str,
    starts: Tensor | None = None,
) -> list[Tensor]:
    """Run :func:`compress` for several packed, validated inputs in one call on a chosen backend.

    ``starts`` are the positions of the first token of each sequence, int32 ``[B]``; None means 0.
    """
    _, cu_k, _, len_k, num_sequences = sequences.arguments()
    cu_cmp, len_cmp = sequences.blocks_of(config)
    size, stride = config.compress_block_size, config.compress_stride
    where = (cu_k, cu_cmp, starts, num_sequences, len_k, len_cmp, size, stride)
    if backend == "triton" and config.phi != "mlp":
        xs = [one.x for one in raw]
        weights = [None if one.weights is None else one.weights.weight for one in raw]
        ropes = ["" if one.rope is None else one.rope.text for one in raw]
        middle = rotated_place(config) if any(ropes) else 0
        return list(compress_op(xs, weights, *where, False, ropes, middle))
    found = []
    with torch.autocast(raw[0].x.device.type, enabled=False):
        for x, phi, rope in raw:
            if backend == "triton":
                assert phi is not None
                num_blocks = num_sequences * len_cmp if cu_cmp is None else cu_cmp[-1]
                y = _compress_mlp(x, phi, where, num_blocks)
            else:
                y, _ = compress_reference(x, phi, config, sequences.cu_k)
            if rope is not None:
                places = compressed_positions(config, sequences.cu_k, y.shape[0], starts)
                y = apply_rope(y, places, rope)
            found.append(y)
    return found


def _compress_mlp(
    x: Tensor, weights: PhiWeights, where: tuple[Any, ...], num_blocks: int | Tensor
) -> Tensor:
    """Compute phi ``mlp`` by matmuls.

    ``(block + position) W1`` is ``block W1 + position W1``; the second term is computed once per
    head.
    """
    assert weights.position is not None and weights.w1 is not None and weights.w2 is not None
    (blocks,) = compress_op([x], [None], *where, True, [""], 0)  # [Hkv, C, l, D]
    # [Hkv, 1, hidden]
    bias = weights.position.flatten(1)[:, None].to(weights.w1.dtype) @ weights.w1
    hidden = torch.baddbmm(bias.to(x.dtype), blocks.flatten(2), weights.w1.to(x.dtype))
    update = torch.nn.functional.silu(hidden) @ weights.w2.to(x.dtype)  # [Hkv, C, D]
    owned = torch.arange(blocks.shape[1], device=x.device) < num_blocks
    update = torch.where(owned[:, None, None], update.transpose(0, 1), 0)
    (mean,) = compress_op([x], [None], *where, False, [""], 0)
    return mean + update


def check_weights(argument: str, weights: PhiWeights | None, config: NSAConfig, size: int) -> None:
    """Check that the parameters of phi match the config and the head size."""
    num_heads, length = config.num_kv_heads, config.compress_block_size
    hidden = config.compress_hidden_size or 2 * size
    by_token = (num_heads, length, size)
    mlp = {
        "position": by_token,
        "w1": (num_heads, length * size, hidden),
        "w2": (num_heads, hidden, size),
    }
    expected = {"mean": {}, "linear": {"weight": by_token}, "mlp": mlp}[config.phi]
    for name in ("weight", "position", "w1", "w2"):
        tensor = getattr(weights, name, None)
        shape, wanted = None if tensor is None else tuple(tensor.shape), expected.get(name)
        rule = "be None" if wanted is None else f"have shape {wanted}"
        parameter = f"{argument}.{name}"
        check(shape == wanted, parameter, f"{rule} for phi {config.phi}", shape)
