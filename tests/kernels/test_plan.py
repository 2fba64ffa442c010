"""Plans: what a launcher derives from shapes is used again for the same shapes alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.nvidia import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa.ops import _plan
from nsa.ops._plan import once, planned
from nsa.ops._triton.kernel import (
    Address,
    Launch,
    _described,
    keep_encoded_descriptors,
    kernel,
)
from nsa.ops._triton.tuning import tiles_chosen_by


@kernel(do_not_specialize=["number"])
def scale_kernel(x_ptr, out_ptr, number, factor, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < number)
    tl.store(out_ptr + at, x * factor, mask=at < number)


def launcher() -> Any:
    """A planned function, and the sizes for which it has made a plan."""
    made: list[int] = []

    @planned
    def scale(x: Tensor, others: list[Tensor | None], factor: float) -> Tensor:
        flat = x.contiguous().flatten()

        def plan() -> Launch:
            made.append(flat.shape[0])
            return Launch(scale_kernel, (1,), BLOCK=triton.next_power_of_2(flat.shape[0]))

        out = torch.empty_like(flat)
        once(plan)(flat, out, flat.shape[0], factor)
        return out + sum(x for x in others if x is not None)

    return scale, made


def test_the_second_call_uses_the_plan():
    scale, made = launcher()
    for _ in range(3):
        x, other = torch.randn(4, 5), torch.randn(20)
        torch.testing.assert_close(scale(x, [other, None], 0.5), x.flatten() * 0.5 + other)
    assert made == [20]


@pytest.mark.parametrize(
    "other",
    [
        lambda x: (torch.randn(5, 5), [None], 0.5),
        lambda x: (torch.randn(5, 4).t(), [None], 0.5),
        lambda x: (x.double(), [None], 0.5),
        lambda x: (x, [None], 2.0),
        lambda x: (x, [None], 1),
        lambda x: (x, [], 0.5),
        lambda x: (x, [torch.zeros(20)], 0.5),
        lambda x: (torch.randn(21)[1:].view(4, 5), [None], 0.5),
    ],
    ids=["shape", "stride", "dtype", "number", "type", "list", "tensor for None", "alignment"],
)
def test_whatever_a_launch_may_depend_on_has_a_plan_of_its_own(
    other,
):
    scale, made = launcher()
    x = torch.randn(4, 5)
    scale(x, [None], 0.5)
    for _ in range(2):
        given = other(x)
        torch.testing.assert_close(scale(*given), given[0].flatten() * given[2])
    assert len(made) == 2


def test_autocast_has_plans_of_its_own():
    scale, made = launcher()
    for dtype in (None, torch.bfloat16, torch.float16):
        for _ in range(2):
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                scale(torch.randn(4, 5), [], 0.5)
    assert len(made) == 3


def test_hooks_and_a_search_for_tiles_see_every_launch():
    scale, made = launcher()
    scale(torch.randn(4, 5), [], 0.5)
    with tiles_chosen_by(lambda key, tile: tile):
        scale(torch.randn(4, 5), [], 0.5)
    hook: Callable[[Any], None] = lambda metadata: None  # noqa: E731
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        scale(torch.randn(4, 5), [], 0.5)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert len(made) == 3
    scale(torch.randn(4, 5), [], 0.5)
    assert len(made) == 3


def test_a_call_that_fails_leaves_no_plan():
    made: list[int] = []

    @planned
    def fail(x, times):
        for number in range(2):
            once(lambda: made.append(number))  # noqa: B023
            if number < times and len(made) == 1:
                raise RuntimeError("out of memory")
        return len(made)

    with pytest.raises(RuntimeError, match="out of memory"):
        fail(torch.ones(2), 1)
    assert once(lambda: 3) == 3  # outside of a planned function nothing is remembered
    assert [fail(torch.ones(2), 1) for _ in range(2)] == [3, 3]


def test_planned_functions_within_each_other():
    @planned
    def inner(x):
        return [once(lambda: x.shape[0]), once(lambda: 2)]

    @planned
    def outer(x):
        return [once(lambda: 1), *inner(x[:2]), once(lambda: 3)]

    for _ in range(2):
        assert outer(torch.ones(5)) == [1, 2, 2, 3]
        assert inner(torch.ones(4)) == [4, 2]


def test_plans_are_dropped_before_they_fill_the_memory(monkeypatch):
    monkeypatch.setattr(_plan, "MAX_PLANS", 4)
    scale, made = launcher()
    for number in range(1, 20):
        for _ in range(2):
            scale(torch.randn(number, 4), [], 0.5)
        assert len(scale.plans) <= 4
    assert len(made) == 19


def test_a_descriptor_is_encoded_once_for_an_address():
    """Others than those of ``describe`` are encoded at each launch, as by Triton."""
    encoded: list[Any] = []

    def encode(arg, metadata):
        encoded.append(arg)
        return [arg.base.data_ptr(), metadata]

    with mock.patch.object(driver, "make_tensordesc_arg", encode):
        keep_encoded_descriptors()
        keep_encoded_descriptors()  # a second time nothing is wrapped again
        kept: Any = driver.make_tensordesc_arg
        for address in (64, 128, 64, 128, 64):
            given = _described(address, torch.float32, 0, (8,), (1,), (4,))
            assert kept(given, "swizzle") == [address, "swizzle"]
            assert isinstance(given.base, Address)
        assert [one.base.data_ptr() for one in encoded] == [64, 128]
        own = TensorDescriptor(torch.zeros(4), [4], [1], [4])
        assert kept(own, 1) == kept(own, 1) == [own.base.data_ptr(), 1]
        assert encoded[2:] == [own, own]
