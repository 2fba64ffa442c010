"""The correctness gate of a model: loss and gradients as the trainer computes them, against fp64 by the reference."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor, nn

from nsa.bench.gate import Verdict
from nsa.lm.model import LanguageModel
from nsa.testing import assert_within_budget
from nsa.train.config import CheckpointingConfig, TrainConfig
from nsa.train.execution.activations import checkpoint_activations
from nsa.train.execution.precision import autocast
from nsa.train.loss import NextTokenLoss

SEQUENCES = 2
LAYERS = 2
_PARTS = {r"gate\.net": "gate", "phi": "phi", "norm": "norm", "attention": "attention", "mlp": "mlp", "embedding": "embedding"}


def gate_config(config: TrainConfig) -> TrainConfig:
    """What the gate looks at: two layers, and sequences so short that every block is chosen.

    Where blocks compete, rounding decides between near ones, and no budget says by how much a gradient may then differ; the
    choice itself is judged by the gate of ``nsa bench attention``.
    """
    pattern = config.model.nsa
    model = replace(config.model, num_layers=min(config.model.num_layers, LAYERS))
    seq_len = min(config.seq_len, pattern.num_selected_blocks * pattern.block_size)
    # All layers of a range, of which the two may have none.
    checkpointing = CheckpointingConfig("full") if config.checkpointing.policy == "range" else config.checkpointing
    return replace(
        config, model=model, seq_len=seq_len, checkpointing=checkpointing, steps=1, micro_batch=SEQUENCES, accumulation=1,
        world_size=1, global_batch=SEQUENCES,
    )  # fmt: skip


def check_model(config: TrainConfig, device: torch.device) -> Verdict:
    """Compare loss and gradients of a fresh model, by part of the model.

    The model runs as the trainer runs it: same loss, compiled or not, activations checkpointed or not, in the run's precision.
    The oracle is the reference in fp64 on the CPU, the budget what the reference loses in the run's precision there.

    Args:
        config: the run.
        device: where it is measured.
    """
    config = gate_config(config)
    generator = torch.Generator().manual_seed(config.seed)
    num_tokens = SEQUENCES * config.seq_len
    stream = torch.randint(config.model.vocab_size, (num_tokens + 1,), generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = LanguageModel(config.model)
    on_cpu, here = (autocast(place, config.compute_dtype) for place in (torch.device("cpu"), device))
    subject = NextTokenLoss(deepcopy(model).to(device), config.loss_chunk)
    checkpoint_activations(subject.model, config.checkpointing)
    oracle = _results(NextTokenLoss(deepcopy(model).double()), stream, config.seq_len, nullcontext())
    baseline = _results(NextTokenLoss(model), stream, config.seq_len, on_cpu)
    found = _results(
        subject, stream, config.seq_len, here, torch.compile(subject, fullgraph=True) if config.compile else subject
    )
    # TF32 has a mantissa between the two.
    dtype = torch.bfloat16 if config.compute_dtype == "bf16" or config.tf32 else torch.float32
    errors: dict[str, float] = {}
    try:
        for name, exact in oracle.items():
            errors[name] = assert_within_budget(found[name], baseline[name].to(dtype), exact, name).total
    except AssertionError as error:
        return Verdict(False, errors, f"train {error}")
    return Verdict(True, {name: float(f"{value:.3g}") for name, value in errors.items()})


def _results(
    loss: nn.Module,
    stream: Tensor,
    seq_len: int,
    precision: AbstractContextManager[object],
    run: Callable[..., Tensor] | None = None,
) -> Mapping[str, Tensor]:
    """The summed loss, and the gradients of each part of the model in one row, on the CPU."""
    device = next(loss.parameters()).device
    stream = stream.to(device)
    offsets = torch.arange(0, stream.shape[0], seq_len, dtype=torch.int32, device=device)
    with precision:
        value: Tensor = (loss if run is None else run)(stream[:-1], stream[1:], offsets, seq_len)
    value.backward()
    rows: dict[str, list[Tensor]] = {}
    for name, parameter in loss.named_parameters():
        if parameter.grad is not None:
            rows.setdefault(f"d{part_of(name)}", []).append(parameter.grad.flatten().cpu())
    return {"loss": value.detach().cpu().reshape(1), **{name: torch.cat(parts) for name, parts in rows.items()}}


def part_of(parameter: str) -> str:
    """The part of the model that a parameter belongs to."""
    return next((part for pattern, part in _PARTS.items() if re.search(pattern, parameter.removeprefix("model."))), "head")
