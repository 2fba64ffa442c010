"""Kernels at edges of tiles, chunks and segments, in the interpreter, against fp64."""

from __future__ import annotations

import dataclasses
import itertools
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa import PhiWeights, Rope, native_sparse_attention, select_blocks
from nsa.ops import shared_kv
from nsa.ops._operator import Call
from nsa.ops._sequences import Sequences
from nsa.ops._side_stream import Streams
from nsa.ops._triton.selected_index import chunk_size
from nsa.ops._triton.tiles import cos_sin
from nsa.ops._triton.tuning import Tile, TileKey, default_tile, tiles_chosen_by
from nsa.ops.compression import Raw, ops, run_compress
from nsa.ops.projection import kernels as projection_launch
from nsa.ops.range import launch as range_launch
from nsa.ops.selected import launch
from nsa.ops.selected.types import SelectedInputs
from nsa.ops.selection import launch as selection_launch
from tests.kernels.test_properties import NARROW, short_chunks  # noqa: F401
from tests.ops.cases import small
from tests.ops.properties import equal_bits
from tests.ops.public import (
    ALGORITHMS,
    RUNS,
    Case,
    Results,
    by_token,
    check_combine,
    check_compress,
    check_project,
    check_selection,
    compressed_rows,
    run_branch,
    select,
)

PACKED, FEWER = (68, 1, 0, 20), (21, 1, 0, 4)


def heads(group: int, num_kv_heads: int = 1, **changes: Any) -> Any:
    sizes = {"num_heads": group * num_kv_heads, "num_kv_heads": num_kv_heads}
    return small(**{"value_dim": 16, **sizes, **changes})


def run(
    operator: str,
    case: Case,
    block_indices: Tensor | None = None,
    tile: Tile | None = None,
    segments: int | None = None,
    **constants: int,
) -> Results:
    """A branch with another tile or other constants of the selected branch's launches."""
    with ExitStack() as stack:
        if tile is not None:
            stack.enter_context(tiles_chosen_by(lambda key, _: tile))
        if segments is not None:
            stack.enter_context(mock.patch.object(launch, "num_segments", return_value=segments))
        for name, value in constants.items():
            stack.enter_context(mock.patch.object(launch, name, value))
        return run_branch(operator, case, block_indices=block_indices)


TILE, TURNED = Tile(16, 16, 4, 1), Tile(16, 16, 4, 1, keys_as_rows=True)
RANGES: dict[str, tuple[Case, Tile]] = {
    "packed": (Case(heads(3, 2, value_dim=32), (70, 1, 0, 45)), TURNED),
    "fewer queries": (Case(heads(3, 2), (70, 1, 0, 45), (20, 1, 0, 7)), TILE),
    "dense": (Case(heads(3, head_dim=48), (66, 66), dense=True), Tile(32, 16, 4, 1)),
    "G 1": (Case(heads(1), (61,)), TILE),
    "G 16": (Case(heads(16), (61,)), TILE),
}


