"""Statistics of gates and selections by layer, summed on the device in steps with a row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.lm.model import LanguageModel
from nsa.module import NativeSparseAttention
from nsa.ops.statistics import LARGE, MAXIMA, UNIT, Statistics, new_statistics
from nsa.stages import TELEMETRY, in_stage
from nsa.train.telemetry.throughput import LateReader

DEAD = 0.02  # of the sum of the gates
UNIFORM = 0.999  # entropy, relative to the largest possible one

_COUNTS = tuple(f"selected_{algorithm}_calls" for algorithm in ("tiled", "gathered", "reference"))
# Functions that combine the layers of a run; other metrics are means.
_OF_ALL_LAYERS: dict[str, Callable[[list[float]], float]] = {
    "selected_min_tokens": min,
    "selected_max_tokens": max,
    **dict.fromkeys(_COUNTS, sum),
}


class LayerStatistics:
    """Gates and selections of every layer over the passes of one optimizer step.

    An operator of the model's graph adds to the statistics while they are switched on. It also runs
    in compiled and replayed graphs, and twice in recomputed layers, which changes no mean. Nothing
    waits for the device.

    Dense layers have no statistics; fixed gates and single branches have no gate statistics.

    Args:
        model: the language model. Its layers get statistics here, before it is compiled.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._layers: dict[int, NSAConfig] = {}
        self._sums: list[Tensor] = []
        for number, layer in enumerate(model.decoder_layers()):
            if isinstance(layer.attention, NativeSparseAttention):
                layer.attention.statistics = new_statistics(model.embedding.weight.device)
                self._layers[number] = layer.attention.config
                self._sums.append(layer.attention.statistics)
        self._off = [torch.zeros_like(sums) for sums in self._sums]
        self._on = [torch.zeros_like(sums) for sums in self._sums]
        for sums in self._on:
            sums[0] = 1
        self._late: LateReader[None] = LateReader()

    @in_stage(TELEMETRY)
    def start(self) -> None:
        """Reset the statistics and start counting."""
        if self._sums:
            torch._foreach_copy_(self._sums, self._on)

    @in_stage(TELEMETRY)
    def stop(
        self,
        sum_processes: Callable[[Tensor], Tensor],
        largest_of_processes: Callable[[Tensor], Tensor],
    ) -> None:
        """Stop counting and start the copy to the host.

        Args:
            sum_processes: sums a tensor over the processes that share the step.
            largest_of_processes: takes the elementwise maximum over them.
        """
        if self._sums:
            sums = torch.stack(self._sums)
            totals = sum_processes(sums[:, :MAXIMA].contiguous())
            extremes = largest_of_processes(sums[:, MAXIMA:].contiguous())
            self._late.put(None, torch.cat((totals, extremes), dim=1).flatten())
            torch._foreach_copy_(self._sums, self._off)

    def row(self) -> dict[str, float]:
        """Metrics of the step that was stopped last; empty without one. Waits for their copy only.

        Returns:
            The metrics ``gate_*`` and ``selected_*`` of
            :data:`nsa.train.telemetry.metrics.METRICS`, and those of each layer with the suffix
            ``_layer_0`` and so on. Values without a suffix are means over the layers, sums for
            counts, and extremes.
        """
        taken = self._late.take(keep=0)
        if not taken:
            return {}
        values = iter(taken[-1][1])
        of_layers = {
            layer: _metrics(config, dict(zip(Statistics._fields, values, strict=False)))
            for layer, config in self._layers.items()
        }
        found: dict[str, list[float]] = {}
        for metrics in of_layers.values():
            for name, value in metrics.items():
                found.setdefault(name, []).append(value)
        row = {name: _OF_ALL_LAYERS.get(name, _mean)(each) for name, each in found.items()}
        for layer, metrics in of_layers.items():
            row |= {f"{name}_layer_{layer}": value for name, value in metrics.items()}
        return row


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _metrics(config: NSAConfig, sums: dict[str, float]) -> dict[str, float]:
    """Metrics of one layer from its sums."""
    found: dict[str, float] = {}
    if config.gate != "fixed" and len(config.branches) > 1 and sums["gates"]:
        scale = UNIT * sums["gates"]
        means = {f"gate_{name}_mean": sums[f"gate_{name}"] / scale for name in config.branches}
        entropy = sums["entropy"] / scale
        is_dead = min(means.values()) < DEAD * sum(means.values())
        collapsed = float(is_dead or entropy > UNIFORM)
        found = {**means, "gate_entropy": entropy, "gate_collapsed": collapsed}
    if "slc" not in config.branches:
        return found
    if sums["selections"]:
        found["selected_tokens"] = sums["keys"] / sums["selections"]
    if sums["most_keys"]:
        found["selected_min_tokens"] = LARGE - sums["large_less_fewest_keys"]
        found["selected_max_tokens"] = sums["most_keys"]
    if sums["keys"]:
        found["selected_distance_tokens"] = sums["distance_2"] / 2 / sums["keys"]
    if sums["preceded_blocks"]:
        found["selected_overlap"] = sums["shared"] / sums["preceded_blocks"]
    calls = {name: sums[name.split("_")[1]] for name in _COUNTS}
    return found | {name: number for name, number in calls.items() if number}
