"""The gate of a model: the trainer's loss and gradients compared with the fp64 reference."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import torch

from nsa.bench.gate import ModelGate, Verdict
from nsa.lm.model import LanguageModel
from nsa.train.config import CheckpointingConfig, TrainConfig
from nsa.train.execution.activations import checkpoint_activations
from nsa.train.loss import NextTokenLoss

SEQUENCES = 2
LAYERS = 2
_PARTS = ("gate.net", "phi", "norm", "attention", "mlp", "embedding")


def gate_config(config: TrainConfig) -> TrainConfig:
    """What the gate compares: two layers, and sequences so short that every block is selected.

    Where blocks compete, rounding decides between two with nearly equal scores, and no budget says
    by how much a gradient may then differ; ``nsa bench attention`` checks the selection.
    """
    pattern = config.model.nsa
    model = replace(config.model, num_layers=min(config.model.num_layers, LAYERS))
    # All layers of a range, of which the two may have none.
    whole = config.checkpointing.policy == "range"
    return replace(
        config,
        model=model,
        seq_len=min(config.seq_len, pattern.num_selected_blocks * pattern.block_size),
        checkpointing=CheckpointingConfig("full") if whole else config.checkpointing,
        steps=1,
        micro_batch=SEQUENCES,
        accumulation=1,
        world_size=1,
        global_batch=SEQUENCES,
    )


def check_model(config: TrainConfig, device: torch.device) -> Verdict:
    """Compare loss and gradients of a fresh model, by part of the model.

    The model runs as the trainer runs it: same loss, compiled or not, activations checkpointed or
    not, in the run's precision. The oracle is the reference in fp64 on the CPU.

    Args:
        config: the run.
        device: where it is measured.
    """
    config = gate_config(config)
    generator = torch.Generator().manual_seed(config.seed)
    shape = (SEQUENCES * config.seq_len + 1,)
    stream = torch.randint(config.model.vocab_size, shape, generator=generator)
    offsets = torch.arange(0, stream.shape[0], config.seq_len, dtype=torch.int32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = LanguageModel(config.model)
    # TF32 has a mantissa between that of bf16 and that of fp32.
    rounded = config.compute_dtype == "bf16" or config.tf32
    gate = ModelGate(
        NextTokenLoss(model),
        [stream[:-1], stream[1:], offsets],
        config.compute_dtype,
        torch.bfloat16 if rounded else torch.float32,
        part_of,
        output="loss",
        max_seqlen=config.seq_len,
    )
    subject = NextTokenLoss(deepcopy(model).to(device), config.loss_chunk)
    checkpoint_activations(subject.model, config.checkpointing)
    run = torch.compile(subject, fullgraph=True) if config.compile else subject
    return gate.check(subject, run, device)


def part_of(parameter: str) -> str:
    """The part of the model that a parameter belongs to."""
    name = parameter.removeprefix("model.")
    return next((part.partition(".")[0] for part in _PARTS if part in name), "head")