@pytest.mark.parametrize("name", [*RANGES, "chunks"])
@pytest.mark.parametrize("branch", ["window", "compressed"])
def test_range(branch, name, monkeypatch):
    """Queries cut into chunks give the same sums, also if some chunks see no key of a block."""
    case, tile = RANGES["packed" if name == "chunks" else name]
    if name == "chunks":
        monkeypatch.setattr(range_launch, "chunks_of", lambda len_q, *rest: (-(-len_q // 16), 16))
    run(branch, case, tile=tile).check()


# ------------------------------------------------------------------------------
# selected branch

GATHERED: dict[str, tuple[Case, dict[str, Any]]] = {
    "G 1": (Case(heads(1, 2), PACKED), {}),
    "G 16": (Case(heads(16, value_dim=32), (20, 5)), {"segments": 1}),
    # The last segments are empty.
    "20 segments": (Case(heads(2), (40, 1)), {"segments": 20}),
    "fewer queries": (Case(heads(3, 2), PACKED, FEWER), {}),
    "auto": (Case(heads(3, 2), PACKED, FEWER, algorithm="auto"), {}),
    "tiled": (Case(heads(3, 2), PACKED, FEWER, algorithm="tiled"), {}),
    "dense": (Case(heads(2, 2), (20, 20), dense=True), {"segments": 3}),
    **{f"n {n}": (Case(heads(2, num_selected_blocks=n), (50,)), {}) for n in (3, 12)},
    # A tile of fewer keys than a block has: a row of slots for each part, hidden ones included.
    "parts of blocks": (Case(heads(3), (40, 9)), {"tile": Tile(16, 8, 4, 1)}),
    "one merge": (Case(heads(2), (30,)), {"MERGED": 1024, "segments": 1}),
}


@pytest.mark.parametrize("name", GATHERED)
def test_gathered(name):
    case, options = GATHERED[name]
    operator = "any" if name in ("auto", "tiled") else "gathered"
    run(operator, case, **{"tile": Tile(32, 16, 4, 1), **options}).check()


def test_sizes_depend_on_shapes_alone(monkeypatch):
    """Measured in the seed shape: docs/log.md."""
    monkeypatch.undo()
    chunks_of, lengths = range_launch.chunks_of, (2_048, 8_192, 32_768, 65_536)
    assert [chunks_of(s, s, False, 128, 64)[0] for s in lengths] == [4, 16, 40, 40]
    assert chunks_of(65_536, 512, True, 2_048, 64)[0] == 1
    for length, programs, rows in itertools.product(
        (513, 30_000, 2**20), (1, 256, 10**5), (16, 128)
    ):
        count, queries = chunks_of(length, length, False, programs, rows)
        assert (count - 1) * queries < length <= count * queries
        assert count == 1 or (queries % rows == 0 and queries > 256)
        assert count <= 40
        assert count == 1 or count * programs <= 10_240
    # 131,072 selections are two sequences of 2,048 tokens.
    chunks = {0: 128, 65_535: 128, 131_072: 256, 300_000: 512, 524_288: 1024, 2**21: 1024}
    assert {number: chunk_size(number) for number in chunks} == chunks
    # One segment if the partial results are small, else four of them a query head.
    row = 12 * 64 * 2
    segments = [(2048, 16, row, 1), (65536, 16, row, 4), (65536, 12, row, 3), (3, 2**10, 2**20, 3)]
    for *given, number in segments:
        assert launch.num_segments(*given) == number


def test_nothing_is_read_before_the_other_stream_has_made_it(monkeypatch):
    """The index is made while lists are; the gathered kernels wait for both."""
    said: list[str] = []

    def noting(name, function):
        def call(*arguments, **named):
            said.append(name)
            return function(*arguments, **named)

        return call

    @contextmanager
    def on_side(self):
        said.append("side")
        yield
        said.append("calling")

    monkeypatch.setattr(Streams, "on_side", on_side)
    monkeypatch.setattr(Streams, "fork", lambda self: said.append("fork"))
    monkeypatch.setattr(Streams, "record", lambda self: lambda: said.append("wait"))
    made = ("new_gathered", "new_backward_index", "fill_index", "make_lists")
    for name in (*made, "gather_forward", "_gather_gradients"):
        monkeypatch.setattr(launch, name, noting(name, getattr(launch, name)))
    run("gathered", Case(heads(2, 2), (25, 5)))
    index_and_lists = "side fill_index calling make_lists wait"
    last = "fork side _gather_gradients calling _gather_gradients"
    forward = f"new_gathered {index_and_lists} gather_forward"
    assert said == f"{forward} new_backward_index {index_and_lists} {last}".split()
    said.clear()
    run("selected", Case(heads(2, 2), (25, 5)))
    assert said[:2] == ["make_lists", "wait"]


def test_a_block_that_every_query_selects():
    ids = torch.tensor([0, 1, -1, 2]).int().expand(70, 1, 4).contiguous()
    run("gathered", Case(heads(2), (70,)), ids).check()


def scattered_ids() -> Tensor:
    ids = torch.rand(118, 1, 8, generator=torch.Generator().manual_seed(1)).argsort(-1)
    return ids[..., :3].int()


@pytest.mark.parametrize("scattered", [False, True])
def test_the_selection_decides(scattered):
    """Long lists by the shapes: the algorithm follows from the selection, bit for bit."""
    case, tile = Case(heads(2, num_selected_blocks=3), (118,)), Tile(32, 16, 4, 1, scatter=1.25)
    ids = torch.tensor([0, 1, -1]).int().expand(118, 1, 3).contiguous()
    if scattered:
        ids = scattered_ids()
    found = run("any", case, ids, tile)
    found.check()
    same, other = (run(name, case, ids, tile).of_queries for name in ("gathered", "selected"))
    if not scattered:
        same, other = other, same
    assert all(torch.equal(x, same[name]) for name, x in found.of_queries.items())
    assert not all(torch.equal(x, other[name]) for name, x in found.of_queries.items())


def test_the_backward_has_its_own_threshold():
    """The forward is gathered; dQ is not, although lse and out are the same bits."""
    case, tile = Case(heads(2, num_selected_blocks=3), (118,)), Tile(32, 16, 4, 1)
    ids = scattered_ids()
    with tiles_chosen_by(
        lambda key, _: tile._replace(scatter=5.0 if key.kernel.endswith("dq") else 1.25)
    ):
        found = run("any", case, ids)
    found.check()
    gathered = run("gathered", case, ids, tile).of_queries
    same = {name for name, x in found.of_queries.items() if torch.equal(x, gathered[name])}
    assert same == {"out", "lse"}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_queries_without_a_block(algorithm):
    """Empty lists of tiles, and queries without a block beside others: output 0, lse -inf."""
    ids = torch.tensor([-1, 7, 7, -1]).int().repeat(66, 1, 1)  # absent, and of the future
    assert not run(algorithm, Case(NARROW, (66,)), ids).of_keys["dk"].any()
    ids[40::3, :, 2] = 1
    results = run(algorithm, Case(NARROW, (66,)), ids)
    results.check()
    assert not results.of_queries["out"][:40].any()
    assert not results.of_queries["dq"][:40].any()
    assert results.of_queries["lse"][:40].isneginf().all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_later_queries_change_no_earlier_gradient(algorithm):
    """Other queries, values and selections from row 40 on leave the bits of dQ before it."""
    case = Case(heads(3), (60,))
    x, ids = case.inputs(), case.block_indices()
    dout = case.normal(60, 3, 16)
    first = RUNS[algorithm](case, x, dout, ids).of_queries["dq"]
    x = dataclasses.replace(x, q=x.q.clone(), v_slc=x.v_slc.clone())
    ids, dout = ids.clone(), dout.clone()
    ids[40:] = ids[40:].roll(1, 0)
    for y in (x.q, x.v_slc, dout):
        y[40:] += 1.0
    second = RUNS[algorithm](case, x, dout, ids).of_queries["dq"]
    assert equal_bits(first[:40], second[:40])
    assert not torch.equal(first[40:], second[40:])


@pytest.mark.parametrize("group_size", [11, 40])
def test_tiles_that_end_between_the_heads_of_a_query(group_size):
    """Whole queries would leave more than an eighth of a tile's rows out, or do not fit into it."""
    tile = default_tile(TileKey("selected_attention_fwd", 32, 4), (9, 0))
    tile, used = launch.tile_of(tile, group_size, 16)
    assert used == tile.rows
    RUNS["selected"](Case(heads(group_size), (37, 0, 9), (21, 0, 9))).check()


# ------------------------------------------------------------------------------
# selection


def of_pattern(sizes: tuple[int, int, int, int], group: int, **changes: Any) -> Any:
    names = ("compress_block_size", "compress_stride", "block_size", "num_selected_blocks")
    return heads(group, **dict(zip(names, sizes, strict=True)), **changes)


SMALL = (8, 4, 16, 4)
SELECTIONS: dict[str, tuple[Case, Tile]] = {
    "packed": (Case(of_pattern(SMALL, 3), (200, 1, 0, 77)), Tile(16, 4, 4, 1)),
    "kept queries": (
        Case(of_pattern(SMALL, 3), (200, 1, 0, 77)),
        Tile(16, 4, 4, 1, keep_queries=True),
    ),
    "fewer queries": (Case(of_pattern(SMALL, 6), (300, 64), (20, 64)), Tile(16, 4, 4, 1)),
    "many blocks": (Case(of_pattern((8, 4, 16, 16), 2), (330, 40)), Tile(64, 4, 4, 1)),
    **{
        f"forced {init} {local}": (
            Case(of_pattern(SMALL, 2, num_init_blocks=init, num_local_blocks=local), (260,)),
            Tile(16, 4, 4, 1),
        )
        for init, local in ((0, 1), (2, 2))
    },
    # Overlaps of every kind: none, half, whole blocks; n that is no power of two.
    **{
        f"stencil {sizes}": (Case(of_pattern(sizes, 1), (330,)), Tile(16, 4, 4, 1))
        for sizes in (
            *((16, 16, 64, 4), (16, 4, 16, 5), (12, 4, 16, 3)),
            *((8, 8, 16, 8), (4, 4, 16, 3)),
        )
    },
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_selection(name):
    """The kernel selects as the reference does, from the same fp32 keys."""
    case, tile = SELECTIONS[name]
    x = case.inputs()
    k = compressed_rows(case, x.k_cmp_raw, x).nan_to_num()
    with tiles_chosen_by(lambda key, other: tile if key.kernel == "select_blocks" else other):
        found = select(case, x.q, k, x)
    reference = dataclasses.replace(case, backend="reference")
    assert torch.equal(found, select(reference, x.q, k, x))


def test_ties_go_to_the_lower_block():
    """Inner blocks tie exactly if q is 0, wherever they are in a step."""
    config = of_pattern(SMALL, 2)
    q, k, lse = torch.zeros(300, 2, 16), torch.randn(75, 1, 16), torch.zeros(300, 2)
    with tiles_chosen_by(lambda key, _: Tile(16, 4, 4, 1)):
        found = select_blocks(q, k, lse, config, backend="triton")
    assert torch.equal(found, select_blocks(q, k, lse, config, backend="reference"))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_selected_blocks": 5, "num_selected_blocks_table": ((-1, 90, 3), (-1, 120, 4))},
        {"coarse_block_size": 32, "num_coarse_blocks": 4},
        {"score_precision": "fp8"},
    ],
    ids=["table", "two stages", "fp8"],
)
def test_options_of_the_selection(changes):
    check_selection(Case(dataclasses.replace(NARROW, **changes), (150, 9)))


TOKENS = (108, 1, 0, 21)
# Changes of the tile (16 rows, 16 blocks a step) and the bytes of keys in one product, which covers
# some blocks or a part of one.
BY_TOKEN: dict[str, tuple[Case, dict[str, Any]]] = {
    "G 1": (Case(heads(1, 2), TOKENS), {}),
    "G 12": (Case(heads(12), (100, 9)), {}),
    "kept queries": (Case(heads(3, 2, head_dim=48), TOKENS), {"keep_queries": True}),
    "small products": (Case(heads(3), TOKENS), {"bytes": 16 * 16 * 4}),
    # Tiles that begin in the first block and end where blocks are left to select.
    "many rows": (
        Case(heads(3, num_local_blocks=1, num_selected_blocks=3), (64,) * 8),
        {"rows": 64, "keys": 4},
    ),
    "fewer queries": (Case(heads(3, 2), (200, 64, 9), (20, 0, 9)), {}),
    "dense": (Case(heads(3, 2), (70, 70), dense=True), {}),
    "many blocks": (Case(heads(2, num_selected_blocks=20), (340,), (90,)), {"keys": 4}),
    **{
        f"forced {init} {local}": (
            Case(heads(2, num_init_blocks=init, num_local_blocks=local), (150, 33)),
            {},
        )
        for init, local in ((0, 1), (2, 2))
    },
    "table": (Case(heads(2, num_selected_blocks_table=((-1, 80, 3),)), (140,)), {}),
    "index": (Case(heads(3, 2, scores="index", index_dim=32), TOKENS), {}),
    "shared index": (
        Case(
            heads(3, 2, scores="index", index_dim=32, index_heads=3, index_keys="shared"),
            (200, 64, 9),
            (20, 0, 9),
        ),
        {},
    ),
    "part of a block": (
        Case(heads(2, head_dim=192, block_size=64), (450, 70), (20, 9)),
        {"keys": 4, "bytes": 4 * 1024},
    ),
    **{
        f"l' {size}": (
            Case(heads(2, block_size=size), (6 * size + 5,), (40,)),
            {},
        )
        for size in (32, 128)
    },
}


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, "exact") for name in BY_TOKEN),
        *((name, "fp8") for name in ("kept queries", "part of a block", "shared index")),
    ],
)
def test_selection_by_token(name, precision, monkeypatch):
    case, changes = BY_TOKEN[name]
    changes = {"rows": 16, "keys": 16, **changes}
    monkeypatch.setattr(selection_launch, "PRODUCT_BYTES", changes.pop("bytes", 32 * 1024))
    config = dataclasses.replace(case.config, score_precision=precision)
    config = config if config.has_index else by_token(config)
    with tiles_chosen_by(lambda _, tile: tile._replace(**changes)):
        check_selection(dataclasses.replace(case, config=config))


