"""Registration of attention operators: converts between flat arguments and typed objects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar, get_type_hints

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.ops._register import register
from nsa.ops._sequences import Sequences, block_sizes

Inputs = TypeVar("Inputs", bound=tuple[Any, ...])
Results = TypeVar("Results", bound=tuple[Any, ...])

_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", int: "SymInt", float: "float", str: "str"}


@dataclass(frozen=True)
class Call:
    """Non-tensor arguments of an attention operator.

    Attributes:
        config: the sparse pattern.
        sequences: the sequence layout.
        softmax_scale: factor on all scores.
        algorithm: algorithm of the selected branch, see :func:`nsa.selected_attention`.
    """

    config: NSAConfig
    sequences: Sequences
    softmax_scale: float
    algorithm: str = "auto"

    def flat(self) -> FlatCall:
        """Return the flat arguments of a registered operator."""
        where = self.sequences
        cu_q, cu_k = (None, None) if where.offsets is None else where.offsets
        # Drop block offsets that belong to another pattern.
        cu_cmp = where.cu_cmp if where.blocks == block_sizes(self.config) else None
        numbers = (where.num_sequences, where.len_q, where.len_k)
        settings = (self.config.text, self.softmax_scale, self.algorithm)
        return FlatCall(cu_q, cu_k, cu_cmp, *numbers, *settings)


class FlatCall(NamedTuple):
    """Fields of :class:`Call` in types that a registered operator supports; offsets come first."""

    cu_q: Tensor | None
    cu_k: Tensor | None
    cu_cmp: Tensor | None
    num_sequences: int
    len_q: int
    len_k: int
    config: str
    softmax_scale: float
    algorithm: str

    def open(self, device: torch.device) -> Call:
        """Rebuild the :class:`Call` for tokens on ``device``."""
        config = NSAConfig.from_text(self.config)
        offsets = None if self.cu_q is None or self.cu_k is None else (self.cu_q, self.cu_k)
        numbers = (self.num_sequences, self.len_q, self.len_k)
        blocks = None if self.cu_cmp is None else block_sizes(config)
        sequences = Sequences(offsets, *numbers, device, cu_cmp=self.cu_cmp, blocks=blocks)
        return Call(config, sequences, self.softmax_scale, self.algorithm)


OFFSETS = 3  # number of tensors in a FlatCall


def open_flat(inputs: Callable[..., Inputs], count: int, flat: tuple[Any, ...]) -> Any:
    """Typed inputs, of ``count`` fields, and the call of a registered operator's arguments."""
    return inputs(*flat[:count]), FlatCall(*flat[count:]).open(flat[0].device)


def schema_of(*groups: type) -> str:
    """Schema of an operator whose parameters are the fields of these named tuples."""
    fields = [pair for group in groups for pair in get_type_hints(group).items()]
    return ", ".join(f"{_TYPES[kind]} {name}" for name, kind in fields)


