"""Language model with the interface of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from nsa.errors import check, fail
from nsa.hf.cache import GenerationCache
from nsa.hf.config import CODE, CODE_FILE, NSALMConfig
from nsa.lm.model import LanguageModel
from nsa.module import NativeSparseAttention
from nsa.ops._sequences import Sequences

_NAME = "NSAForCausalLM"
# Unsupported arguments of transformers' models, and the alternative of each.
_REFUSED = {
    "position_ids": "They follow from attention_mask, or from cu_seq_lens_q for packed rows.",
    "inputs_embeds": "Give input_ids.",
    "output_attentions": "nsa inspect shows where a layer looks.",
    "output_hidden_states": "model.model.hidden_states gives the last ones.",
}


def _targets(
    labels: Tensor,
    mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Shift labels to the column that predicts them; -100 if none in the document does."""
    moved = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    targets = moved if shift_labels is None else shift_labels.contiguous().clone()
    if mask is not None:
        valid = mask[:, -labels.shape[1] :].to(targets.device) != 0
        follows = nn.functional.pad(valid[:, 1:], (0, 1))
        targets = targets.masked_fill(~(valid & follows), -100)
    if cu_seq_lens_q is not None:  # the last column predicts nothing
        targets.view(-1)[cu_seq_lens_q.to(targets.device).long() - 1] = -100
    return targets