def test_ties_by_token():
    """All blocks tie if q is 0, and all with too large products, limited to exp(80)."""
    config, k = by_token(of_pattern(SMALL, 2)), torch.randn(300, 1, 16)
    q = torch.zeros(300, 2, 16)
    loud = torch.ones(300, 2, 16)
    high = k.abs() + 1.0
    high[::16] *= 100.0
    high[:16] = high[224:] = 0.01  # forced blocks of the last queries
    for queries, keys in ((q, k), (loud, high)):
        found = select_blocks(queries, keys, None, config, backend="triton")
        expected = select_blocks(queries, keys, None, config, backend="reference")
        assert torch.equal(found, expected)
        assert found[-1, 0].tolist() == [0, 1, 17, 18]


def test_steps_without_a_kept_block():
    """Most steps of the second stage are left out; the key before a kept block still counts."""
    sizes = {"coarse_block_size": 64, "num_coarse_blocks": 5}
    config = heads(2, **sizes, num_init_blocks=0, num_local_blocks=1)
    with tiles_chosen_by(lambda key, tile: Tile(16, 4, 4, 1)):
        check_selection(Case(config, (1200,) * 6, (1,) * 6))


# ------------------------------------------------------------------------------
# projection, compression, combination


@pytest.mark.parametrize(
    "changes",
    [
        {"branches": ("slc",)},
        {"gate": "softmax", "branches": ("cmp", "win")},
        {"gate": "softmax", "gate_temperature": 0.3},
    ],
    ids=str,
)
def test_gates_of_a_projection(changes):
    check_project(Case(dataclasses.replace(NARROW, **changes), (70, 3)))


