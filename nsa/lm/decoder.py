"""A language model made ready to generate: weights, cache, and a step that launches little."""

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
    """Generates with a language model: a prompt first, then steps of 1 to 8 tokens a sequence.

    A step is one pass over the weights: nine launches a layer on a GPU, the residual stream in the
    dtype of the model's parameters, everything else in the compute dtype. The second step of a
    size is captured as a CUDA graph, which the later ones replay, unless blocks are scored
    approximately. The weights behind a norm are copied, with the norm's weight in them, and the
    others where the compute dtype is another: after a change of weights call :meth:`reset`.

    Args:
        model: the language model, with sparse or dense attention.
        batch_size: sequences that are generated together; their lengths may differ.
        max_tokens: tokens that a sequence may come to have.
        compute_dtype: of matrix products and attention; None: that of the parameters.
        num_pages: see :class:`nsa.NSACache`.

    Raises:
        ValueError: a module of the model computes something else than its weights say, as with
            LoRA, quantization or hooks.

    Attributes:
        cache: the cache, for its lengths, forks and the like.
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
        # The project's own models have none, but a head may be exchanged.
        self._bias: Tensor | None = model.head.bias
        self._graphs: dict[int, StepGraph | None] = {}

    def _versions_now(self) -> list[tuple[int, int]]:
        """Of each weight: where it is, and how often it was written to."""
        weights = self.model.parameters()
        return [(w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights]

    def reset(self) -> None:
        """Forget all sequences, and read the model's weights anew if they have changed.

        Writes through ``.data`` are not noticed.
        """
        for row in range(self.batch_size):
            self.cache.free(row)
        if self._versions != self._versions_now():
            self._read_weights()

    @torch.no_grad()
    def prefill(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Take in more of each sequence, such as its prompt, in one pass.

        Args:
            tokens: of each sequence; none for one that does not go on.

        Returns:
            Logits ``[B, vocab_size]`` of the token that follows; meaningless for a sequence without
            new tokens.

        Raises:
            ValueError: no sequence has new tokens, or the cache is full; nothing has changed then.
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
        """Take in the next tokens of every sequence.

        Args:
            tokens: int64 ``[B, T]``, T from 1 to 8.

        Returns:
            Logits ``[B, T, vocab_size]``, of which the next step of this size may use the memory.

        Raises:
            ValueError: the shape does not fit, or the cache is full; nothing has changed then.
        """
        rule = f"have shape [{self.batch_size}, 1 to {MOST_QUERIES}]"
        fits = tokens.ndim == 2 and tokens.shape[0] == self.batch_size
        fits = fits and 1 <= tokens.shape[1] <= MOST_QUERIES
        check(fits, "Decoder", "tokens", rule, tuple(tokens.shape))
        queries = tokens.shape[1]
        if not (tokens.is_cuda and self._is_captured and queries in self._graphs):
            # The first step of a size compiles kernels and reserves memory, which no capture can.
            self._graphs[queries] = None
            return self.take(tokens)
        self.cache.reserve([queries] * self.batch_size)
        graph = self._graphs[queries]
        if graph is None:
            graph = self._graphs[queries] = StepGraph(self, tokens)
        return graph.replay(tokens)

    @torch.no_grad()
    def take(self, tokens: Tensor) -> Tensor:
        """:meth:`step` of any number of tokens, launched one kernel after the other."""
        batch, queries = tokens.shape
        sequences = Sequences(None, batch, queries, queries, tokens.device)
        hidden = self.hidden_states(tokens.flatten(), sequences)
        return self.logits(hidden).view(batch, queries, -1)

    @torch.no_grad()
    def hidden_states(self, tokens: Tensor, sequences: Sequences) -> Tensor:
        """Take in tokens.

        Args:
            tokens: int64 ``[N]``.
            sequences: where those of each sequence lie.

        Returns:
            What :meth:`logits` takes, ``[N, width]``.

        Raises:
            ValueError: the cache is full; nothing has changed then.
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
        """Logits ``[N, vocab_size]`` of the tokens that follow those of ``[N, width]``."""
        logits = self._head(hidden.to(self.model.head.weight.device))
        return (logits if self._bias is None else logits + self._bias).to(hidden.device)


class StepLayer:
    """The weights of a decoder layer as a step multiplies by them.

    Args:
        layer: the layer.
        dtype: of the products.
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
        """Attention ``[T, Hq, Dv]`` of the residual stream ``[T, width]``, which is cached."""
        attention, rope = self.attention, self.attention.rope
        bias, columns = attention.projection_bias, attention.columns
        before = cache.lengths(sequences, x.shape[0])
        found = split(self.project(x), bias, columns, sequences, rope, before=before)
        if isinstance(attention, NativeSparseAttention) and not attention.gate.is_linear:
            x = self.norm(x)  # the gates read the layer's input
        return attention.attend_cached(found, x, sequences, cache)


class StepGraph:
    """A step of a decoder as a CUDA graph.

    Args:
        decoder: it has run a step of this size, and has room for another.
        tokens: int64 ``[B, T]``, for their shape.
    """

    def __init__(self, decoder: Decoder, tokens: Tensor) -> None:
        self.cache, self.graph, device = decoder.cache, torch.cuda.CUDAGraph(), tokens.device
        # PyTorch's own stream for captures lies on the device that was current for the first one.
        # Tensors made in inference mode could not be written to outside of it.
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
