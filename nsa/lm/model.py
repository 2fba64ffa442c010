"""Decoder language model: embedding, layers of attention and MLP, output head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nsa import stages
from nsa.cache import LayerCache, NSACache
from nsa.lm.config import LMConfig
from nsa.lm.dense_attention import DenseAttention, dense_pattern
from nsa.lm.recomputation import Keeps, keep_attention
from nsa.module import NativeSparseAttention, RMSNorm
from nsa.ops._sequences import Sequences, open_layer_input
from nsa.ops.embedding import embed
from nsa.ops.index_loss import IndexLoss, Ranked


class MLP(nn.Module):
    """Position-wise network: ``down(silu(up(x)))``, or ``down(silu(gate(x)) * up(x))``.

    Args:
        config: the model; ``mlp`` chooses between the two.
    """

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.width, config.mlp_hidden_size, bias=False)
        self.gate_proj: nn.Linear | None = None
        if config.mlp == "swiglu":
            self.gate_proj = nn.Linear(config.width, config.mlp_hidden_size, bias=False)
        self.down_proj = nn.Linear(config.mlp_hidden_size, config.width, bias=False)

    @stages.in_stage(stages.MLP)
    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., width]`` to the same shape."""
        if self.gate_proj is None:
            return self.down_proj(nn.functional.silu(self.up_proj(x)))
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Attention and MLP, each after an RMSNorm and added to the residual stream.

    Args:
        config: the model.
        layer: index of the layer, from 0.

    Attributes:
        keeps: activations kept for the backward pass: ``everything``, the layer's input and the
            results of ``attention``, or only the ``input``. The rest is recomputed.
    """

    def __init__(self, config: LMConfig, layer: int) -> None:
        super().__init__()
        self.keeps: Keeps = "everything"
        one = config.layer(layer)
        self.has_index = one.attention == "nsa" and one.nsa.has_index
        attention = NativeSparseAttention if one.attention == "nsa" else DenseAttention
        self.attention_norm = RMSNorm(config.width, eps=config.norm_eps)
        self.attention = attention(config.width, one.nsa)
        self.mlp_norm = RMSNorm(config.width, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        sequences: Sequences,
        cache: LayerCache | None,
        ranked: Ranked | None = None,
    ) -> Any:
        """Map packed ``[T, width]`` or ``[B, T, width]`` to the same shape.

        With ``ranked``, a layer with an index also returns its loss over these blocks while
        gradients are recorded.
        """
        if self.keeps == "everything" or cache is not None or not torch.is_grad_enabled():
            return self._run(x, sequences, cache, ranked)
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if self.keeps == "attention":
            options["context_fn"] = keep_attention
        return checkpoint(self._run, x, sequences, None, ranked, **options)

    def _run(
        self, x: Tensor, sequences: Sequences, cache: LayerCache | None, ranked: Ranked | None
    ) -> Any:
        given: dict[str, Any] = {"sequences": sequences, "cache": cache}
        if ranked and self.has_index and cache is None and torch.is_grad_enabled():
            out, loss = self.attention(self.attention_norm(x), index_loss=ranked, **given)
            x = x + out
            return x + self.mlp(self.mlp_norm(x)), loss
        x = x + self.attention(self.attention_norm(x), **given)
        return x + self.mlp(self.mlp_norm(x))


class Embedding(nn.Embedding):
    """``torch.nn.Embedding`` with a deterministic gradient, also on a GPU."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeddings ``[*tokens.shape, width]``."""
        return embed(tokens, self.weight)


def count_parameters(module: nn.Module) -> dict[str, int]:
    """Parameters of a model or layer by part, and their ``total``."""
    count = dict.fromkeys(("embedding", "attention", "gate", "phi", "mlp", "norm", "head"), 0)
    for name, parameter in module.named_parameters():  # layers.0.attention.phi_k.w1
        words = ["phi" if word in ("phi_k", "phi_v") else word for word in name.split(".")]
        part = next((word for word in reversed(words) if word in count), "norm")
        count[part] += parameter.numel()
    return {**count, "total": sum(count.values())}


