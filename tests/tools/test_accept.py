"""The acceptance run: what passes, what does not, and how its cases run."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nsa import configs
from nsa.errors import UserError
from nsa.train.environment import code_version
from nsa.train.load import load_config
from tests.faults.cases import write_config
from tests.tools.accept_rows import PASSED
from tools.accept import __main__ as command_line
from tools.accept import case as case_module
from tools.accept import commands, programs, shards, training
from tools.accept.case import Case, Machine
from tools.accept.figures import figures_of
from tools.accept.legs import LEGS, QUICK_LEG, TRAINING, Leg, chosen_legs
from tools.accept.programs import descendants, last_lines, start
from tools.accept.resume import STEPS, differences, kill_steps, killed_and_resumed
from tools.accept.rows import Row, append_row, read_rows
from tools.accept.run import run_leg

ROOT = Path(__file__).resolve().parents[2]
H200 = Machine("NVIDIA H200", 1, "c0ffee")
CPU = Machine("cpu", 0, "c0ffee")
TRAIN_78M = Case("78m", "78m", training.train, 10)
TINY_LIMIT_S = 120.0

Metrics = list[dict[str, Any]]
RunLeg = Callable[..., list[Row]]


# ----------------------------------------------------------------- what passes and what does not


def metrics(*, without: str = "", **changes: Any) -> Metrics:
    """Rows of a run of 300 steps on a GPU that passes; ``changes`` are those of its last row."""
    row = {
        "loss_nats": 5.0,
        "step_time_ms": 20.0,
        "step_time_max_ms": 21.0,
        "host_time_ms": 3.0,
        "tokens_per_s": 409_600.0,
        "mfu": 0.25,
        "compilations": 4,
        "memory_allocated_mib": 3000.0,
    }
    rows = [{**row, "step": step, "loss_nats": 5.0 - step / 100} for step in range(20, 301, 20)]
    slow = {"step_time_ms": 2000.0, "host_time_ms": 1900.0, "tokens_per_s": 4_096.0, "mfu": 0.001}
    rows[0] |= slow
    rows[7]["step_time_max_ms"] = 26.0
    rows[-1] |= changes
    return [{name: value for name, value in row.items() if name != without} for row in rows]


PROGRAM = """
import json, pathlib, sys, time
behaviour = json.loads(pathlib.Path(__file__).with_suffix(".json").read_text())
words = sys.argv[1:]
print("arguments:", *words, flush=True)
if words[0] == "plan":
    print(json.dumps({"memory_bytes": {"peak": behaviour["plan_mib"] * 2**20}}))
    sys.exit(0)
time.sleep(behaviour["seconds"])
run = pathlib.Path(words[words.index("--run-dir") + 1])
run.mkdir()
(run / "metrics.jsonl").write_text(behaviour["metrics"])
(run / "events.jsonl").write_text(behaviour["events"])
print("the last line", flush=True)
sys.exit(behaviour["code"])
"""


@pytest.fixture
def fake_leg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLeg:
    """Runs a leg in which the command ``nsa`` is a program that leaves the rows given here."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    for module in (training, case_module):
        monkeypatch.setattr(module, "NSA", (sys.executable, str(program)))
    monkeypatch.setattr("tools.accept.run.LEAST_S", 1.0)

    def run(
        rows: Metrics,
        leg: Leg = Leg("1", (TRAIN_78M,)),  # noqa: B008 - frozen
        *,
        code: int = 0,
        seconds: float = 0.0,
        event: str = "start",
        torn: str = "",
        plan_mib: float = 2900.0,
        machine: Machine = H200,
        **options: Any,
    ) -> list[Row]:
        behaviour = {
            "metrics": torn + "".join(json.dumps(row) + "\n" for row in rows),
            "events": json.dumps({"kind": event}) + "\n",
            "code": code,
            "seconds": seconds,
            "plan_mib": plan_mib,
        }
        program.with_suffix(".json").write_text(json.dumps(behaviour))
        options = {"limit_s": 60.0, "committed": tmp_path, **options}
        return run_leg(leg, tmp_path / "out", machine, **options)

    return run


