"""The evidence: trainings in legs and one after the other for real, and what is collected."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import os
import random
import re
import shlex
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nsa import cli
from nsa.errors import UserError
from nsa.lm.recorded import load_selections
from nsa.train.data import Origin, PrepareConfig, prepare
from nsa.train.load import load_config, to_yaml
from nsa.train.telemetry.metrics import read_metrics
from tests.cli.test_documented_commands import check_command
from tests.train.cases import tiny_config
from tools.accept import programs
from tools.evidence import __main__ as command_line
from tools.evidence import experiments, rows, training
from tools.evidence.arms import take_folders
from tools.evidence.experiments import EXPERIMENTS, MUON_RATES, ON_BOOKS, Command, Experiment
from tools.evidence.report import write_report
from tools.evidence.run import run_all

STEPS, SEQ_LEN, BATCH = 24, 256, 8


# --------------------------------------------------------------------------- trainings, for real
def write_books(folder: Path) -> Path:
    """Made-up books of which each split gets some, prepared as bytes."""
    rng, texts = random.Random(0), folder / "texts"
    texts.mkdir()
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(50)]
    for number in range(24):
        text = " ".join(rng.choices(words, k=400))
        (texts / f"{number}.txt").write_text(text, encoding="utf-8")
    config = PrepareConfig(Origin(str(texts)), "byte", validation_fraction=0.2, test_fraction=0.2)
    prepare(config, folder / "books", workers=1)
    return folder / "books"


def tiny_words(folder: Path) -> str:
    """Words of a training whose second half takes some seconds."""
    settings: dict[str, Any] = {"steps": STEPS, "log_every": STEPS // 2, "eval_every": STEPS // 2}
    settings |= {"seq_len": SEQ_LEN, "micro_batch": BATCH, "accumulation": 1}
    settings |= {"checkpoint_every": 0, "sample_tokens": 4, "model": {"num_layers": 2}}
    (folder / "tiny.yaml").write_text(to_yaml(tiny_config(folder, **settings)), encoding="utf-8")
    return f"{folder}/tiny.yaml {ON_BOOKS}"


ONE_AT_A_TIME = threading.Lock()  # folder and output are the process's


def in_this_process(words: Sequence[str], log: Path, limit_s: float, env: Mapping[str, str]) -> str:
    """In place of a program, which would spend seconds on imports; a profile only leaves files."""
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    _, _, out, _, _, _, *words = words
    with (
        ONE_AT_A_TIME,
        log.open("w", encoding="utf-8") as file,
        contextlib.chdir(out),
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        print("$ the command")
        if words[0] != "profile":
            return f"exit code {code}" if (code := cli.main([*words])) else ""
        folder = Path(words[words.index("--run-dir") + 1], "profile")
        folder.mkdir(parents=True)
        for name in ("trace.json.gz", "stages.txt", "stages.json"):
            (folder / name).write_text(name, encoding="utf-8")
        (folder / "kernels.txt").write_bytes(bytes((rows.LIMIT_MIB << 20) + 1))
    return ""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One experiment that fails, one that there is no time for, one in legs that ends well."""
    folder, said = tmp_path_factory.mktemp("evidence"), list[str]()
    tiny = tiny_words(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "run", in_this_process)
        patch.setattr(experiments, "LONG", SEQ_LEN * 2)
        for module in ("run", "training", "rows"):
            patch.setattr(f"tools.evidence.{module}.say", said.append)
        after = [
            dataclasses.replace(one, text=one.text.replace("new-tokens 512", "new-tokens 16"))
            for one in experiments.whole_run(tiny, "a prompt", 2)
        ]
        after.append(Command("eval {run} --checkpoint none --json", "none.json"))
        chosen = (
            Experiment("tiny-fails", "nsa", f"{tiny} --model.width -1", (), 1),
            Experiment("tiny-long", "nsa", tiny, (), 10_000),
            Experiment("tiny-whole", "nsa", tiny, tuple(after), 1, in_legs=True),
        )
        given = (write_books(folder), folder / "out", [""])
        times: dict[str, Any] = {"commit": "c0ffee", "leg_s": 0.0, "until_s": 9_000.0}
        code = run_all(chosen, *given, **times)
        again = run_all(chosen[2:], *given, **times)
    run, made = folder / "out/runs/tiny-whole", folder / "out/tiny-whole"
    row = json.loads((made / "row.json").read_text(encoding="utf-8"))
    return SimpleNamespace(
        code=code, again=again, said="\n".join(said), run=run, made=made, row=row
    )


