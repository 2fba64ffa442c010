"""Detection of modules to which users have attached something: LoRA, hooks, quantization, pruning.

Layers multiply by the weights of several plain projections at once. A module with anything attached
is called as PyTorch calls it.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as torch_module

# torch.export replaces parameters by fake tensors.
PLAIN_PARAMETERS = {nn.Parameter, FakeTensor, type(None)}


def has_hooks(module: nn.Module) -> bool:
    """Whether the module has hooks of its forward or backward pass."""
    state = module.__dict__
    # torch.compile recompiles when a length changes, but not when a dictionary becomes true.
    return bool(
        len(state["_forward_hooks"])
        or len(state["_forward_pre_hooks"])
        or len(state["_backward_hooks"])
        or len(state["_backward_pre_hooks"])
    )


def has_global_hooks() -> bool:
    """Whether hooks of all modules are registered."""
    return bool(
        len(torch_module._global_forward_hooks)
        or len(torch_module._global_forward_pre_hooks)
        or len(torch_module._global_backward_hooks)
        or len(torch_module._global_backward_pre_hooks)
    )


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of the module only applies the forward of ``kind`` to plain parameters.

    False for subclasses (which LoRA, quantization and parametrizations make), replaced forwards,
    hooks, and weights that are tensor subclasses or not parameters.
    """
    state = module.__dict__
    if type(module) is not kind or "forward" in state or has_hooks(module):
        return False
    for parameter in state["_parameters"].values():
        if type(parameter) not in PLAIN_PARAMETERS:
            return False
    return True


def plain_weights(linears: list[nn.Module]) -> list[Tensor] | None:
    """Weights of linear layers without bias; None if one of them has to be called."""
    weights: list[Tensor] = []  # Dynamo does not trace list[Tensor]()
    if has_global_hooks():
        return None
    for module in linears:
        if not is_plain(module, nn.Linear):
            return None
        parameters = module.__dict__["_parameters"]
        if len(parameters) != 2 or parameters["bias"] is not None:
            return None
        weights.append(parameters["weight"])
    return weights
