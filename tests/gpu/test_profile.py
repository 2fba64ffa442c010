"""What `nsa profile` and the telemetry see of a GPU, however the step is launched."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from nsa import cli, stages
from nsa.train.load import to_yaml
from nsa.train.profiler import IDLE, OTHER, PRODUCTS, UNATTRIBUTED
from nsa.train.telemetry.metrics import read_metrics
from tests.train.cases import make_trainer, tiny_config

LAUNCHED: dict[str, dict[str, bool]] = {
    "eager": {},
    "compiled": {"compile": True},
    "replayed": {"compile": True, "cuda_graphs": True},
    "replayed eager": {"cuda_graphs": True},
}
BRANCHES = (stages.COMPRESSED, stages.SELECTED, stages.WINDOW)
LARGER: dict[str, Any] = {
    "seq_len": 512,
    "micro_batch": 16,
    "eval_every": 0,
    "checkpoint_every": 0,
    "compute_dtype": "bf16",
    "device": "cuda",
}


@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize("how", LAUNCHED)
def test_every_kernel_finds_its_stage(tmp_path, how, attention):
    model = {"attention": attention, "width": 128, "mlp_hidden_size": 320, "num_layers": 2}
    config = tmp_path / "run.yaml"
    config.write_text(
        to_yaml(tiny_config(tmp_path, steps=40, model=model, **LARGER, **LAUNCHED[how]))
    )
    words = ["--wait", "5", "--warmup", "2", "--active", "6", "--log-every", "1", "--memory"]
    assert cli.main(["profile", str(config), "--run-dir", str(tmp_path / "run"), *words]) == 0
    folder = tmp_path / "run" / "profile"
    found = json.loads((folder / "stages.json").read_text())
    rows = {row["stage"]: row["total_ms"] for row in found["stages"]}
    assert found["device"] == "gpu"
    assert sum(rows.values()) == pytest.approx(found["step_ms"])
    unknown = [kernel for kernel in found["kernels"] if kernel["stage"] == UNATTRIBUTED]
    assert rows[UNATTRIBUTED] < 0.05 * (found["step_ms"] - rows[IDLE]), unknown
    # Kernels of the branches compute the gradients of the gates.
    twice: tuple[str, ...] = (*BRANCHES, stages.COMPRESSION)
    of_attention: tuple[str, ...] = (*twice, stages.GATES, stages.SELECTION, stages.TELEMETRY)
    if attention == "dense":
        twice = of_attention = (stages.DENSE,)
    for stage in (*of_attention, stages.PROJECTION, PRODUCTS, OTHER, stages.DATA, stages.OPTIMIZER):
        assert rows[stage] > 0, stage
    for stage in twice:
        assert rows[f"{stage}, backward"] > 0, stage
    assert (folder / "memory.pickle").stat().st_size > 0
    modules = {
        module["name"]: module for module in json.loads((folder / "memory.json").read_text())
    }
    assert modules["layers.1.mlp"]["kept"] > 0


@pytest.mark.parametrize("how", LAUNCHED)
def test_rows_of_layers_do_not_depend_on_how_a_step_is_launched(tmp_path, how):
    changes = {**LARGER, "micro_batch": 2, "steps": 8, "log_every": 2}
    found: list[Any] = []
    for launch in (how, "eager"):
        config, run = (
            tiny_config(tmp_path, **changes, **LAUNCHED[launch]),
            tmp_path / f"run {len(found)}",
        )
        make_trainer(config, run).run()
        found.append(read_metrics(run / "metrics.jsonl"))
    rows = found[0]
    for row, expected in zip(*found, strict=True):
        calls = [
            float(row.get(f"selected_{algorithm}_calls", 0)) for algorithm in ("tiled", "gathered")
        ]
        assert sum(calls) == 2  # one layer, two micro-batches: the step of the row and no other
        for name, value in expected.items():
            # these may be on the brink
            if name.startswith(("gate_", "selected_")) and not re.search("collapsed|calls", name):
                assert float(row[name]) == pytest.approx(float(value), rel=0.05), name
        assert 0 < float(row["gpu_step_time_ms"]) <= 1.5 * float(row["step_time_ms"])
        assert 0 < float(row["host_time_ms"]) <= 1.1 * float(row["step_time_ms"])
    longest, usual = (float(rows[-1][name]) for name in ("step_time_max_ms", "gpu_step_time_ms"))
    assert longest >= usual  # of the last two steps the longer one, and their mean
