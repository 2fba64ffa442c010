"""The processes of a run: one, or several, and what they agree on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from nsa.train.distributed.launch import Launch


class Processes:
    """This process among those of the run. With one process every method is free of communication.

    Two kinds of agreement are needed. Tensors of the training step are summed on their device (NCCL or gloo) without the host
    waiting. Small numbers that the host decides by, such as "somebody asked for a stop", are exchanged between the hosts
    (gloo), so that all processes take the same branch at the same step.

    Args:
        rank: of this process.
        world_size: number of processes; above 1 the process group must exist, see :func:`join`.
    """

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size

    @property
    def is_main(self) -> bool:
        """Whether this is the one that writes files."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the processes, in place, on the tensor's device; the host does not wait for a GPU."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def most(self, tensor: Tensor) -> Tensor:
        """Largest of each element over the processes, the same way."""
        if self.world_size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def total(self, *numbers: int) -> list[int]:
        """Sums of host numbers over the processes."""
        return self._exchange(numbers, dist.ReduceOp.SUM)

    def largest(self, *numbers: int) -> list[int]:
        """The largest of each host number over the processes."""
        return self._exchange(numbers, dist.ReduceOp.MAX)

    def all_of(self, numbers: Sequence[float]) -> list[list[float]]:
        """The host numbers of every process, by rank; each has as many."""
        if self.world_size == 1:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.float64)
        found = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(found, mine)
        return [values.tolist() for values in found]

    def wait_for_all(self) -> None:
        """Until every process is here."""
        self.total(0)

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """The main process goes through the block before the others, which then find the files that it made."""
        if not self.is_main:
            self.wait_for_all()
        yield
        if self.is_main:
            self.wait_for_all()

    def _exchange(self, numbers: tuple[int, ...], operation: dist.ReduceOp.RedOpType) -> list[int]:
        if self.world_size == 1:
            return list(numbers)
        values = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(values, operation)
        return [int(value) for value in values]


@contextmanager
def join(launch: Launch, device: torch.device) -> Iterator[Processes]:
    """Join the other processes of the launch for the duration of the context.

    Args:
        launch: from torchrun.
        device: where this process computes; its tensors are exchanged through NCCL on a GPU and gloo on the CPU.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if launch.world_size == 1:
        yield Processes()
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store, rank, world_size = next(rendezvous("env://"))
    # torchrun keeps the store over a restart, with the addresses of the processes that are gone.
    store = dist.PrefixStore(f"restart-{launch.restart}", store)  # type: ignore[attr-defined]
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, device_id=device if device.type == "cuda" else None
    )
    yield Processes(launch.rank, launch.world_size)
    dist.destroy_process_group()  # after an error it might wait for processes that are gone; leaving ends the group too
