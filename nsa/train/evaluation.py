"""Loss in bits per byte of text, comparable between tokenizers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from nsa.errors import check
from nsa.train.data import IGNORED_TARGET, Batch, TextSource
from nsa.train.data.tokenizer import Ids
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
        batches: from :func:`nsa.train.data.validation_batches` or
            :meth:`RollingWindows.batches`, on any device.
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


class RollingWindows:
    """Windows of whole documents in which each of their tokens is a target once.

    Those of lm-eval's rolling log-likelihood at ``max_length = seq_len``: a document's first token
    is predicted from a separator, and each window but the first of a document begins with the last
    target of the one before. The last one reaches back until it is as long as the others.

    Args:
        source: the documents.
        seq_len: tokens of a window, at most.
    """

    def __init__(self, source: TextSource, seq_len: int) -> None:
        assert source.separator_id is not None, "documents without a separator"
        # The separator before a document is the one that ends the document before.
        before = np.array([source.separator_id], dtype=source.tokens.dtype)
        self._tokens = np.concatenate((before, source.tokens))
        self._token_bytes, self._seq_len = source.token_bytes, seq_len
        separators = np.flatnonzero(self._tokens == source.separator_id).tolist()
        self._parts = [
            (separator, start, min(start + seq_len, end))
            for separator, end in pairwise(separators)
            for start in range(separator + 1, end, seq_len)
        ]

    def __len__(self) -> int:
        """The number of windows."""
        return len(self._parts)

    def batches(self, micro_batch: int, num_windows: int) -> Iterator[Batch]:
        """The first windows, each a sequence of its own.

        Args:
            micro_batch: windows of a batch.
            num_windows: at most what there is.
        """
        for begin in range(0, num_windows, micro_batch):
            windows = map(self._window, range(begin, min(begin + micro_batch, num_windows)))
            tokens, targets = zip(*windows, strict=True)
            lengths = [0, *map(len, tokens)]
            counted = np.concatenate(targets)
            counted = counted[counted != IGNORED_TARGET]
            yield Batch(
                tokens=torch.from_numpy(np.concatenate(tokens)),
                targets=torch.from_numpy(np.concatenate(targets)),
                cu_seqlens=torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32),
                max_seqlen=self._seq_len,
                num_bytes=int(self._token_bytes[counted].sum()),
                num_targets=len(counted),
            )

    def _window(self, index: int) -> tuple[Ids, Ids]:
        """Tokens, and the token after each; -100 where an earlier window has predicted it."""
        separator, start, end = self._parts[index]
        first = max(separator, end - 1 - self._seq_len)
        tokens = self._tokens[first:end].astype(np.int64)
        targets = tokens[1:].copy()
        targets[: start - 1 - first] = IGNORED_TARGET
        return tokens[:-1], targets
