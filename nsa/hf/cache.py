"""Decode cache for transformers' ``generate``."""

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
    """Cache of a batch in ``generate``, implemented by :class:`nsa.lm.decoder.Decoder`.

    Prompts may be padded on the left; padding is not cached. Steps of one token are steps of the
    decoder, which replay a CUDA graph on a GPU. Transformers compiles nothing.

    Args:
        model: the language model; its layers may be on several devices.
        batch_size: number of rows, including beams.
        max_tokens: maximum number of columns, including padding.

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
            mask: ``[B, all columns]``, 0 for padding, which is left of a row's tokens; None
                without padding. On a GPU it is not read for a single column after each row's
                first token.
            kept: columns whose logits are returned.

        Returns:
            Logits ``[B, kept, vocab_size]``; meaningless for padding.

        Raises:
            ValueError: the cache is full, or the mask is not valid. The cache is unchanged.
        """
        decoder, columns = self.decoder, tokens.shape[1]
        rule = f"have {decoder.batch_size} rows, as the cache"
        check(tokens.shape[0] == decoder.batch_size, _NAME, "input_ids", rule, tokens.shape[0])
        has_begun = min(decoder.cache.lengths) > 0
        is_read = mask is not None and (columns > 1 or not has_begun or not tokens.is_cuda)
        valid = self._valid(mask, columns) if is_read and mask is not None else None
        if valid is None and has_begun and columns <= MOST_QUERIES:
            # the next replay of the graph overwrites its output
            logits = decoder.step(tokens).clone()[:, kept]
        else:
            logits = self._prefill(tokens, valid, kept)
        self._columns += columns
        return logits

    def _valid(self, mask: Tensor, columns: int) -> Tensor | None:
        """Mask of the new columns, true for tokens; None if there is no padding."""
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
        """Number of columns, including padding."""
        return self._columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Maximum length of a row, tokens."""
        return self.decoder.cache.max_tokens

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder rows by ``beam_idx``; pages are shared."""
        self.decoder.cache.reorder(beam_idx.tolist())

    def reset(self) -> None:
        """Remove all rows, and read the model's weights again if they have changed."""
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
