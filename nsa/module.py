"""Native Sparse Attention as a module: projections, compression, rotation, gates."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn

from nsa.attached import is_plain, plain_weights
from nsa.attention import AttentionInputs, Observer, Phi, attend
from nsa.cache import LayerCache
from nsa.config import BRANCHES, NSAConfig
from nsa.errors import check, fail
from nsa.ops._backend import choose_backend
from nsa.ops._operator import Call
from nsa.ops._sequences import Sequences, open_layer_input
from nsa.ops.compression import PhiWeights, compress, compressed_positions
from nsa.ops.index_loss import IndexLoss, IndexLossInputs, Ranked, run_index_loss
from nsa.ops.projection import Columns, Gates, Heads, activate, project
from nsa.ops.range import compressed_attention
from nsa.ops.selection import select_blocks
from nsa.rope import Rope, apply_rope
from nsa.stages import GATES, PROJECTION, in_stage, stage

logger = logging.getLogger(__name__)

# Name of each projection and of its module, in the order of the columns.
PROJECTIONS = [
    (name, f"{name}_proj")
    for name in (
        *("q", "k", "v", "k_cmp", "v_cmp", "k_slc", "v_slc", "k_win", "v_win"),
        *("q_idx", "k_idx"),
    )
]


class RMSNorm(nn.RMSNorm):
    """Root mean square normalisation, whose weight may have less precision than its input.

    FSDP2 may gather weights in bf16 while the residual stream is fp32.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[..., width]``; same shape, dtype of ``x``."""
        return nn.functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Compression(nn.Module):
    """Parameters of phi (Eq. 7) for keys or for values; none for ``mean``.

    Args:
        config: the sparse pattern.
        size: D for keys, Dv for values.
    """

    def __init__(self, config: NSAConfig, size: int) -> None:
        super().__init__()
        num_heads, length = config.num_kv_heads, config.compress_block_size
        hidden = config.compress_hidden_size or 2 * size
        self.phi = config.phi
        if self.phi == "linear":
            self.weight = nn.Parameter(torch.full((num_heads, length, size), 1.0 / length))
        elif self.phi == "mlp":
            self.position = nn.Parameter(torch.randn(num_heads, length, size) * 0.02)
            self.w1 = nn.Parameter(
                torch.randn(num_heads, length * size, hidden) / math.sqrt(length * size)
            )
            self.w2 = nn.Parameter(torch.zeros(num_heads, hidden, size))

    def weights(self) -> PhiWeights:
        """Parameters in the form that :func:`nsa.compress` accepts."""
        if self.phi == "linear":
            return PhiWeights(weight=self.weight)
        if self.phi == "mlp":
            return PhiWeights(position=self.position, w1=self.w1, w2=self.w2)
        return PhiWeights()


class GateLinear(nn.Module):
    """Linear layer with the initial values of the gates.

    Not a subclass of ``nn.Linear``: a loop that initializes the linear layers of a model, such as
    nanoGPT's, sets their biases to 0 and would undo ``gate_bias`` silently.

    Args:
        in_size: columns of the input.
        out_size: logits of a token.
        start: initial value of the bias.
    """

    def __init__(self, in_size: int, out_size: int, start: float) -> None:
        super().__init__()
        self.start = start
        linear = nn.Linear(in_size, out_size)  # first, so that seeds stay valid
        self.weight, self.bias = linear.weight, linear.bias
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight and set the bias to ``start``."""
        nn.init.normal_(self.weight, std=0.02)
        nn.init.constant_(self.bias, self.start)

    forward = nn.Linear.forward


