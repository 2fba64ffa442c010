"""Sharded tensors (FSDP2), of which every process holds some rows, and whole ones."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def gather(tensor: Tensor) -> Tensor:
    """The whole tensor, without gradients; all processes must call this for a sharded one."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_row(tensor: Tensor) -> int:
    """Row of the whole tensor where :func:`own_part` begins; FSDP2 cuts as torch.chunk does."""
    if not isinstance(tensor, DTensor):
        return 0
    rows, mesh = tensor.shape[0], tensor.device_mesh
    return min(mesh.get_local_rank() * -(-rows // mesh.size()), rows)


def own_rows(target: Tensor, whole: Tensor) -> Tensor:
    """Those rows of ``whole`` that :func:`own_part` has of ``target``, a tensor of that shape."""
    begin = first_row(target)
    return whole[begin : begin + own_part(target).shape[0]]
