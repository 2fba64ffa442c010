"""Detection of modules to which users have attached something: LoRA, hooks, quantization, pruning.

Layers multiply by the weights of several plain projections at once. A module with anything attached
is called as PyTorch calls it.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as torch_module

# torch.export replaces parameters by fake tensors.
PLAIN_PARAMETERS = (nn.Parameter, FakeTensor)


def have_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether a module, or every module, has hooks of its forward or backward pass."""
    # torch.compile recompiles when a length changes, but not when a dictionary becomes true.
    if (
        len(torch_module._global_forward_hooks)
        or len(torch_module._global_forward_pre_hooks)
        or len(torch_module._global_backward_hooks)
        or len(torch_module._global_backward_pre_hooks)
    ):
        return True
    for module in modules:
        state = module.__dict__
        if (
            len(state["_forward_hooks"])
            or len(state["_forward_pre_hooks"])
            or len(state["_backward_hooks"])
            or len(state["_backward_pre_hooks"])
        ):
            return True
    return False


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of the module only applies the forward of ``kind`` to plain parameters.

    False for subclasses (which LoRA, quantization and parametrizations make), replaced forwards,
    hooks, and weights that are tensor subclasses or not parameters.
    """
    state = module.__dict__
    if type(module) is not kind or "forward" in state or have_hooks((module,)):
        return False
    given = state["_parameters"].values()
    return all(x is None or type(x) in PLAIN_PARAMETERS for x in given)


def plain_weights(linears: list[nn.Module]) -> list[Tensor] | None:
    """Weights of linear layers without bias; None if one of them has to be called."""
    weights: list[Tensor] = []  # Dynamo does not trace list[Tensor]()
    if have_hooks(linears):
        return None
    for module in linears:
        if type(module) is not nn.Linear:
            return None
        state = module.__dict__
        parameters = state["_parameters"]
        weight = parameters.get("weight")
        if type(weight) not in PLAIN_PARAMETERS or len(parameters) != 2 or "forward" in state:
            return None
        if parameters["bias"] is not None:
            return None
        weights.append(weight)
    return weights