def register_attention(
    name: str,
    inputs: type[Inputs],
    results: type[Results],
    forward: Callable[[Inputs, Call], Results],
    backward: Callable[[Inputs, Results, Tensor, Call], Inputs],
    fake: Callable[[Inputs, Call], Results],
    *,
    reads_out: bool = True,
) -> Callable[[Inputs, Call], Results]:
    """Register ``nsa::<name>`` and ``nsa::<name>_backward``.

    Args:
        name: name of the operator.
        inputs: named tuple type of the input tensors; the first is never None.
        results: named tuple type of the results. Only the first has a gradient; the backward
            receives all of them.
        forward: computes the results.
        backward: ``(inputs, results, gradient of the first result, call)``; returns the gradient of
            each input, or None if the input is None or its gradient is zero or undefined.
        fake: returns results with the right shapes and dtypes for fake tensors.
        reads_out: whether the backward reads the first result; otherwise it is not saved.

    Returns:
        The operator.
    """
    make: Callable[..., Inputs] = inputs
    make_results: Callable[..., Results] = results
    count, num_results = len(get_type_hints(inputs)), len(get_type_hints(results))
    first = 0 if reads_out else 1  # index of the first result that the backward receives
    place = count + num_results - first  # index of dout in its arguments

    def of_flat(function: Callable[[Inputs, Call], Results]) -> Callable[..., tuple[Any, ...]]:
        return lambda *flat: tuple(function(*open_flat(make, count, flat)))

    def run_backward(*flat: Any) -> list[Tensor]:
        given, call = open_flat(make, count, (*flat[:count], *flat[place + 1 :]))
        kept = make_results(*(None,) * first, *flat[count:place])
        grads = backward(given, kept, flat[place], call)
        pairs = zip(given, grads, strict=True)
        return [torch.zeros_like(x) if dx is None else dx for x, dx in pairs if _has_gradient(x)]

    def fake_backward(*flat: Any) -> list[Tensor]:
        return [x.new_empty(x.shape) for x in flat[:count] if _has_gradient(x)]

    def setup_context(ctx: Any, flat: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        tensors = count + OFFSETS
        ctx.settings = flat[tensors:]
        ctx.save_for_backward(*flat[:tensors], *output[first:])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, dout: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
        of_call = (None,) * (OFFSETS + len(ctx.settings))
        if dout is None:
            return *(None,) * count, *of_call
        saved = ctx.saved_tensors
        given, offsets, kept = (
            saved[:count],
            saved[count : count + OFFSETS],
            saved[count + OFFSETS :],
        )
        grads = iter(operator_backward(*given, *kept, dout, *offsets, *ctx.settings))
        return *(next(grads) if _has_gradient(x) else None for x in given), *of_call

    kept_fields = schema_of(results).split(", ")[first:]
    parameters = (schema_of(inputs), *kept_fields, "Tensor dout", schema_of(FlatCall))
    schema = f"({', '.join(parameters)}) -> Tensor[]"
    operator_backward = register(f"{name}_backward", schema, run_backward, fake_backward)
    schema = f"({schema_of(inputs, FlatCall)}) -> ({', '.join(['Tensor'] * num_results)})"
    made = (of_flat(forward), of_flat(fake))
    operator = register(name, schema, *made, setup_context=setup_context, backward=differentiate)
    return lambda given, call: make_results(*operator(*given, *call.flat()))


def _has_gradient(x: Tensor | None) -> bool:
    return x is not None and x.is_floating_point()


@dataclass(frozen=True)
class KeyRange:
    """Range of keys visible to each query.

    Attributes:
        sequences: the sequence layout.
        softmax_scale: factor on the scores.
        window: whether the keys are window tokens; otherwise they are compressed blocks.
        cu_key: offsets of the keys; None if all sequences have equal length.
        len_key: keys per sequence if all have equal length, otherwise an upper bound.
        size: window size, or compression block size.
        stride: compression stride; 1 for the window.
    """

    sequences: Sequences
    softmax_scale: float
    window: bool
    cu_key: Tensor | None
    len_key: int
    size: int
    stride: int

    @classmethod
    def of_window(cls, call: Call) -> KeyRange:
        """The last ``window_size`` tokens."""
        where, size = call.sequences, call.config.window_size
        cu_k = None if where.offsets is None else where.offsets[1]
        return cls(where, call.softmax_scale, True, cu_k, where.len_k, size, 1)

    @classmethod
    def of_blocks(cls, call: Call) -> KeyRange:
        """The compressed blocks fully in the past."""
        blocks = call.sequences.blocks_of(call.config)
        return cls(call.sequences, call.softmax_scale, False, *blocks, *block_sizes(call.config))

    @classmethod
    def of_tokens(cls, call: Call) -> KeyRange:
        """Each token as a block of its own."""
        where = call.sequences
        cu_k = None if where.offsets is None else where.offsets[1]
        return cls(where, call.softmax_scale, False, cu_k, where.len_k, 1, 1)

    def of_coarse(self, width: int, cu_coarse: Tensor) -> KeyRange:
        """The coarse blocks of ``width`` tokens whose compressed keys are all visible."""
        cu_key = None if self.cu_key is None else cu_coarse
        len_key, size = self.len_key * self.stride // width, width + self.size - self.stride
        return replace(self, cu_key=cu_key, len_key=len_key, size=size, stride=width)

    @property
    def name(self) -> str:
        """Name of the operator that attends to these keys."""
        return "window_attention" if self.window else "compressed_attention"

    def arguments(self) -> tuple[Tensor | int | None, ...]:
        """Kernel arguments ``cu_q, cu_k, cu_key, len_q, len_k, len_key, num_sequences``."""
        cu_q, cu_k, len_q, len_k, num_sequences = self.sequences.arguments()
        return cu_q, cu_k, self.cu_key, len_q, len_k, self.len_key, num_sequences