def test_a_failure_and_a_lack_of_time_stop_no_other_experiment(lab):
    assert lab.code == 1
    assert "    | nsa: --model.width: model.width must be positive, got -1." in lab.said
    assert "tiny-fails: FAILED: nsa train: exit code 2 after" in lab.said
    assert "tiny-long: not begun, it takes 10000 s, " in lab.said
    assert {path.name for path in lab.made.parent.glob("tiny-*")} == {"tiny-whole"}
    assert "failed: tiny-fails tiny-whole" in lab.said  # the last one: a command of it


def test_what_is_finished_is_not_done_again(lab):
    assert lab.again == 0
    assert lab.said.endswith("tiny-whole: done before\nall done")
    whole = Experiment("tiny-whole", "nsa", "no such words", (), 1, in_legs=True)
    legs, fault = training.train(whole, lab.made.parent, {}, 0.0)
    assert (len(legs), fault) == (lab.row["legs"], "")


def test_legs_are_stopped_with_a_checkpoint_and_go_on(lab):
    legs = training.read_lines(lab.made / "legs.jsonl")
    assert len(legs) == lab.row["legs"] > 1
    assert [leg["exit_code"] for leg in legs] == [143] * (len(legs) - 1) + [0]
    steps = [leg["last_step"] for leg in legs]
    assert STEPS // 2 <= steps[0] < steps[-1] == STEPS
    assert steps == sorted(steps)
    assert all(leg["begin"] < leg["end"] for leg in legs)
    launches = json.loads((lab.made / "environment.json").read_text())["launches"]
    assert [launch["resumed_from_step"] for launch in launches] == [None, *steps[:-1]]


def test_the_row_is_that_of_the_run(lab):
    metrics, row = read_metrics(lab.run / "metrics.jsonl"), lab.row
    legs = training.read_lines(lab.made / "legs.jsonl")
    seconds = sum(leg["seconds"] for leg in legs)
    assert (row["steps"], row["tokens"]) == (STEPS, STEPS * SEQ_LEN * BATCH)
    assert metrics[-1]["tokens"] == row["tokens"]
    assert row["tokens_per_s_total"] == metrics[-1]["tokens_per_s_total"]
    assert row["tokens_per_s"] == statistics.median(float(x["tokens_per_s"]) for x in metrics)
    assert row["tokens_per_s_processes"] == pytest.approx(row["tokens"] / seconds, rel=0.01)
    assert row["tokens_per_s_processes"] < row["tokens_per_s_total"]
    test, validation = (
        json.loads((lab.made / f"{split}.json").read_text()) for split in ("test", "validation")
    )
    assert test["bits_per_byte"] != validation["bits_per_byte"]
    assert (row["test_bits_per_byte"], row["test_windows"]) == (
        test["bits_per_byte"],
        test["windows"],
    )
    assert row["val_bits_per_byte"] == validation["bits_per_byte"]
    assert row["parameters"] == test["parameters"] > 0
    config = load_config(lab.made / "config.yaml")
    assert (row["lr"], row["seed"], row["seq_len"]) == (config.optim.lr, 1337, SEQ_LEN)
    assert row["commit"] == "c0ffee"
    assert (row["experiment"], row["model"], row["gpu"]) == ("tiny", "nsa", "cpu")


def test_without_a_measured_validation_the_row_has_that_of_the_training(lab, tmp_path):
    whole = Experiment("tiny-whole", "nsa", "", (), 1)
    row = rows.make_row(whole, lab.run, tmp_path, [{"seconds": 2.0}], "c0ffee")
    metrics = read_metrics(lab.run / "metrics.jsonl")
    assert row["val_bits_per_byte"] == metrics[-1]["val_bits_per_byte"]
    assert row["test_bits_per_byte"] is None
    assert row["parameters"] == lab.row["parameters"]
    assert row["tokens_per_s_processes"] == row["tokens"] / 2


