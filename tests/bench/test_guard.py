"""The guard compares ratios of new rows with those of committed ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nsa import cli
from nsa.bench.guard import guard
from nsa.bench.rows import Row
from nsa.errors import UserError
from tests.bench.rows import H200, WRONG, make_row, training, write_rows

SETTINGS = {"micro_batch": 32, "compile": True, "cuda_graphs": True, "checkpointing": "none"}
LATER: dict[str, Any] = {"run_id": "newer", "date": "2026-02-01T00:00:00+00:00"}


def pair(ms: float, dense_ms: float = 4.0, *, mib: float = 90.0, **values: Any) -> list[Row]:
    """This library's attention and dense attention in one run."""
    dense = make_row(**values, provider="dense-cudnn", ms_p50=dense_ms, peak_mib=30.0)
    return [dense, make_row(**values, ms_p50=ms, peak_mib=mib)]


def steps(ms: float, dense_ms: float = 4.0, **values: Any) -> list[Row]:
    return [training("dense", dense_ms, **values), training("nsa", ms, **values)]


def refused(rows: list[Row], baseline: list[Row]) -> bool:
    with pytest.raises(UserError, match="have a ratio with a baseline"):
        guard(rows, baseline, 0.05)
    return True


@pytest.mark.parametrize("made", [pair, steps])
def test_ratios_and_not_times_are_compared(made: Callable[..., list[Row]]) -> None:
    lines, passed = guard(made(4.0, 8.0), made(2.0, 4.0), 0.05)  # a GPU of half the clock
    assert passed
    said = "2 ratios compared, 0 worse by more than 5%, 0 without a baseline, 0 wrong rows"
    assert lines[-1] == said
    lines, passed = guard(made(2.11), made(2.0), 0.05)
    assert not passed
    assert [line.split()[-1] for line in lines[1:3]] == ["WORSE", "ok"]
    assert guard(made(2.11), made(2.0), 0.06)[1]


def test_memory_is_guarded_too() -> None:
    lines, passed = guard(pair(2.0, mib=100.0), pair(2.0), 0.05)
    assert not passed
    assert [line.split()[-1] for line in lines[1:3]] == ["ok", "WORSE"]


@pytest.mark.parametrize(
    "other",
    [
        {"micro_batch": 2},
        {"compile": False},
        {"cuda_graphs": False},
        {"checkpointing": "full"},
        {"document_mask": True},
        {"gpu": "another"},
    ],
    ids=str,
)
def test_only_the_same_kind_is_compared(other: dict[str, Any]) -> None:
    of_row: dict[str, Any] = {"gpu": other["gpu"]} if "gpu" in other else {}
    settings = {**SETTINGS, **other}
    known = steps(2.0, settings={**SETTINGS, "document_mask": False})
    assert refused(steps(3.0, settings=settings, **of_row), known)
    faster = steps(1.0, settings={**settings, "loss_chunk": 1024}, **LATER, **of_row)
    new = steps(2.0, settings={**SETTINGS, "telemetry": True})
    lines, passed = guard(new, [*known, *faster], 0.05)
    assert passed
    assert lines[-1].startswith("2 ratios compared, 0 worse")


def test_dense_models_are_no_ratio_of_this_library() -> None:
    unmasked = replace(steps(2.0)[1], provider="dense-unmasked")
    lines, _ = guard([*steps(2.0), unmasked], steps(2.0), 0.05)
    assert lines[-1].startswith("2 ratios compared, 0 worse by more than 5%, 0 without a baseline")


def test_the_newest_baseline_counts() -> None:
    assert guard(pair(4.0), [*pair(4.0, **LATER), *pair(2.0)], 0.05)[1]


def test_without_a_sound_denominator_there_is_no_ratio() -> None:
    assert refused(pair(2.0)[1:], pair(2.0))
    slow = steps(2.0, 4.0, **H200, tokens_per_s=600e3)  # misses its target
    assert refused(slow, steps(2.0, 4.0, **H200, tokens_per_s=700e3))


def test_a_wrong_row_fails() -> None:
    lines, passed = guard([*pair(2.0), make_row(**WRONG)], pair(2.0), 0.05)
    assert not passed
    assert "wrong: attention, nsa, seed, random, S 2,048, fwd: dq is wrong" in lines


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "results"
    write_rows(folder / "old.jsonl", pair(2.0))
    new = str(write_rows(folder / "new.jsonl", pair(3.0)))
    (folder / "of-another-kind.jsonl").write_text('{"processes": 2}\n', encoding="utf-8")
    words = ["bench", "guard", new, "--baseline", str(folder)]  # the new rows lie there, too
    assert cli.main(words) == 1
    assert "+50.0%" in capsys.readouterr().out
    assert cli.main([*words, "--tolerance", "0.6"]) == 0
    assert cli.main([*words[:-1], str(tmp_path / "gone")]) == 2
    rule = "--baseline must be a file or folder of rows that exists"
    assert rule in capsys.readouterr().err
