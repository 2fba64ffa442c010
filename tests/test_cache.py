"""Decode cache: prefill, chunks and steps equal one call; nothing needless is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nsa import LayerCache, NativeSparseAttention, NSACache, NSAConfig, Sequences
from nsa.cache import places
from nsa.cache.chunk import Chunk
from nsa.ops._packed import locate
from tests.ops.cases import SUBSETS, array, near, offsets, small

WIDTH = 24
LONGEST = 100  # n * l' = 64 and w = 32: sparse
MOST = 600


def layer(config: NSAConfig, seed: int = 0) -> NativeSparseAttention:
    torch.manual_seed(seed)
    module = NativeSparseAttention(WIDTH, config).double().requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(std=parameter[0].numel() ** -0.5)
    return module


def tokens(num_tokens: int, seed: int = 1) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((num_tokens, WIDTH)))


def new_cache(config: NSAConfig, batch_size: int = 1) -> LayerCache:
    return NSACache(config, num_layers=1, batch_size=batch_size, max_tokens=MOST).layers[0]


# ------------------------------------------------------------------------------
# the same at every position


@pytest.mark.parametrize(
    "changes",
    [{"phi": "mlp", "compress_hidden_size": 3}, {"scores": "token_max"}, {"scores": "index"}],
    ids=str,
)
def test_prefill_and_decode_at_every_length(changes):
    """Prefill of t tokens gives the first t rows, the next step row t; t is short or at edges."""
    config = small(**changes)
    module, x = layer(config), tokens(LONGEST + 1)
    full, stepped = array(module(x)), new_cache(config)
    for t in range(1, LONGEST + 1):
        near(module(x[t - 1 : t], cache=stepped), full[t - 1 : t])
        if t > 18 and t % 16 not in (15, 0, 1):
            continue
        prefilled = new_cache(config)
        near(module(x[:t], cache=prefilled), full[:t])
        near(module(x[t : t + 1], cache=prefilled), full[t : t + 1])


CONFIGS: list[dict[str, Any]] = [
    {"phi": "mean", "compress_rope": "start"},
    {"phi": "linear", "compress_rope": "none"},
    {"phi": "mlp", "compress_rope": "middle"},
    *(
        {"branches": branches, "share_kv": i % 2 == 0, "phi": "linear"}
        for i, branches in enumerate(SUBSETS)
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
    {"scores": "token_max", "branches": ("slc",), "share_kv": True},
    {"scores": "token_max", "branches": ("slc", "win")},
    {"scores": "token_max", "score_precision": "fp8", "compress_rope": "none"},
    {"scores": "index", "index_dim": 32, "index_keys": "shared", "index_heads": 3},
    {"scores": "index", "score_precision": "fp8", "branches": ("slc",), "share_kv": True},
    {"num_heads": 3, "num_kv_heads": 1},
    {"rope_theta": 10_000.0, "rotary_dim": 8},
]


@pytest.mark.parametrize("changes", CONFIGS, ids=str)
def test_every_config(changes):
    module, x = layer(small(**changes)), tokens(120)
    cache = new_cache(module.config)
    parts = [module(part, cache=cache) for part in x.split([6, *[1] * 5, 70, *[1] * 6, 33])]
    near(torch.cat(parts), array(module(x)))


# ------------------------------------------------------------------------------
# batches


@settings(max_examples=20)
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


# ------------------------------------------------------------------------------
# what is kept


@pytest.mark.parametrize(
    ("scores", "branches", "parts"),
    [
        ("compressed", ("win",), {"k_win", "v_win"}),
        ("compressed", ("cmp",), {"k_raw", "v_raw", "k_cmp", "v_cmp"}),
        ("compressed", ("slc",), {"k_slc", "v_slc", "k_raw", "k_cmp"}),
        ("compressed", ("slc", "win"), {"k_slc", "v_slc", "k_raw", "k_cmp", "k_win", "v_win"}),
        ("token_max", ("slc",), {"k_slc", "v_slc"}),
        ("index", ("slc",), {"k_slc", "v_slc", "k_idx"}),
        ("index", ("win",), {"k_win", "v_win"}),
    ],
)
def test_branch_that_is_off_keeps_nothing(scores, branches, parts):
    """Compressed values serve the compressed branch alone, and keys of tokens score blocks."""
    config = small(branches=branches, scores=scores)
    cache = new_cache(config)
    layer(config)(tokens(100), cache=cache)
    assert cache.tensors is not None
    held = zip(cache.tensors._fields[:9], cache.tensors, strict=False)
    assert {name for name, x in held if x is not None} == parts


def test_memory_is_reserved_once():
    """Pages for all tokens, rings of the window and of a block with 8 tokens to spare."""
    config = small()
    cache, module = new_cache(config, 2), layer(config)
    module(tokens(20).view(2, 10, WIDTH), cache=cache)
    assert cache.tensors is not None
    before = [x.data_ptr() for x in cache.tensors if x is not None]
    pages = -(-MOST // config.block_size)
    rows = (pages * 16, pages * 16, 40, 40, 16, 16, pages * 4, pages * 4)
    held = [x for x in cache.tensors[:9] if x is not None]
    assert tuple(x.shape[0] for x in held) == tuple(2 * n for n in rows)
    for count in (1, 80, 3):
        module(tokens(2 * count).view(2, count, WIDTH), cache=cache)
    assert [x.data_ptr() for x in cache.tensors if x is not None] == before


def test_cache_keeps_no_graph():
    module, x = layer(small()).requires_grad_(True), tokens(20)
    cache = new_cache(module.config)
    assert not module(x, cache=cache).requires_grad
    assert cache.tensors is not None
    assert not any(x.requires_grad for x in cache.tensors if x is not None)


# ------------------------------------------------------------------------------
# sequences that are forked, shortened and freed


# ------------------------------------------------------------------------------
# mistakes


@pytest.mark.parametrize(
    ("argument", "value"),
    [("num_layers", 0), ("batch_size", 0), ("max_tokens", 0), ("num_pages", 0)],
)
def test_bad_sizes(argument, value):
    with pytest.raises(ValueError, match=rf"^{argument} must be positive, got {value}\.$"):
        NSACache(small(), **{"num_layers": 1, "max_tokens": 9, argument: value})


@pytest.mark.parametrize(
    ("lengths", "changes", "message"),
    [
        ((5,), {}, r"must describe 2 sequences, got 1\.$"),
        ((2, 2, 1), {}, r"must describe 2 sequences, got 3\.$"),
        ((3, 3), {}, "must"),  # more than there are tokens
        ((2, 3), {"window_size": 16}, r"cache must .*, got "),
    ],
)
def test_refused_tokens_leave_the_cache_as_it_was(lengths, changes, message):
    """A cache of another pattern would be read silently as if it were of this one."""
    module, x = layer(small()), tokens(60)
    cache = new_cache(module.config, 2)
    module(x[:50], cu_seqlens=offsets((50, 0)), cache=cache)
    with pytest.raises(ValueError, match=message):
        layer(small(**changes))(x[50:55], cu_seqlens=offsets(lengths), cache=cache)
    found = module(x[50:], cu_seqlens=offsets((10, 0)), cache=cache)
    near(found, array(module(x))[50:])


def test_places_are_computed_once_for_all_layers(monkeypatch):
    """Numbers on their way to a GPU wait for it: only the first layer sends some."""
    module, x, located = layer(small()), tokens(60), list[int]()

    def note(num_rows, cu_seqlens):
        located.append(num_rows)
        return locate(num_rows, cu_seqlens)

    monkeypatch.setattr(places, "locate", note)
    cache = NSACache(module.config, num_layers=3, batch_size=2, max_tokens=MOST)
    for part, cu in ((x[:40], offsets([30, 10])), (x[40:], offsets([15, 5]))):
        sequences = Sequences.packed(cu, 30)
        for index, one in enumerate(cache.layers):
            module(part, cache=one, sequences=sequences)
            assert bool(located) == (index == 0)
            located.clear()


def test_layers_receive_the_same_tokens():
    module, x = layer(small()), tokens(60)
    cache = NSACache(module.config, 2, max_tokens=50)
    module(x[:5], cache=cache.layers[0])
    with pytest.raises(ValueError, match=r"^layers\[0\] must receive the tokens "):
        module(x[:5], cache=cache.layers[0])
    with pytest.raises(ValueError, match=r"^new tokens must be \[5\] "):
        module(x[:4], cache=cache.layers[1])
    module(x[:5], cache=cache.layers[1])
    assert cache.lengths == [5]


def test_a_chunk_that_raised_while_it_overwrote_the_past(monkeypatch):
    module, x = layer(small()), tokens(100)
    cache, write = NSACache(module.config, 1, max_tokens=150), Chunk._write_ring

    def fail(*arguments):
        write(*arguments)
        raise RuntimeError("out of memory")

    module(x[:60], cache=cache.layers[0])
    monkeypatch.setattr(Chunk, "_write_ring", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        module(x[60:], cache=cache.layers[0])
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"sequence 0 must hold .* Call truncate\(0, 0\)"):
        module(x[60:], cache=cache.layers[0])
    cache.truncate(0, 0)
    near(module(x, cache=cache.layers[0]), array(module(x)))
