"""Rows, variants, targets: what is written, what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.bench import targets
from nsa.bench.rows import Origin, Results, Row, origin, read_rows
from nsa.bench.table import progress_line, result_table
from nsa.bench.targets import figures, is_void, outcomes
from nsa.bench.variants import Variant, parse_variant
from nsa.errors import UserError
from nsa.train import environment
from tests.bench.rows import H200, WRONG, make_row, training, write_rows

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


# --- Rows
def test_every_field_is_explained() -> None:
    page = (ROOT / "docs/benchmarks.md").read_text()
    assert not [field.name for field in fields(Row) if f"`{field.name}`" not in page]


def test_committed_rows_are_read() -> None:
    folders = ("results", "memory", "consumers", "switches")
    files = [file for name in folders for file in (ROOT / "benchmarks" / name).glob("*.jsonl")]
    assert len(read_rows(files)) > 300
    old = read_rows([ROOT / "benchmarks/results/h200-train.jsonl"])
    assert {(row.changed is None, row.is_masked) for row in old} == {(True, False)}


@pytest.mark.parametrize("correct", [False, None])
def test_no_time_without_a_correct_result(correct: bool | None) -> None:
    with pytest.raises(AssertionError, match="without a correct result"):
        make_row(correct=correct, note="wrong")
    with pytest.raises(AssertionError, match="says why"):
        make_row(**{**WRONG, "correct": correct, "note": None})
    make_row(**{**WRONG, "correct": correct})


def test_rows_survive_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, made = tmp_path / "new" / "rows.jsonl", list[Row]()
    sound = asdict(make_row())
    given = {name: sound[name] for name in sound if name not in Origin.__dataclass_fields__}
    for changes in ({"ms_p50": 1.23456789}, {**WRONG, "variant": {"lr": 1.23456789}}):
        results = Results(Row, path, CPU, None)  # the second appends
        results.add(progress_line, **{**given, **changes})
        assert results.finish(result_table) == (changes.get("correct") is None)
        made += results.rows
    assert read_rows([path]) == made
    assert made[0].ms_p50 == 1.23457
    assert made[1].variant == {"lr": 1.23456789}  # a setting is not rounded
    assert capsys.readouterr().out.startswith(f"run {made[0].run_id} on cpu, commit ")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "Expecting property name"),
        ("[1]", "argument after ** must be a mapping, not list"),
        (json.dumps({"case": "x"}), "missing 32 required positional arguments: 'run_id', 'device'"),
        (json.dumps({**asdict(make_row()), "speed": 1}), "unexpected keyword argument 'speed'"),
        (json.dumps({**asdict(make_row()), "correct": False}), "a time without a correct result"),
    ],
)
def test_what_is_no_row_is_refused_with_its_place(tmp_path: Path, line: str, why: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [make_row()])
    path.write_text(path.read_text() + "\n" + line + "\n")
    with pytest.raises(UserError, match=r"rows\.jsonl:3: the line must be a row") as caught:
        read_rows([path])
    assert why in str(caught.value)


def test_a_commit_is_taken_by_hand_only_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    code: dict[str, Any] = {"commit": None, "dirty": None, "note": "no git"}
    monkeypatch.setattr(environment, "code_version", lambda: code)
    assert [origin(CPU, given).commit for given in ("abc", None)] == ["abc", None]
    code.update(commit="def", dirty=True)
    here = origin(CPU)
    assert (here.commit, here.dirty, here.device, here.gpu) == ("def", True, "cpu", None)
    assert here.run_id != origin(CPU).run_id
    with pytest.raises(UserError, match="--commit must be left out"):
        origin(CPU, "abc")


# --- Variants
def test_variants() -> None:
    tiles = {"window_attention_*": {"rows": 64, "tma": True}}
    text = "a-1:window_size=256,window_attention_*.rows=64,window_attention_*.tma=true,"
    found = parse_variant(f"{text}branches=[cmp, win],phi=mean")
    pattern = {"window_size": 256, "branches": ("cmp", "win"), "phi": "mean"}
    assert found == Variant("a-1", pattern, tiles)
    named = {"window_attention_*.rows": 64, "window_attention_*.tma": True}
    assert found.settings() == {**pattern, **named}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("narrow", "be a name, a colon"),
        (":a=1", "be a name, a colon"),
        ("narrow:window_size", "--variant must be KEY=VALUE"),
        ("narrow:window_sise=3", "The nearest is window_size."),
        ("narrow:select_blocks.row=3", "The nearest is rows."),
        ("nsa:window_size=3", "have another name than nsa, flex"),
    ],
)
def test_variants_that_are_none(text: str, why: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_variant(text, ["nsa", "flex"])
    assert why in str(caught.value)


# --- Targets
def said(row: Row, *others: Row) -> list[str]:
    return [str(found) for found in outcomes(row, figures([*others, row]))]


@pytest.mark.parametrize(
    ("ms", "shown"), [(0.27, "pass pass"), (0.3, "pass FAIL"), (0.37, "FAIL FAIL")]
)
def test_targets_in_ms(ms: float, shown: str) -> None:
    window = make_row(case="attention.window", **H200, ms_p50=ms)
    bounds = "target 0.36 {}, stretch 0.28 {}".format(*shown.split())
    assert said(window) == [f"{ms:g}: {bounds}"]
    for other in ({"gpu": "NVIDIA A100"}, {"provider": "flex"}, {"seq_len": 4096}):
        assert not said(replace(window, **other))


def test_targets_of_ratios_hold_within_a_run() -> None:
    whole = {"seq_len": 65_536, "mode": "fwd_bwd", "batch": 1, **H200}
    dense = make_row(**whole, provider="dense-cudnn", ms_p50=50.0)
    ours = make_row(**whole, ms_p50=10.0)
    assert said(ours, dense) == ["0.2 of dense-cudnn: target 0.21 pass, stretch 0.16 FAIL"]
    assert not said(ours, replace(dense, run_id="another"))
    assert not said(ours, replace(dense, batch=2))
    selected = {"case": "attention.selected", "seq_len": 8192, **H200}
    shared = make_row(**selected, choice="shared16", ms_p50=1.5)
    assert said(shared, make_row(**selected, ms_p50=2.0)) == ["0.75 of random: target 0.8 pass"]


def test_the_file_of_targets_is_sound() -> None:
    gpu, known = targets.targets()
    assert gpu == "NVIDIA H200"
    keys = [(target.unit, *target.where.items()) for target in known]
    assert len(keys) == len(set(keys))
    units = {"ms", "of dense-cudnn", "of random", "tokens/s", "MiB of dense"}
    units |= {"of llama", "launches", "of one", "times dense", "of copy bandwidth"}
    assert {target.unit for target in known} == units
    for target in known:
        if target.stretch is not None:
            assert target.stretch != target.target
            assert target.reached(target.target, target.stretch)


def test_targets_of_training() -> None:
    dense = training("dense", 65_536 / 700, **H200, peak_mib=1000.0)
    ours = training("nsa", 65_536 / 500, **H200, peak_mib=1600.0)
    assert said(ours, dense) == [
        "500,000 tokens/s: target 430,000 pass, stretch 550,000 FAIL",
        "1.6 MiB of dense: target 1.5 FAIL",
    ]
    assert said(dense) == ["700,000 tokens/s: target 660,000 pass"]
    small = replace(ours, batch=4, tokens_per_s=249e3)
    assert said(small) == ["249,000 tokens/s: target 250,000 FAIL"]
    masked = {"settings": {"document_mask": True}}  # targets are of whole windows
    assert not said(replace(ours, **masked), replace(dense, **masked))  # type: ignore[arg-type]


def test_a_ratio_to_a_slow_dense_model_is_void() -> None:
    dense, ours = training("dense", 65_536 / 600, **H200), training("nsa", 65_536 / 500, **H200)
    assert is_void(ours, figures([dense, ours]))
    assert not is_void(ours, figures([replace(dense, tokens_per_s=661e3), ours]))
    assert "1.2 void" in result_table([dense, ours])


def test_the_table_shows_ratios_verdicts_and_what_is_missing() -> None:
    whole = {"seq_len": 65_536, "mode": "fwd_bwd", "batch": 1, **H200}
    dense = make_row(**whole, provider="dense-cudnn", ms_p50=50.0)
    failed = make_row(**whole, provider="narrow", **WRONG)
    lines = result_table([dense, make_row(**whole, ms_p50=10.0), failed]).splitlines()
    assert lines[1].split()[-3:] == ["1", "1", "5"]
    assert lines[2].endswith("0.2 of dense-cudnn: target 0.21 pass, stretch 0.16 FAIL")
    where = "attention, narrow, seed, random, S 65,536, fwd_bwd"
    assert lines[3] == f"without a time: {where}: dq is wrong"