class NSAForCausalLM(PreTrainedModel, GenerationMixin):
    """:class:`nsa.lm.model.LanguageModel`, sparse or dense, with the interface of transformers.

    Weights have the same names as in checkpoints.

    Args:
        config: the model.
        model: model whose weights are shared; None draws new weights.

    Attributes:
        model: the language model.
    """

    config_class = NSALMConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderLayer"]  # noqa: RUF012 (transformers reads them from the class)
    _tied_weights_keys = {"model.head.weight": "model.embedding.weight"}  # noqa: RUF012
    # The model's own attention does not use the attention functions and caches of transformers.
    _supports_attention_backend = False
    _can_compile_fullgraph = False

    def __init__(self, config: NSALMConfig, model: LanguageModel | None = None) -> None:
        super().__init__(config)
        self.model = LanguageModel(config.lm) if model is None else model
        self.gradient_checkpointing = False
        self.post_init()

    # --- the model --------------------------------------------------------------------------------
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: GenerationCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the token that follows each token, and the loss.

        Positions are counted from the first token of each row.

        Args:
            input_ids: int64 ``[B, T]``.
            attention_mask: ``[B, T]``, with a cache ``[B, all columns]``: 0 for padding, left or
                right of a row's tokens, with a cache only left.
            past_key_values: from :meth:`new_cache`; ``input_ids`` then follow the cached tokens.
            labels: int64 ``[B, T]``, like ``input_ids``; the token at t is predicted at t - 1. The
                loss ignores -100, padding, and the first token of a row or packed document, which
                no token predicts.
            use_cache: true needs ``past_key_values``, since a cache has a fixed size.
            logits_to_keep: last columns whose logits are computed, 0 for all, or their indices.
            others: ``cu_seq_lens_q`` and ``max_length_q`` of rows that are packed into one, as from
                ``DataCollatorWithFlattening``, and arguments of the loss function:
                ``num_items_in_batch`` divides the sum over all labels.

        Raises:
            ValueError: shapes do not match, an argument is not supported, or the cache is full.
        """
        for name, hint in _REFUSED.items():
            is_given = others.get(name) is not None and others.get(name) is not False
            is_packed = name == "position_ids" and others.get("cu_seq_lens_q") is not None
            check(not is_given or is_packed, _NAME, name, "be left out", "it", hint)
        shape = tuple(input_ids.shape)
        check(input_ids.ndim == 2, _NAME, "input_ids", "have shape [B, T]", shape)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        if past_key_values is None:
            hint = "Give past_key_values=model.new_cache(batch_size, max_tokens=...)."
            check(not use_cache, _NAME, "use_cache", "come with past_key_values", use_cache, hint)
            hidden = self._hidden_states(input_ids, attention_mask, **others)
            logits = self.model.head(hidden[:, kept].to(self.model.head.weight.device))
        else:
            is_ours, kind = isinstance(past_key_values, GenerationCache), type(past_key_values)
            check(is_ours, _NAME, "past_key_values", "come from new_cache", kind.__name__)
            logits = past_key_values.take(input_ids, attention_mask, kept)
        loss = None
        if labels is not None:
            others["shift_labels"] = _targets(labels, attention_mask, **others)[
                :, kept
            ].contiguous()
            sizes = {"vocab_size": self.config.vocab_size}
            loss = self.loss_function(logits=logits, labels=labels, **sizes, **others)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)

    def _hidden_states(
        self,
        input_ids: Tensor,
        mask: Tensor | None,
        cu_seq_lens_q: Tensor | None = None,
        max_length_q: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Input of the head, ``[B, T, width]``."""
        cu_seqlens, max_seqlen = cu_seq_lens_q, max_length_q
        has_padding = mask is not None and not mask.all()
        rule = "be without padding with cu_seq_lens_q"
        check(cu_seqlens is None or not has_padding, _NAME, "attention_mask", rule, "some")
        if cu_seqlens is None:
            if mask is None or not has_padding:
                return self.model.hidden_states(input_ids)
            rule = f"have the shape of input_ids {tuple(input_ids.shape)}"
            fits = mask.shape == input_ids.shape
            check(fits, _NAME, "attention_mask", rule, tuple(mask.shape))
            padded = Sequences.padded(mask, function=_NAME)
            cu_seqlens, max_seqlen = padded.cu_q, padded.len_q
        # accelerate may move arguments to another device of the model than the embedding's
        cu_seqlens = cu_seqlens.to(self.model.embedding.weight.device, torch.int32)
        hidden = self.model.hidden_states(input_ids.flatten(), cu_seqlens, max_seqlen)
        return hidden.unflatten(0, input_ids.shape)

    def new_cache(self, batch_size: int = 1, *, max_tokens: int) -> GenerationCache:
        """Make an empty cache for ``past_key_values`` of :meth:`forward` and ``generate``.

        Args:
            batch_size: number of rows, including beams.
            max_tokens: maximum number of columns, including padding.
        """
        return GenerationCache(self.model, batch_size, max_tokens=max_tokens)

    # --- what transformers calls ------------------------------------------------------------------
    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        kind = generation_config.cache_implementation
        rule = "be left out: the model has its own, which is static"
        check(kind in (None, "static"), _NAME, "cache_implementation", rule, kind)
        if model_kwargs.get("past_key_values") is not None or not generation_config.use_cache:
            return
        rows = batch_size * max(generation_config.num_beams, generation_config.num_return_sequences)
        cache = self.new_cache(rows, max_tokens=max(max_cache_length, 1))
        model_kwargs["past_key_values"] = cache

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: ``LanguageModel`` initialises its weights in its constructor."""

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Any = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        """Store only the input of each layer; the backward pass recomputes the rest."""
        function = getattr(gradient_checkpointing_func, "func", gradient_checkpointing_func)
        rule = "be left out: activations are computed again"
        check(function is checkpoint, "activation_checkpointing_enable", "offload", rule, True)
        self.gradient_checkpointing = enable
        for number, layer in enumerate(self.model.decoder_layers()):
            is_kept = enable and number % every_n_layers == 0
            layer.keeps = "input" if is_kept else "everything"

    def get_input_embeddings(self) -> nn.Module:
        """The embedding."""
        return self.model.embedding

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        return self.model.head

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Raise an error: the tokenizer determines the vocabulary size."""
        rule = f"stay at the {self.config.vocab_size} tokens of the model"
        fail(_NAME, "the vocabulary", rule, "another size")

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load a model like transformers, but raise an error if weights do not match.

        Raises:
            ValueError: weights are missing or unexpected.
            RuntimeError: a weight has another shape.
        """
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        where = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        rules = {"missing": "hold {}", "unexpected": "hold no {}", "mismatched": "fit at {}"}
        for kind, rule in rules.items():
            names = sorted(map(str, info.get(f"{kind}_keys") or ()))
            found = f"{len(names)} such weights in {where}"
            if names:
                fail("from_pretrained", "the folder", rule.format(names[0]), found)
        devices = {parameter.device for parameter in cast(Self, model).parameters()}
        rule = "keep all weights in memory, without offloading"
        is_there = torch.device("meta") not in devices
        check(is_there, "from_pretrained", "device_map", rule, kwargs.get("device_map"))
        for layer in cast(Self, model).model.decoder_layers():
            if isinstance(layer.attention, NativeSparseAttention):
                layer.attention.freeze_scoring()
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save a model like transformers, with a file that names the classes."""
        super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            (Path(save_directory) / CODE_FILE).write_text(CODE, encoding="utf-8")
