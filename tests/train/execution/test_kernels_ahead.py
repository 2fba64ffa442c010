"""Kernels that are compiled before a pass runs, on a machine without a GPU."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import triton
from triton.backends.nvidia import driver

from nsa.ops._triton import ahead
from nsa.ops._triton.absent_gpu import AbsentGPU
from nsa.ops._triton.ahead import KernelsAhead, launches_of
from nsa.train.config import TrainConfig
from nsa.train.execution.kernels_ahead import run_generation, run_step
from tests.train.cases import PATTERN, tiny_config

CUDA = torch.device("cuda")


def kernels(config: TrainConfig, lengths: tuple[int, ...] = ()) -> Counter[str]:
    """Kernels of a training step, or of prompts and a step of decoding."""

    def run() -> None:
        if lengths:
            run_generation(config.model, lengths, 200, torch.bfloat16)
        else:
            run_step(config)

    return Counter(kernel.fn.__name__ for kernel, *_ in launches_of(run, "NVIDIA H200", (9, 0)))


def test_launches_are_those_of_forward_and_backward(tmp_path):
    found = kernels(tiny_config(tmp_path, telemetry=True, optim={"name": "muon"}))
    # Keys and values are compressed with and without rotation; window and compressed branch share
    # kernels.
    twice = ["compress_fwd", "range_fwd", "range_dq", "range_dkv", "heads"]
    assert all(found[f"{name}_kernel"] == 2 for name in twice)
    once = "select selected_fwd selected_dq selected_gather_bwd combine_fwd add_statistics list"
    assert all(found[f"{name}_kernel"] == 1 for name in (*once.split(), "muon_momentum"))
    assert "add_statistics_kernel" not in kernels(tiny_config(tmp_path, telemetry=False))


@pytest.mark.parametrize(
    ("pattern", "absent"),
    [
        ({"scores": "random"}, "select_kernel"),
        ({"branches": ("cmp", "win")}, "selected_fwd_kernel"),
    ],
    ids=["random", "no selection"],
)
def test_launches_without_scores(tmp_path, pattern, absent):
    model = {"nsa": dataclasses.replace(PATTERN, **pattern)}
    found = kernels(tiny_config(tmp_path, model=model))
    assert found["range_dkv_kernel"]
    assert absent not in found


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_launches_of_a_generation(tmp_path, attention):
    config = tiny_config(tmp_path, model={"attention": attention})
    for lengths in ((40,), (3, 3), (30, 9)):
        found = kernels(config, lengths)
        steps = [name for name in found if name.startswith("decode_") or name == "heads_kernel"]
        assert {"decode_append_kernel", "decode_merge_kernel", "heads_kernel"} <= set(steps)
        selects = any(name.startswith("selected_") for name in found)
        assert selects == (attention == "nsa")


@pytest.fixture
def absent(tmp_path, monkeypatch):
    """A GPU that is not there, and a cache of its own."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    gpu = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.delattr(driver, "make_launcher", raising=False)
    monkeypatch.setattr(triton.runtime.driver, "_active", AbsentGPU(90), raising=False)
    return tmp_path / "cache"


def test_all_are_compiled(absent, tmp_path):
    config = tiny_config(tmp_path, model={"attention": "dense"})
    before = torch.get_rng_state()
    compiling = KernelsAhead(lambda: run_step(config), CUDA)
    assert torch.equal(torch.get_rng_state(), before)
    compiling.wait()
    assert compiling.is_done(0.0)
    found = {path.stem for path in absent.rglob("*.cubin")}
    assert found == {"heads_kernel", "sum_rows_kernel"}


def test_a_failure_is_reported(absent, tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(ahead, "_compile", fail)
    config = tiny_config(tmp_path, model={"attention": "dense"})
    with caplog.at_level(logging.WARNING):
        KernelsAhead(lambda: run_step(config), CUDA).wait()
    assert "a kernel could not be compiled ahead: no compiler" in caplog.text
