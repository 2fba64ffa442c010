"""The report on learning rates and selected blocks: figures are those of made-up rows."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from nsa.config import NSAConfig
from tests.bench import rows as bench_rows
from tests.tools.evidence_rows import (
    BYTES,
    change_row,
    keep_panels,
    make_row,
    report,
    table,
    write_arm,
    write_group,
    write_inspected,
)
from tests.train.cases import PATTERN
from tools.evidence.experiments import DENSE, NSA, SMALL_DENSE
from tools.evidence.plots import Panel
from tools.evidence.rates import judged
from tools.evidence.selected import blocks_of_tiles, random_blocks_of_tiles, random_overlap


@pytest.fixture(autouse=True)
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Sequence[Panel]]:
    """Panels of each plot, which are not drawn: that takes a second for a page."""
    return keep_panels(monkeypatch)


def test_what_is_selected(tmp_path):
    write_arm(tmp_path / "8k/nsa", make_row(NSA, 1337), BYTES, 8.0)
    write_inspected(tmp_path / "8k/nsa")
    text = report(tmp_path, tmp_path / "out")
    # 65 to 70 keep the free block of the query before, 71 to 79 do not.
    figures = ["0", "0.250", "0.500", "0.750", "1,234", "87.6%", f"{6 / 15:.1%}"]
    line, at_random = table(text, "What is selected", "layer")[2:]
    assert line == [*figures, f"{(0 + 0 + 5) / 3:.1f}"]  # tiles of 32 queries
    of_tile = f"{random_blocks_of_tiles(PATTERN, 80):.1f}"
    overlaps = [f"{random_overlap(PATTERN, 80)[0]:.1%}", "50.0%"]
    assert at_random == ["random", "", "", "", "", *overlaps, of_tile]
    about = (
        "80 tokens; n = 4 blocks a query, 3 of them forced (75.0%); 32 queries a tile. "
        "From `8k/nsa/inspect-96"
    )
    assert about in text
    assert "one sequence, the beginning of the validation text" in text


def test_nothing_is_free_in_a_short_text(tmp_path):
    write_arm(tmp_path / "8k/nsa", make_row(NSA, 1337), BYTES, 8.0)
    write_inspected(tmp_path / "8k/nsa", 64)
    text = report(tmp_path, tmp_path / "out")
    head, _, *lines = table(text, "What is selected", "layer")
    assert head[-2:] == ["overlap", "blocks of a tile"]
    assert [line[-2] for line in lines] == ["87.6%", f"{random_overlap(PATTERN, 64)[0]:.1%}"]
    assert "nan" not in text


def test_what_was_inspected_without_its_config_is_left_out(tmp_path):
    write_arm(tmp_path / "8k/nsa", make_row(NSA, 1337), BYTES, 8.0)
    write_inspected(tmp_path / "8k/nsa")
    (tmp_path / "8k/nsa/config.yaml").unlink()
    text = report(tmp_path, tmp_path / "out")
    assert "Left out, broken: `8k/nsa/inspect-96.json`: the configuration must be" in text


@pytest.mark.parametrize(("local", "init"), [(2, 1), (1, 0), (3, 2)])
def test_overlap_of_a_random_selector(local, init):
    """Expected figures against drawn blocks."""
    changes = {"num_local_blocks": local, "num_init_blocks": init, "num_selected_blocks": 6}
    pattern: NSAConfig = dataclasses.replace(PATTERN, **changes)
    rng, sums, in_tiles = np.random.default_rng(0), np.zeros(4), 0
    for _ in range(60):
        before, of_tile = set[int](), set[int]()
        for query in range(160):
            of_tile = of_tile if query % 32 else set()
            in_tiles -= len(of_tile)
            own = query // 16
            forced = {*range(min(init, own + 1)), *range(max(own + 1 - local, 0), own + 1)}
            rest = sorted({*range(own + 1)} - forced)
            free = {*rng.choice(rest, min(6 - len(forced), len(rest)), replace=False)}
            if query:
                sums[:2] += len((forced | free) & before), len(forced | free)
            if query > 6 * 16:
                sums[2:] += len(free & before), len(free)
            before = forced | free
            of_tile |= before
            in_tiles += len(of_tile)
    expected = (sums[0] / sums[1], sums[2] / sums[3])
    assert random_overlap(pattern, 160) == pytest.approx(expected, abs=0.01)
    assert random_overlap(pattern, 96)[1] is None
    assert random_blocks_of_tiles(pattern, 160) == pytest.approx(in_tiles / 60 / 5, rel=0.01)


def test_blocks_of_a_tile_are_counted_once():
    """Against sets: two KV heads, queries without blocks, a last tile that is not full."""
    pattern = dataclasses.replace(PATTERN, num_heads=48, num_kv_heads=2)  # 2 queries a tile
    rng = np.random.default_rng(1)
    layer = np.sort(rng.integers(-1, 6, (7, 2, 4), dtype=np.int32))
    expected = [
        len({*layer[begin : begin + 2, head].flat} - {-1})
        for begin in range(0, 7, 2)
        for head in range(2)
    ]
    assert blocks_of_tiles([layer], pattern) == [sum(expected) / 8]


def test_recorded_selections_are_timed_beside_random_ones(tmp_path):
    write_arm(tmp_path / "quality/8k/nsa", make_row(NSA, 1337), BYTES, 8.0)
    assert "Time of the selected branch" not in report(tmp_path / "quality", tmp_path / "out")
    times = [
        *(("random", "fwd", 2.0), ("recorded", "fwd", 1.5), ("random", "fwd_bwd", 5.0)),
        *(("recorded", "fwd_bwd", 4.0), ("shared16", "fwd", 1.0)),
    ]
    rows = [
        bench_rows.make_row(case="attention.selected", choice=choice, mode=mode, ms_p50=ms)
        for choice, mode, ms in times
    ]
    wrong = {"choice": "recorded", "seq_len": 4096, **bench_rows.WRONG}
    rows += [bench_rows.make_row(seq_len=4096), bench_rows.make_row(**wrong)]
    bench_rows.write_rows(tmp_path / "results/h100-recorded.jsonl", rows)
    text = report(tmp_path / "quality", tmp_path / "out")
    found = table(text, "What is selected", "mode")[2:]
    assert found == [
        ["fwd", "2,048", "1.500", "2.000", "0.75"],
        ["fwd_bwd", "2,048", "4.000", "5.000", "0.80"],
    ]
    assert "From `h100-recorded.jsonl` of" in text


def write_sweep(rows: Path, *found: tuple[str, int, float, float]) -> None:
    lines = [
        {"model": model, "lr": lr, "val_bits_per_byte": bits, "val_windows": 512, "steps": 440}
        | {"tokens": 440 * 65_536, "seed": 1337, "gpu": "NVIDIA H200", "seq_len": seq_len}
        for model, seq_len, lr, bits in found
    ]
    rows.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (rows / "learning-rates.jsonl").write_text(text)


SWEPT = (
    *((DENSE, 2048, 1e-3, 2.0568), (DENSE, 2048, 5e-4, 2.0572), (DENSE, 2048, 2e-3, 2.5)),
    *((NSA, 2048, 1e-3, 2.0365), (NSA, 2048, 5e-4, 2.0089), (NSA, 2048, 2e-4, 2.5)),
)


def test_learning_rates_and_nothing_else(tmp_path):
    write_sweep(tmp_path, *SWEPT, (NSA, 8192, 5e-4, 1.9), (NSA, 8192, 1e-3, 1.8))
    text = report(tmp_path, tmp_path / "out")
    assert table(text, "Learning rates", "learning rate")[2:] == [
        ["0.0002", "2.5000", ""],
        ["0.0005", "**2.0089**", "2.0572"],
        ["0.001", "2.0365", "**2.0568**"],
        ["0.002", "", "2.5000"],
    ]
    longer = text.partition("\n8,192 tokens a sequence.")[2]
    assert "| 0.0005 | 1.9000 |\n| 0.001 | **1.8000** |" in longer
    assert text.count("\n## ") == 1


def test_learning_rates_of_runs_are_compared_with_the_sweep(tmp_path):
    write_group(tmp_path, "200m")
    write_sweep(tmp_path, *SWEPT)
    change_row(tmp_path / "200m/dense-1", lr=7e-4)
    text = report(tmp_path, tmp_path / "out")
    assert (
        f"Learning rates against the sweep of 440 steps of 65,536 tokens: 0.0005 of {NSA} is its "
        f"best; 0.0007 of {DENSE} was not swept and lies between 0.0005 and 0.001, its two best; "
        f"{SMALL_DENSE} was not swept; 0.0005 of {DENSE} is not its best, 0.001." in text
    )
    for folder in (tmp_path / "200m").iterdir():
        change_row(folder, tokens=100 * 8192)
    text = report(tmp_path, tmp_path / "out")
    assert "sweep of 440 steps of 65,536 tokens (here 100 of 8,192): 0.0005" in text
    # A shorter sweep with steps of the same size counts for more.
    for lr, bits in ((2e-4, 1.6), (4e-4, 1.5), (8e-4, 1.7)):
        row = make_row(NSA, 1337, lr=lr, steps=40, tokens=40 * 8192, val_bits_per_byte=bits)
        write_arm(tmp_path / f"rates/nsa-{lr}", row, BYTES, 8.0)
        (tmp_path / f"rates/nsa-{lr}/test.npz").unlink()
    text = report(tmp_path, tmp_path / "out")
    assert "sweep of 40 steps of 8,192 tokens: 0.0005 of nsa was not swept and lies between" in text
    assert f"its two best; 0.0005 of {DENSE}" not in text
    assert "| 0.0004 | **1.5000** |" in text
    assert "From `rates/`." in text
    write_sweep(tmp_path, (NSA, 8192, 5e-4, 1.9))
    shutil.rmtree(tmp_path / "rates")
    text = report(tmp_path, tmp_path / "out")
    assert "Learning rates were not swept at this length." in text


def test_a_sweep_of_one_optimizer_says_nothing_of_another(tmp_path):
    write_group(tmp_path, "2k")
    write_group(tmp_path, "muon")
    for lr, bits in ((0.005, 1.6), (0.01, 1.5), (0.02, 1.7)):
        row = make_row(NSA, 1337, lr=lr, steps=40, tokens=40 * 8192, val_bits_per_byte=bits)
        write_arm(tmp_path / f"muon_rates/nsa-{lr}", row, BYTES, 8.0)
    change_row(tmp_path / "muon/nsa-1", lr=0.01)
    text = report(tmp_path, tmp_path / "out")
    by_adamw, by_muon = (
        text.partition(f"\n## 200M tokens{name}, 2,048 a sequence\n")[2].partition("\n## ")[0]
        for name in ("", " by Muon")
    )
    assert "Learning rates were not swept at this length." in by_adamw
    assert "sweep of 40 steps of 8,192 tokens" in by_muon
    assert f"0.01 of {NSA} is its best" in by_muon
    assert table(text, "Learning rates of Muon", "learning rate")[3] == ["0.01", "**1.5000**"]
    assert "beside AdamW's 4e-4" in text
    shutil.rmtree(tmp_path / "muon_rates")
    assert "beside AdamW's 4e-4" not in report(tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("lr", "swept", "expected"),
    [
        (2.0, {1.0: 3, 2.0: 2, 4.0: 3}, "2 of x is its best"),
        (1.0, {1.0: 3, 2.0: 2, 4.0: 3}, "1 of x is not its best, 2"),
        (3.0, {1.0: 3, 2.0: 2, 4.0: 2.5}, "3 of x was not swept and lies between 2 and 4, its two"),
        (1.5, {1.0: 3, 2.0: 2, 4.0: 2.5}, "1.5 of x was not swept and lies between 1 and 2"),
        (8.0, {1.0: 3, 2.0: 2, 4.0: 3}, "8 of x was not swept and lies outside of what was"),
        (2.0, {1.0: 3, 2.0: 2}, "2 of x is not settled: its best, 2, is the largest rate tried"),
        (2.0, {2.0: 2, 4.0: 3}, "2 of x is not settled: its best, 2, is the smallest rate tried"),
        (2.0, {2.0: 2}, "2 of x is not settled: its best, 2, is the only rate tried"),
        (2.0, {}, "x was not swept"),
    ],
)
def test_verdicts_on_learning_rates(lr, swept, expected):
    found = judged("x", lr, swept)
    assert found.startswith(expected)
    assert found == expected or "two best" in found
