"""The acceptance run: what passes, what does not, and how its rows come together."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nsa import configs
from nsa.errors import UserError
from nsa.train.environment import code_version
from nsa.train.load import load_config
from nsa.train.telemetry.metrics import Row as MetricsRow
from tests.faults.cases import write_config
from tests.tools.accept_cases import some_row
from tools.accept import __main__ as command
from tools.accept import shards, training
from tools.accept.case import Case
from tools.accept.figures import figures_of
from tools.accept.legs import LEGS, QUICK_LEG, Leg, chosen_legs
from tools.accept.programs import Ended, Program, descendants, last_lines
from tools.accept.resume import CHECKPOINTS, STEPS, differences, kill_steps
from tools.accept.rows import Row, read_rows
from tools.accept.run import run_case, run_leg
from tools.accept.setting import Machine, Setting

ROOT = Path(__file__).resolve().parents[2]
H200 = Machine("NVIDIA H200", 1, "c0ffee")
CPU = Machine("cpu", 0, "c0ffee")
SEED = Case("78m", "train", "78m", 10)
TINY_LIMIT_S = 120.0


# ----------------------------------------------------------------- what passes and what does not


def metrics(**changes: Any) -> list[MetricsRow]:
    """Rows of a run of 300 steps on a GPU that passes; ``changes`` are those of its last row."""
    rows: list[MetricsRow] = []
    for step in range(20, 301, 20):
        row: MetricsRow = {
            "step": step,
            "loss_nats": 5.0 - step / 100,
            "step_time_ms": 2000.0 if step == 20 else 20.0,
            "step_time_max_ms": 26.0 if step == 160 else 21.0,
            "host_time_ms": 1900.0 if step == 20 else 3.0,
            "tokens_per_s": 4_096.0 if step == 20 else 409_600.0,
            "mfu": 0.001 if step == 20 else 0.25,
            "compilations": 4,
            "memory_allocated_mib": 3000.0,
        }
        rows.append(row)
    rows[-1] |= changes
    return rows


PROGRAM = """
import json, pathlib, shutil, sys, time
here = pathlib.Path(__file__).parent
behaviour = json.loads((here / "behaviour.json").read_text())
words = sys.argv[1:]
print("arguments:", *words, flush=True)
if words[0] == "plan":
    print(json.dumps({"memory_bytes": {"peak": 2900 * 2**20}}))
    sys.exit(0)
time.sleep(behaviour["seconds"])
run = pathlib.Path(words[words.index("--run-dir") + 1])
run.mkdir()
lines = "".join(json.dumps(row) + "\\n" for row in behaviour["rows"])
(run / "metrics.jsonl").write_text(lines)
events = "".join(json.dumps({"kind": kind}) + "\\n" for kind in behaviour["events"])
(run / "events.jsonl").write_text(events)
print("the last line", flush=True)
sys.exit(behaviour["code"])
"""

Judge = Callable[..., Row]


@pytest.fixture
def fake_nsa(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the command ``nsa`` by a program that leaves the rows that it is told to leave."""
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setattr(training, "NSA", (sys.executable, str(tmp_path / "program.py")))
    monkeypatch.setattr("tools.accept.run.LEAST_S", 1.0)

    def behave(
        rows: list[MetricsRow],
        *,
        code: int = 0,
        seconds: float = 0.0,
        events: tuple[str, ...] = ("start", "finish"),
    ) -> None:
        behaviour = {"rows": rows, "code": code, "seconds": seconds, "events": events}
        (tmp_path / "behaviour.json").write_text(json.dumps(behaviour))

    return behave


@pytest.fixture
def judge(tmp_path: Path, fake_nsa: Callable[..., None]) -> Judge:
    """The row of a case whose program leaves ``rows``."""

    def row(
        rows: list[MetricsRow],
        *,
        code: int = 0,
        seconds: float = 0.0,
        events: tuple[str, ...] = ("start", "finish"),
        limit_s: float = 60.0,
        plan_mib: float | None = 2900.0,
        committed: float | None = 2.0,
        machine: Machine = H200,
        case: Case = SEED,
    ) -> Row:
        fake_nsa(rows, code=code, seconds=seconds, events=events)
        deadline = time.monotonic() + limit_s
        setting = Setting(tmp_path / "out", machine, "1", deadline, say=lambda line: None)
        setting.plans["78m"] = plan_mib
        known = [] if committed is None else [some_row(loss_last=committed)]
        return run_case(case, setting, known)

    return row


