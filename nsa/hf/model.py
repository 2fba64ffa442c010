"""Language models with the interface of transformers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, initialization
from transformers.generation import GenerationMode
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from nsa.errors import check, fail
from nsa.hf.cache import GenerationCache
from nsa.hf.config import CODE, CODE_FILE, NSALMConfig
from nsa.lm.llama import LAYER_NAMES
from nsa.lm.model import LanguageModel
from nsa.module import NativeSparseAttention
from nsa.ops._packed import integers
from nsa.ops._sequences import Sequences
from nsa.ops.index_loss import IndexLoss

# Names in folders of nsa convert, which are those of Llama, as patterns of transformers.
_FROM_LLAMA = {r"embed_tokens\.": r"embedding\.", r"^lm_head\.": r"^model\.head\."}
_FROM_LLAMA |= {rf"\.{theirs}\.": rf"\.{ours}\." for ours, theirs in LAYER_NAMES.items()}


def _documents(
    position_ids: Tensor, mask: Tensor | None, shape: tuple[int, int], cached: int
) -> dict[str, Any]:
    """Offsets of packed documents, if positions restart at 0.

    Args:
        position_ids: int64 ``[B or 1, T]``.
        mask: attention mask of all columns, or None.
        shape: B and T.
        cached: number of cached columns.

    Returns:
        ``cu_seq_lens_q`` and ``max_length_q`` of the flattened rows, or nothing if the positions
        are those that the model counts itself.

    Raises:
        ValueError: the positions are neither.
    """
    (batch, columns), device = shape, position_ids.device
    fits = position_ids.ndim == 2 and position_ids.shape[-1] == columns
    fits = fits and position_ids.shape[0] in (1, batch)
    rule = f"have shape [{batch}, {columns}]"
    check(fits, "position_ids", rule, tuple(position_ids.shape))
    column = torch.arange(cached, cached + columns, device=device)
    hint = "The model counts positions from the first token of a row."
    if cached or (mask is not None and not mask.all()):
        rank, valid = column, torch.ones(shape, dtype=torch.bool, device=device)
        if mask is not None:
            valid = mask[:, -columns:].to(device) != 0
            rank = (mask.to(device) != 0).cumsum(1)[:, -columns:] - 1
        is_usual = ((position_ids == rank) | ~valid).all()
        is_usual |= ((position_ids == column) | ~valid).all()
        rule = "be the columns of the tokens, or count the tokens of each row"
        check(bool(is_usual), "position_ids", rule, "others", hint)
        return {}
    starts = (position_ids == 0).expand(shape)
    since = torch.where(starts, column, 0).cummax(1).values
    is_packed = (position_ids == column - since).all()
    # one wait for the device
    fits, *begins = torch.cat((is_packed[None], starts.flatten())).tolist()
    rule = "count from 0, in each row or in each of its documents"
    check(fits, "position_ids", rule, "others", hint)
    offsets = [place for place, begin in enumerate(begins) if begin] + [batch * columns]
    if len(offsets) == batch + 1:
        return {}
    most = max(end - start for start, end in pairwise(offsets))
    return {"cu_seq_lens_q": integers(offsets, device, torch.int32), "max_length_q": most}


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


def _mean_of(losses: list[IndexLoss], device: torch.device) -> Tensor:
    """Mean of the layers' losses, nats."""
    means = [(total / number.clamp(min=1)).to(device) for total, number in losses]
    return torch.stack(means).mean()


