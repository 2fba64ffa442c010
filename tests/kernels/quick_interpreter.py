"""Triton's interpreter without the detours that take most of its time; results stay the same.

- A reduction with a combine function that NumPy does not have (the exclusive or in ``tl.sort``)
  takes the elements one by one. Here the function combines whole slices, in the same order.
- Every call of a device function searches all of ``triton.language`` for what is still to be
  patched. Here that is done once for each kernel launched.
- Every sum and product of integers is computed in 64 bits, too, for an assertion that is off. Here
  it is not.
- NumPy's name for a type comes from a table that is made again each time, and so does what a shape
  says of a tensor: its number of elements, its sizes as constants. Here each is made once.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

core = tl.core


def fold(self: Any, inputs: tuple[Any, ...]) -> list[Any]:
    """In place of ``ReduceOps.generic_reduce``."""
    arrays = [x.handle.data.reshape(-1) if self.axis is None else x.handle.data for x in inputs]
    axis = self.axis or 0

    def slice_at(i: int) -> list[Any]:
        return [
            self.to_tensor(array.take(i, axis), x.dtype)
            for array, x in zip(arrays, inputs, strict=True)
        ]

    total = slice_at(0)
    for i in range(1, arrays[0].shape[axis]):
        combined = self.combine_fn.fn(*total, *slice_at(i))
        total = list(combined) if isinstance(combined, tuple) else [combined]
    if not self.keep_dims:
        return total
    rank = inputs[0].handle.data.ndim
    shape = (
        [1] * rank
        if self.axis is None
        else [1 if d == axis else n for d, n in enumerate(inputs[0].handle.data.shape)]
    )
    return [self.to_tensor(np.reshape(x.handle.data, shape), x.dtype) for x in total]


def patch_once(original: Any) -> Any:
    """In place of ``_patch_lang``: nothing is left to patch in modules that were patched since the
    launch of the kernel.
    """
    patched: set[str] = set()

    @functools.cache
    def modules_of(function: Any) -> set[str]:
        return {
            x.__name__
            for x in function.__globals__.values()
            if inspect.ismodule(x) and x in (tl, tl.core)
        }

    def patch(function: Any) -> Any:
        modules = modules_of(function)
        if modules and modules <= patched:
            return interpreter._LangPatchScope()
        scope = original(function)
        restore = scope.restore

        def restore_and_forget() -> None:
            patched.clear()
            restore()

        scope.restore = restore_and_forget
        patched.update(modules)
        return scope

    return patch


def once_a_type(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """In place of ``_get_np_dtype``."""
    found: dict[str, Any] = {}

    def np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in found:
            found[name] = original(dtype)
        return found[name]

    return np_dtype


new_type = core.block_type.__init__
NO_SIZES, ONE = core.tuple([]), core.constexpr(1)


@functools.cache
def facts_of(sizes: tuple[int, ...]) -> tuple[Any, int, str, Any, Any]:
    """What types and tensors of one shape have in common: sizes, elements, the sizes in words, and
    both as constants.
    """
    block = core.block_type.__new__(core.block_type)
    new_type(block, tl.int1, list(sizes))
    constants = core.tuple([core.constexpr(size) for size in sizes])
    return block.shape, block.numel, str(block.shape), constants, core.constexpr(block.numel)


def init_type(self: Any, element_ty: Any, shape: Any) -> None:
    """In place of ``block_type.__init__``."""
    sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
    self.element_ty = element_ty
    self.shape, self.numel, words, *_ = facts_of(sizes)
    self.name = f"<{words}, {element_ty}>"


def init_tensor(self: Any, handle: Any, type: Any) -> None:
    """In place of ``tensor.__init__``."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    if type.is_block():
        *_, self.shape, self.numel = facts_of(tuple(type.shape.values))
    else:
        self.shape, self.numel = NO_SIZES, ONE


def install() -> None:
    """For the rest of the process."""
    interpreter.ReduceOps.generic_reduce = fold
    interpreter._patch_lang = patch_once(interpreter._patch_lang)
    interpreter._get_np_dtype = once_a_type(interpreter._get_np_dtype)
    builder = interpreter.interpreter_builder
    assert not builder.options.debug  # otherwise overflows are asserted
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    core.block_type.__init__ = init_type
    core.tensor.__init__ = init_tensor
