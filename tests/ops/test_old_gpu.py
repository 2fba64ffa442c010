"""A GPU that is too old for the kernels is refused in one line; its capability is faked."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import nsa
from nsa import cli
from nsa.cli import doctor
from nsa.errors import UserError
from nsa.ops import _backend
from nsa.ops._backend import capability, check_kernels_run, choose_backend
from nsa.ops._sequences import Sequences
from nsa.ops.embedding import embed
from nsa.ops.projection import Columns, Heads, project
from nsa.train import environment
from tests.ops.test_bad_input import TENSORS, good
from tests.train.cases import tiny_config

RULE = "be on a GPU of compute capability 8.0 or above for the Triton kernels"
T4 = f"must {RULE}, got Tesla T4 of 7.5."


@pytest.fixture
def asked(monkeypatch):
    """Devices whose capability PyTorch was asked for; all are of 7.5."""
    found: list[Any] = []

    def get(index):
        found.append(index)
        return 7, 5

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", get)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")
    capability.cache_clear()
    yield found
    capability.cache_clear()


def on_gpu(value: Any) -> Any:
    """A fake tensor on a GPU in the place of a tensor; to be called inside ``FakeTensorMode``."""
    if not isinstance(value, Tensor):
        return value
    dtype = torch.float32 if value.dtype.is_floating_point else value.dtype
    return torch.empty(value.shape, dtype=dtype, device="cuda:0")


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("name", ["compress", *TENSORS, "combine"])
def test_operators_refuse_it(asked, name, backend):
    """``auto`` does not fall back to the reference; asked for, the reference runs."""
    arguments = good(name)
    hint = 'Ask for backend="reference", or compute on a CPU. Or take a newer GPU.'
    with FakeTensorMode():
        given = {key: on_gpu(value) for key, value in arguments.items()}
        with pytest.raises(UserError, match=f" {re.escape(f'{T4} {hint}')}$"):
            getattr(nsa, name)(**given, backend=backend)
        assert choose_backend("reference", torch.empty(3, device="cuda:0")) == "reference"
    assert asked == [0]


def test_what_models_begin_with_refuses_it(asked):
    """The embedding of a model, the heads of an attention layer, sparse or dense."""
    with FakeTensorMode():
        tokens = torch.empty(20, dtype=torch.int64, device="cuda:0")
        x, weight = torch.empty(20, 24, device="cuda:0"), torch.empty(32, 24, device="cuda:0")
        sequences = Sequences(None, 1, 20, 20, x.device)
        with pytest.raises(UserError, match=f"x must {RULE}"):
            project(x, [weight], None, Columns((Heads(2, 16),)), sequences, nsa.Rope(16))
        with pytest.raises(UserError, match=f"weight must {RULE}"):
            embed(tokens, torch.empty(256, 32, device="cuda:0"))
    assert asked == [0]


def test_a_gpu_without_triton(asked, monkeypatch):
    """There is a PyTorch for GPUs on Windows, and no Triton."""
    monkeypatch.setattr(_backend, "has_triton", lambda: False)
    monkeypatch.setattr(sys, "platform", "win32")
    rule = "q must be on a CPU where Triton is not installed, got a GPU on win32."
    with FakeTensorMode(), pytest.raises(UserError, match=f"^{re.escape(rule)} Ask for"):
        choose_backend("auto", torch.empty(3, device="cuda:0"))
    assert not asked


def test_a_fake_tensor_needs_no_gpu():
    """Without CUDA there is no capability to ask for, and nothing is refused."""
    capability.cache_clear()
    with FakeTensorMode():
        given = {key: on_gpu(value) for key, value in good("window_attention").items()}
        given["max_seqlen_q"] = 20
        out, _ = nsa.window_attention(**given)
        assert (out.device.type, tuple(out.shape)) == ("cuda", (20, 4, 32))


@pytest.mark.filterwarnings("default")  # the compiler's words about itself
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_function_refuses_it(monkeypatch, fullgraph):
    """While it is traced; on a GPU that will do, nothing of the check is left in the graph."""
    here, asked = (7, 5), []

    def get(index):
        asked.append(index)
        return here

    def add(x):
        check_kernels_run("x", 0, "Do that.")
        return x + 1

    torch.compiler.reset()
    monkeypatch.setattr(_backend, "capability", get)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")
    compiled = torch.compile(add, backend="eager", fullgraph=fullgraph, dynamic=True)
    said = f"x {T4} Do that. Or take a newer GPU."
    with pytest.raises(torch._dynamo.exc.InternalTorchDynamoError, match=said):
        compiled(torch.ones(3))
    torch.compiler.reset()
    here = (8, 0)
    asked.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for size in (3, 4, 5):
            assert torch.equal(compiled(torch.ones(size)), torch.full((size,), 2.0))
    assert asked == [0]


def test_the_commands_refuse_it(
    asked,
    tmp_path,
    monkeypatch,
    capsys,
):
    from nsa.train.load import to_yaml

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = tmp_path / "tiny.yaml"
    for device in ("auto", "cuda"):
        config.write_text(to_yaml(tiny_config(tmp_path, device=device)), encoding="utf-8")
        assert cli.main(["train", str(config), "--run-dir", str(tmp_path / "run")]) == 2
        said = capsys.readouterr()
        hint = "Give --device cpu. Or take a newer GPU."
        assert (said.out, said.err) == ("", f"nsa: device {T4} {hint}\n")
    assert not (tmp_path / "run").exists()


def test_the_doctor_names_it(asked, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (2**33, 2**34))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    gpu = {"name": "Tesla T4", "compute_capability": "7.5", "multiprocessors_count": 40}
    found = {"driver": "580.1", "runtime": "13.0", "cudnn": 9, "gpus": [gpu]}
    monkeypatch.setattr(environment, "cuda", lambda: found)
    lines = list(doctor._gpus())
    (problem,) = [line for line in lines if isinstance(line, doctor.Problem)]
    said = "0: Tesla T4 is too old: the Triton kernels need compute capability 8.0 or above."
    assert problem.startswith(said)
    assert problem.endswith("Train with: --device cpu")
    *_, line = doctor._operators()
    assert line == "cuda: none, the GPU is too old for the Triton kernels"
