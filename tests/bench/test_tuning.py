"""Tuning tables: read, fallen back from, refused; and the walk that makes them."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.bench import clock, tune
from nsa.bench.rows import Origin
from nsa.errors import UserError
from nsa.ops._triton import tuning
from nsa.ops._triton.tuning import (
    TABLES,
    Tile,
    TileKey,
    default_tile,
    find_table,
    load_table,
    table_name,
    table_text,
    tile_for,
    tiles_chosen_by,
)
from nsa.train.telemetry.progress import RunReport

KEY = TileKey("window_attention_fwd", 64, 2)
ORIGIN = Origin("run", "cuda", "NVIDIA Test", "1", "2.11.0", "3.6.0", "abc", False, "2026-01-02T03:04:05+00:00")


def table_file(folder: Path, rows: list[Any], gpu: str = "NVIDIA Test") -> Path:
    path = folder / f"{table_name(gpu)}.json"
    path.write_text(json.dumps({"gpu": gpu, "rows": rows}))
    return path


def row(head_size: int = 64, rows: int = 128, **more: Any) -> dict[str, Any]:
    tile = {"rows": rows, "keys": 32, "warps": 8, "stages": 3, "tma": True}
    return {"kernel": KEY.kernel, "head_size": head_size, "element_size": 2, "tile": tile, **more}


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes CUDA device 0 a GPU of this name and capability, with ``tmp_path`` as the folder of tables."""

    def pretend(name: str, capability: tuple[int, int]) -> None:
        monkeypatch.setattr(tuning, "TABLES", tmp_path)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        tuning.device_table.cache_clear()
        tuning._tile.cache_clear()

    yield pretend
    tuning.device_table.cache_clear()
    tuning._tile.cache_clear()


@pytest.mark.parametrize("path", sorted(TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_committed_tables_load_and_are_written_as_the_tool_writes_them(path: Path) -> None:
    table = load_table(path)
    assert table_name(table.gpu) == path.stem
    assert table_text(table) == path.read_text()
    assert all(note["ms"] and note["measured"] and note["torch"] and note["triton"] for note in table.notes.values())
    assert all(key.head_size % 8 == 0 and key.element_size in (2, 4) for key in table.rows)


def test_a_gpu_takes_its_own_table(device: Callable[..., None], tmp_path: Path) -> None:
    table_file(tmp_path, [row()])
    device("NVIDIA Test", (8, 6))
    assert tuning._tile(KEY, 0) == Tile(128, 32, 8, 3, tma=True)
    assert tuning._tile(TileKey(KEY.kernel, 16, 2), 0).rows == 128  # a smaller head fits too
    larger = TileKey(KEY.kernel, 128, 2)
    assert tuning._tile(larger, 0) == default_tile(larger, (8, 6))
    assert tuning._tile(replace(KEY, element_size=4), 0) == default_tile(replace(KEY, element_size=4), (8, 6))
    assert tuning._tile(replace(KEY, kernel="other"), 0) == default_tile(replace(KEY, kernel="other"), (8, 6))


def test_a_gpu_without_one_takes_its_relatives_or_the_defaults(device: Callable[..., None], tmp_path: Path) -> None:
    table_file(tmp_path, [row()], gpu="NVIDIA H200")
    device("NVIDIA H100 80GB HBM3", (9, 0))
    assert tuning._tile(KEY, 0).rows == 128
    device("NVIDIA A100-SXM4-40GB", (8, 0))
    assert tuning._tile(KEY, 0) == default_tile(KEY, (8, 0))


def test_a_table_is_read_once(device: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = table_file(tmp_path, [row()])
    device("NVIDIA Test", (8, 6))
    first = tuning._tile(KEY, 0)
    path.unlink()
    assert tuning._tile(KEY, 0) == first
    assert tuning._tile(replace(KEY, head_size=32), 0) == first


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "be JSON"),
        ("[]", 'hold "gpu" and "rows"'),
        ('{"gpu": "x"}', 'hold "gpu" and "rows"'),
        (json.dumps({"gpu": "x", "rows": [3]}), "row 1 must be an object"),
        (json.dumps({"gpu": "x", "rows": [{"kernel": "a", "head_size": 64, "tile": {}}]}), "row 1 must have element_size"),
        (json.dumps({"gpu": "x", "rows": [row(), row()]}), "row 2 must name a kernel and sizes of its own"),
        (json.dumps({"gpu": "x", "rows": [{**row(), "tile": {"rows": 1, "keys": 1, "warps": 1}}]}), "the tile of row 1"),
        (json.dumps({"gpu": "x", "rows": [{**row(), "tile": {**row()["tile"], "wraps": 4}}]}), "no other fields"),
        (json.dumps({"gpu": "x", "rows": [{**row(), "tile": {**row()["tile"], "stages": "3"}}]}), "whole numbers"),
        (json.dumps({"gpu": "x", "rows": [{**row(), "tile": {**row()["tile"], "stages": 2.5}}]}), "whole numbers"),
        (json.dumps({"gpu": "x", "rows": [row(rows=0)]}), "positive sizes"),
        (json.dumps({"gpu": "x", "rows": [row(head_size=-1)]}), "positive sizes"),
    ],
)
def test_a_malformed_table_is_refused_and_named(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "nvidia-test.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"tuning table nvidia-test\.json") as caught:
        load_table(path)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("gpu", "said"),
    [
        ("NVIDIA Old", "no tuning table for NVIDIA Old: defaults of compute capability 8.6;"),
        ("NVIDIA H100", "no tuning table for NVIDIA H100: that of NVIDIA H200;"),
        ("NVIDIA H200", None),
    ],
)
def test_a_missing_table_is_a_line_of_the_log(
    device: Callable[..., None],
    tmp_path: Path,
    gpu: str,
    said: str | None,
) -> None:
    """Once a process, where a run looks for a tile the first time."""
    table_file(tmp_path, [row()], "NVIDIA H200")
    device(gpu, (8, 6) if gpu == "NVIDIA Old" else (9, 0))
    with RunReport(tmp_path / "log.txt", 1):
        for head_size in (64, 128):
            tuning._tile(TileKey("window_attention_fwd", head_size, 2), 0)
    text = (tmp_path / "log.txt").read_text()
    assert text.count("tuning table") == (said is not None)
    assert said is None or f"{said} `nsa bench tune` makes one\n" in text