def test_heads_of_many_tokens_in_fewer_programs(monkeypatch):
    monkeypatch.setattr(projection_launch, "PROGRAMS", projection_launch.PROGRAMS[-1:])
    check_project(Case(NARROW, (70, 3)))


@pytest.mark.parametrize(
    ("phi", "sizes", "lengths"),
    [
        ("mlp", (8, 4), (45, 9)),
        *(("mean", sizes, (70, 33)) for sizes in ((16, 4), (12, 4), (8, 8))),
        *(("linear", sizes, (70, 7, 8, 45)) for sizes in ((8, 4), (16, 4), (12, 4), (8, 8))),
    ],
)
def test_compression(phi, sizes, lengths, monkeypatch):
    """Weights of more than 8 rows take several tiles."""
    monkeypatch.setattr(ops, "WEIGHT_TILE", 256)
    config = heads(1, 2, phi=phi, head_dim=32, value_dim=32)
    config = dataclasses.replace(config, compress_block_size=sizes[0], compress_stride=sizes[1])
    check_compress(Case(config, lengths))


SUBSETS: tuple[Any, ...] = (("slc", "win"), ("cmp", "win"), ("cmp",))
INDEX: dict[str, Any] = {"scores": "index", "index_heads": 3, "index_dim": 32}
WHOLES: dict[str, Case] = {
    **{str(on): Case(dataclasses.replace(NARROW, branches=on), (36,)) for on in SUBSETS},
    "gathered": Case(
        dataclasses.replace(NARROW, head_dim=32, rotary_dim=16), (66, 9), algorithm="gathered"
    ),
    "tokens": Case(by_token(NARROW, compress_rope="none"), (84, 9)),
    "tokens, alone": Case(by_token(NARROW, branches=("slc",)), (84, 9)),
    "index": Case(heads(2, 2, **INDEX), (84, 9)),
    "shared index": Case(heads(2, 2, **INDEX, index_keys="shared"), (84, 9)),
    "random": Case(heads(2, 2, scores="random"), (84, 1, 0, 37), (30, 1, 0, 9)),
}


