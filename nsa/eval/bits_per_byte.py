"""Held-out loss in bits per byte of text, comparable between tokenizers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from nsa.errors import check
from nsa.lm.model import LanguageModel
from nsa.train.data import Batch
from nsa.train.loss import cross_entropy_sum
from nsa.train.precision import autocast


@torch.no_grad()
def evaluate(
    model: LanguageModel,
    batches: Iterable[Batch],
    *,
    compute_dtype: str = "fp32",
    loss_chunk: int = 0,
    sum_processes: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, float]:
    """Loss over held-out windows.

    Args:
        model: the language model, on any device.
        batches: for example from :func:`nsa.train.data.validation_batches`, on any device.
        compute_dtype: ``bf16`` or ``fp32``, as in training.
        loss_chunk: positions whose logits exist at a time; 0 means all.
        sum_processes: sums a tensor over the processes that share the batches; None where there is one.

    Returns:
        ``loss_nats``, mean over the targets; ``bits_per_byte``, the summed loss in bits over the bytes of text that the targets
        spell; ``num_targets`` and ``num_bytes`` behind these figures.

    Raises:
        ValueError: the batches hold no target.
    """
    device = model.embedding.weight.device
    total = torch.zeros(3, dtype=torch.float64, device=device)  # nats, targets, bytes
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            local = batch.to(device)
            with autocast(device, compute_dtype):
                hidden = model.hidden_states(local.tokens, local.cu_seqlens, local.max_seqlen)
                total[0] += cross_entropy_sum(hidden, model.head.weight, local.targets, loss_chunk)
            total[1] += batch.num_targets
            total[2] += batch.num_bytes
    finally:
        model.train(was_training)
    nats, num_targets, num_bytes = (total if sum_processes is None else sum_processes(total)).tolist()
    check(num_targets > 0 and num_bytes > 0, "evaluate", "batches", "hold at least one target", num_targets)
    return {
        "loss_nats": nats / num_targets,
        "bits_per_byte": nats / math.log(2) / num_bytes,
        "num_targets": int(num_targets),
        "num_bytes": int(num_bytes),
    }
