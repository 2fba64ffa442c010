"""Lists of the blocks that the queries of a tile selected, by words and by sorting."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from nsa.ops._sequences import Sequences
from nsa.ops._triton import selected_index
from nsa.ops._triton.selected_index import Lists, make_lists, word_of

HEADS, SLOTS, BLOCK_SIZE = 2, 5, 16


def selections(num_queries: int, num_blocks: int, dtype: torch.dtype) -> Tensor:
    """Blocks of random queries: some twice, some of the future, absent ones."""
    generator = torch.Generator().manual_seed(num_queries)
    shape = (num_queries, HEADS, SLOTS)
    found = torch.randint(-1, num_blocks, shape, generator=generator)
    found[::3, :, 1] = found[::3, :, 0]
    return found.to(dtype)


def expected(
    found: Tensor, lengths: list[int], past: int, group: int, rows: int
) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Blocks with their query masks, by head and index of the tile; see ``find_tile``."""
    lists, begin = dict[tuple[int, int], list[tuple[int, int]]](), 0
    for number, length in enumerate(lengths):
        before = begin * group // rows + number
        for tile in range(-(-length * group // rows)):
            first, end = tile * rows // group, min((tile * rows + rows - 1) // group + 1, length)
            for head in range(HEADS):
                masks: dict[int, int] = {}
                for query in range(first, end):
                    own = (past + query) // BLOCK_SIZE
                    for block in found[begin + query, head].tolist():
                        if 0 <= block <= own:
                            masks[block] = masks.get(block, 0) | 1 << query - first
                lists[head, before + tile] = sorted(masks.items())
        begin += length
    return lists


def pairs(lists: Lists, head: int, tile: int) -> list[tuple[int, int]]:
    """Blocks with their query masks as a kernel wrote them."""
    count = int(lists.counts[head, tile, 2])
    block, mask = lists.block[head, tile, :count], lists.query_mask[head, tile, :count]
    return list(zip(block.tolist(), [m % (1 << 32) for m in mask.tolist()], strict=True))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("past", "word", "group", "rows"),
    [(0, 32, 6, 60), (0, 32, 1, 32), (300, 32, 4, 30), (700, 64, 6, 60)],
    ids=["short", "32 queries", "with a past", "64 blocks"],
)
def test_lists(monkeypatch, dtype, past, word, group, rows):
    """All ways find the expected lists and equal counts."""
    lengths = [70, 0, 33]
    queries, keys = ([n + more * bool(n) for n in lengths] for more in (0, past))
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).int() for n in (queries, keys))
    longest = max(keys)
    where = Sequences((cu_q, cu_k), len(lengths), max(queries), longest, torch.device("cpu"))
    num_blocks = -(-longest // BLOCK_SIZE)
    assert word_of(num_blocks) == word
    found = selections(sum(queries), num_blocks, dtype)
    right = expected(found, lengths, past, group, rows)
    results = []
    for words in ((32, 64), (64,), ()):
        monkeypatch.setattr(selected_index, "WORDS", words)
        stats = torch.zeros(2, dtype=torch.int64)
        lists = make_lists(found, where, group, BLOCK_SIZE, rows, stats)
        assert {place: pairs(lists, *place) for place in right} == right
        assert stats.tolist() == [sum(map(len, right.values())), len(right)]
        results.append([lists.counts[place].tolist() for place in right])
    assert results[0] == results[1] == results[2]


def test_words_hold_64_blocks_at_most():
    assert [word_of(n) for n in (1, 32, 33, 64, 65, 4096)] == [32, 32, 64, 64, 0, 0]


def test_warps_of_all_groups(monkeypatch):
    """A GPU takes a power of two, which the interpreter does not check."""
    warps = set[int]()

    def note(*_: object, num_warps: int, **__: object) -> object:
        warps.add(num_warps)
        return lambda *_: None

    monkeypatch.setattr(selected_index, "Launch", note)
    cu = torch.tensor([0, 4], dtype=torch.int32)
    where = Sequences((cu, cu), 1, 4, 4, cu.device)
    for group, slots, rows in product(range(1, 13), (5, 16, 24, 64), (16, 64, 128)):
        blocks = torch.zeros(4, 1, slots, dtype=torch.int32)
        make_lists(blocks, where, group, BLOCK_SIZE, rows, None)
    assert warps == {1, 2, 4, 8}