def test_a_sound_run_passes_with_its_figures(judge: Judge) -> None:
    row = judge(metrics())
    assert row.passed, row.note
    assert row.note == "added: --steps 300"
    found = (row.tokens_per_s, row.mfu, row.compilations_after_5, row.slowest_over_median)
    assert found == (409_600.0, 0.25, 0, 1.3)
    assert (row.host_ms, row.peak_mib, row.plan_mib) == (3.0, 3000.0, 2900.0)
    assert (row.loss_first, row.loss_last) == (4.8, 2.0)
    assert (row.config, row.gpu, row.commit, row.leg) == ("78m", "NVIDIA H200", "c0ffee", "1")


def without(name: str) -> list[MetricsRow]:
    return [{key: value for key, value in row.items() if key != name} for row in metrics()]


@pytest.mark.parametrize(
    ("rows", "more", "fault"),
    [
        (metrics(), {"code": 1}, "exit code 1"),
        (metrics(), {"seconds": 30.0, "limit_s": 2.5}, "overran its limit of"),
        ([], {}, "0 of 300 steps"),
        (metrics()[:-1], {}, "280 of 300 steps"),
        (metrics(loss_nats=4.31), {"committed": None}, "the loss fell by 0.490 nats"),
        (metrics(loss_nats=math.nan), {"committed": None}, "the loss fell by nan nats"),
        (metrics(), {"committed": 1.95}, "loss_last is +2.6% from the committed 1.9500"),
        (metrics(), {"committed": 2.05}, "loss_last is -2.4% from the committed 2.0500"),
        (metrics(compilations=5), {}, "1 compilations or captures after step 5"),
        (metrics(), {"events": ("start", "compilation")}, "1 compilations or captures"),
        (without("compilations"), {}, "compilations_after_5 is not known"),
        (metrics(memory_allocated_mib=3400.0), {}, "the peak is +17.2% from the planned one"),
        (metrics(memory_allocated_mib=2400.0), {}, "the peak is -17.2% from the planned one"),
        (metrics(), {"plan_mib": None}, "nsa plan gave no peak"),
        (metrics(data_synthetic=True), {}, "trained on synthetic data"),
        (without("memory_allocated_mib"), {}, "ran on the CPU of a machine with a GPU"),
    ],
)
def test_each_violation_fails_and_says_why(
    judge: Judge,
    rows: list[MetricsRow],
    more: dict[str, Any],
    fault: str,
) -> None:
    row = judge(rows, **more)
    assert not row.passed
    assert f"failed: {fault}" in row.note


@pytest.mark.parametrize(
    ("rows", "more"),
    [
        (metrics(loss_nats=4.29), {"committed": None}),
        (metrics(), {"committed": 1.97}),
        (metrics(memory_allocated_mib=3300.0), {}),
        (metrics(memory_allocated_mib=2500.0), {}),
        (without("memory_allocated_mib"), {"machine": CPU, "plan_mib": None}),
    ],
)
def test_what_lies_within_the_limits_passes(
    judge: Judge,
    rows: list[MetricsRow],
    more: dict[str, Any],
) -> None:
    row = judge(rows, **more)
    assert row.passed, row.note


def test_speed_leaves_out_the_start_and_counts_all_the_rest() -> None:
    rows = metrics(step_time_ms=60.0, tokens_per_s=409_600.0 / 3)
    found = figures_of(rows)
    # The first row ends with step 20, the next one begins before step 30: a tenth of the run.
    steps_ms = [20.0] * 12 + [60.0]
    assert found.tokens_per_s == pytest.approx(8192 * 13 / (sum(steps_ms) / 1000))
    assert found.slowest_over_median == pytest.approx(1.3)
    assert found.mfu == pytest.approx(0.25 / (409_600 / 3) * float(found.tokens_per_s or 0))


