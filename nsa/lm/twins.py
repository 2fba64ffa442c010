"""Models to compare with: the same with the other attention, and a dense one of as many parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from nsa.lm.config import LMConfig
from nsa.lm.model import LanguageModel

# How far the parameters of a matched model may be from those of the sparse one.
MATCHED_WITHIN = 0.01
# Hidden sizes of an MLP that suit matrix products, best first.
_STEPS = (128, 64, 32, 16, 8, 1)


def parameters_by_part(config: LMConfig) -> dict[str, int]:
    """See :meth:`LanguageModel.num_parameters`; nothing of the model is allocated."""
    with torch.device("meta"):
        return LanguageModel(config).num_parameters()


def twin(config: LMConfig, attention: Literal["nsa", "dense"]) -> LMConfig:
    """The same model with this attention, all else equal."""
    return replace(config, attention=attention)


def dense_matched(config: LMConfig) -> LMConfig:
    """The dense twin with its MLP widened until it has as many parameters as the sparse model, within 1%.

    Args:
        config: the model; its ``attention`` does not matter.
    """
    dense = twin(config, "dense")
    wanted = parameters_by_part(twin(config, "nsa"))["total"]
    have = parameters_by_part(dense)["total"]
    matrices = 3 if config.mlp == "swiglu" else 2
    hidden = config.mlp_hidden_size + (wanted - have) / (
        matrices * config.width * config.num_layers
    )
    for step in _STEPS:
        widened = replace(dense, mlp_hidden_size=max(1, round(hidden / step)) * step)
        if abs(parameters_by_part(widened)["total"] / wanted - 1) <= MATCHED_WITHIN:
            return widened
    raise AssertionError("a step of one hidden unit is more than 1% of the model")
