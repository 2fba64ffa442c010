"""``nsa doctor``: it says what it finds, and a problem changes its exit code."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

import pytest
import torch

from nsa import NSAConfig, cli, extras
from nsa.bench import clock
from nsa.bench.cases import MODES, WHOLE_INPUTS, Point, parse_shape
from nsa.cli import doctor
from nsa.ops._triton.tuning import tiles_chosen_by
from nsa.train import environment
from tests.ops.cases import small
from tools.compile_only.launches import attend, launches


def test_a_sound_machine(nsa):
    said = nsa("doctor")
    for part in ("python 3.", "torch 2.", "CPU cores", "GiB free", "cpu: eager PyTorch"):
        assert part in said
    assert said.endswith("no problem found\n")


def test_problems_are_shown_and_counted(capsys, monkeypatch):
    monkeypatch.setattr(environment, "RECORDED", ("torch", "no-such-distribution"))
    monkeypatch.setattr(doctor, "CORE", ("torch", "no-such-distribution"))
    monkeypatch.setattr(environment, "cuda", lambda: None)
    monkeypatch.setattr(environment, "nvidia_driver", lambda: "580.1")
    assert cli.main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "PROBLEM: no-such-distribution is not installed" in said
    assert "PROBLEM: an NVIDIA driver (580.1) is installed, but PyTorch" in said
    assert "2 problems found" in said
    monkeypatch.setattr(environment, "nvidia_driver", lambda: None)
    (line,) = doctor._gpus()
    assert line.startswith("none: PyTorch")


def test_no_triton_is_a_problem_on_linux(monkeypatch):
    monkeypatch.setattr(environment, "RECORDED", ("triton",))
    monkeypatch.setattr(environment, "version", lambda name: None)
    line = list(doctor._versions())[1]
    assert (line[:6], type(line)) == ("triton", doctor.Problem)
    monkeypatch.setattr("shutil.which", lambda name: None)  # which asks Windows itself
    monkeypatch.setattr(sys, "platform", "win32")
    line = list(doctor._versions())[1]
    assert line == "no triton: there is none for win32; operators run in eager PyTorch"


TOPOLOGY = "GPU0 GPU1\nGPU0 X NV18\nGPU1 NV18 X"


def test_connections_of_gpus(monkeypatch):
    monkeypatch.setattr(environment, "nvidia_topology", lambda: TOPOLOGY)
    monkeypatch.setattr(environment, "pcie_links", lambda: [("5", "16"), ("4", "8")])
    said = list(doctor._connections(2))
    assert said == [
        "0: PCIe generation 5, 16 lanes",
        "1: PCIe generation 4, 8 lanes",
        *TOPOLOGY.splitlines(),
    ]
    monkeypatch.setattr(environment, "nvidia_topology", lambda: None)
    assert list(doctor._connections(2))[-1].startswith("connections unknown")
    assert len(list(doctor._connections(1))) == 2


def test_kernels_of_a_shape(nsa, refusal):
    short = nsa("doctor --shape seed --seq 2048")
    assert "12 heads in 2 groups, D 64, Dv 64, bf16, sequences of up to 2,048 tokens" in short
    assert "selected branch: the tiled algorithm, because in sequences so short" in short
    assert re.search(r"compressed_attention_fwd: \d+ rows, .*\(measured on NVIDIA H200\)", short)
    assert "gather_fwd" not in short
    long = "\n".join(doctor._kernels(parse_shape("64x4x256x128"), 65_536, "fp32"))
    assert "decided on the GPU in each call" in long
    assert re.search(r"selected_gather_fwd: 16 rows, 16 keys, 8 warps, 1 stages \(default of", long)
    assert "--shape and --seq must be given together" in refusal("doctor --shape seed")


@pytest.mark.parametrize(("refused", "dense"), [((), 1.0), (("dense-cudnn",), 2.0)])
def test_the_length_from_which_it_is_faster(monkeypatch, refused, dense):
    """Times of a clock by which attention is linear and dense attention quadratic in the length."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def time_of(provider, point, mode):
        assert (point.batch, point.dtype) == (65_536 // point.seq_len, torch.float16)
        if provider == "nsa":
            # the shortest is fast in one mode, which does not make all lengths fast
            return 3.0 if mode == "fwd" else 15.0 if point.seq_len > 1024 else 0.1
        speed = {"dense-cudnn": 1.0, "dense-fa2": 2.0}[provider]
        return None if provider in refused else speed * point.seq_len / 2048

    monkeypatch.setattr(doctor, "attention_ms", time_of)
    forward, both, last = doctor._speed("seed", 20_000, "fp16")
    times = [f"{n:,}: {dense * n / 2048 / 3:.2f}x" for n in (1024, 2048, 4096, 8192, 16_384)]
    start = 8192 if dense == 1 else 4096
    assert forward == f"forward: faster from {start:,} tokens ({', '.join(times)})"
    found = "faster from 16,384 tokens" if dense == 2 else "not faster"
    assert both.startswith(f"forward and backward: {found} (1,024: ")
    assert "none falls back" in last
    monkeypatch.setattr(doctor, "attention_ms", lambda *_: None)
    first = next(iter(doctor._speed("seed", 64, "fp32")))
    assert first == "forward: not faster (dense attention did not run)"
    monkeypatch.setattr(doctor, "missing", lambda extra: ["PyYAML"])
    (line,) = doctor._speed("seed", 64, "fp32")
    assert line.startswith("not measured: without PyYAML. Install with: pip install ")


def test_time_of_attention(monkeypatch):
    """By a clock that counts results: the output, and a gradient of each input with mode fwd_bwd.

    Kernels do not run without a GPU.
    """

    def count(call, *_):
        return clock.Timing(float(len(call())), 0, 0, 1, "cpu")

    monkeypatch.setattr(clock, "time_call", count)
    point = Point("small", small(), 128, 1, "random", torch.float32, torch.device("cpu"))
    times = [doctor.attention_ms("reference", point, mode) for mode in MODES]
    assert times == [1, 1 + len(WHOLE_INPUTS)]
    assert doctor.attention_ms("nsa", point, "fwd") is None
    assert list(doctor._speed("seed", 4096, "bf16")) == ["not measured: no GPU"]


@pytest.mark.parametrize("longest", [1024, 65_536])
def test_it_names_the_kernels_for_which_tiles_are_looked_up(longest, monkeypatch):
    """Of attention, without the loss of an index."""
    monkeypatch.setattr("tools.compile_only.launches.train_index", lambda *_: None)
    looked_up: set[str] = set()

    def note(key, tile):
        looked_up.add(key.kernel)
        return tile

    config = NSAConfig(num_heads=12, num_kv_heads=2, head_dim=64, value_dim=64)
    with launches(), tiles_chosen_by(note):
        attend(config, torch.bfloat16, longest)
    assert looked_up == set(doctor.kernel_names(longest, longest == 1024, config))


def test_missing_extras_are_named(monkeypatch):
    """That is no problem: what needs them says so. Some packages no configuration needs."""
    absent = {"datasets", "pynvml"}
    monkeypatch.setattr(extras, "find_spec", lambda module: None if module in absent else module)
    assert list(doctor._extras()) == [
        "train: without nvidia-ml-py. Install with: " + extras.install_command("train"),
        "data: without nvidia-ml-py, datasets. Install with: " + extras.install_command("data"),
        "bench: installed",
        "hf: installed",
        "demo: installed",
    ]
    monkeypatch.setattr(environment, "version", lambda name: None if name == "datasets" else "1.0")
    listed = {line.split()[0] for line in doctor._versions()}
    assert {*extras.CORE, *extras.EXTRAS["data"]} - {"datasets"} <= listed
    assert "datasets" not in listed


def test_the_command_that_installs_an_extra(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.0")
    assert extras.install_command("data") == "pip install 'nsa[data]'"

    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    root = Path(__file__).resolve().parents[2]
    assert extras.install_command("data") == f"pip install -e '{root}[data]'"
