"""The acceptance run without a GPU: its criteria, its table, its rows, and tiny cases."""

from __future__ import annotations

import itertools
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nsa import configs
from nsa.train.load import load_config
from tests.acceptance import cases, foreign_model, shards
from tests.acceptance.cases import CASES, EVERY, RESUMED_STEPS, Case, Setting, command, kill_steps
from tests.acceptance.checks import apart, differences, figures_of, training_faults
from tests.acceptance.programs import ROOT, last_lines, start, wait
from tests.acceptance.rows import (
    COMMITTED,
    append_row,
    committed_loss,
    gpu_stem,
    merge,
    page,
    read_rows,
    table,
)
from tests.faults.cases import write_config

CPU = torch.device("cpu")
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


def make(case: Case, out: Path, leg: str = "1", gpu: str = "NVIDIA H200") -> Setting:
    return Setting(case, out, leg, gpu, 0, "c0ffee")


# ----------------------------------------------------------------------------------------- criteria


def test_speed_leaves_out_the_start_and_counts_everything_after_it():
    found = figures_of(metrics(step_time_ms=60.0, tokens_per_s=409_600.0 / 3))
    # The first row ends at step 20; the next begins before step 30, a tenth of the run.
    speed = 8192 * 13 / (12 * 0.02 + 0.06)
    assert found == pytest.approx(
        {
            "tokens_per_s": speed,
            "mfu": 0.25 / (409_600 / 3) * speed,
            "slowest_over_median": 1.3,
            "host_ms": 3.0,
            "peak_mib": 3000.0,
            "compilations_after_5": 0,
            "loss_first": 4.8,
            "loss_last": 2.0,
        }
    )
    assert figures_of([]) == {}


