"""Dense baseline of equal size, and model sizes without allocation."""

from __future__ import annotations

from dataclasses import replace

import torch

from nsa.lm.config import LMConfig
from nsa.lm.model import DecoderLayer, LanguageModel, count_parameters

# Largest relative difference in parameters between baseline and sparse model.
MATCHED_WITHIN = 0.01
# Hidden sizes of an MLP that suit matrix products, best first.
_MULTIPLES = (128, 64, 32, 16, 8, 1)


def parameters_by_part(config: LMConfig) -> dict[str, int]:
    """:meth:`LanguageModel.num_parameters` without allocating memory.

    One layer of each kind is made.
    """
    with torch.device("meta"):
        one = LanguageModel(replace(config, num_layers=1, layers=None))
        count, first = one.num_parameters(), count_parameters(one.layers)
        kinds = [(count_parameters(DecoderLayer(x, 0)), len(n)) for x, n in config.kinds.items()]
    return {
        part: number - first[part] + sum(size[part] * times for size, times in kinds)
        for part, number in count.items()
    }


def dense_of_equal_size(config: LMConfig) -> LMConfig:
    """Return a dense model with a wider MLP and the parameters of the sparse model, +-1%.

    Args:
        config: the model; its ``attention`` is ignored unless it has ``layers``.
    """
    dense = replace(config, attention="dense", layers=None)
    sparse = config if config.layers else replace(config, attention="nsa")
    target = parameters_by_part(sparse)["total"]
    missing = target - parameters_by_part(dense)["total"]
    matrices = 3 if config.mlp == "swiglu" else 2
    hidden = config.mlp_hidden_size + missing / (matrices * config.width * config.num_layers)
    for multiple in _MULTIPLES:
        widened = replace(dense, mlp_hidden_size=max(1, round(hidden / multiple)) * multiple)
        if abs(parameters_by_part(widened)["total"] / target - 1) <= MATCHED_WITHIN:
            return widened
    raise AssertionError("one hidden unit is more than 1% of the model")