def test_names_of_gpus_as_file_names() -> None:
    assert table_name("NVIDIA H200") == "nvidia-h200"
    assert table_name("NVIDIA A100-SXM4-80GB") == "nvidia-a100-sxm4-80gb"
    assert find_table("NVIDIA Nothing", (1, 0)) is None


@pytest.mark.parametrize(
    ("kernel", "fields"),
    [
        ("window_attention_fwd", {"tma"}),
        ("compressed_attention_dkv_long", {"tma", "keys_as_rows", "edge_stages"}),
        ("selected_gather_dkv", {"keys_as_rows"}),
        ("select_blocks", {"keep_queries"}),
    ],
)
def test_only_options_that_a_kernel_has_are_tried(kernel: str, fields: set[str]) -> None:
    start = Tile(64, 64, 4, 2, edge_stages=2)
    _, trials = tune.descend(TileKey(kernel, 64, 2), start, lambda _: {2048: 1.0})
    differ = {name for tile in trials for name, value in tile._asdict().items() if value != getattr(start, name)}
    assert differ == {"rows", "keys", "warps", "stages", "max_registers"} | fields


def test_tile_for_looks_up_by_head_and_element_size() -> None:
    seen: list[TileKey] = []

    def choose(key: TileKey, tile: Tile) -> Tile:
        seen.append(key)
        return tile._replace(rows=7)

    q, v = torch.zeros(1, 1, 192, dtype=torch.bfloat16), torch.zeros(1, 1, 128, dtype=torch.bfloat16)
    usual = tile_for("window_attention_dq", q, v)
    with tiles_chosen_by(choose):
        assert tile_for("window_attention_dq", q, v) == usual._replace(rows=7)
        tile_for("select_blocks", q[..., :8].float(), v[..., :8].float())
    assert seen == [TileKey("window_attention_dq", 192, 2), TileKey("select_blocks", 8, 4)]
    assert tile_for("window_attention_dq", q, v) == usual


