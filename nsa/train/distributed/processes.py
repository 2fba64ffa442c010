"""Processes of a run: their communication, and tensors that are sharded over them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from nsa.train.distributed.launch import Launch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

T = TypeVar("T")


class Processes:
    """This process and the other ranks of the run. With one process no method communicates.

    Tensors of the training step are summed on their device (NCCL or gloo) without the host waiting.
    Values by which the hosts decide, such as a request to stop, are exchanged between the hosts
    (gloo), so that all processes take the same branch at the same step.

    Args:
        rank: of this process.
        world_size: number of processes; above 1 the process group must exist, see :func:`join`.
        group: the process group; None for the default one.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank, self.world_size, self._group = rank, world_size, group

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    def for_thread(self) -> Processes:
        """Return the same processes with their own group, for use in another thread.

        All processes call this together.
        """
        group = dist.new_group(backend="gloo") if self.world_size > 1 else None
        return Processes(self.rank, self.world_size, group)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the processes in place; the host does not wait for the device."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def most(self, tensor: Tensor) -> Tensor:
        """Take the maximum of each element over the processes in place, like :meth:`sum`."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def total(self, *numbers: int) -> list[int]:
        """Sum numbers of the host over the processes."""
        return [int(value) for value in self.sum(torch.tensor(numbers, dtype=torch.int64))]

    def largest(self, *numbers: int) -> list[int]:
        """Maxima of numbers of the host over the processes."""
        return [int(value) for value in self.most(torch.tensor(numbers, dtype=torch.int64))]

    def all_of(self, value: T) -> list[T]:
        """Values of all processes, by rank."""
        found = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(found, value, self._group)
        return found

    def wait_for_all(self) -> None:
        """Wait until every process is here."""
        self.total(0)

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Context manager: run the block in the main process first, then in the others."""
        if not self.is_main:
            self.wait_for_all()
        yield
        if self.is_main:
            self.wait_for_all()

    def _reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.world_size > 1:
            dist.all_reduce(tensor, operation, self._group)
        return tensor


@contextmanager
def join(launch: Launch, device: torch.device) -> Iterator[Processes]:
    """Join the other processes of the launch for the duration of the context.

    Args:
        launch: from torchrun.
        device: device of this process; communication uses NCCL on a GPU and gloo on the CPU.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if launch.world_size == 1:
        yield Processes()
        return
    is_gpu = device.type == "cuda"
    store, rank, world_size = next(rendezvous("env://"))
    # torchrun keeps the store over a restart, with addresses of the previous processes.
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_gpu else "gloo",
        store=dist.PrefixStore(f"restart-{launch.restart}", store),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world_size,
        device_id=device if is_gpu else None,
    )
    yield Processes(launch.rank, launch.world_size)
    # Not after an error: it might wait for processes that have ended.
    dist.destroy_process_group()


# --- sharded tensors (FSDP2) ----------------------------------------------------------------------
def gather(tensor: Tensor) -> Tensor:
    """Return the whole tensor without gradients; for a sharded one all processes call this."""
    tensor = tensor.detach()
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether FSDP2 splits the tensor over processes."""
    # FSDP2 imports DTensor. Importing it here would cost `nsa generate` a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def own_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor, without a copy."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def first_row(tensor: Tensor) -> int:
    """First row of :func:`own_part` in the whole tensor; FSDP2 splits like torch.chunk."""
    if not is_sharded(tensor):
        return 0
    rows, mesh = tensor.shape[0], tensor.device_mesh
    return min(mesh.get_local_rank() * -(-rows // mesh.size()), rows)


def gather_part(part: Tensor, like: Tensor) -> Tensor:
    """Return the whole of a tensor that is split as ``like`` is; all processes call this."""
    assert is_sharded(like)
    return gather(
        type(like).from_local(
            part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
        )
    )
