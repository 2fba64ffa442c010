"""What the gates of each layer do, gathered on the device while held-out text is evaluated."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nsa.config import BRANCHES
from nsa.lm.model import LanguageModel
from nsa.module import Gate


class GateStatistics:
    """While entered, sums up the gates of every layer over all forward passes; nothing waits for the device.

    Dense layers, layers with fixed gates and layers with one branch have nothing to tell.

    Args:
        model: the language model.
    """

    def __init__(self, model: LanguageModel) -> None:
        attention = [layer.attention for layer in model.decoder_layers()]
        gates = {index: getattr(layer, "gate", None) for index, layer in enumerate(attention)}
        self._gates = {
            index: gate
            for index, gate in gates.items()
            if isinstance(gate, Gate) and gate.net is not None and len(gate.columns) > 1
        }
        device = model.embedding.weight.device
        # Per layer: sum of each branch's gates, sum of the entropies, number of both.
        self._sums = {index: torch.zeros(len(BRANCHES) + 2, dtype=torch.float64, device=device) for index in self._gates}
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> GateStatistics:
        for index, gate in self._gates.items():
            self._hooks.append(gate.register_forward_hook(self._add_to(self._sums[index])))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()

    @staticmethod
    def _add_to(sums: Tensor) -> Callable[[nn.Module, Any, Tensor], None]:
        def add(module: nn.Module, inputs: Any, gates: Tensor) -> None:
            gates = gates.detach().double()
            assert isinstance(module, Gate)
            share = gates[..., module.columns] / gates.sum(-1, keepdim=True)
            entropy = torch.special.entr(share).sum(-1) / math.log(len(module.columns))
            sums[: len(BRANCHES)] += gates.sum((0, 1))
            sums[-2] += entropy.sum()
            sums[-1] += entropy.numel()

        return add

    def row(self, sum_processes: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Metrics of each layer and their means over the layers; this waits for the device.

        Args:
            sum_processes: sums a tensor over the processes that shared the text.

        Returns:
            ``gate_cmp_mean_layer_0`` and so on for each branch that is on; ``gate_entropy_layer_0``: entropy of the gates as
            shares of their sum, averaged over tokens and heads, 1 when all branches weigh alike; the same without the layer.
        """
        row: dict[str, float] = {}
        if not self._sums:
            return row
        sums = sum_processes(torch.stack(list(self._sums.values()))).cpu()
        means = (sums[:, :-1] / sums[:, -1:]).tolist()
        columns = next(iter(self._gates.values())).columns
        names = {**{column: f"gate_{BRANCHES[column]}_mean" for column in columns}, len(BRANCHES): "gate_entropy"}
        for column, name in names.items():
            row[name] = sum(mean[column] for mean in means) / len(means)
        for index, mean in zip(self._sums, means, strict=True):
            row |= {f"{name}_layer_{index}": mean[column] for column, name in names.items()}
        return row
