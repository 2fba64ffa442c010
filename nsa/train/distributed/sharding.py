"""Tensors of which every process holds a part (FSDP2), beside those that every process holds whole."""

from __future__ import annotations

from typing import cast

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def gather(tensor: Tensor) -> Tensor:
    """The whole tensor; of a sharded one all processes must ask, and each gets it. Nothing is recorded for gradients."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def put(target: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor into ``target``, of which every process takes its part; nothing is sent.

    Args:
        target: a tensor without gradient, sharded or not.
        whole: same shape, on any device, equal on all processes.
    """
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    whole = whole.to(target.device)
    part = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
    own_part(target).copy_(own_part(cast(Tensor, part)))
