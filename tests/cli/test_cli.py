"""The command line, most of it in this process: what it does, what it refuses, how it ends."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from nsa import cli
from nsa.cli.commands import Group
from nsa.errors import option
from nsa.train.load import load_config, settings
from nsa.train.measurements import load_measurement
from nsa.train.telemetry.metrics import read_metrics
from tests.cli.conftest import pipe
from tests.train.cases import contents

ROOT = Path(__file__).resolve().parents[2]

# ------------------------------------------------------------------------------- whole commands


def test_train_eval_generate_and_resume(tiny, nsa, refusal):
    said = nsa("train tiny.yaml --optim.lr 0.003 --optim.warmup_steps=2")
    folder = tiny / "runs/tiny-1"
    files = "checkpoints config.yaml environment.json events.jsonl log.txt loss.png metrics.csv"
    files += " metrics.jsonl sample.txt stacks tensorboard tokenizer.json"
    assert sorted(path.name for path in folder.iterdir()) == files.split()
    expected = load_config("tiny.yaml", {"optim.lr": "0.003", "optim.warmup_steps": "2"})
    assert load_config(folder / "config.yaml") == expected
    rows = read_metrics(folder / "metrics.jsonl")
    evaluated = {row["step"]: "val_bits_per_byte" in row for row in rows}
    assert evaluated == {1: False, 2: True, 3: False, 4: True}
    assert "nsa eval runs/tiny-1" in said
    assert "step 4/4 | loss" in (folder / "log.txt").read_text()

    said = nsa("eval runs/tiny-1 --windows 2")
    assert f"bits per byte: {float(rows[-1]['val_bits_per_byte']):.4f}" in said
    assert "bigram baseline: " in said
    assert "validation: 2 of" in said

    generate = "generate runs/tiny-1 --prompt 'the quick' --max-new-tokens 8 --seed 3"
    first = nsa(generate)
    assert first.startswith("the quick")
    assert len(first) > len("the quick\n")
    assert nsa(f"{generate} --prompt zz").startswith(f"--- prompt 1\n{first}--- prompt 2\nzz")

    nsa("train --resume runs/tiny-1 --log-every 2")
    launches = json.loads((folder / "environment.json").read_text())["launches"]
    assert [launch["resumed_from_step"] for launch in launches] == [None, 4]
    assert launches[1]["overrides"] == {"log_every": "2"}
    assert "must not exist yet" in refusal("train tiny.yaml --run-dir runs/tiny-1")
    best = f"best validation loss: {rows[-1]['val_bits_per_byte']:.4f} bits per byte at step 4\n"
    done = "all 4 steps were done before, none was added\n"
    assert nsa("train --quiet --resume runs/tiny-1 --steps 4") == best + done
    said = nsa("train tiny.yaml --quiet --nonfinite skip --optim.lr 1e30 --steps 2")
    assert "update skipped" in said
    assert said.endswith("finished 2 steps\n")
    assert "step 1/2" not in said
    said = nsa("train tiny.yaml --steps 1 --eval-every 0 --run-dir 'runs/my run'")
    assert "nsa eval 'runs/my run'\n  nsa generate 'runs/my run' --prompt" in said


def test_a_run_is_extended_and_goes_on_as_long_as_it_was_extended_to(run, nsa):
    said = nsa("train --resume run")
    assert "all 4 steps were done before, none was added\nnext:\n" in said
    assert "nsa train --resume run --steps 8" in said
    assert "finished" not in said
    for words, last in (("--steps 6 --log-every 2", 6), ("", 6), ("--steps 7", 7)):
        nsa(f"train --resume run {words}")
        assert read_metrics(run / "metrics.jsonl")[-1]["step"] == last


def test_a_file_or_folder_that_cannot_be_written_is_gone_and_one_line(run, refusal, monkeypatch):
    """A limit on the size of files stands for a disk without room."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python would leave half a file
    commands = {
        "report run": "run/report.html",
        "inspect run --output a.html --record a.npz": "a.html",
        "eval run --save a.npz": "a.npz",
        "data needles a.jsonl": "a.jsonl",
        "train tiny.yaml --run-dir new": "new/environment.json",
    }
    if find_spec("transformers"):
        commands["export run new/model"] = "new/model"
    before = contents(run.parent)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for words, name in commands.items():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            said = refusal(words)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert said == f"nsa: File too large: {name}"
        assert contents(run.parent) == before, words


