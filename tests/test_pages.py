"""Random operations on the decode cache and its pages, compared with lists of tokens."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nsa import NSACache, NSAConfig, Rope, Sequences
from nsa.attention import AttentionInputs
from nsa.cache import chunk
from nsa.ops.attention import BranchInputs
from tests.ops.cases import offsets

OPERATIONS = 10_000
KINDS = ("append", "append", "append", "reserve", "fork", "free", "truncate", "reorder")
PAGE, NUM_PAGES, NUM_SEQUENCES, MOST = 16, 12, 4, 90
CONFIG = NSAConfig(
    num_heads=1,
    num_kv_heads=1,
    head_dim=16,
    value_dim=16,
    compress_block_size=8,
    compress_stride=4,
    block_size=PAGE,
    num_selected_blocks=4,
    window_size=11,
    branches=("slc", "win"),
    compress_rope="none",
)
ROPE = Rope.from_config(CONFIG)
# Keys and values of each branch are tokens times these.
FACTORS = {"k_slc": 2, "v_slc": 3, "k_win": 4, "v_win": 5, "k_cmp": 1}


class Driven:
    """A cache of one layer whose attention is replaced, and the tokens that it must contain.

    Attributes:
        texts: tokens of each sequence.
        written: largest number of tokens that the rings of each sequence contained.
    """

    def __init__(self, rollback: int) -> None:
        self.cache = NSACache(CONFIG, 1, NUM_SEQUENCES, max_tokens=MOST, num_pages=NUM_PAGES)
        self.cache.rollback = rollback
        self.texts: list[list[int]] = [[] for _ in range(NUM_SEQUENCES)]
        self.written = [0] * NUM_SEQUENCES
        self.given: BranchInputs | None = None
        self.fails = False

    def attention(self, branches: BranchInputs, *_: Any) -> SimpleNamespace:
        """Replacement of both functions of a chunk."""
        self.given = branches
        if self.fails:
            raise MemoryError
        return SimpleNamespace(out=branches.q, block_indices=None)

    def attend(self, new: Sequence[Sequence[int]]) -> None:
        """Append tokens through the layer."""
        flat = torch.tensor([x for tokens in new for x in tokens], dtype=torch.float64)

        def head(factor: int) -> Tensor:
            return (flat * factor)[:, None, None].expand(-1, 1, 16)

        k_slc, v_slc, k_win, v_win, k_cmp = map(head, FACTORS.values())
        gates = flat.new_zeros(len(flat), 1, 3)
        inputs = AttentionInputs(head(0), k_cmp, None, k_slc, v_slc, k_win, v_win, gates, None)
        sequences = Sequences.packed(offsets([len(tokens) for tokens in new]))
        self.cache.layers[0].attend(inputs, rope=ROPE, sequences=sequences)

    def check_given(self, before: Sequence[int]) -> None:
        """Attention has received all tokens, their blocks and what the window sees."""
        seen = [n - min(n, CONFIG.window_size - 1) for n in before]
        wanted: dict[str, list[float]] = {
            "slc": [token for text in self.texts for token in text],
            "win": [t for text, n in zip(self.texts, seen, strict=True) for t in text[n:]],
            "cmp": [sum(x[i : i + 8]) / 8 for x in self.texts for i in range(0, len(x) - 7, 4)],
        }
        for name, factor in FACTORS.items():
            found = getattr(self.given, name)[:, 0]
            assert torch.equal(found, found[:, :1].expand_as(found)), name
            assert found[:, 0].tolist() == [factor * x for x in wanted[name[2:]]], name

    def check(self) -> None:
        """Check lengths, pages and tables of the cache."""
        cache, pages = self.cache, self.cache._pages
        uses = Counter(page for held in pages.held for page in held)
        assert pages.uses == [uses[page] for page in range(NUM_PAGES)]
        assert sorted([*pages._free, *uses]) == [*range(NUM_PAGES)]
        assert cache.num_free_pages == NUM_PAGES - len(uses)
        assert cache.lengths == [len(text) for text in self.texts]
        assert cache._written == self.written
        for lengths, tables in cache._on_devices.values():
            assert lengths.tolist() == cache.lengths
            for row, held in zip(tables[PAGE].tolist(), pages.held, strict=True):
                assert row[: len(held)] == held

    def missing_pages(self, counts: Sequence[int]) -> int:
        """Pages that new tokens need, with a copy of each shared page that is written to."""
        pages, missing, shared = self.cache._pages, 0, Counter[int]()
        for count, length, held in zip(counts, self.cache.lengths, pages.held, strict=True):
            missing += max(-(-(length + count) // PAGE) - len(held), 0)
            if count and length // PAGE < len(held):
                shared[held[length // PAGE]] += 1
        return missing + sum(min(n, pages.uses[page] - 1) for page, n in shared.items())


def refused(cache: NSACache, call: Callable[[], object], match: str) -> None:
    """A call raises and leaves everything as it was."""

    def state() -> object:
        pages, tensors = cache._pages, cache.layers[0].tensors
        memory = [x.tables[PAGE] for x in cache._on_devices.values()]
        memory += [x for x in tensors or () if x is not None]
        lists = (cache._lengths, cache._written, pages.held, pages.uses, pages._free)
        return repr(lists), [x.numpy().tobytes() for x in memory]  # NaN included

    before = state()
    with pytest.raises(ValueError, match=match):
        call()
    assert state() == before


@pytest.mark.parametrize("rollback", [8, 20])
@pytest.mark.parametrize(
    "number", [OPERATIONS // 8, pytest.param(OPERATIONS, marks=pytest.mark.faults)]
)
def test_cache(number, rollback):
    rng, driven, num_refused = random.Random(1), Driven(rollback), 0
    with (
        mock.patch.object(chunk, "attention_by_branch", driven.attention),
        mock.patch.object(chunk, "run_attention", driven.attention),
    ):
        for _ in range(number):
            num_refused += operate(rng, driven, rng.choice(KINDS))
            driven.check()
    assert num_refused > number / 20
    for b in range(NUM_SEQUENCES):
        driven.cache.free(b)
    assert driven.cache.num_free_pages == NUM_PAGES


def append(rng: random.Random, driven: Driven, is_reserved: bool) -> bool:
    """Append or reserve random tokens; whether it was refused."""
    cache, most, before = driven.cache, rng.choice([1, 1, 2, 8, 40]), driven.cache.lengths
    counts = [rng.choice([0, rng.randint(0, most), most]) for _ in range(NUM_SEQUENCES)]
    new = [[rng.randrange(10**6) for _ in range(count)] for count in counts]
    driven.fails = not is_reserved and rng.random() < 0.1
    call = partial(cache.reserve, counts) if is_reserved else partial(driven.attend, new)
    if any(n + count > MOST for n, count in zip(before, counts, strict=True)):
        refused(cache, call, "max_tokens must")
    elif driven.missing_pages(counts) > cache.num_free_pages:
        refused(cache, call, "num_pages must")
    elif driven.fails:
        with pytest.raises(MemoryError):
            call()
        return False
    else:
        call()
        if not is_reserved:
            for text, tokens in zip(driven.texts, new, strict=True):
                text += tokens
            driven.check_given(before)
            pairs = zip(driven.written, cache.lengths, strict=True)
            driven.written = [max(pair) for pair in pairs]
        return False
    return True


def operate(rng: random.Random, driven: Driven, kind: str) -> bool:
    """Run one operation; whether it was refused."""
    if kind in ("append", "reserve"):
        return append(rng, driven, kind == "reserve")
    cache, texts, written = driven.cache, driven.texts, driven.written
    b, target = rng.randrange(NUM_SEQUENCES), rng.randrange(NUM_SEQUENCES)
    if kind == "fork":
        if texts[target]:
            refused(cache, lambda: cache.fork(b, target), "target must be empty")
            return True
        cache.fork(b, target)
        texts[target], written[target] = list(texts[b]), written[b]
    elif kind == "reorder":
        order = [rng.choice([i, i, i, i, b]) for i in range(NUM_SEQUENCES)]
        cache.reorder(order)
        driven.texts = [list(texts[source]) for source in order]
        driven.written = [written[source] for source in order]
    else:
        length = 0 if kind == "free" else rng.randint(-1, len(texts[b]) + 1)
        least = max(written[b] - cache.rollback, 0)
        if length and not least <= length <= len(texts[b]):
            refused(cache, lambda: cache.truncate(b, length), "length must be 0 or from")
            return True
        cache.truncate(b, length)
        del texts[b][length:]
        written[b] = written[b] if length else 0
    return False
