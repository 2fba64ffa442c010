"""Decode cache: prefill, chunks and steps give what one call gives; nothing needless is kept."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nsa import LayerCache, NativeSparseAttention, NSACache, NSAConfig
from nsa.config import BRANCHES
from tests import oracle
from tests.ops.cases import array, near, offsets, small

WIDTH = 24
LONGEST = 150  # n * l' = 64 and w = 32: sparse
SUBSETS = [tuple(c) for size in (1, 2, 3) for c in itertools.combinations(BRANCHES, size)]
PARTS = ("slc", "win", "cmp", "tail")


def layer(config: NSAConfig, seed: int = 0) -> NativeSparseAttention:
    torch.manual_seed(seed)
    module = NativeSparseAttention(WIDTH, config).double().requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(std=parameter[0].numel() ** -0.5)
    return module


def tokens(num_tokens: int, seed: int = 1) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((num_tokens, WIDTH)))


def new_cache(config: NSAConfig, batch_size: int = 1) -> LayerCache:
    return NSACache(config, num_layers=1, batch_size=batch_size).layers[0]


def feed(
    module: NativeSparseAttention, x: Tensor, chunks: Sequence[int], cache: LayerCache | None = None
) -> Tensor:
    """Outputs of one sequence fed in chunks of these sizes."""
    cache = new_cache(module.config) if cache is None else cache
    return torch.cat([module(part, cache=cache) for part in x.split(list(chunks))])


def rows(cache: LayerCache) -> dict[str, np.ndarray]:
    """Everything that the cache holds, by name."""
    found = {}
    for part in PARTS:
        held = getattr(cache, part)
        if held is not None:
            found[f"{part}.key"], found[f"{part}.cu_seqlens"] = (
                held.key.numpy(),
                held.cu_seqlens.numpy(),
            )
            if held.value is not None:
                found[f"{part}.value"] = held.value.numpy()
    return found


def same_contents(a: LayerCache, b: LayerCache) -> None:
    of_a, of_b = rows(a), rows(b)
    assert of_a.keys() == of_b.keys()
    for name, x in of_a.items():
        np.testing.assert_allclose(x, of_b[name], rtol=0, atol=1e-12, err_msg=name)


# ------------------------------------------------------------------------------
# the same at every position


def test_prefill_and_decode_at_every_length():
    """For t from 1 to 150: prefill of t tokens gives the first t rows and the next step row t.

    The cache after prefill holds what t single steps leave in it, so decode may go on from any
    prefill.
    """
    config = small(phi="mlp", compress_hidden_size=3)
    module, x = layer(config), tokens(LONGEST + 1)
    full = array(module(x))
    stepped = new_cache(config)
    for t in range(1, LONGEST + 1):
        near(module(x[t - 1 : t], cache=stepped), full[t - 1 : t])
        prefilled = new_cache(config)
        near(module(x[:t], cache=prefilled), full[:t])
        same_contents(prefilled, stepped)
        near(module(x[t : t + 1], cache=prefilled), full[t : t + 1])


CONFIGS: list[dict[str, Any]] = [
    *(
        {"phi": phi, "compress_rope": where}
        for phi in ("mean", "linear", "mlp")
        for where in ("middle", "start", "none")
    ),
    *(
        {"branches": branches, "share_kv": share_kv, "phi": "linear"}
        for branches in SUBSETS
        for share_kv in (False, True)
    ),
    {"compress_block_size": 16, "compress_stride": 4},
    {"compress_block_size": 16, "compress_stride": 16},
    {"compress_block_size": 4, "compress_stride": 4},
    {"compress_block_size": 32, "compress_stride": 16, "block_size": 64, "num_selected_blocks": 3},
    {"num_init_blocks": 0, "num_local_blocks": 1, "num_selected_blocks": 2},
    {"window_size": 1},
    {"window_size": 7},
    {"window_size": 1000},
    {"num_selected_blocks": 30},
    {"gate": "softmax", "gate_hidden_size": 4},
    {"num_heads": 3, "num_kv_heads": 1},
    {"rope_theta": 10_000.0, "rotary_dim": 8},
]


@pytest.mark.parametrize("changes", CONFIGS, ids=str)
def test_every_config(changes):
    module, x = layer(small(**changes)), tokens(150)
    near(feed(module, x, [6, *[1] * 30, 51, *[1] * 20, 43]), array(module(x)))


@pytest.mark.parametrize("first", [1, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65])
def test_chunk_after_an_edge(first):
    """A prefix cached up to an edge of a block, then one chunk of several tokens, then steps."""
    module, x = layer(small(phi="mlp")), tokens(150)
    near(feed(module, x, [first, 140 - first, *[1] * 10]), array(module(x)))


# ------------------------------------------------------------------------------
# batches


@settings(max_examples=40)
@given(
    calls=st.lists(
        st.lists(st.one_of(st.sampled_from([0, 1, 1]), st.integers(0, 60)), min_size=3, max_size=3),
        min_size=1,
        max_size=8,
    )
)
def test_sequences_of_different_lengths_in_one_batch(calls):
    """Any number of new tokens for each sequence, 0 included: each gets what it would get alone."""
    module = layer(small(phi="mlp", compress_hidden_size=3))
    totals = np.sum(calls, axis=0)
    sequences = [tokens(int(n), seed=b) for b, n in enumerate(totals)]
    full = [array(module(x)) for x in sequences]
    cache, done = new_cache(module.config, 3), [0, 0, 0]
    for lengths in calls:
        parts = [x[start : start + n] for x, start, n in zip(sequences, done, lengths, strict=True)]
        out = module(torch.cat(parts), cu_seqlens=offsets(lengths), cache=cache)
        wanted = [y[start : start + n] for y, start, n in zip(full, done, lengths, strict=True)]
        near(out, np.concatenate(wanted))
        done = [start + n for start, n in zip(done, lengths, strict=True)]


def test_dense_steps():
    """A batch [B, 1, width] is one token for each sequence, after prefills of different lengths."""
    module = layer(small())
    lengths = (150, 5, 64)
    sequences = [tokens(n + 12, seed=b) for b, n in enumerate(lengths)]
    full = [array(module(x)) for x in sequences]
    cache = new_cache(module.config, 3)
    module(
        torch.cat([x[:n] for x, n in zip(sequences, lengths, strict=True)]),
        cu_seqlens=offsets(lengths),
        cache=cache,
    )
    for i in range(12):
        step = torch.stack([x[n + i : n + i + 1] for x, n in zip(sequences, lengths, strict=True)])
        wanted = np.stack([y[n + i : n + i + 1] for y, n in zip(full, lengths, strict=True)])
        near(module(step, cache=cache), wanted)


def test_nan_reaches_no_other_sequence():
    module = layer(small())
    sequences = [tokens(140, seed=b) for b in range(3)]
    full = [array(module(x)) for x in sequences]
    sequences[1].fill_(torch.nan)
    cache = new_cache(module.config, 3)
    for start, stop in ((0, 100), (100, 101), (101, 140)):
        batch = torch.stack([x[start:stop] for x in sequences])
        out = module(batch, cache=cache)
        near(out[0], full[0][start:stop])
        near(out[2], full[2][start:stop])
        assert bool(out[1].isnan().any())


def test_caches_of_layers_are_separate():
    module, x = layer(small()), tokens(100)
    cache = NSACache(module.config, num_layers=2)
    assert len(cache.layers) == 2
    near(feed(module, x, [50, 50], cache.layers[0]), array(module(x)))
    near(feed(module, 2 * x, [30, 70], cache.layers[1]), array(module(2 * x)))


# ------------------------------------------------------------------------------
# what is kept


def held(cache: LayerCache, part: str, num_sequences: int) -> list[int]:
    contents = getattr(cache, part)
    if contents is None:
        return [0] * num_sequences
    lengths = np.diff(contents.cu_seqlens.numpy()).tolist()
    assert contents.key.shape[0] == sum(lengths)
    assert contents.value is None or contents.value.shape[0] == sum(lengths)
    return lengths


@pytest.mark.parametrize(("l", "d"), [(8, 4), (16, 4), (16, 16), (4, 4)])
def test_only_what_is_needed_is_kept(l, d):
    """Selected branch: all keys; window: w tokens; compressed keys and tokens of the next one."""
    config = small(compress_block_size=l, compress_stride=d, phi="linear")
    module = layer(config)
    calls = [(9, 0), (1, 1), (1, 1), (40, 5), (1, 0), (60, 100), *[(1, 1)] * 20]
    cache, totals = new_cache(config, 2), np.zeros(2, dtype=int)
    for lengths in calls:
        module(tokens(sum(lengths), seed=3), cu_seqlens=offsets(lengths), cache=cache)
        totals += lengths
        complete = [oracle.num_compressed(int(n), l, d) for n in totals]
        assert held(cache, "slc", 2) == totals.tolist()
        assert held(cache, "win", 2) == [min(int(n), 32) for n in totals]
        assert held(cache, "cmp", 2) == complete
        assert held(cache, "tail", 2) == [
            int(n) - c * d for n, c in zip(totals, complete, strict=True)
        ]
        assert max(held(cache, "tail", 2)) < l


@pytest.mark.parametrize(
    ("branches", "parts"),
    [
        (("win",), {"win"}),
        (("cmp",), {"cmp", "tail"}),
        (("slc",), {"slc", "cmp", "tail"}),
        (("cmp", "win"), {"cmp", "tail", "win"}),
        (("slc", "win"), {"slc", "cmp", "tail", "win"}),
    ],
)
def test_branch_that_is_off_keeps_nothing(branches, parts):
    config = small(branches=branches)
    cache = new_cache(config)
    layer(config)(tokens(100), cache=cache)
    assert {part for part in PARTS if getattr(cache, part) is not None} == parts
    if "cmp" not in branches and cache.cmp is not None:
        assert cache.cmp.value is None  # compressed values serve the compressed branch alone


def test_kept_window_holds_no_other_token_in_memory():
    """The last w tokens are a copy, not a view that keeps every token of a long prefill."""
    config = small()
    cache = new_cache(config)
    layer(config)(tokens(200), cache=cache)
    kept: list[Any] = [cache.win, cache.tail]
    for x in (y for held in kept for y in (held.key, held.value)):
        assert x.untyped_storage().nbytes() == x.numel() * x.element_size()


def test_cache_keeps_no_graph():
    module, x = layer(small()).requires_grad_(True), tokens(20)
    cache = new_cache(module.config)
    module(x, cache=cache)
    contents = [getattr(cache, part) for part in PARTS]
    assert not any(x.requires_grad for held in contents for x in (held.key, held.value))


def test_fp32():
    module, x = layer(small()).float(), tokens(140).float()
    near(feed(module, x, [100, *[1] * 20, 20]), array(module(x)), 1e-5)


# ------------------------------------------------------------------------------
# mistakes


@pytest.mark.parametrize(
    ("argument", "value"), [("num_layers", 0), ("num_layers", -1), ("batch_size", 0)]
)
def test_bad_sizes(argument, value):
    with pytest.raises(
        ValueError, match=rf"^NSACache: {argument} must be positive, got {value}\.$"
    ):
        NSACache(small(), **{"num_layers": 1, argument: value})


def test_another_number_of_sequences():
    module = layer(small())
    cache = new_cache(module.config, 2)
    with pytest.raises(ValueError, match=r"must describe 2 sequences, got 1\.$"):
        module(tokens(5), cache=cache)
    module(tokens(6), cu_seqlens=offsets((3, 3)), cache=cache)
    with pytest.raises(ValueError, match=r"must describe 2 sequences, got 3\.$"):
        module(tokens(3), cu_seqlens=offsets((1, 1, 1)), cache=cache)


def test_cache_of_another_config():
    """A cache made for another pattern would be read in silence as if it were this one."""
    module = layer(small())
    with pytest.raises(ValueError, match=r"cache must .*, got "):
        module(tokens(5), cache=new_cache(small(window_size=16)))


@pytest.mark.parametrize(
    "bad", [torch.tensor([0, 4], dtype=torch.int32), torch.tensor([1, 5], dtype=torch.int32)]
)
def test_refused_tokens_leave_the_cache_as_it_was(bad):
    """An error must not count tokens that were never taken in."""
    module, x = layer(small()), tokens(60)
    cache = new_cache(module.config)
    module(x[:50], cache=cache)
    with pytest.raises(ValueError, match="must"):
        module(x[50:55], cu_seqlens=bad, cache=cache)
    near(module(x[50:], cache=cache), array(module(x))[50:])
