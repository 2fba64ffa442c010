"""The gate of a model: the trainer's loss and gradients beside the fp64 reference."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor, nn

from nsa.bench.gate import Verdict, compare, weight_gradients
from nsa.lm.model import LanguageModel
from nsa.train.config import CheckpointingConfig, TrainConfig
from nsa.train.execution.activations import checkpoint_activations
from nsa.train.execution.precision import autocast
from nsa.train.loss import NextTokenLoss

SEQUENCES = 2
LAYERS = 2
_PARTS = ("gate.net", "phi", "norm", "attention", "mlp", "embedding")


def gate_config(config: TrainConfig) -> TrainConfig:
    """What the gate compares: two layers, and sequences so short that every block is selected.

    Where blocks compete, rounding decides between near ones, and no budget says by how much a
    gradient may then differ; the selection has a gate of its own in ``nsa bench attention``.
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
    not, in the run's precision. The oracle is the reference in fp64 on the CPU, the budget what the
    reference loses in the run's precision there.

    Args:
        config: the run.
        device: where it is measured.
    """
    config = gate_config(config)
    generator = torch.Generator().manual_seed(config.seed)
    shape = (SEQUENCES * config.seq_len + 1,)
    stream = torch.randint(config.model.vocab_size, shape, generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = LanguageModel(config.model)
    subject = NextTokenLoss(deepcopy(model).to(device), config.loss_chunk)
    checkpoint_activations(subject.model, config.checkpointing)
    compiled = torch.compile(subject, fullgraph=True) if config.compile else subject
    on_cpu = autocast(torch.device("cpu"), config.compute_dtype)
    here = autocast(device, config.compute_dtype)
    exact = NextTokenLoss(deepcopy(model).double())
    oracle = _results(exact, exact, stream, config.seq_len, nullcontext())
    plain = NextTokenLoss(model)
    baseline = _results(plain, plain, stream, config.seq_len, on_cpu)
    found = _results(subject, compiled, stream, config.seq_len, here)
    # TF32 has a mantissa between the two.
    rounded = config.compute_dtype == "bf16" or config.tf32
    dtype = torch.bfloat16 if rounded else torch.float32
    baseline = {name: x.to(dtype) for name, x in baseline.items()}
    return compare(found, baseline, oracle, prefix="train ")


def _results(
    loss: nn.Module,
    run: Callable[..., Tensor],
    stream: Tensor,
    seq_len: int,
    precision: AbstractContextManager[object],
) -> dict[str, Tensor]:
    """The summed loss, and the gradients of each part of the model in one row, on the CPU."""
    device = next(loss.parameters()).device
    stream = stream.to(device)
    offsets = torch.arange(0, stream.shape[0], seq_len, dtype=torch.int32, device=device)
    with precision:
        value = run(stream[:-1], stream[1:], offsets, seq_len)
    value.backward()
    return {"loss": value.detach().cpu().reshape(1), **weight_gradients(loss, part_of)}


def part_of(parameter: str) -> str:
    """The part of the model that a parameter belongs to."""
    name = parameter.removeprefix("model.")
    return next((part.partition(".")[0] for part in _PARTS if part in name), "head")
