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
        prompt_columns: columns of the prompt that ``max_tokens`` allows for. Soft prompts (prompt
            tuning) come in addition, and the empty cache grows by them. None: it does not grow.
    """

    is_croppable = True

    def __init__(self, model: LanguageModel, batch_size: int, *, max_tokens: int) -> None:
        super().__init__(layers=[])
        kind = model.embedding.weight.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        sizes: dict[str, Any] = {"max_tokens": max_tokens, "compute_dtype": dtype}
        self.decoder = Decoder(model, batch_size, **sizes)
        self.prompt_columns: int | None = None
        self._columns = 0

    @torch.no_grad()
    def take(
        self,
        tokens: Tensor,
        mask: Tensor | None,
        kept: slice | Tensor,
        outputs: list[Tensor] | None = None,
    ) -> Tensor:
        """Append the next columns of the batch.

        Args:
            tokens: int64 ``[B, T]``, or their embeddings ``[B, T, width]``.
            mask: ``[B, all columns]``, 0 for padding, which is left of a row's tokens; None
                without padding. On a GPU it is not read for a single column after each row's
                first token.
            kept: columns whose logits are returned.
            outputs: see :meth:`hidden_states`.

        Returns:
            Logits ``[B, kept, vocab_size]``; meaningless for padding.

        Raises:
            ValueError: the cache is full, or the mask is not valid. The cache is unchanged.
        """
        decoder, columns = self.decoder, tokens.shape[1]
        valid = self._open(tokens, mask)
        is_step = valid is None and tokens.ndim == 2 and outputs is None
        if is_step and min(decoder.cache.lengths) > 0 and columns <= MOST_QUERIES:
            # the next replay of the graph overwrites its output
            logits = decoder.step(tokens).clone()[:, kept]
            self._columns += columns
            return logits
        wanted = self._append(tokens, valid, outputs)[:, kept]
        return decoder.logits(wanted.flatten(0, 1)).unflatten(0, wanted.shape[:2])

    @torch.no_grad()
    def hidden_states(
        self, tokens: Tensor, mask: Tensor | None, outputs: list[Tensor] | None = None
    ) -> Tensor:
        """Append the next columns like :meth:`take`; return the input of the head.

        Args:
            tokens: see :meth:`take`.
            mask: see :meth:`take`.
            outputs: list to which the input of each layer and the result are appended.

        Returns:
            ``[B, T, width]``; meaningless for padding.
        """
        hidden = self._append(tokens, self._open(tokens, mask), outputs)
        return self.decoder.model.norm(hidden) if outputs is None else outputs[-1]

    def _open(self, tokens: Tensor, mask: Tensor | None) -> Tensor | None:
        """Check the next columns; return which hold tokens, None without padding."""
        decoder, columns = self.decoder, tokens.shape[1]
        rule = f"have {decoder.batch_size} rows, as the cache"
        check(tokens.shape[0] == decoder.batch_size, "input_ids", rule, tokens.shape[0])
        if self.prompt_columns is not None and columns > self.prompt_columns and not self._columns:
            self._grow(columns - self.prompt_columns)
            self.prompt_columns = columns
        has_begun = min(decoder.cache.lengths) > 0
        is_read = mask is not None and (columns > 1 or not has_begun or not tokens.is_cuda)
        return self._valid(mask, columns) if is_read and mask is not None else None

    def _grow(self, columns: int) -> None:
        decoder, old = self.decoder, self.decoder.cache
        new = decoder.model.new_cache(old.batch_size, max_tokens=old.max_tokens + columns)
        decoder.cache, new.rollback = new, old.rollback
        decoder.reset()  # captured steps write to the old cache

    def _valid(self, mask: Tensor, columns: int) -> Tensor | None:
        """Mask of the new columns, true for tokens; None if there is no padding."""
        total = self._columns + columns
        check(mask.shape[-1] == total, "attention_mask", f"have {total} columns", mask.shape)
        valid = mask[:, -columns:] != 0
        if valid.all():
            return None
        begun = torch.tensor(self.decoder.cache.lengths, device=mask.device) > 0
        before = torch.cat((begun[:, None], valid[:, :-1]), dim=1)
        rule = "have padding on the left alone"
        check(not (before & ~valid).any(), "attention_mask", rule, "some behind a token")
        return valid

    def _append(self, tokens: Tensor, valid: Tensor | None, outputs: list[Tensor] | None) -> Tensor:
        """Hidden states ``[B, T, width]`` before the last norm, without a CUDA graph."""
        decoder, (batch, columns) = self.decoder, tokens.shape[:2]
        if valid is None:
            where = Sequences(None, batch, columns, columns, tokens.device)
            hidden = decoder.hidden_states(tokens.flatten(0, 1), where, outputs)
        else:
            ends = valid.sum(1).cumsum(0, dtype=torch.int32)
            where = Sequences.packed(torch.cat((ends.new_zeros(1), ends)), columns)
            hidden = decoder.hidden_states(tokens[valid], where, outputs)
        self._columns += columns

        def unpacked(x: Tensor) -> Tensor:
            if valid is None:
                return x.unflatten(0, (batch, columns))
            rows = x.new_zeros(batch, columns, x.shape[-1])
            rows[valid] = x
            return rows

        if outputs is not None:
            outputs[:] = [unpacked(x) for x in [*outputs, decoder.model.norm(hidden)]]
        return unpacked(hidden)

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
        fail("model", "be an NSAForCausalLM", "the layers of another model")

    def activate_past_recording(self) -> None:
        """Let :meth:`crop` remove as many tokens as the smallest window, if the cache is empty.

        Assisted generation calls this. The rings of the cache become longer.
        """
        cache = self.decoder.cache
        if all(layer.tensors is None for layer in cache.layers):
            window = min(layer.config.window_size for layer in cache.layers)
            cache.rollback = max(cache.rollback, window)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last columns.

        Args:
            tokens_to_remove: minus the number of columns to remove; a positive number is the number
                of columns to keep. At most 8 tokens of a row can be removed since its largest
                length, or ``window_size`` after :meth:`activate_past_recording`; a row can always
                be emptied.

        Raises:
            ValueError: more would be removed. The cache is unchanged.
        """
        cache, number = self.decoder.cache, int(tokens_to_remove)  # transformers gives a tensor
        removed = max(self._columns - number, 0) if number > 0 else min(-number, self._columns)
        if removed == 0:
            return
        lengths = [max(length - removed, 0) for length in cache.lengths]
        fits = all(n == 0 or n >= cache.least_length(b) for b, n in enumerate(lengths))
        rule = f"remove at most {cache.rollback} columns since the largest length"
        hint = "Before the first tokens, activate_past_recording() raises this to window_size."
        check(fits, "tokens_to_remove", rule, tokens_to_remove, hint)
        for row, length in enumerate(lengths):
            cache.truncate(row, length)
        self._columns -= removed
