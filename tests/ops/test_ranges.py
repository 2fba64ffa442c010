"""nsa.blocks_to_ranges and nsa.check_inputs."""

from __future__ import annotations

import pytest
import torch

from nsa import blocks_to_ranges, check_inputs
from tests import oracle
from tests.ops.cases import BATCHES, make_batch, offsets, small


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("num_blocks", [1, 4, 9])
def test_matches_the_oracle(name, num_blocks):
    batch = make_batch(small(), *BATCHES[name])
    ids = batch.block_indices(num_blocks)
    ids[::3, :, -1] = ids[::3, :, 0]  # a block that is named twice counts once
    found = blocks_to_ranges(ids, batch.config, **batch.kwargs)
    assert found.dtype == torch.int32
    wanted = []
    for rows, tokens, _ in batch.slices:
        for groups in oracle.token_ranges(ids[rows].numpy(), tokens.stop - tokens.start, 16):
            unused = [[(-1, -1)] * (num_blocks - len(ranges)) for ranges in groups]
            wanted.append([a + b for a, b in zip(groups, unused, strict=True)])
    assert torch.equal(found, torch.tensor(wanted, dtype=torch.int32).view(*ids.shape, 2))


def test_no_token():
    for shape in ((0, 40), (2, 0), (0,)):
        ids = torch.zeros(*shape, 2, 4, dtype=torch.int32)
        assert blocks_to_ranges(ids, small()).shape == (*shape, 2, 4, 2)


def test_check_inputs_accepts_what_is_right():
    """Absent ids may repeat."""
    batch = make_batch(small(), *BATCHES["chunks"])
    check_inputs(batch.config, cu_seqlens_q=offsets(batch.lengths_q))
    check_inputs(batch.config, **batch.kwargs)
    check_inputs(batch.config, **batch.kwargs, block_indices=batch.block_indices())
    ids = torch.tensor([[[-1, -1, -1, 0], [99, 99, 0, -1]]], dtype=torch.int32)
    check_inputs(small(), cu_seqlens_q=offsets([1]), block_indices=ids)


def test_check_inputs_refuses_bad_offsets():
    """With the rules of operators: tests/ops/test_bad_input.py."""
    with pytest.raises(ValueError, match=r"^cu_seqlens_q must .*, got .*\.$"):
        check_inputs(small(), cu_seqlens_q=offsets([4, -1]))
    with pytest.raises(ValueError, match=r"^cu_seqlens_k must .*, got .*\.$"):
        check_inputs(small(), cu_seqlens_q=offsets([4, 4]), cu_seqlens_k=offsets([3, 5]))


def test_check_inputs_refuses_a_repeated_block():
    ids = make_batch(small(), (257,)).block_indices()
    ids[100, 1] = torch.tensor([3, 0, 5, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^block_indices must .*block 3 .*query 100.*head 1"):
        check_inputs(small(), cu_seqlens_q=offsets([257]), block_indices=ids)


def test_check_inputs_refuses_a_gate_below_0():
    gates = torch.rand(1, small().num_heads, 3)
    check_inputs(small(), cu_seqlens_q=offsets([1]), gates=gates)
    gates[0, 1, 2] = -0.25
    with pytest.raises(ValueError, match=r"^gates must be at least 0, got -0\.25"):
        check_inputs(small(), cu_seqlens_q=offsets([1]), gates=gates)
