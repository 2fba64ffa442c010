"""Decoder for generation: prepared weights, cache, and steps as CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor, nn

from nsa.cache import LayerCache
from nsa.errors import check
from nsa.lm.dense_attention import DenseAttention
from nsa.lm.model import DecoderLayer, Embedding, LanguageModel
from nsa.module import NativeSparseAttention
from nsa.ops._packed import integers
from nsa.ops._sequences import Sequences
from nsa.ops.decode import MOST_QUERIES
from nsa.ops.linear import Linear
from nsa.ops.projection import split, stacked
from nsa.ops.projection.layout import plain_weight


class Decoder:
    """Generates with a language model: first a prompt, then steps of 1 to 8 tokens per sequence.

    A step is one pass over the weights: nine launches per layer on a GPU, the residual stream in
    the dtype of the parameters, everything else in the compute dtype. The second step of a size is
    captured as a CUDA graph, which later steps replay, unless blocks are scored approximately.
    Weights after a norm are copied, with the norm's weight folded in, and other weights if the
    compute dtype differs: call :meth:`reset` after changing weights.

    Args:
        model: the language model, with sparse or dense attention.
        batch_size: sequences generated together; their lengths may differ.
        max_tokens: maximum length of a sequence, tokens.
        compute_dtype: dtype of matrix products and attention; None means that of the parameters.
        num_pages: see :class:`nsa.NSACache`.

    Raises:
        ValueError: a module does not just apply its weights, for example with LoRA, quantization
            or hooks.

    Attributes:
        cache: the decode cache, for example for lengths and forks.
    """

    def __init__(
        self,
        model: LanguageModel,
        batch_size: int = 1,
        *,
        max_tokens: int,
        compute_dtype: torch.dtype | None = None,
        num_pages: int | None = None,
    ) -> None:
        self.model, self.batch_size = model, batch_size
        self.dtype = model.head.weight.dtype if compute_dtype is None else compute_dtype
        self.cache = model.new_cache(batch_size, max_tokens=max_tokens, num_pages=num_pages)
        is_exact = all(layer.is_exact for layer in self.cache.layers)
        devices = {weight.device for weight in model.parameters()}
        self._is_captured = is_exact and len(devices) == 1
        self._read_weights()

    def _read_weights(self) -> None:
        model = self.model
        rule, found = "look its rows up as nn.Embedding does", type(model.embedding)
        is_plain = found in (Embedding, nn.Embedding) and model.embedding.max_norm is None
        check(is_plain, "Decoder", "embedding", rule, found.__name__)
        head = plain_weight("Decoder", "head", model.head, has_bias=None)
        self._versions = self._versions_now()
        self._layers = [StepLayer(layer, self.dtype) for layer in model.decoder_layers()]
        self._head = Linear.behind(model.norm, head, dtype=self.dtype)
        # `LanguageModel` has none, but users may replace the head.
        self._bias: Tensor | None = model.head.bias
        self._graphs: dict[int, StepGraph | None] = {}

    def _versions_now(self) -> list[tuple[int, int]]:
        """Address and version counter of each weight."""
        weights = self.model.parameters()
        return [(w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights]

    def reset(self) -> None:
        """Remove all sequences, and read the model's weights again if they have changed.

        Writes through ``.data`` are not detected.
        """
        for row in range(self.batch_size):
            self.cache.free(row)
        if self._versions != self._versions_now():
            self._read_weights()

    @torch.no_grad()
    def prefill(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Append tokens to each sequence, such as its prompt, in one pass.

        Args:
            tokens: new tokens of each sequence; may be empty for some.

        Returns:
            Logits ``[B, vocab_size]`` of the next token; meaningless for a sequence without new
            tokens.

        Raises:
            ValueError: no sequence has new tokens, or the cache is full. The cache is unchanged.
        """
        count = len(tokens)
        check(count == self.batch_size, "Decoder", "tokens", f"be {self.batch_size} lists", count)
        check(any(map(len, tokens)), "Decoder", "tokens", "have a token in some list", "none")
        device, lengths = self.model.embedding.weight.device, [len(x) for x in tokens]
        packed = integers(chain.from_iterable(tokens), device)
        cu_seqlens = integers(accumulate(lengths, initial=0), device, torch.int32)
        if count == 1:  # needs no offsets
            where = Sequences(None, 1, lengths[0], lengths[0], device)
        else:
            where = Sequences.packed(cu_seqlens, max(lengths), num_tokens=packed.shape[0])
        hidden = self.hidden_states(packed, where)
        return self.logits(hidden[(cu_seqlens[1:].long() - 1).clamp(min=0)])

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Append the next tokens of every sequence.

        Args:
            tokens: int64 ``[B, T]``, T from 1 to 8.

        Returns:
            Logits ``[B, T, vocab_size]``, which the next step of this size may overwrite.

        Raises:
            ValueError: the shape is not valid, or the cache is full. The cache is unchanged.
        """
        rule = f"have shape [{self.batch_size}, 1 to {MOST_QUERIES}]"
        fits = tokens.ndim == 2 and tokens.shape[0] == self.batch_size
        fits = fits and 1 <= tokens.shape[1] <= MOST_QUERIES
        check(fits, "Decoder", "tokens", rule, tuple(tokens.shape))
        queries = tokens.shape[1]
        if not (tokens.is_cuda and self._is_captured and queries in self._graphs):
            # The first step of a size compiles kernels and reserves memory: it is not captured.
            self._graphs[queries] = None
            return self.take(tokens)
        self.cache.reserve([queries] * self.batch_size)
        graph = self._graphs[queries]
        if graph is None:
            graph = self._graphs[queries] = StepGraph(self, tokens)
        return graph.replay(tokens)

    @torch.no_grad()
    def take(self, tokens: Tensor) -> Tensor:
        """:meth:`step` without a CUDA graph, for any number of tokens."""
        batch, queries = tokens.shape
        sequences = Sequences(None, batch, queries, queries, tokens.device)
        hidden = self.hidden_states(tokens.flatten(), sequences)
        return self.logits(hidden).view(batch, queries, -1)

    @torch.no_grad()
    def hidden_states(self, tokens: Tensor, sequences: Sequences) -> Tensor:
        """Append tokens to the cache.

        Args:
            tokens: int64 ``[N]``.
            sequences: the sequences of the tokens.

        Returns:
            Input of :meth:`logits`, ``[N, width]``.

        Raises:
            ValueError: the cache is full. It is unchanged.
        """
        x = self.model.embedding.weight[tokens]
        for layer, cache in zip(self._layers, self.cache.layers, strict=True):
            if layer.device != x.device:
                x, sequences = x.to(layer.device), sequences.to(layer.device)
            x = layer.output(layer.attend(x, sequences, cache).flatten(1), x)
            x = layer.down(layer.up(x), x)
        return x.to(tokens.device)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[N, vocab_size]`` of the next tokens, from hidden states ``[N, width]``."""
        logits = self._head(hidden.to(self.model.head.weight.device))
        return (logits if self._bias is None else logits + self._bias).to(hidden.device)


