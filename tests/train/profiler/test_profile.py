"""`nsa profile` on a CPU: it records a real run, and its rows add up."""

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
from nsa.train.profiler.attribution import PREFIX
from nsa.train.profiler.memory import MODULE, module_memory
from nsa.train.profiler.session import Plan, Session
from nsa.train.profiler.trace import read_trace
from tests.train.cases import tiny_config
from tests.train.profiler.hand_made import AUTOGRAD, HandMade


def profile(tmp_path: Path, *words: str, **changes: Any) -> tuple[int, Path]:
    config = tmp_path / "tiny.yaml"
    config.write_text(
        to_yaml(
            tiny_config(
                tmp_path, **{"steps": 40, "eval_every": 0, "checkpoint_every": 0, **changes}
            )
        )
    )
    run = tmp_path / "run"
    return cli.main(["profile", str(config), "--run-dir", str(run), *words]), run


def test_a_run_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, run = profile(
        tmp_path, "--wait", "2", "--warmup", "1", "--active", "3", "--memory", "--log-every", "1"
    )
    assert code == 0
    folder = run / "profile"
    found = json.loads((folder / "stages.json").read_text())
    rows = {row["stage"]: row for row in found["stages"]}
    assert (found["device"], found["steps"]) == ("cpu", 3)
    assert sum(row["total_ms"] for row in rows.values()) == pytest.approx(found["step_ms"])
    for stage in set(stages.MODEL_STAGES) - {stages.DENSE, stages.CASTS}:
        assert rows[stage]["forward_ms"] > 0, stage
        assert (rows[stage]["backward_ms"] > 0) == (stage != stages.CHOICE), stage
    for stage in (stages.OPTIMIZER, stages.TELEMETRY, stages.GRADIENTS, "idle"):
        assert rows[stage]["total_ms"] > 0, stage
    # a model this small on a machine busy with other tests
    assert rows["unattributed"]["share"] < 0.15
    assert (folder / "stages.txt").read_text() in capsys.readouterr().out
    assert "aten::mm" in (folder / "kernels.txt").read_text()
    trace = read_trace(folder / "trace.json.gz")
    names = [event.name for events in trace.host.values() for event in events]
    assert names.count(PREFIX + stages.FORWARD) == 3 * 2  # steps, micro-batches
    # The run ended with the record, after the steps it took: no checkpoint, and rows as of any run.
    assert not list((run / "checkpoints").iterdir())
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 2 + 1 + 3 + 2 + 1))
    modules = {
        module["name"]: module for module in json.loads((folder / "memory.json").read_text())
    }
    mlp = modules["layers.0.mlp"]
    # Input and two hidden tensors of the MLP are kept, its output is returned: fp32, 2 windows of
    # 64 tokens.
    assert mlp["kept"] == 4 * 128 * (2 * 64 + 32)
    assert mlp["forward_peak"] >= mlp["kept"]
    assert mlp["backward_peak"] > 0
    assert "layers.0.mlp" in (folder / "memory.txt").read_text()


def test_memory_of_modules_in_layers_that_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    words = ["--wait", "1", "--warmup", "1", "--active", "1", "--memory"]
    code, run = profile(tmp_path, *words, compile=True, model={"num_layers": 1})
    assert code == 0
    modules = {
        module["name"]: module
        for module in json.loads((run / "profile" / "memory.json").read_text())
    }
    mlp = modules["layers.0.mlp"]
    assert mlp["kept"] == 4 * 128 * (2 * 64 + 32)
    assert mlp["backward_peak"] > 0


@pytest.mark.parametrize(("words", "message"), [
    (["--nvtx"], "--nvtx must be left out on a CPU"),
    (["--active", "0"], "--active must be positive, got 0"),
    (["--steps", "20"], "--steps must be at least 70 for this profile, got 20"),
])  # fmt: skip
def test_what_cannot_be_recorded(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, run = profile(tmp_path, *words, **({} if "--steps" in words else {"steps": 100}))
    assert code == 2
    assert message in capsys.readouterr().err
    assert not run.exists()


def test_a_run_that_is_stopped_has_no_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Session.on_step

    def on_step(session: Session) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        real(session)

    monkeypatch.setattr(Session, "on_step", on_step)
    code, run = profile(tmp_path, "--wait", "2", "--warmup", "1", "--active", "3")
    assert code == 1
    assert "stopped by SIGTERM after step 1" in capsys.readouterr().out
    assert not list((run / "profile").iterdir())


def test_steps_of_a_plan() -> None:
    assert Plan().num_steps(cuda_graphs=False) == 70
    assert Plan(2, 1, 3, memory=True).num_steps(cuda_graphs=True) == 2 + 2 + 1 + 3 + 2


def test_stages_cost_nothing_while_nobody_listens() -> None:
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
        assert float(run(torch.zeros(()))) == 1
        assert heard == [stages.LOSS, stages.GATES]
        assert float(compiled(torch.zeros(()))) == 1
        assert len(heard) == 2  # compiled code has no stages inside
    run(torch.zeros(()))
    assert len(heard) == 2


def test_memory_of_modules() -> None:
    hand = HandMade()
    hand.mark(stages.FORWARD, 0, 50)
    hand.host(MODULE + "layer", 1, 40, category="user_annotation")
    hand.host(MODULE + "layer.mlp", 10, 30, category="user_annotation")
    hand.host("aten::mm", 11, 20)
    hand.memory(5, 100)
    hand.memory(12, 1000)
    hand.memory(15, -300)
    hand.memory(16, 7, device=1)  # of another device
    hand.mark(stages.BACKWARD, 50, 90)
    hand.host("MmBackward0", 60, 70, AUTOGRAD)
    hand.backward_of(11, 60)
    hand.memory(61, 400, AUTOGRAD)
    hand.memory(80, 9999)  # of nobody
    layer, mlp = module_memory(hand.trace(), "cpu", 50)
    assert (layer.name, layer.forward_peak, layer.kept, layer.backward_peak) == (
        "layer",
        1150,
        800,
        1250,
    )
    assert (mlp.name, mlp.forward_peak, mlp.kept, mlp.backward_peak) == (
        "layer.mlp",
        1150,
        700,
        1250,
    )
