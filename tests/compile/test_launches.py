"""Launches that find their compiled kernel without Triton: the one that Triton takes, with the
arguments that it gives.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa import NSAConfig
from nsa.ops._backend import as_on_gpu
from nsa.ops._triton import kernel as module
from nsa.ops._triton import tuning
from nsa.ops._triton.kernel import Kernel, kernel
from nsa.ops._triton.tuning import default_tile, tiles_chosen_by
from nsa.stages import stages_seen_by
from tools.compile_only.driver import NotingGPU
from tools.compile_only.launches import PARTS, attention

Launch = tuple[Any, ...]


class Recorder(NotingGPU):
    """A GPU that is not there, which keeps what is given to its launcher."""

    def __init__(self) -> None:
        super().__init__(90, [])
        self.launched: list[Launch] = []

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
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Tensors of the CPU count as its tensors."""
    recorder = Recorder()
    triton.runtime.driver.set_active(recorder)
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


def test_what_is_found_is_what_triton_takes(gpu: Recorder) -> None:
    given = list(calls())
    for grid, args, constants in given:
        by_triton(small_kernel, *args, grid=grid, warmup=False, **constants)
    triton_launched, gpu.launched = gpu.launched, []
    for _ in range(2):  # kernels that are new, and kernels that are found
        for grid, args, constants in given:
            small_kernel[grid](*args, **constants)
        assert [_comparable(launch) for launch in gpu.launched] == [
            _comparable(launch) for launch in triton_launched
        ]
        gpu.launched = []
    assert 8 < len({launch[0] for launch in triton_launched}) < len(given)


def test_a_kernel_that_was_found_needs_no_look_by_triton(
    gpu: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = torch.zeros(1024)

    def launch(varying: int, x: Tensor = memory) -> None:
        small_kernel[(1,)](x, (), None, 5, varying, 0.5, BLOCK=16, PARTS=())

    launch(3)
    monkeypatch.setattr(JITFunction, "run", lambda *_, **__: pytest.fail("Triton looks"))
    launch(3)
    launch(160, memory[128:])  # a size that nothing is compiled anew for, and other memory
    assert [given[10:16] for given in gpu.launched[1:]] == [
        (memory, (), None, 5, 3, 0.5),
        (gpu.launched[2][10], (), None, 5, 160, 0.5),
    ]
    assert gpu.launched[2][10].data_ptr() == memory[128:].data_ptr()
    with pytest.raises(pytest.fail.Exception, match="Triton looks"):
        launch(2**40)


def test_descriptors(gpu: Recorder) -> None:
    memory, out = torch.zeros(64, 64), torch.zeros(32)
    for rows, source in ((16, memory), (16, memory), (32, memory), (16, memory.bfloat16())):
        described_kernel[(1,)](
            TensorDescriptor(source, [64, 64], [64, 1], [rows, 32]), out, BLOCK=32
        )
    kernels = [launch[0] for launch in gpu.launched]
    assert kernels[0] == kernels[1]
    assert len(set(kernels)) == 3
    assert gpu.launched[1][10].base is memory


def test_hooks_are_called(gpu: Recorder) -> None:
    told: list[str] = []
    hook = triton.knobs.runtime.launch_enter_hook
    note = lambda metadata: told.append(metadata.get()["name"])  # noqa: E731
    arguments = (torch.zeros(64), (), None, 5, 3, 0.5)
    small_kernel[(1,)](*arguments, BLOCK=16, PARTS=())
    hook.add(note)
    try:
        small_kernel[(1,)](*arguments, BLOCK=16, PARTS=())
    finally:
        hook.remove(note)
    assert gpu.launched[1][8] is hook  # Triton's launcher calls it
    small_kernel[(1,)](*arguments, BLOCK=16, PARTS=())
    assert gpu.launched[2][7:10] == (None, None, None)


def test_the_device_of_the_tensors_is_current(
    gpu: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether Triton looks at the launch, as for a new kernel, or not."""
    current, during = [gpu.serial + 1], list[int]()

    @contextmanager
    def device(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(gpu, "launched", Mock(append=lambda _: during.append(current[-1])))
    for number in (7, 7):
        small_kernel[(1,)](torch.zeros(64), (), None, number, 3, 0.5, BLOCK=16, PARTS=())
    assert during == [gpu.serial] * 2
    assert current == [gpu.serial + 1]


def test_compiled_kernels_are_forgotten_before_they_fill_the_memory(
    gpu: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_COMPILED", 4)
    for number in range(2, 30):
        small_kernel[(1,)](torch.zeros(64), (), None, number, 3, 0.5, BLOCK=16, PARTS=())
        assert len(small_kernel._compiled) <= 4
    assert len(gpu.launched) == 28


def test_whole_attention_is_launched_as_by_triton(
    gpu: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Triton, found and recorded, replayed: the same kernels in the same order and sizes."""
    config = NSAConfig(num_heads=12, num_kv_heads=2, head_dim=64, value_dim=64)

    def attend() -> list[Launch]:
        gpu.launched = []
        torch.manual_seed(0)
        (out,), inputs = attention(config, torch.bfloat16, PARTS)  # kernels of test_compile.py
        torch.autograd.grad(out, inputs, torch.ones_like(out))
        return gpu.launched

    # A search for tiles replays nothing; here it only stands in for the table of a GPU.
    monkeypatch.setattr(tuning, "tiles_are_chosen", lambda: False)
    with as_on_gpu(), tiles_chosen_by(lambda key, _: default_tile(key, (9, 0))):
        attend()
        found = attend()
        replayed = attend()
        with stages_seen_by(lambda name: nullcontext()):  # nothing is replayed
            monkeypatch.setattr(Kernel, "run", by_triton)
            expected = attend()
    tensors = [
        any(isinstance(x, Tensor) for launch in some for x in launch) for some in (found, replayed)
    ]
    assert tensors == [True, False]
    for some in (found, replayed):
        assert [*map(_comparable, some)] == [*map(_comparable, expected)]
    assert len(found) > 15


def _comparable(launch: Launch) -> list[Any]:
    """Without what a hook would be told; tensors by the fact that they are addresses, as replayed
    launches have them.
    """

    def plain(x: Any) -> Any:
        if isinstance(x, Tensor) or (isinstance(x, int) and x >= 2**40):
            return "address"
        if hasattr(x, "block_shape"):
            return tuple(x.shape), tuple(x.strides), tuple(x.block_shape), x.padding
        return (
            tuple(plain(y) for y in x) if isinstance(x, tuple) and not hasattr(x, "_fields") else x
        )

    return [*launch[:7], *(plain(x) for x in launch[10:])]
