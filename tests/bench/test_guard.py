"""The guard holds ratios of new rows against those of committed ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nsa import cli
from nsa.bench.guard import guard
from nsa.bench.rows import Row, RowFile
from nsa.errors import UserError
from tests.bench.rows import make_row


def pair(ours_ms: float, dense_ms: float = 4.0, *, ours_mib: float = 90.0, **values: Any) -> list[Row]:
    """Attention of ours and dense attention in one run."""
    return [
        make_row(**values, provider="dense-cudnn", ms_p50=dense_ms, peak_mib=30.0),
        make_row(**values, ms_p50=ours_ms, peak_mib=ours_mib),
    ]


def training(ours_ms: float, dense_ms: float = 4.0, **values: Any) -> list[Row]:
    given = {"case": "train", "choice": "model", "mode": "fwd_bwd", **values}
    return [make_row(**given, provider=name, ms_p50=ms) for name, ms in (("dense", dense_ms), ("nsa", ours_ms))]


@pytest.mark.parametrize("made", [pair, training])
def test_ratios_and_not_times_are_compared(made: Any) -> None:
    lines, passed = guard(made(4.0, 8.0), made(2.0, 4.0), 0.05)  # a GPU of half the clock
    assert passed
    assert lines[-1] == "2 ratios compared, 0 worse by more than 5%, 0 without a baseline, 0 wrong rows"
    lines, passed = guard(made(2.11), made(2.0), 0.05)
    assert not passed
    assert [line.split()[-1] for line in lines[1:3]] == ["WORSE", "ok"]
    assert guard(made(2.11), made(2.0), 0.06)[1]
    assert guard(made(1.0), made(2.0), 0.0)[1]


def test_memory_is_guarded_too() -> None:
    lines, passed = guard(pair(2.0, ours_mib=100.0), pair(2.0), 0.05)
    assert not passed
    assert [line.split()[-1] for line in lines[1:3]] == ["ok", "WORSE"]


@pytest.mark.parametrize("field", ["gpu", "shape", "dtype"])
def test_only_the_same_kind_is_compared(field: str) -> None:
    other: dict[str, Any] = {field: "another"}
    with pytest.raises(UserError, match="have a ratio with a baseline"):
        guard(pair(2.0, **other), pair(2.0), 0.05)
    lines, passed = guard([*pair(2.0), *pair(9.0, seq_len=64, run_id="b")], pair(2.0), 0.05)
    assert passed
    assert "2 without a baseline" in lines[-1]


SETTINGS = {"micro_batch": 32, "compile": True, "cuda_graphs": True, "checkpointing": "none"}


OTHER = (
    {"micro_batch": 2},
    {"compile": False},
    {"cuda_graphs": False},
    {"checkpointing": "full"},
    {"document_mask": True},
)


@pytest.mark.parametrize("other", OTHER, ids=str)
def test_steps_of_other_settings_are_not_compared(other: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="have a ratio with a baseline"):
        guard(training(3.0, settings={**SETTINGS, **other}), training(2.0, settings=SETTINGS), 0.05)
    beside = {**SETTINGS, **other, "loss_chunk": 1024}
    newer = training(1.0, settings=beside, run_id="newer", date="2026-02-01T00:00:00+00:00")
    lines, passed = guard(
        training(2.0, settings={**SETTINGS, "telemetry": True}), [*training(2.0, settings=SETTINGS), *newer], 0.05
    )
    assert passed
    assert lines[-1].startswith("2 ratios compared, 0 worse")


def test_a_row_without_the_setting_is_one_without_document_masks() -> None:
    new = training(2.0, settings={**SETTINGS, "document_mask": False})
    assert guard(new, training(2.0, settings=SETTINGS), 0.05)[1]


def test_dense_models_are_no_ratio_of_ours() -> None:
    unmasked = training(2.0)[1:]
    rows = [*training(2.0), *(replace(row, provider="dense-unmasked") for row in unmasked)]
    lines, _ = guard(rows, training(2.0), 0.05)
    assert lines[-1].startswith("2 ratios compared, 0 worse by more than 5%, 0 without a baseline")


def test_the_newest_baseline_counts() -> None:
    newer = pair(4.0, run_id="newer", date="2026-02-01T00:00:00+00:00")
    assert guard(pair(4.0), [*newer, *pair(2.0)], 0.05)[1]
    assert not guard(pair(4.0), pair(2.0), 0.05)[1]


def test_without_dense_attention_in_the_run_there_is_no_ratio() -> None:
    with pytest.raises(UserError, match="have a ratio with a baseline"):
        guard(pair(2.0)[1:], pair(2.0), 0.05)


def test_a_ratio_to_a_twin_that_is_too_slow_is_none() -> None:
    h200 = {"gpu": "NVIDIA H200"}
    slow = training(2.0, 4.0, **h200, tokens_per_s=600e3)
    with pytest.raises(UserError, match="have a ratio with a baseline"):
        guard(slow, training(2.0, 4.0, **h200, tokens_per_s=700e3), 0.05)


def test_a_wrong_row_fails() -> None:
    red = make_row(correct=False, ms_p50=None, ms_p20=None, ms_p80=None, note="dq is wrong")
    lines, passed = guard([*pair(2.0), red], pair(2.0), 0.05)
    assert not passed
    assert "wrong: attention nsa fwd S 2,048: dq is wrong" in lines


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results").mkdir()
    paths = [tmp_path / "results" / "old.jsonl", tmp_path / "results" / "new.jsonl"]
    for path, ms in zip(paths, (2.0, 3.0), strict=True):
        file = RowFile(path)
        for row in pair(ms):
            file.add(row)
    (tmp_path / "results" / "of-another-kind.jsonl").write_text('{"processes": 2}\n', encoding="utf-8")
    words = ["bench", "guard", str(paths[1]), "--baseline", str(tmp_path / "results")]  # the new rows lie there too
    assert cli.main(words) == 1
    assert "+50.0%" in capsys.readouterr().out
    assert cli.main([*words, "--tolerance", "0.6"]) == 0
    assert cli.main(["bench", "guard", str(paths[1]), "--baseline", str(tmp_path / "gone")]) == 2
    assert "--baseline must be a file or folder of rows that exists" in capsys.readouterr().err