class _Attached(torch.autograd.Function):
    """A tensor unchanged, whose backward pass also is that of a loss, whatever the caller's loss.

    As in the model code of DeepSeekMoE, arXiv:2401.06066.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.dloss = torch.ones_like(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor]:
        return dx, ctx.dloss


class NSAPreTrainedModel(PreTrainedModel):
    """Common parts of the models."""

    config_class = NSALMConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _input_embed_layer = "embedding"
    _no_split_modules = ["DecoderLayer"]  # noqa: RUF012 (transformers reads them from the class)
    # Heads that a model without them may find in a folder, and buffers of old Llamas.
    _keys_to_ignore_on_load_unexpected = [  # noqa: RUF012
        r"^(model\.)?head\.weight$",
        r"^score\.",
        r"rotary_emb\.inv_freq$",
    ]
    # The model's own attention does not use the attention functions and caches of transformers.
    _supports_attention_backend = False
    _can_compile_fullgraph = False

    def _init_weights(self, module: nn.Module) -> None:
        """Draw the weights of a new head; ``LanguageModel`` draws its own in its constructor."""
        if module is getattr(self, "score", None):
            initialization.normal_(module.weight, std=self.config.init_std)
            if module.bias is not None:
                initialization.zeros_(module.bias)

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Any = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        """Store only the input of each layer; the backward pass recomputes the rest."""
        function = getattr(gradient_checkpointing_func, "func", gradient_checkpointing_func)
        rule = "be left out: activations are computed again"
        check(function is checkpoint, "offload", rule, True)
        model = self.base_model
        model.gradient_checkpointing = enable
        for number, layer in enumerate(model.lm.decoder_layers()):
            is_kept = enable and number % every_n_layers == 0
            layer.keeps = "input" if is_kept else "everything"

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Raise an error: the tokenizer determines the vocabulary size."""
        rule = f"stay at the {self.config.vocab_size} tokens of the model"
        fail("the vocabulary", rule, "another size")

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load a model like transformers, but raise an error if weights do not match.

        The head of a classifier is drawn if the folder has none.

        Raises:
            ValueError: weights are missing or unexpected.
            RuntimeError: a weight has another shape.
        """
        kwargs = {"key_mapping": _FROM_LLAMA, **kwargs}
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        where = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        rules = {"missing": "hold {}", "unexpected": "hold no {}", "mismatched": "fit at {}"}
        for kind, rule in rules.items():
            names = sorted(map(str, info.get(f"{kind}_keys") or ()))
            if kind == "missing":
                names = [name for name in names if not name.startswith("score.")]
            found = f"{len(names)} such weights in {where}"
            if names:
                fail("the folder", rule.format(names[0]), found)
        devices = {parameter.device for parameter in cast(Self, model).parameters()}
        rule = "keep all weights in memory, without offloading"
        is_there = torch.device("meta") not in devices
        check(is_there, "device_map", rule, kwargs.get("device_map"))
        for layer in cast(Self, model).base_model.lm.decoder_layers():
            if isinstance(layer.attention, NativeSparseAttention):
                layer.attention.freeze_scoring()
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save a model like transformers, with a file that names the classes."""
        super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            (Path(save_directory) / CODE_FILE).write_text(CODE, encoding="utf-8")


