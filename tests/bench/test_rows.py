"""Rows, variants, targets: what is written, what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.bench import targets
from nsa.bench.rows import Row, RowFile, origin, read_rows
from nsa.bench.table import result_table, train_table
from nsa.bench.targets import figures, is_void, outcomes
from nsa.bench.variants import Variant, parse_variant
from nsa.errors import UserError
from nsa.train import environment
from tests.bench.rows import make_row

# --------------------------------------------------------------------------------------------------------------- rows

FIELDS = {
    "run_id", "case", "provider", "variant", "shape", "choice", "seq_len", "batch", "dtype", "mode", "ms_p50", "ms_p20",
    "ms_p80", "tflops_useful", "tbps_useful", "peak_mib", "correct", "errors", "note", "overlap", "recall", "timing", "samples",
    "kernels", "kernel_us", "device", "gpu", "driver", "torch", "triton", "commit", "dirty", "date",
    "tokens_per_s", "mfu", "reserved_mib", "loss_nats", "settings",
    "changed", "compilations_after_5", "slowest_over_median", "host_ms_p50", "first_step_s",
}  # fmt: skip


def test_fields_are_these_and_each_is_explained() -> None:
    assert set(asdict(make_row())) == FIELDS
    page = (Path(__file__).resolve().parents[2] / "docs/benchmarks.md").read_text()
    missing = [name for name in FIELDS if f"`{name}`" not in page]
    assert not missing


@pytest.mark.parametrize("correct", [False, None])
def test_no_time_without_a_correct_result(correct: bool | None) -> None:
    with pytest.raises(AssertionError, match="without a correct result"):
        make_row(correct=correct, note="wrong")
    with pytest.raises(AssertionError, match="says why"):
        make_row(correct=correct, ms_p50=None, ms_p20=None, ms_p80=None)
    make_row(correct=correct, ms_p50=None, ms_p20=None, ms_p80=None, note="wrong")


def test_rows_survive_the_file(tmp_path: Path) -> None:
    rows = [make_row(), make_row(correct=False, ms_p50=None, ms_p20=None, ms_p80=None, note="wrong", variant={"a": 1})]
    for path in (tmp_path / "new" / "rows.jsonl", tmp_path / "new" / "rows.jsonl"):  # the second appends
        file = RowFile(path)
        for row in rows:
            file.add(row)
    assert read_rows([path]) == rows + rows
    assert len(path.read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "be JSON"),
        ("[1]", "be an object"),
        (json.dumps({"case": "x"}), "have every field"),
        (json.dumps({**asdict(make_row()), "speed": 1}), "have no other fields, got speed"),
        (json.dumps({**asdict(make_row()), "correct": False}), "be one that the benchmark writes"),
    ],
)
def test_what_is_no_row_is_refused_with_its_place(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(asdict(make_row())) + "\n\n" + line + "\n")
    with pytest.raises(UserError, match=r"rows\.jsonl:3") as caught:
        read_rows([path])
    assert why in str(caught.value)


def test_a_commit_is_taken_by_hand_only_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(environment, "code_version", lambda: {"commit": None, "dirty": None, "note": "no git"})
    assert origin(cpu, "abc").commit == "abc"
    assert origin(cpu).commit is None
    monkeypatch.setattr(environment, "code_version", lambda: {"commit": "def", "dirty": True, "note": None})
    here = origin(cpu)
    assert (here.commit, here.dirty, here.device, here.gpu, here.driver) == ("def", True, "cpu", None, None)
    assert here.torch
    assert here.run_id != origin(cpu).run_id
    with pytest.raises(UserError, match="--commit must be left out"):
        origin(cpu, "abc")


# ----------------------------------------------------------------------------------------------------------- variants


def test_variants() -> None:
    text = "a-1:window_size=256,window_attention_*.rows=64,window_attention_*.tma=true,branches=[cmp, win],phi=mean"
    expected = Variant(
        "a-1",
        {"window_size": 256, "branches": ("cmp", "win"), "phi": "mean"},
        {"window_attention_*": {"rows": 64, "tma": True}},
    )
    assert parse_variant(text) == expected
    assert expected.settings() == {
        "window_size": 256, "branches": ("cmp", "win"), "phi": "mean", "window_attention_*.rows": 64,
        "window_attention_*.tma": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("narrow", "be a name, a colon"),
        (":a=1", "be a name, a colon"),
        ("narrow:", "be a name, a colon"),
        ("narrow:window_size", "each setting must be KEY=VALUE"),
        ("narrow:window_sise=3", "The nearest is window_size."),
        ("narrow:select_blocks.row=3", "The nearest is rows."),
        ("nsa:window_size=3", "the name must be none of nsa, flex"),
    ],
)
def test_variants_that_are_none(text: str, why: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_variant(text, ["nsa", "flex"])
    assert why in str(caught.value)


# ------------------------------------------------------------------------------------------------------------ targets


def verdict(rows: list[Row], **given: Any) -> str | None:
    found = outcomes(make_row(gpu="NVIDIA H200", **given), figures(rows))
    return str(found[0]) if found else None


def test_targets_in_ms() -> None:
    window = {"case": "attention.window", "seq_len": 2048, "mode": "fwd"}
    assert verdict([], **window, ms_p50=0.27) == "0.27: must 0.36 pass, goal 0.28 pass"
    assert verdict([], **window, ms_p50=0.30) == "0.3: must 0.36 pass, goal 0.28 FAIL"
    assert verdict([], **window, ms_p50=0.37) == "0.37: must 0.36 FAIL, goal 0.28 FAIL"
    assert outcomes(make_row(**window, gpu="NVIDIA A100"), {}) == []
    assert outcomes(make_row(**window, gpu="NVIDIA H200", provider="flex"), {}) == []
    assert outcomes(make_row(**{**window, "seq_len": 4096}, gpu="NVIDIA H200"), {}) == []
    assert outcomes(make_row(**window, gpu="NVIDIA H200", dtype="float16"), {}) == []


def test_targets_beside_dense_attention_hold_within_a_run() -> None:
    whole = {"case": "attention", "seq_len": 65_536, "mode": "fwd_bwd", "gpu": "NVIDIA H200", "batch": 1}
    dense = make_row(**whole, provider="dense-cudnn", ms_p50=50.0)
    ours = make_row(**whole, ms_p50=10.0)
    (found,) = outcomes(ours, figures([dense, ours]))
    assert (found.value, found.passed) == (0.2, True)
    assert str(found) == "0.2 of dense-cudnn: must 0.21 pass, goal 0.16 FAIL"
    assert outcomes(ours, figures([replace(dense, run_id="another"), ours])) == []
    assert outcomes(ours, figures([replace(dense, batch=2), ours])) == []
    assert outcomes(ours, figures([ours])) == []


def test_a_shared_choice_is_held_against_the_random_one() -> None:
    selected = {"case": "attention.selected", "seq_len": 8192, "mode": "fwd", "gpu": "NVIDIA H200"}
    rows = [make_row(**selected, ms_p50=2.0), make_row(**selected, choice="shared16", ms_p50=1.5)]
    (found,) = outcomes(rows[1], figures(rows))
    assert str(found) == "0.75 of random: must 0.8 pass"


def test_the_file_of_targets_is_sound() -> None:
    gpu, dtype, known = targets.targets()
    assert (gpu, dtype) == ("NVIDIA H200", "bfloat16")
    keys = [(t.case, t.provider, t.shape, t.choice, t.seq_len, t.batch, t.mode, t.unit) for t in known]
    assert len(keys) == len(set(keys))
    assert {t.unit for t in known} == {"ms", "of dense-cudnn", "of random", "tokens/s", "MiB of dense"}
    assert all(t.goal is None or (t.goal != t.must and t.reached(t.must, t.goal)) for t in known)


def training(provider: str, tokens_per_s: float, **values: Any) -> Row:
    """A row of a training step of 65,536 tokens at S 2,048."""
    given = {"ms_p50": 65_536_000 / tokens_per_s, "tokens_per_s": tokens_per_s, "mode": "fwd_bwd", "gpu": "NVIDIA H200"}
    return make_row(**{"case": "train", "choice": "model", "provider": provider, **given, **values})


def test_targets_of_training() -> None:
    dense, ours = training("dense", 700e3, peak_mib=1000.0), training("nsa", 500e3, peak_mib=1600.0)
    by = figures([dense, ours])
    assert [str(found) for found in outcomes(ours, by)] == [
        "500,000 tokens/s: must 430,000 pass, goal 550,000 FAIL",
        "1.6 MiB of dense: must 1.5 FAIL",
    ]
    assert [str(found) for found in outcomes(dense, by)] == ["700,000 tokens/s: must 660,000 pass"]
    assert not outcomes(training("dense-matched", 1.0), by)
    (small,) = outcomes(training("nsa", 249e3, batch=4), by)
    assert str(small) == "249,000 tokens/s: must 250,000 FAIL"


def test_a_ratio_to_a_slow_twin_is_void() -> None:
    slow, ours = training("dense", 600e3), training("nsa", 500e3)
    by = figures([slow, ours])
    assert is_void(ours, by)
    assert not is_void(ours, figures([training("dense", 661e3), ours]))
    assert "1.200 void" in train_table([slow, ours])


MASKED = {"settings": {"document_mask": True}}


def test_targets_of_whole_windows_are_not_those_of_documents() -> None:
    dense, ours = training("dense", 100e3, **MASKED), training("nsa", 100e3, **MASKED)
    by = figures([dense, ours])
    assert not outcomes(ours, by)
    assert not is_void(ours, by)
    whole = {"settings": {"document_mask": False}}
    assert len(outcomes(training("nsa", 100e3, **whole), by)) == 2


def test_the_table_shows_how_a_run_went() -> None:
    went = {"compilations_after_5": 0, "slowest_over_median": 1.25, "host_ms_p50": 7.0}
    went["first_step_s"] = 31.0
    rows = [
        training("nsa", 500e3, **went, **MASKED),
        training("dense", 600e3, **MASKED),
        training("dense-unmasked", 700e3),
    ]
    head, ours, dense, _ = train_table(rows).splitlines()
    assert head.endswith("of unmasked  compiled after 5  slowest  host ms  first s  target")
    assert ours.split()[-5:] == ["1.400", "0", "1.25", "7.0", "31.0"]
    assert dense.split()[-1] == "1.167"


def test_the_table_shows_ratios_verdicts_and_what_is_missing() -> None:
    whole = {"case": "attention", "seq_len": 65_536, "mode": "fwd_bwd", "gpu": "NVIDIA H200", "batch": 1}
    red = {"correct": False, "ms_p50": None, "ms_p20": None, "ms_p80": None, "note": "dq is wrong"}
    rows = [
        make_row(**whole, provider="dense-cudnn", ms_p50=50.0),
        make_row(**whole, ms_p50=10.0),
        make_row(**whole, provider="narrow", **red),
    ]
    lines = result_table(rows).splitlines()
    assert len(lines) == 4
    assert lines[1].split()[-2:] == ["1.000", "5.000"]
    assert "0.200" in lines[2]
    assert lines[2].endswith("must 0.21 pass, goal 0.16 FAIL")
    assert lines[3] == "without a figure: attention narrow fwd_bwd S 65,536: dq is wrong"
