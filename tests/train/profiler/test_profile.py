"""`nsa profile` on a CPU records a real run, and its rows add up."""

from __future__ import annotations

import functools
import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa import cli, stages
from nsa.train.load import to_yaml
from nsa.train.trainer import Trainer
from tests.train.cases import tiny_config

SHORT = ("--wait", "1", "--warmup", "1", "--active", "2", "--memory", "--log-every", "1")


def profile(tmp_path: Path, *words: str, **changes: Any) -> tuple[int, Path]:
    settings = {"steps": 40, "eval_every": 0, "checkpoint_every": 0, **changes}
    config = tmp_path / "tiny.yaml"
    config.write_text(to_yaml(tiny_config(tmp_path, **settings)))
    run = tmp_path / "run"
    return cli.main(["profile", str(config), "--run-dir", str(run), *words]), run


def named(rows: list[dict[str, Any]], key: str) -> dict[str, dict[str, Any]]:
    return {row[key]: row for row in rows}


def check_mlp(run: Path) -> None:
    mlp = named(json.loads((run / "profile" / "memory.json").read_text()), "name")["layers.0.mlp"]
    # Kept are the MLP's input and two hidden tensors, and its output, which it returns: fp32, 2
    # sequences of 64 tokens.
    assert mlp["kept"] == 4 * 128 * (2 * 64 + 32)
    assert mlp["forward_peak"] >= mlp["kept"]
    assert mlp["backward_peak"] > 0


def test_a_run_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, run = profile(tmp_path, *SHORT)
    assert code == 0
    folder = run / "profile"
    found = json.loads((folder / "stages.json").read_text())
    rows = named(found["stages"], "stage")
    assert (found["device"], found["steps"]) == ("cpu", 2)
    assert sum(row["total_ms"] for row in rows.values()) == pytest.approx(found["step_ms"])
    parts: tuple[str, ...] = (
        stages.PROJECTION,
        stages.COMPRESSION,
        stages.COMPRESSED,
        stages.SELECTION,
    )
    parts += (stages.SELECTED, stages.WINDOW, stages.GATES, stages.MLP, stages.LOSS, stages.REST)
    for stage in (*parts, stages.BACKWARD, stages.OPTIMIZER, stages.TELEMETRY, "idle"):
        assert rows[stage]["total_ms"] > 0, stage
    assert (folder / "stages.txt").read_text() in capsys.readouterr().out
    assert "aten::mm" in (folder / "kernels.txt").read_text()
    # The run ends with the record, after the steps it takes: no checkpoint, and rows of any run.
    assert not list((run / "checkpoints").iterdir())
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 1 + 1 + 2 + 2 + 1))
    check_mlp(run)
    assert "layers.0.mlp" in (folder / "memory.txt").read_text()


def test_memory_of_modules_in_layers_that_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    model = {"num_layers": 1, "attention": "dense"}  # quick to trace
    code, run = profile(tmp_path, *SHORT, compile=True, model=model)
    assert code == 0
    check_mlp(run)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--nvtx --active 1", "--nvtx must be left out on a CPU"),
        ("--active 0", "--active must be positive, got 0"),
        ("--active 19 --memory", "--steps must be at least 41 for this profile, got 40"),
    ],
)
def test_what_cannot_be_recorded(
    tmp_path: Path, words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, run = profile(tmp_path, *words.split())
    assert code == 2
    assert message in capsys.readouterr().err
    assert not run.exists()


def test_a_run_that_is_stopped_has_no_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Trainer.train_step

    def step(trainer: Trainer, *given: Any) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(trainer, *given)

    monkeypatch.setattr(Trainer, "train_step", step)
    code, run = profile(tmp_path, *SHORT)
    assert code == 1
    assert "stopped by SIGTERM after step 1" in capsys.readouterr().out
    assert not list((run / "profile").iterdir())


def test_stages_cost_nothing_without_a_listener() -> None:
    assert stages.stage(stages.MLP) is stages.stage(stages.GATES)
    assert isinstance(stages.stage(stages.MLP), nullcontext)
    heard = []

    @stages.in_stage(stages.LOSS)
    def run(x: torch.Tensor) -> torch.Tensor:
        with stages.stage(stages.GATES):
            return x + 1

    def listen(name: str) -> nullcontext[None]:
        heard.append(name)
        return nullcontext()

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    with stages.stages_seen_by(listen):
        run(torch.zeros(()))
        compiled(torch.zeros(()))  # which has no stages inside
    run(torch.zeros(()))
    assert heard == [stages.LOSS, stages.GATES]
