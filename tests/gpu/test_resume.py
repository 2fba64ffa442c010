"""Exact resumption with kernels: a killed and resumed run has the bits of an undisturbed one."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch

from nsa.train.config import DataConfig
from tests.faults import cases
from tests.faults.test_kill import kills
from tests.gpu.matrix import SEED
from tests.ops.registration import Recorder
from tests.train.cases import make_trainer, reproducible_rows, tiny_config

RUN: dict[str, Any] = {
    "device": "cuda",
    "compute_dtype": "bf16",
    "data": DataConfig(),
    "loss_chunk": 4096,
}
# The seed's attention in a narrow model of two layers.
MODEL = {"width": 256, "num_layers": 2, "nsa": SEED, "mlp_hidden_size": 512}
SHORT: dict[str, Any] = {"seq_len": 2048, "micro_batch": 2, "accumulation": 2}
HOW: dict[str, dict[str, Any]] = {
    "as it is": SHORT,
    # What is compiled and captured must not depend on which documents came first.
    "compiled and replayed": {**SHORT, "compile": True, "cuda_graphs": True},
    "by Muon, replayed": {**SHORT, "cuda_graphs": True, "optim": {"name": "muon"}},
    # The other algorithm of the selected branch.
    "long": {"seq_len": 16384, "micro_batch": 1, "accumulation": 2},
}


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("how", HOW)
def test_a_run_takes_the_kernels_and_repeats_its_bits(tmp_path, how):
    config = tiny_config(
        tmp_path, **RUN, **HOW[how], model=MODEL, steps=10, log_every=1, checkpoint_every=0
    )
    if not config.compile:
        trainer = make_trainer(config, tmp_path / "recorded")
        with Recorder() as recorder:
            trainer.train_step(trainer.next_batches())
        assert "nsa::attention" in recorder.calls  # the reference calls no operator of the library
    tensors = []
    for name in ("first", "second"):
        trainer = make_trainer(config, tmp_path / name)
        trainer.run()
        tensors.append(trainer.state.training_tensors())
    assert reproducible_rows(tmp_path / "first") == reproducible_rows(tmp_path / "second")
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])


@pytest.mark.parametrize(
    ("how", "number"),
    [("as it is", 4), ("compiled and replayed", 3), ("by Muon, replayed", 2), ("long", 2)],
)
def test_killed_at_random_moments(tmp_path, how, number, monkeypatch):
    # New processes: one that is forked cannot count on CUDA.
    monkeypatch.setattr(cases, "FORKS", multiprocessing.get_context("spawn"))
    monkeypatch.setattr(
        cases, "tiny_config", lambda folder, **changes: tiny_config(folder, model=MODEL, **changes)
    )
    kills(tmp_path, number, 7, **RUN, **HOW[how])
