"""The acceptance run without a GPU: its criteria, its table, its rows, and tiny cases."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest

from nsa import configs
from nsa.train.load import load_config
from tests.acceptance import cases
from tests.acceptance.cases import CASES, Case, Setting
from tests.acceptance.checks import apart, differences, figures_of, training_faults
from tests.acceptance.programs import ROOT
from tests.acceptance.rows import (
    COMMITTED,
    append_row,
    committed_loss,
    merge,
    page,
    read_rows,
    table,
)

STEP = {
    "loss_nats": 5.0,
    "step_time_ms": 20.0,
    "step_time_max_ms": 21.0,
    "host_time_ms": 3.0,
    "tokens_per_s": 409_600.0,
    "mfu": 0.25,
    "compilations": 4,
    "memory_allocated_mib": 3000.0,
}


def metrics(without: str = "", **changes: Any) -> list[dict[str, Any]]:
    """Metrics of a passing run of 300 steps on a GPU, with changes to the last row."""
    rows = [{**STEP, "step": step, "loss_nats": 5.0 - step / 100} for step in range(20, 301, 20)]
    rows[0] |= {"step_time_ms": 2000.0, "host_time_ms": 1900.0, "tokens_per_s": 4_096.0}
    rows[7]["step_time_max_ms"] = 26.0
    rows[-1] |= changes
    return [{name: value for name, value in row.items() if name != without} for row in rows]


# ----------------------------------------------------------------------------------------- criteria


def test_speed_leaves_out_the_start_and_compilations_count_from_step_5():
    found = figures_of(metrics(step_time_ms=60.0, tokens_per_s=409_600.0 / 3), warnings=2)
    # The first row ends at step 20; the next begins before step 30, a tenth of the run.
    speed = 8192 * 13 / (12 * 0.02 + 0.06)
    expected = {"tokens_per_s": speed, "mfu": 0.25 / (409_600 / 3) * speed, "host_ms": 3.0}
    expected |= {"slowest_over_median": 1.3, "peak_mib": 3000.0, "loss_first": 4.8}
    assert found == pytest.approx(expected | {"compilations_after_5": 2, "loss_last": 2.0})
    rows = [{**row, "step": row["step"] // 20, "compilations": 10} for row in metrics()]
    rows[0]["compilations"] = rows[3]["compilations"] = 3  # steps 1 and 4
    assert figures_of(rows)["compilations_after_5"] == 0
    rows[4]["compilations"] = 9
    assert figures_of(rows)["compilations_after_5"] == 1


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, ""),
        ({"loss_nats": 4.29}, ""),
        ({"step": 280}, "280 of 300 steps"),
        ({"loss_nats": 4.31}, "the loss fell by 0.490 nats"),
        ({"loss_nats": math.nan}, "the loss fell by nan nats"),
        ({"compilations": 5}, "1 compilations or captures after step 5"),
        ({"without": "compilations"}, "compilations_after_5 is not known"),
        ({"data_synthetic": True}, "trained on synthetic data"),
        ({"without": "memory_allocated_mib"}, "ran on the CPU of a machine with a GPU"),
    ],
)
def test_faults_of_a_training_run(changes, fault):
    rows = metrics(**changes)
    found = [*training_faults(rows, figures_of(rows), steps=300, on_gpu=True)]
    assert [text[: len(fault)] for text in found] == [fault] * bool(fault)
    assert [*training_faults([], {}, steps=300, on_gpu=False)] == ["0 of 300 steps in the metrics"]


@pytest.mark.parametrize(
    ("found", "fault"),
    [(3300.0, ""), (2400.0, "the peak is -17.2% from 2900, 15% are allowed"), (None, "")],
)
def test_numbers_may_be_this_far_apart(found, fault):
    assert apart("the peak", found, 2900.0, 0.15) == [fault] * bool(fault)


@pytest.mark.parametrize(
    ("losses", "within", "fault"),
    [
        ((3.0, 2.0, 1.0), 0.0, ""),
        ((3.0, 2.0, math.nextafter(1.0, 2.0)), 0.0, "1 of 3 losses differ, from loss_nats"),
        ((3.0, 2.001, 1.01), 2e-4, "2 of 3 losses differ, from loss_nats of step 1: up to"),
        ((3.0, math.nan, 1.0), 2e-4, "1 of 3 losses differ"),
        ((3.0, 2.0), 0.0, "2 of 3 rows"),
    ],
)
def test_losses_of_a_resumed_run_are_compared(losses, within, fault):
    expected, found = (
        [{"step": step, "loss_nats": x} for step, x in enumerate(values)]
        for values in ((3.0, 2.0, 1.0), losses)
    )
    said = differences(expected, found, within=within)
    assert [text[: len(fault)] for text in said] == [fault] * bool(fault)


# --------------------------------------------------------------------------------------- the table


def test_the_table_has_every_configuration_once_and_in_order():
    names = [case.name for case in CASES]
    assert len(names) == len({*names})
    trained = [case for case in CASES if case.check is cases.train]
    assert {case.config for case in trained} == {*configs.names()}
    for case in trained:
        assert max(case.num_gpus, 1) == load_config(case.config).world_size, case.name
    quick = {case.config for case in CASES if case.quick}
    assert quick == {"78m", "78m-shared", "117m", "gpu-small", ""}
    for leg in range(1, 6):
        assert sum(case.expected_s for case in CASES if case.leg == leg) < 540, leg


# -------------------------------------------------------------------------------------------- rows


def test_rows_are_merged_by_case_and_compared_by_steps(tmp_path):
    case = Case("78m", cases.train, 1, 1)
    setting = Setting(case, tmp_path, "1", "NVIDIA H200", 0, "c0ffee", remarks=["--steps 300"])
    for day, (name, leg, loss) in enumerate(
        [("78m", "1", 2.0), ("1b", "4", 3.0), ("78m", "1", 1.9)]
    ):
        row = setting.row() | {"config": name, "leg": leg, "loss_last": loss}
        append_row(tmp_path / "leg.jsonl", row | {"date": f"2026-11-{10 + day}"})
    merge([tmp_path / "leg.jsonl"], tmp_path)
    found = read_rows(tmp_path / "h200.jsonl")
    assert [(x["config"], x["loss_last"]) for x in found] == [("78m", 1.9), ("1b", 3.0)]
    assert committed_loss(setting.row(), tmp_path) == 1.9
    assert committed_loss(setting.row() | {"note": "as it ships"}, tmp_path) is None


def test_the_committed_page_is_made_of_the_committed_rows():
    committed = (COMMITTED / "README.md").read_text(encoding="utf-8")
    assert committed == page(COMMITTED.glob("*.jsonl")), "python -m tests.acceptance.rows"
    rows = read_rows(COMMITTED / "h200.jsonl")
    assert f"{len(rows)} of {len(rows) + 1} cases" in table([*rows, {**rows[0], "passed": False}])


# ---------------------------------------------------------------------------------- cases that run


def test_make_passes_its_words_on():
    words = ["make", "-n", "accept", f"PYTHON={sys.executable}", "QUICK=1", "LEG=2", "ARGS=--out x"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert '-m "acceptance and quick and leg2" --out x' in done.stdout


# --------------------------------------------------------------------------------- a foreign model
