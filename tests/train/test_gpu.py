"""What only a GPU can show about the trainer."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nsa.train.config import DataConfig
from nsa.train.load import to_yaml
from nsa.train.optim import Muon, orthogonalized
from nsa.train.trainer import Trainer
from tests.train.cases import all_equal, new_trainer, tiny_config, write_text

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
def test_a_step_does_not_wait_for_the_device(tmp_path, attention, optimizer, how):
    model, optim = {"attention": attention}, {"name": optimizer}
    trainer = new_trainer(tmp_path, device="cuda", loss_chunk=50, model=model, optim=optim, **how)
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


@OPTIMIZER
@pytest.mark.parametrize("graphs", [False, True])
def test_nonfinite_step_changes_nothing(tmp_path, optimizer, graphs):
    trainer = new_trainer(tmp_path, device="cuda", optim={"name": optimizer}, cuda_graphs=graphs)
    for _ in range(3):
        trainer.train_step(trainer.next_batches())
    live = trainer.state.training_tensors().values()
    before = [tensor.clone() for tensor in live]
    divisor: Any = math.nan
    assert trainer.train_step(trainer.next_batches(), divisor)[2].item() == 1
    assert all_equal(before, live)
    assert trainer.train_step(trainer.next_batches())[2].item() == 0
    assert not all_equal(before, live)


def results(trainer: Trainer, steps: int) -> Tensor:
    """What some optimizer steps return."""
    found = [trainer.train_step(trainer.next_batches()) for _ in range(steps)]
    return torch.stack(found).cpu()


def test_gpu_and_cpu_agree(tmp_path):
    cpu, gpu = (results(new_trainer(tmp_path, name, device=name), 3) for name in ("cpu", "cuda"))
    torch.testing.assert_close(cpu, gpu, rtol=1e-3, atol=1e-4)


def test_the_allocator_is_what_the_run_says(tmp_path):
    """In a process of its own: the setting stays."""
    config = tmp_path / "run.yaml"
    settings: dict[str, Any] = {"steps": 2, "allocator": "expandable_segments"}
    config.write_text(to_yaml(tiny_config(tmp_path, device="cuda", **settings)))
    words = ["train", str(config), "--run-dir", str(tmp_path / "run")]
    command = [sys.executable, "-c", _EXPANDABLE, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "allocator settings expandable_segments" in done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "True"


@ATTENTION
@OPTIMIZER
def test_replayed_steps_are_the_steps(tmp_path, attention, optimizer):
    """At rates that change from step to step."""
    figures = []
    for graphs in (False, True):
        how: dict[str, Any] = {
            "compute_dtype": "bf16",
            "model": {"attention": attention},
            "optim": {"name": optimizer, "warmup_steps": 5},
            "cuda_graphs": graphs,
        }
        trainer = new_trainer(tmp_path, f"run{graphs}", device="cuda", **how)
        # Without graphs nothing is padded, and whole sequences alone go to another kernel of dense
        # attention.
        trainer.state.progress.sequence_capacity = 16
        figures.append(results(trainer, 8))
    assert torch.equal(*figures)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("masked", [False, True], ids=["windows", "documents"])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"cuda_graphs": True},
        {"compile": True, "cuda_graphs": True},
        {"optim": {"name": "muon"}, "cuda_graphs": True},
    ],
    ids=str,
)
def test_nothing_is_allocated_after_the_fifth_step(tmp_path, how, masked):
    """By the driver: PyTorch's own allocator has all that it needs by then."""
    data = DataConfig("folder", str(write_text(tmp_path / "text")), document_mask=masked)
    trainer = new_trainer(tmp_path, device="cuda", compute_dtype="bf16", data=data, **how)
    counts = []
    for _ in range(20):
        trainer.train_step(trainer.next_batches())
        counts.append(torch.cuda.memory_stats()["num_device_alloc"])
    assert counts[4] == counts[-1]


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@ATTENTION
def test_compiled_equals_eager(tmp_path, attention):
    figures = []
    for on in (False, True):
        how: dict[str, Any] = {"model": {"attention": attention}, "compile": on, "cuda_graphs": on}
        figures.append(results(new_trainer(tmp_path, f"run{on}", device="cuda", **how), 4))
    torch.testing.assert_close(*figures, rtol=1e-4, atol=1e-4)


def test_muon_is_as_exact_as_pytorch_s():
    """A first step has at most twice the error of PyTorch's in bf16, and always the same bits."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(768, 3328), (3328, 768), (100, 60), *[(128, 768)] * 20]
    weights, gradients = (
        [torch.randn(shape, device="cuda", generator=generator) for shape in shapes] for _ in "wg"
    )

    def stepped(make: Any, *cancel: Tensor) -> list[Tensor]:
        parameters = [nn.Parameter(x.clone()) for x in weights]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        make(parameters, 0.5, 0.1).step(*cancel)
        return [parameter.detach() for parameter in parameters]

    go = torch.zeros((), device="cuda")
    ours, again, theirs = stepped(Muon, go), stepped(Muon, go), stepped(torch.optim.Muon)
    assert all_equal(ours, again)
    for weight, gradient, x, y in zip(weights, gradients, ours, theirs, strict=True):
        rate = 0.5 * max(1, weight.shape[0] / weight.shape[1]) ** 0.5
        wanted = 0.95 * weight.double() - rate * orthogonalized(gradient[None].double())[0]
        assert (x - wanted).norm() < 2 * (y - wanted).norm()