def test_a_run_begins_with_a_checkpoint_of_another(run, nsa, refusal):
    first = float(read_metrics(run / "metrics.jsonl")[0]["loss_nats"])
    for which, step in (("last", 4), ("2", 2)):
        words = f"--init-from run --checkpoint {which} --sample-tokens 0 --steps 2 --eval-every 0"
        nsa(f"train tiny.yaml --run-dir from-{which} {words}")
        assert float(read_metrics(Path(f"from-{which}/metrics.jsonl"))[0]["loss_nats"]) < first
        (launch,) = json.loads(Path(f"from-{which}/environment.json").read_text())["launches"]
        assert launch["init_from"].endswith(f"step-{step:08d}")
    new = "train tiny.yaml --run-dir b --init-from"
    for words, why in (
        (f"{new} run --checkpoint 3", "be last, best or one of 2, 4, got 3"),
        (f"{new} nothing", "be a folder that a run made"),
        (f"{new} run --model.width 64", "--init-from must contain model."),
        ("train --resume run --init-from run", "--init-from must be left out with --resume"),
        ("train tiny.yaml --checkpoint best", "--checkpoint must be given with --init-from"),
    ):
        assert why in refusal(words)
    assert not Path("b").exists()


def test_a_refused_command_leaves_no_trace_in_a_run(run, nsa, refusal):
    before = contents(run)
    resume = "train --resume run"
    Path("exported").mkdir()
    Path("exported/config.json").write_text("{}")
    for words, why in (
        (f"{resume} --optim.lr 1", "optim.lr must stay"),
        (f"{resume} --steps 3", "steps must be at least those done"),
        ("eval exported", "config.yaml in it), got exported. It is a folder of transformers"),
        (f"{resume} --device cpu --cuda-graphs true", "cuda_graphs must be left at False with"),
        (f"{resume} --micro-batch 2", "global_batch must equal"),
        ("train tiny.yaml --run-dir run", "must not exist yet"),
        ("train tiny.yaml --run-dir ''", "--run-dir must name a folder"),
        ("train tiny.yaml --run-dir 'a\udcff'", "--run-dir must be valid UTF-8, got a\\udcff"),
        ("eval run --text ''", "must name an existing file or folder, got ''"),
        ("report run --output none/a.html", "--output must name a file in an existing folder"),
        ("bench report none.jsonl --out out", "ROWS must be a file or folder of rows that exists"),
    ):
        assert why in refusal(words)
    text = next(run.parent.glob("texts/*"))
    kept = text.read_text()
    text.write_text("a text that has changed")
    assert "The text has changed since" in refusal(resume)
    assert "may have been trained on" in refusal("eval run")
    text.write_text(kept)
    assert contents(run) == before
    tensors = run / "checkpoints/step-00000004/tensors.safetensors"
    damaged = tensors.read_bytes()[:-8]
    tensors.write_bytes(damaged)
    assert "undamaged checkpoint" in refusal(resume)
    assert contents(run) == {**before, str(tensors.relative_to(run)): damaged}
    shutil.rmtree(tensors.parent)
    nsa(resume)
    said = [json.loads(line)["kind"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert said.count("start") == 2, "a resumption that is not refused is told from its beginning"
    assert "resume" in said
    shutil.rmtree(run / "checkpoints")
    for command in (resume, "eval run", "generate run --prompt a"):
        assert "checkpoint" in refusal(command)


def test_a_bug_in_a_resumption_is_in_the_log(run, monkeypatch):
    def bug(*args):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("nsa.train.trainer.check_same_data", bug)
    with pytest.raises(ZeroDivisionError):
        cli.main(["train", "--resume", "run"])
    log = (run / "log.txt").read_text()
    assert log.count("run folder: run") == 2
    assert "ended by ZeroDivisionError: a bug" in log


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--cuda-graphs true", "cuda_graphs must be left at False with device cpu"),
        ("--checkpointing.policy operators", "not be operators with attention nsa"),
    ],
)
def test_settings_of_the_device_are_refused_before_the_data_are_read(
    words, why, tiny, refusal, monkeypatch
):
    def read(*args, **kwargs):
        raise AssertionError("the data were read")

    monkeypatch.setattr("nsa.train.trainer.open_data", read)
    assert why in refusal(f"train tiny.yaml --device cpu {words}")