class LanguageModel(nn.Module):
    """A causal language model.

    Parameters are fp32 master weights; for bf16 compute, call it under ``torch.autocast``. The
    residual stream then stays fp32, matrix products and attention run in bf16, and normalisation
    and softmax statistics in fp32.

    Args:
        config: sizes, attention, MLP and head.
    """

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.width, eps=config.norm_eps)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self._initialise()
        if config.tie_head:
            self.head.weight = self.embedding.weight

    def _initialise(self) -> None:
        """Draw normal weights; gates and phi keep the initial values in semantics.md.

        Output projections have a smaller standard deviation, so that the residual stream does not
        grow with the number of layers (Radford et al., "Language Models are Unsupervised Multitask
        Learners", 2019). The head of a wide model, too: the standard deviation of the first logits
        is at most 0.5, which keeps the first loss near ln(vocab_size). It is smaller for a tied
        head: the final hidden state may be near the token's own embedding, whose logit is then at
        most 3.
        """
        std, width, is_tied = self.config.init_std, self.config.width, self.config.tie_head
        head_std = min(std, 3.0 / width if is_tied else 0.5 / math.sqrt(width))
        nn.init.normal_(self.embedding.weight, std=head_std if is_tied else std)
        nn.init.normal_(self.head.weight, std=head_std)
        for layer in self.decoder_layers():
            for part in (layer.attention, layer.mlp):
                for name, child in part.named_children():
                    if isinstance(child, nn.Linear):
                        is_output = name in ("o_proj", "down_proj")
                        scale = math.sqrt(2 * len(self.layers)) if is_output else 1.0
                        nn.init.normal_(child.weight, std=std / scale)
                        if child.bias is not None:
                            nn.init.zeros_(child.bias)

    def forward(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cache: NSACache | None = None,
    ) -> Tensor:
        """Logits of the next token at each position.

        Args:
            tokens: int64, packed ``[T]`` or a dense batch ``[B, T]``.
            cu_seqlens: int32 ``[B + 1]`` offsets of packed sequences, which do not see each other;
                None means one sequence.
            max_seqlen: at least the longest sequence, tokens.
            cache: from :meth:`new_cache`; ``tokens`` then follow the cached tokens and are
                appended to the cache.

        Returns:
            ``[T, vocab_size]`` or ``[B, T, vocab_size]``.
        """
        return self.head(self.hidden_states(tokens, cu_seqlens, max_seqlen, cache))

    def hidden_states(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cache: NSACache | None = None,
        ranked: Ranked | None = None,
        losses: list[IndexLoss] | None = None,
    ) -> Tensor:
        """Return the input of the head, ``[T, width]`` or ``[B, T, width]``.

        The arguments are those of :meth:`forward` and :meth:`transform`.
        """
        x = self.embedding(tokens)
        return self.transform(x, cu_seqlens, max_seqlen, cache, ranked=ranked, losses=losses)

    def transform(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cache: NSACache | None = None,
        outputs: list[Tensor] | None = None,
        ranked: Ranked | None = None,
        losses: list[IndexLoss] | None = None,
    ) -> Tensor:
        """:meth:`hidden_states` from embeddings ``[T, width]`` or ``[B, T, width]``.

        Args:
            x: embeddings.
            cu_seqlens: see :meth:`forward`.
            max_seqlen: see :meth:`forward`.
            cache: see :meth:`forward`.
            outputs: list to which the input of each layer and the result are appended.
            ranked: blocks over which the losses of the layers' indices are computed while
                gradients are recorded; None leaves these losses out.
            losses: list to which they are appended.
        """
        _, sequences = open_layer_input(x, self.config.width, cu_seqlens, max_seqlen)
        caches: Sequence[Any] = [None] * len(self.layers) if cache is None else cache.layers
        for layer, layer_cache in zip(self.decoder_layers(), caches, strict=True):
            if outputs is not None:
                outputs.append(x)
            if cache is None and isinstance(layer.attention, NativeSparseAttention):
                sequences = sequences.with_blocks(layer.attention.config)
            x = layer(x, sequences, layer_cache, ranked)
            if isinstance(x, tuple):
                x, loss = x
                if losses is not None:
                    losses.append(loss)
        x = self.norm(x)
        if outputs is not None:
            outputs.append(x)
        return x

    def decoder_layers(self) -> list[DecoderLayer]:
        """Decoder layers, first to last."""
        return cast(list[DecoderLayer], list(self.layers))

    def new_cache(
        self, batch_size: int = 1, *, max_tokens: int, num_pages: int | None = None
    ) -> NSACache:
        """Make an empty decode cache.

        Args:
            batch_size: sequences decoded together; their lengths may differ.
            max_tokens: longest sequence, tokens.
            num_pages: see :class:`nsa.NSACache`.
        """
        count = self.config.num_layers
        patterns = [
            one.nsa if one.attention == "nsa" else dense_pattern(one.nsa, max_tokens)
            for one in map(self.config.layer, range(count))
        ]
        return NSACache(patterns, count, batch_size, max_tokens=max_tokens, num_pages=num_pages)

    def num_parameters(self) -> dict[str, int]:
        """Parameters by part of the model, and their ``total``; a tied head counts as 0."""
        return count_parameters(self)

    def parameter_summary(self) -> str:
        """One line: the total and its parts, such as ``78.6M parameters: gate 332,208, ...``."""
        count = self.num_parameters()
        total = count.pop("total")
        parts = ", ".join(f"{name} {number:,}" for name, number in count.items() if number)
        return f"{total / 1e6:.1f}M parameters: {parts}"