class Gate(nn.Module):
    """Gates of every query head and branch, computed from the layer's input.

    Args:
        width: size of the layer's input.
        config: the sparse pattern.

    Attributes:
        net: module that computes the logits; None with gate ``fixed``.
        columns: conversion of logits to gates; None with gate ``fixed``.
        is_linear: whether ``net`` is one linear layer, which is fused into the projection.
    """

    def __init__(self, width: int, config: NSAConfig) -> None:
        super().__init__()
        self.config = config
        self.net: nn.Module | None = None
        self.columns: Gates | None = None
        self.is_linear = config.gate != "fixed" and not config.gate_hidden_size
        if config.gate == "fixed":
            return
        branches = tuple(BRANCHES.index(name) for name in config.branches)
        sharpness = 1.0 / config.gate_temperature if config.gate == "softmax" else 0.0
        self.columns = Gates(config.num_heads, branches, sharpness)
        size = config.gate_hidden_size or width
        last = GateLinear(size, self.columns.columns, config.gate_bias)
        if config.gate_hidden_size:
            first = nn.Linear(width, config.gate_hidden_size)
            nn.init.normal_(first.weight, std=0.02)
            nn.init.zeros_(first.bias)
            self.net = nn.Sequential(first, nn.SiLU(), last)
        else:
            self.net = last

    @in_stage(GATES)
    def forward(self, x: Tensor) -> Tensor | None:
        """Gates ``[T, Hq, 3]``, order (cmp, slc, win), for ``x [T, width]``.

        Gates of a disabled branch are 0. None with gate ``fixed``.
        """
        if self.net is None or self.columns is None:
            return None
        return activate(self.net(x), self.columns)


class ProjectedAttention(nn.Module):
    """Base of attention layers: projections in one product, normalised and rotated.

    The weights of plain projections are multiplied in one product. If anything is attached to one
    of them (LoRA, hooks, quantization, pruning, a bias), each projection is called instead.

    Args:
        width: size of the layer's input.
        config: heads, rotation and normalisation.
    """

    def __init__(self, width: int, config: NSAConfig) -> None:
        super().__init__()
        self.width, self.config = width, config
        self.rope = Rope.from_config(config)

    def describe_columns(self, parts: list[Heads], gates: Gates | None = None) -> None:
        """Set the columns of the projections, in their order, and of gates in the same product."""
        self._without_gates = Columns(tuple(parts))
        self.columns = Columns(tuple(parts), gates)

    @property
    def projections(self) -> dict[str, nn.Module]:
        """Projections of queries, keys and values by name, in the order of the columns."""
        modules: dict[str, Any] = self.__dict__["_modules"]
        return {name: modules[key] for name, key in PROJECTIONS if key in modules}

    def plain_weights(self) -> tuple[list[Tensor], Tensor | None] | None:
        """Weights of one product for the whole layer, gates last, and the bias of the gates.

        None if something is attached to a projection or to the gates, which must then be called.
        """
        weights = plain_weights(self.projections.values())
        if weights is None or self.columns.gates is None:
            return None if weights is None else (weights, None)
        gate: Gate = self.__dict__["_modules"]["gate"]
        net: nn.Module = gate.__dict__["_modules"]["net"]
        if not (is_plain(gate, Gate) and is_plain(net, GateLinear)):
            return None
        parameters = net.__dict__["_parameters"]
        weights.append(parameters["weight"])
        return weights, parameters["bias"]

    @in_stage(PROJECTION)
    def _project(
        self, x: Tensor, sequences: Sequences, before: Tensor | None = None
    ) -> list[Tensor]:
        plain = self.plain_weights()
        if plain is None:
            calls: Iterable[Callable[[Tensor], Tensor]] = self.projections.values()
            return self.split(self._each(x, calls), None, sequences, before)
        weights, bias = plain
        if x.dtype != weights[0].dtype and not torch.is_autocast_enabled(x.device.type):
            rule = f"have the dtype of the weights ({weights[0].dtype}), or run under autocast"
            fail("x", rule, x.dtype)
        if self.config.qk_norm:
            if any(self.columns.detached):
                product = self._each(x, [partial(nn.functional.linear, weight=w) for w in weights])
            else:
                product = nn.functional.linear(x, torch.cat(weights))
            return self.split(product, bias, sequences, before)
        return project(x, weights, bias, self.columns, sequences, self.rope, before=before)

    def _each(self, x: Tensor, calls: Iterable[Callable[[Tensor], Tensor]]) -> Tensor:
        """Products of one projection after the other, side by side."""
        parts = zip(calls, self.columns.detached, strict=False)
        return torch.cat([call(x.detach() if cut else x) for call, cut in parts], dim=-1)

    def split(
        self,
        product: Tensor,
        bias: Tensor | None,
        sequences: Sequences,
        before: Tensor | None = None,
    ) -> list[Tensor]:
        """Split products of the projections into heads (and gates), normalised and rotated.

        Args:
            product: ``[T, N]``, products of all projections side by side, which may end with
                padding; with ``bias`` also the gates' logits.
            bias: bias of the gates, or None.
            sequences: the sequences of the tokens.
            before: number of earlier tokens of each sequence, int32 ``[B]``; None means 0.
        """
        columns = self._without_gates if bias is None else self.columns
        if self.config.qk_norm:
            pieces = columns.split(product)
            for k, (name, part) in enumerate(zip(self.projections, columns.parts, strict=True)):
                norm: Any = self.__dict__["_modules"].get(f"{name}_norm")
                if norm is not None:
                    heads = pieces[k].unflatten(-1, (part.number, part.size))
                    pieces[k] = norm(heads).flatten(-2)
            product = torch.cat(pieces, dim=-1)
        return project(product, (), bias, columns, sequences, self.rope, before=before)