# ------------------------------------------------------------------------------------------------------ making tables


def cost(best: Tile) -> tune.Measure:
    """Times that are least at ``best``; tiles of 128 rows by 128 keys do not fit."""

    def measure(tile: Tile) -> Mapping[int, float] | None:
        if tile.rows * tile.keys > 128 * 64:
            return None
        distance = abs(math.log2(tile.rows / best.rows)) + abs(math.log2(tile.keys / best.keys))
        distance += abs(math.log2(tile.warps / best.warps)) + abs(tile.stages - best.stages) + (tile.tma != best.tma)
        distance += 0.01 * (tile.edge_stages != best.edge_stages)  # below what counts as faster
        return {2048: 1 + 0.1 * distance, 65_536: 10 + distance}

    return measure


def test_the_walk_finds_the_best_tile_and_ignores_noise() -> None:
    best = Tile(128, 32, 8, 4, tma=True, edge_stages=3)
    found, trials = tune.descend(KEY, Tile(64, 64, 4, 2), cost(best))
    assert found == best._replace(edge_stages=1)
    assert trials[found] == cost(best)(found)
    assert not [tile for tile in trials if cost(best)(tile) is None]


def test_a_gain_that_does_not_repeat_is_not_taken() -> None:
    start, calls = Tile(64, 64, 4, 2), dict[Tile, int]()

    def measure(tile: Tile) -> Mapping[int, float]:
        calls[tile] = calls.get(tile, 0) + 1
        return {2048: 0.5 if tile != start and calls[tile] == 1 else 1.0}

    assert tune.descend(KEY, start, measure)[0] == start


def test_the_walk_says_what_comes_next_and_repeats_nothing() -> None:
    told: list[Tile] = []
    measured: list[Tile] = []

    def measure(tile: Tile) -> Mapping[int, float]:
        measured.append(tile)
        return {2048: 1.0}

    def tell(tiles: Sequence[Tile]) -> bool:
        told.extend(tiles)
        return False

    start = Tile(64, 64, 4, 2)
    tune.descend(KEY, start, measure, make_ready=tell)
    assert measured == [start, *told]
    assert len(told) == len(set(told)) > 15
    assert start not in told


def test_the_walk_stops_when_time_is_up() -> None:
    best = Tile(128, 32, 8, 3)
    assert tune.descend(KEY, Tile(64, 64, 4, 2), cost(best), lambda: False)[0] == Tile(64, 64, 4, 2)


def test_what_has_been_compiled_is_measured_even_then() -> None:
    """Compiling took the time that there was."""
    best, told = Tile(64, 32, 4, 2), list[Tile]()

    def compiled(tiles: Sequence[Tile]) -> bool:
        told.extend(tiles)
        return bool(tiles)

    found, trials = tune.descend(KEY, Tile(64, 64, 4, 2), cost(best), lambda: not told, compiled)
    assert found == best
    assert set(trials) == {Tile(64, 64, 4, 2), *(tile for tile in told if cost(best)(tile) is not None)}


def test_tiles_whose_sums_fill_the_registers_are_not_tried() -> None:
    def fits(kernel: str, head_size: int, *sizes: int) -> bool:
        return tune.fits_registers(TileKey(kernel, head_size, 2), *sizes)

    assert fits("window_attention_fwd", 192, 64, 64, 4)  # 160 registers of a thread
    assert not fits("window_attention_fwd", 192, 128, 64, 4)
    assert fits("window_attention_fwd", 192, 128, 64, 8)
    assert not fits("window_attention_dkv", 128, 64, 128, 4)
    assert fits("window_attention_dkv", 128, 64, 64, 4)
    assert not fits("window_attention_dq", 128, 128, 64, 4)


def test_kernels_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    ends = []
    for end, spent in zip(tune.shares(160.0, 4), (15.0, 5.0, 60.0, 0.0), strict=True):
        ends.append(end)
        now[0] += spent
    assert ends == [115.0, 130.0, 140.0, 180.0]  # what the second leaves goes to the others; the third takes the fourth's
    assert list(tune.shares(math.inf, 2)) == [math.inf] * 2