def test_compilations_count_from_the_first_row_after_the_warm_up() -> None:
    rows = [{**row, "step": int(row["step"]) // 20, "compilations": 10} for row in metrics()]
    for row in rows[:4]:
        row["compilations"] = 3  # of steps 1 to 4
    assert figures_of(rows).compilations_after_5 == 0
    rows[4]["compilations"] = 9
    assert figures_of(rows).compilations_after_5 == 1


def test_a_quick_run_is_shorter_and_has_an_early_row(tmp_path: Path, fake_nsa: Any) -> None:
    fake_nsa([{**row, "step": int(row["step"]) // 5} for row in metrics()])
    (row,) = run_leg(Leg("quick", (SEED,)), tmp_path, H200, limit_s=60, say=lambda line: None)
    assert row.passed, row.note
    assert (row.note, row.plan_mib) == ("added: --steps 60 --log-every 5", 2900.0)
    log = (tmp_path / "quick/78m/log.txt").read_text()
    run = tmp_path / "quick/78m/run"
    words = f"train 78m --run-dir {run} --steps 60 --log-every 5"
    assert f"arguments: {words}\n" in log


MAKE = """
import json, os, pathlib, shlex, sys
here = pathlib.Path(__file__).parent
words = dict(word.split("=", 1) for word in sys.argv[2:])
run = pathlib.Path(shlex.split(words["ARGS"])[1])
run.mkdir()
rows = json.loads((here / "rows.json").read_text())
(run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
caches = [os.environ[name] for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")]
for folder in caches:
    pathlib.Path(folder).mkdir(parents=True)  # fails where it is there already
print(json.dumps([sys.argv[1], words, caches, "MAKEFLAGS" in os.environ]))
"""


def test_make_train_begins_with_empty_caches(tmp_path: Path, monkeypatch: Any) -> None:
    program = tmp_path / "bin/make"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}{MAKE}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("MAKEFLAGS", "--no-builtin-rules -- QUICK=1 ARGS=--quick")
    config = load_config("cpu-small")
    rows = [{**row, "step": int(row["step"]) * config.steps // 300} for row in metrics()]
    (program.parent / "rows.json").write_text(json.dumps(rows))
    case = Case("make train", "make train", "cpu-small", 10, num_gpus=0)
    setting = Setting(tmp_path, H200, "1", time.monotonic() + 60, say=lambda line: None)
    setting.plans["cpu-small"] = 2900.0
    for _ in range(2):
        row = run_case(case, setting, [])
        assert row.passed, row.note
        assert row.note == "as it ships"
    folder = tmp_path / "full/make-train"
    target, words, caches, inherits = json.loads(last_lines(folder / "log.txt", 1)[0])
    assert (target, words["PYTHON"], inherits) == ("train", sys.executable, False)
    assert words["ARGS"] == f"--run-dir {folder / 'run'}"
    assert all(folder in Path(cache).parents and not Path(cache).exists() for cache in caches)


def test_data_on_shards_come_from_the_folder_that_is_given(tmp_path: Path, fake_nsa: Any) -> None:
    fake_nsa(metrics())
    leg = Leg("3", (Case("117m-fineweb", "train", "117m-fineweb", 10),))
    given = tmp_path / "prepared"
    (row,) = run_leg(leg, tmp_path, H200, limit_s=60, shards=given, say=lambda line: None)
    assert row.note == "added: --steps 300 --data.path SHARDS"
    assert f" --data.path {given}\n" in (tmp_path / "full/117m-fineweb/log.txt").read_text()


# ------------------------------------------------------------------------------- legs and limits


def test_cases_go_on_after_one_that_failed_or_overran(tmp_path: Path, fake_nsa: Any) -> None:
    fake_nsa(metrics(), code=3)
    said: list[str] = []
    cases = (SEED, dataclasses.replace(SEED, name="again"))
    rows = run_leg(Leg("1", cases), tmp_path, H200, limit_s=60, say=said.append)
    assert [row.passed for row in rows] == [False, False]
    assert read_rows(tmp_path / "leg-1.jsonl") == rows
    assert "    | the last line" in said
    fake_nsa(metrics(), seconds=60.0)
    first, second = run_leg(Leg("1", cases), tmp_path, H200, limit_s=4, say=said.append)
    assert "overran" in first.note
    assert second.note == "failed: not begun: the leg's time was used up"
    assert len(read_rows(tmp_path / "leg-1.jsonl")) == 4


def test_records_that_cannot_be_read_fail_the_case(judge: Judge, tmp_path: Path) -> None:
    program = (tmp_path / "program.py").read_text()
    (tmp_path / "program.py").write_text(program.replace("lines = ", 'lines = "torn\\n" + '))
    row = judge(metrics())
    assert not row.passed
    assert "metrics.jsonl:1" in row.note
    wrong = dataclasses.replace(SEED, config="gone")
    assert "got 'gone'" in judge(metrics(), case=wrong).note


def test_a_case_that_needs_more_gpus_is_left_out_and_named(tmp_path: Path) -> None:
    said: list[str] = []
    leg = Leg("4", (Case("1b", "train", "1b", 10, num_gpus=2),))
    assert run_leg(leg, tmp_path, H200, say=said.append) == []
    assert any("1b: left out, it needs 2 GPUs" in line for line in said)


def test_what_a_program_started_ends_with_it(tmp_path: Path) -> None:
    child = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c',"
    child += " 'import time; time.sleep(60)'], start_new_session=True)"
    child += "; print(p.pid, flush=True); time.sleep(60)"
    with Program([sys.executable, "-c", child], tmp_path / "log", {}) as program:
        while len(last_lines(program.log, 9)) < 2:
            program.pause(0.05)
        pid = int(last_lines(program.log, 1)[0])
        os.kill(pid, 0)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _runs(pid):
        time.sleep(0.05)
    assert not _runs(pid)


def test_every_configuration_has_a_case() -> None:
    cases = [case for leg in LEGS for case in leg.cases if case.kind == "train"]
    assert {case.config for case in cases} == set(configs.names()), "tools/accept/legs.py"
    for case in cases:
        config = load_config(case.config)
        assert max(case.num_gpus, 1) == config.world_size, case.name


def test_legs_are_sound() -> None:
    for leg in (QUICK_LEG, *LEGS):
        assert leg.expected_s < 540, leg.name
        names = [case.name for case in leg.cases]
        for place, case in enumerate(leg.cases):
            if case.kind in ("eval", "generate", "report", "check"):
                assert case.of in names[:place], f"{case.name} comes before the run it works on"
    names = [case.name for leg in LEGS for case in leg.cases]
    assert len(names) == len(set(names))
    quick = {case.config for case in QUICK_LEG.cases if case.trains_configuration}
    assert quick == {"78m", "117m", "gpu-small"}


def test_cases_are_chosen_by_leg_and_name() -> None:
    assert chosen_legs(quick=True, leg=None, only=[]) == [QUICK_LEG]
    assert chosen_legs(quick=False, leg="2", only=[]) == [LEGS[1]]
    found = chosen_legs(quick=False, leg=None, only=["78m", "1b"])
    assert [(leg.name, [case.name for case in leg.cases]) for leg in found] == [
        ("1", ["78m"]),
        ("4", ["1b"]),
    ]
    mistakes: tuple[tuple[str | None, list[str], str], ...] = (
        ("9", [], "--leg must be one of 1, 2"),
        (None, ["sed"], "--only must"),
    )
    for leg, only, message in mistakes:
        with pytest.raises(UserError, match=message):
            chosen_legs(quick=False, leg=leg, only=only)


@pytest.mark.parametrize(("gpus", "words"), [(2, []), (4, ["4", "2"]), (8, ["8", "1"])])
def test_a_run_of_several_processes_takes_the_gpus_there_are(gpus: int, words: list[str]) -> None:
    config = load_config("1b")
    found = training.processes_words(config, gpus)
    assert found[1::2] == words
    assert found[::2] == (["--world-size", "--accumulation"] if words else [])
    assert training.processes_words(load_config("78m"), gpus) == []


# ----------------------------------------------------------------------- resumption, shards, words
BEYOND_1 = math.nextafter(1.0, 2.0)


def losses(*values: float) -> list[MetricsRow]:
    return [{"step": step, "loss_nats": value} for step, value in enumerate(values, start=1)]


@pytest.mark.parametrize(
    ("found", "within", "fault"),
    [
        (losses(3.0, 2.0, 1.0), 0.0, None),
        (losses(3.0, 2.0, BEYOND_1), 0.0, "1 of 3 losses differ, from loss_nats of step 3"),
        (losses(3.0, 2.0001, 1.0), 2e-4, None),
        (losses(3.0, 2.001, 1.01), 2e-4, "2 of 3 losses differ, from loss_nats of step 2: up to"),
        (losses(3.0, math.nan, 1.0), 2e-4, "1 of 3 losses differ"),
        (losses(3.0, 2.0), 0.0, "2 of 3 rows"),
        ([], 0.0, "0 of 3 rows"),
    ],
)
def test_losses_of_a_resumed_run_are_compared(
    found: list[MetricsRow],
    within: float,
    fault: str | None,
) -> None:
    text = "".join(differences(losses(3.0, 2.0, 1.0), found, within=within))
    assert text.startswith(fault) if fault else not text


def test_kills_fall_behind_checkpoints_and_before_the_end() -> None:
    every = STEPS // CHECKPOINTS
    for seed in range(100):
        first, second = kill_steps(random.Random(seed))
        assert 2 * every < first < second - every
        assert second < STEPS - every // 2


def test_documents_for_shards_are_the_same_each_time_and_of_many_lengths() -> None:
    texts = [str(row["text"]) for row in itertools.islice(shards.fineweb_rows(), 800)]
    again = itertools.islice(shards.fineweb_rows(), 800)
    assert texts == [row["text"] for row in again]
    sizes = sorted(map(len, texts))
    assert sizes[0] > 0
    assert sizes[80] < 800 < 1500 < sizes[400] < 3500 < 7000 < sizes[-20]


def test_shards_are_prepared_once_as_the_documents_say(tmp_path: Path, monkeypatch: Any) -> None:
    rows = [{"text": f"document {number}"} for number in range(7)]
    monkeypatch.setattr(shards, "fineweb_rows", lambda: iter(rows))
    monkeypatch.setattr(shards, "ROWS_PER_FILE", 3)
    monkeypatch.setattr(shards, "find_spec", lambda name: object())
    called: list[list[str]] = []

    def run(words: Any, log: Path, limit_s: float) -> Ended:
        called.append(list(words))
        return Ended(2 if len(called) > 1 else 0, 1.0, limit_s)

    found = shards.make_shards(tmp_path, run)
    assert (found.folder, found.fault) == (tmp_path / "shards", "")
    documents, folder = str(tmp_path / "fineweb"), str(tmp_path / "shards")
    assert called[0][3:8] == ["data", "prepare", documents, "--out", folder]
    files = sorted((tmp_path / "fineweb").iterdir())
    assert [len(path.read_text().splitlines()) for path in files] == [3, 3, 1]
    assert "exit code 2" in shards.make_shards(tmp_path, run).fault
    monkeypatch.setattr(shards, "find_spec", lambda name: None)
    assert "--shards FOLDER" in shards.make_shards(tmp_path, run).fault


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--list"], 0, "leg 1: about"),
        (["--list", "--quick"], 0, "make train"),
        (["--only", "sed"], 2, "accept: accept: --only must name cases"),
        (["merge", "gone", "--into", "h200.jsonl"], 2, "FOLDER must exist"),
        (["--shards", "gone"], 2, "--shards must be a folder made by nsa data prepare"),
    ],
)
def test_words_of_the_command(words: list[str], code: int, text: str, capsys: Any) -> None:
    assert command.main(words) == code
    said = capsys.readouterr()
    assert text in said.out + said.err


def test_an_interrupted_leg_leaves_no_program_behind(tmp_path: Path) -> None:
    words = ["--leg", "1", "--only", "cpu-small", "--out", str(tmp_path)]
    words += [] if code_version()["commit"] else ["--commit", "c0ffee"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command_line = [sys.executable, "-m", "tools.accept", *words]
    process = subprocess.Popen(command_line, cwd=ROOT, env=environment, stderr=subprocess.PIPE)
    run = tmp_path / "full/cpu-small/run"
    deadline = time.monotonic() + 90
    while not (run / "config.yaml").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    started = descendants(process.pid)
    assert started
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.startswith(b"accept: interrupted")
    assert not any(_runs(pid) for pid in started)


def _runs(pid: int) -> bool:
    """Whether a process is there, and not one that has ended and that its parent has not noticed."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


def test_make_hands_its_words_on() -> None:
    words = ["make", "-n", "accept", f"PYTHON={sys.executable}", "QUICK=1", "LEG=2", "ARGS=--out x"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "-m tools.accept --quick --leg 2 --out x" in done.stdout


# ---------------------------------------------------------------------------------- for real


def test_a_tiny_run_goes_through_twice(tmp_path: Path) -> None:
    """The product itself, on this machine's CPU: a short training, its check, and both again."""
    config = str(write_config(tmp_path, steps=400, sample_tokens=0))
    cases = (
        Case("tiny", "train", config, 20, num_gpus=0),
        Case("tiny: check", "check", config, 10, num_gpus=0, of="tiny"),
    )
    said: list[str] = []
    limits: dict[str, Any] = {"limit_s": TINY_LIMIT_S, "say": said.append}
    rows = run_leg(Leg("quick", cases), tmp_path / "out", CPU, **limits)
    assert [row.passed for row in rows] == [True, True], said
    assert rows[0].note.startswith("added: --steps 60")
    assert rows[0].tokens_per_s is not None
    assert rows[0].slowest_over_median is not None
    assert rows[1].note == "nsa check; everything agrees"
    leg = Leg("quick", cases[:1])
    again = run_leg(leg, tmp_path / "out", CPU, committed=rows, **limits)
    assert again[0].passed, said
    assert again[0].loss_last == rows[0].loss_last
    assert len(read_rows(tmp_path / "out/quick.jsonl")) == 3


@pytest.mark.faults
def test_a_tiny_run_is_killed_and_resumed(tmp_path: Path) -> None:
    config = str(write_config(tmp_path))
    case = Case("tiny: killed and resumed", "resume", config, 60, num_gpus=0)
    said: list[str] = []
    (row,) = run_leg(Leg("1", (case,)), tmp_path / "out", CPU, limit_s=300, say=said.append)
    assert row.passed, said
    assert row.note.startswith(f"{STEPS} steps, killed at steps ")