def test_eval_takes_a_checkpoint_and_prints_json(run, nsa, refusal):
    found = json.loads(nsa("eval run --json"))
    assert (found["step"], found["text"], found["run"]) == (4, "folder", "run")
    rest = {"bigram_bits_per_byte", "loss_nats", "num_bytes", "windows_available", "device"}
    assert rest <= found.keys()
    rows = read_metrics(run / "metrics.jsonl")
    bits = {row["step"]: row["val_bits_per_byte"] for row in rows if "val_loss_nats" in row}
    for step in bits:
        found = json.loads(nsa(f"eval run --json --checkpoint {step} --windows 2"))
        assert found["step"] == step
        assert found["bits_per_byte"] == pytest.approx(bits[step], rel=1e-6)
    best = json.loads(nsa("eval run --json --checkpoint best"))["step"]
    assert bits[best] == min(bits.values())
    for command in ("eval run", "generate run --prompt a"):
        why = "--checkpoint must be last, best or one of 2, 4, got 3."
        assert refusal(f"{command} --checkpoint 3") == f"nsa: {why}"


def test_eval_selects_by_other_scores(tiny, nsa, refusal):
    """The trained weights with a model of these scores; --against keeps those of the training."""
    words = "train tiny.yaml --steps 2 --sample-tokens 0"
    nsa(f"{words} --run-dir whole")
    words += " --model.nsa.branches slc,win --model.nsa.scores token_max"
    nsa(f"{words} --run-dir some")
    nsa(f"{words} --run-dir shared --model.nsa.share-kv true")
    words, found = "eval whole --seq-len 160 --windows 2", {}
    for scores in ("compressed", "token_max", "random"):
        text = nsa(f"{words} --scores {scores} --save {scores}.npz")
        assert f"; blocks selected by scores {scores}\n" in text
        found[scores] = json.loads(nsa(f"{words} --scores {scores} --against whole --json"))
        assert found[scores]["scores"] == scores
        assert (found[scores]["difference_bits_per_byte"] == 0) == (scores == "compressed")
    plain = json.loads(nsa(f"{words} --json"))
    assert plain.items() <= found["compressed"].items()
    assert "scores" not in plain
    assert len({one["bits_per_byte"] for one in found.values()}) == 3
    both = json.loads(nsa("compare random.npz --against compressed.npz --json"))
    assert [both[side][0]["scores"] for side in ("runs", "against")] == ["random", "compressed"]

    passages = [
        json.loads(
            nsa(
                f"eval some {words} --seq-len 160 --windows 1 --repeat 16 --needle --cases 1 --json"
            )
        )
        for words in ("", "--scores random")
    ]
    for name in ("repeats", "needles", "bits_per_byte"):
        assert passages[0][name] != passages[1][name]
    why = "--scores must need no more weights than the trained ones, got compressed. They have"
    assert why in refusal("eval some --scores compressed")
    # Compressed keys are means of those that the model has.
    assert json.loads(nsa("eval shared --scores compressed --json"))["scores"] == "compressed"


