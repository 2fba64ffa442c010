"""A run on a GPU compiles and captures nothing after its start, whatever its documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.ops._triton.ahead import launches_of
from nsa.train.config import DataConfig, ParallelConfig
from nsa.train.execution.compilation import compilations
from nsa.train.execution.kernels_ahead import run_step
from nsa.train.run_folder import RunFolder
from nsa.train.trainer import Trainer
from tests.gpu.matrix import SEED
from tests.gpu.small_step import noted_launches
from tests.train.cases import tiny_config

# The seed's attention in a narrow model of two layers.
MODEL: dict[str, Any] = {"width": 256, "num_layers": 2, "nsa": SEED, "mlp_hidden_size": 512}
ON_GPU: dict[str, Any] = {"device": "cuda", "compute_dtype": "bf16"}


def write_documents(folder: Path) -> None:
    """Documents of one token and of whole sequences, hundreds a sequence and none."""
    folder.mkdir()
    (folder / "long.txt").write_text("the sea and the old stones of it " * 1500)
    for index in range(2000):
        (folder / f"short{index:04d}.txt").write_text("x" * (index % 7) + f"{index}")


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize("by_layer", [True, False], ids=["layers", "whole"])
def test_nothing_is_compiled_in_500_steps(tmp_path, attention, by_layer):
    write_documents(tmp_path / "documents")
    config = tiny_config(
        tmp_path,
        model={**MODEL, "attention": attention},
        data=DataConfig(source="folder", path=str(tmp_path / "documents")),
        **ON_GPU,
        seq_len=512,
        micro_batch=2,
        accumulation=2,
        compile=True,
        cuda_graphs=True,
        steps=500,
        log_every=50,
        eval_every=100,
        checkpoint_every=0,
        parallel=ParallelConfig(compile_layers=by_layer),
    )
    counts: list[int] = []
    trainer = Trainer(
        config,
        RunFolder.create(tmp_path / "run", config),
        on_step=lambda: counts.append(compilations.now.compilations),
    )
    trainer.run()
    assert len(counts) == 500
    assert counts[4] == counts[-1]
    assert trainer.state.progress.sequence_capacity > 100  # the windows with hundreds of documents


def test_kernels_ahead_are_those_of_a_step(tmp_path):
    """Launches that are predicted without a GPU are those of a step on this one."""
    data = DataConfig(source="corpus")
    more = {"seq_len": 2048, "telemetry": True, "optim": {"name": "muon"}}
    config = tiny_config(tmp_path, model=MODEL, data=data, **ON_GPU, **more)
    trainer = Trainer(config, RunFolder.create(tmp_path / "run", config))
    with noted_launches() as launched:
        trainer.train_step(trainer.next_batches())
    properties = torch.cuda.get_device_properties(0)
    capability = (properties.major, properties.minor)
    ahead = launches_of(lambda: run_step(config), properties.name, capability)
    assert {kernel.fn.__name__ for kernel, _, _ in ahead} == {
        kernel.fn.__name__ for kernel in launched
    }
