"""The examples run, and the chart of the README shows the committed rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from benchmarks import speedup_chart
from examples import generate, nanogpt, rollout
from nsa import NSACache, cli

ROOT = Path(__file__).resolve().parents[1]


def test_nanogpt_learns_and_generates(tmp_path):
    path = str(tmp_path / "nanogpt.pt")
    assert nanogpt.main(steps=15, path=path) < 4.5  # ln 256 is 5.5
    text = generate.main(path, num_tokens=5)
    assert text.startswith("HAMLET. ")
    model = nanogpt.GPT()
    tokens = torch.randint(256, (1, 40))
    cache = NSACache(nanogpt.CONFIG, len(model.blocks), max_tokens=40)
    parts = [model(part, cache) for part in tokens.split((38, 1, 1), dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), rtol=1e-4, atol=1e-5)


def test_llama_is_dense_up_to_the_selected_tokens(capsys):
    from examples import llama  # transformers takes seconds to import

    llama.main()
    assert capsys.readouterr().out == "equal for the first 128 of 256 tokens\n"


def test_a_converted_model_answers_as_the_dense_one(tmp_path, capsys):
    from transformers import LlamaConfig, LlamaForCausalLM

    from examples import convert
    from nsa.hf.tokenizer import as_transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=256, intermediate_size=128, initializer_range=0.2, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "dense")
    tokenizer = as_transformers({"separator": None, "tokenizer": None})
    tokenizer.save_pretrained(tmp_path / "dense")
    convert.main(str(tmp_path / "dense"))
    said, dense, sparse, same, beyond = capsys.readouterr().out.splitlines()
    assert "llama with 24 blocks of 64" in said
    assert dense.removeprefix("dense: ") == sparse.removeprefix("sparse: ")
    assert dense.startswith("dense: 'The capital of France is")
    assert float(same.rpartition(" ")[2]) < 1e-4 < 1e-2 < float(beyond.rpartition(" ")[2])


def test_the_notebook_runs(capsys):
    """With less text than the stored outputs."""
    notebook = json.loads((ROOT / "examples/one_query.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(x["source"]) for x in notebook["cells"] if x["cell_type"] == "code"]
    exec("\n".join(cells).replace("LENGTH, LAYER = 8192", "LENGTH, LAYER = 1536"), {})
    said = capsys.readouterr().out
    assert "answer '1', the line says '1'" in said
    assert "KV head 0, with the line" in said


def test_training_on_own_text(tmp_path, monkeypatch, capsys):
    """The commands that the shell would start run in this process."""
    monkeypatch.chdir(tmp_path)
    Path("letters.txt").write_text("The sea was calm and the letter was long. " * 200)
    Path("python").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\" end >>words\n")
    Path("python").chmod(0o755)
    small = """--steps 2 --optim.warmup-steps 1 --sample-tokens 0 --model.num-layers 1
        --seq-len 128 --micro-batch 2 --global-batch 2 --eval-windows 1"""
    command = ["sh", str(ROOT / "examples/own_text.sh"), "letters.txt", *small.split()]
    subprocess.run(command, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True)
    commands = Path("words").read_text().split("\nend\n")[:-1]
    for words in commands:
        python, nsa, *rest = words.splitlines()
        assert (python, nsa) == ("-m", "nsa")
        assert cli.main(rest) == 0
    said = capsys.readouterr().out
    assert len(commands) == 3
    assert "finished 2 steps" in said
    assert "bits" in said
    assert "\nThe " in said


PLAN = {"gpus": 1, "tokens_per_s": 1000.0, "gpu_memory_bytes": 10 * 2**30}
ROWS = [
    {"step": n, "loss_nats": 5 - n, "nonfinite_steps": 0, "tokens_per_s": 950.0} for n in (1, 2, 3)
]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"loss_nats": float("nan")}, "the loss does not fall: 4.000, then nan nats"),
        ({"loss_nats": 7}, "the loss does not fall: 4.000, then 5.000 nats"),
        ({"nonfinite_steps": 1}, "1 steps were not finite"),
        ({"tokens_per_s": 840.0}, "895 tokens/s, below 90% of the planned 1,000"),
        ({"memory_reserved_mib": 9500.0}, "9.3 GiB, above 90% of the GPU's memory"),
    ],
)
def test_a_canary_decides(changed, reason):
    rows = [*ROWS[:-1], ROWS[-1] | changed]
    assert rollout.problems(rows, [{"kind": "start", "message": ""}], PLAN) == [reason] * bool(
        reason
    )
    unexpected = [{"kind": "gates", "message": "collapse"}]
    assert rollout.problems(ROWS, unexpected, PLAN) == ["gates: collapse"]


def test_no_go_stops_the_run_with_the_halt_file(tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    lines = "".join(json.dumps({**row, "loss_nats": 3}) + "\n" for row in ROWS)
    (run / "metrics.jsonl").write_text(lines + '{"step": 4')
    monkeypatch.setattr("sys.argv", ["rollout.py", "x", str(run), "--canary", "3", "--seed", "1"])
    monkeypatch.setattr(rollout, "nsa", lambda *_: json.dumps(PLAN))
    monkeypatch.setattr(rollout, "smoke_test", lambda *_: None)
    wait = f"until [ -e {run}/halt ]; do sleep 0.1; done"
    monkeypatch.setattr(rollout, "train", lambda *_: subprocess.Popen(["sh", "-c", wait]))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit, match=r"^no-go: the loss does not fall: 3\.000, then 3\.000"):
        rollout.main()


@pytest.mark.faults
def test_rollout_reaches_production(tmp_path):
    """Doctor, plan, a killed process, canary and the whole run."""
    small = """--steps 40 --canary 40 --log-every 5 --sample-tokens 0 --model.num-layers 1
        --seq-len 128 --micro-batch 2 --global-batch 2 --eval-windows 1"""
    command = [sys.executable, str(ROOT / "examples/rollout.py"), "cpu-small", "runs/a"]
    where = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *small.split()], cwd=tmp_path, env=where, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if not line.startswith("best")]
    canary = "go: canary of 40 steps; runs/a continues"
    assert said[:2] == ["finished 60 steps", "go: smoke test"]
    assert {*said[2:]} == {canary, "finished 40 steps"}  # of two processes, in any order
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a"]


def test_every_example_is_run_here():
    names = {path.name for path in (ROOT / "examples").iterdir() if path.is_file()}
    programs = {"nanogpt.py", "generate.py", "llama.py", "convert.py", "own_text.sh", "rollout.py"}
    assert names == {*programs, "one_query.ipynb"}


def test_chart_shows_the_committed_rows(tmp_path):
    """The committed picture holds its numbers; drawing them again stores the same ones."""
    points = json.loads(json.dumps(speedup_chart.speed_ups()))
    assert points["fwd_bwd"]["65536"] > points["fwd"]["65536"] > 2
    speedup_chart.draw(speedup_chart.speed_ups(), tmp_path / "chart.png")
    for path in (speedup_chart.IMAGE, tmp_path / "chart.png"):
        with Image.open(path) as image:
            assert json.loads(image.info["Description"]) == points
