"""Triton's interpreter without the detours that take most of its time; results stay the same.

- A reduction with a combine function that NumPy does not have (the exclusive or in ``tl.sort``)
  takes the elements one by one. Here the function combines whole slices, in the same order.
- Every call of a device function searches all of ``triton.language`` for what is still to be
  patched. Here that is done once for each kernel launched.
- Every sum and product of integers is computed in 64 bits, too, for an assertion that is off. Here
  it is not.
- NumPy's name for a type comes from a table that is made again each time, and so does what a shape
  says of a tensor: its number of elements, its sizes as constants, what it becomes together with
  another shape. Here each is made once, as is the array of a constant.
- Operands of one type and shape, the usual case, go through all rules of promotion and of
  broadcasting. Here they are looked at first, as is a Python number beside a tensor.
- A scan with a combine function takes the elements one by one, too, and what is to be patched is
  searched for at each launch.
- A sort takes many steps of some twenty operations. Here NumPy sorts integers.
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
semantic = interpreter.TritonSemantic
builder = interpreter.interpreter_builder


def fold(self: Any, inputs: tuple[Any, ...]) -> list[Any]:
    """Replaces ``ReduceOps.generic_reduce``."""
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


def scan(self: Any, inputs: tuple[Any, ...]) -> list[Any]:
    """Replaces ``ScanOps.generic_scan``."""
    arrays = [x.handle.data for x in inputs]

    def as_tensors(slices: tuple[Any, ...]) -> list[Any]:
        return [self.to_tensor(a, x.dtype) for a, x in zip(slices, inputs, strict=True)]

    rows = [tuple(array.take(0, self.axis) for array in arrays)]
    for i in range(1, arrays[0].shape[self.axis]):
        here = tuple(array.take(i, self.axis) for array in arrays)
        combined = self.combine_fn.fn(*as_tensors(rows[-1]), *as_tensors(here))
        combined = combined if isinstance(combined, tuple) else (combined,)
        rows.append(
            tuple(
                np.reshape(x.handle.data, array.shape).astype(array.dtype)
                for x, array in zip(combined, here, strict=True)
            )
        )
    columns = [np.stack(column, self.axis) for column in zip(*rows, strict=True)]
    return as_tensors(tuple(columns))


def sort(original: Any) -> Any:
    """Replaces ``sort_impl``."""

    def sort_integers(x: Any, k: Any = None, dim: Any = None, descending: Any = False) -> Any:
        if not x.dtype.is_int():
            return original(x, k, dim, descending)
        assert core._unwrap_if_constexpr(dim) in (None, len(x.shape) - 1)
        ordered = np.sort(x.handle.data, axis=-1)
        if core._unwrap_if_constexpr(descending):
            ordered = ordered[..., ::-1]
        ordered = np.ascontiguousarray(ordered[..., : core._unwrap_if_constexpr(k)])
        handle = interpreter.TensorHandle(ordered, x.dtype)
        return core.tensor(handle, core.block_type(x.dtype, list(ordered.shape)))

    return sort_integers


def patch_once(original: Any) -> Any:
    """Replaces ``_patch_lang``: nothing is left to patch in modules that were patched since the
    launch of the kernel.
    """
    patched: set[str] = set()
    nothing = interpreter._LangPatchScope()

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
            return nothing
        scope = original(function)
        restore = scope.restore

        def restore_and_forget() -> None:
            patched.clear()
            restore()

        scope.restore = restore_and_forget
        patched.update(modules)
        return scope

    return patch


BUILTIN = core.builtin(lambda: None).__code__


@functools.cache
def patches_of(package: Any) -> list[tuple[str, Any]]:
    """Builtins of a module or class that nothing has patched yet, and what replaces them."""

    def patch_of(member: Any) -> Any:
        wrapped = getattr(member, "__code__", None) is BUILTIN  # classes have no code
        function = member.__wrapped__ if wrapped else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        return call

    members = inspect.getmembers(package)
    return [(name, patch_of(member)) for name, member in members if core.is_builtin(member)]


def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """Replaces ``_patch_builtin``."""
    for name, member in patches_of(package):
        scope.set_attr(package, name, member)


def once_a_type(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Replaces ``_get_np_dtype``."""
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
    """Replaces ``block_type.__init__``."""
    sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
    self.element_ty = element_ty
    self.facts = facts_of(sizes)
    self.shape, self.numel, words, *_ = self.facts
    self.name = f"<{words}, {element_ty}>"


def with_element_ty(self: Any, element_ty: Any) -> Any:
    """Replaces ``block_type.with_element_ty``."""
    block = core.block_type.__new__(core.block_type)
    block.element_ty = element_ty
    block.facts = self.facts
    block.shape, block.numel, words, *_ = self.facts
    block.name = f"<{words}, {element_ty}>"
    return block


