"""What only a GPU can show about the trainer."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.train.config import DataConfig
from nsa.train.load import to_yaml
from nsa.train.telemetry.metrics import Row
from tests.train.cases import make_trainer, reproducible_rows, tiny_config, write_text

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

# The command of a run, and then whether any of the memory that it left is of the kind that grows.
_EXPANDABLE = """
import sys, torch
from nsa.cli import main
assert main(sys.argv[1:]) == 0
print(any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()))
"""
ATTENTION = pytest.mark.parametrize("attention", ["nsa", "dense"])
OPTIMIZER = pytest.mark.parametrize("optimizer", ["adamw", "muon"])


@ATTENTION
@OPTIMIZER
@pytest.mark.parametrize(
    "how", [{"compute_dtype": "bf16"}, {"compute_dtype": "fp32"}, {"cuda_graphs": True}], ids=str
)
def test_a_step_does_not_wait_for_the_device(
    tmp_path: Path, attention: str, optimizer: str, how: dict[str, Any]
) -> None:
    config = tiny_config(
        tmp_path,
        device="cuda",
        loss_chunk=50,
        model={"attention": attention},
        optim={"name": optimizer},
        **how,
    )
    trainer = make_trainer(config, tmp_path / "run")
    for _ in range(3):  # with CUDA graphs the first runs as it is, the second is captured
        trainer.train_step(trainer.next_batches())
    batches = trainer.next_batches()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Synchronization debug mode is a prototype feature"
        )
        torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.train_step(batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@ATTENTION
@OPTIMIZER
def test_nonfinite_step_changes_nothing(tmp_path: Path, attention: str, optimizer: str) -> None:
    config = tiny_config(
        tmp_path, device="cuda", model={"attention": attention}, optim={"name": optimizer}
    )
    trainer = make_trainer(config, tmp_path / "run")
    trainer.train_step(trainer.next_batches())
    before = {name: tensor.clone() for name, tensor in trainer.state.training_tensors().items()}
    real = trainer.loss
    trainer.loss = lambda *args: real(*args) * math.nan
    assert trainer.train_step(trainer.next_batches())[2].item() == 1
    assert all(
        torch.equal(before[name], tensor)
        for name, tensor in trainer.state.training_tensors().items()
    )


def test_gpu_and_cpu_agree(tmp_path: Path) -> None:
    losses = []
    for device in ("cpu", "cuda"):
        trainer = make_trainer(tiny_config(tmp_path, device=device), tmp_path / device)
        losses.append([trainer.train_step(trainer.next_batches())[:2].tolist() for _ in range(3)])
    torch.testing.assert_close(
        torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-3, atol=1e-4
    )


def test_the_allocator_is_what_the_run_says(tmp_path: Path) -> None:
    """In a process of its own: the setting stays."""
    config = tmp_path / "run.yaml"
    config.write_text(
        to_yaml(tiny_config(tmp_path, device="cuda", steps=2, allocator="expandable_segments"))
    )
    command = [
        sys.executable,
        "-c",
        _EXPANDABLE,
        "train",
        str(config),
        "--run-dir",
        str(tmp_path / "run"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "allocator settings expandable_segments" in done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "True"


@ATTENTION
def test_replayed_steps_are_the_steps(tmp_path: Path, attention: str) -> None:
    figures = []
    for graphs in (False, True):
        model = {"attention": attention}
        config = tiny_config(
            tmp_path, device="cuda", compute_dtype="bf16", model=model, cuda_graphs=graphs
        )
        trainer = make_trainer(config, tmp_path / f"run{graphs}")
        # Without graphs nothing is padded, and whole windows alone go to another kernel of dense
        # attention.
        trainer.state.progress.sequence_capacity = 16
        figures.append(torch.stack([trainer.train_step(trainer.next_batches()) for _ in range(8)]))
    assert torch.equal(figures[0], figures[1])


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("masked", [False, True], ids=["windows", "documents"])
@pytest.mark.parametrize(
    "how", [{}, {"cuda_graphs": True}, {"compile": True, "cuda_graphs": True}], ids=str
)
def test_nothing_is_allocated_after_the_fifth_step(
    tmp_path: Path, how: dict[str, Any], masked: bool
) -> None:
    """By the driver: PyTorch's own allocator has all that it needs by then."""
    data = DataConfig(
        source="folder", path=str(write_text(tmp_path / "text")), document_mask=masked
    )
    config = tiny_config(tmp_path, device="cuda", compute_dtype="bf16", data=data, **how)
    trainer = make_trainer(config, tmp_path / "run")
    counts = []
    for _ in range(20):
        trainer.train_step(trainer.next_batches())
        counts.append(torch.cuda.memory_stats()["num_device_alloc"])
    assert counts[4] == counts[-1]


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@ATTENTION
def test_compiled_equals_eager(tmp_path: Path, attention: str) -> None:
    figures = []
    for compiled in (False, True):
        config = tiny_config(
            tmp_path,
            device="cuda",
            model={"attention": attention},
            compile=compiled,
            cuda_graphs=compiled,
        )
        trainer = make_trainer(config, tmp_path / f"run{compiled}")
        figures.append(torch.stack([trainer.train_step(trainer.next_batches()) for _ in range(4)]))
    torch.testing.assert_close(figures[0], figures[1], rtol=1e-4, atol=1e-4)


@ATTENTION
def test_resumed_run_is_the_whole_one_bit_for_bit(tmp_path: Path, attention: str) -> None:
    config = tiny_config(
        tmp_path, device="cuda", compute_dtype="bf16", model={"attention": attention}
    )
    make_trainer(config, tmp_path / "whole").run()

    def stop(row: Row) -> None:
        if row["step"] == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    assert make_trainer(config, tmp_path / "cut", on_row=stop).run().step == 6
    assert make_trainer(config, tmp_path / "cut", resume=True).run().finished
    assert reproducible_rows(tmp_path / "cut") == reproducible_rows(tmp_path / "whole")
