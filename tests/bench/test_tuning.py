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
DATE = "2026-01-02T03:04:05+00:00"
ORIGIN = Origin("run", "cuda", "NVIDIA Test", "1", "2.11.0", "3.6.0", "abc", False, DATE)


def table_file(folder: Path, rows: list[Any], gpu: str = "NVIDIA Test") -> Path:
    path = folder / f"{table_name(gpu)}.json"
    path.write_text(json.dumps({"gpu": gpu, "rows": rows}))
    return path


def row(head_size: int = 64, rows: int = 128, **more: Any) -> dict[str, Any]:
    tile = {"rows": rows, "keys": 32, "warps": 8, "stages": 3, "tma": True}
    return {"kernel": KEY.kernel, "head_size": head_size, "element_size": 2, "tile": tile, **more}


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes CUDA device 0 a GPU of this name and capability, with tables in ``tmp_path``."""

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
    needed = ("ms", "measured", "torch", "triton")
    assert all(note[name] for note in table.notes.values() for name in needed)
    assert all(key.head_size % 8 == 0 and key.element_size in (2, 4) for key in table.rows)


def test_a_gpu_takes_its_own_table(device: Callable[..., None], tmp_path: Path) -> None:
    table_file(tmp_path, [row()])
    device("NVIDIA Test", (8, 6))
    assert tuning._tile(KEY, 0) == Tile(128, 32, 8, 3, tma=True)
    assert tuning._tile(TileKey(KEY.kernel, 16, 2), 0).rows == 128  # a smaller head fits too
    larger = TileKey(KEY.kernel, 128, 2)
    assert tuning._tile(larger, 0) == default_tile(larger, (8, 6))
    assert tuning._tile(replace(KEY, element_size=4), 0) == default_tile(
        replace(KEY, element_size=4),
        (8, 6),
    )
    assert tuning._tile(replace(KEY, kernel="other"), 0) == default_tile(
        replace(KEY, kernel="other"),
        (8, 6),
    )


def test_a_gpu_without_one_takes_its_relatives_or_the_defaults(
    device: Callable[..., None],
    tmp_path: Path,
) -> None:
    table_file(tmp_path, [row()], gpu="NVIDIA H200")
    device("NVIDIA H100 80GB HBM3", (9, 0))
    assert tuning._tile(KEY, 0).rows == 128
    device("NVIDIA A100-SXM4-40GB", (8, 0))
    assert tuning._tile(KEY, 0) == default_tile(KEY, (8, 0))


def test_a_table_is_read_once(
    device: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = table_file(tmp_path, [row()])
    device("NVIDIA Test", (8, 6))
    first = tuning._tile(KEY, 0)
    path.unlink()
    assert tuning._tile(KEY, 0) == first
    assert tuning._tile(replace(KEY, head_size=32), 0) == first


def with_tile(**changes: Any) -> dict[str, Any]:
    return {**row(), "tile": {**row()["tile"], **changes}}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ([], 'hold "gpu" and "rows"'),
        ({"gpu": "x"}, 'hold "gpu" and "rows"'),
        ([3], "row 1 must be an object"),
        ([{"kernel": "a", "head_size": 64, "tile": {}}], "row 1 must have element_size"),
        ([row(), row()], "row 2 must name a kernel and sizes of its own"),
        ([{**row(), "tile": {"rows": 1, "keys": 1, "warps": 1}}], "the tile of row 1"),
        ([with_tile(wraps=4)], "no other fields"),
        ([with_tile(stages="3")], "whole numbers"),
        ([with_tile(stages=2.5)], "whole numbers"),
        ([row(rows=0)], "positive sizes"),
        ([row(head_size=-1)], "positive sizes"),
        (None, "be JSON"),
    ],
)
def test_a_malformed_table_is_refused_and_named(tmp_path: Path, content: Any, why: str) -> None:
    path = tmp_path / "nvidia-test.json"
    table = {"gpu": "x", "rows": content} if isinstance(content, list) and content else content
    path.write_text("{" if content is None else json.dumps(table))
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


def test_tile_for_looks_up_by_head_and_element_size() -> None:
    seen: list[TileKey] = []

    def choose(key: TileKey, tile: Tile) -> Tile:
        seen.append(key)
        return tile._replace(rows=7)

    q, v = (
        torch.zeros(1, 1, 192, dtype=torch.bfloat16),
        torch.zeros(1, 1, 128, dtype=torch.bfloat16),
    )
    usual = tile_for("window_attention_dq", q, v)
    with tiles_chosen_by(choose):
        assert tile_for("window_attention_dq", q, v) == usual._replace(rows=7)
        tile_for("select_blocks", q[..., :8].float(), v[..., :8].float())
    assert seen == [TileKey("window_attention_dq", 192, 2), TileKey("select_blocks", 8, 4)]
    assert tile_for("window_attention_dq", q, v) == usual


# ----------------------------------------------------------------------------------- making tables

START = Tile(64, 64, 4, 2)


def cost(best: Tile) -> tune.Measure:
    """Times that are least at ``best``; tiles of 128 rows by 128 keys do not fit."""

    def measure(tile: Tile) -> Mapping[int, float] | None:
        if tile.rows * tile.keys > 128 * 64:
            return None
        sizes = ("rows", "keys", "warps")
        distance = sum(abs(math.log2(getattr(tile, n) / getattr(best, n))) for n in sizes)
        distance += abs(tile.stages - best.stages) + (tile.tma != best.tma)
        distance += 0.01 * (tile.edge_stages != best.edge_stages)  # below what counts as faster
        return {2048: 1 + 0.1 * distance, 65_536: 10 + distance}

    return measure


class Walk:
    """Measures nothing and remembers what it was asked."""

    def __init__(self, times: Callable[[Tile], float] = lambda tile: 1.0) -> None:
        self.times, self.told, self.measured = times, list[Tile](), list[Tile]()

    def measure(self, tile: Tile) -> Mapping[int, float]:
        self.measured.append(tile)
        return {2048: self.times(tile)}

    def tell(self, tiles: Sequence[Tile]) -> bool:
        self.told.extend(tiles)
        return False


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
    walk, start = Walk(), START._replace(edge_stages=2)
    tune.descend(TileKey(kernel, 64, 2), start, walk.measure)
    options = [tile._asdict().items() for tile in walk.measured]
    differ = {name for each in options for name, value in each if value != getattr(start, name)}
    assert differ == {"rows", "keys", "warps", "stages", "max_registers"} | fields


def test_the_walk_finds_the_best_tile_and_ignores_noise() -> None:
    best = Tile(128, 32, 8, 4, tma=True, edge_stages=3)
    found, times = tune.descend(KEY, START, cost(best))
    assert found == best._replace(edge_stages=1)
    assert times == cost(best)(found)


def test_a_gain_that_does_not_repeat_is_not_taken() -> None:
    walk = Walk(lambda tile: 0.5 if tile != START and walk.measured.count(tile) == 1 else 1.0)
    assert tune.descend(KEY, START, walk.measure)[0] == START


def test_the_walk_says_what_comes_next_and_repeats_nothing() -> None:
    walk = Walk()
    tune.descend(KEY, START, walk.measure, make_ready=walk.tell)
    assert walk.measured == [START, *walk.told]
    assert len(walk.told) == len(set(walk.told)) > 15
    assert START not in walk.told


def test_the_walk_stops_when_time_is_up() -> None:
    """But what has been compiled is measured: compiling took the time that there was."""
    assert tune.descend(KEY, START, cost(Tile(128, 32, 8, 3)), lambda: False)[0] == START
    walk, best = Walk(), Tile(64, 32, 4, 2)

    def compiled(tiles: Sequence[Tile]) -> bool:
        walk.tell(tiles)
        return bool(tiles)

    found, _ = tune.descend(KEY, START, cost(best), lambda: not walk.told, compiled)
    assert found == best


@pytest.mark.parametrize(
    ("kernel", "head_size", "sizes", "fits"),
    [
        ("fwd", 192, (64, 64, 4), True),  # 160 registers of a thread
        ("fwd", 192, (128, 64, 4), False),
        ("fwd", 192, (128, 64, 8), True),
        ("dkv", 128, (64, 128, 4), False),
        ("dkv", 128, (64, 64, 4), True),
        ("dq", 128, (128, 64, 4), False),
    ],
)
def test_tiles_whose_sums_fill_the_registers_are_not_tried(
    kernel: str, head_size: int, sizes: tuple[int, int, int], fits: bool
) -> None:
    key = TileKey(f"window_attention_{kernel}", head_size, 2)
    assert tune.fits_registers(key, *sizes) == fits


def test_kernels_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    ends = []
    for end, spent in zip(tune.shares(160.0, 4), (15.0, 5.0, 60.0, 0.0), strict=True):
        ends.append(end)
        now[0] += spent
    # What the second leaves goes to the others; the third takes the fourth's.
    assert ends == [115.0, 130.0, 140.0, 180.0]
    assert list(tune.shares(math.inf, 2)) == [math.inf] * 2


def test_tiles_that_need_too_much_stack_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = {"a": 8, "b": 300}  # of the tile in use, compiled before it is measured
    monkeypatch.setattr(tune, "compiled_kernels", lambda: dict(loaded))
    monkeypatch.setattr(tune, "time_call", lambda *_: clock.Timing(1.0, 1.0, 1.0, 1, 1, ""))
    start, other, large, at_limit, same = (Tile(rows, 64, 4, 2) for rows in (16, 32, 64, 128, 256))
    makes = {other: {"c": 0}, large: {"d": 300, "e": 0}, at_limit: {"f": 256}}
    q = torch.zeros(1, 1, 64, dtype=torch.bfloat16)

    class Work:
        def run(self, mode: str) -> None:
            loaded.update(makes.get(tile_for(KEY.kernel, q, q), {}))

    bench = object.__new__(tune.Bench)
    bench.__dict__.update(works={2048: Work()}, device=torch.device("cpu"), stack_bytes={})
    measure = bench.measure(tune.Task(KEY, "fwd", start, (2048,)))
    for tile in (start, other, at_limit, same, other):
        assert measure(tile) == {2048: 1.0}
    assert measure(large) is None
    assert measure(large) is None  # a second time nothing is compiled
    stacks = {tile: stack for (_, tile), stack in bench.stack_bytes.items()}
    assert stacks == {start: 0, other: 0, at_limit: 256, same: 0, large: 300}


def test_a_tile_is_written_beside_the_others(tmp_path: Path) -> None:
    path = table_file(tmp_path, [row(ms={"2048": 1.0}), row(head_size=128)])
    tile = Tile(32, 64, 4, 2)
    tune.write_tile(path, ORIGIN, KEY, tile, {"ms": {"2048": 0.5}, "measured": "here"})
    table = load_table(path)
    beside = Tile(128, 32, 8, 3, tma=True)
    assert table.rows == {KEY: tile, replace(KEY, head_size=128): beside}
    versions = {"torch": "2.11.0", "triton": "3.6.0", "date": "2026-01-02"}
    assert table.notes[KEY] == {"ms": {"2048": 0.5}, "measured": "here", **versions}
    fresh = tmp_path / "new" / "table.json"
    tune.write_tile(fresh, ORIGIN, KEY, tile, {"ms": {}})
    assert load_table(fresh).gpu == "NVIDIA Test"
    other = table_file(tmp_path, [], gpu="NVIDIA Other")
    with pytest.raises(UserError, match="must be a table of NVIDIA Test, got NVIDIA Other"):
        tune.write_tile(other, ORIGIN, KEY, tile, {})
