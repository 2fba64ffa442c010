"""Launch plans: values that a launcher derives from shapes, computed once per set of shapes.

Tiles, grids, constants and compiled kernels depend only on the shapes of an operator's arguments.
A launcher computes each of them through :func:`once`: the first call with given shapes computes
the values, and later calls with the same shapes return them in the same order.

A plan may depend on shapes, strides, dtypes, devices, alignment, autocast and non-tensor
arguments, never on the contents of a tensor.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from nsa.ops._backend import kernels_run_on_cpu

T = TypeVar("T")
# Maximum number of plans per function. When it is exceeded, all are dropped, so that shapes that
# never recur do not fill the memory.
MAX_PLANS = 256
# Triton compiles a separate kernel for addresses that are not 16-byte aligned, and tensor
# descriptors require the alignment.
ALIGNMENT = 16


class _Thread(threading.local):
    """Plan of the operator that is running in this thread.

    Attributes:
        values: remaining values of an existing plan.
        new: values of a plan that is being recorded.
    """

    values: Iterator[Any] | None = None
    new: list[Any] | None = None


_thread = _Thread()
# Plans of all functions, for tests.
PLANS: list[dict[tuple[Any, ...], list[Any]]] = []


def once(make: Callable[[], T]) -> T:
    """Return ``make()``, or its cached result from an earlier call with the same shapes.

    The number and order of the calls in an operator must depend only on shapes. Outside of
    functions decorated with :func:`planned` nothing is cached.
    """
    if _thread.values is not None:
        found: T = next(_thread.values)
        return found
    value = make()
    if _thread.new is not None:
        _thread.new.append(value)
    return value


def planned(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a launcher: cache the values of :func:`once` for each set of shapes.

    The function's positional arguments are tensors, None, hashable values, or lists or tuples of
    them.
    """
    plans: dict[tuple[Any, ...], list[Any]] = {}
    PLANS.append(plans)

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        key: list[Any] = []
        tensors: list[Tensor] = []
        _describe(arguments, key, tensors)
        before = _thread.values, _thread.new
        if not _may_remember(tensors):
            _thread.values = _thread.new = None
            try:
                return function(*arguments)
            finally:
                _thread.values, _thread.new = before
        kind = tensors[0].device.type
        key.append(torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind))
        known = tuple(key)
        plan = plans.get(known)
        _thread.values, _thread.new = (None, []) if plan is None else (iter(plan), None)
        try:
            result = function(*arguments)
            if plan is None:
                if len(plans) >= MAX_PLANS:
                    plans.clear()
                plans[known] = _thread.new or []
            return result
        finally:
            _thread.values, _thread.new = before

    run.plans = plans  # type: ignore[attr-defined]
    return run


def _describe(arguments: Iterable[Any], key: list[Any], tensors: list[Tensor]) -> None:
    """Append everything that a plan may depend on to ``key``, and all tensors to ``tensors``."""
    for x in arguments:
        if isinstance(x, Tensor):
            tensors.append(x)
            key += (x.dtype, x.shape, x.stride(), x.data_ptr() % ALIGNMENT, x.get_device())
        elif isinstance(x, list | tuple):
            key.append(len(x))
            _describe(x, key, tensors)
        else:
            key += (type(x), x)


def _may_remember(tensors: list[Tensor]) -> bool:
    """Whether plans can be cached: kernels run, without launch hooks and without a tile search."""
    if not tensors or not (tensors[0].is_cuda or kernels_run_on_cpu()):
        return False
    hooks, tuning = _triton()
    has_hooks = hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls
    return not (has_hooks or tuning.tiles_are_chosen())


@functools.cache
def _triton() -> tuple[Any, Any]:
    """Triton's runtime settings and the tuning module, imported at the first launch."""
    import triton

    from nsa.ops._triton import tuning

    return triton.knobs.runtime, tuning


def is_fake(x: Tensor) -> bool:
    """Whether a tensor has no data, so that nothing can be launched."""
    return isinstance(x, FakeTensor) or x.is_meta


class Constants(dict[str, Any]):
    """Base class of frozen dataclasses that kernels take as constants.

    Used if a tuple does not suffice: Triton supports no nested tuples. It is a dictionary of its
    own fields because Triton serializes constants to JSON when a compilation hook is active.
    """

    def __post_init__(self) -> None:
        self.update(vars(self))