def test_a_sound_run_passes_with_its_figures(fake_leg):
    (row,) = fake_leg(metrics())
    assert row == replace(PASSED, date=row.date, seconds=row.seconds)


FAILURES = [
    ({}, {"code": 1}, "exit code 1"),
    ({}, {"seconds": 30.0, "limit_s": 2.5}, "overran its limit of"),
    ({"step": 280}, {}, "280 of 300 steps"),
    ({"loss_nats": 4.31}, {}, "the loss fell by 0.490 nats"),
    ({"loss_nats": math.nan}, {}, "the loss fell by nan nats"),
    ({"compilations": 5}, {}, "1 compilations or captures after step 5"),
    ({}, {"event": "compilation"}, "1 compilations or captures"),
    ({"without": "compilations"}, {}, "compilations_after_5 is not known"),
    ({"memory_allocated_mib": 3400.0}, {}, "the peak is +17.2% from the planned one"),
    ({"memory_allocated_mib": 2400.0}, {}, "the peak is -17.2% from the planned one"),
    ({"data_synthetic": True}, {}, "trained on synthetic data"),
    ({"without": "memory_allocated_mib"}, {}, "ran on the CPU of a machine with a GPU"),
    ({}, {"torn": "torn\n"}, ""),
]


@pytest.mark.parametrize(("changes", "options", "fault"), FAILURES)
def test_each_violation_fails_and_says_why(fake_leg, changes, options, fault):
    (row,) = fake_leg(metrics(**changes), **options)
    assert not row.passed
    assert f"failed: {fault}" in row.note
    assert "torn" not in options or "metrics.jsonl:1" in row.note


@pytest.mark.parametrize(
    ("changes", "machine"),
    [
        ({"loss_nats": 4.29}, H200),
        ({"memory_allocated_mib": 3300.0}, H200),
        ({"memory_allocated_mib": 2500.0}, H200),
        ({"without": "memory_allocated_mib"}, CPU),
    ],
)
def test_what_lies_within_the_limits_passes(fake_leg, changes, machine):
    cases = (replace(TRAIN_78M, num_gpus=0),)
    (row,) = fake_leg(metrics(**changes), Leg("1", cases), machine=machine)
    assert row.passed, row.note


@pytest.mark.parametrize(
    ("committed", "fault"),
    [
        (1.95, "loss_last is +2.6% from the committed 1.9500"),
        (2.05, "loss_last is -2.4% from the committed 2.0500"),
        (1.97, ""),
    ],
)
def test_the_last_loss_is_compared_with_the_committed_one(tmp_path, fake_leg, committed, fault):
    append_row(tmp_path / "h200.jsonl", replace(PASSED, loss_last=committed))
    (row,) = fake_leg(metrics())
    assert row.passed == (not fault)
    assert fault in row.note


def test_a_run_without_rows_or_plan_fails(fake_leg):
    (row,) = fake_leg([])
    assert "failed: 0 of 300 steps" in row.note
    unknown = Case("78m", "gone", training.train, 10)
    (row,) = fake_leg([], Leg("1", (unknown,)))
    assert "got 'gone'" in row.note


def test_speed_leaves_out_the_start_and_counts_everything_after_it():
    found = figures_of(metrics(step_time_ms=60.0, tokens_per_s=409_600.0 / 3))
    # The first row ends with step 20, the next one begins before step 30: a tenth of the run.
    steps_ms = [20.0] * 12 + [60.0]
    assert found["tokens_per_s"] == pytest.approx(8192 * 13 / (sum(steps_ms) / 1000))
    assert found["slowest_over_median"] == pytest.approx(1.3)
    assert found["mfu"] == pytest.approx(0.25 / (409_600 / 3) * found["tokens_per_s"])


