"""Rows, targets, tables, the report and the guard."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa import cli
from nsa.bench.report import Results, guard, of_one_batch, scaling, series, write_report
from nsa.bench.rows import (
    Row,
    index_rows,
    newest_rows,
    of_one_gpu,
    origin,
    outcomes,
    read_rows,
    targets,
)
from nsa.errors import UserError
from nsa.train import environment
from tests.bench.rows import H200, SOUND, WRONG, make_row, training, write_rows

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
LATER: dict[str, Any] = {"run_id": "newer", "date": "2026-02-01T00:00:00+00:00"}


# --- Rows
def test_every_field_is_explained():
    page = (ROOT / "docs/benchmarks.md").read_text()
    assert not [field.name for field in fields(Row) if f"`{field.name}`" not in page]


def test_committed_rows_are_read():
    folders = ("results", "memory", "consumers", "switches")
    files = [file for name in folders for file in (ROOT / "benchmarks" / name).glob("*.jsonl")]
    assert len(read_rows(files)) > 300
    old = read_rows([ROOT / "benchmarks/results/h200-train.jsonl"])
    assert {(row.changed is None, row.is_masked) for row in old} == {(True, False)}


@pytest.mark.parametrize("correct", [False, None])
def test_no_time_without_a_correct_result(correct):
    with pytest.raises(AssertionError, match="without a correct result"):
        make_row(correct=correct, note="wrong")
    with pytest.raises(AssertionError, match="says why"):
        make_row(**{**WRONG, "correct": correct, "note": None})


def test_rows_survive_the_file(tmp_path, capsys):
    path, made = tmp_path / "new" / "rows.jsonl", list[Row]()
    given = {name: SOUND[name] for name in SOUND if name not in origin(CPU)}
    for changes in ({"ms_p50": 1.23456789}, {**WRONG, "variant": {"lr": 1.23456789}}):
        results = Results(path, CPU)  # the second appends
        results.add(**{**given, **changes})
        assert results.finish() == int("correct" in changes)
        made += results.rows
    assert read_rows([path]) == made
    assert (made[0].ms_p50, made[1].variant) == (1.23457, {"lr": 1.23456789})
    assert capsys.readouterr().out.startswith(f"run {made[0].run_id} on cpu, commit ")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "Expecting property name"),
        (json.dumps({**SOUND, "speed": 1}), "unexpected keyword argument 'speed'"),
        (json.dumps({**SOUND, "correct": False}), "a time without a correct result"),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path, line, why):
    path = write_rows(tmp_path / "rows.jsonl", [make_row()])
    path.write_text(path.read_text() + "\n" + line + "\n")
    with pytest.raises(UserError, match=r"rows\.jsonl:3: the line must be a row") as caught:
        read_rows([path])
    assert why in str(caught.value)


def test_the_commit_is_git_s_or_the_given_one(monkeypatch):
    code: dict[str, Any] = {"commit": None, "dirty": None, "note": "no git"}
    monkeypatch.setattr(environment, "code_version", lambda: code)
    assert origin(CPU, "abc")["commit"] == "abc"
    code.update(commit="def", dirty=True)
    here = origin(CPU, "abc")
    assert (here["commit"], here["dirty"], here["device"], here["gpu"]) == (
        "def",
        True,
        "cpu",
        None,
    )
    assert here["run_id"] != origin(CPU)["run_id"]


# --- Targets
def said(row: Row, *others: Row) -> list[str]:
    return [text for text, _ in outcomes(row, index_rows([*others, row]))]


WHOLE = {"seq_len": 65_536, "mode": "fwd_bwd", "batch": 1, **H200}
DENSE = make_row(**WHOLE, provider="dense-cudnn", ms_p50=50.0)
OURS = make_row(**WHOLE, ms_p50=10.0)
SELECTED = {"case": "attention.selected", "seq_len": 8192, **H200}
TRAINED = [
    training("dense", 65_536 / 700, **H200, peak_mib=1000.0),
    training("nsa", 65_536 / 500, **H200, peak_mib=1600.0),
]
STEP = {"case": "decode.attention", "shape": "wide", "seq_len": 65_536, "mode": "step", **H200}
FAST = make_row(**STEP, provider="dense-scan", ms_p50=7.0)
LAYER = {"case": "host.module", "dtype": "bfloat16", "batch": 1, **H200}
TWO = {"batch": 128, "tokens_per_s": 1.86e6, "num_gpus": 2, **H200}


@pytest.mark.parametrize(
    ("rows", "shown"),
    [
        (
            [make_row(case="attention.window", **H200, ms_p50=0.3)],
            ["0.3: target 0.36 pass"],
        ),
        ([OURS, DENSE], ["0.2 of dense-cudnn: target 0.21 pass"]),
        ([OURS, replace(DENSE, run_id="another")], []),
        (
            [make_row(**SELECTED, choice="shared16", ms_p50=1.5), make_row(**SELECTED, ms_p50=2.0)],
            ["0.75 of random: target 0.8 pass"],
        ),
        (
            TRAINED[::-1],
            [
                "500,000 tokens/s: target 430,000 pass",
                "1.6 MiB of dense: target 1.5 FAIL",
            ],
        ),
        # targets are of whole sequences
        ([replace(row, settings={"document_mask": True}) for row in TRAINED[::-1]], []),
        (
            [make_row(**STEP, ms_p50=1.0), FAST, replace(FAST, provider="dense-fa2", ms_p50=9.0)],
            ["7 times dense: target 6.5 pass"],
        ),
        (
            [make_row(**LAYER, ms_p50=2.2, launches=25), make_row(**LAYER, provider="llama")],
            [
                "2.2 of llama: target 3 pass",
                "25 launches: target 30 pass",
            ],
        ),
        (
            [
                training("nsa", 1.0, **TWO),
                training("nsa", 1.0, **{**TWO, "num_gpus": 1}, run_id="a"),
            ],
            ["1 of one: target 1.85 FAIL"],
        ),
    ],
)
def test_targets(rows, shown):
    assert said(*rows) == shown


@pytest.mark.parametrize("other", [{"cuda_graphs": True}, {"compile": True}, {"parameters": 2}])
def test_a_speed_is_divided_by_that_of_the_same_step_on_one_gpu(other):
    settings = {"parameters": 1, "compile": False, "cuda_graphs": False, "checkpointing": "none"}
    two = training("buckets", 1.0, **TWO, settings={**settings, "bucket_mib": 10})
    one = training("nsa", 1.0, **{**TWO, "num_gpus": 1, "tokens_per_s": 1e6}, settings=settings)
    one = replace(one, run_id="another")
    different = replace(one, settings={**settings, **other}, tokens_per_s=1.2e6)
    assert of_one_gpu(two, index_rows([one, different])) == pytest.approx(1.86)
    assert of_one_gpu(two, index_rows([different])) is None
    assert of_one_gpu(two, index_rows([replace(one, commit="b")])) is None


def test_the_file_of_targets_is_sound():
    keys = [(target["unit"], *target["where"].items()) for target in targets()["targets"]]
    assert len(keys) == len(set(keys))


# --- The report


def test_report(tmp_path, capsys):
    window = make_row(case="attention.window", **H200, ms_p50=0.5)
    selection = {"case": "attention.choice", "seq_len": 4096, **H200}
    masked: dict[str, Any] = {"settings": {"document_mask": True}, "changed": {"micro_batch": 32}}
    variant: dict[str, Any] = {"variant": {"coarse_block_size": 256}, "recall": 0.73}
    rows = [
        *(DENSE, OURS, window, replace(window, mode="fwd_bwd", **WRONG)),  # type: ignore[arg-type]
        make_row(**selection, recall=1.0),
        make_row(**selection, provider="coarse", ms_p50=2.0, **variant),
        training("nsa", 160.0, **H200, **masked, loss_nats=2.5),
    ]
    parts = (rows[:3], rows[3:])
    files = [str(write_rows(tmp_path / f"{i}.jsonl", part)) for i, part in enumerate(parts)]
    out = tmp_path / "new" / "out"
    assert cli.main(["bench", "report", *files, "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out / 'report.md'}\n"
    text = (out / "report.md").read_text()
    assert text == Path(__file__).with_name("report.txt").read_text()
    plots = list(out.glob("*.png"))
    assert len(plots) == 4
    assert all(f"]({file.name})" in text for file in plots)
    assert all(file.read_bytes()[:4] == b"\x89PNG" for file in plots)


def test_a_plot_over_length_shows_one_batch_in_order_of_length():
    points = ((65_536, 1), (2048, 32), (2048, 4))
    made = [make_row(seq_len=seq_len, batch=batch, ms_p50=seq_len) for seq_len, batch in points]
    shown = of_one_batch(made)
    assert [(row.seq_len, row.batch) for row in shown] == [(65_536, 1), (2048, 32)]
    found = series(shown, "ms_p50")
    assert found == {("nsa", "fwd"): [(2048, 2048), (65_536, 65_536)]}
    model = {"case": "decode.model", "mode": "step"}
    steps = [make_row(**model, batch=1), make_row(**model, batch=64), make_row(case="decode.model")]
    assert of_one_batch(steps) == steps[:1]


def of_lengths(provider: str, constant: float, slope: float, count: int) -> list[Row]:
    """Rows from 2,048 tokens on, with so many ms for a token: constant + slope * S / 8,192."""
    points = [(2048 << k, max(32 >> k, 1)) for k in range(count)]
    return [
        training(provider, n * b * (constant + slope * n / 8192), seq_len=n, batch=b, peak_mib=n**2)
        for n, b in points
    ]


def test_growth_with_the_length():
    ours, dense = of_lengths("nsa", 3, 0, 8), of_lengths("dense", 1, 1, 5)
    assert [tuple(row.values()) for row in scaling([*ours, *dense])] == [
        ("dense", "fwd_bwd", "1.58", "", "", ""),
        ("nsa", "fwd_bwd", "1.00", "2.00", "16,384", "11 at 262,144 (extrapolated)"),
    ]
    assert scaling([*ours[:4], *dense])[1]["times dense"] == "1 at 16,384"
    slow, fast = (scaling([*of_lengths("nsa", ms, 0, 8), *dense])[1] for ms in (99, 0.1))
    assert (slow["faster from"], fast["faster from"]) == ("more than 32,768", "at most 2,048")
    assert scaling([*ours[:3], *dense[:3]]) == []  # too few lengths


def test_without_a_time_there_is_no_report(tmp_path):
    with pytest.raises(UserError, match="must contain at least one time"):
        write_report([make_row(**WRONG)], tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_newest_row_of_a_kind_counts():
    old, new = make_row(), make_row(ms_p50=2.0, date=LATER["date"])
    wrong = make_row(**WRONG, date="2026-03-01T00:00:00+00:00")
    for order in ([old, new, wrong], [wrong, new, old]):
        assert newest_rows(order) == [new]
    others: list[dict[str, Any]] = [
        {"mode": "fwd_bwd"},
        {"batch": 1},
        {"gpu": "other"},
        {"num_gpus": 2},
    ]
    assert len(newest_rows([old, *(make_row(**other) for other in others)])) == 5


# --- The guard
SETTINGS = {"micro_batch": 32, "compile": True, "cuda_graphs": True, "checkpointing": "none"}


def pair(ms: float, dense_ms: float = 4.0, *, mib: float = 90.0, **values: Any) -> list[Row]:
    """This library's attention and dense attention in one run."""
    dense = make_row(**values, provider="dense-cudnn", ms_p50=dense_ms, peak_mib=30.0)
    return [dense, make_row(**values, ms_p50=ms, peak_mib=mib)]


