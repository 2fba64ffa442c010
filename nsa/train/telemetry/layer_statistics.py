"""What the gates of each layer do and which blocks it selects, added up on the device in the steps that have a row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.lm.model import LanguageModel
from nsa.module import NativeSparseAttention
from nsa.ops.statistics import LARGE, MAXIMA, UNIT, Statistics, new_statistics
from nsa.stages import TELEMETRY, in_stage
from nsa.train.telemetry.delayed import LateReader

DEAD = 0.02  # of the sum of the gates
UNIFORM = 0.999  # entropy, as a share of the largest there can be

_EXTREMES: dict[str, Callable[[list[float]], float]] = {
    "selected_min_tokens": min,
    "selected_max_tokens": max,
}
_COUNTS = tuple(f"selected_{algorithm}_calls" for algorithm in ("tiled", "gathered", "reference"))


class LayerStatistics:
    """Gates and choices of every layer over the passes of one optimizer step; nothing waits for the device.

    The layers add to their statistics wherever these are switched on, by an operator of the model's
    graph: also where the graph is compiled or replayed, and again where a checkpointed layer is run
    a second time, which changes no mean.

    Dense layers have nothing to tell; fixed gates and a single branch tell nothing about gates.

    Args:
        model: the language model. Its layers get their statistics here, before anything is compiled.
    """

    def __init__(self, model: LanguageModel) -> None:
        attentions = [layer.attention for layer in model.decoder_layers()]
        self._layers = {
            i: x for i, x in enumerate(attentions) if isinstance(x, NativeSparseAttention)
        }
        device = model.embedding.weight.device
        for attention in self._layers.values():
            attention.statistics = new_statistics(device)
        self._sums = [x.statistics for x in self._layers.values() if x.statistics is not None]
        off = new_statistics(device)
        self._off = [off for _ in self._sums]
        self._on = [
            off.clone().index_fill_(0, torch.zeros(1, dtype=torch.int64, device=device), 1)
        ] * len(self._sums)
        self._late: LateReader[None] = LateReader()

    @in_stage(TELEMETRY)
    def start(self) -> None:
        """From here on, passes count; what was counted before is forgotten."""
        if self._sums:
            torch._foreach_copy_(self._sums, self._on)

    @in_stage(TELEMETRY)
    def stop(
        self,
        sum_processes: Callable[[Tensor], Tensor],
        largest_of_processes: Callable[[Tensor], Tensor],
    ) -> None:
        """No pass counts any more; what was counted is on its way to the host.

        Args:
            sum_processes: sums a tensor over the processes that share the step.
            largest_of_processes: takes the largest of each element over them.
        """
        if self._sums:
            sums = torch.stack(self._sums)
            parts = (
                sum_processes(sums[:, :MAXIMA].contiguous()),
                largest_of_processes(sums[:, MAXIMA:].contiguous()),
            )
            self._late.put(None, torch.cat(parts, dim=1).flatten())
            torch._foreach_copy_(self._sums, self._off)

    def row(self) -> dict[str, float]:
        """Metrics of the step that was stopped last, or nothing; waits for their copy alone.

        Returns:
            The metrics ``gate_*`` and ``selected_*`` of
            :data:`nsa.train.telemetry.metrics.METRICS`, and the same of each layer with
            ``_layer_0`` and so on added: means over the layers, but for counts, which are sums, and
            extremes.
        """
        taken = self._late.take(keep=0)
        if not taken:
            return {}
        of_layers: dict[str, dict[int, float]] = {}
        sums = iter(taken[-1][1])
        for layer, attention in self._layers.items():
            of_layer = {name: next(sums) for name in Statistics._fields}
            for name, value in _metrics(attention.config, of_layer).items():
                of_layers.setdefault(name, {})[layer] = value
        row = {name: _of_all_layers(name, [*values.values()]) for name, values in of_layers.items()}
        for name, values in of_layers.items():
            row |= {f"{name}_layer_{layer}": value for layer, value in values.items()}
        return row


def _of_all_layers(name: str, values: list[float]) -> float:
    if name in _EXTREMES:
        return _EXTREMES[name](values)
    return sum(values) / (1 if name in _COUNTS else len(values))


def _metrics(config: NSAConfig, sums: dict[str, float]) -> dict[str, float]:
    """Metrics of one layer from its sums."""
    found: dict[str, float] = {}

    def add(name: str, total: str, number: str, unit: float = 1.0) -> None:
        if sums[number]:
            found[name] = sums[total] / unit / sums[number]

    if config.gate != "fixed" and len(config.branches) > 1 and sums["gates"]:
        for branch in config.branches:
            add(f"gate_{branch}_mean", f"gate_{branch}", "gates", UNIT)
        means = list(found.values())
        add("gate_entropy", "entropy", "gates", UNIT)
        found["gate_collapsed"] = float(
            min(means) < DEAD * sum(means) or found["gate_entropy"] > UNIFORM
        )
    if "slc" in config.branches:
        add("selected_tokens", "keys", "selections")
        if sums["most_keys"]:
            found["selected_min_tokens"] = LARGE - sums["large_less_fewest_keys"]
            found["selected_max_tokens"] = sums["most_keys"]
        add("selected_distance_tokens", "distance_2", "keys", 2.0)
        add("selected_overlap", "shared", "preceded_blocks")
        calls = {name: sums[name.split("_")[1]] for name in _COUNTS}
        found |= {name: number for name, number in calls.items() if number}
    return found
