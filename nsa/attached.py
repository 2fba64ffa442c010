"""Detection of modules to which users have attached something: LoRA, hooks, quantization, pruning.

Layers multiply by the weights of several plain projections at once. A module with anything attached
is called as PyTorch calls it.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Linear, Module, Parameter
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)


def have_hooks(modules: Iterable[Module]) -> bool:
    """Whether a module, or every module, has hooks of its forward or backward pass."""
    # torch.compile recompiles when a length changes, but not when a dictionary becomes true.
    number = (
        len(_global_forward_hooks)
        + len(_global_forward_pre_hooks)
        + len(_global_backward_hooks)
        + len(_global_backward_pre_hooks)
    )
    for module in modules:
        state = module.__dict__
        number += (
            len(state["_forward_hooks"])
            + len(state["_forward_pre_hooks"])
            + len(state["_backward_hooks"])
            + len(state["_backward_pre_hooks"])
        )
    return number > 0


def is_plain(module: Module, kind: type[Module]) -> bool:
    """Whether a call of the module only applies the forward of ``kind`` to plain parameters.

    False for subclasses (which LoRA, quantization and parametrizations make), replaced forwards,
    hooks, and weights that are tensor subclasses or not parameters.
    """
    state = module.__dict__
    if type(module) is not kind or "forward" in state or have_hooks((module,)):
        return False
    for x in state["_parameters"].values():
        # torch.export replaces parameters by fake tensors.
        if x is not None and type(x) is not Parameter and type(x) is not FakeTensor:
            return False
    return True


def plain_weights(linears: Iterable[Module]) -> list[Tensor] | None:
    """Weights of linear layers without bias; None if one of them has to be called.

    Every eager pass of a layer calls this function, so the modules are inspected in one loop.
    """
    if (
        len(_global_forward_hooks)
        + len(_global_forward_pre_hooks)
        + len(_global_backward_hooks)
        + len(_global_backward_pre_hooks)
    ):
        return None
    weights: list[Tensor] = []  # Dynamo does not trace list[Tensor]()
    for module in linears:
        state = module.__dict__
        parameters = state["_parameters"]
        if (
            type(module) is not Linear
            or "forward" in state
            or "weight" not in parameters
            or parameters["bias"] is not None
            or len(state["_forward_hooks"])
            + len(state["_forward_pre_hooks"])
            + len(state["_backward_hooks"])
            + len(state["_backward_pre_hooks"])
        ):
            return None
        weight = parameters["weight"]
        if type(weight) is not Parameter and type(weight) is not FakeTensor:
            return None
        weights.append(weight)
    return weights