def steps(ms: float, dense_ms: float = 4.0, **values: Any) -> list[Row]:
    return [training("dense", dense_ms, **values), training("nsa", ms, **values)]


def decoding(ms: float, dense_ms: float = 4.0) -> list[Row]:
    step = {"case": "decode.attention", "shape": "wide", "mode": "step"}
    slow = make_row(**step, provider="dense-fa2", ms_p50=9.0)
    return [
        slow,
        make_row(**step, provider="dense-scan", ms_p50=dense_ms),
        make_row(**step, ms_p50=ms),
    ]


def verdicts(lines: list[str]) -> list[str]:
    return [line.split()[-2] for line in lines[0].splitlines()[2:]]


COUNTS = "2 ratios compared, {} worse by more than {}%, 0 without a baseline, 0 wrong rows"


@pytest.mark.parametrize("made", [pair, steps, decoding])
def test_ratios_and_not_times_are_compared(made):
    lines, passed = guard(made(4.0, 8.0), made(2.0, 4.0), 0.05)  # a GPU of half the clock
    assert (lines[-1], passed) == (COUNTS.format(0, 5), True)
    lines, passed = guard(made(2.11), made(2.0), 0.05)
    assert (lines[-1], passed) == (COUNTS.format(1, 5), False)
    assert verdicts(lines) == ["WORSE", "ok"]
    assert guard(made(2.11), made(2.0), 0.06)[1]