@pytest.mark.parametrize("name", WHOLES)
def test_whole(name):
    RUNS["whole"](WHOLES[name]).check()


BOTH: dict[str, Any] = {"scores": "random", "branches": ("slc", "win"), "share_kv": True}
# Whether one pass computes the gradients of selected branch and window.
SHARED: dict[str, tuple[Case, bool]] = {
    "packed": (Case(heads(3, 2, **BOTH, window_size=21), (35, 1, 0, 9)), True),
    "steps": (Case(heads(5, **BOTH, block_size=32, window_size=7), (70,), (20,)), True),
    "fp16": (Case(heads(2, **BOTH, head_dim=48), (37,), dtype=torch.float16), True),
    "33 blocks": (Case(heads(1, **BOTH), (520,), (5,)), True),
    "gathered": (Case(heads(1, **BOTH), (20,), algorithm="gathered"), False),
}


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")
@pytest.mark.parametrize("name", SHARED)
def test_shared_keys(name, monkeypatch):
    """Queries are cut into chunks, some of which see no key of a block."""
    case, expected = SHARED[name]
    passes = mock.Mock(wraps=shared_kv.shared_backward)
    monkeypatch.setattr(shared_kv, "shared_backward", passes)
    monkeypatch.setattr(shared_kv, "CHUNK_ROWS", 16)
    with tiles_chosen_by(lambda key, tile: Tile(16, 16, 4, 1)):
        RUNS["whole"](case).check()
    assert passes.called == expected


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")
def test_shared_keys_of_a_dense_batch(monkeypatch):
    passes = mock.Mock(wraps=shared_kv.shared_backward)
    monkeypatch.setattr(shared_kv, "shared_backward", passes)
    shapes = (2, 40, 4, 16), (2, 40, 2, 16), (2, 40, 2, 16), (2, 40, 4, 3)
    q, k, v, gates = leaves = [torch.rand(shape, requires_grad=True) for shape in shapes]
    config = heads(2, 2, **BOTH)
    out = native_sparse_attention(q, None, None, k, v, k, v, gates, None, config, backend="triton")
    torch.autograd.grad(out.sum(), leaves)
    assert passes.called


