"""Weights that are neighbours in memory, and sequences described once for all layers."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from nsa import NativeSparseAttention, Sequences
from nsa.ops._packed import compressed_cu_seqlens
from nsa.ops.projection.layout import lay_together, padded, stacked
from tests.ops.cases import offsets, small


def make(**changes: Any) -> NativeSparseAttention:
    torch.manual_seed(0)
    return NativeSparseAttention(24, small(**changes))


def rows_of(module: NativeSparseAttention) -> torch.Tensor:
    """All weights one behind the other, and zeros up to a multiple of 8 rows."""
    whole = torch.cat([weight.detach() for weight in module.projection_weights()])
    return torch.cat([whole, whole.new_zeros(padded(len(whole)) - len(whole), 24)])


def is_view(module: NativeSparseAttention) -> bool:
    weights = module.projection_weights()
    whole = stacked(weights, weights[0].dtype)
    assert torch.equal(whole, rows_of(module))
    return whole.data_ptr() == weights[0].data_ptr()


def test_moved_weights_are_found_where_they_are():
    """A weight with other memory is read from there."""
    module = make()
    weight = module.projection_weights()[3]
    weight.data = torch.full_like(weight, 3.0)
    assert not is_view(module)
    other = make()
    other.load_state_dict(module.state_dict(), assign=True)
    assert torch.equal(other.projection_weights()[3], weight)
    assert is_view(other)
    module.to(torch.float64)
    assert is_view(module)


def test_rows_behind_the_memory_are_not_read():
    """Neighbours in memory without room for the rows that fill up."""
    memory = torch.randn(12, 8)
    weights = [nn.Parameter(memory[:5]), nn.Parameter(memory[5:])]
    whole = stacked(weights, torch.float32)
    assert whole.shape == (16, 8)
    assert torch.equal(whole, torch.cat([memory, torch.zeros(4, 8)]))
    lay_together(weights)
    assert stacked(weights, torch.float32).data_ptr() == weights[0].data_ptr()
    # Some weights of a block are followed by others, not by zeros.
    assert torch.equal(
        stacked(weights[:1], torch.float32), torch.cat([memory[:5], torch.zeros(11, 8)])
    )


def test_a_block_is_kept_no_longer_than_its_weights():
    module = make()
    weights = module.projection_weights()
    block = weakref.ref(stacked(weights, torch.float32))
    alias, expected = [weight.detach() for weight in weights], torch.cat(weights).detach()
    assert stacked(alias, torch.float32) is block()
    for weight in weights:  # as FSDP1 and DeepSpeed do
        weight.data = weight.detach().clone()
    assert torch.equal(stacked(weights, torch.float32)[: len(expected)], expected)
    del alias
    gc.collect()
    assert block() is None


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