def refused(rows: list[Row], baseline: list[Row]) -> bool:
    with pytest.raises(UserError, match="have a ratio with a baseline"):
        guard(rows, baseline, 0.05)
    return True


@pytest.mark.parametrize(
    "other",
    [
        {"micro_batch": 2},
        {"compile": False},
        {"document_mask": True},
        {"gpu": "another"},
    ],
    ids=str,
)
def test_only_the_same_kind_is_compared(other):
    of_row: dict[str, Any] = {"gpu": other["gpu"]} if "gpu" in other else {}
    settings = {**SETTINGS, **other}
    known = steps(2.0, settings={**SETTINGS, "document_mask": False})
    assert refused(steps(3.0, settings=settings, **of_row), known)
    faster = steps(1.0, settings={**settings, "loss_chunk": 1024}, **LATER, **of_row)
    new = steps(2.0, settings={**SETTINGS, "telemetry": True})
    lines, passed = guard(new, [*known, *faster], 0.05)
    assert (lines[-1], passed) == (COUNTS.format(0, 5), True)


def test_what_the_guard_compares():
    lines, passed = guard(pair(2.0, mib=100.0), pair(2.0), 0.05)  # memory, too
    assert verdicts(lines) == ["ok", "WORSE"]
    assert guard(pair(4.0), [*pair(4.0, **LATER), *pair(2.0)], 0.05)[1]  # the newest baseline
    assert refused(pair(2.0)[1:], pair(2.0))  # without dense attention
    lines, passed = guard([*pair(2.0), make_row(**WRONG)], pair(2.0), 0.05)
    assert not passed
    assert "wrong: attention, nsa, seed, random, S 2,048, fwd: dq is wrong" in lines


def test_the_guard_of_the_command(tmp_path, capsys):
    folder = tmp_path / "results"
    write_rows(folder / "old.jsonl", pair(2.0))
    new = str(write_rows(folder / "new.jsonl", pair(3.0)))
    (folder / "of-another-kind.jsonl").write_text('{"processes": 2}\n', encoding="utf-8")
    words = ["bench", "report", new, "--guard", str(folder)]  # which contains the new rows
    assert cli.main(words) == 1
    assert "+50.0%" in capsys.readouterr().out
    assert cli.main([*words, "--tolerance", "0.6"]) == 0
    assert cli.main(["bench", "report", new, "--guard", "committed"]) == 2  # another GPU
    assert cli.main([*words[:-1], str(tmp_path / "gone")]) == 2
    rule = "--guard must be a file or folder of rows that exists"
    assert rule in capsys.readouterr().err
