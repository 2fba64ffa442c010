"""Pieces that all kernels share, in the interpreter."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa.ops._triton.tiles import find_tile
from nsa.testing import packed_offsets

TILE = 16


@triton.jit
def find_kernel(cu_ptr, out_ptr, num_sequences, TILE: tl.constexpr):
    number = tl.program_id(0)
    sequence, tile = find_tile(cu_ptr, number, num_sequences, 0, TILE)
    tl.store(out_ptr + 2 * number, sequence)
    tl.store(out_ptr + 2 * number + 1, tile)


def test_tiles_of_many_sequences():
    """More sequences than one step of the search looks at; those without rows have no tile."""
    lengths = [(7 * i) % 41 if i % 3 == 0 else 0 for i in range(300)]
    expected = [[b, tile] for b, length in enumerate(lengths) for tile in range(-(-length // TILE))]
    out = torch.empty(len(expected) + 3, 2, dtype=torch.int32)
    find_kernel[(len(out),)](packed_offsets(lengths), out, len(lengths), TILE=TILE)
    assert out[: len(expected)].tolist() == expected
    assert out[len(expected) :, 0].tolist() == [len(lengths)] * 3