class StepLayer:
    """Weights of a decoder layer, prepared for decode steps.

    Args:
        layer: the layer.
        dtype: dtype of the products.
    """

    def __init__(self, layer: DecoderLayer, dtype: torch.dtype) -> None:
        self.norm, attention, mlp = layer.attention_norm, layer.attention, layer.mlp
        self.device = self.norm.weight.device
        assert isinstance(attention, NativeSparseAttention | DenseAttention)
        self.attention = attention

        weights = [x.detach() for x in attention.projection_weights()]
        together = stacked(weights, weights[0].dtype)
        self.project = Linear.behind(self.norm, together, dtype=dtype)
        others = {"o_proj": attention.o_proj, "up_proj": mlp.up_proj, "down_proj": mlp.down_proj}
        output, up, down = (plain_weight("Decoder", *named) for named in others.items())
        self.output = Linear(output.detach().to(dtype))
        gated = mlp.gate_proj
        gate = None if gated is None else plain_weight("Decoder", "gate_proj", gated)
        self.up = Linear.behind(layer.mlp_norm, up, gate, dtype=dtype, silu=gate is None)
        self.down = Linear(down.detach().to(dtype))

    def attend(self, x: Tensor, sequences: Sequences, cache: LayerCache) -> Tensor:
        """Attention ``[T, Hq, Dv]`` of new tokens ``[T, width]``, which are cached."""
        attention, rope = self.attention, self.attention.rope
        bias, columns = attention.projection_bias, attention.columns
        before = cache.lengths(sequences, x.shape[0])
        found = split(self.project(x), bias, columns, sequences, rope, before=before)
        if isinstance(attention, NativeSparseAttention) and not attention.gate.is_linear:
            x = self.norm(x)  # the gates read the layer's input
        return attention.attend_cached(found, x, sequences, cache)


class StepGraph:
    """Decode step as a CUDA graph.

    Args:
        decoder: decoder that has run a step of this size and has space for another.
        tokens: int64 ``[B, T]``; only the shape is used.
    """

    def __init__(self, decoder: Decoder, tokens: Tensor) -> None:
        self.cache, self.graph, device = decoder.cache, torch.cuda.CUDAGraph(), tokens.device
        # PyTorch's default capture stream is on the device of the process's first capture.
        # Tensors made in inference mode cannot be written outside of it.
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.cuda.device(device),
            self.cache.recording(),
        ):
            self.tokens = tokens.clone()
            with torch.cuda.graph(self.graph, stream=torch.cuda.Stream(device)):
                self.logits = decoder.take(self.tokens)

    def replay(self, tokens: Tensor) -> Tensor:
        """Logits of the next tokens."""
        self.tokens.copy_(tokens)
        self.graph.replay()
        self.cache.advance([tokens.shape[1]] * tokens.shape[0])
        return self.logits
