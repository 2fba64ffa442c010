"""Registration of operators with PyTorch, each with a device guard.

``torch.library.custom_op`` would need less code, but it checks and wraps every call, which costs
four times the host time of the call itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.library import Library

from nsa.ops._plan import planned

_LIBRARY = Library("nsa", "FRAGMENT")


def source_hash(folder: Path) -> str:
    """Hash of the paths and contents of all Python files below a folder."""
    hashed = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        hashed.update(f"{path.relative_to(folder).as_posix()}\n".encode())
        hashed.update(path.read_bytes())
    return hashed.hexdigest()[:16]


# The on-disk caches of torch.compile identify an operator by name only. The tag prevents a hit on
# code that was compiled for the result strides of another version of these files.
torch.compiler.config.cache_key_tag += f" nsa {source_hash(Path(__file__).parent)}"


def register(
    name: str,
    schema: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Register ``nsa::<name>``; all operators of this library are registered here.

    The operator runs with the device of its tensors made current, as PyTorch's own operators do, so
    that one process can use several GPUs; side streams depend on it.

    Args:
        name: name of the operator, without its namespace.
        schema: arguments and results in PyTorch's schema syntax; results must not alias anything.
        function: implementation for all devices, called with positional arguments.
        fake: returns results with the right shapes, dtypes and devices for fake tensors.
        setup_context: ``(ctx, inputs, output)``: saves what ``backward`` needs, as in
            ``torch.autograd.Function``. If the result is a list of tensors, ``output`` is a tuple.
        backward: ``(ctx, *gradients)``: returns a gradient or None for each input, and a list for a
            list input; ``ctx.needs`` tells which are needed. None if not differentiable.

    Returns:
        The operator. Calling it costs less host time than calling ``torch.ops.nsa.<name>``, see
        :func:`_is_plain`.
    """
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    implementation = guarded(planned(function))
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nsa::{name}", fake, lib=_LIBRARY)
    operator: torch._ops.OpOverload = getattr(torch.ops.nsa, name).default
    gives_list = [str(result.type) for result in operator._schema.returns] == ["List[Tensor]"]
    differentiable = _differentiable(name, gives_list, setup_context, backward)

    def plain(inputs: Sequence[Any]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return implementation(*inputs)

    def below_autograd(inputs: Sequence[Any]) -> Any:
        if _is_plain(inputs):
            return plain(inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*inputs)

    def run(*inputs: Any) -> Any:
        # The profiler shows only calls that go through the dispatcher.
        if torch.compiler.is_compiling() or torch._C._autograd._profiler_enabled():
            return operator(*inputs)
        if _is_plain(inputs):
            return differentiable(plain, inputs)
        if torch._C._are_functorch_transforms_active():
            return differentiable(below_autograd, inputs)
        return operator(*inputs)

    _LIBRARY.impl(name, lambda *inputs: differentiable(below_autograd, inputs), "Autograd")
    return run


# Argument types that need no dispatch besides the implementation.
_PLAIN = {Tensor, nn.Parameter, type(None), bool, float, int, str, list}


def _is_plain(inputs: Sequence[Any]) -> bool:
    """Whether PyTorch's dispatcher would call only autograd and the implementation.

    The dispatcher converts each argument to C++ and back, about 25 us of host time per call. It is
    required for tensor subclasses, tensors without storage or with a pending negation or
    conjugation, symbolic integers, modes (fake tensors, tracing) and function transforms.
    """
    flat, kinds = inputs, set(map(type, inputs))
    if list in kinds:
        flat = [x for given in inputs for x in (given if type(given) is list else (given,))]
        kinds.update(map(type, flat))
    return (
        kinds <= _PLAIN
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and not any(x.is_neg() or x.is_meta for x in flat if isinstance(x, Tensor))
    )


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function so that the device of its first tensor is current."""

    def run(*arguments: Any) -> Any:
        index = cuda_index(arguments)
        if index is None or index == torch.cuda.current_device():
            return function(*arguments)
        with torch.cuda.device(index):
            return function(*arguments)

    return run


def _differentiable(
    name: str,
    gives_list: bool,
    setup_context: Callable[..., None] | None,
    backward_of: Callable[..., Any] | None,
) -> Callable[[Callable[[Sequence[Any]], Any], Sequence[Any]], Any]:
    """Differentiable form of an operator, a function of the implementation and the inputs.

    Args:
        name: name of the operator.
        gives_list: whether the operator returns a list of tensors.
        setup_context: see :func:`register`.
        backward_of: see ``backward`` of :func:`register`.
    """

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, below: Any, lengths: Lengths, *flat: Any) -> Any:
            output = below(_nested(lengths, flat))
            output = tuple(output) if gives_list else output
            save(ctx, lengths, flat, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            if backward_of is None:
                raise NotImplementedError(f"nsa::{name} has no gradient")
            ctx.needs = _nested(ctx.lists, ctx.needs_input_grad[2:])
            return None, None, *_flat(backward_of(ctx, *grads))[1]

    class Transformed(Differentiable):
        """The form for ``torch.func``, whose calls cost more host time."""

        @staticmethod
        def forward(below: Any, lengths: Lengths, *flat: Any) -> Any:  # type: ignore[override]
            output = below(_nested(lengths, flat))
            return tuple(output) if gives_list else output

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            _, lengths, *flat = inputs
            save(ctx, lengths, tuple(flat), output)

        @staticmethod
        def vmap(*_: Any) -> Any:
            text = "nsa's kernels cannot be mapped over (torch.func.vmap); give a batch [B, T, ...]"
            raise NotImplementedError(f'{text}, or backend="reference"')

    def save(ctx: Any, lengths: Lengths, flat: tuple[Any, ...], output: Any) -> None:
        ctx.lists = lengths
        if setup_context is not None:
            setup_context(ctx, _nested(lengths, flat), output)

    def run(below: Callable[[Sequence[Any]], Any], inputs: Sequence[Any]) -> Any:
        if forward_ad._current_level >= 0:
            _refuse_tangents(_flat(inputs)[1])
        if torch._C._are_functorch_transforms_active():
            lengths, flat = _flat(inputs)
            output = Transformed.apply(below, lengths, *flat)
            return list(output) if gives_list else output
        if torch.is_grad_enabled():
            lengths, flat = _flat(inputs)
            if any(isinstance(x, Tensor) and x.requires_grad for x in flat):
                output = Differentiable.apply(below, lengths, *flat)
                return list(output) if gives_list else output
        return below(inputs)

    return run


def _refuse_tangents(flat: Iterable[Any]) -> None:
    """Raise on forward-mode tangents, which would be dropped silently."""
    for x in flat:
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            text = "nsa's kernels have no forward-mode derivatives (torch.func.jvp)"
            raise NotImplementedError(f'{text}; backend="reference" has')


# (index, length) of each list argument.
Lengths = tuple[tuple[int, int], ...]


def _flat(arguments: Iterable[Any]) -> tuple[Lengths, list[Any]]:
    """Flatten lists of tensors in the arguments.

    ``torch.autograd.Function`` does not track tensors inside lists.
    """
    lengths, flat = [], list[Any]()
    for x in arguments:
        if isinstance(x, list) and x and (x[0] is None or isinstance(x[0], Tensor)):
            lengths.append((len(flat), len(x)))
            flat += x
        else:
            flat.append(x)
    return tuple(lengths), flat


def _nested(lengths: Lengths, flat: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inverse of :func:`_flat`."""
    if not lengths:
        return flat
    nested, place = list[Any](), 0
    for start, length in lengths:
        nested += [*flat[place:start], list(flat[start : start + length])]
        place = start + length
    return (*nested, *flat[place:])


def cuda_index(arguments: Iterable[Any]) -> int | None:
    """Index of the CUDA device of the first tensor among the arguments; None on another device."""
    for x in arguments:
        if isinstance(x, Tensor):
            return x.get_device() if x.is_cuda else None
        if isinstance(x, list | tuple):
            index = cuda_index(x)
            if index is not None:
                return index
    return None
