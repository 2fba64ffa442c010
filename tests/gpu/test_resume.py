"""Exact resumption with kernels; the acceptance run kills and resumes one."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from nsa.train.checkpoint import list_checkpoints
from nsa.train.config import DataConfig
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
def test_a_run_takes_the_kernels_and_resumes_bit_for_bit(tmp_path, how):
    changes: dict[str, Any] = {"checkpoint_every": 5, "keep_checkpoints": 2, "log_every": 1}
    config = tiny_config(tmp_path, **RUN, **HOW[how], model=MODEL, steps=10, **changes)
    if not config.compile:
        trainer = make_trainer(config, tmp_path / "recorded")
        with Recorder() as recorder:
            trainer.train_step(trainer.next_batches())
        assert "nsa::attention" in recorder.calls  # the reference calls no operator of the library
    whole = make_trainer(config, tmp_path / "whole")
    whole.run()
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(list_checkpoints(tmp_path / "cut/checkpoints")[-1])
    again = make_trainer(config, tmp_path / "cut", resume=True)
    assert again.state.progress.step == 5
    again.run()
    assert reproducible_rows(tmp_path / "whole") == reproducible_rows(tmp_path / "cut")
    expected, found = (trainer.state.training_tensors() for trainer in (whole, again))
    assert all(torch.equal(found[name], x) for name, x in expected.items())
