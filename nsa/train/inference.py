"""A trained model from its run folder."""

from __future__ import annotations

import torch

from nsa.errors import check
from nsa.lm.config import LMConfig
from nsa.lm.model import LanguageModel
from nsa.train.checkpoint import list_checkpoints, load_tensors, read_meta
from nsa.train.run_folder import RunFolder


def load_model(config: LMConfig, run_folder: RunFolder, device: torch.device) -> tuple[LanguageModel, int]:
    """The model of the newest checkpoint, with its fp32 weights.

    Args:
        config: the model as it was trained.
        run_folder: the run.
        device: where the model goes.

    Returns:
        The model in evaluation mode, and the optimizer steps that it was trained for.

    Raises:
        ValueError: the run has no checkpoint, or its newest one is damaged or holds another model.
    """
    found = list_checkpoints(run_folder.checkpoints)
    check(bool(found), "load_model", "run_folder", "hold a checkpoint", run_folder.path)
    model = LanguageModel(config).to(device)
    load_tensors(found[-1], {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()})
    return model.eval(), int(read_meta(found[-1])["step"])
