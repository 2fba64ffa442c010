"""Kernels compiled by other processes while a run starts, on a machine without a GPU."""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.nvidia import driver

from nsa.train.config import TrainConfig
from nsa.train.distributed.launch import Launch
from nsa.train.execution import kernels_ahead
from nsa.train.execution.kernels_ahead import KernelsAhead, launches_of_a_step
from tests.train.cases import tiny_config

H200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
CUDA = torch.device("cuda")


# What a launcher calls in the driver.
CALLED = (
    "CtxGetCurrent",
    "CtxSetCurrent",
    "DeviceGet",
    "DevicePrimaryCtxRetain",
    "FuncSetAttribute",
    "GetErrorString",
    "PointerGetAttribute",
)


def stub_driver(path: Path) -> None:
    """A library with the names of the GPU's driver, for a machine without one."""
    source = "".join(f"void cu{name}(void) {{}}\n" for name in CALLED)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", path], input=source.encode(), check=True
    )


@pytest.fixture
def dense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """A run with few kernels, a GPU that is not there, and a cache of its own."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H200)
    # before Triton 3.7 launchers in C are linked with the GPU's driver
    if hasattr(driver, "make_launcher"):
        stub_driver(tmp_path / "libcuda.so.1")
        monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(tmp_path))
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    return tiny_config(tmp_path, model={"attention": "dense"})


def kernels(config: TrainConfig) -> list[str]:
    launches = launches_of_a_step(config, "NVIDIA H200", (9, 0))
    return sorted(kernel.fn.__name__ for kernel, _, _ in launches)


def test_launches_are_those_of_forward_and_backward(tmp_path: Path) -> None:
    found = kernels(tiny_config(tmp_path, telemetry=True))
    # Keys and values are compressed with and without rotation; window and compressed branch share
    # kernels.
    assert found.count("compress_fwd_kernel") == 2
    assert (
        found.count("range_fwd_kernel")
        == found.count("range_dq_kernel")
        == found.count("range_dkv_kernel")
        == 2
    )
    assert found.count("heads_kernel") == 2
    once = {
        "select_kernel",
        "selected_fwd_kernel",
        "selected_dq_kernel",
        "selected_gather_bwd_kernel",
        "combine_fwd_kernel",
    }
    assert all(found.count(name) == 1 for name in once | {"add_statistics_kernel", "list_kernel"})
    assert "add_statistics_kernel" not in kernels(tiny_config(tmp_path, telemetry=False))


def test_compiled_once(dense: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = KernelsAhead(dense, CUDA, Launch())
    ahead.wait()
    cache = Path(triton.knobs.cache.dir)
    assert cache == tmp_path / "cache"
    assert {path.stem for path in cache.rglob("*.cubin")} == {"heads_kernel", "sum_rows_kernel"}
    assert len(list(cache.glob("nsa-*"))) == 1

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a second process")

    monkeypatch.setattr("subprocess.Popen", refuse)
    KernelsAhead(dense, CUDA, Launch()).wait()
    KernelsAhead(dense, CUDA, Launch(local_rank=1, world_size=2)).wait()
    KernelsAhead(dense, torch.device("cpu"), Launch()).wait()
    with pytest.raises(AssertionError, match="a second process"):
        KernelsAhead(
            tiny_config(tmp_path, model={"attention": "dense", "width": 64}), CUDA, Launch()
        )


def test_a_failure_is_said_and_harms_nothing(
    dense: TrainConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels_ahead, "to_yaml", lambda config: "steps: none")
    with caplog.at_level(logging.WARNING):
        KernelsAhead(dense, CUDA, Launch()).wait()
    assert "kernels could not be compiled ahead" in caplog.text
    assert "steps must be an integer" in caplog.text


def test_closed_before_it_is_done(dense: TrainConfig) -> None:
    ahead = KernelsAhead(dense, CUDA, Launch())
    process = ahead._process
    assert process is not None
    ahead.close()
    assert process.poll() is not None
    ahead.wait()
    ahead.close()


def test_dropped_before_it_is_done(dense: TrainConfig) -> None:
    ahead = KernelsAhead(dense, CUDA, Launch())
    process = ahead._process
    assert process is not None
    del ahead
    assert process.poll() is not None