def test_compilations_count_from_the_first_row_after_the_warm_up():
    rows = [{**row, "step": row["step"] // 20, "compilations": 10} for row in metrics()]
    for row in rows[:4]:
        row["compilations"] = 3  # of steps 1 to 4
    assert figures_of(rows)["compilations_after_5"] == 0
    rows[4]["compilations"] = 9
    assert figures_of(rows)["compilations_after_5"] == 1


# --------------------------------------------------------------------------------- what is run


def test_a_quick_run_is_shorter_and_has_an_early_row(tmp_path, fake_leg):
    rows = [{**row, "step": row["step"] // 5} for row in metrics()]
    (row,) = fake_leg(rows, Leg("quick", (TRAIN_78M,)))
    assert row.passed, row.note
    assert row.note == "added: --steps 60 --log-every 5"
    folder = tmp_path / "out/quick/78m"
    words = f"train 78m --run-dir {folder / 'run'} --steps 60 --log-every 5"
    assert f"arguments: {words}\n" in (folder / "log.txt").read_text()


MAKE = """
import json, os, pathlib, shlex, sys
here = pathlib.Path(__file__).parent
words = dict(word.split("=", 1) for word in sys.argv[2:])
run = pathlib.Path(shlex.split(words["ARGS"])[1])
run.mkdir()
(run / "metrics.jsonl").write_text((here / "rows.jsonl").read_text())
caches = [os.environ[name] for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")]
for folder in caches:
    pathlib.Path(folder).mkdir(parents=True)  # fails where it is there already
print(json.dumps([sys.argv[1], words, caches, "MAKEFLAGS" in os.environ]))
"""


def test_make_train_begins_with_empty_caches(tmp_path, monkeypatch, fake_leg):
    program = tmp_path / "bin/make"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}{MAKE}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("MAKEFLAGS", "--no-builtin-rules -- QUICK=1 ARGS=--quick")
    steps = load_config("cpu-small").steps
    rows = [{**row, "step": row["step"] * steps // 300} for row in metrics()]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (program.parent / "rows.jsonl").write_text(text)
    case = Case("make train", "cpu-small", training.make_train, 10)
    for _ in range(2):
        (row,) = fake_leg([], Leg("1", (case,)))
        assert row.passed, row.note
        assert row.note == "as it ships"
    folder = tmp_path / "out/full/make-train"
    target, words, caches, inherits = json.loads(last_lines(folder / "log.txt", 1)[0])
    assert (target, words["PYTHON"], inherits) == ("train", sys.executable, False)
    assert words["ARGS"] == f"--run-dir {folder / 'run'}"
    assert all(folder in Path(cache).parents and not Path(cache).exists() for cache in caches)


def test_data_on_shards_come_from_the_folder_that_is_given(tmp_path, fake_leg):
    case, given = replace(TRAIN_78M, name="shards", config="117m-fineweb"), tmp_path / "prepared"
    (row,) = fake_leg(metrics(), Leg("3", (case,)), shards=given)
    assert row.note == "added: --steps 300 --data.path SHARDS"
    assert f" --data.path {given}\n" in (tmp_path / "out/full/shards/log.txt").read_text()


@pytest.mark.parametrize(
    ("printed", "code", "faults"),
    [
        ('{"figures": {"loss_last": 4.0}, "remarks": ["9 steps"], "faults": []}', 0, []),
        ('{"figures": {"loss_last": 4.0}, "remarks": ["9 steps"], "faults": ["no"]}', 1, ["no"]),
        ("Traceback", 1, ["exit code 1"]),
        ("nothing", 0, ["it printed no result"]),
    ],
)
def test_the_foreign_model_tells_its_result(tmp_path, monkeypatch, printed, code, faults):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho '{printed}'\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setattr(commands, "PYTHON", str(program))
    leg = Leg("3", (Case("foreign model", "", commands.program("foreign_model"), 10),))
    (row,) = run_leg(leg, tmp_path, H200, limit_s=60.0, committed=tmp_path)
    failed = [f"failed: {fault}" for fault in faults]
    remarks = ["9 steps"] if printed.startswith("{") else []
    assert row.note == "; ".join([*remarks, *failed])
    assert row.loss_last == (4.0 if remarks else None)


def test_a_command_must_print_and_write_what_it_should(tmp_path):
    version = commands.command("--version", says=r"nsa \d\S+")
    nothing = commands.command("--version", "{folder}/page.html", says="everything agrees")
    cases = (Case("78m: version", "78m", version, 10), Case("78m: no", "78m", nothing, 10))
    first, second = run_leg(Leg("1", cases), tmp_path, H200, limit_s=60.0, committed=tmp_path)
    assert first.passed
    assert first.note.startswith("nsa --version; nsa ")
    assert "it did not print 'everything agrees'; it did not write " in second.note


# ------------------------------------------------------------------------------- legs and limits


def test_cases_go_on_after_one_that_failed_or_overran(tmp_path, fake_leg, capsys):
    leg = Leg("1", (TRAIN_78M, replace(TRAIN_78M, name="again")))
    rows = fake_leg(metrics(), leg, code=3)
    assert [row.passed for row in rows] == [False, False]
    assert read_rows(tmp_path / "out/leg-1.jsonl") == rows
    assert "    | the last line\n" in capsys.readouterr().out
    first, second = fake_leg(metrics(), leg, seconds=60.0, limit_s=4.0)
    assert "overran" in first.note
    assert second.note == "failed: not begun: the leg's time was used up"
    assert len(read_rows(tmp_path / "out/leg-1.jsonl")) == 4


def test_a_case_that_needs_more_gpus_is_left_out_and_named(fake_leg, capsys):
    assert fake_leg([], Leg("4", (replace(TRAIN_78M, num_gpus=2),))) == []
    assert "78m: left out, it needs 2 GPUs" in capsys.readouterr().out


def test_what_a_program_started_ends_with_it(tmp_path):
    child = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c',"
    child += " 'import time; time.sleep(60)'], start_new_session=True)"
    child += "; print(p.pid, flush=True); time.sleep(60)"
    log = tmp_path / "log"
    with start([sys.executable, "-c", child], log, {}):
        while len(last_lines(log, 9)) < 2:
            time.sleep(0.05)
        pid = int(last_lines(log, 1)[0])
        os.kill(pid, 0)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _runs(pid):
        time.sleep(0.05)
    assert not _runs(pid)


def test_legs_hold_every_configuration_once_and_in_order():
    for leg in (QUICK_LEG, *LEGS):
        assert leg.expected_s < 540, leg.name
        names = [case.name for case in leg.cases]
        for place, case in enumerate(leg.cases):
            if case in QUICK_LEG.cases[2:8]:  # eval, generate, report, check, export, loaded
                assert "78m" in names[:place], f"{case.name} comes before the run it works on"
    cases = [case for leg in LEGS for case in leg.cases]
    assert len(cases) == len({case.name for case in cases})
    trained = [case for case in cases if case.do is training.train]
    assert {case.config for case in trained} == set(configs.names()), "tools/accept/legs.py"
    for case in trained:
        assert max(case.num_gpus, 1) == load_config(case.config).world_size, case.name
    quick = {case.config for case in QUICK_LEG.cases if case.do in TRAINING}
    assert quick == {"78m", "78m-shared", "117m", "gpu-small"}


def test_what_is_not_timed_runs_side_by_side(tmp_path, monkeypatch):
    """After the trainings; cases of a lane one after the other."""
    events, both = list[str](), threading.Barrier(2, timeout=60)

    def meet(setting: case_module.Setting) -> case_module.Result:
        both.wait()
        return note(setting)

    def note(setting: case_module.Setting) -> case_module.Result:
        events.append(setting.case.name)
        return case_module.Result()

    monkeypatch.setattr("tools.accept.legs.TRAINING", (note,))
    monkeypatch.setattr("tools.accept.run.TRAINING", ())
    cases = (
        *(Case(f"a: {number}", "78m", meet, 1, lane="a") for number in range(2)),
        *(Case(name, "78m", note, 1) for name in ("first", "second")),
        *(Case(f"b: {number}", "78m", meet, 1, lane="b") for number in range(2)),
    )
    rows = run_leg(Leg("1", cases), tmp_path, H200, limit_s=60.0, committed=tmp_path)
    assert [row.config for row in rows] == [case.name for case in cases]
    assert events[:2] == ["first", "second"]
    assert {*events[2:4]} == {"a: 0", "b: 0"}
    assert read_rows(tmp_path / "leg-1.jsonl")[-1].config in events[4:]


def test_an_interrupt_ends_the_programs_of_all_threads(tmp_path):
    log, faults = tmp_path / "log.txt", list[str]()

    def sleep() -> None:
        faults.append(programs.run(["sleep", "600"], log, 600.0, {}))
        with pytest.raises(InterruptedError), programs.start(["true"], log, {}):
            pass
        faults.append("nothing more")

    def interrupted() -> None:
        with programs.threads(2) as pool:
            for _ in range(2):
                pool.submit(sleep)
            while len(programs._running) < 2:
                time.sleep(0.02)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert sorted(faults) == ["exit code -9"] * 2 + ["nothing more"] * 2
    with programs.start(["true"], log, {}):
        pass


def test_cases_are_chosen_by_leg_and_name():
    assert chosen_legs(quick=True, leg=None, only=[]) == [QUICK_LEG]
    assert chosen_legs(quick=False, leg="2", only=[]) == [LEGS[1]]
    found = chosen_legs(quick=False, leg=None, only=["78m", "1b"])
    names = [(leg.name, [case.name for case in leg.cases]) for leg in found]
    assert names == [("1", ["78m"]), ("3", ["1b"])]
    with pytest.raises(UserError, match="--leg must be one of 1, 2"):
        chosen_legs(quick=False, leg="9", only=[])


@pytest.mark.parametrize(
    ("config", "gpus", "found"),
    [("1b", 2, (2, 4)), ("1b", 4, (4, 2)), ("1b", 8, (8, 1)), ("78m", 8, (1, 2))],
)
def test_a_run_of_several_processes_takes_the_gpus_there_are(config, gpus, found):
    assert training.spread(load_config(config), gpus) == found


# ----------------------------------------------------------------------- resumption, shards, words
BEYOND_1 = math.nextafter(1.0, 2.0)


def losses(*values: float) -> Metrics:
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
def test_losses_of_a_resumed_run_are_compared(found, within, fault):
    text = "".join(differences(losses(3.0, 2.0, 1.0), found, within=within))
    assert text.startswith(fault) if fault else not text


def test_kills_fall_after_checkpoints_and_before_the_end():
    every = STEPS // 6
    for seed in range(100):
        first, second = kill_steps(random.Random(seed))
        assert 2 * every < first < second - every
        assert second < STEPS - every // 2


def test_documents_for_shards_are_the_same_each_time_and_of_many_lengths():
    texts = [str(row["text"]) for row in itertools.islice(shards.fineweb_rows(), 400)]
    again = itertools.islice(shards.fineweb_rows(), 400)
    assert texts == [row["text"] for row in again]
    sizes = sorted(map(len, texts))
    assert sizes[0] > 0
    assert sizes[40] < 800 < 1500 < sizes[200] < 3500 < 7000 < sizes[-10]


def test_shards_are_prepared_once_as_the_documents_say(tmp_path, monkeypatch):
    rows = [{"text": f"document {number}"} for number in range(7)]
    monkeypatch.setattr(shards, "fineweb_rows", lambda: iter(rows))
    monkeypatch.setattr(shards, "ROWS_PER_FILE", 3)
    monkeypatch.setattr(shards, "find_spec", lambda name: object())
    called: list[list[str]] = []

    def run(words: list[str], log: Path, limit_s: float, env: dict[str, str]) -> str:
        called.append(words)
        return "exit code 2" if len(called) > 1 else ""

    monkeypatch.setattr(shards, "run", run)
    assert shards.make_shards(tmp_path, 9.0) == tmp_path / "shards"
    documents, folder = str(tmp_path / "fineweb"), str(tmp_path / "shards")
    assert called[0][3:8] == ["data", "prepare", documents, "--out", folder]
    files = sorted((tmp_path / "fineweb").iterdir())
    assert [len(path.read_text().splitlines()) for path in files] == [3, 3, 1]
    with pytest.raises(UserError, match="exit code 2"):
        shards.make_shards(tmp_path, 9.0)
    monkeypatch.setattr(shards, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="--shards FOLDER"):
        shards.make_shards(tmp_path, 9.0)


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--list"], 0, "leg 1: about"),
        (["--list", "--quick"], 0, "make train"),
        (["--only", "sed"], 2, "--only must name cases"),
        (["merge", "gone", "--into", "h200.jsonl"], 2, "FOLDERS must exist"),
        (["--shards", "gone"], 2, "--shards must be a folder made by nsa data prepare"),
        (["--quik"], 2, "unrecognized arguments: --quik; did you mean --quick"),
    ],
)
def test_words_of_the_command(words, code, text, capsys):
    assert command_line.main(words) == code
    said = capsys.readouterr()
    assert text in said.out + said.err


def test_an_interrupted_leg_leaves_no_program_behind(tmp_path):
    words = ["--leg", "1", "--only", "cpu-small", "--out", str(tmp_path)]
    words += [] if code_version()["commit"] else ["--commit", "c0ffee"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [sys.executable, "-m", "tools.accept", *words],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 90
    while not ((tmp_path / "full/cpu-small").exists() and descendants(process.pid)):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(0.5)  # and the program has begun
    started = descendants(process.pid)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.startswith(b"accept: interrupted")
    assert not any(_runs(pid) for pid in started)


def _runs(pid: int) -> bool:
    """Whether a process exists and is not one that has ended and awaits its parent's notice."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


def test_make_passes_its_words_on():
    words = ["make", "-n", "accept", f"PYTHON={sys.executable}", "QUICK=1", "LEG=2", "ARGS=--out x"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "-m tools.accept --quick --leg 2 --out x" in done.stdout


# ---------------------------------------------------------------------------------- for real


@pytest.mark.faults
def test_a_tiny_run_goes_through(tmp_path):
    """The product itself, on this machine's CPU: a short training and its check."""
    config = str(write_config(tmp_path, steps=400, sample_tokens=0))
    check = commands.command("check {run}", says="everything agrees")
    cases = (
        Case("tiny", config, training.train, 20, num_gpus=0),
        Case("tiny: check", config, check, 10, num_gpus=0),
    )
    options = {"limit_s": TINY_LIMIT_S, "committed": tmp_path}
    rows = run_leg(Leg("quick", cases), tmp_path / "out", CPU, **options)
    assert [row.passed for row in rows] == [True, True], rows
    assert rows[0].note.startswith("added: --steps 60")
    assert rows[0].tokens_per_s is not None
    assert rows[0].slowest_over_median is not None
    assert rows[1].note == "nsa check; everything agrees"


@pytest.mark.faults
def test_a_tiny_run_is_killed_and_resumed(tmp_path):
    config = str(write_config(tmp_path))
    case = Case("tiny: killed and resumed", config, killed_and_resumed, 60, num_gpus=0)
    leg = Leg("1", (case,))
    (row,) = run_leg(leg, tmp_path / "out", CPU, limit_s=300, committed=tmp_path)
    assert row.passed, row.note
    assert row.note.startswith(f"{STEPS} steps, killed at steps ")
