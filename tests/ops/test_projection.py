"""Packed weights of one product, and sequences described once for all layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nsa import NativeSparseAttention, Sequences
from nsa.ops._layout import packed
from nsa.ops._packed import compressed_cu_seqlens
from tests.ops.cases import offsets, small


def make(**changes: Any) -> NativeSparseAttention:
    torch.manual_seed(0)
    return NativeSparseAttention(24, small(**changes))


def test_packed_weights_end_with_zeros():
    weights = [torch.randn(rows, 8) for rows in (5, 7)]
    whole = packed(weights, torch.float64)
    assert whole.dtype == torch.float64
    assert torch.equal(whole, torch.cat([*weights, torch.zeros(4, 8)]).double())


def test_sequences_for_all_layers():
    module, x, cu = make(), torch.randn(90, 24), offsets((70, 3, 0, 17))
    expected = module(x, cu_seqlens=cu, max_seqlen=70)
    for sequences in (
        Sequences.packed(cu, 70),
        Sequences.packed(cu),
        Sequences.packed(cu, 70).with_blocks(module.config),
    ):
        assert torch.equal(module(x, sequences=sequences), expected)
    assert torch.equal(
        module(x.view(2, 45, 24), sequences=Sequences.packed(cu)), expected.view(2, 45, 24)
    )


def test_blocks_of_another_pattern_are_counted_again():
    other = small(compress_stride=8, compress_block_size=16, block_size=16)
    sequences = Sequences.packed(offsets((70, 20))).with_blocks(other)
    config = small()
    assert (config.compress_block_size, config.compress_stride) != (16, 8)
    found = sequences.with_blocks(config)
    assert found.cu_cmp is not None
    assert torch.equal(found.cu_cmp, compressed_cu_seqlens(offsets((70, 20)), config))
    assert found.with_blocks(config) is found


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"sequences": Sequences(None, 2, 20, 20, torch.device("cpu"))},
            r"sequences must contain as many tokens as x \(30\), got 2 of 20",
        ),
        (
            {
                "sequences": Sequences(None, 1, 30, 30, torch.device("cpu")),
                "cu_seqlens": offsets((30,)),
            },
            "cu_seqlens must be left out",
        ),
        (
            {"sequences": Sequences(None, 1, 30, 30, torch.device("meta"))},
            "sequences must be on cpu like x, got meta",
        ),
    ],
    ids=["count", "both", "device"],
)
def test_sequences_that_do_not_fit(given, message):
    with pytest.raises(ValueError, match=message):
        make()(torch.randn(30, 24), **given)


@pytest.mark.parametrize(
    ("cu", "longest", "rule"),
    [
        (offsets((4, -1)), None, "cu_seqlens must not decrease"),
        (offsets((4,)).long(), None, "cu_seqlens must be int32"),
        (offsets((4,)), 3, "max_seqlen must be at least the longest sequence"),
    ],
    ids=["falling", "dtype", "short"],
)
def test_bad_offsets(cu, longest, rule):
    with pytest.raises(ValueError, match=rule):
        Sequences.packed(cu, longest)