def init_tensor(self: Any, handle: Any, type: Any) -> None:
    """Replaces ``tensor.__init__``."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    if type.is_block():
        *_, self.shape, self.numel = type.facts
    else:
        self.shape, self.numel = NO_SIZES, ONE


def equal_types(original: Any) -> Any:
    """Replaces ``dtype.__eq__``."""
    return lambda self, other: self is other or original(self, other)


def constants(original: Any) -> Any:
    """Replaces ``scalar_constant``."""
    arrays: dict[tuple[Any, str], Any] = {}

    def scalar_constant(self: Any, value: Any, dtype: Any) -> Any:
        key = (value, dtype.name)
        if key not in arrays:
            arrays[key] = original(self, value, dtype).handle.data
            arrays[key].flags.writeable = False
        return core.tensor(interpreter.TensorHandle(arrays[key], dtype), dtype)

    return scalar_constant


@functools.cache
def together(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that two of equal rank broadcast to; empty where there is none."""
    if any(x != y and 1 not in (x, y) for x, y in zip(a, b, strict=True)):
        return ()
    return tuple(y if x == 1 else x for x, y in zip(a, b, strict=True))


def spread(data: Any, sizes: tuple[int, ...]) -> Any:
    """A copy of one shape: ``np.broadcast_to`` and ``np.full`` take longer for small tiles."""
    out = np.empty(sizes, data.dtype)
    out[...] = data
    return out


def broadcast(original: Any) -> Any:
    """Replaces ``broadcast_impl_value``."""

    def splat(x: Any, like: Any) -> Any:
        data = spread(x.handle.data, tuple(like.shape.values))
        return core.tensor(interpreter.TensorHandle(data, x.dtype), like.with_element_ty(x.dtype))

    def enlarge(x: Any, sizes: tuple[int, ...]) -> Any:
        if tuple(x.type.shape.values) == sizes:
            return x
        handle = interpreter.TensorHandle(spread(x.handle.data, sizes), x.dtype)
        return core.tensor(handle, core.block_type(x.dtype, sizes))

    def broadcast_both(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        left, right = lhs.type, rhs.type
        if not left.is_block():
            return (splat(lhs, right), rhs) if right.is_block() else (lhs, rhs)
        if not right.is_block():
            return lhs, splat(rhs, left)
        if left.shape is right.shape:
            return lhs, rhs
        a, b = tuple(left.shape.values), tuple(right.shape.values)
        sizes = together(a, b) if len(a) == len(b) else ()
        return (enlarge(lhs, sizes), enlarge(rhs, sizes)) if sizes else original(self, lhs, rhs)

    return broadcast_both


ANY_OPERATION = {"fp32", "fp64", "int1", "int32", "int64"}  # two of a type stay as they are
WHOLE, REAL = {"int32", "int64"}, {"fp32", "fp64"}


def operands(original: Any) -> Any:
    """Replaces ``binary_op_type_checking_impl``."""

    blocks: dict[tuple[Any, ...], Any] = {}

    def with_number(self: Any, x: Any, number: Any) -> Any:
        """A number as a constant of the tensor's type, where no rule says otherwise."""
        name, kind = x.dtype.name, type(number)
        small = kind is int and -(2**31) <= number < 2**31
        if not ((small and (name in WHOLE or name in REAL)) or (kind is float and name in REAL)):
            return None
        if not x.type.is_block():
            return self.scalar_constant(number, x.dtype)
        key = number, name, x.handle.data.shape
        if key not in blocks:
            blocks[key] = spread(self.scalar_constant(number, x.dtype).handle.data, key[2])
            blocks[key].flags.writeable = False
        return core.tensor(interpreter.TensorHandle(blocks[key], x.dtype), x.type)

    def check(self: Any, lhs: Any, rhs: Any, *rules: Any, **more: Any) -> tuple[Any, Any]:
        left, right = type(lhs) is core.tensor, type(rhs) is core.tensor
        if left and right:
            a, b = lhs.dtype.name, rhs.dtype.name
            if a == b and a in ANY_OPERATION:
                return self.broadcast_impl_value(lhs, rhs)
            if a in WHOLE and b in WHOLE:
                return self.broadcast_impl_value(self.cast(lhs, tl.int64), self.cast(rhs, tl.int64))
            if rules[:1] == (True,) and lhs.dtype.is_ptr() and b in WHOLE:
                return self.broadcast_impl_value(lhs, rhs)
        elif left and (constant := with_number(self, lhs, rhs)) is not None:
            return lhs, constant
        elif right and (constant := with_number(self, rhs, lhs)) is not None:
            return constant, rhs
        return original(self, lhs, rhs, *rules, **more)

    return check


def install() -> None:
    """For the rest of the process."""
    interpreter.ReduceOps.generic_reduce = fold
    interpreter.ScanOps.generic_scan = scan
    tl.standard.sort_impl = sort(tl.standard.sort_impl)
    interpreter._patch_lang = patch_once(interpreter._patch_lang)
    interpreter._patch_builtin = patch_builtin
    interpreter._get_np_dtype = once_a_type(interpreter._get_np_dtype)
    assert not builder.options.debug  # otherwise overflows are asserted
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    core.block_type.__init__ = init_type
    core.block_type.with_element_ty = with_element_ty
    core.tensor.__init__ = init_tensor
    core.dtype.__eq__ = equal_types(core.dtype.__eq__)
    semantic.scalar_constant = constants(semantic.scalar_constant)
    semantic.broadcast_impl_value = broadcast(semantic.broadcast_impl_value)
    semantic.binary_op_type_checking_impl = operands(semantic.binary_op_type_checking_impl)
