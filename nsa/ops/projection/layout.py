"""Column layout of a layer's projection, and packing of its weights in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import accumulate
from types import MethodType
from typing import Any, ClassVar, Literal, Self, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from nsa.errors import fail
from nsa.ops._plan import Constants

# Rows of the packed weights are padded to a multiple of this: Triton specializes only on strides
# that are multiples of 16, which allow 16-byte loads.
ALIGNMENT = 16

Rotated = Literal["no", "yes", "both"]


@dataclass(frozen=True)
class Heads:
    """Heads in adjacent columns of a projection.

    Attributes:
        number: number of heads.
        size: columns of each head.
        rotated: whether they are rotated by the token's position; ``both`` returns them unrotated
            and rotated.
    """

    number: int
    size: int
    rotated: Rotated = "no"

    @property
    def columns(self) -> int:
        """Number of columns."""
        return self.number * self.size


@dataclass(frozen=True)
class Gates(Constants):
    """Gates in the last columns of a projection.

    Attributes:
        heads: query heads.
        branches: enabled branches (0 cmp, 1 slc, 2 win); a head has one column for each.
        activation: ``sigmoid``, or ``softmax`` over the branches.
        temperature: divisor of the ``softmax`` logits.
    """

    heads: int
    branches: tuple[int, ...]
    activation: Literal["sigmoid", "softmax"] = "sigmoid"
    temperature: float = 1.0

    @property
    def columns(self) -> int:
        """Number of columns."""
        return self.heads * len(self.branches)

    @property
    def off(self) -> tuple[int, ...]:
        """The disabled branches."""
        return tuple({0, 1, 2} - {*self.branches})

    @property
    def sharpness(self) -> float:
        """Factor on the ``softmax`` logits; 0 for ``sigmoid``."""
        return 0.0 if self.activation == "sigmoid" else 1.0 / self.temperature


@dataclass(frozen=True)
class Columns:
    """Column layout of a projection, in order.

    Attributes:
        parts: heads, one part for each weight.
        gates: the gates after them, with the last weight; None without gates.
        text: both as JSON, which registered operators accept as an argument.
    """

    parts: tuple[Heads, ...]
    gates: Gates | None = None
    text: ClassVar[str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", json.dumps(asdict(self)))

    @classmethod
    @cache
    def from_text(cls, text: str) -> Columns:
        """Parse :attr:`text`."""
        values = json.loads(text)
        gates = values["gates"]
        if gates is not None:
            gates = Gates(**{**gates, "branches": tuple(gates["branches"])})
        return cls(tuple(Heads(**part) for part in values["parts"]), gates)

    @property
    def sizes(self) -> list[int]:
        """Number of columns of each weight."""
        return [x.columns for x in (*self.parts, self.gates) if x is not None]

    def outputs(self) -> Iterator[tuple[int, Heads, bool]]:
        """Yield first column, heads and whether they are rotated, for each output tensor."""
        wanted = {"no": (False,), "yes": (True,), "both": (False, True)}
        for start, part in zip(accumulate(self.sizes, initial=0), self.parts, strict=False):
            yield from ((start, part, rotated) for rotated in wanted[part.rotated])


def padded(rows: int) -> int:
    """Number of rows including padding."""
    return -(-rows // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, eq=False)
class _Block:
    """Packed weights that are adjacent in memory, followed by rows of zeros."""

    whole: Tensor
    num_weights: int


# Keyed by the storage of the first weight.
_blocks = WeakKeyDictionary[torch.UntypedStorage, _Block]()


@torch.no_grad()
def lay_together(weights: Sequence[Tensor]) -> None:
    """Pack weights ``[N, width]`` into one block of memory, so that one matmul can use them all.

    They remain separate parameters, each with its own storage that contains nothing else. Rows of
    zeros pad the block. Nothing is moved if they are packed already, if dtypes or devices differ,
    if a weight is not a plain parameter (FSDP2 shards), or if processes share its memory.
    """
    first = weights[0]
    kinds = {(type(w), w.dtype, w.device) for w in weights}
    if kinds != {(nn.Parameter, first.dtype, first.device)} or first.is_meta:
        return
    if _block(weights) is not None:
        return
    _blocks.pop(first.untyped_storage(), None)  # share_memory_() changes a storage's memory
    if first.device.type == "cpu" and first.is_shared():
        return
    block, begin = _copied(weights, first.dtype), 0
    memory = block.untyped_storage()
    for weight in weights:
        end = begin + weight.nbytes
        place = memory[begin:end]
        weight.data = block.new_empty(0).set_(place, 0, weight.shape, (weight.shape[1], 1))
        begin = end
    _blocks[first.untyped_storage()] = _Block(block, len(weights))


def _places(weights: Sequence[Tensor]) -> list[tuple[Any, ...] | None]:
    """Memory locations of plain weights; None for others, such as FSDP2 shards."""
    return [
        (w.device, w.dtype, w.data_ptr()) if type(w) is nn.Parameter and not w.is_meta else None
        for w in weights
    ]


def plain_weight(
    function: str, name: str, linear: nn.Module, *, has_bias: bool | None = False
) -> Tensor:
    """Return the weight of a projection, which a layer reads without calling the module.

    Args:
        function: function name for error messages.
        name: name of the projection.
        linear: the projection; its weight may be parametrized.
        has_bias: whether it must have a bias; None allows both.

    Raises:
        ValueError: calling the module would not equal a matmul with its weight, as with LoRA,
            pruning, quantization, hooks, or an unexpected or missing bias.
    """
    own = linear.__dict__.get("forward")  # accelerate leaves this attribute when it removes a hook
    is_plain = type(linear).forward is nn.Linear.forward
    is_plain = is_plain and (own is None or own == MethodType(nn.Linear.forward, linear))
    is_parameter = "weight" in linear._parameters or "parametrizations" in linear._modules
    has_hooks = linear._forward_hooks or linear._forward_pre_hooks
    has_hooks = has_hooks or linear._backward_hooks or linear._backward_pre_hooks
    is_expected = is_plain and has_bias in (None, linear.bias is not None)
    if not (is_expected and is_parameter) or has_hooks:
        bias = {True: " with bias", False: " without bias", None: ""}[has_bias]
        rule = f"be an nn.Linear{bias} that computes its product as nn.Linear does, without hooks"
        if not is_plain:
            found = f"{type(linear).__name__} with a forward of its own"
        elif not is_expected:
            found = "one with bias" if linear.bias is not None else "one without"
        else:
            found = "one with hooks" if is_parameter else "a weight that is no parameter"
        hint = "Its weight is read, and the module is not called."
        fail(function, name, rule, found, hint)
    return cast("Tensor", linear.weight)


def _after_loading(module: nn.Module, _: object) -> None:
    assert isinstance(module, TogetherModule)
    module._lay_together_again()


class TogetherModule(nn.Module):
    """Base class of modules whose projection weights stay packed in memory.

    They stay packed after the module is moved, converted, copied or loaded.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before: list[tuple[Any, ...] | None] | None = None  # weight locations before loading
        self.register_load_state_dict_post_hook(_after_loading)

    def projection_weights(self) -> list[Tensor]:
        """Return the weights, in the order of the projection's columns."""
        raise NotImplementedError

    def lay_together(self) -> None:
        """Pack the weights; call it at the end of the constructor and after replacing parameters.

        Moving, converting, copying and ``load_state_dict`` call it automatically.
        """
        lay_together(self.projection_weights())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._before = _places(self.projection_weights())
        super()._apply(fn, recurse)
        self._lay_together_again()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._before = _places(self.projection_weights())
        super()._load_from_state_dict(*args, **kwargs)

    def _lay_together_again(self) -> None:
        """Repack the weights, but only if they moved: others may hold the current memory."""
        if self._before != _places(self.projection_weights()):
            self.lay_together()
        self._before = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        weights = self.projection_weights()
        # A shallow copy shares weights with the original and must not move them.
        if all(w.is_meta or w.untyped_storage().nbytes() == w.nbytes for w in weights):
            self.lay_together()


@torch.no_grad()
def stacked(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """All weights as one matrix ``[N, width]``, including padding, in ``dtype``.

    No copy if they are packed and have this dtype.
    """
    block = _block(weights)
    return _copied(weights, dtype) if block is None else block.to(dtype)


def _block(weights: Sequence[Tensor]) -> Tensor | None:
    """The memory block of packed weights; None if they are not packed."""
    block = _blocks.get(weights[0].untyped_storage())
    if block is None or block.num_weights != len(weights):
        return None
    end = block.whole.data_ptr()
    for weight in weights:
        is_next = weight.data_ptr() == end and weight.dtype == block.whole.dtype
        if not is_next or not weight.is_contiguous():
            return None
        end += weight.nbytes
    return block.whole


def _copied(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    rows, width = sum(w.shape[0] for w in weights), weights[0].shape[1]
    padding = weights[0].new_zeros(padded(rows) - rows, width, dtype=dtype)
    return torch.cat([*(w.to(dtype) for w in weights), padding])