class NativeSparseAttention(ProjectedAttention):
    """A Native Sparse Attention layer (arXiv:2502.11089): self-attention for a causal decoder.

    Args:
        width: size of the residual stream.
        config: the sparse pattern.

    Plain projections run as one product, see :class:`ProjectedAttention`.

    With branch ``slc`` enabled and ``cmp`` disabled, blocks are still scored by compressed keys. No
    gradient reaches their projection and phi, so these are frozen, and a log line reports it. With
    other scores there are no compressed keys, and nothing is frozen.

    With scores ``index`` there are projections of index queries and keys. The selection has no
    gradient: they learn from the loss that :meth:`forward` returns for ``index_loss``, whose
    gradient reaches nothing else.
    """

    # Projections; a pattern has those that it needs.
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    k_cmp_proj: nn.Linear
    v_cmp_proj: nn.Linear
    k_slc_proj: nn.Linear
    v_slc_proj: nn.Linear
    k_win_proj: nn.Linear
    v_win_proj: nn.Linear
    q_idx_proj: nn.Linear
    k_idx_proj: nn.Linear

    def __init__(self, width: int, config: NSAConfig) -> None:
        check(width > 0, "width", "be positive", width)
        super().__init__(width, config)
        parts = self._add_projections()
        if config.qk_norm:
            for name in self.projections:
                if name[0] in "qk":
                    of = config.scoring if name.endswith("idx") else config
                    setattr(self, f"{name}_norm", RMSNorm(of.head_dim, eps=config.qk_norm_eps))
        if config.compresses_keys:
            self.phi_k = Compression(config, config.head_dim)
        if "cmp" in config.branches:
            self.phi_v = Compression(config, config.value_dim)
        self.gate = Gate(width, config)
        sizes = (config.num_heads * config.value_dim, width)
        self.o_proj = self._linear(*sizes, bias=config.projection_bias == "all")
        self.describe_columns(parts, self.gate.columns if self.gate.is_linear else None)
        # Set by telemetry, see `nsa.ops.statistics`. Not a buffer: it is not part of the state, and
        # DDP would broadcast it.
        self.statistics: Tensor | None = None
        # Set by an inspection: called with inputs and block indices in passes without a cache.
        self.observer: Observer | None = None
        self.freeze_scoring()

    @staticmethod
    def _linear(in_size: int, out_size: int, *, bias: bool) -> nn.Linear:
        linear = nn.Linear(in_size, out_size, bias=bias)
        nn.init.normal_(linear.weight, std=0.02)
        if bias:
            nn.init.zeros_(linear.bias)
        return linear

    def freeze_scoring(self) -> None:
        """Freeze the scoring parameters that receive no gradient; call it after replacing them."""
        if "cmp" in self.config.branches or not self.config.compresses_keys:
            return
        names = ["phi_k"] if self.config.share_kv else ["k_cmp_proj", "k_cmp_norm", "phi_k"]
        frozen = [part for name, part in self.named_children() if name in names]
        for part in frozen:
            part.requires_grad_(False)
        count = sum(p.numel() for part in frozen for p in part.parameters())
        logger.info(
            "branch cmp is off: %d parameters that score blocks are frozen at their initial values",
            count,
        )

    def _add_projections(self) -> list[Heads]:
        """Add the projections; return their columns, and set the outputs and their use."""
        config = self.config
        kinds = [f"{x}_{branch}" for branch in BRANCHES for x in "kv"]
        used = [kind for kind in kinds if kind[2:] in config.branches]
        used += ["k_cmp"] if config.compresses_keys else []
        index = ["q_idx", "k_idx"] if config.has_index else []
        # Output for each key and value of a branch, empty if it is not used.
        shared = {kind: "k_raw" if kind == "k_cmp" else kind[0] for kind in kinds}
        names = shared if config.share_kv else dict(zip(kinds, kinds, strict=True))
        self._sources = [names[kind] if kind in used else "" for kind in kinds]
        # Rotated queries and keys that are needed unrotated, too.
        raw = {"k"} if config.compresses_keys else set()
        raw |= {"q"} if config.compresses_keys and config.compress_rope == "none" else set()
        parts, self._outputs = list[Heads](), list[str]()
        for name, key in PROJECTIONS:
            if name == "q" or name in (*(("k", "v") if config.share_kv else used), *index):
                of = config.scoring if name in index else config
                number = of.num_heads if name[0] == "q" else of.num_kv_heads
                size = of.value_dim if name[0] == "v" else of.head_dim
                bias = config.projection_bias != "none"
                setattr(self, key, self._linear(self.width, number * size, bias=bias))
                rotated = name in ("q", "k", "k_slc", "k_win", *index)
                outputs = (False, True) if name in raw else (rotated,)
                rotary = of.rotary_dim if name in index else None
                parts.append(Heads(number, size, outputs, rotary, name in index))
                self._outputs += [f"{name}_raw", name] if name in raw else [name]
        return parts

    def attention_inputs(self, found: list[Tensor], x: Tensor) -> AttentionInputs:
        """Build AttentionInputs from the outputs of the projection.

        Args:
            found: heads ``[T, H, size]``, and gates if they are columns of the projection.
            x: the layer's input ``[T, width]``, for gates that are not among the columns.
        """
        heads = dict(zip(self._outputs, found, strict=False))
        given = [heads.get(name) for name in self._sources]
        gates = found[-1] if len(found) > len(self._outputs) else self.gate(x)
        others = (heads.get(name) for name in ("q_raw", "q_idx", "k_idx"))
        return AttentionInputs._make((heads["q"], *given, gates, self._phi(), *others))

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        attention_mask: Tensor | None = None,
        sequences: Sequences | None = None,
        cache: LayerCache | None = None,
        index_loss: Ranked | None = None,
    ) -> Any:
        """Attend.

        Args:
            x: packed ``[T, width]`` or a dense batch ``[B, T, width]``.
            cu_seqlens: int32 ``[B + 1]`` offsets of the packed sequences; None means one sequence.
            max_seqlen: at least the longest sequence, tokens. Pass it with packed sequences that
                are much shorter than the total number of tokens: on a GPU None means that total,
                which is correct but slower, see :func:`nsa.native_sparse_attention`.
            attention_mask: bool or integer ``[B, T]`` of a padded batch ``[B, T, width]``, true for
                a token; padding is left or right of a row's tokens, see
                :meth:`nsa.Sequences.padded`. Outputs for padding are meaningless.
            sequences: replaces the previous three arguments, from :meth:`nsa.Sequences.packed` or
                :meth:`nsa.Sequences.padded`, for all layers of a model. After
                :meth:`nsa.Sequences.with_blocks`, index tensors are computed only once.
            cache: decode cache; ``x`` then contains the tokens after the cached ones, which are
                appended to the cache. No gradient is recorded.
            index_loss: also return the loss of the index (scores ``index``) over the ``selected``
                blocks or ``all`` of them, see :func:`nsa.index_loss`.

        Returns:
            The layer's output, shaped like ``x``; with ``index_loss`` also the loss, as
            :class:`nsa.ops.index_loss.IndexLoss`: the sum, and the number of its terms.

        Raises:
            ValueError: shapes or offsets do not match; ``index_loss`` without an index or with a
                cache.
        """
        if index_loss is not None:
            known = get_args(Ranked)
            check(index_loss in known, "index_loss", f"be one of {known}", index_loss)
            fits = self.config.has_index and cache is None
            check(fits, "index_loss", "be None without scores index, or with a cache", index_loss)
        packed, sequences = open_layer_input(
            x, self.width, cu_seqlens, max_seqlen, attention_mask, sequences
        )
        if cache is None:
            out, loss = self._attend(packed, sequences, index_loss)
            return out.view(x.shape) if loss is None else (out.view(x.shape), loss)
        rule = "be a layer's cache, such as NSACache(...).layers[0], or None"
        check(isinstance(cache, LayerCache), "cache", rule, type(cache).__name__)
        check(attention_mask is None, "attention_mask", "be left out with a cache", "a tensor")
        check(
            cache.config == self.config,
            "cache",
            "be made for the module's config",
            cache.config,
        )
        with torch.no_grad():
            found = self._project(packed, sequences, cache.lengths(sequences, packed.shape[0]))
            out = self.attend_cached(found, packed, sequences, cache)
            return self.o_proj(out.flatten(-2)).view(x.shape)

    @torch.no_grad()
    def choose_blocks(
        self, x: Tensor, *, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None
    ) -> Tensor:
        """Return the blocks that the selected branch attends to in :meth:`forward`.

        Args:
            x: packed ``[T, width]`` or a dense batch ``[B, T, width]``.
            cu_seqlens: as in :meth:`forward`.
            max_seqlen: as in :meth:`forward`.

        Returns:
            int32 ``[T, Hkv, n]`` (``[B * T, Hkv, n]`` for a dense batch), as returned by
            :func:`nsa.select_blocks`.

        Raises:
            ValueError: the branch is disabled; shapes or offsets do not match.
        """
        config = self.config
        check("slc" in config.branches, "config.branches", "have slc", config.branches)
        x, sequences = open_layer_input(x, self.width, cu_seqlens, max_seqlen)
        inputs, cu = self.attention_inputs(self._project(x, sequences), x), sequences.cu_q
        rest: dict[str, Any] = {"cu_seqlens_q": cu, "max_seqlen_q": sequences.len_q}
        if config.scores != "compressed":
            scored = inputs.q, inputs.k_slc
            q, k = (inputs.q_idx, inputs.k_idx) if config.has_index else scored
            assert q is not None
            assert k is not None
            return select_blocks(q, k, None, config, **rest)
        q = inputs.q if inputs.q_cmp is None else inputs.q_cmp
        assert inputs.k_cmp_raw is not None
        k_cmp, _ = compress(inputs.k_cmp_raw, self.phi_k.weights(), config, cu)
        if config.compress_rope != "none":
            k_cmp = apply_rope(k_cmp, compressed_positions(config, cu, k_cmp.shape[0]), self.rope)
        _, lse = compressed_attention(q, k_cmp, None, config, **rest)
        return select_blocks(q, k_cmp, lse, config, **rest)

    def _attend(
        self, x: Tensor, sequences: Sequences, ranked: Ranked | None
    ) -> tuple[Tensor, IndexLoss | None]:
        """The layer's output ``[T, width]`` for packed and checked tokens, and the index's loss."""
        call = Call(self.config, sequences, self.config.head_dim**-0.5)
        inputs = self.attention_inputs(self._project(x, sequences), x)
        frozen = ranked is not None and self._is_frozen(x)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            result = attend(
                inputs,
                call,
                rope=self.rope,
                statistics=self.statistics,
                observer=self.observer,
            )
        loss = None
        if ranked is not None:
            q_idx, k_idx, k = inputs.q_idx, inputs.k_idx, inputs.k_slc
            assert q_idx is not None
            assert k_idx is not None
            assert k is not None
            blocks = result.block_indices if ranked == "selected" else None
            given = IndexLossInputs(q_idx, k_idx, inputs.q.detach(), k.detach(), blocks)
            if blocks is not None:
                given = given._replace(lse=result.lse_slc, order=result.order)
            loss = run_index_loss(given, call, choose_backend("auto", x))
        with stage(PROJECTION):
            return self.o_proj(result.out.flatten(-2)), loss

    def attend_cached(
        self, found: list[Tensor], x: Tensor, sequences: Sequences, cache: LayerCache
    ) -> Tensor:
        """Append new tokens to the cache; return their attention output ``[T, Hq, Dv]``.

        Args:
            found: see :meth:`attention_inputs`.
            x: see :meth:`attention_inputs`.
            sequences: the sequences of the new tokens.
            cache: the layer's cache.
        """
        inputs = self.attention_inputs(found, x)
        return cache.attend(inputs, rope=self.rope, sequences=sequences)

    def _is_frozen(self, x: Tensor) -> bool:
        """Whether only the index is trained, which gets no gradient from the layer's output."""
        trained = (name for name, p in self.named_parameters() if p.requires_grad)
        return not x.requires_grad and all("_idx_" in name for name in trained)

    def _phi(self) -> Phi | None:
        if not self.config.compresses_keys:
            return None
        return (
            self.phi_k.weights(),
            self.phi_v.weights() if "cmp" in self.config.branches else PhiWeights(),
        )
