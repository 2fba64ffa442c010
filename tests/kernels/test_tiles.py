"""Pieces that all kernels share, in the interpreter."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from nsa.ops._sequences import Sequences
from nsa.ops._triton import tiles
from nsa.ops._triton.tiles import find_tile, tiles_before
from nsa.testing import packed_offsets


@triton.jit
def find_kernel(cu_ptr, out_ptr, num_sequences, TILE: tl.constexpr, HEADS: tl.constexpr):
    number = tl.program_id(0)
    sequence, tile = find_tile(cu_ptr, number, num_sequences, 0, TILE, HEADS)
    tl.store(out_ptr + 3 * number, sequence)
    tl.store(out_ptr + 3 * number + 1, tile)
    before = tl.full([], 0, tl.int32)
    if sequence < num_sequences and HEADS == 1:
        before = tiles_before(cu_ptr, sequence, 0, TILE)
    tl.store(out_ptr + 3 * number + 2, before)


UNEVEN = [(7 * i) % 41 if i % 3 == 0 else 0 for i in range(300)]


@pytest.mark.parametrize(
    ("lengths", "size", "heads"),
    [
        ([37], 16, 1),
        ([0, 0, 5], 16, 1),
        ([16, 16, 0, 48, 1], 16, 1),
        ([1] * 40, 16, 6),
        (UNEVEN, 16, 1),
        (UNEVEN, 60, 6),
    ],
)
def test_each_tile_once(lengths, size, heads):
    """Programs find every tile of every sequence once, in order; the others find none."""
    check_tiles(lengths, size, heads)


def test_tiles_of_very_many_sequences(monkeypatch):
    """The first step of the search goes round more than once."""
    monkeypatch.setattr(tiles, "SEQUENCES", tl.constexpr(4))
    check_tiles([5 if i % 9 == 0 else 0 for i in range(70)], 16, 1)


def check_tiles(lengths, size, heads):
    cu = packed_offsets(lengths)
    expected = [
        (b, tile) for b, length in enumerate(lengths) for tile in range(-(-length * heads // size))
    ]
    number = Sequences((cu, cu), len(lengths), max(lengths), max(lengths), cu.device).num_tiles(
        sum(lengths) * heads, size, 0
    )
    out = torch.empty(number, 3, dtype=torch.int32)
    find_kernel[(number,)](cu, out, len(lengths), TILE=size, HEADS=heads)
    found = [(b, tile) for b, tile, _ in out.tolist() if b < len(lengths)]
    assert found == expected
    for place, (b, tile, before) in enumerate(out.tolist()):
        assert b == len(lengths) or heads > 1 or place == before + tile
