"""nsa.blocks_to_ranges and nsa.check_inputs."""

from __future__ import annotations

import pytest
import torch

from nsa import blocks_to_ranges, check_inputs
from tests import oracle
from tests.ops.cases import BATCHES, Batch, make_batch, named_batch, offsets, small


def wanted_ranges(batch: Batch, ids: torch.Tensor) -> list:
    rows = []
    for query, tokens, _ in batch.slices:
        for row in oracle.token_ranges(
            ids[query].numpy(), tokens.stop - tokens.start, batch.config.block_size
        ):
            rows.append(
                [
                    [*map(list, ranges), *[[-1, -1]] * (ids.shape[-1] - len(ranges))]
                    for ranges in row
                ]
            )
    return rows


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("num_blocks", [1, 4, 9])
def test_matches_the_oracle(name, num_blocks):
    batch = named_batch(name)
    ids = batch.block_indices(num_blocks)
    ranges = blocks_to_ranges(ids, batch.config, **batch.kwargs)
    assert ranges.dtype == torch.int32
    assert tuple(ranges.shape) == (*ids.shape, 2)
    assert ranges.tolist() == wanted_ranges(batch, ids)


def test_by_hand():
    ids = torch.tensor(
        [[[5, 0, 1, 4]], [[0, 2, 4, -1]], [[-1, -1, -1, -1]], [[9, 5, 3, -2]]], dtype=torch.int32
    )
    ranges = blocks_to_ranges(
        ids,
        small(num_heads=1, num_kv_heads=1),
        cu_seqlens_q=offsets([4]),
        cu_seqlens_k=offsets([90]),
    )
    unused = [-1, -1]
    assert ranges[:, 0].tolist() == [
        # t = 86: blocks 4 and 5 merge, the current one is cut at t + 1
        [[0, 32], [64, 87], unused, unused],
        [[0, 16], [32, 48], [64, 80], unused],
        [unused, unused, unused, unused],
        [[48, 64], [80, 90], unused, unused],  # block 9 is in the future
    ]


def test_a_block_that_is_named_again_counts_once():
    ids = torch.tensor([[[1, 0, 1, 3, 1]]], dtype=torch.int32)
    ranges = blocks_to_ranges(
        ids,
        small(num_heads=1, num_kv_heads=1),
        cu_seqlens_q=offsets([1]),
        cu_seqlens_k=offsets([90]),
    )
    assert ranges[0, 0].tolist() == [[0, 32], [48, 64], [-1, -1], [-1, -1], [-1, -1]]


def test_dense_batch():
    batch = make_batch(small(), (130, 130))
    ids = batch.block_indices()
    ranges = blocks_to_ranges(ids.unflatten(0, (2, 130)), batch.config)
    assert torch.equal(ranges.flatten(0, 1), blocks_to_ranges(ids, batch.config, **batch.kwargs))


def test_check_inputs_accepts_what_is_right():
    batch = named_batch("chunks")
    ids = batch.block_indices()
    check_inputs(batch.config, cu_seqlens_q=offsets(batch.lengths_q))
    check_inputs(batch.config, **batch.kwargs)
    check_inputs(batch.config, **batch.kwargs, block_indices=ids)


def test_check_inputs_allows_absent_ids_to_repeat():
    ids = torch.tensor([[[-1, -1, -1, 0], [99, 99, 0, -1]]], dtype=torch.int32)
    check_inputs(small(), cu_seqlens_q=offsets([1]), block_indices=ids)


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "argument"),
    [
        ([1, 4], None, "cu_seqlens_q"),
        ([0, 5, 4], None, "cu_seqlens_q"),
        ([0, 4], [1, 4], "cu_seqlens_k"),
        ([0, 4], [0, 6, 5], "cu_seqlens_k"),
        ([0, 4, 8], [0, 3, 8], "cu_seqlens_k"),  # fewer keys than queries
        ([0, 4, 8], [0, 9], "cu_seqlens"),  # another number of sequences
    ],
)
def test_check_inputs_refuses_bad_offsets(cu_q, cu_k, argument):
    given = None if cu_k is None else torch.tensor(cu_k, dtype=torch.int32)
    with pytest.raises(ValueError, match=rf"^check_inputs: {argument}\w* must .*, got ") as error:
        check_inputs(
            small(), cu_seqlens_q=torch.tensor(cu_q, dtype=torch.int32), cu_seqlens_k=given
        )
    assert str(error.value).endswith(".")


def test_check_inputs_refuses_a_repeated_block():
    ids = named_batch("one").block_indices()
    ids[100, 1] = torch.tensor([3, 0, 5, 3], dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"^check_inputs: block_indices must .*block 3 .*query 100.*head 1"
    ):
        check_inputs(small(), cu_seqlens_q=offsets([257]), block_indices=ids)


def test_check_inputs_refuses_a_gate_below_0():
    gates = torch.rand(1, small().num_heads, 3)
    check_inputs(small(), cu_seqlens_q=offsets([1]), gates=gates)
    gates[0, 1, 2] = -0.25
    with pytest.raises(ValueError, match=r"^check_inputs: gates must be at least 0, got -0\.25"):
        check_inputs(small(), cu_seqlens_q=offsets([1]), gates=gates)
