"""The command line, most of it in this process: what it does, what it refuses, how it ends."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa import cli
from nsa.train.load import load_config, settings
from nsa.train.telemetry.metrics import read_metrics
from tests.train.cases import contents

ROOT = Path(__file__).resolve().parents[2]
TINY = """
model:
  width: 32
  num_layers: 1
  mlp_hidden_size: 32
  nsa: {num_heads: 2, num_kv_heads: 1, head_dim: 16, value_dim: 16, compress_block_size: 8, compress_stride: 4, block_size: 16,
        num_selected_blocks: 4, window_size: 32}
data: {source: folder, path: TEXTS}
optim: {warmup_steps: 1}
steps: 4
seq_len: 64
micro_batch: 1
accumulation: 1
global_batch: 1
compute_dtype: fp32
log_every: 1
eval_every: 2
eval_windows: 2
checkpoint_every: 2
sample_tokens: 4
"""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(10):
        (texts / f"{number}.txt").write_text(f"the {number} quick brown foxes jump over the lazy dog; " * 20)
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY.replace("TEXTS", str(texts)))
    return path


def run_nsa(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nsa", *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def refusal(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """The one line that a mistake ends in."""
    assert cli.main([str(word) for word in words]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert re.match(r"nsa( \w+)*: ", said.err)
    return said.err


# -------------------------------------------------------------------------------------------------- whole commands


def test_train_eval_generate_and_resume(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "tiny.yaml", "--optim.lr", "0.003", "--optim.warmup_steps=2"]) == 0
    said = capsys.readouterr().out
    folder = tiny.parent / "runs" / "tiny-1"
    expected = {
        "config.yaml", "environment.json", "metrics.jsonl", "metrics.csv", "tensorboard", "checkpoints", "tokenizer.json",
        "loss.png", "sample.txt", "log.txt", "events.jsonl", "stacks",
    }  # fmt: skip
    assert {path.name for path in folder.iterdir()} == expected
    assert load_config(folder / "config.yaml") == load_config(tiny, {"optim.lr": "0.003", "optim.warmup_steps": "2"})
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert ["val_bits_per_byte" in row for row in rows] == [False, True, False, True]
    assert f"nsa eval {Path('runs') / 'tiny-1'}" in said
    assert "step 4/4 | loss" in (folder / "log.txt").read_text()

    assert cli.main(["eval", "runs/tiny-1", "--windows", "2"]) == 0
    said = capsys.readouterr().out
    measured = float(said.partition("bits per byte: ")[2].split()[0])
    assert measured == pytest.approx(float(rows[-1]["val_bits_per_byte"]), abs=1e-4)
    assert "bigram baseline: " in said
    assert "validation: 2 of" in said

    generate = ["generate", "runs/tiny-1", "--prompt", "the quick", "--max-new-tokens", "8", "--seed", "3"]
    assert cli.main(generate) == 0
    first = capsys.readouterr().out
    assert first.startswith("the quick")
    assert len(first) > len("the quick\n")
    assert cli.main([*generate, "--prompt", "zz"]) == 0
    both = capsys.readouterr().out
    assert both.startswith(f"--- prompt 1\n{first}--- prompt 2\nzz")

    assert cli.main(["train", "--resume", "runs/tiny-1", "--log-every", "2"]) == 0
    launches = json.loads((folder / "environment.json").read_text())["launches"]
    assert [launch["resumed_from_step"] for launch in launches] == [None, 4]
    assert launches[1]["overrides"] == {"log_every": "2"}
    assert cli.main(["train", "tiny.yaml", "--steps", "2"]) == 0
    assert (tiny.parent / "runs" / "tiny-2").is_dir()
    assert "must not exist yet" in refusal(capsys, "train", "tiny.yaml", "--run-dir", "runs/tiny-1")


def test_a_run_is_extended_and_goes_on_as_long_as_it_was_extended_to(tiny: Path) -> None:
    run = ["--run-dir", "run", "--sample-tokens", "0"]
    assert cli.main(["train", "tiny.yaml", *run]) == 0
    assert cli.main(["train", "--resume", "run", "--steps", "6", "--log-every", "2"]) == 0
    assert read_metrics(Path("run/metrics.jsonl"))[-1]["step"] == 6
    assert cli.main(["train", "--resume", "run"]) == 0, "a resumption that says nothing of steps leaves the extension"
    assert read_metrics(Path("run/metrics.jsonl"))[-1]["step"] == 6
    assert cli.main(["train", "--resume", "run", "--steps", "7"]) == 0
    assert read_metrics(Path("run/metrics.jsonl"))[-1]["step"] == 7


def test_a_run_begins_with_a_checkpoint_of_another(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quiet = ["--sample-tokens", "0", "--steps", "2", "--eval-every", "0", "--log-every", "1"]
    assert cli.main(["train", "tiny.yaml", "--run-dir", "a", "--sample-tokens", "0"]) == 0
    first = float(read_metrics(Path("a/metrics.jsonl"))[0]["loss_nats"])
    for which in ("last", "2"):
        new = ["--run-dir", f"from-{which}", "--init-from", "a", "--checkpoint", which]
        assert cli.main(["train", "tiny.yaml", *new, *quiet]) == 0
        assert float(read_metrics(Path(f"from-{which}/metrics.jsonl"))[0]["loss_nats"]) < first
        (launch,) = json.loads(Path(f"from-{which}/environment.json").read_text())["launches"]
        assert launch["init_from"].endswith({"last": "step-00000004", "2": "step-00000002"}[which])
    capsys.readouterr()
    new = ["train", "tiny.yaml", "--run-dir", "b", "--init-from"]
    assert "be last, best or one of 2, 4, got 3" in refusal(capsys, *new, "a", "--checkpoint", "3")
    assert "be a folder that a run made" in refusal(capsys, *new, "nothing")
    assert "--init-from must hold model." in refusal(capsys, *new, "a", "--model.width", "64")
    assert "--init-from must be left out with --resume" in refusal(capsys, "train", "--resume", "a", "--init-from", "a")
    assert "--checkpoint must be given with --init-from" in refusal(capsys, "train", "tiny.yaml", "--checkpoint", "best")
    assert not Path("b").exists()


def test_a_refused_command_leaves_no_trace_in_a_run(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "tiny.yaml", "--run-dir", "run", "--sample-tokens", "0"]) == 0
    capsys.readouterr()
    before = contents(Path("run"))
    resume = ["train", "--resume", "run"]
    assert "optim.lr must stay" in refusal(capsys, *resume, "--optim.lr", "1")
    assert "steps must be at least those done" in refusal(capsys, *resume, "--steps", "3")
    assert "cuda_graphs must be false on a CPU" in refusal(capsys, *resume, "--device", "cpu", "--cuda-graphs", "true")
    assert "global_batch must equal" in refusal(capsys, *resume, "--micro-batch", "2")
    assert "must not exist yet" in refusal(capsys, "train", "tiny.yaml", "--run-dir", "run")
    text = next(tiny.parent.glob("texts/*"))
    kept = text.read_text()
    text.write_text("a text that has changed")
    assert "The text has changed since" in refusal(capsys, *resume)
    assert "may have been trained on" in refusal(capsys, "eval", "run")
    text.write_text(kept)
    assert contents(Path("run")) == before
    tensors = Path("run/checkpoints/step-00000004/tensors.safetensors")
    damaged = tensors.read_bytes()[:-8]
    tensors.write_bytes(damaged)
    assert "undamaged checkpoint" in refusal(capsys, *resume)
    assert contents(Path("run")) == {**before, str(tensors.relative_to("run")): damaged}
    shutil.rmtree(tensors.parent)
    assert cli.main(resume) == 0
    said = [json.loads(line)["kind"] for line in Path("run/events.jsonl").read_text().splitlines()]
    assert said.count("start") == 2, "a resumption that is not refused is told from its beginning"
    assert "resume" in said


def test_a_bug_in_a_resumption_is_in_the_log(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["train", "tiny.yaml", "--run-dir", "run", "--sample-tokens", "0"]) == 0

    def bug(*args: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("nsa.train.trainer.check_same_data", bug)
    with pytest.raises(ZeroDivisionError):
        cli.main(["train", "--resume", "run"])
    log = Path("run/log.txt").read_text()
    assert log.count("run folder: run") == 2
    assert "ended by ZeroDivisionError: a bug" in log


def test_settings_of_the_device_are_refused_before_the_data_are_read(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*args: object, **kwargs: object) -> None:
        raise AssertionError("the data were read")

    monkeypatch.setattr("nsa.train.trainer.open_data", read)
    words = ["train", "tiny.yaml", "--device", "cpu"]
    assert "cuda_graphs must be false on a CPU" in refusal(capsys, *words, "--cuda-graphs", "true")
    assert "allocator must be default on a CPU" in refusal(capsys, *words, "--allocator", "expandable_segments")
    assert "not be operators with attention nsa" in refusal(capsys, *words, "--checkpointing.policy", "operators")


def test_eval_takes_a_checkpoint_and_any_text_and_prints_json(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["train", "tiny.yaml", "--run-dir", "run", "--sample-tokens", "0"]) == 0
    capsys.readouterr()

    def figures(*words: str) -> dict[str, Any]:
        assert cli.main(["eval", "run", "--json", *words]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    held_out = figures()
    rows = {int(row["step"]): row for row in read_metrics(Path("run/metrics.jsonl"))}
    assert (held_out["step"], held_out["text"], held_out["run"]) == (4, "folder", "run")
    assert {"bigram_bits_per_byte", "loss_nats", "num_bytes", "windows_available", "device"} <= set(held_out)
    for which in ("2", "4"):
        found = figures("--checkpoint", which, "--windows", "2")
        assert found["step"] == int(which)
        assert found["bits_per_byte"] == pytest.approx(rows[int(which)]["val_bits_per_byte"], rel=1e-6)
    best = figures("--checkpoint", "best")["step"]
    assert rows[best]["val_bits_per_byte"] == min(row["val_bits_per_byte"] for row in rows.values() if "val_loss_nats" in row)

    text = "the 3 quick brown foxes; " * 11
    Path("letter.txt").write_text(text)
    of_file = figures("--text", "letter.txt")
    assert of_file["num_bytes"] == len(text) - 1, "the last window is shorter, and the first byte is nobody's target"
    assert of_file["windows"] == of_file["windows_available"] == -(-len(text) // 64)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
    piped = figures("--text", "-")
    assert (piped["bits_per_byte"], piped["text"]) == (of_file["bits_per_byte"], "standard input")
    assert figures("--text", "texts")["windows"] > 10
    assert figures("--text", "letter.txt", "--windows", "1")["num_bytes"] == 64
    Path("short.txt").write_text("ab")
    assert figures("--text", "short.txt")["num_bytes"] == 1
    shutil.rmtree("texts")
    assert cli.main(["eval", "run", "--text", "letter.txt"]) == 0, "the run's own text is not needed for another"
    assert "bits per byte: " in capsys.readouterr().out

    for path, content in (("binary", b"a\0b"), ("latin", "\u00e9".encode("latin-1")), ("empty", b""), ("one", b"a")):
        Path(path).write_bytes(content)
        assert refusal(capsys, "eval", "run", "--text", path).startswith("nsa: eval: --text must hold")
    assert "--text must name an existing file" in refusal(capsys, "eval", "run", "--text", "nowhere")
    for command in (["eval", "run"], ["generate", "run", "--prompt", "a"]):
        said = refusal(capsys, *command, "--checkpoint", "3")
        assert said == f"nsa: {command[0]}: --checkpoint must be last, best or one of 2, 4, got 3.\n"


def test_generate_takes_a_checkpoint_and_reads_standard_input(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["train", "tiny.yaml", "--run-dir", "run", "--sample-tokens", "0", "--optim.lr", "0.05"]) == 0
    capsys.readouterr()

    def text(*words: str, piped: bytes = b"") -> str:
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(piped)))
        assert cli.main(["generate", "run", "--max-new-tokens", "24", "--seed", "1", *words]) == 0
        return capsys.readouterr().out

    said = text("--prompt", "the quick")
    assert text("--prompt", "-", piped=b"the quick") == said
    assert text("--prompt", "the quick", "--checkpoint", "4") == said
    assert text("--prompt", "the quick", "--checkpoint", "2") != said
    assert "be - once" in refusal(capsys, "generate", "run", "--prompt", "-", "--prompt", "-")
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"\xff")))
    assert "standard input must be text in UTF-8" in refusal(capsys, "generate", "run", "--prompt", "-")


def test_a_synthetic_task_is_measured_against_what_is_possible(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--data.source", "uniform", "--data.path", "null", "--steps", "2", "--run-dir", "run", "--sample-tokens", "0"]
    assert cli.main(["train", str(tiny), *words]) == 0
    assert cli.main(["eval", "run", "--windows", "1"]) == 0
    said = capsys.readouterr().out
    assert "lowest possible loss: 5.5452 nats per token" in said
    assert "bigram" not in said
    assert "--text must be left out for this run" in refusal(capsys, "eval", "run", "--text", str(tiny))


def test_ctrl_c_leaves_a_checkpoint_and_the_run_goes_on(tiny: Path) -> None:
    folder = tiny.parent / "run"
    words = ["train", tiny, "--run-dir", folder, "--steps", "100000", "--checkpoint-every", "0", "--eval-every", "0"]
    with (tiny.parent / "said").open("w") as said:
        command = [sys.executable, "-m", "nsa", *map(str, words)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=said)
        deadline = time.monotonic() + 60
        while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").read_text().count("\n") > 2:
            assert time.monotonic() < deadline
            assert process.poll() is None, (tiny.parent / "said").read_text()
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT
    text = (tiny.parent / "said").read_text()
    assert "Traceback" not in text
    assert f"nsa train --resume {folder}" in text
    (checkpoint,) = (folder / "checkpoints").iterdir()
    last = read_metrics(folder / "metrics.jsonl")[-1]["step"]
    assert checkpoint.name == f"step-{last:08d}"
    assert (folder / "loss.png").exists()


def test_the_command_outside_this_process(tiny: Path) -> None:
    shown = run_nsa("--help", cwd=ROOT)
    assert shown.returncode == 0
    assert all(name in shown.stdout for name in ("train", "eval", "generate", "doctor"))
    wrong = run_nsa("train", tiny, "--optim.lrr", "1", cwd=ROOT)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "nsa train: unrecognized arguments: --optim.lrr; did you mean --optim.lr?\n"


AT_ONCE_S = 0.5  # of a core, because other tests run beside this one
AT_ONCE = (["--help"], ["trian"], ["--version"], ["train", "--optim.lrr", "1"], ["train", "--help"], ["eval"], ["configs"])
MISTYPED = (
    ["train", "seeed"],
    ["train", "none.yaml"],
    ["train", "--resume", "none"],
    ["profile", "seeed"],
    ["eval", "none"],
    ["generate", "none", "--prompt", "a"],
)


def used_by_children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("words", AT_ONCE + MISTYPED, ids=" ".join)
def test_words_that_compute_nothing_are_answered_at_once(words: list[str]) -> None:
    """Without PyTorch."""
    before = used_by_children_s()
    assert run_nsa(*words, cwd=ROOT).returncode in (0, 2)
    assert used_by_children_s() - before < AT_ONCE_S
    code = (
        "import contextlib, json, sys\nfrom nsa import cli\n"
        "with contextlib.suppress(SystemExit): cli.main(json.loads(sys.argv[1]))\n"
        "print(json.dumps([*sys.modules]), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, json.dumps(words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    loaded = {name.partition(".")[0] for name in json.loads(done.stderr.splitlines()[-1])}
    assert not loaded & {"torch", "numpy", "tensorboard", "matplotlib", "rich", "tokenizers", "tiktoken", "triton"}
    assert "nsa" in loaded


def test_a_reader_that_leaves_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "nsa", "--version"]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


# -------------------------------------------------------------------------------------------------- help


def test_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("nsa 0.")


@pytest.mark.parametrize("command", ["train", "eval", "generate", "doctor"])
def test_help_of_each_command_explains_every_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([command, "--help"])
    assert left.value.code == 0
    commands = cli._parsers().commands
    cli._add_settings(commands["train"])
    said = capsys.readouterr().out
    for action in commands[command]._actions:
        assert action.help, action.dest
        assert (action.option_strings[-1] if action.option_strings else str(action.metavar)) in said
    if command == "train":
        assert all(f"--{setting.name.replace('_', '-')} VALUE" in said for setting in settings())
    assert "``" not in said


# -------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["trian"], "nsa: unrecognized command: trian; did you mean train?"),
        (["generat", "x"], "did you mean generate?"),
        (["--verson"], "nsa: unrecognized arguments: --verson; did you mean --version?"),
        (["train", "tiny.yaml", "--lr", "3"], "nsa train: unrecognized arguments: --lr; did you mean --optim.lr?"),
        (["train", "--modle.nsa.window-size=4", "tiny.yaml"], "; did you mean --model.nsa.window-size?"),
        (["train", "--resum", "x"], "; did you mean --resume?"),
        (["train", "tiny.yaml", "extra"], "nsa train: unrecognized arguments: extra"),
        (["train", "tiny.yaml", "-x"], "nsa train: unrecognized arguments: -x"),
        (["train"], "CONFIG must be given"),
        (["train", "tiny.yaml", "--steps"], "nsa train: argument --steps: expected one argument"),
        (["train", "tiny.yaml", "--steps", "1", "--steps", "2"], "nsa train: argument --steps: given twice"),
        (["train", "tiny.yaml", "--steps", "some"], "--steps: steps must be an integer, got some."),
        (["train", "tiny.yaml", "--opt", "3"], "unrecognized arguments: --opt"),
        (["train", "tiny.yml"], "The nearest is tiny.yaml."),
        (["train", "tiny.yaml", "--data.path", "nowhere"], "nowhere"),
        (["train", "tiny.yaml", "--model.vocab-size", "300"], "model.vocab_size must equal the tokenizer's"),
        (["train", "tiny.yaml", "--resume", "x"], "CONFIG must be left out with --resume"),
        (["train", "--resume", "x", "--run-dir", "y"], "--run-dir must be left out with --resume"),
        (["train", "--resume", "runs/none"], "be a folder that a run made"),
        (["eval"], "nsa eval: the following arguments are required: RUN"),
        (["eval", "runs/none"], "be a folder that a run made"),
        (["eval", "x", "--device", "tpu"], "invalid choice: 'tpu'"),
        (["eval", "x", "--optim.lr", "1"], "unrecognized arguments: --optim.lr"),
        (["generate", "x"], "required: --prompt"),
        (["generate", "x", "--prompt", "a", "--top-k", "many"], "--top-k: invalid int value: 'many'"),
        (["generate", "x", "--prompt", "a", "--topk", "4"], "; did you mean --top-k?"),
        (["generate", "x", "--prompt", "a", "--seed", "1", "--seed", "2"], "argument --seed: given twice"),
        (["doctor", "now"], "nsa doctor: unrecognized arguments: now"),
        (["configs", "--zzzzzz"], "nsa configs: unrecognized arguments: --zzzzzz\n"),
        (["plan", "tiny.yaml", "--mfu", "-1"], "nsa plan: --mfu must be positive"),
    ],
)  # fmt: skip
def test_mistakes_end_in_one_line_that_helps(
    tiny: Path, capsys: pytest.CaptureFixture[str], words: list[str], answer: str
) -> None:
    assert answer in refusal(capsys, *words)
    assert not list(tiny.parent.glob("runs/*")), "a refused run left a folder"


def test_a_run_without_a_checkpoint_or_with_other_data_is_refused(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(tiny), "--run-dir", "run", "--steps", "2"]) == 0
    capsys.readouterr()
    assert "prompts must hold at least one token" in refusal(capsys, "generate", "run", "--prompt", "")
    assert "temperature must be at least 0" in refusal(capsys, "generate", "run", "--prompt", "a", "--temperature", "-1")
    assert "--windows must be positive" in refusal(capsys, "eval", "run", "--windows", "0")
    assert "optim.lr must stay" in refusal(capsys, "train", "--resume", "run", "--optim.lr", "1")
    assert Path("run/config.yaml").exists(), "a refused resumption removed the run"
    (tiny.parent / "texts" / "new.txt").write_text("text that the run has not seen " * 30)
    assert "may have been trained on" in refusal(capsys, "eval", "run")
    for checkpoint in Path("run/checkpoints").iterdir():
        checkpoint.rename(tiny.parent / checkpoint.name)
    assert "checkpoint" in refusal(capsys, "eval", "run")
    assert "checkpoint" in refusal(capsys, "generate", "run", "--prompt", "a")


def test_nothing_said_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: nsa" in capsys.readouterr().out


# -------------------------------------------------------------------------------------------------- other endings


def raising(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def command(words: list[str]) -> int:
        raise error

    monkeypatch.setattr(cli, "_dispatch", command)


def test_surroundings_end_in_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    raising(OSError(errno.ENOSPC, "No space left on device", "runs/x"), monkeypatch)
    assert refusal(capsys, "train") == "nsa: No space left on device: runs/x\n"


def test_too_little_gpu_memory_anywhere(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In commands that know no better; see test_out_of_memory.py for those that do."""
    raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), monkeypatch)
    said = "out of memory; 20.00 MiB more were asked for"
    assert refusal(capsys, "doctor") == f"nsa: {said}. Take fewer or shorter sequences at a time.\n"


def test_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (ValueError("a bug"), FileNotFoundError(errno.ENOENT, "a bug"), RuntimeError("a bug")):
        raising(error, monkeypatch)
        with pytest.raises(type(error), match="a bug"):
            cli.main([])


def test_ctrl_c_outside_of_training_is_quiet(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    raising(KeyboardInterrupt(), monkeypatch)
    assert cli.main(["generate"]) == 130
    assert capsys.readouterr().err == "nsa: interrupted\n"