def test_eval_takes_any_text(run, nsa, refusal, monkeypatch):
    def measured(words):
        return json.loads(nsa(f"eval run --json --text {words}"))

    text = "the 3 quick brown foxes; " * 11
    Path("letter.txt").write_text(text)
    of_file = measured("letter.txt")
    assert of_file["num_bytes"] == of_file["num_targets"] == len(text)
    assert of_file["windows"] == of_file["windows_available"] == -(-len(text) // 64)
    pipe(monkeypatch, text.encode())
    piped = measured("-")
    assert piped == {**of_file, "text": "standard input"}
    assert measured("texts")["windows"] > 10
    assert measured("letter.txt --windows 1")["num_bytes"] == 64
    Path("short.txt").write_text("ab")
    assert measured("short.txt")["num_bytes"] == 2
    shutil.rmtree("texts")
    assert "bits per byte: " in nsa("eval run --text letter.txt"), "its own text is not needed"

    for content in (b"a\0b", "\u00e9".encode("latin-1"), b"", b"a"):
        Path("odd").write_bytes(content)
        assert refusal("eval run --text odd").startswith("nsa: --text must contain")
    assert "--text must name an existing file" in refusal("eval run --text nowhere")
    assert "--repeat must be left out with --text" in refusal("eval run --text - --repeat 8")


TEST_SPLIT = "--data.test-fraction 0.2 --data.validation-fraction 0.2 --steps 2 --sample-tokens 0"
BPE = "--data.tokenizer bpe --data.bpe-vocab-size 280 --model.vocab-size 280"


def test_eval_compares_runs_on_the_test_split(run, nsa, refusal):
    """Document by document, on the same windows, at another length than the training's."""
    words = f"train tiny.yaml {TEST_SPLIT}"
    nsa(f"{words} --run-dir nsa")
    nsa(f"{words} --run-dir dense --model.attention dense")
    nsa(f"{words} --run-dir bpe {BPE}")
    ours, theirs, both = (
        json.loads(nsa(f"eval {names} --split test --seq-len 96 --json"))
        for names in ("nsa --save a.npz", "dense --save b.npz", "nsa --against dense")
    )
    assert (ours.pop("saved"), theirs.pop("saved")) == ("a.npz", "b.npz")
    difference = both["difference_bits_per_byte"]
    assert difference == pytest.approx(ours["bits_per_byte"] - theirs["bits_per_byte"], rel=1e-9)
    assert both["difference_low"] <= difference <= both["difference_high"]
    assert both["against_positions"] == theirs["positions"]
    assert ours.items() <= both.items()
    assert (both["split"], both["seq_len"], both["against"]) == ("test", 96, "dense")
    assert sum(row["num_targets"] for row in ours["positions"]) == ours["num_targets"]
    assert both["positions"][-1]["last"] <= 96
    repeats = json.loads(nsa("eval nsa --against dense --split test --json --repeat 16"))
    of_dense = json.loads(nsa("eval dense --split test --json --repeat 16"))["repeats"]
    assert repeats["against_repeats"] == of_dense
    assert [row["distance"] for row in of_dense] == [16, 32, 48]
    assert all(row["num_targets"] % 8 == 0 < row["num_targets"] for row in of_dense)
    assert json.loads(nsa("eval nsa --seq-len 96 --json"))["split"] == "validation"
    assert ", 95% interval +0.0000 to +0.0000 over " in nsa("eval nsa --against nsa")
    alone = json.loads(nsa("compare a.npz --against b.npz --json"))
    assert alone.pop("runs")[0]["positions"] == ours["positions"]
    assert alone.pop("against")[0]["bits_per_byte"] == both["against_bits_per_byte"]
    assert alone.items() <= both.items()
    said = nsa("compare a.npz --against b.npz")
    assert "nsa step 2, dense step 2: " in said
    assert f"difference: {difference:+.4f} bits per byte" in said
    for words, why in (
        ("compare a.npz --against b.npz a.npz", "must be as many files as FILES (1), got 2"),
        ("eval nsa --save a.npz", "--save must name a new file"),
        (
            "eval run --split test",
            "--split must be validation for this run, whose data have no test",
        ),
        ("eval run --against nsa", "be a run whose data have the same validation_sha256 ("),
        (
            "eval run --against bpe --text tiny.yaml",
            "be a run whose data have the same tokenizer_fingerprint (",
        ),
        ("eval nsa --split test --text a", "--split must be left out with --text"),
        ("eval nsa --split test --seq-len 99999", "tokens of the test text, got 99999."),
        ("eval run --against nowhere", "--against must be a folder that a run made"),
        ("eval dense --scores random", "be left out for a model that selects no blocks"),
    ):
        assert why in refusal(words)
    assert "no interval: one document" in nsa("eval run --against run --text tiny.yaml")


def test_eval_looks_for_needles_and_repeated_lines(run, nsa, refusal):
    """A model of four steps finds none; rows by length and depth, of each length, and of all."""
    words = "eval run --needle --lengths 120,160 --depths 3 --cases 2 --windows 1"
    both = json.loads(nsa(f"{words} --distractors 0 --against run --save a.npz --json"))
    rows = both["needles"]
    assert both["against_needles"] == rows
    lengths = [120] * 4 + [160] * 4 + [None]
    depths = [0, 0.5, 1, None, 0, 0.5, 1, None, None]
    assert [(row["length"], row["depth"]) for row in rows] == [*zip(lengths, depths, strict=True)]
    assert [row["cases"] for row in rows] == [2, 2, 2, 6, 2, 2, 2, 6, 12]
    logs = [row["log_prob_nats"] for row in rows]
    assert all(-7 * 8 < log < -7 * 2 for log in logs), "seven bytes that are hardly predicted"
    assert load_measurement("a", Path("a.npz"))[1]["needles"] == rows
    short = words.replace(",160", "")
    other = json.loads(nsa(f"{short} --seed 1 --json"))["needles"]
    assert other[0]["log_prob_nats"] != logs[0]
    (total,) = (line for line in nsa(words).splitlines() if line.startswith("needles: 0"))
    assert re.fullmatch(
        r"needles: 0\.0% exact matches \(95% .* 0\.0% to 24\.2%\), -\S+ nats", total
    )
    for words, why in (
        ("--needle", "--lengths must be at least 108 tokens, for needles and question, got 64"),
        ("--needle --lengths 4k", "--lengths must be lengths from 1 to 1,073,741,824 with"),
        ("--depths 3", "--needle must be given with --lengths and the options after it"),
        ("--recall", "seq_len must be at least 128 for recall, got 64"),
        ("--style recall", "--needle must be given with"),
    ):
        assert why in refusal(f"eval run {words}")

    words = "eval run --seq-len 320 --windows 4 --needle --style recall --depths 1 --cases 2"
    both = json.loads(nsa(f"{words} --recall --against run --json"))
    *rows, total = both["recall"]
    assert both["against_recall"] == both["recall"]
    assert (total["cases"], total["exact_match"]) == (sum(row["cases"] for row in rows), 0)
    assert both["needles"][0]["style"] == "recall"
    (line,) = (line for line in nsa(f"{words} --recall").splitlines() if "recall: " in line)
    assert re.match(
        r"recall: 0\.0% exact matches \(95% .*\); by tokens back to the line, from", line
    )


def test_a_synthetic_task_is_measured_against_what_is_possible(tiny, nsa, refusal):
    words = "--data.source uniform --data.path null --steps 2 --run-dir run --sample-tokens 0"
    nsa(f"train tiny.yaml {words}")
    said = nsa("eval run --windows 1")
    assert "lowest possible loss: 5.5452 nats per token" in said
    assert "bigram" not in said
    assert "--text must be left out for this run" in refusal("eval run --text tiny.yaml")
    for word in ("--needle", "--recall"):
        assert f"{word} must be left out for a synthetic task" in refusal(f"eval run {word}")


# ------------------------------------------------------------------------- outside this process

AT_ONCE_S = 0.5  # of a core, because other tests run beside this one
AT_ONCE = (
    "--help",
    "train --optim.lrr 1",
    "train --help",
    "configs",
    "train 78",
    "train --resume none",
    "profile 78",
    "eval none",
    "generate none --prompt a",
)
HEAVY = {"torch", "numpy", "tensorboard", "matplotlib", "rich", "tokenizers", "tiktoken", "triton"}
MAIN = """
import sys
from nsa import cli
try:
    code = cli.main()
finally:
    print(*sys.modules, file=sys.stderr)
sys.exit(code)
"""


def used_by_children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("line", AT_ONCE)
def test_words_that_compute_nothing_are_answered_at_once(line):
    """Without PyTorch, and without pydantic."""
    before = used_by_children_s()
    command = [sys.executable, "-c", MAIN, *line.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert used_by_children_s() - before < AT_ONCE_S
    assert done.returncode in (0, 2)
    loaded = {name.partition(".")[0] for name in done.stderr.splitlines()[-1].split()}
    assert not loaded & (HEAVY | {"pydantic"})
    assert "nsa" in loaded


def test_a_reader_that_leaves_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "nsa", "configs"]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


# ------------------------------------------------------------------------------------------ help


def commands(group: Group, words: str = "") -> Iterator[str]:
    for name, command in group.commands.items():
        if isinstance(command, Group):
            yield from commands(command, f"{words}{name} ")
        else:
            yield f"{words}{name}"


@pytest.mark.parametrize("line", [*commands(cli.COMMANDS)])
def test_help_of_each_command(line, capsys):
    """An argument that its docstring does not describe would be a KeyError."""
    with pytest.raises(SystemExit) as left:
        cli.main([*line.split(), "--help"])
    assert left.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: nsa {line} ")
    assert "`" not in said.partition("options:")[2]
    if line == "train":
        assert all(option(setting.name) in said for setting in settings())
        assert "--optim.name {adamw,muon}" in said
        assert "(default [0.9, 0.999])" in said


def test_nothing_said_shows_the_help(capsys):
    assert cli.main([]) == 2
    assert "usage: nsa" in capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("nsa 0.")


# -------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("trian", "nsa: unrecognized command: trian; did you mean train?"),
        ("--verson", "nsa: unrecognized arguments: --verson; did you mean --version?"),
        ("train tiny.yaml --lr 3", "nsa train: unrecognized arguments: --lr; did you mean --optim"),
        ("train tiny.yaml --set seed=3", "nsa train: unrecognized arguments: --set"),
        ("train tiny.yaml -x", "nsa train: unrecognized arguments: -x"),
        ("eval x --optim.lr 1", "unrecognized arguments: --optim.lr"),
        ("plan --config tiny.yaml", "unrecognized arguments: --config; give CONFIG without"),
        ("train", "CONFIG must be given"),
        ("eval", "nsa eval: the following arguments are required: RUN"),
        ("train tiny.yaml --steps", "nsa train: argument --steps: expected one argument"),
        ("train tiny.yaml --steps 1 --steps 2", "nsa train: argument --steps: given twice"),
        ("train --steps some tiny.yaml", "nsa: steps must be an integer, got 'some'."),
        ("train tiny.yml", "The nearest is tiny.yaml."),
        ("train tiny.yaml --model.vocab-size 300", "model.vocab_size must equal the tokenizer's"),
        (f"train tiny.yaml --micro-batch {10**12}", "seq_len must be at most 2**30 / micro_batch"),
        ("generate x --prompt a --temperature nan", "must lie between -2**63 and 2**63, got nan"),
        (f"bench attention --seqs {10**12}", "--seqs must be lengths from 1 to 1,073,741,824"),
        (f"data needles out --number {10**12}", "number must be from 1 to 1,000,000, got"),
        ("train tiny.yaml --resume x", "CONFIG must be left out with --resume"),
        ("eval x --device tpu", "invalid choice: 'tpu'"),
        ("generate x", "--prompt must be given, or --prompt-file or --interactive, got none"),
        ("generate x --prompt a --interactive", "--interactive must be given without --prompt"),
        ("generate x --prompt a --top-k many", "--top-k: invalid int value: 'many'"),
    ],
)
def test_mistakes_end_in_one_line_that_helps(tiny, refusal, line, answer):
    assert answer in refusal(line)
    assert not list(tiny.glob("runs/*")), "a refused run left a folder"