@pytest.mark.parametrize(
    ("length", "head_dim", "expected"), [(1024, 64, True), (1025, 16, False), (20, 80, False)]
)
def test_one_pass_by_shapes(length, head_dim, expected):
    """At most 64 blocks of 16 tokens, and 64 columns."""
    q, k = torch.empty(length, 4, head_dim), torch.empty(length, 2, head_dim)
    where = Sequences(None, 1, length, length, q.device)
    inputs = SelectedInputs(q, k, k, torch.empty(length, 2, 4, dtype=torch.int32))
    call = Call(heads(2, 2, **BOTH, head_dim=head_dim, value_dim=head_dim), where, 1.0)
    assert shared_kv.is_one_pass(inputs, call) == expected


def test_combination_of_some_branches():
    for branches in SUBSETS:
        check_combine(Case(NARROW, (20,)), branches)


def test_random_blocks_are_those_of_the_reference():
    """In several steps over the blocks of a sequence."""
    config, offsets = heads(2, 2, scores="random"), torch.tensor([0, 700, 701, 701, 791]).int()
    assert 700 // config.block_size > selection_launch.RANDOM_BLOCKS
    q, k = torch.empty(791, 4, 16), torch.empty(791, 2, 16)
    assert torch.equal(
        *(
            select_blocks(q, k, None, config, cu_seqlens_q=offsets, max_seqlen_q=700, backend=name)
            for name in ("triton", "reference")
        )
    )


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_the_rest_of_a_sequence(backend):
    """Tokens from a later position on are compressed to the bits that the whole sequence gives."""
    config = small(phi="linear")
    rope, skipped = Rope.from_config(config), 12
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(70 + 45, 2, 16, generator=generator)
    weight = torch.randn(2, 8, 16, generator=generator)

    def run(tokens, lengths, starts):
        leaves = tokens.clone().requires_grad_(), weight.clone().requires_grad_()
        where = Sequences.packed(torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32))
        raw = Raw(leaves[0], PhiWeights(weight=leaves[1]), rope)
        (y,) = run_compress([raw], config, where, backend, starts)
        y = y[: sum((n - 8) // 4 + 1 for n in lengths)]
        # the gradient of the 13 + 10 blocks that the rest has as well
        return y.detach(), *torch.autograd.grad(y[-23:].sin().sum(), leaves)

    whole, d_whole, dw_whole = run(x, [70, 45], None)
    starts = torch.tensor([skipped, 0], dtype=torch.int32)
    rest, d_rest, dw_rest = run(x[skipped:], [70 - skipped, 45], starts)
    assert torch.equal(rest, whole[skipped // 4 :])
    torch.testing.assert_close(d_rest, d_whole[skipped:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dw_rest, dw_whole, rtol=1e-5, atol=1e-4)


@triton.jit
def cos_sin_kernel(angle_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    cosine, sine = cos_sin(tl.load(angle_ptr + at))
    tl.store(out_ptr + at, cosine)
    tl.store(out_ptr + SIZE + at, sine)


@pytest.mark.parametrize("largest", [4.0, 1e3, 1e6, 1e8])
def test_cosine_and_sine(largest):
    generator = torch.Generator().manual_seed(0)
    angle = (torch.rand(4096, generator=generator) * 2 - 1) * largest
    angle[:9] = torch.arange(-4, 5) * torch.pi / 4  # where the quadrant changes
    out = torch.empty(2, 4096)
    cos_sin_kernel[(1,)](angle, out, SIZE=4096)
    exact = angle.double()
    assert (out.double() - torch.stack((exact.cos(), exact.sin()))).abs().max() < 1.1e-7
