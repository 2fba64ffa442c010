"""Decoder for generation: prepared weights, cache, and steps as CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, chain

import torch
from torch import Tensor, nn

from nsa.attached import have_hooks, is_plain
from nsa.cache import LayerCache
from nsa.errors import check
from nsa.lm.dense_attention import DenseAttention
from nsa.lm.model import MLP, DecoderLayer, LanguageModel
from nsa.module import Compression, Gate, GateLinear, NativeSparseAttention, RMSNorm
from nsa.ops._layout import packed as packed_weights
from nsa.ops._packed import integers
from nsa.ops._sequences import Sequences
from nsa.ops.decode import MOST_QUERIES
from nsa.ops.linear import Linear

# A prompt with as many tokens before those of which all layers are needed is read in two passes.
LONG_PROMPT = 4096

# Modules of a decoder layer whose steps run as fused kernels.
PLAIN_KINDS = (
    DecoderLayer,
    NativeSparseAttention,
    DenseAttention,
    Compression,
    Gate,
    GateLinear,
    RMSNorm,
    MLP,
    nn.Linear,
    nn.Sequential,
    nn.SiLU,
)


class Decoder:
    """Generates with a language model: first a prompt, then steps of 1 to 8 tokens per sequence.

    A step is one pass over the weights: nine launches per layer on a GPU, the residual stream in
    the dtype of the parameters, everything else in the compute dtype. The second step of a size is
    captured as a CUDA graph, which later steps replay, unless blocks are scored in two stages.
    Weights after a norm are copied, with the norm's weight folded in, and other weights if the
    compute dtype differs: call :meth:`reset` after changing weights. Layers, embedding or head with
    anything attached (LoRA, hooks, quantization) are called as modules instead; with hooks, steps
    are not captured.

    Args:
        model: the language model, with sparse or dense attention.
        batch_size: sequences generated together; their lengths may differ.
        max_tokens: maximum length of a sequence, tokens.
        compute_dtype: dtype of matrix products and attention; None means that of the parameters.
        num_pages: see :class:`nsa.NSACache`.

    Attributes:
        cache: the decode cache, for example for lengths, forks and truncation.
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
        self.dtype = model.norm.weight.dtype if compute_dtype is None else compute_dtype
        self.cache = model.new_cache(batch_size, max_tokens=max_tokens, num_pages=num_pages)
        self._read_weights()

    def _read_weights(self) -> None:
        model, dtype = self.model, self.dtype
        has_kernels = all(layer.has_kernels for layer in self.cache.layers)
        devices = {weight.device for weight in model.parameters()}
        is_hooked = have_hooks(model.modules())
        self._is_captured = has_kernels and len(devices) == 1 and not is_hooked
        self._layers: list[StepLayer | DecoderLayer] = [
            StepLayer(layer, dtype) if is_plain_layer(layer) else layer
            for layer in model.decoder_layers()
        ]
        self._devices = [next(layer.parameters()).device for layer in model.decoder_layers()]
        self._head: Linear | None = None
        is_plain_head = is_plain(model.head, nn.Linear) and is_plain(model.norm, RMSNorm)
        if is_plain_head and model.head.bias is None:
            self._head = Linear.behind(model.norm, model.head.weight, dtype=dtype)
        self._graphs: dict[int, StepGraph | None] = {}

    def reset(self) -> None:
        """Remove all sequences and read the model's weights again."""
        for row in range(self.batch_size):
            self.cache.free(row)
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
        check(count == self.batch_size, "tokens", f"be {self.batch_size} lists", count)
        check(any(map(len, tokens)), "tokens", "have a token in some list", "none")
        num_layers, last = self._needed()
        if num_layers < len(self._layers):
            ends = [max(len(x) - last, 0) for x in tokens]
            if sum(ends) >= LONG_PROMPT:
                self.cache.reserve([*map(len, tokens)])
                first = [x[:end] for x, end in zip(tokens, ends, strict=True)]
                self._append(first, num_layers)
                tokens = [x[end:] for x, end in zip(tokens, ends, strict=True)]
        hidden, cu_seqlens = self._append(tokens)
        return self.logits(hidden[(cu_seqlens[1:].long() - 1).clamp(min=0)])

    def _append(
        self, tokens: Sequence[Sequence[int]], num_layers: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Hidden states of new tokens of each sequence, and offsets; see :meth:`hidden_states`."""
        device, lengths = next(self.model.parameters()).device, [len(x) for x in tokens]
        packed = integers(chain.from_iterable(tokens), device)
        cu_seqlens = integers(accumulate(lengths, initial=0), device, torch.int32)
        if len(tokens) == 1:  # needs no offsets
            where = Sequences(None, 1, lengths[0], lengths[0], device)
        else:
            where = Sequences.packed(cu_seqlens, max(lengths), num_tokens=packed.shape[0])
        return self.hidden_states(packed, where, num_layers=num_layers), cu_seqlens

    def _needed(self) -> tuple[int, int]:
        """Number of layers up to the last one that reads all tokens, and tokens that others need.

        The layers after it have windows alone: the next token and the rings depend on as many last
        tokens of its output. With anything attached, all layers count.
        """
        last = 1
        for number in range(len(self._layers), 0, -1):
            pattern = self.cache.layers[number - 1].config
            read = max(last + pattern.window_size - 1, self.cache.ring_rows(pattern.window_size))
            if not isinstance(self._layers[number - 1], StepLayer):
                break
            if pattern.branches != ("win",) or read >= self.cache.max_tokens:
                return number, last
            last = read
        else:
            return 0, last
        return len(self._layers), last

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
        check(fits, "tokens", rule, tuple(tokens.shape))
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
    def hidden_states(
        self,
        tokens: Tensor,
        sequences: Sequences,
        outputs: list[Tensor] | None = None,
        num_layers: int | None = None,
    ) -> Tensor:
        """Append tokens to the cache.

        Args:
            tokens: int64 ``[N]``, or their embeddings ``[N, width]``.
            sequences: the sequences of the tokens.
            outputs: list to which the input of each layer is appended.
            num_layers: layers of which the last one only stores keys and values, and after which
                nothing is computed or stored, see :meth:`nsa.LayerCache.append`; None means all,
                with their outputs.

        Returns:
            Input of :meth:`logits`, ``[N, width]``; with ``num_layers``, of the last of them.

        Raises:
            ValueError: the cache is full. It is unchanged.
        """
        x = tokens
        if not x.is_floating_point():
            with self._autocast(x.device):
                x = self.model.embedding(x)
        for number, (layer, device, cache) in enumerate(
            zip(self._layers, self._devices, self.cache.layers, strict=True), start=1
        ):
            if outputs is not None:
                outputs.append(x.to(tokens.device, copy=True))  # steps overwrite x
            if device != x.device:
                x, sequences = x.to(device), sequences.to(device)
            if num_layers is not None and number >= num_layers:
                assert isinstance(layer, StepLayer)
                layer.append(x, sequences, cache, stores=number == num_layers)
                continue
            with nullcontext() if isinstance(layer, StepLayer) else self._autocast(device):
                x = layer(x, sequences, cache)
        return x.to(tokens.device)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[N, vocab_size]`` of the next tokens, from hidden states ``[N, width]``."""
        x = hidden.to(next(self.model.head.parameters()).device)
        if self._head is not None:
            return self._head(x).to(hidden.device)
        with self._autocast(x.device):
            logits: Tensor = self.model.head(self.model.norm(x))
        return logits.to(hidden.device)

    def _autocast(self, device: torch.device) -> AbstractContextManager[None]:
        """Context for modules that are called: products in the compute dtype."""
        if self.dtype == self.model.norm.weight.dtype:
            return nullcontext()
        # A captured step must not store a cast weight for later calls.
        return torch.autocast(device.type, self.dtype, cache_enabled=False)


def is_plain_layer(layer: DecoderLayer) -> bool:
    """Whether nothing is attached to the layer or its parts."""
    for name, module in layer.named_modules():
        has_bias = type(module) is nn.Linear and module.bias is not None
        if type(module) not in PLAIN_KINDS or not is_plain(module, type(module)):
            return False
        if has_bias and not name.startswith("attention.gate."):
            return False
    return True


class StepLayer:
    """Weights of a decoder layer, prepared for decode steps.

    Args:
        layer: the layer.
        dtype: dtype of the products.
    """

    def __init__(self, layer: DecoderLayer, dtype: torch.dtype) -> None:
        self.norm, attention, mlp = layer.attention_norm, layer.attention, layer.mlp
        assert isinstance(attention, NativeSparseAttention | DenseAttention)
        self.attention = attention
        plain = attention.plain_weights()
        assert plain is not None
        weights, self.bias = plain
        together = packed_weights(weights, weights[0].dtype)
        self.project = Linear.behind(self.norm, together, dtype=dtype)
        self.output = Linear(attention.o_proj.weight.detach().to(dtype))
        gate = None if mlp.gate_proj is None else mlp.gate_proj.weight
        up = mlp.up_proj.weight
        self.up = Linear.behind(layer.mlp_norm, up, gate, dtype=dtype, silu=gate is None)
        self.down = Linear(mlp.down_proj.weight.detach().to(dtype))

    def __call__(self, x: Tensor, sequences: Sequences, cache: LayerCache) -> Tensor:
        """Residual stream ``[T, width]`` after the layer, whose cache stores the new tokens."""
        x = self.output(self.attend(x, sequences, cache).flatten(1), x)
        return self.down(self.up(x), x)

    def attend(self, x: Tensor, sequences: Sequences, cache: LayerCache) -> Tensor:
        """Attention ``[T, Hq, Dv]`` of new tokens ``[T, width]``, which are cached."""
        return self.attention.attend_cached(*self._read(x, sequences, cache), sequences, cache)

    def append(self, x: Tensor, sequences: Sequences, cache: LayerCache, *, stores: bool) -> None:
        """Append new tokens ``[T, width]`` without output; keys and values only if ``stores``."""
        inputs = None
        if stores:
            inputs = self.attention.attention_inputs(*self._read(x, sequences, cache))
        rope, count = self.attention.rope, x.shape[0]
        cache.append(inputs, rope=rope, sequences=sequences, num_tokens=count)

    def _read(
        self, x: Tensor, sequences: Sequences, cache: LayerCache
    ) -> tuple[list[Tensor], Tensor]:
        """Heads of new tokens, and what the gates read."""
        attention, before = self.attention, cache.lengths(sequences, x.shape[0])
        found = attention.split(self.project(x), self.bias, sequences, before)
        if isinstance(attention, NativeSparseAttention):
            gate = attention.gate
            if gate.net is not None and not gate.is_linear:
                x = self.norm(x)  # the gates read the layer's input
        return found, x


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
