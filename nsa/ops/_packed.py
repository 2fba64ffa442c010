"""Index arithmetic of packed sequences, on the device."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.ops._backend import reads_contents

# Least size of a dimension that depends on the number of tokens. No tensor is empty, and a traced
# program is valid for short sequences too: torch.export and torch.compile specialize on 0 and 1.
LEAST_SIZE = 2


def integers(
    values: Iterable[int], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Copy host integers to a device tensor ``[N]``, int32 or int64, without synchronizing.

    ``torch.tensor`` waits for the stream, and converting a long prompt takes it as long as two
    layers take to run.
    """
    values = list(values)
    code = {torch.int32: "i", torch.int64: "q"}[dtype]
    if not values:
        return torch.empty(0, dtype=dtype, device=device)
    found = torch.frombuffer(bytearray(struct.pack(f"{len(values)}{code}", *values)), dtype=dtype)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found


def lengths(cu_seqlens: Tensor) -> Tensor:
    """Tokens of each sequence, int64 ``[B]``."""
    return (cu_seqlens[1:] - cu_seqlens[:-1]).long()


def num_compressed(num_tokens: Tensor, config: NSAConfig) -> Tensor:
    """Compressed blocks fully inside the first ``num_tokens`` tokens, elementwise, int64.

    With ``num_tokens = t + 1`` this is num_cmp(t), the blocks visible to a query at t (Eq. 7).
    """
    blocks = (num_tokens - config.compress_block_size) // config.compress_stride + 1
    return blocks.clamp(min=0)


def compressed_rows(num_tokens: int, stride: int) -> int:
    """Rows of the compressed keys of packed tokens: ``S // d``, but at least 2."""
    rows: int = torch.sym_max(num_tokens // stride, LEAST_SIZE)  # max() would be a guard
    return rows


def compressed_cu_seqlens(cu_seqlens: Tensor, config: NSAConfig) -> Tensor:
    """Offsets of the sequences' compressed blocks, int32 ``[B + 1]``."""
    # roll instead of a slice, see `locate`. The first entry is negative and gives no block.
    tokens = (cu_seqlens - cu_seqlens.roll(1)).long()
    return num_compressed(tokens, config).cumsum(0).int()


def locate(num_rows: int, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sequence of each row, its index there, and whether it belongs to a sequence, ``[num_rows]``.

    Rows past the last sequence get the index of the last sequence and are marked invalid.
    """
    row = torch.arange(num_rows, device=cu_seqlens.device)
    # All offsets rather than a slice from the second one: with a single sequence the slice has a
    # different layout, and torch.compile would recompile.
    starts = cu_seqlens.long()
    last = cu_seqlens.shape[0] - 2
    sequence = (torch.searchsorted(starts, row, right=True) - 1).clamp(max=last)
    return sequence, row - starts[sequence], row < starts[-1]


def query_positions(num_rows: int, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
    """Position of each packed query in its sequence, int64 ``[num_rows]``.

    The last query has the position of the last key.
    """
    sequence, row, _ = locate(num_rows, cu_seqlens_q)
    return row + (lengths(cu_seqlens_k) - lengths(cu_seqlens_q))[sequence]


def pad(x: Tensor, cu_seqlens: Tensor, max_len: int) -> Tensor:
    """Packed rows ``[N, ...]`` as ``[B, max_len, ...]``, zero-padded at the end."""
    if reads_contents(cu_seqlens) and cu_seqlens.tolist() == [0, max_len] == [0, x.shape[0]]:
        return x[None]
    offset = torch.arange(max_len, device=x.device)
    index = cu_seqlens[:-1, None].long() + offset
    index = torch.where(offset < lengths(cu_seqlens)[:, None], index, x.shape[0])
    with_zero_row = torch.cat((x, x.new_zeros(1, *x.shape[1:])))
    return with_zero_row[index]


def unpad(x: Tensor, cu_seqlens: Tensor, num_rows: int) -> Tensor:
    """Inverse of :func:`pad`: ``[B, max_len, ...]`` as ``[num_rows, ...]``."""
    sequence, row, _ = locate(num_rows, cu_seqlens)
    return x[sequence, row.clamp(max=x.shape[1] - 1)]
