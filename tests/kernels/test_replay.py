"""Replayed launches: the same results for other data, and for nothing but what they were recorded
for.
"""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.nvidia import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa import stages
from nsa.ops import _replay
from nsa.ops._replay import replayed
from nsa.ops._triton.kernel import keep_descriptors, kernel


@kernel(do_not_specialize=["number"])
def scale_kernel(x_ptr, out_ptr, number, factor, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < number)
    tl.store(out_ptr + at, x * factor, mask=at < number)


def launcher() -> Any:
    """A replayed function, and the calls that its Python has seen."""
    calls: list[int] = []

    @replayed
    def scale(
        x: Tensor, others: list[Tensor | None], factor: float
    ) -> tuple[Tensor, Tensor | None]:
        calls.append(1)
        flat = x.flatten()[4:]
        out = torch.empty_like(flat)
        scale_kernel[(1,)](
            flat, out, flat.shape[0], factor, BLOCK=triton.next_power_of_2(flat.shape[0])
        )
        order = out.sort(stable=True)[0]
        for other in others:
            if other is not None:
                order.add_(other)
        return out.view(2, -1).t(), order

    return scale, calls


def expected(x: Tensor, others: list[Tensor | None], factor: float) -> tuple[Tensor, Tensor]:
    out = x.flatten()[4:] * factor
    return out.view(2, -1).t(), out.sort()[0] + sum(other for other in others if other is not None)


def check(found: Any, x: Tensor, others: list[Tensor | None], factor: float) -> None:
    for y, z in zip(found, expected(x, others, factor), strict=True):
        torch.testing.assert_close(y, z)
        assert y.stride() == z.stride()


def test_the_third_call_is_replayed():
    scale, calls = launcher()
    for number in range(5):
        x, others = torch.randn(4, 5), [torch.randn(16), None, torch.randn(16)]
        check(scale(x, others, 0.5), x, others, 0.5)
        assert len(calls) == min(number + 1, 2)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: (torch.randn(5, 4), [None], 0.5),
        lambda x: (torch.randn(5, 4).t(), [None], 0.5),
        lambda x: (x.double(), [None], 0.5),
        lambda x: (x, [None], 2.0),
        lambda x: (x, [], 0.5),
        lambda x: (torch.randn(21)[1:].view(4, 5), [None], 0.5),
    ],
    ids=["shape", "stride", "dtype", "number", "list", "alignment"],
)
def test_what_a_launch_may_depend_on_tells_programs_apart(other):
    scale, calls = launcher()
    x = torch.randn(4, 5)
    for _ in range(3):
        scale(x, [None], 0.5)
    seen = len(calls)
    check(scale(*other(x)), *other(x)) if other(x)[0] is x else scale(*other(x))
    assert len(calls) == seen + 1


def test_one_tensor_twice_is_not_two():
    @replayed
    def add(x: Tensor, y: Tensor) -> Tensor:
        return x + 2 * y

    x, y = torch.ones(4), torch.full((4,), 3.0)
    for _ in range(3):
        assert add(x, x).tolist() == [3] * 4
    for _ in range(3):
        assert add(x, y).tolist() == [7] * 4
        assert add(x, x).tolist() == [3] * 4


def test_tensors_made_beforehand_are_kept():
    table = torch.arange(4.0)

    @replayed
    def add(x: Tensor) -> Tensor:
        return x + table

    for number in range(4):
        assert add(torch.full((4,), float(number))).tolist() == [number + i for i in range(4)]


def test_memory_is_let_go_where_python_lets_it_go():
    """Before the step that follows; and what a call was given does not outlive it."""

    @replayed
    def work(x: Tensor) -> Tensor:
        first = x + 1
        second = first * 2
        del first
        third = second - 1
        del second
        return third * 3

    for number in range(4):
        assert work(torch.full((3,), float(number))).tolist() == [6 * number + 3] * 3
    programs: dict[Any, Any] = work.programs  # type: ignore[attr-defined]
    text = next(program for program in programs.values() if program).text
    lines = [line.strip() for line in text.splitlines()]
    made = {line.split()[0]: place for place, line in enumerate(lines) if " = c" in line}
    freed = {line.split()[0]: place for place, line in enumerate(lines) if line.endswith("= None")}
    assert freed == {"t1": made["t2"] + 1, "t2": made["t3"] + 1}
    given = torch.ones(3)
    reference = weakref.ref(given)
    work(given)
    del given
    gc.collect()
    assert reference() is None


def test_programs_are_forgotten_before_they_fill_the_memory(
    monkeypatch,
):
    monkeypatch.setattr(_replay, "MOST_PROGRAMS", 4)
    scale, calls = launcher()
    for number in range(1, 20):
        for _ in range(3):
            x = torch.randn(2 * number, 4)
            check(scale(x, [], 0.5), x, [], 0.5)
        assert len(scale.programs) <= 4
    assert len(calls) == 38


def test_autocast_tells_programs_apart():
    """Inside autocast PyTorch may give an operator other inputs than it was called with."""
    scale, calls = launcher()
    x = torch.randn(4, 5)
    for _ in range(3):
        scale(x, [], 0.5)
    with torch.autocast("cpu"):
        check(scale(x, [], 0.5), x, [], 0.5)
    assert len(calls) == 3


def test_memory_on_another_device_stays_there():
    @replayed
    def pair(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty(3, device="meta"), x + 1

    for _ in range(4):
        elsewhere, here = pair(torch.ones(2))
        assert (elsewhere.device.type, here.device.type) == ("meta", "cpu")


def test_a_listener_to_stages_sees_the_launches():
    scale, calls = launcher()
    x = torch.randn(4, 5)
    for _ in range(3):
        scale(x, [], 0.5)
    with stages.stages_seen_by(lambda name: nullcontext()):
        check(scale(x, [], 0.5), x, [], 0.5)
    assert len(calls) == 3


def test_a_failed_recording_is_none():
    calls: list[int] = []

    @replayed
    def fail(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return x + 1

    x = torch.ones(2)
    fail(x)
    with pytest.raises(RuntimeError, match="out of memory"):
        fail(x)
    assert _replay.recorder() is None
    for _ in range(3):
        assert fail(x).tolist() == [2, 2]
    assert len(calls) == 3


def test_a_descriptor_is_encoded_once_for_an_address(monkeypatch):
    """A replayed one; what callers make themselves is encoded at each launch, as by Triton."""
    encoded: list[Any] = []

    def expand(arg: Any, metadata: Any) -> list[Any]:
        encoded.append(arg)
        return [arg.base.data_ptr(), metadata]

    monkeypatch.setattr(driver, "make_tensordesc_arg", expand)
    keep_descriptors()
    keep_descriptors()  # a second time nothing is wrapped again
    kept: Any = driver.make_tensordesc_arg
    monkeypatch.setattr(_replay, "MOST_DESCRIPTORS", 2)
    of_address = _replay.Descriptors(([4], [1], [4], "zero", False))
    for address in (64, 128, 64, 128, 64):
        assert kept(of_address[address], "swizzle") == [address, "swizzle"]
    assert [one.base.data_ptr() for one in encoded] == [64, 128]
    assert kept(of_address[192], None) == [192, None]  # the others are forgotten
    assert [*of_address] == [192]
    own = TensorDescriptor(torch.zeros(4), [4], [1], [4])
    seen = len(encoded)
    assert kept(own, 1) == kept(own, 1) == [own.base.data_ptr(), 1]
    assert encoded[seen:] == [own, own]