def test_what_is_like_nothing_gets_no_suggestion(tiny, refusal):
    for name in ("epochs", "optim", "model.nsa.topk"):
        line = f"nsa train: unrecognized arguments: --{name}"
        assert refusal(f"train tiny.yaml --{name} 3") == line


@pytest.mark.parametrize("content", ["", "# width: 64\n", "{}", "model: {nsa: {}}\n"])
def test_a_configuration_without_settings_is_refused(tiny, refusal, content):
    (tiny / "empty.yaml").write_text(content)
    assert "empty.yaml must contain a setting, got none" in refusal("plan empty.yaml")


# ---------------------------------------------------------------------------------- other endings


def raising(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def command(words: list[str]) -> int:
        raise error

    monkeypatch.setattr(cli, "_run", command)


def test_errors_of_the_machine_end_in_one_line(refusal, monkeypatch):
    """Of memory in commands that know no better; see test_out_of_memory.py for those that do."""
    raising(OSError(errno.ENOSPC, "why", "runs/x"), monkeypatch)
    assert refusal("train") == "nsa: why: runs/x"
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    raising(error, monkeypatch)
    said = "out of memory; 20.00 MiB more were asked for"
    assert refusal("doctor") == f"nsa: {said}. Take fewer or shorter sequences at a time."


BUGS = (ValueError("a bug"), OSError(errno.EBADF, "a bug"), RuntimeError("a bug"))


@pytest.mark.parametrize("error", BUGS)
def test_bugs_keep_their_traceback(error, monkeypatch):
    raising(error, monkeypatch)
    with pytest.raises(type(error), match="a bug"):
        cli.main([])


def test_ctrl_c_outside_of_training_is_quiet(capsys, monkeypatch):
    raising(KeyboardInterrupt(), monkeypatch)
    assert cli.main(["generate"]) == 130
    assert capsys.readouterr().err == "nsa: interrupted\n"
