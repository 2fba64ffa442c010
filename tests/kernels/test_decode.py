"""Decode steps by kernels in the interpreter, against fp64 and full passes of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa import NativeSparseAttention, NSACache, NSAConfig, select_blocks
from nsa.cache import LayerCache, cache
from nsa.ops._plan import PLANS
from nsa.ops.decode import launch
from nsa.ops.decode.layout import Splits
from nsa.ops.range import window_attention_op
from nsa.ops.selection.fp8 import round_rows
from nsa.ops.selection.reference import quantize
from tests.ops.cases import SUBSETS, offsets, small
from tests.ops.decoding import Decoded
from tests.ops.poison import poisoned_memory
from tests.ops.public import Case

WIDTH = 24
ONE_KV_HEAD = {"num_heads": 2, "num_kv_heads": 1}
TOKENS: dict[str, Any] = {"num_heads": 6, "scores": "token_max", "branches": ("slc", "win")}
INDEX = {"num_heads": 6, "scores": "index", "index_heads": 2, "index_keys": "shared"}


def case_of(
    changes: dict[str, Any],
    before: Sequence[int],
    queries: int,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """A step of some queries after the tokens before it, of the small pattern with changes."""
    lengths = tuple(n + queries for n in before)
    return Case(small(**changes), lengths, (queries,) * len(lengths), dtype=dtype)


def check(case: Case, steps: Sequence[int] = ()) -> Decoded:
    """A step in poisoned memory, after earlier steps; the same bits again."""
    decoded = Decoded.of(case, steps=steps)
    with poisoned_memory():
        first = decoded.check()
        decoded.take_back()
        for x, y in zip(first, decoded.step(), strict=True):
            assert x is y or (x is not None and y is not None and torch.equal(x, y))
    return decoded


@pytest.fixture
def change(monkeypatch):
    """A function that changes constants of the launches, and drops the plans made with others."""

    def set_all(**constants):
        for plans in PLANS:
            plans.clear()
        for name, value in constants.items():
            monkeypatch.setattr(launch, name, value)

    yield set_all
    for plans in PLANS:
        plans.clear()


def pattern(l: int, d: int, block_size: int = 16, n: int = 4) -> dict[str, Any]:
    sizes = {"compress_block_size": l, "compress_stride": d, "block_size": block_size}
    return {**ONE_KV_HEAD, **sizes, "num_selected_blocks": n}


def forced(init: int, local: int, n: int) -> dict[str, Any]:
    counts = {"num_init_blocks": init, "num_local_blocks": local}
    return {**ONE_KV_HEAD, **counts, "num_selected_blocks": n}


# Changes of the small pattern, tokens before the steps, tokens of each step.
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]] = {
    "usual, from nothing": ({"num_heads": 6}, (0,), (1, 5, 1, 1, 1, 8)),
    "usual, at edges": ({}, (7, 15, 131), (1, 2)),
    "linear, G 3": (
        {"num_heads": 3, "num_kv_heads": 1, "phi": "linear", "compress_rope": "start"},
        (3, 63, 100),
        (1, 4),
    ),
    "mlp, G 1": (
        {"num_heads": 2, "phi": "mlp", "compress_hidden_size": 3, "rotary_dim": 8},
        (15, 123),
        (5,),
    ),
    "mlp, wide, G 6": (
        {"num_heads": 6, "num_kv_heads": 1, "head_dim": 48, "value_dim": 80}
        | {"phi": "mlp", "compress_rope": "none"},
        (5, 90),
        (3,),
    ),
    "linear, rotary": (
        {**ONE_KV_HEAD, "head_dim": 80, "value_dim": 16, "phi": "linear", "rotary_dim": 24},
        (106,),
        (6,),
    ),
    **{
        "+".join(branches): (
            {**ONE_KV_HEAD, "branches": branches, "phi": ("linear", "mlp")[len(branches) - 1]},
            (6, 70),
            (2,),
        )
        for branches in SUBSETS[:-1]
    },
    "l = d, l' = d": (pattern(16, 16), (15, 110), (2, 1)),
    "l = 3 d": ({**pattern(12, 4), "phi": "linear"}, (10, 110), (3,)),
    "l = l'": (pattern(16, 4), (14, 124), (3,)),
    "l' = 64": (pattern(32, 16, 64, 3), (30, 62, 318), (3,)),
    "table": (
        {**pattern(8, 4, n=5), "num_selected_blocks_table": ((-1, 104, 3), (-1, 107, 4))},
        (40, 102),
        (6,),
    ),
    "all blocks": ({**ONE_KV_HEAD, "num_selected_blocks": 30}, (3, 99), (2,)),
    "no first blocks": (forced(0, 1, 2), (31, 143), (3,)),
    "window 1": ({**ONE_KV_HEAD, "window_size": 1}, (0, 40), (3, 1)),
    "window of all": ({**ONE_KV_HEAD, "window_size": 1000}, (3, 100), (3,)),
    "tokens": (TOKENS, (15, 131), (1, 4)),
    "tokens, cmp, table": (
        {**pattern(8, 4, n=5), "scores": "token_max", "compress_rope": "none"}
        | {"num_selected_blocks_table": ((-1, 104, 3), (-1, 107, 4))},
        (40, 102),
        (1, 8),
    ),
    "tokens, no first blocks": (
        {**forced(0, 1, 2), "scores": "token_max", "branches": ("slc",)},
        (31, 143),
        (3,),
    ),
    "index": ({"scores": "index", "index_dim": 32, "branches": ("slc", "win")}, (15, 131), (1, 4)),
    "index of 6 heads, cmp": (
        {**pattern(8, 4), "scores": "index", "index_dim": 48, "index_heads": 6},
        (40, 102),
        (1, 8),
    ),
    "shared index": (INDEX, (15, 131), (1, 3)),
    "fp8": (
        {"num_heads": 6, "num_selected_blocks": 8, "score_precision": "fp8"},
        (0, 784),
        (1, 8),
    ),
    "tokens, fp8": ({**TOKENS, "score_precision": "fp8"}, (15, 131), (1, 4)),
    "shared index, fp8": (
        {**INDEX, "block_size": 32, "score_precision": "fp8"},
        (15, 300),
        (1, 3),
    ),
    "G 20": ({"num_heads": 20, "num_kv_heads": 1, "num_selected_blocks": 3}, (70,), (2,)),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_are_rows_of_a_full_pass(name):
    changes, before, (*steps, last) = CASES[name]
    check(case_of(changes, [n + sum(steps) for n in before], last), steps)


def test_fp16():
    """All blocks are selected, so that rounding decides nothing. The interpreter has no bf16."""
    changes = {"num_heads": 6, "num_kv_heads": 1, "num_selected_blocks": 10, "phi": "linear"}
    check(case_of(changes, (6, 122), 4, torch.float16), [1])


def test_rows_of_all_queries_and_heads_exceed_a_tile(change):
    """64 rows in one dtype, 16 in the other: G 10 and 8 queries are 80."""
    change(choose_splits=lambda *_: Splits(1, 1, 1))
    for dtype in (torch.float32, torch.float16):
        changes = {"num_heads": 10, "num_kv_heads": 1, "num_selected_blocks": 5}
        check(case_of(changes, (57,), 8, dtype))


@pytest.mark.parametrize(
    "splits",
    [
        *(Splits(1, 1, 1), Splits(5, 3, 3), Splits(40, 9, 7), Splits(0, 2, 3, 5)),
        Splits(3, 1, 2, 30),
    ],
    ids=str,
)
def test_any_number_of_programs(splits, change):
    """More than there are keys or blocks, too, and numbers that are no powers of two."""
    change(choose_splits=lambda *_: splits, STEP_KEYS=16, SCORED_BYTES=0)
    changes: dict[str, Any] = {}
    if splits.scored:  # two steps per block
        changes = {"scores": "token_max", "block_size": 32}
        changes |= {} if splits.cmp else {"branches": ("slc", "win")}
    check(case_of({**ONE_KV_HEAD, **changes}, (2, 300), 2))


@pytest.mark.parametrize(
    ("keys", "sequences", "scored"),
    [("group", 1, 128), ("shared", 1, 256), ("group", 64, 64), ("shared", 64, 64)],
)
def test_few_sequences_share_scored_keys_among_all_multiprocessors(keys, sequences, scored):
    changes: Any = {"scores": "index", "index_keys": keys, "branches": ("slc", "win")}
    config = NSAConfig(12, 2, 64, 64, **changes)
    assert launch.choose_splits(config, 2 * sequences, 1, 65_536).scored == scored
    assert launch.choose_splits(config, 2 * sequences, 1, 200).scored <= 2


def test_rounding_to_fp8():
    """The bits of PyTorch, also for numbers below 2^-6 of the scale and halfway between two."""

    @triton.jit
    def rounding_kernel(x_ptr, low_ptr, scale_ptr, SIZE: tl.constexpr):
        row, column = tl.arange(0, 64), tl.arange(0, 16)
        at = row[:, None] * 16 + column[None, :]
        low, scale = round_rows(tl.load(x_ptr + at), SIZE)
        tl.store(low_ptr + at, low)
        tl.store(scale_ptr + row, scale)

    x = torch.randn(64, 16) * torch.rand(64, 16) ** 16
    x[:16] = torch.arange(256).view(16, 16) / 16 * 2.0**-9  # to multiples of 2^-9
    x[:16, 0] = 448.0
    x[20] = 0.0
    low, scale = torch.empty_like(x), torch.empty(64)
    for size in (1, 16):
        rounding_kernel[(1,)](x, low, scale, size)
        largest = x.abs().amax(1).view(-1, size).amax(1).repeat_interleave(size)
        rows, scales = quantize(x, largest)
        assert torch.equal(low, rows.float())
        assert torch.equal(scale, scales)


@pytest.mark.parametrize("changes", [TOKENS, {**INDEX, "block_size": 32}], ids=["tokens", "index"])
def test_fp8_selects_as_a_full_pass_does(changes: dict[str, Any]):
    """The blocks by rounded products, which differ from those by exact ones."""
    changes = {**changes, "num_selected_blocks": 8}
    decoded = Decoded.of(case_of({**changes, "score_precision": "fp8"}, (792, 792, 792), 8))
    _, found, _ = decoded.check()
    x, names = decoded.x, ("q_idx", "k_idx") if "index" in changes["scores"] else ("q", "k_slc")
    q, k = (getattr(x, name) for name in names)
    offsets: Any = {"cu_seqlens_q": x.cu_seqlens_q, "max_seqlen_q": 8}
    offsets |= {"cu_seqlens_k": x.cu_seqlens_k, "max_seqlen_k": 800}
    ids = [
        select_blocks(q, k, None, small(**changes, score_precision=x), **offsets)
        for x in ("fp8", "exact")
    ]
    assert found is not None
    assert torch.equal(found, ids[0])
    assert not torch.equal(found, ids[1])


@pytest.mark.parametrize(("ranked", "scores"), [(16, "compressed"), (32, "token_max")])
def test_selection_in_chunks(ranked, scores, change):
    """Programs of 15 or 31 blocks each, whose best are merged; most have none of a short one."""
    change(MAX_RANKED=ranked)
    table = {"num_selected_blocks": 12, "num_selected_blocks_table": ((-1, 240, 9),)}
    check(case_of({**ONE_KV_HEAD, **table, "scores": scores}, (14, 238, 695), 3))


@pytest.mark.parametrize(("ranked", "scores"), [(16, "token_max"), (1024, "compressed")])
def test_equal_scores_select_the_lowest_blocks(ranked, scores, change):
    """Queries of zeros: only the first block and those at the end score less than others."""
    change(MAX_RANKED=ranked)
    changes = {**ONE_KV_HEAD, "num_selected_blocks": 6, "scores": scores}
    decoded = Decoded.of(case_of(changes, (400, 14), 2))
    decoded.x.q.zero_()
    _, ids, _ = decoded.check()
    assert ids is not None
    assert ids[:2, 0].tolist() == [[0, 1, 2, 3, 24, 25]] * 2


def test_scores_beyond_the_limit_are_equal():
    """Three blocks with a token of product 200, forced ones with 0: no score is infinite."""
    changes = {**ONE_KV_HEAD, "scores": "token_max", "num_selected_blocks": 5}
    decoded = Decoded.of(case_of(changes, (300,), 1))
    tensors = decoded.cache.layers[0].tensors
    assert tensors is not None
    assert tensors.k_slc is not None
    for x in (tensors.k_slc, decoded.x.k_slc):
        x.zero_()
    tensors.k_slc[16 * tensors.table[0, [3, 5, 7]].long()] = 50.0
    decoded.x.q.fill_(1.0)
    _, ids, _ = decoded.step()
    assert ids is not None
    assert ids.tolist() == [[[0, 3, 5, 17, 18]]]


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
@pytest.mark.parametrize("poisoned", [0, 1])
def test_nan_reaches_no_other_sequence(poisoned):
    case = case_of({**ONE_KV_HEAD, "phi": "mlp"}, (30, 71), 2)
    clean, dirty = (Decoded.of(case, steps=(1,), poisoned=p) for p in (None, poisoned))
    other = slice(2) if poisoned else slice(2, 4)
    for x, y in zip(clean.step()[:2], dirty.step()[:2], strict=True):
        assert x is not None
        assert y is not None
        assert torch.equal(x[other], y[other])


# ------------------------------------------------------------------------------
# a layer's cache


def layer(config: NSAConfig) -> NativeSparseAttention:
    torch.manual_seed(0)
    return NativeSparseAttention(WIDTH, config).requires_grad_(False)


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(seed))


def step(module: NativeSparseAttention, layer_cache: LayerCache, x: Tensor) -> Tensor:
    """Outputs of new tokens ``[B, T, width]`` by kernels."""
    with mock.patch.object(cache, "choose_backend", return_value="triton"), poisoned_memory():
        out: Tensor = module(x, cache=layer_cache)
    return out


def assert_rows(module: NativeSparseAttention, out: Tensor, text: Tensor) -> None:
    """``out`` are the last rows of a full pass over the text."""
    torch.testing.assert_close(out, module(text)[-len(out) :], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", [{"phi": "linear"}, {**forced(0, 1, 2), "scores": "index"}])
def test_forks_and_truncated_sequences(changes):
    """Two forks of a prefix go on with tokens of their own, one goes back and takes others."""
    module = layer(small(**{**ONE_KV_HEAD, **changes}))
    prefix, other, third = tokens(77), tokens(6, seed=2), tokens(6, seed=3)
    whole = NSACache(module.config, 1, 3, max_tokens=600, num_pages=10)
    (layer_cache,) = whole.layers
    module(prefix, cu_seqlens=offsets([77, 0, 0]), cache=layer_cache)
    whole.fork(0, 1)
    whole.fork(0, 2)
    assert whole.num_free_pages == 5
    new = torch.stack([other[:4], third[:4], other[:4]])
    for out, x in zip(step(module, layer_cache, new), new, strict=True):
        assert_rows(module, out, torch.cat((prefix, x)))
    assert whole.num_free_pages == 0  # copies of two last pages, and the page behind each
    whole.truncate(0, 79)
    whole.free(2)
    whole.fork(1, 2)
    whole.truncate(1, 78)
    whole.truncate(2, 80)
    new = torch.stack([tokens(2, seed=b) for b in range(3)])
    out = step(module, layer_cache, new)
    for b, kept in enumerate((other[:2], third[:1], third[:3])):
        assert_rows(module, out[b], torch.cat((prefix, kept, new[b])))


def test_chunks_between_steps():
    """A chunk goes on behind steps of kernels, and steps behind the chunk."""
    module, x = layer(small(phi="mlp", compress_hidden_size=3)), tokens(60)
    whole, parts = NSACache(module.config, 1, 1, max_tokens=60), list[Tensor]()
    for i, part in enumerate(x.split([10, 3, 25, 2, 1, 18, 1])):
        take = step(module, whole.layers[0], part[None])[0] if i % 2 else None
        parts.append(module(part, cache=whole.layers[0]) if take is None else take)
    assert_rows(module, torch.cat(parts), x)


def test_chunks_of_a_prompt():
    """The first chunk is alone and uses the operator for all branches, the others follow a past."""
    module, chunks = layer(small(num_heads=2, num_kv_heads=1, value_dim=16)), (37, 9, 12)
    x, launches, parts = tokens(sum(chunks)), list[int](), list[Tensor]()
    (layer_cache,) = NSACache(module.config, 1, max_tokens=60).layers
    for chunk in x.split(chunks):
        with (
            mock.patch.object(cache, "choose_backend", return_value="triton"),
            mock.patch("nsa.ops.range.window_attention_op", wraps=window_attention_op) as launched,
        ):
            parts.append(module(chunk, cache=layer_cache))
        launches.append(launched.call_count)
    assert_rows(module, torch.cat(parts), x)
    assert launches == [0, 1, 1]


@pytest.mark.parametrize("length", [8192, 16384, 32768, 65536])
def test_keys_read_by_a_step_are_those_of_the_paper(length):
    """Table 4, but for one: the last S tokens hold one block of compression less than S / d."""
    config = NSAConfig(num_heads=1, num_kv_heads=1, head_dim=16, value_dim=16)
    module, whole = layer(config), NSACache(config, 1, max_tokens=length)
    (layer_cache,) = whole.layers
    module(tokens(1), cache=layer_cache)
    count = [length - 2]
    whole.reserve(count)
    whole.advance(count)  # of zeros, which the memory holds
    whole.device_lengths.add_(length - 2)
    layer_cache.reads = torch.zeros(1, 4, dtype=torch.int64)
    step(module, layer_cache, tokens(1, 1))
    table = {8192: 2048, 16384: 2560, 32768: 3584, 65536: 5632}
    assert int(layer_cache.reads.sum()) == table[length] - 1