def test_all_small_files_are_collected(lab):
    files = {path.name for path in lab.made.iterdir()}
    assert files == {
        *("row.json", "legs.jsonl", "metrics.jsonl.gz", "events.jsonl"),
        *("config.yaml", "environment.json", "sample.txt", "loss.png", "check.txt"),
        *("test.json", "test.npz", "validation.json", "validation.npz", "test-512.json"),
        *("test-512.npz", "failed-none.txt"),
        *("generated.txt", "inspect-2048.json", "selected-2048.npz"),
        *("inspect-512.json", "selected-512.npz"),
        *("profile.txt", "trace.json.gz", "stages.txt", "stages.json"),
    }
    assert lab.row["left_out"] == ["kernels.txt"]
    assert "kernels.txt: 8 MiB, left out" in lab.said
    assert lab.row["failed"] == ["nsa eval for none.json: exit code 2"]
    assert "none" in (lab.made / "failed-none.txt").read_text()
    metrics = gzip.decompress((lab.made / "metrics.jsonl.gz").read_bytes())
    assert metrics == (lab.run / "metrics.jsonl").read_bytes()
    assert (lab.made / "check.txt").read_text().endswith("everything agrees\n")
    assert (lab.made / "generated.txt").read_text().startswith("a prompt")
    layers, size = load_selections(lab.made / "selected-512.npz")
    assert (len(layers), layers[0].shape, size) == (2, (512, 1, 4), 16)


def test_records_name_no_place_of_the_machine(lab):
    root = str(programs.ROOT)
    for path in lab.made.glob("*.*"):
        if path.suffix in (".json", ".jsonl", ".txt", ".yaml"):
            assert root not in path.read_text(), path
            assert str(lab.made.parent) not in path.read_text(), path
    assert "path: BOOKS\n" in (lab.made / "config.yaml").read_text()


def test_the_report_reads_what_was_collected(lab, tmp_path):
    take_folders(lab.made.parent, tmp_path)
    (tmp_path / "tiny/whole").rename(tmp_path / "50k")
    text = write_report(tmp_path, tmp_path / "out").read_text(encoding="utf-8")
    assert (
        f"| validation | 256 | {lab.row['val_windows']} | {lab.row['val_bits_per_byte']:.4f} |"
        in text
    )
    assert f"with their starts | {lab.row['tokens_per_s_processes']:,.0f} |" in text
    (inspected,) = json.loads((lab.made / "inspect-512.json").read_text())["layers"][1:]
    gates = [f"{inspected['gates'][branch]['mean']:.3f}" for branch in ("cmp", "slc", "win")]
    assert f"| 1 | {' | '.join(gates)} |" in text
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == {
        *("50k-loss.png", "50k-layers.png")
    }


# ------------------------------------------------------------------- scheduling, without training
PROGRAM = """
import os, pathlib, signal, sys, time
out = pathlib.Path(os.environ["PYTHONPATH"].split(os.pathsep)[1])
gpu, name = os.environ["CUDA_VISIBLE_DEVICES"], sys.argv[1]
(out / f"{name}-on-{gpu}").touch()
if name == "waits":
    time.sleep(60)
end = time.monotonic() + 30
while name in ("a", "b") and len([*out.glob("[ab]-on-*")]) < 2 and time.monotonic() < end:
    time.sleep(0.01)
sys.exit(len([*out.glob("[ab]-on-*")]) + 2)
"""


@pytest.fixture
def run_fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs experiments by name with a program that stands for ``nsa train``."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def words(out: Path, command: str, *rest: str) -> list[str]:
        return [sys.executable, str(program), *rest]

    monkeypatch.setattr(training, "nsa", words)

    def run(names: str, gpus: str) -> int:
        chosen = [Experiment(name, "nsa", name, (), 1) for name in names.split()]
        times = {"leg_s": 0.0, "until_s": 60.0}
        return run_all(chosen, tmp_path, tmp_path / "out", gpus.split(), commit="x", **times)

    return run


def test_two_experiments_run_at_a_time_on_two_gpus(run_fakes, tmp_path, capsys):
    assert run_fakes("a b c", "3 5") == 1
    said = capsys.readouterr().out
    begun = re.findall(r"^([ab]): begins on GPU (\d)", said, re.M)
    assert sorted(gpu for _, gpu in begun) == ["3", "5"]
    assert sorted(name for name, _ in begun) == ["a", "b"]
    seen = {path.name for path in tmp_path.glob("[ab]-on-*")}
    assert seen == {f"{name}-on-{gpu}" for name, gpu in begun}
    assert said.count("FAILED: nsa train: exit code 4") == 3  # each has seen that both began
    assert "failed: a b c" in said


def test_a_bug_in_one_does_not_stop_the_next(run_fakes, monkeypatch, capsys):
    run_one = run_all.__globals__["run_experiment"]

    def with_bug(experiment: Experiment, *others: Any) -> list[str]:
        assert experiment.name != "bug"
        return run_one(experiment, *others)

    monkeypatch.setattr("tools.evidence.run.run_experiment", with_bug)
    assert run_fakes("bug c", "0") == 1
    said = capsys.readouterr()
    assert "c: FAILED: nsa train: exit code 2" in said.out
    assert "failed: bug c" in said.out
    assert "AssertionError" in said.err


