"""Tuning tables: read, refused, replaced by others; and the walk that makes them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.bench import tune
from nsa.errors import UserError
from nsa.ops._triton import tuning
from nsa.ops._triton.tuning import (
    TABLES,
    Tile,
    TileKey,
    default_tile,
    load_table,
    table_name,
    table_text,
    tile_for,
    tiles_chosen_by,
)
from nsa.train.telemetry.progress import RunReport

KEY = TileKey("window_attention_fwd", 64, 2)
DATE = "2026-01-02T03:04:05+00:00"
ORIGIN = {"gpu": "NVIDIA Test", "torch": "2.11.0", "triton": "3.6.0", "date": DATE}


def table_file(folder: Path, rows: list[Any], gpu: str = "NVIDIA Test") -> Path:
    path = folder / f"{table_name(gpu)}.json"
    path.write_text(json.dumps({"gpu": gpu, "rows": rows}))
    return path


def row(head_size: int = 64, rows: int = 128, **changes: Any) -> dict[str, Any]:
    tile = {"rows": rows, "keys": 32, "warps": 8, "stages": 3, "tma": True, **changes}
    return {"kernel": KEY.kernel, "head_size": head_size, "element_size": 2, "tile": tile}


@pytest.fixture
def device(tmp_path, monkeypatch):
    """Makes CUDA device 0 a GPU of this name and capability, with tables in ``tmp_path``."""

    def pretend(name, capability):
        monkeypatch.setattr(tuning, "TABLES", tmp_path)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        tuning.device_table.cache_clear()
        tuning._tile.cache_clear()

    yield pretend
    tuning.device_table.cache_clear()
    tuning._tile.cache_clear()


@pytest.mark.parametrize("path", sorted(TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_committed_tables_load_and_are_written_as_the_tool_writes_them(path):
    table = load_table(path)
    assert table_name(table.gpu) == path.stem
    assert table_text(table) == path.read_text()
    needed = ("ms", "measured", "torch", "triton")
    assert all(note[name] for note in table.notes.values() for name in needed)


def test_a_gpu_takes_its_own_table(device, tmp_path):
    path = table_file(tmp_path, [row()])
    device("NVIDIA Test", (8, 6))
    assert tuning._tile(KEY, 0) == Tile(128, 32, 8, 3, tma=True)
    path.unlink()  # it is read once
    assert tuning._tile(replace(KEY, head_size=16), 0).rows == 128  # a smaller head fits too
    for change in ({"head_size": 128}, {"element_size": 4}, {"kernel": "other"}):
        other = replace(KEY, **change)
        assert tuning._tile(other, 0) == default_tile(other, (8, 6))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ([], "be JSON"),
        ({"gpu": "x"}, "got 'rows'"),
        ([{"kernel": "a", "head_size": 64, "tile": {}}], "got 'element_size'"),
        ([row(), row()], "row 2 must name a kernel and sizes of its own"),
        ([{**row(), "tile": {"rows": 1, "keys": 1, "warps": 1}}], "row 1 must be JSON"),
        ([row(wraps=4)], "unexpected keyword argument 'wraps'"),
        ([row(stages="3")], "positive whole numbers"),
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
    ("gpu", "capability", "own", "said"),
    [
        ("NVIDIA Old", (8, 6), False, "for NVIDIA Old: defaults of compute capability 8.6;"),
        ("NVIDIA H100 80GB HBM3", (9, 0), True, "for NVIDIA H100 80GB HBM3: that of NVIDIA H200;"),
        ("NVIDIA H200", (9, 0), True, None),
    ],
)
def test_a_missing_table_is_a_line_of_the_log(
    device,
    tmp_path,
    gpu,
    capability,
    own,
    said,
):
    """Once a process, where a run looks for a tile the first time."""
    table_file(tmp_path, [row()], "NVIDIA H200")
    device(gpu, capability)
    with RunReport(tmp_path / "log.txt", 1):
        tiles = [tuning._tile(replace(KEY, head_size=size), 0) for size in (64, 128)]
    assert (tiles[0] == Tile(128, 32, 8, 3, tma=True)) == own
    assert (tiles[0] == default_tile(KEY, capability)) == (not own)
    log = tmp_path / "log.txt"
    text = log.read_text() if log.exists() else ""
    assert text.count("tuning table") == (said is not None)
    assert said is None or f"no tuning table {said} `nsa bench tune` makes one\n" in text


def test_tile_for_looks_up_by_head_and_element_size():
    seen: list[TileKey] = []

    def choose(key, tile):
        seen.append(key)
        return tile._replace(rows=7)

    q, v = (torch.zeros(1, 1, size, dtype=torch.bfloat16) for size in (192, 128))
    usual = tile_for("window_attention_dq", q, v)
    with tiles_chosen_by(choose):
        assert tile_for("window_attention_dq", q, v) == usual._replace(rows=7)
        tile_for("select_blocks", q[..., :8].float(), v[..., :8].float())
    assert seen == [TileKey("window_attention_dq", 192, 2), TileKey("select_blocks", 8, 4)]
    assert tile_for("window_attention_dq", q, v) == usual


# --- Making tables
START = Tile(64, 64, 4, 2)


class Walk:
    """Coordinate descent for one kernel, with times made by the test."""

    def __init__(self, times: Callable[[Tile], float | None] = lambda tile: 1.0) -> None:
        self.times, self.measured = times, list[Tile]()

    def measure(self, tile: Tile) -> tune.Times | None:
        self.measured.append(tile)
        ms = self.times(tile)
        return None if ms is None else {2048: ms, 65_536: 10 * ms}

    def best(self, kernel: str = KEY.kernel, start: Tile = START) -> Tile:
        groups = tune.changes(TileKey(kernel, 64, 2))
        tile, times = tune.descend(start, groups, self.measure)
        assert times == self.measure(tile)
        return tile


@pytest.mark.parametrize(
    ("kernel", "fields"),
    [
        ("window_attention_fwd", {"tma"}),
        ("compressed_attention_dkv_long", {"tma", "keys_as_rows", "edge_stages"}),
        ("selected_gather_dkv", {"keys_as_rows"}),
        ("select_blocks", {"keep_queries"}),
        ("select_token_max", {"keep_queries"}),
    ],
)
def test_only_options_that_a_kernel_has_are_tried(kernel: str, fields: set[str]) -> None:
    walk, start = Walk(), START._replace(edge_stages=2)
    assert walk.best(kernel, start) == start
    options = [tile._asdict().items() for tile in walk.measured]
    differ = {name for each in options for name, value in each if value != getattr(start, name)}
    assert differ == {"rows", "keys", "warps", "stages", "max_registers"} | fields
    assert len(set(walk.measured)) == len(walk.measured) - 1 > 10  # each once, and START at the end


def test_the_walk_finds_the_best_tile_that_fits_and_ignores_noise():
    best = Tile(128, 32, 8, 4, tma=True)

    def times(tile):
        if tile.rows * tile.keys > 128 * 64:
            return None
        sizes = ("rows", "keys", "warps")
        distance = sum(abs(math.log2(getattr(tile, n) / getattr(best, n))) for n in sizes)
        distance += abs(tile.stages - best.stages) + (tile.tma != best.tma)
        return 1 + 0.1 * distance - 0.001 * (tile.max_registers is not None)

    assert Walk(times).best() == best


def test_a_gain_that_does_not_repeat_is_not_taken():
    walk = Walk(lambda tile: 0.5 if tile != START and walk.measured.count(tile) == 1 else 1.0)
    assert walk.best() == START


def test_a_tile_is_written_and_the_others_are_kept(tmp_path):
    path = table_file(tmp_path, [{**row(), "ms": {"2048": 1.0}}, row(head_size=128)])
    tile, kept = Tile(32, 64, 4, 2), Tile(128, 32, 8, 3, tma=True)
    tune.write_tile(path, ORIGIN, KEY, tile, {"ms": {"2048": 0.5}, "measured": "here"})
    table = load_table(path)
    assert table.rows == {KEY: tile, replace(KEY, head_size=128): kept}
    versions = {"torch": "2.11.0", "triton": "3.6.0", "date": "2026-01-02"}
    assert table.notes[KEY] == {"ms": {"2048": 0.5}, "measured": "here", **versions}
    fresh = tmp_path / "new" / "table.json"
    tune.write_tile(fresh, ORIGIN, KEY, tile, {"ms": {}})
    assert load_table(fresh).gpu == "NVIDIA Test"
    other = table_file(tmp_path, [], gpu="NVIDIA Other")
    with pytest.raises(UserError, match="must be a table of NVIDIA Test, got NVIDIA Other"):
        tune.write_tile(other, ORIGIN, KEY, tile, {})
