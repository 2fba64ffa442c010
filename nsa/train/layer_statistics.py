"""What the gates of each layer do and which blocks it chooses, gathered on the device while held-out text is evaluated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nsa.config import BRANCHES
from nsa.lm.model import LanguageModel
from nsa.module import Gate, NativeSparseAttention
from nsa.ops._packed import locate

_CHOICE = ("selected_tokens", "selected_distance_tokens", "selected_overlap")


@dataclass(frozen=True)
class _Watched:
    """A module whose forward passes are summed up.

    Attributes:
        layer: index of its layer.
        module: the module.
        names: of its metrics.
        observe: from module, arguments, keyword arguments and output of a forward pass to fp64 ``[metrics, 2]``: sums, and of
            how many values.
    """

    layer: int
    module: nn.Module
    names: tuple[str, ...]
    observe: Callable[[Any, tuple[Any, ...], dict[str, Any], Tensor], Tensor]


class LayerStatistics:
    """While entered, sums up gates and choices of every layer over all forward passes; nothing waits for the device.

    Dense layers have nothing to tell; fixed gates and a single branch tell nothing about gates.

    Args:
        model: the language model.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._watched: list[_Watched] = []
        for index, layer in enumerate(model.decoder_layers()):
            attention = layer.attention
            if not isinstance(attention, NativeSparseAttention):
                continue
            branches, gate = attention.config.branches, attention.gate
            if gate.net is not None and len(branches) > 1:
                names = (*(f"gate_{branch}_mean" for branch in BRANCHES if branch in branches), "gate_entropy")
                self._watched.append(_Watched(index, gate, names, _observe_gates))
            if "slc" in branches:
                self._watched.append(_Watched(index, attention, _CHOICE, _observe_choice))
        device = model.embedding.weight.device
        self._sums = [torch.zeros(len(watched.names), 2, dtype=torch.float64, device=device) for watched in self._watched]
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> LayerStatistics:
        for watched, sums in zip(self._watched, self._sums, strict=True):
            self._hooks.append(watched.module.register_forward_hook(_add_to(sums, watched), with_kwargs=True))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Forward passes inside leave no trace."""
        self.__exit__(None, None, None)
        yield
        self.__enter__()

    def row(self, sum_processes: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Metrics of each layer and their means over the layers; this waits for the device.

        Args:
            sum_processes: sums a tensor over the processes that shared the text.

        Returns:
            The metrics ``gate_*`` and ``selected_*`` of :data:`nsa.train.metrics.METRICS`, and the same of each layer with
            ``_layer_0`` and so on added.
        """
        if not self._watched:
            return {}
        of_layers: dict[str, dict[int, float]] = {}
        sums = sum_processes(torch.cat(self._sums)).cpu()
        labels = [(name, watched.layer) for watched in self._watched for name in watched.names]
        for (name, layer), (total, number) in zip(labels, sums.tolist(), strict=True):
            if number:
                of_layers.setdefault(name, {})[layer] = total / number
        row = {name: sum(values.values()) / len(values) for name, values in of_layers.items()}
        for name, values in of_layers.items():
            row |= {f"{name}_layer_{layer}": value for layer, value in values.items()}
        return row


def _add_to(sums: Tensor, watched: _Watched) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Tensor], None]:
    @torch.no_grad()
    def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        sums.add_(watched.observe(module, args, kwargs, output))

    return add


def _observe_gates(gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any], gates: Tensor) -> Tensor:
    """Gate of each branch that is on, and the entropy of the gates as shares of their sum, 1 when all weigh alike."""
    active = gates[..., gate.columns].double()
    share = active / active.sum(-1, keepdim=True)
    entropy = torch.special.entr(share).sum(-1) / math.log(active.shape[-1])
    totals = torch.cat((active.sum((0, 1)), entropy.sum()[None]))
    return torch.stack((totals, torch.full_like(totals, entropy.numel())), dim=1)


def _observe_choice(attention: NativeSparseAttention, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
    """How many keys a query sees in its blocks, how far they are, and how many blocks the query before it chose as well."""
    x, cu_seqlens, size = args[0], kwargs["cu_seqlens"], attention.config.block_size
    blocks = attention.choose_blocks(x, cu_seqlens=cu_seqlens, max_seqlen=kwargs["max_seqlen"])  # [T, Hkv, n]
    _, position, is_real = locate(x.shape[0], cu_seqlens)
    position = position[:, None, None]
    is_chosen = (blocks >= 0) & is_real[:, None, None]
    first = blocks * size
    last = torch.minimum(first + size - 1, position)
    num_keys = torch.where(is_chosen, last - first + 1, 0).double()
    distance = num_keys * (position - (first + last) / 2)
    shared = torch.zeros_like(is_chosen)
    for slot in range(blocks.shape[-1]):  # a query's slots, one after another, against all slots of the query before
        shared[1:] |= blocks[1:] == blocks[:-1, :, slot : slot + 1]
    has_before = position > 0
    sums = (num_keys.sum(), distance.sum(), (shared & is_chosen & has_before).sum())
    numbers = (is_chosen.any(-1).sum(), num_keys.sum(), (is_chosen & has_before).sum())
    return torch.stack((torch.stack([value.double() for value in sums]), torch.stack([n.double() for n in numbers])), dim=1)