def test_an_interrupt_ends_what_runs_and_begins_nothing(run_fakes, tmp_path):
    def interrupt() -> None:
        while not (tmp_path / "waits-on-0").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    # What a shell starts in the background ignores SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    sender = threading.Thread(target=interrupt)
    sender.start()
    begin = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_fakes("waits c", "0")
    finally:
        signal.signal(signal.SIGINT, before)
    sender.join()
    assert time.monotonic() - begin < 50
    assert not [*tmp_path.glob("c-on-*")]


# ------------------------------------------------------------------------------- the experiments
def settings_of(experiment: Experiment) -> Any:
    config, *words = shlex.split(experiment.train)
    names = [word.removeprefix("--").replace("-", "_") for word in words[::2]]
    return load_config(config, dict(zip(names, words[1::2], strict=True)))


def test_experiments_are_those_that_are_compared():
    known = {experiment.name: experiment for experiment in EXPERIMENTS}
    assert len(known) == len(EXPERIMENTS) == 49
    configs = {name: settings_of(experiment) for name, experiment in known.items()}
    for name, config in (("50k", "78m"), ("50k_shared", "78m-shared")):
        shipped = configs.pop(name)
        assert known[name].in_legs
        expected = dataclasses.replace(load_config(config), micro_batch=4, accumulation=1)
        assert dataclasses.replace(shipped, data=expected.data) == expected
    for name, config in configs.items():
        group, _, rest = name.partition("-")
        tokens, step, length = {
            **dict.fromkeys(("rates", "muon_rates"), (30_007_296, 8192, 2048)),
            **dict.fromkeys(("2k", "muon"), (200_007_680, 8192, 2048)),
            "200m": (200_015_872, 65_536, 2048),
            "muon_long": (200_007_680, 8192, 8192),
            "8k": (100_007_936, 65_536, 8192),
        }[group]
        assert config.steps * config.global_batch * config.seq_len == tokens
        assert (config.global_batch * config.seq_len, config.seq_len) == (step, length)
        assert config.eval_windows == (128 if length == 8192 else 512)
        is_dense = "dense" in name
        assert config.model.attention == ("dense" if is_dense else "nsa")
        wide = 3344 if is_dense and "small" not in name else 3072
        is_shared = "shared" in name
        assert config.model.mlp_hidden_size == (3328 if is_shared else wide)
        assert config.model.nsa.share_kv == is_shared
        assert config.model.nsa.gate_bias == 2 * is_shared
        *_, last = rest.partition("-")
        seed = int(name.rpartition("-")[2]) if group in ("2k", "muon", "200m") else 1337
        assert config.seed == seed
        assert config.checkpoint_every == 0
        is_muon = group.startswith("muon")
        assert config.optim.name == ("muon" if is_muon else "adamw")
        assert config.optim.weight_decay == (0.1 if is_muon else 0.01)
        if group == "rates":
            assert config.optim.lr == float(rest.partition("-")[2])
        elif is_muon:
            swept = last if group == "muon_rates" else MUON_RATES[known[name].model]
            assert (config.optim.muon_lr, config.optim.lr) == (float(swept), 4e-4)
        elif step == 65_536:
            assert config.optim.lr == (7e-4 if is_dense else 5e-4)
    for start in ("2k-shared", "2k-dense", "muon-shared", "muon-dense", "muon-small-dense"):
        seeds = [name for name in configs if name.startswith(f"{start}-")]
        assert seeds == [f"{start}-{seed}" for seed in (1337, 1338, 1339)]


def test_commands_of_the_experiments_are_taken():
    for experiment in EXPERIMENTS:
        texts = [f"train {experiment.train} --run-dir runs/x"]
        texts += [command.text.format(run="RUN", folder="x") for command in experiment.afterwards]
        for text in texts:
            check_command(shlex.split(text))
        outputs = [command.output for command in experiment.afterwards]
        assert len(outputs) == len({*outputs})
    assert 90 <= len(experiments.PROMPT) <= 110


def test_mistakes_are_named(tmp_path, capsys):
    given = ["run", "--data", str(tmp_path), "--out", str(tmp_path / "out")]
    assert command_line.main([*given, "--only", "51k"]) == 2
    assert "--only must name some of 50k, 50k_shared, rates-shared-2e-4" in capsys.readouterr().err
    assert command_line.main(given) == 2
    assert "--data must be a folder made by nsa data prepare" in capsys.readouterr().err
    with pytest.raises(UserError, match="OUT must hold a finished experiment"):
        command_line.take(tmp_path)