def test_a_tile_with_a_stack_says_what_the_best_one_without_would_take() -> None:
    fast, plain, slow = Tile(1, 1, 1, 1), Tile(2, 1, 1, 1), Tile(3, 1, 1, 1)
    trials: tune.Trials = {slow: {2048: 4.0}, plain: {2048: 2.0}, fast: {2048: 1.0}}
    stacks = {slow: 0, plain: 0, fast: 64}
    assert tune.without_stack(fast, trials, stacks) == {"stack_bytes": 64, "ms_without_stack": {2048: 2.0}}
    assert tune.without_stack(plain, trials, stacks) == {}
    assert tune.without_stack(fast, trials, {**stacks, slow: 8, plain: 8})["ms_without_stack"] is None
    assert tune.without_stack(fast, trials, {slow: 0, fast: 64})["ms_without_stack"] == {
        2048: 4.0
    }  # plain runs another's kernels


def compiled(name: str, stack: int, hash: str) -> tune.Compiled:
    return tune.Compiled(name, hash, stack)


def test_stacks_are_told_from_what_a_tile_made_the_compiler_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tile in use is compiled before it is measured; another one brings new kernels, of which one may need too much."""
    loaded = {compiled("fwd", 8, "a"), compiled("dq", 16, "b")}
    monkeypatch.setattr(tune, "compiled_kernels", lambda: set(loaded))
    monkeypatch.setattr(tune, "time_call", lambda *_: clock.Timing(1.0, 1.0, 1.0, 1, 1, ""))
    start, other, large, large_too, same = (Tile(rows, 64, 4, 2) for rows in (16, 32, 64, 128, 256))
    makes = {other: compiled("dq", 0, "c"), large: compiled("dq", 300, "d"), large_too: compiled("dq", 256, "e")}
    task = tune.Task(KEY, "fwd", start, (2048,))

    class Work:
        def run(self, mode: str) -> None:
            tile = tile_for(KEY.kernel, *[torch.zeros(1, 1, 64, dtype=torch.bfloat16)] * 2)
            loaded.update({makes[tile]} if tile in makes else {})

    bench = object.__new__(tune.Bench)
    bench.__dict__.update(works={2048: Work()}, device=torch.device("cpu"), _of_tile={}, _at_first=set(loaded))
    measure = bench.measure(task)
    assert [measure(tile) for tile in (start, other, large, large_too, same)] == [
        {2048: 1.0},
        {2048: 1.0},
        None,
        *[{2048: 1.0}] * 2,
    ]
    assert measure(other) == {2048: 1.0}  # a second time nothing is compiled
    assert bench.stacks(task) == {start: 16, other: 0, large: 300, large_too: 256}  # of the last one nothing is known


def test_a_tile_is_written_beside_the_others(tmp_path: Path) -> None:
    path = table_file(tmp_path, [row(ms={"2048": 1.0}), row(head_size=128)])
    tune.write_tile(path, ORIGIN, KEY, Tile(32, 64, 4, 2), {"ms": {"2048": 0.5}, "measured": "here"})
    table = load_table(path)
    assert table.rows == {KEY: Tile(32, 64, 4, 2), replace(KEY, head_size=128): Tile(128, 32, 8, 3, tma=True)}
    note = {"ms": {"2048": 0.5}, "measured": "here", "torch": "2.11.0", "triton": "3.6.0", "date": "2026-01-02"}
    assert table.notes[KEY] == note
    fresh = tmp_path / "new" / "table.json"
    tune.write_tile(fresh, ORIGIN, KEY, Tile(32, 64, 4, 2), {"ms": {}})
    assert load_table(fresh).gpu == "NVIDIA Test"
    other = table_file(tmp_path, [], gpu="NVIDIA Other")
    with pytest.raises(UserError, match="must be a table of NVIDIA Test, got NVIDIA Other"):
        tune.write_tile(other, ORIGIN, KEY, Tile(32, 64, 4, 2), {})