class NSAModel(NSAPreTrainedModel):
    """:class:`nsa.lm.model.LanguageModel`, sparse or dense, without a head: ``AutoModel``.

    Args:
        config: the model.
        lm: language model whose modules become those of this model; None makes a new one.

    Attributes:
        lm: the language model, with the same modules as this model.
    """

    def __init__(self, config: NSALMConfig, lm: LanguageModel | None = None) -> None:
        super().__init__(config)
        if lm is None:
            lm = LanguageModel(config.lm)
            del lm.head
        # One dictionary of modules: a module that is replaced in one is replaced in both, and
        # weights have the names of the language model.
        self.__dict__.update(lm=lm, _modules=lm._modules)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: GenerationCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        index_losses: list[IndexLoss] | None = None,
        **others: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states of each token, the input of a head.

        Args:
            input_ids: int64 ``[B, T]``.
            attention_mask: ``[B, T]``, with a cache ``[B, all columns]``: 0 for padding, left or
                right of a row's tokens, with a cache only left.
            position_ids: int64 ``[B, T]``; the model counts positions itself, from the first token
                of each row. Positions that restart at 0 separate documents in rows without padding
                and cache, which waits once for the device. Not read with ``cu_seq_lens_q``.
            past_key_values: from :meth:`NSAForCausalLM.new_cache`; the tokens then follow the
                cached tokens.
            inputs_embeds: ``[B, T, width]``, in place of ``input_ids``.
            use_cache: true needs ``past_key_values``, since a cache has a fixed size.
            output_hidden_states: return also the embeddings and the output of each layer, the last
                one after the final norm.
            index_losses: list to which the losses of the layers' indices are appended in training
                mode, for the caller to add. For None, ``config.index_weight`` times the gradient of
                their mean joins the backward pass of the hidden states.
            others: ``cu_seq_lens_q`` and ``max_length_q`` of rows that are packed into one, as from
                ``DataCollatorWithFlattening``.

        Raises:
            ValueError: shapes do not match, an argument is not supported, or the cache is full.
        """
        given = (past_key_values, use_cache, output_hidden_states, attention_mask, position_ids)
        x, outputs = self.open_inputs(input_ids, inputs_embeds, *given, others)
        if past_key_values is not None:
            hidden = past_key_values.hidden_states(x, attention_mask, outputs)
        else:
            losses = [] if index_losses is None else index_losses
            hidden = self._hidden_states(x, attention_mask, outputs, losses, **others)
            if losses and index_losses is None:
                loss = self.config.index_weight * _mean_of(losses, hidden.device)
                hidden = _Attached.apply(hidden, loss)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=past_key_values,
            hidden_states=None if outputs is None else tuple(outputs),
        )

    def open_inputs(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        past_key_values: GenerationCache | None,
        use_cache: bool | None,
        output_hidden_states: bool | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        others: dict[str, Any],
    ) -> tuple[Tensor, list[Tensor] | None]:
        """Check arguments of a forward pass, and add offsets of packed documents to ``others``.

        Returns:
            The input, and a list for hidden states, or None if they are not requested.
        """
        is_given, hint = bool(others.get("output_attentions")), "nsa inspect shows selected blocks."
        check(not is_given, "output_attentions", "be left out", "it", hint)
        if (input_ids is None) == (inputs_embeds is None):
            fail("input_ids", "be given, or inputs_embeds, not both", input_ids)
        if input_ids is not None:
            shape = tuple(input_ids.shape)
            check(len(shape) == 2, "input_ids", "have shape [B, T]", shape)
        else:
            assert inputs_embeds is not None
            shape, width = tuple(inputs_embeds.shape), self.config.width
            fits = len(shape) == 3 and shape[-1] == width
            check(fits, "inputs_embeds", f"have shape [B, T, {width}]", shape)
        x = cast(Tensor, inputs_embeds if input_ids is None else input_ids)
        if past_key_values is None:
            hint = "Give past_key_values=model.new_cache(batch_size, max_tokens=...)."
            check(not use_cache, "use_cache", "come with past_key_values", use_cache, hint)
        else:
            is_ours, kind = isinstance(past_key_values, GenerationCache), type(past_key_values)
            check(is_ours, "past_key_values", "come from new_cache", kind.__name__)
        if position_ids is not None and others.get("cu_seq_lens_q") is None:
            cached = 0 if past_key_values is None else past_key_values.get_seq_length()
            others |= _documents(position_ids, attention_mask, (x.shape[0], x.shape[1]), cached)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        return x, [] if output_hidden_states else None

    def _hidden_states(
        self,
        x: Tensor,
        mask: Tensor | None,
        outputs: list[Tensor] | None,
        losses: list[IndexLoss],
        cu_seq_lens_q: Tensor | None = None,
        max_length_q: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Hidden states without a cache, ``[B, T, width]``."""
        rows: Tensor | None = None  # tokens, if padding is left out
        trains = self.training and torch.is_grad_enabled() and bool(self.config.index_weight)
        trains = trains and any(layer.has_index for layer in self.lm.decoder_layers())
        index: dict[str, Any] = {"ranked": "selected" if trains else None, "losses": losses}
        cu_seqlens, max_seqlen, shape = cu_seq_lens_q, max_length_q, x.shape[:2]
        if torch.compiler.is_compiling():  # contents are not known
            has_padding = mask is not None and cu_seqlens is None
        else:
            has_padding = mask is not None and not mask.all()
        rule = "be without padding with cu_seq_lens_q"
        check(cu_seqlens is None or not has_padding, "attention_mask", rule, "some")
        if cu_seqlens is None and mask is not None and has_padding:
            rule = f"have the shape of input_ids {tuple(shape)}"
            check(mask.shape == shape, "attention_mask", rule, tuple(mask.shape))
            padded = Sequences.padded(mask)
            cu_seqlens, max_seqlen = padded.cu_q, padded.len_q
            if trains:  # padding would count in the losses of the indices
                valid = (mask != 0).to(x.device)
                rows = valid.flatten().nonzero()[:, 0]
                cu_seqlens = nn.functional.pad(valid.sum(1).cumsum(0), (1, 0))
        if cu_seqlens is not None:
            x = x.flatten(0, 1) if rows is None else x.flatten(0, 1)[rows]
        if not x.is_floating_point():
            x = self.lm.embedding(x)
        if cu_seqlens is None:
            return self.lm.transform(x, outputs=outputs, **index)
        # accelerate may move arguments to another device of the model than the embedding's
        cu_seqlens = cu_seqlens.to(self.lm.embedding.weight.device, torch.int32)
        hidden = self.lm.transform(x, cu_seqlens, max_seqlen, outputs=outputs, **index)

        def restored(y: Tensor) -> Tensor:
            if rows is not None:
                y = y.new_zeros(shape.numel(), y.shape[-1]).index_copy(0, rows.to(y.device), y)
            return y.unflatten(0, shape)

        if outputs is not None:
            outputs[:] = map(restored, outputs)
        return restored(hidden)


