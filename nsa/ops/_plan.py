"""Plans: everything that a launcher derives from shapes, worked out once for each shape.

Tiles, grids, constants and compiled kernels follow from the shapes of an operator's arguments. A
launcher asks for them through :func:`once`. The first call with some shapes computes the values,
and later calls with the same shapes get them back in the same order.

A plan may depend on shapes, strides, dtypes, devices, alignment, autocast and arguments that are
not tensors. It must not depend on the contents of a tensor; a launcher never reads them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from nsa.ops._backend import kernels_run_on_cpu

T = TypeVar("T")
# Plans that are kept for one function. Beyond that all are dropped: shapes that never come again
# would fill the memory.
MAX_PLANS = 256
# Triton compiles another kernel for addresses that are not multiples of 16 bytes, and tensor
# descriptors need such multiples.
ALIGNMENT = 16


class _Thread(threading.local):
    """The plan of the operator that runs in a thread.

    Attributes:
        values: the values of a known plan that have not been used yet.
        new: the values of a plan that is being made.
    """

    values: Iterator[Any] | None = None
    new: list[Any] | None = None


_thread = _Thread()
# The plans of every function, for tests.
PLANS: list[dict[tuple[Any, ...], list[Any]]] = []


def once(make: Callable[[], T]) -> T:
    """Return ``make()``, or what it returned in an earlier call of the operator with these shapes.

    Shapes must decide how often and in which order an operator calls this. Outside of functions
    that are :func:`planned` nothing is remembered.
    """
    if _thread.values is not None:
        found: T = next(_thread.values)
        return found
    value = make()
    if _thread.new is not None:
        _thread.new.append(value)
    return value


def planned(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a launcher: remember the values of :func:`once` for each shape.

    The function takes tensors, None, hashable values, and lists or tuples of these by position.
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
    """Add everything that a plan may depend on to the key, and collect the tensors."""
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
    """Whether kernels are launched, and neither launch hooks nor a search for tiles are active."""
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


class Constants(dict[str, Any]):
    """Base of frozen dataclasses that kernels take as constants.

    For what a tuple cannot hold: Triton takes no tuple of tuples. A dictionary of its own fields,
    since Triton writes constants as JSON wherever something looks on while it compiles.
    """

    def __post_init__(self) -> None:
        self.update(vars(self))
