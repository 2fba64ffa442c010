"""Next-token loss in fp32, whole or in chunks of positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nsa.lm.model import LanguageModel
from nsa.ops.index_loss import IndexLoss, Ranked
from nsa.stages import LOSS, in_stage
from nsa.train.data.batch import IGNORED_TARGET

ROWS = 64  # the number of logits of a position is a multiple of this


class NextTokenLoss(nn.Module):
    """A language model with its loss: the module that is trained, compiled, replicated or sharded.

    Args:
        model: the language model.
        chunk: positions whose logits exist at a time; 0 means all.

    Attributes:
        ranked: blocks that the losses of the indices rank; None leaves these losses out.
    """

    def __init__(self, model: LanguageModel, chunk: int = 0) -> None:
        super().__init__()
        self.model = model
        self.chunk = chunk
        self.ranked: Ranked | None = None
        self._kv_heads = list(model.config.index_layers.values())

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
    ) -> Tensor:
        """Cross entropy summed over the targets and losses of the indices, nats, fp32 ``[1 + L]``.

        Of each layer that trains its index, the divergence (see :func:`nsa.index_loss`) summed over
        the tokens, mean over the KV heads.

        Args:
            tokens: int64 packed ``[T]``.
            targets: int64 ``[T]``, -100 where nothing is predicted.
            cu_seqlens: int32 ``[B + 1]`` offsets of the sequences.
            max_seqlen: at least the longest sequence, tokens.
        """
        losses: list[IndexLoss] = []
        given = (tokens, cu_seqlens, max_seqlen)
        hidden = self.model.hidden_states(*given, ranked=self.ranked, losses=losses)
        entropy = cross_entropy_sum(hidden, self.model.head.weight, targets, self.chunk)
        each = zip(losses, self._kv_heads, strict=False)  # no losses without ``ranked``
        return torch.stack([entropy, *(loss.total / heads for loss, heads in each)])


def cross_entropy_sum(hidden: Tensor, head: Tensor, targets: Tensor, chunk: int = 0) -> Tensor:
    """Cross entropy summed over the targets.

    A sum and not a mean: micro-batches differ in how many targets they have, and only sums divided
    by the number of targets of the whole optimizer step give the mean over its tokens.

    Args:
        hidden: final hidden states ``[T, width]``.
        head: output matrix ``[vocab_size, width]``.
        targets: int64 ``[T]``, -100 where nothing is predicted.
        chunk: positions whose logits exist at a time, recomputed in the backward pass, so that
            memory does not grow with ``T * vocab_size``; 0 means all at once, with no
            recomputation.

    Returns:
        fp32 scalar (fp64 for fp64 inputs), nats. Without a target it is 0, and so is its gradient.
    """
    vocab_size, head = head.shape[0], _aligned(head)
    if chunk == 0 or chunk >= hidden.shape[0]:
        return _cross_entropy(hidden, head, targets, vocab_size)
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    total = hidden.new_zeros((), dtype=dtype)
    for rows, labels in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        inputs = (rows, head, labels, vocab_size)
        part = checkpoint(_cross_entropy, *inputs, use_reentrant=False, preserve_rng_state=False)
        assert isinstance(part, Tensor)
        total = total + part
    return total


@torch.no_grad()
def cross_entropy_of_tokens(
    hidden: Tensor, head: Tensor, targets: Tensor, chunk: int = 0
) -> Tensor:
    """Cross entropy of each target, without gradients.

    Args:
        hidden: see :func:`cross_entropy_sum`.
        head: the same.
        targets: the same.
        chunk: the same.

    Returns:
        fp32 ``[T]`` (fp64 for fp64 inputs), nats; 0 where nothing is predicted.
    """
    vocab_size, size, head = head.shape[0], chunk or max(len(targets), 1), _aligned(head)
    pairs = zip(hidden.split(size), targets.split(size), strict=True)
    return torch.cat([_cross_entropy(x, head, y, vocab_size, "none") for x, y in pairs])


def _aligned(head: Tensor) -> Tensor:
    """Output matrix, padded with zeros to a multiple of ``ROWS`` rows, in the product's dtype.

    GPT-2 has 50,257 tokens: rows of so many logits are not aligned as the fast matrix
    products need them, and the three products take three times as long (H200, bf16).
    """
    missing = -head.shape[0] % ROWS
    if missing == 0:
        return head
    device = head.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.dtype
    return nn.functional.pad(head.to(dtype), (0, 0, 0, missing))


@in_stage(LOSS)
def _cross_entropy(
    hidden: Tensor, head: Tensor, targets: Tensor, vocab_size: int, reduction: str = "sum"
) -> Tensor:
    logits = nn.functional.linear(hidden, head)[:, :vocab_size]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return nn.functional.cross_entropy(
        logits, targets, ignore_index=IGNORED_TARGET, reduction=reduction
    )
