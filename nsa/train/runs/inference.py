"""A trained model from its run folder."""

from __future__ import annotations

from pathlib import Path

import torch

from nsa.lm.config import LMConfig
from nsa.lm.model import LanguageModel
from nsa.train.checkpoint import load_tensors, step_of
from nsa.train.state import weights


def load_model(
    config: LMConfig,
    checkpoint: Path,
    device: torch.device,
) -> tuple[LanguageModel, int]:
    """The model of a checkpoint, with its fp32 weights.

    Args:
        config: the model as it was trained.
        checkpoint: folder of the checkpoint.
        device: where the model goes.

    Returns:
        The model in evaluation mode, and the optimizer steps that it was trained for.

    Raises:
        ValueError: the checkpoint is damaged or holds another model.
    """
    model = LanguageModel(config).to(device)
    load_tensors(checkpoint, weights(model))
    return model.eval(), step_of(checkpoint)
