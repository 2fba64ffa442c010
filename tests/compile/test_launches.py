"""Launches that pass Triton by: the kernels that Triton takes, with the same arguments."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa.ops import _plan
from nsa.ops._triton.kernel import Kernel, Launch, describe, kernel
from tools.compile_only.driver import NotingGPU


class Recorder(NotingGPU):
    """A GPU that is not there, which keeps what is given to its launcher."""

    def __init__(self) -> None:
        super().__init__(90, [])
        self.launched: list[tuple[Any, ...]] = []

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        return lambda *given: self.launched.append((id(metadata), *given))

    def load_binary(
        self, name: str, binary: bytes, shared: int, device: int
    ) -> tuple[int, int, int, int, int]:
        """Handles that tell kernels apart."""
        return id(binary), id(binary) + 1, 32, 0, 1024

    def get_current_stream(self, device: int) -> int:
        """Any but the default one."""
        return 7


@pytest.fixture
def gpu(monkeypatch):
    """Tensors of the CPU count as its tensors."""
    recorder = Recorder()
    triton.runtime.driver.set_active(recorder)
    monkeypatch.setattr(_plan, "kernels_run_on_cpu", lambda: True)
    monkeypatch.setattr(Tensor, "get_device", lambda self: recorder.serial)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: recorder.serial)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    yield recorder
    triton.runtime.driver.set_active(None)


@kernel(do_not_specialize=["varying"])
def small_kernel(
    x_ptr,
    others,
    other_ptr,
    number,
    varying,
    scale,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    FLAG: tl.constexpr = False,
):
    at = tl.arange(0, BLOCK) + tl.program_id(0) * BLOCK
    x = tl.load(x_ptr + at * number) * scale + varying
    for index in tl.static_range(len(PARTS)):
        x += tl.load(others[index] + at) * PARTS[index]
    if other_ptr is not None:
        x += tl.load(other_ptr + at).to(tl.float32)
    if FLAG:
        x = -x
    tl.store(x_ptr + at, x)


@kernel(do_not_specialize=[])
def described_kernel(source, out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, BLOCK), tl.sum(source.load([0, 0]), 0))


def calls() -> Iterator[tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]]:
    """Grid, arguments and constants, each of which Triton may look at."""
    memory = torch.zeros(1024)
    for x, other, number, varying, scale in itertools.product(
        (memory, memory[1:]),
        (None, memory[1:], memory.bfloat16()),
        (1, 2, 16),
        (1, 16, 2**33),
        (0.5, 1.0),
    ):
        yield (
            (3,),
            (x, (memory, memory[2:]), other, number, varying, scale),
            {"BLOCK": 16, "PARTS": (1, 2)},
        )
    plain: tuple[Any, ...] = (memory, (memory, memory[2:]), None, 2, 3, 0.5)
    yield (3,), (*plain[:3], 2**32, *plain[4:]), {"BLOCK": 16, "PARTS": (1, 2)}
    yield (3, 2), plain, {"BLOCK": 16, "PARTS": (1, 3)}
    yield (3, 2, 5), plain, {"BLOCK": 32, "PARTS": (1, 2), "FLAG": True, "num_warps": 2}
    yield (3,), (memory, (), None, 2, 3, 0.5), {"BLOCK": 16, "PARTS": ()}
    yield (3,), (memory, (memory[2:], memory), None, 2, 3, 0.5), {"BLOCK": 16, "PARTS": (1, 2)}


def by_triton(function: Kernel, *args: Any, **constants: Any) -> Any:
    return JITFunction.run(function, *args, **{"enable_fp_fusion": True, **constants})


def test_a_direct_launch_is_triton_s(gpu):
    given = list(calls())
    for grid, args, constants in given:
        by_triton(small_kernel, *args, grid=grid, warmup=False, **constants)
    expected, gpu.launched = gpu.launched, []
    launches = [Launch(small_kernel, grid, **constants) for grid, _, constants in given]
    for _ in range(2):  # by Triton, and directly
        for launch, (_, args, _) in zip(launches, given, strict=True):
            launch(*args)
        assert [*map(_comparable, gpu.launched)] == [*map(_comparable, expected)]
        gpu.launched = []
    assert 8 < len({launch[0] for launch in expected}) < len(given)


def test_a_direct_launch_needs_no_look_by_triton(gpu, monkeypatch):
    memory = torch.zeros(1024)
    launch = Launch(small_kernel, (1,), BLOCK=16, PARTS=())
    launch(memory, (), None, 5, 3, 0.5)
    monkeypatch.setattr(JITFunction, "run", lambda *_, **__: pytest.fail("Triton looks"))
    launch(memory[128:], (), None, 5, 160, 0.5)
    *_, last = gpu.launched
    assert last[7:10] == (None, None, None)  # hooks
    assert last[11:16] == ((), None, 5, 160, 0.5)
    assert last[10].data_ptr() == memory[128:].data_ptr()


def test_descriptors(gpu):
    memory, out = torch.zeros(64, 64), torch.zeros(32)
    sources = [(16, memory), (16, memory), (32, memory), (16, memory.bfloat16())]
    launch = Launch(described_kernel, (1,), BLOCK=32)
    for rows, x in sources:
        described_kernel[(1,)](describe(x, (rows, 32)), out, BLOCK=32)
    launch(describe(memory, (16, 32)), out)
    launch(describe(memory, (16, 32)), out)
    kernels, given = ([launch[i] for launch in gpu.launched] for i in (0, 10))
    assert len({*kernels[:4]}) == 3
    assert kernels[0] == kernels[1] == kernels[4] == kernels[5]
    assert given[0] is given[1] is given[5]
    for descriptor, (rows, x) in zip(given, sources, strict=False):
        own = TensorDescriptor(x, [64, 64], [64, 1], [rows, 32])
        assert descriptor.base.data_ptr() == x.data_ptr()
        for name in ("shape", "strides", "block_shape", "padding"):
            assert getattr(descriptor, name) == getattr(own, name)


def test_kernels_are_compiled_for_the_device_of_the_tensors(gpu, monkeypatch):
    current, during = [gpu.serial + 1], list[int]()

    @contextmanager
    def device(index):
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(gpu, "launched", Mock(append=lambda _: during.append(current[-1])))
    small_kernel[(1,)](torch.zeros(64), (), None, 7, 3, 0.5, BLOCK=16, PARTS=())
    assert during == [gpu.serial]
    assert current == [gpu.serial + 1]


def _comparable(launch: tuple[Any, ...]) -> list[Any]:
    """Without hooks; tensors by the fact that they are addresses."""

    def plain(x: Any) -> Any:
        if isinstance(x, Tensor):
            return "address"
        if hasattr(x, "block_shape"):
            return tuple(x.shape), tuple(x.strides), tuple(x.block_shape), x.padding
        is_plain = isinstance(x, tuple) and not hasattr(x, "_fields")
        return tuple(plain(y) for y in x) if is_plain else x

    return [*launch[:7], *(plain(x) for x in launch[10:])]