class NSAForCausalLM(NSAPreTrainedModel, GenerationMixin):
    """:class:`nsa.lm.model.LanguageModel`, sparse or dense, with the interface of transformers.

    Weights have the same names as in checkpoints.

    Args:
        config: the model.
        model: model whose modules are used; None draws new weights.

    Attributes:
        model: the model without a head's output; the head is its module ``head``.
    """

    _tied_weights_keys = {"model.head.weight": "model.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: NSALMConfig, model: LanguageModel | None = None) -> None:
        super().__init__(config)
        self.model = NSAModel(config, LanguageModel(config.lm) if model is None else model)
        self.post_init()

    @property
    def lm(self) -> LanguageModel:
        """The language model, with the same weights."""
        return self.model.lm

    # --- the model --------------------------------------------------------------------------------
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: GenerationCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the token that follows each token, and the loss.

        Args:
            input_ids: see :meth:`NSAModel.forward`, as all arguments that are not listed.
            attention_mask: see there.
            position_ids: see there; with a cache on a GPU each call waits for the device.
            past_key_values: see there.
            inputs_embeds: see there.
            labels: int64 ``[B, T]``, like ``input_ids``; the token at t is predicted at t - 1. The
                loss ignores -100, padding, and the first token of a row or packed document, which
                no token predicts. In training mode ``config.index_weight`` times the mean of the
                layers' index losses over the selected blocks (see :func:`nsa.index_loss`) is added.
            use_cache: see there.
            logits_to_keep: last columns whose logits are computed, 0 for all, or their indices.
            output_hidden_states: see there.
            others: ``cu_seq_lens_q`` and ``max_length_q``, and arguments of the loss function:
                ``num_items_in_batch`` divides the sum over all labels.

        Raises:
            ValueError: shapes do not match, an argument is not supported, or the cache is full.
        """
        model, cache = self.model, past_key_values
        given = (cache, use_cache, output_hidden_states, attention_mask, position_ids)
        x, outputs = model.open_inputs(input_ids, inputs_embeds, *given, others)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        index_losses: list[IndexLoss] | None = None if labels is None else []
        if cache is not None:
            logits = cache.take(x, attention_mask, kept, outputs)
        else:
            found = model(
                input_ids,
                attention_mask,
                inputs_embeds=inputs_embeds,
                output_hidden_states=outputs is not None,
                return_dict=True,
                index_losses=index_losses,
                **others,
            )
            outputs, hidden = found.hidden_states, found.last_hidden_state
            logits = model.head(hidden[:, kept].to(model.head.weight.device))
        loss = None
        if labels is not None:
            targets = _targets(labels, attention_mask, **others)[:, kept].contiguous()
            others |= {"shift_labels": targets, "vocab_size": self.config.vocab_size}
            loss = self.loss_function(logits=logits, labels=labels, **others)
            if index_losses:
                mean = _mean_of(index_losses, loss.device)
                items = others.get("num_items_in_batch")
                share = 1.0 if items is None else (targets != -100).sum() / items
                loss = loss + self.config.index_weight * share * mean
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=past_key_values,
            hidden_states=None if outputs is None else tuple(outputs),
        )

    def new_cache(self, batch_size: int = 1, *, max_tokens: int) -> GenerationCache:
        """Make an empty cache for ``past_key_values`` of :meth:`forward` and ``generate``.

        Args:
            batch_size: number of rows, including beams.
            max_tokens: maximum number of columns, including padding.
        """
        return GenerationCache(self.lm, batch_size, max_tokens=max_tokens)

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
        check(kind in (None, "static"), "cache_implementation", rule, kind)
        if model_kwargs.get("past_key_values") is not None or not generation_config.use_cache:
            return
        rows = batch_size * max(generation_config.num_beams, generation_config.num_return_sequences)
        # Candidates may be longer than what is left to generate.
        max_cache_length += generation_config.prompt_lookup_num_tokens or 0
        is_assistant = generation_config.is_assistant
        if is_assistant:  # this call generates the first candidates of many
            max_cache_length += self.config.max_position_embeddings
        cache = self.new_cache(rows, max_tokens=max(max_cache_length, 1))
        if is_assistant or generation_mode == GenerationMode.ASSISTED_GENERATION:
            cache.activate_past_recording()
        mask = model_kwargs.get("attention_mask")
        # generate drops a mask without padding, and keeps its length.
        length = getattr(generation_config, "_mask_length", None)
        cache.prompt_columns = length if mask is None else mask.shape[-1]
        model_kwargs["past_key_values"] = cache

    def _prepare_position_ids_for_generation(self, *args: Any) -> None:
        """Return no positions: the cache counts them, and given ones would be checked each step."""

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        return self.model.head


class NSAForSequenceClassification(GenericForSequenceClassification, NSAPreTrainedModel):
    """The model with a head for each row's last token: reward models, classifiers."""


class NSAForTokenClassification(GenericForTokenClassification, NSAPreTrainedModel):
    """The model with a head for each token."""