def test_compilations_count_from_step_5():
    rows = [{**row, "step": row["step"] // 20, "compilations": 10} for row in metrics()]
    rows[0]["compilations"] = rows[3]["compilations"] = 3  # steps 1 and 4
    assert figures_of(rows)["compilations_after_5"] == 0
    assert figures_of(rows, warnings=2)["compilations_after_5"] == 2
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
    ("found", "expected", "fault"),
    [
        (3300.0, 2900.0, ""),
        (2500.0, 2900.0, ""),
        (3400.0, 2900.0, "the peak is +17.2% from 2900, 15% are allowed"),
        (2400.0, 2900.0, "the peak is -17.2% from 2900, 15% are allowed"),
        (None, 2900.0, ""),
        (2400.0, None, ""),
    ],
)
def test_numbers_may_be_this_far_apart(found, expected, fault):
    assert apart("the peak", found, expected, 0.15) == [fault] * bool(fault)


def losses(*values: float) -> list[dict[str, Any]]:
    return [{"step": step, "loss_nats": value} for step, value in enumerate(values, start=1)]


@pytest.mark.parametrize(
    ("found", "within", "fault"),
    [
        (losses(3.0, 2.0, 1.0), 0.0, ""),
        (losses(3.0, 2.0, math.nextafter(1.0, 2.0)), 0.0, "1 of 3 losses differ, from loss_nats"),
        (losses(3.0, 2.0001, 1.0), 2e-4, ""),
        (losses(3.0, 2.001, 1.01), 2e-4, "2 of 3 losses differ, from loss_nats of step 2: up to"),
        (losses(3.0, math.nan, 1.0), 2e-4, "1 of 3 losses differ"),
        (losses(3.0, 2.0), 0.0, "2 of 3 rows"),
    ],
)
def test_losses_of_a_resumed_run_are_compared(found, within, fault):
    said = differences(losses(3.0, 2.0, 1.0), found, within=within)
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


def test_kills_fall_after_checkpoints_and_before_the_end():
    for seed in range(100):
        first, second = kill_steps(random.Random(seed))
        assert 2 * EVERY < first < second - EVERY
        assert second < RESUMED_STEPS - EVERY // 2


@pytest.mark.parametrize(
    ("config", "gpus", "found"),
    [("1b", 2, (2, 4)), ("1b", 4, (4, 2)), ("1b", 8, (8, 1)), ("78m", 8, (1, 2))],
)
def test_a_run_of_several_processes_takes_the_gpus_there_are(config, gpus, found):
    assert cases.spread(load_config(config), gpus) == found


def test_documents_for_shards_are_the_same_each_time_and_of_many_lengths():
    texts = [str(row["text"]) for row in itertools.islice(shards.fineweb_rows(), 400)]
    again = itertools.islice(shards.fineweb_rows(), 400)
    assert texts == [row["text"] for row in again]
    sizes = sorted(map(len, texts))
    assert 0 < sizes[0] < sizes[40] < 800 < 1500 < sizes[200] < 3500 < 7000 < sizes[-10]


# -------------------------------------------------------------------------------------------- rows


def test_rows_are_merged_by_case_and_compared_by_steps(tmp_path):
    def row(config: str, loss: float, leg: str = "1", note: str = "added: --steps 300") -> Any:
        one = make(Case(config, command(""), 1, 1), tmp_path, leg)
        one.figures, one.remarks = {"loss_last": loss}, [note]
        return one.row(seconds=4.0)

    new = [row("78m", 2.0), row("1b", 3.0, "4"), row("78m", 1.9), row("78m", 2.5, "quick")]
    for n, one in enumerate(new):
        append_row(tmp_path / "leg-1.jsonl", {**one, "date": f"2026-11-{10 + n}"})
    for _ in range(2):  # the second call changes nothing
        merge([tmp_path / "leg-1.jsonl"], tmp_path)
        found = read_rows(tmp_path / "h200.jsonl")
        names = [(one["config"], one["leg"], one["loss_last"]) for one in found]
        assert names == [("78m", "quick", 2.5), ("78m", "1", 1.9), ("1b", "4", 3.0)]
    assert committed_loss(row("78m", 0.0), tmp_path) == 1.9
    assert committed_loss(row("78m", 0.0, note="as it ships"), tmp_path) is None
    assert committed_loss(row("78m", 0.0) | {"gpu": "NVIDIA H100"}, tmp_path) is None


def test_files_are_named_after_the_gpu():
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090", "cpu")
    assert [*map(gpu_stem, names)] == ["h100", "a100", "rtx-4090", "cpu"]


def test_the_committed_page_is_made_of_the_committed_rows():
    committed = (COMMITTED / "README.md").read_text(encoding="utf-8")
    assert committed == page(COMMITTED.glob("*.jsonl")), "python -m tests.acceptance.rows"
    rows = read_rows(COMMITTED / "h200.jsonl")
    assert f"{len(rows)} of {len(rows) + 1} cases" in table([*rows, {**rows[0], "passed": False}])


# ---------------------------------------------------------------------------------- cases that run


def test_a_program_that_exceeds_its_limit_ends_with_its_children(tmp_path):
    child = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '60'])"
    child += "; print(p.pid, flush=True); time.sleep(60)"
    log = tmp_path / "log"
    with start([sys.executable, "-c", child], log, {}) as process:
        while len(last_lines(log, 9)) < 2:
            time.sleep(0.05)
        assert wait(process, log, 0.1) == ["exceeded its limit of 0 s"]
    path = Path(f"/proc/{last_lines(log, 1)[0]}/stat")
    assert not path.exists() or path.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_command_must_print_and_write_what_it_should(tmp_path):
    one = make(Case("version", command("--version", says=r"nsa \d\S+"), 1, 1), tmp_path)
    assert not one.faults(tmp_path)
    assert one.row()["note"].startswith("nsa --version; nsa ")
    check = command("--version", "{folder}/page.html", says="everything agrees")
    printed, written = make(Case("version", check, 1, 1), tmp_path).faults(tmp_path)
    assert printed == "it did not print 'everything agrees'"
    assert written.endswith("version/page.html")


