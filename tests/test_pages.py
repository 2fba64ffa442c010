"""Pages and the cache on them against a model in plain Python: random operations, refused ones too.

The model is a list of pages for each sequence, Python lists that forks share; a sequence that
writes to a page of several has a copy of its own then.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nsa import NativeSparseAttention, NSACache, NSAConfig, Rope, Sequences
from nsa.attention import AttentionInputs
from nsa.cache import chunk
from nsa.cache.pages import Pages
from nsa.ops.attention import BranchInputs
from tests.ops.cases import array, near, offsets, small

OPERATIONS = 10_000
NOTHING = -1
KINDS = ("append", "append", "append", "reserve", "fork", "free", "truncate", "reorder")
PAGE, NUM_PAGES, NUM_SEQUENCES, MOST = 16, 12, 4, 90


@dataclass
class Model:
    """Tokens of sequences in pages.

    Attributes:
        pages: of each sequence; NOTHING where nothing was written.
        lengths: of the sequences.
    """

    pages: list[list[list[int]]] = field(default_factory=lambda: [[] for _ in range(NUM_SEQUENCES)])
    lengths: list[int] = field(default_factory=lambda: [0] * NUM_SEQUENCES)

    @property
    def uses(self) -> Counter[int]:
        """How many sequences hold each page."""
        return Counter(id(page) for pages in self.pages for page in pages)

    def tokens(self, b: int) -> list[int]:
        """Tokens of a sequence."""
        return [x for page in self.pages[b] for x in page][: self.lengths[b]]

    def reserve(self, counts: Sequence[int]) -> None:
        """Make room for more tokens of each sequence."""
        for b, count in enumerate(counts):
            place, pages = self.lengths[b] // PAGE, self.pages[b]
            if count and place < len(pages) and self.uses[id(pages[place])] > 1:
                pages[place] = list(pages[place])
            while len(pages) * PAGE < self.lengths[b] + count:
                pages.append([NOTHING] * PAGE)

    def append(self, new: Sequence[Sequence[int]]) -> None:
        """Take in new tokens of each sequence."""
        self.reserve([len(tokens) for tokens in new])
        for b, tokens in enumerate(new):
            for token in tokens:
                self.pages[b][self.lengths[b] // PAGE][self.lengths[b] % PAGE] = token
                self.lengths[b] += 1

    def fork(self, source: int, target: int) -> None:
        """Let an empty sequence share the pages of another that hold tokens."""
        self.truncate(target, 0)
        self.lengths[target] = self.lengths[source]
        self.pages[target] = self.pages[source][: -(-self.lengths[source] // PAGE)]

    def reorder(self, indices: Sequence[int]) -> None:
        """Let sequences go on as copies of others; what one has reserved stays its own."""
        ends = [None if b == c else -(-self.lengths[c] // PAGE) for b, c in enumerate(indices)]
        self.pages = [self.pages[c][:end] for c, end in zip(indices, ends, strict=True)]
        self.lengths = [self.lengths[c] for c in indices]

    def truncate(self, b: int, length: int) -> None:
        """Keep the first tokens of a sequence."""
        self.lengths[b] = length
        self.pages[b] = self.pages[b][: -(-length // PAGE)]


def random_counts(random: random.Random) -> list[int]:
    """New tokens of each sequence: mostly few, of several sequences at once."""
    most = random.choice([1, 1, 2, 8, 40])
    return [random.choice([0, random.randint(0, most), most]) for _ in range(NUM_SEQUENCES)]


def random_indices(random: random.Random) -> list[int]:
    """Which sequence each one becomes: mostly itself."""
    return [
        random.choice([b, b, b, b, random.randrange(NUM_SEQUENCES)]) for b in range(NUM_SEQUENCES)
    ]


def changed(model: Model, change: Callable[[Model], None]) -> tuple[Model, bool]:
    """The model behind a change, and whether there are enough pages for it."""
    found = copy.deepcopy(model)
    change(found)
    fits = len(found.uses) <= NUM_PAGES
    return (found if fits else model), fits


def check_pages(pages: Pages, model: Model) -> None:
    """Pages are shared by the sequences of the model, and all others are free."""
    uses = model.uses
    assert pages.num_free == NUM_PAGES - len(uses)
    assert [len(x) for x in pages.held] == [len(x) for x in model.pages]
    numbers = dict[int, int]()
    for held, expected in zip(pages.held, model.pages, strict=True):
        for number, page in zip(held, expected, strict=True):
            assert numbers.setdefault(id(page), number) == number
            assert pages.uses[number] == uses[id(page)]
    assert len({*numbers.values()}) == len(numbers)
    assert sum(pages.uses) == sum(uses.values())
    assert {*pages._free}.isdisjoint(numbers.values())
    assert len({*pages._free}) == len(pages._free)


# ------------------------------------------------------------------------------
# the cache

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
    """A cache of one layer whose attention only looks at what it is given."""

    def __init__(self, rollback: int) -> None:
        self.model = Model()
        self.cache = NSACache(CONFIG, 1, NUM_SEQUENCES, max_tokens=MOST, num_pages=NUM_PAGES)
        self.cache.rollback = rollback
        self.written = [0] * NUM_SEQUENCES
        self.given: BranchInputs | None = None
        self.fails = False

    def attention(self, branches: BranchInputs, *_: Any) -> SimpleNamespace:
        """Replaces both functions of a chunk."""
        self.given = branches
        if self.fails:
            raise MemoryError
        return SimpleNamespace(out=branches.q, block_indices=None)

    def append(self, new: Sequence[Sequence[int]], fails: bool) -> None:
        """Give the layer these tokens and look at what its attention gets."""
        flat = torch.tensor([x for tokens in new for x in tokens], dtype=torch.float64)
        heads = {name: self._head(flat, factor) for name, factor in FACTORS.items()}
        q, gates = self._head(flat, 0), flat.new_zeros(len(flat), 1, 3)
        k_slc, v_slc, k_win, v_win, k_cmp = heads.values()
        inputs = AttentionInputs(q, k_cmp, None, k_slc, v_slc, k_win, v_win, gates, None)
        counts = [len(tokens) for tokens in new]
        sequences = Sequences.packed(offsets(counts))
        self.fails, self.given = fails, None
        held = self.cache.layers[0]
        if fails:
            with pytest.raises(MemoryError):
                held.attend(inputs, rope=ROPE, sequences=sequences)
            return
        held.attend(inputs, rope=ROPE, sequences=sequences)

    @staticmethod
    def _head(flat: Tensor, factor: int) -> Tensor:
        return (flat * factor)[:, None, None].expand(-1, 1, 16)

    def check_given(self, before: Sequence[int]) -> None:
        """Attention has got all tokens, their blocks and what the window sees."""
        texts = [self.model.tokens(b) for b in range(NUM_SEQUENCES)]
        seen = [n - min(n, CONFIG.window_size - 1) for n in before]
        wanted: dict[str, list[float]] = {
            "slc": [token for text in texts for token in text],
            "win": [t for text, n in zip(texts, seen, strict=True) for t in text[n:]],
            "cmp": [sum(x[i : i + 8]) / 8 for x in texts for i in range(0, len(x) - 7, 4)],
        }
        for name, factor in FACTORS.items():
            found = getattr(self.given, name)[:, 0]
            assert torch.equal(found, found[:, :1].expand_as(found)), name
            assert found[:, 0].tolist() == [factor * x for x in wanted[name[2:]]], name

    def check(self) -> None:
        """Check lengths, pages and tables of the cache."""
        cache, model = self.cache, self.model
        check_pages(cache._pages, model)
        assert cache.lengths == model.lengths
        assert cache.num_free_pages == NUM_PAGES - len(model.uses)
        for lengths, table in cache._on_devices.values():
            assert lengths.tolist() == model.lengths
            for row, held in zip(table.tolist(), cache._pages.held, strict=True):
                assert row[: len(held)] == held
        assert cache._written == self.written


def test_a_step_that_an_error_ended_half_way():
    """One of two layers has received the tokens: a few can be removed; of many, all must be."""
    torch.manual_seed(0)
    module = NativeSparseAttention(24, small(phi="linear")).double().requires_grad_(False)
    x = torch.randn(150, 24, dtype=torch.float64)
    expected = module(x)
    for count, is_few in ((8, True), (9, False)):
        cache = NSACache(module.config, 2, max_tokens=150)
        for layer in cache.layers:
            module(x[:50], cache=layer)
        module(-x[:count], cache=cache.layers[0])
        if is_few:
            cache.truncate(0, 50)
        else:
            refused(cache, partial(cache.truncate, 0, 50), "^length must be 0, got 50")
            cache.free(0)
        for part in x[cache.lengths[0] :].split([3, 147 - cache.lengths[0]]):
            for layer in cache.layers:
                start = cache.lengths[0]
                found = module(part, cache=layer)
                near(found, array(expected[start : start + len(part)]))
        assert cache.lengths == [150]


def refused(cache: NSACache, call: Callable[[], object], match: str) -> None:
    """A call raises and leaves everything as it was."""

    def state() -> object:
        pages = cache._pages
        table = [state.table.tolist() for state in cache._on_devices.values()]
        return copy.deepcopy(
            (cache._lengths, cache._written, pages.held, pages.uses, pages._free, table)
        )

    held, before = cache.layers[0].tensors, state()
    memory = [x.clone() for x in held or () if x is not None]
    with pytest.raises(ValueError, match=match):
        call()
    assert state() == before
    left = [x for x in cache.layers[0].tensors or () if x is not None]
    assert all(torch.equal(x, y) for x, y in zip(left, memory, strict=bool(memory)))


@pytest.mark.parametrize("rollback", [8, 20])
@pytest.mark.parametrize(
    "number", [OPERATIONS // 4, pytest.param(OPERATIONS, marks=pytest.mark.faults)]
)
def test_cache(number, rollback):
    """Operations on a cache; what attention gets is what the model holds."""
    rng, driven, counts = random.Random(1), Driven(rollback), Counter[str]()
    cache = driven.cache
    with (
        mock.patch.object(chunk, "attention_by_branch", driven.attention),
        mock.patch.object(chunk, "run_attention", driven.attention),
    ):
        for _ in range(number):
            kind = rng.choice(KINDS)
            counts[kind] += 1
            counts["refused"] += operate(rng, driven, kind)
            driven.check()
    assert counts["refused"] > number / 20
    for b in range(NUM_SEQUENCES):
        cache.free(b)
    assert cache.num_free_pages == NUM_PAGES


def operate(rng: random.Random, driven: Driven, kind: str) -> bool:
    """One operation on cache and model; whether it was refused."""
    cache, model = driven.cache, driven.model
    b = rng.randrange(NUM_SEQUENCES)
    if kind in ("append", "reserve"):
        new = [[rng.randrange(10**6) for _ in range(n)] for n in random_counts(rng)]
        counts, before = [len(x) for x in new], model.lengths
        is_short = all(n + count <= MOST for n, count in zip(before, counts, strict=True))
        fails = rng.random() < 0.1
        takes = kind == "append" and not fails
        found, fits = changed(model, lambda m: m.append(new) if takes else m.reserve(counts))

        def call() -> None:
            if kind == "append":
                driven.append(new, fails)
            else:
                cache.reserve(counts)

        if not is_short or not fits:
            refused(cache, call, "num_pages must" if is_short else "max_tokens must")
            return True
        call()
        driven.model = found
        if takes:
            driven.check_given(before)
            pairs = zip(driven.written, found.lengths, strict=True)
            driven.written = [max(pair) for pair in pairs]
    elif kind == "fork":
        target = rng.randrange(NUM_SEQUENCES)
        if model.lengths[target]:
            refused(cache, lambda: cache.fork(b, target), "target must be empty")
            return True
        cache.fork(b, target)
        model.fork(b, target)
        driven.written[target] = driven.written[b]
    elif kind == "reorder":
        indices = random_indices(rng)
        cache.reorder(indices)
        model.reorder(indices)
        driven.written = [driven.written[source] for source in indices]
    else:
        length = 0 if kind == "free" else rng.randint(-1, model.lengths[b] + 1)
        least = max(driven.written[b] - cache.rollback, 0)
        if length and not least <= length <= model.lengths[b]:
            refused(cache, lambda: cache.truncate(b, length), "length must be 0 or from")
            return True
        cache.truncate(b, length)
        model.truncate(b, length)
        driven.written[b] = driven.written[b] if length else 0
    return False
