"""Registration of operators with PyTorch, each behind a guard of the device that its tensors lie on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


def register(name: str, function: Callable[..., Any], schema: str, mutates_args: Iterable[str] = ()) -> Any:
    """Register ``nsa::<name>``: the one way in which operators of this library are registered.

    Triton launches on the current device and its current stream. Tensors on another device are therefore worked on with that
    one made current, as PyTorch's own operators do, so that one process can use several GPUs.

    Args:
        name: of the operator, without its namespace.
        function: the implementation for every device; it is called with positional arguments.
        schema: of the operator, as ``torch.library.custom_op`` takes it.
        mutates_args: arguments that the implementation writes to.

    Returns:
        The operator, a ``CustomOpDef``.
    """

    def run(*arguments: Any) -> Any:
        index = cuda_index(arguments)
        if index is None or index == torch.cuda.current_device():
            return function(*arguments)
        with torch.cuda.device(index):
            return function(*arguments)

    return torch.library.custom_op(f"nsa::{name}", run, mutates_args=mutates_args, schema=schema)


def cuda_index(arguments: Iterable[Any]) -> int | None:
    """Index of the CUDA device of the first tensor among an operator's arguments; None where it lies elsewhere."""
    for x in arguments:
        first = x[0] if isinstance(x, list) and x else x
        if isinstance(first, Tensor):
            return first.get_device() if first.is_cuda else None
    return None
