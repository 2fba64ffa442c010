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
from examples import generate, nanogpt
from nsa import NSACache

ROOT = Path(__file__).resolve().parents[1]


def test_nanogpt_learns_and_generates(tmp_path: Path) -> None:
    path = str(tmp_path / "nanogpt.pt")
    assert nanogpt.main(steps=15, path=path) < 4.5  # ln 256 is 5.5
    text = generate.main(path, num_tokens=5)
    assert text.startswith("HAMLET. ")
    model = nanogpt.GPT()
    tokens = torch.randint(256, (1, 40))
    cache = NSACache(nanogpt.CONFIG, len(model.blocks), max_tokens=40)
    parts = [model(part, cache) for part in tokens.split((38, 1, 1), dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), rtol=1e-4, atol=1e-5)


def test_llama_is_dense_up_to_the_selected_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    from examples import llama  # transformers takes seconds to import

    llama.main()
    assert capsys.readouterr().out == "equal for the first 128 of 256 tokens\n"


def test_training_on_own_text(tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("The sea was calm and the letter was long. " * 200)
    small = """--steps 2 --optim.warmup-steps 1 --sample-tokens 0 --model.num-layers 1
        --seq-len 128 --micro-batch 2 --global-batch 2 --eval-windows 1"""
    command = ["sh", str(ROOT / "examples/own_text.sh"), "letters.txt", *small.split()]
    folders = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": folders, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "finished 2 steps" in done.stdout
    assert "bits" in done.stdout
    assert "\nThe " in done.stdout


def test_every_example_is_run_here() -> None:
    names = {path.name for path in (ROOT / "examples").iterdir() if path.is_file()}
    assert names == {"nanogpt.py", "generate.py", "llama.py", "own_text.sh"}


def test_chart_shows_the_committed_rows(tmp_path: Path) -> None:
    """The committed picture holds its numbers; drawing them again stores the same ones."""
    points = json.loads(json.dumps(speedup_chart.speed_ups()))
    assert points["fwd_bwd"]["65536"] > points["fwd"]["65536"] > 2
    speedup_chart.draw(speedup_chart.speed_ups(), tmp_path / "chart.png")
    for path in (speedup_chart.IMAGE, tmp_path / "chart.png"):
        with Image.open(path) as image:
            assert json.loads(image.info["Description"]) == points
