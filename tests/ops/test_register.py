"""The guard of the device: kernels run on the GPU of their tensors, whichever is current."""

from __future__ import annotations

import re
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from nsa.ops import _register
from nsa.ops.embedding import embed_backward_op, embed_op


@pytest.fixture
def said(monkeypatch):
    """The calls that reach a fake machine with two GPUs, of which the first is the current one."""
    said: list[str] = []

    @contextmanager
    def device(index):
        said.append(f"device {index}")
        yield
        said.append(f"no longer {index}")

    def current_device():
        said.append("current device")
        return 0

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", current_device)
    return said


def on(device: str) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(2, device=device)


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (on("cuda:1"), ["current device", "device 1", "run", "no longer 1"]),
        ([on("cuda:1")], ["current device", "device 1", "run", "no longer 1"]),
        (on("cuda:0"), ["current device", "run"]),
        (on("cpu"), ["run"]),
        ([], ["run"]),
    ],
    ids=["another device", "list on another device", "current device", "cpu", "no tensor"],
)
def test_the_device_of_the_first_tensor_is_current(said, first, expected):
    """Tensors may be missing, and they come after numbers too."""
    run = _register.guarded(lambda *arguments: said.append("run") or arguments)
    assert run(None, 3, first, "x") == (None, 3, first, "x")
    assert said == expected


def test_the_device_before_comes_back_after_an_error(monkeypatch):
    entered: list[int] = []

    @contextmanager
    def device(index):
        entered.append(index)
        try:
            yield
        finally:
            entered.pop()

    def fail(x):
        assert entered == [1]
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(RuntimeError, match="out of memory"):
        _register.guarded(fail)(on("cuda:1"))
    assert not entered


# Calls that mean the current device or its current stream; CUDA graphs without a stream are
# captured on one of the device of the first capture.
ON_THE_CURRENT_DEVICE = re.compile(
    r"(?<!streams)(?<!metrics)\.record\(\)|cuda\.(?:current_stream|Stream|synchronize)\(\)"
    r"|cuda\.graph\((?![^()]*stream=)"
)


@pytest.mark.parametrize("part", ["cache", "hf", "lm", "ops", "train"])
def test_streams_events_and_graphs_name_their_device(part):
    for text in ("copied.record()", "torch.cuda.graph(self.graph)", "torch.cuda.current_stream()"):
        assert ON_THE_CURRENT_DEVICE.search(text)
    assert not ON_THE_CURRENT_DEVICE.search("torch.cuda.graph(graph, pool=pool, stream=side)")
    for path in (Path(_register.__file__).parents[1] / part).rglob("*.py"):
        found = ON_THE_CURRENT_DEVICE.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path}: {found}"


def test_compiled_code_of_other_sources_is_not_found_again(tmp_path):
    """PyTorch's caches of compiled code have the tag in their keys, but not what operators do."""
    ops = Path(_register.__file__).parent
    assert f"nsa {_register.source_hash(ops)}" in torch.compiler.config.cache_key_tag
    copy = shutil.copytree(ops, tmp_path / "ops", ignore=shutil.ignore_patterns("__pycache__"))
    assert _register.source_hash(copy) == _register.source_hash(ops)
    changed = copy / "projection" / "kernels.py"
    changed.write_text(changed.read_text(encoding="utf-8").replace("16", "8"), encoding="utf-8")
    assert _register.source_hash(copy) != _register.source_hash(ops)


def test_tensors_without_memory_reach_the_fake_operator():
    tokens, dout = torch.zeros(3, dtype=torch.int32, device="meta"), torch.zeros(3, 4).to("meta")
    assert embed_backward_op(dout, tokens, 2).device.type == "meta"


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # PyTorch's own
def test_forward_mode_is_refused():
    """No tangent is dropped silently."""
    tokens, weight = torch.tensor([0, 1], dtype=torch.int32), torch.randn(2, 4)
    with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
        torch.func.jvp(lambda w: embed_op(tokens, w), (weight,), (weight,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode"):
        embed_op(tokens, forward_ad.make_dual(weight, weight))
    with forward_ad.dual_level():  # nothing to lose
        assert embed_op(tokens, weight).shape == (2, 4)
