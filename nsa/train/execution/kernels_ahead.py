"""One training step and one generated token on CPU tensors, to compile their kernels ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from nsa.lm.config import LMConfig
from nsa.lm.decoder import Decoder
from nsa.lm.dense_attention import DenseAttention
from nsa.lm.model import Embedding, LanguageModel
from nsa.module import NativeSparseAttention
from nsa.ops.decode import MOST_QUERIES
from nsa.ops.muon import normalized, update_momenta, update_weights
from nsa.ops.statistics import new_statistics
from nsa.train.config import TrainConfig
from nsa.train.execution.precision import autocast


def run_step(config: TrainConfig) -> None:
    """Forward and backward pass of each kind of layer of a run, and Muon's update."""
    model, num_tokens = config.model, config.micro_batch * config.seq_len
    # Documents would be more sequences; kernels of dense attention are PyTorch's in any case.
    offsets = torch.arange(config.micro_batch + 1, dtype=torch.int32) * config.seq_len
    with autocast(torch.device("cpu"), config.compute_dtype):
        embedding = Embedding(model.vocab_size, model.width)
        embedding(torch.zeros(num_tokens, dtype=torch.int64)).sum().backward()
        for kind in model.kinds:
            dense = kind.attention == "dense"
            attention = (DenseAttention if dense else NativeSparseAttention)(model.width, kind.nsa)
            if isinstance(attention, NativeSparseAttention) and config.telemetry:
                attention.statistics = new_statistics("cpu")
            x = torch.empty(num_tokens, model.width, requires_grad=True)
            attention(x, cu_seqlens=offsets, max_seqlen=config.seq_len).sum().backward()
    if config.optim.name == "muon":
        run_update()


def run_update() -> None:
    """Muon's update of a matrix, without its products."""
    cancel, matrix = torch.zeros(()), [torch.zeros(64, 64)]
    updates = normalized(*update_momenta(matrix, matrix, cancel, torch.bfloat16))
    update_weights(matrix, updates, cancel.double(), 0.1, 1.0, cancel)


def run_generation(
    config: LMConfig,
    lengths: Sequence[int],
    max_tokens: int,
    dtype: torch.dtype | None,
    rollback: int = MOST_QUERIES,
) -> None:
    """Prompts and a first step of each kind of layer.

    Args:
        config: the model.
        lengths: tokens of each prompt.
        max_tokens: longest sequence, tokens.
        dtype: compute dtype; None means that of the parameters.
        rollback: see :class:`nsa.NSACache`.
    """
    for kind in config.kinds:
        prompts = [[0] * length for length in lengths]
        if kind.attention == "dense":  # PyTorch's kernels of unequal lengths run on a GPU alone
            prompts = [[0] * max(lengths)] * len(lengths)
        model = LanguageModel(replace(kind, num_layers=1))
        decoder = Decoder(model, len(lengths), max_tokens=max_tokens, compute_dtype=dtype)
        decoder.cache.rollback = rollback
        decoder.prefill(prompts)
        decoder.step(torch.zeros(len(lengths), 1, dtype=torch.int64))
