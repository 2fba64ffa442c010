"""Experiments on what models learn: the list, the runner, and the report of the committed rows."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import random
import shlex
import shutil
from dataclasses import replace

import numpy as np
import pytest

from nsa import cli
from nsa.train.data import Origin, PrepareConfig, prepare
from nsa.train.evaluation import Measurement
from nsa.train.load import load_config, to_yaml
from nsa.train.measurements import save_measurement
from tests.cli.test_documented_commands import check_command
from tests.train.cases import tiny_config
from tools import evidence
from tools.evidence import ROOT, Experiment, experiments
from tools.evidence_report import by_model, chance, read_group, read_json, read_lines, write_report

ROWS = ROOT / "benchmarks/quality"
OF_A_MEASUREMENT = ("run", "step", "split", "text", "tokenizer", "seq_len", "windows")
SETTINGS = "--data.source shards --data.path BOOKS --data.tokenizer byte"

# ------------------------------------------------------------------------------------- experiments


def test_commands_are_taken():
    """Of one seed; the test below loads the configuration of every committed row."""
    one_seed = {(one.group, one.model): one for one in experiments()}.values()
    lines = {f"train {one.train} --run-dir RUN" for one in one_seed}
    texts = (text for one in one_seed for text in one.commands.values())
    lines |= {text.format(run="RUN", folder="FOLDER") for text in texts}
    for line in lines:
        check_command(shlex.split(line))


def test_committed_rows_have_the_settings_of_their_experiments():
    known = {one.folder: one for one in experiments()}
    rows = [*ROWS.glob("**/row.json")]
    assert len(rows) > 40
    for path in rows:
        row, one = read_json(path), known[str(path.parent.relative_to(ROWS))]
        name, *words = shlex.split(one.train)
        given = {
            word[2:].replace("-", "_"): x for word, x in zip(words[::2], words[1::2], strict=True)
        }
        config = load_config(name, given)
        optim = config.optim
        lr = optim.muon_lr if optim.name == "muon" else optim.lr
        found = (one.group, one.model, lr, optim.warmup_steps, config.steps, config.seq_len)
        assert found == tuple(
            row[x] for x in ("experiment", "model", "lr", "warmup_steps", "steps", "seq_len")
        ), path
        assert (config.global_batch, config.seed) == (row["global_batch"], row["seed"]), path
        assert config.model.mlp_hidden_size == row["mlp_hidden_size"], path


# ------------------------------------------------------------------------------------------ runner


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """Folder with books and a tiny configuration, in which ``nsa`` runs in this process."""
    rng, texts = random.Random(0), tmp_path / "texts"
    texts.mkdir()
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(50)]
    for number in range(24):
        (texts / f"{number}.txt").write_text(" ".join(rng.choices(words, k=400)))
    config = PrepareConfig(Origin(str(texts)), "byte", validation_fraction=0.2, test_fraction=0.2)
    prepare(config, tmp_path / "books", workers=1)
    tiny = tiny_config(tmp_path, steps=4, log_every=1, eval_every=2, sample_tokens=4)
    (tmp_path / "tiny.yaml").write_text(to_yaml(tiny), encoding="utf-8")

    def in_this_process(words, out, log):
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file, contextlib.chdir(out), contextlib.redirect_stdout(file):
            return cli.main([*words])

    monkeypatch.setattr(evidence, "nsa", in_this_process)
    return tmp_path


def test_experiments_are_trained_resumed_measured_and_collected_once(lab, monkeypatch, capsys):
    tiny = f"{lab}/tiny.yaml {SETTINGS}"
    measured = {
        "test.json": "eval {run} --split test --json --save {folder}/test.npz",
        "repeats.json": "eval {run} --split test --windows 4 --repeat 8 --json",
        "selection.json": "inspect {run} --json",
    }
    commands = {
        "test.json": measured["test.json"],
        "none.json": "eval {run} --checkpoint none --json",
    }
    fails = [
        Experiment("fails", "fails", "nsa", f"{tiny} --model.width -1", {}),
        Experiment("tiny", "tiny/nsa-1", "nsa", f"{tiny} --seed 1", commands),
    ]
    out = lab / "out"
    assert evidence.run_all(fails, lab / "books", out, "c0ffee") == 1
    said = capsys.readouterr().out
    assert "fails: FAILED: nsa train: exit code 2" in said
    assert "tiny/nsa-1: FAILED: nsa eval: exit code 2" in said
    asked = list[list[str]]()
    run = evidence.nsa

    def noted(words, out, log):
        asked.append(words)
        return run(words, out, log)

    monkeypatch.setattr(evidence, "nsa", noted)
    chosen = [replace(fails[1], commands=measured)]
    assert evidence.run_all(chosen, lab / "books", out, "c0ffee") == 0
    assert asked[0] == ["train", "--resume", "runs/tiny-nsa-1"]  # of its last checkpoint
    folder, metrics = out / "rows/tiny/nsa-1", read_lines(out / "runs/tiny-nsa-1/metrics.jsonl")
    files = {path.name for path in folder.iterdir()}
    assert files >= {"row.json", "config.yaml", "environment.json", "loss.png", "sample.txt"}
    assert files >= {"test.json", "test.npz", "metrics.jsonl.gz"}
    row, test = read_json(folder / "row.json"), read_json(folder / "test.json")
    assert row["test_bits_per_byte"] == test["bits_per_byte"]
    assert row["val_bits_per_byte"] == metrics[-1]["val_bits_per_byte"]
    assert (row["experiment"], row["model"], row["seed"]) == ("tiny", "nsa", 1)
    assert (row["steps"], row["tokens"]) == (4, metrics[-1]["tokens"])
    assert (row["commit"], row["gpu"], row["parameters"]) == ("c0ffee", "cpu", test["parameters"])
    assert row.keys() < read_json(ROWS / "muon/nsa-1337/row.json").keys()
    (table,) = by_model(read_group(out / "rows", "tiny"))
    assert table["bits per byte"] == test["bits_per_byte"]
    assert 0 < table["recall"] <= 1
    assert not any(str(ROOT) in path.read_text() for path in folder.glob("*.json"))
    assert evidence.run_all(chosen, lab / "books", out, None) == 0
    assert "tiny/nsa-1: done before" in capsys.readouterr().out


def test_output_of_a_command_is_stored(tmp_path):
    assert evidence.nsa(["--version"], tmp_path, tmp_path / "log") == 0
    assert (tmp_path / "log").read_text().startswith("nsa ")


def test_parts_are_all_of_the_experiments(tmp_path, monkeypatch):
    ran = list[str]()
    monkeypatch.setattr(
        evidence, "run_all", lambda chosen, *_: ran.extend(x.folder for x in chosen)
    )
    words = ["run", "--data", "d", "--out", str(tmp_path), "--only", "long-8k", "--part"]
    for part in ("0/2", "1/2"):
        evidence.main([*words, part])
    assert sorted(ran) == sorted(one.folder for one in experiments() if one.group == "long-8k")
    assert ran[:2] == ["long-8k/long-token-max-1337", "long-8k/long-window-1536-1337"]


def test_unknown_experiments_are_refused(tmp_path, capsys):
    words = ["run", "--data", "d", "--out", str(tmp_path), "--only", "2k", "8k/nsa", "9k"]
    with pytest.raises(SystemExit):
        evidence.main(words)
    assert "--only must name experiments or groups, got 9k" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ report


def write_run(folder, model, seed, bits, *, speed, losses):
    """A measured run of 10 steps with these bits per byte before and after 8,192 tokens."""
    folder /= f"long/{model}-{seed}"
    folder.mkdir(parents=True)
    contexts, about = np.zeros((15, 2, 3)), dict.fromkeys(OF_A_MEASUREMENT, 1)
    contexts[[0, 13]] = [[[x * math.log(2) * 100, 100, 100]] * 2 for x in bits]
    measured = Measurement(contexts.sum(0), np.zeros((16384, 3)), contexts)
    save_measurement(folder / "test.npz", measured, about)
    row = {"model": model, "seed": seed, "parameters": 1, "seq_len": 16384, "tokens_per_s": speed}
    (folder / "row.json").write_text(json.dumps(row))
    metrics = [
        {"step": step, "tokens": 100 * step, "val_bits_per_byte": loss}
        for step, loss in zip((1, 5, 10), losses, strict=True)
    ]
    repeats = [
        {"distance": distance, "first_bits_per_byte": bits[1], "bits_per_byte": 1.0}
        for distance in (1024, 2048, 4096)
    ]
    (folder / "repeats.json").write_text(json.dumps({"repeats": repeats}))
    lines = "".join(json.dumps(one) + "\n" for one in metrics)
    (folder / "metrics.jsonl.gz").write_bytes(gzip.compress(lines.encode()))


def test_table_of_models(tmp_path):
    """Differences, intervals of Student's t with one degree of freedom, and time to one loss."""
    for seed, noise in ((1, 0.01), (2, -0.01)):
        bits = seed + np.array([0.0, 1.0])
        write_run(tmp_path, "long-token-max", seed, bits, speed=400.0, losses=(4, 2.5, 1.5))
        bits += np.array([0.1, 0.5 + noise])
        write_run(tmp_path, "long-dense", seed, bits, speed=100.0, losses=(5, 3.0, 2.0))
    ours, dense = by_model(read_group(tmp_path, "long"))
    assert (ours["bits per byte"], ours["beyond 8,192"]) == pytest.approx((2.0, 2.5))
    said = dense["bits per byte minus long-token-max"], dense["beyond 8,192 minus long-token-max"]
    assert said == ("+0.3000 (+0.2365 to +0.3635)", "+0.5000 (+0.3729 to +0.6271)")
    differences = {
        name: dense[name] for name in dense if name.startswith("gain at") and "minus" in name
    }
    assert differences == {
        f"gain at {far} minus long-token-max": "+0.5000 (+0.3729 to +0.6271)"
        for far in ("2,048", "4,096")
    }
    assert ours["gain at 1,024"] == pytest.approx(1.5)
    assert (ours["time to dense"], dense["time to dense"]) == (0.1875, 1.0)


def test_probability_that_random_blocks_contain_a_needle():
    """Of the layers that select: 2 of 8 as shipped, or all; certain where all blocks are read."""
    shipped = load_config("7m-64k").model
    every = replace(shipped, layers=None)
    for config, length, share in (
        (shipped, 65_536, 0.0500),
        (every, 65_536, 0.1854),
        (shipped, 16_384, 0.1902),
        (shipped, 1024, 1.0),
    ):
        assert chance(config, length) == pytest.approx(share, abs=5e-5)
    assert chance(replace(every, attention="dense"), 65_536) is None


@pytest.mark.parametrize(
    "groups", ["[8rl]*", pytest.param("*", marks=pytest.mark.faults)], ids=["some", "all"]
)
def test_committed_tables_are_made_of_the_committed_rows(tmp_path, groups):
    for path in (path for path in ROWS.glob(groups) if path.is_dir()):
        shutil.copytree(path, tmp_path / path.name)
    write_report(tmp_path)
    committed = {path.name for path in ROWS.glob(f"{groups}.md")} - {"README.md"}
    assert {path.name for path in tmp_path.glob("*.md")} == committed
    for path in tmp_path.glob("*.md"):
        assert path.read_text() == (ROWS / path.name).read_text(), path.name
