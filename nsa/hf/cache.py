"""The decode cache as transformers' ``generate`` uses it."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import Cache

from nsa.errors import check, fail
from nsa.lm.decoder import Decoder
from nsa.lm.model import LanguageModel
from nsa.ops._sequences import Sequences
from nsa.ops.decode import MOST_QUERIES

_NAME = "GenerationCache"


class GenerationCache(Cache):
    """The cache of a batch that ``generate`` continues: a :class:`nsa.lm.decoder.Decoder`.

    Prompts may be padded on the left: each row is cached as if it were alone. Steps of a token are
    those of the decoder, on a GPU a replayed CUDA graph; nothing is compiled by transformers.

    Args:
        model: the language model; its layers may be on several devices.
        batch_size: rows, those of beams included.
        max_tokens: columns of the batch, padding included, until the cache is full.

    Attributes:
        decoder: decoder that stores the rows.
    """

    is_croppable = False

    def __init__(self, model: LanguageModel, batch_size: int, *, max_tokens: int) -> None:
        super().__init__(layers=[])
        kind = model.embedding.weight.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        sizes: dict[str, Any] = {"max_tokens": max_tokens, "compute_dtype": dtype}
        self.decoder = Decoder(model, batch_size, **sizes)
        self._columns = 0

    @torch.no_grad()
    def take(self, tokens: Tensor, mask: Tensor | None, kept: slice | Tensor) -> Tensor:
        """Append the next columns of the batch.

        Args:
            tokens: int64 ``[B, T]``.
            mask: ``[B, all columns]``, 0 for padding, which lies left of a row's tokens; None
                without padding. Behind a row's first token it is read for chunks of several
                columns, and on a GPU not for single ones.
            kept: columns whose logits are wanted.

        Returns:
            Logits ``[B, kept, vocab_size]``; meaningless for padding.

        Raises:
            ValueError: the cache is full, or the mask does not fit; nothing has changed then.
        """
        decoder, columns = self.decoder, tokens.shape[1]
        rule = f"have {decoder.batch_size} rows, as the cache"
        check(tokens.shape[0] == decoder.batch_size, _NAME, "input_ids", rule, tokens.shape[0])
        has_begun = min(decoder.cache.lengths) > 0
        is_read = mask is not None and (columns > 1 or not has_begun or not tokens.is_cuda)
        valid = self._valid(mask, columns) if is_read and mask is not None else None
        if valid is None and has_begun and columns <= MOST_QUERIES:
            # a replayed graph writes to the same memory again
            logits = decoder.step(tokens).clone()[:, kept]
        else:
            logits = self._prefill(tokens, valid, kept)
        self._columns += columns
        return logits

    def _valid(self, mask: Tensor, columns: int) -> Tensor | None:
        """Mask of the new columns that are tokens; None if all are."""
        total = self._columns + columns
        check(mask.shape[-1] == total, _NAME, "attention_mask", f"have {total} columns", mask.shape)
        valid = mask[:, -columns:] != 0
        if valid.all():
            return None
        begun = torch.tensor(self.decoder.cache.lengths, device=mask.device) > 0
        before = torch.cat((begun[:, None], valid[:, :-1]), dim=1)
        rule = "have padding on the left alone"
        check(not (before & ~valid).any(), _NAME, "attention_mask", rule, "some behind a token")
        return valid

    def _prefill(self, tokens: Tensor, valid: Tensor | None, kept: slice | Tensor) -> Tensor:
        decoder, (batch, columns) = self.decoder, tokens.shape
        if valid is None:
            where = Sequences(None, batch, columns, columns, tokens.device)
            hidden = decoder.hidden_states(tokens.flatten(), where).unflatten(0, tokens.shape)
        else:
            ends = valid.sum(1).cumsum(0, dtype=torch.int32)
            cu_seqlens = torch.cat((ends.new_zeros(1), ends))
            where = Sequences.packed(cu_seqlens, columns)
            packed = decoder.hidden_states(tokens[valid], where)
            hidden = packed.new_zeros(batch, columns, packed.shape[-1])
            hidden[valid] = packed
        wanted = hidden[:, kept]
        return decoder.logits(wanted.flatten(0, 1)).unflatten(0, wanted.shape[:2])

    # --- what transformers calls ------------------------------------------------------------------
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of columns, padding included."""
        return self._columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Longest row, tokens."""
        return self.decoder.cache.max_tokens

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder rows by ``beam_idx``; pages are shared."""
        self.decoder.cache.reorder(beam_idx.tolist())

    def reset(self) -> None:
        """Forget all rows, and read the model's weights again if they have changed."""
        self.decoder.reset()
        self._columns = 0

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an error: the model's own layers write to the cache."""
        fail(_NAME, "model", "be an NSAForCausalLM", "the layers of another model")

    def crop(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an error: assisted generation needs caches that can drop tokens."""
        fail(_NAME, "generate", "run without an assistant or prompt lookup", "one of them")

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Raise an error: the number of rows is fixed."""
        fail(_NAME, "rows", f"stay {self.decoder.batch_size}", f"{repeats} times as many")

    def batch_select_indices(self, indices: Tensor) -> NoReturn:
        """Raise an error: the number of rows is fixed."""
        fail(_NAME, "rows", f"stay {self.decoder.batch_size}", f"a selection of {len(indices)}")
