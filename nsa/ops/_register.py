"""Registration of operators with PyTorch, each with a guard of the device of its tensors.

``torch.library.custom_op`` would do the same in fewer lines. It checks and wraps every call anew,
though, which costs the host four times as much as the call itself.
"""

from __future__ import annotations

import functools
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
    """Hash of all Python files below a folder, their places included."""
    hashed = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        hashed.update(f"{path.relative_to(folder).as_posix()}\n".encode())
        hashed.update(path.read_bytes())
    return hashed.hexdigest()[:16]


# The caches of torch.compile on disk know an operator by its name alone. Code compiled for the
# strides that its results had in another version of these files must not be found again.
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
    """Register ``nsa::<name>``: the one way in which operators of this library are registered.

    The operator runs with the device of its tensors made current, as PyTorch's own operators do, so
    that one process can use several GPUs: side streams need it.

    Args:
        name: of the operator, without its namespace.
        schema: its arguments and results, as PyTorch writes them; results are tensors that share no
            memory with anything.
        function: the implementation for every device; it is called with positional arguments.
        fake: gives results of the right shapes, dtypes and devices for tensors without memory.
        setup_context: ``(ctx, inputs, output)``: keeps what ``backward`` needs, as in
            ``torch.autograd.Function``. Where the result is a list of tensors, ``output`` is a
            tuple.
        backward: ``(ctx, *gradients)``: a gradient, or None, for each input, a list of them for a
            list; ``ctx.needs`` says which are wanted. Without it there are none.

    Returns:
        The operator. Called through this function it costs less host time than as
        ``torch.ops.nsa.<name>``, see :func:`_is_plain`.
    """
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    implementation = guarded(planned(function))
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nsa::{name}", fake, lib=_LIBRARY)
    operator: torch._ops.OpOverload = getattr(torch.ops.nsa, name).default
    gives_list = [str(result.type) for result in operator._schema.returns] == ["List[Tensor]"]
    gradient = (setup_context or _keep_nothing, backward or _no_gradient(name))
    differentiable = _differentiable(gives_list, *gradient)

    def below_autograd(inputs: Sequence[Any]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return implementation(*inputs) if _is_plain(inputs) else operator(*inputs)

    def plain(inputs: Sequence[Any]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return implementation(*inputs)

    def run(*inputs: Any) -> Any:
        # Profiles show what PyTorch dispatches.
        if torch.compiler.is_compiling() or torch._C._autograd._profiler_enabled():
            return operator(*inputs)
        return differentiable(plain, inputs) if _is_plain(inputs) else operator(*inputs)

    kernel = functools.partial(_with_inputs, differentiable, below_autograd)
    _LIBRARY.impl(name, kernel, "Autograd")
    return run


def _with_inputs(function: Callable[..., Any], below: Callable[..., Any], *inputs: Any) -> Any:
    return function(below, inputs)


# Types of arguments for which nothing but the implementation itself is registered.
_PLAIN = {Tensor, nn.Parameter, type(None), bool, float, int, str, list}


def _is_plain(inputs: Sequence[Any]) -> bool:
    """Whether PyTorch's dispatcher would call nothing but autograd and the implementation.

    It converts each argument to C++ and back, which costs the host some 25 us. It is needed for
    subclasses of tensors, those without memory or with a sign to apply, symbolic numbers, modes
    (fake tensors, tracing) and transforms of functions.
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
    """The function, with the device of its first tensor made current."""

    def run(*arguments: Any) -> Any:
        index = cuda_index(arguments)
        if index is None or index == torch.cuda.current_device():
            return function(*arguments)
        with torch.cuda.device(index):
            return function(*arguments)

    return run


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def _no_gradient(name: str) -> Callable[..., Any]:
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(f"nsa::{name} has no gradient")

    return backward


def _differentiable(
    gives_list: bool, setup_context: Callable[..., None], backward_of: Callable[..., Any]
) -> Callable[[Callable[[Sequence[Any]], Any], Sequence[Any]], Any]:
    """The operator where gradients may be recorded: a function of what runs below, and inputs.

    Args:
        gives_list: whether the operator returns a list of tensors.
        setup_context: see :func:`register`.
        backward_of: see ``backward`` of :func:`register`.
    """

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, below: Any, lengths: Lengths, *flat: Any) -> Any:
            inputs = _nested(lengths, flat)
            output = below(inputs)
            output = tuple(output) if gives_list else output
            ctx.lists = lengths
            setup_context(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            ctx.needs = _nested(ctx.lists, ctx.needs_input_grad[2:])
            return None, None, *_flat(backward_of(ctx, *grads))[1]

    def run(below: Callable[[Sequence[Any]], Any], inputs: Sequence[Any]) -> Any:
        if forward_ad._current_level >= 0:
            _refuse_tangents(_flat(inputs)[1])
        if torch.is_grad_enabled():
            lengths, flat = _flat(inputs)
            if any(isinstance(x, Tensor) and x.requires_grad for x in flat):
                output = Differentiable.apply(below, lengths, *flat)
                return list(output) if gives_list else output
        return below(inputs)

    return run


def _refuse_tangents(flat: Iterable[Any]) -> None:
    """Refuse tangents of forward-mode differentiation, which would be dropped silently."""
    for x in flat:
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            text = "nsa's kernels have no forward-mode derivatives (torch.func.jvp)"
            raise NotImplementedError(f'{text}; backend="reference" has')


# Of the lists among some arguments, by their place.
Lengths = tuple[tuple[int, int], ...]


def _flat(arguments: Iterable[Any]) -> tuple[Lengths, list[Any]]:
    """Arguments with lists of tensors replaced by their members.

    ``torch.autograd.Function`` does not look into lists.
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