def test_make_train_begins_with_empty_caches(tmp_path, monkeypatch):
    program = tmp_path / "make"
    program.write_text('#!/bin/sh\necho "$@"\necho "$TRITON_CACHE_DIR" "$MAKEFLAGS"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("MAKEFLAGS", "QUICK=1")
    one = make(Case("make train", cases.make_train, 1, 1, "cpu-small"), tmp_path)
    assert one.faults(tmp_path)[0].startswith("0 of ")
    words, caches = last_lines(one.log, 2)
    assert words == f"train PYTHON={sys.executable} ARGS=--run-dir {one.trained} CONFIG="
    assert caches == str(one.folder / "cold/TRITON_CACHE_DIR")
    assert not (one.folder / "cold").exists()


TINY = """
import pytest
from tests.acceptance.cases import Case, command, killed_and_resumed, train

check = command("check {{run}}", says="everything agrees")
CASES = [
    Case("tiny", train, 20, 1, {config!r}, num_gpus=0),
    Case("tiny: check", check, 9, 1, num_gpus=0),
    Case("tiny: no", command("check no-run"), 9, 1, num_gpus=0),
    Case("tiny: killed", killed_and_resumed, 60, 1, {config!r}, num_gpus=0),
    Case("large", train, 9, 1, num_gpus=99),
]

@pytest.mark.quick
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case, setting):
    if faults := setting.faults():
        pytest.fail("; ".join(faults), pytrace=False)
"""


@pytest.mark.faults
def test_tiny_cases_go_through(tmp_path):
    """Training, check, a failure, SIGKILL and resumption, on this machine's CPU."""
    config = str(write_config(tmp_path, steps=400, sample_tokens=0))
    (tmp_path / "test_tiny.py").write_text(TINY.format(config=config))
    words = ["-m", "pytest", "-s", "-v", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    words += ["-p", "tests.acceptance.conftest", "-m", "quick", "--commit", "c0ffee"]
    done = subprocess.run(
        [sys.executable, *words, "--out", str(tmp_path / "out"), str(tmp_path / "test_tiny.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    rows = read_rows(tmp_path / "out/quick.jsonl")
    assert [row["passed"] for row in rows] == [True, True, False, True], done.stdout
    assert rows[0]["note"].startswith("added: --steps 60")
    assert rows[0]["tokens_per_s"] > 0
    assert "failed: exit code" in rows[2]["note"]
    assert "    | " in done.stdout
    assert "1 failed, 3 passed, 1 skipped" in done.stdout
    assert table(rows) in done.stdout


def test_make_passes_its_words_on():
    words = ["make", "-n", "accept", f"PYTHON={sys.executable}", "QUICK=1", "LEG=2", "ARGS=--out x"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert '-m "acceptance and quick and leg2" --out x' in done.stdout


# --------------------------------------------------------------------------------- a foreign model


class RunningMean(nn.Module):
    """Attention that compiles fast: the mean of all tokens so far."""

    def __init__(self, width: int, config: object) -> None:
        super().__init__()
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        count = torch.arange(1, x.shape[1] + 1, device=x.device)
        return self.proj(x.cumsum(1) / count[:, None])


class Specialising(RunningMean):
    """Attention that formats a size, which makes the compiler specialize on it."""

    def forward(self, x: Tensor) -> Tensor:
        assert len(f"{x.shape[1]}") > 0
        return super().forward(x)


class WrongWhenCompiled(RunningMean):
    """Attention with a different result when compiled."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (0.5 * x if torch.compiler.is_compiling() else 0.0)


@pytest.mark.parametrize(
    ("attention", "rounds", "fault"),
    [
        (RunningMean, 24, ""),
        (Specialising, 1, "recompilations, the first for tokens [2, 129]"),
        (WrongWhenCompiled, 1, "compiled, it is 0."),
    ],
)
def test_a_foreign_model_is_judged(monkeypatch, attention, rounds, fault):
    monkeypatch.setattr(foreign_model, "NativeSparseAttention", attention)
    figures, _, faults = foreign_model.measure(small(rounds), CPU, "eager")
    assert fault in "".join(faults[:1])
    assert bool(faults) == bool(fault)
    assert (figures["compilations_after_5"] > 0) == (attention is Specialising)


def small(rounds: int) -> foreign_model.Size:
    warmup = ((4, 64), (3, 96), (2, 80), (1, 64), (1, 128), (1, 48))
    later = ((2, 128), (1, 100), (5, 33), (3, 77), (1, 60))
    return foreign_model.Size(16, 1, load_config("cpu-small").model.nsa, warmup, later, rounds)


@pytest.mark.parametrize(
    ("eager", "compiled", "gain", "fault"),
    [
        (0.01, 0.019, 1.0, ""),
        (0.01, 0.021, 1.0, "compiled, it is 0.0210 nats from fp32, at most 0.0200"),
        (0.0, 0.0019, 1.0, ""),
        (0.0, 0.0021, 1.0, "compiled, it is 0.0021 nats"),
        (0.11, 0.0, 1.0, "bf16 is 0.1100 nats from fp32"),
        (math.nan, 0.0, 1.0, "bf16 is nan"),
        (0.01, math.nan, 1.0, "compiled, it is nan"),
        (0.0, 0.0, 0.0, "the loss fell by 0.000 nats, at least 0.5"),
    ],
)
def test_compiled_losses_may_be_twice_as_far_off(eager, compiled, gain, fault):
    exact = [5.0] * 6 + [5.0 - gain] * 5
    near, other = ([loss + off for loss in exact] for off in (eager, compiled))
    *_, faults = foreign_model.judge(small(1), exact, near, other, [])
    assert [text[: len(fault)] for text in faults] == [fault] * bool(fault)
