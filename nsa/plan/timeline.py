"""Memory over a training step that is followed with fake tensors: what is held, and when it is most.

A fake tensor has shape, dtype and lifetime of the real one and no data. PyTorch runs the step's own code with them, forward
and backward, so that what autograd saves is saved here too, and what Python or autograd drops is dropped. What a kernel needs
inside an operator is not seen; ``nsa.plan.scratch`` says it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# The allocator hands out memory in steps of so many bytes.
GRANULARITY = 512

WEIGHTS, OPTIMIZER, GRADIENTS = "weights", "optimizer", "gradients"
SAVED, PASSING, SCRATCH = "saved for backward", "temporary", "kernels' scratch"

Scratch = Callable[[str, Sequence[Any]], int]  # name of an operator and its arguments -> bytes beyond its results


def rounded(num_bytes: int) -> int:
    """Bytes that the allocator takes for a request."""
    return -(-num_bytes // GRANULARITY) * GRANULARITY


@dataclass
class _Block:
    size: int
    label: str


class Timeline(TorchDispatchMode):
    """Counts the bytes of every storage that exists while it is active, by label; enter it inside ``FakeTensorMode``.

    Args:
        scratch: what operators need beside their results.

    Attributes:
        held: bytes by label now.
        at_peak: bytes by label when most was held, scratch among them.
    """

    def __init__(self, scratch: Scratch = lambda name, arguments: 0) -> None:
        super().__init__()
        self.held: dict[str, int] = {}
        self.at_peak: dict[str, int] = {}
        self._blocks: dict[int, _Block] = {}
        self._scratch = scratch
        self._most = 0
        self._parts: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator on fake tensors, and count what it made."""
        result = func(*args, **(kwargs or {}))
        made = [self.hold(leaf, PASSING) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        scratch = self._scratch(str(func), args)
        if any(made) or scratch:
            self._look(scratch)
        return result

    def hold(self, tensor: Tensor, label: str) -> bool:
        """Count the storage of ``tensor`` from now on; False if it was counted before."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._blocks:
            return False
        block = self._blocks[key] = _Block(rounded(storage.nbytes()), label)
        self.held[label] = self.held.get(label, 0) + block.size
        weakref.finalize(storage, self._release, key)
        return True

    def relabel(self, tensor: Tensor, label: str, only: str | None = None) -> None:
        """Count the storage of ``tensor`` under another label; with ``only`` if it had this one."""
        self.hold(tensor, label)
        block = self._blocks[tensor.untyped_storage()._cdata]
        if only in (None, block.label):
            self.held[block.label] -= block.size
            self.held[label] = self.held.get(label, 0) + block.size
            block.label = label

    def relabel_all(self, label: str, now: str) -> None:
        """Count everything with one label under another."""
        for block in self._blocks.values():
            if block.label == label:
                block.label = now
        self.held[now] = self.held.get(now, 0) + self.held.pop(label, 0)

    def _release(self, key: int) -> None:
        block = self._blocks.pop(key)
        self.held[block.label] -= block.size

    def _look(self, scratch: int) -> None:
        most = sum(self.held.values()) + scratch
        if most > self._most:
            self._most, self.at_peak = most, {**self.held, SCRATCH: scratch}

    @contextmanager
    def by_part(self, parts: Sequence[tuple[str, nn.Module]], otherwise: str) -> Iterator[None]:
        """Within, what autograd saves is counted under ``saved for backward: <part>``, the part whose forward runs."""

        def save(tensor: Tensor) -> Tensor:
            self.relabel(tensor, f"{SAVED}: {self._parts[-1] if self._parts else otherwise}", only=PASSING)
            return tensor

        hooks = []
        for name, module in parts:
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self._parts.append(name)))
            hooks.append(module.register_forward_hook(lambda *_: self._parts.pop() and None, always_call=True))
        try:
            with saved_tensors_hooks(save, lambda tensor: tensor):
                yield
        finally:
            for hook in hooks:
                hook.remove()


def fake_parameters(model: nn.Module, device: torch.device | str = "cpu") -> None:
    """Give a model on the meta device fake parameters; to be called inside ``FakeTensorMode``. Tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fresh = made.get(id(parameter))
                if fresh is None:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                    fresh = made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = fresh
