"""Validation loss in bits per byte of text, comparable between tokenizers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from nsa.errors import check
from nsa.train.data import Batch
from nsa.train.execution.precision import autocast
from nsa.train.loss import NextTokenLoss


@torch.no_grad()
def evaluate(
    loss: NextTokenLoss,
    batches: Iterable[Batch],
    *,
    compute_dtype: str = "fp32",
    sum_processes: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, float]:
    """Loss over validation text.

    Args:
        loss: the language model with its loss, on any device.
        batches: for example from :func:`nsa.train.data.validation_batches`, on any device.
        compute_dtype: ``bf16`` or ``fp32``, as in training.
        sum_processes: sums a tensor over the processes that share the batches; None where there is
            one.

    Returns:
        ``loss_nats``, mean over the targets; ``bits_per_byte``, the summed loss in bits over the
        bytes of text that the targets spell; ``num_targets`` and ``num_bytes`` behind these
        figures.

    Raises:
        ValueError: the batches hold no target.
    """
    device = loss.model.embedding.weight.device
    total = torch.zeros(3, dtype=torch.float64, device=device)  # nats, targets, bytes
    was_training = loss.model.training
    loss.model.eval()
    try:
        for batch in batches:
            local = batch.to(device)
            with autocast(device, compute_dtype):
                total[0] += loss(local.tokens, local.targets, local.cu_seqlens, local.max_seqlen)
            total[1] += batch.num_targets
            total[2] += batch.num_bytes
    finally:
        loss.model.train(was_training)
    total = total if sum_processes is None else sum_processes(total)
    nats, num_targets, num_bytes = total.tolist()
    rule = "hold at least one target"
    check(num_targets > 0 and num_bytes > 0, "evaluate", "batches", rule, num_targets)
    return {
        "loss_nats": nats / num_targets,
        "bits_per_byte": nats / math.log(2) / num_bytes,
        "num_targets": int(num_targets),
        "num_bytes": int(num_bytes),
    }
