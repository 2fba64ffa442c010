"""Native Sparse Attention as a module: projections, compression, rotation, gates."""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor, nn

from nsa.attention import Phi, native_sparse_attention
from nsa.cache import LayerCache
from nsa.config import BRANCHES, NSAConfig
from nsa.errors import check
from nsa.ops._boundary import pack_layer_input
from nsa.ops._packed import locate
from nsa.ops.compressed import compressed_attention
from nsa.ops.compression import PhiWeights, compress, compressed_positions
from nsa.ops.heads import Heads, split_heads
from nsa.ops.selection import select_blocks
from nsa.rope import Rope, apply_rope
from nsa.stages import GATES, PROJECTION, in_stage, stage

logger = logging.getLogger(__name__)


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
            self.w1 = nn.Parameter(torch.randn(num_heads, length * size, hidden) / math.sqrt(length * size))
            self.w2 = nn.Parameter(torch.zeros(num_heads, hidden, size))

    def weights(self) -> PhiWeights:
        """The parameters as :func:`nsa.compress` takes them."""
        if self.phi == "linear":
            return PhiWeights(weight=self.weight)
        if self.phi == "mlp":
            return PhiWeights(position=self.position, w1=self.w1, w2=self.w2)
        return PhiWeights()


class Gate(nn.Module):
    """Gates of every query head and branch, computed from the layer's input.

    Args:
        width: size of the layer's input.
        config: the sparse pattern.
    """

    def __init__(self, width: int, config: NSAConfig) -> None:
        super().__init__()
        self.config = config
        self.columns = [BRANCHES.index(name) for name in config.branches]
        self.net: nn.Module | None = None
        if config.gate == "fixed":
            return
        num_gates = config.num_heads * config.num_branches
        last = nn.Linear(config.gate_hidden_size or width, num_gates)
        nn.init.normal_(last.weight, std=0.02)
        nn.init.zeros_(last.bias)
        if config.gate_hidden_size:
            first = nn.Linear(width, config.gate_hidden_size)
            nn.init.normal_(first.weight, std=0.02)
            nn.init.zeros_(first.bias)
            self.net = nn.Sequential(first, nn.SiLU(), last)
        else:
            self.net = last

    @in_stage(GATES)
    def forward(self, x: Tensor) -> Tensor:
        """Gates ``[T, Hq, 3]``, order (cmp, slc, win), for ``x`` ``[T, width]``; 0 for a branch that is off."""
        shape = (x.shape[0], self.config.num_heads, self.config.num_branches)
        if self.net is None:
            active = x.new_full(shape, 1.0 / self.config.num_branches)
        else:
            logits = self.net(x).view(shape)
            logits = logits if logits.dtype == torch.float64 else logits.float()
            active = logits.sigmoid() if self.config.gate == "sigmoid" else logits.softmax(-1)
        if self.config.num_branches == len(BRANCHES):
            return active
        gates = [active.new_zeros(shape[:-1])] * len(BRANCHES)
        for index, column in enumerate(self.columns):
            gates[column] = active[..., index]
        return torch.stack(gates, dim=-1)


class NativeSparseAttention(nn.Module):
    """A Native Sparse Attention layer (arXiv:2502.11089): drop-in self-attention for a causal decoder.

    Args:
        width: size of the residual stream.
        config: the sparse pattern.

    With the branch ``slc`` on and ``cmp`` off, blocks are still scored by compressed keys; no gradient reaches their projection
    and phi, so these are frozen, and the log says so.
    """

    def __init__(self, width: int, config: NSAConfig) -> None:
        super().__init__()
        check(width > 0, "NativeSparseAttention", "width", "be positive", width)
        self.width, self.config = width, config
        self.rope = Rope.from_config(config)
        key_size = config.num_kv_heads * config.head_dim
        value_size = config.num_kv_heads * config.value_dim
        self.q_proj = self._linear(width, config.num_heads * config.head_dim)
        if config.share_kv:
            self.k_proj = self._linear(width, key_size)
            self.v_proj = self._linear(width, value_size)
        else:
            if config.scores_blocks:
                self.k_cmp_proj = self._linear(width, key_size)
            if "cmp" in config.branches:
                self.v_cmp_proj = self._linear(width, value_size)
            for branch in ("slc", "win"):
                if branch in config.branches:
                    setattr(self, f"k_{branch}_proj", self._linear(width, key_size))
                    setattr(self, f"v_{branch}_proj", self._linear(width, value_size))
        if config.scores_blocks:
            self.phi_k = Compression(config, config.head_dim)
        if "cmp" in config.branches:
            self.phi_v = Compression(config, config.value_dim)
        self.gate = Gate(width, config)
        self.o_proj = self._linear(config.num_heads * config.value_dim, width)
        # Of `nsa.ops.observation`, where somebody watches. No buffer: it belongs to no state, and DDP would send it around.
        self.sums: Tensor | None = None
        self._freeze_scoring()

    @staticmethod
    def _linear(in_size: int, out_size: int) -> nn.Linear:
        linear = nn.Linear(in_size, out_size, bias=False)
        nn.init.normal_(linear.weight, std=0.02)
        return linear

    def _freeze_scoring(self) -> None:
        if "slc" not in self.config.branches or "cmp" in self.config.branches:
            return
        frozen = [self.phi_k] if self.config.share_kv else [self.k_cmp_proj, self.phi_k]
        for part in frozen:
            part.requires_grad_(False)
        count = sum(p.numel() for part in frozen for p in part.parameters())
        logger.info("branch cmp is off: %d parameters that score blocks are frozen at their initial values", count)

    def _projections(self) -> dict[str, nn.Linear]:
        names = ("q", "k", "v", "k_cmp", "v_cmp", "k_slc", "v_slc", "k_win", "v_win")
        return {name: getattr(self, f"{name}_proj") for name in names if hasattr(self, f"{name}_proj")}

    @in_stage(PROJECTION)
    def _project(self, x: Tensor, positions: Tensor) -> dict[str, Tensor]:
        """Queries, keys and values of every branch by one matrix product, ``[T, H, size]`` each, rotated where they have to be.

        ``q_cmp`` is among them where the compressed branch has queries of its own.
        """
        config, projections = self.config, self._projections()
        weight = torch.cat([linear.weight for linear in projections.values()])
        rotated = {"k_slc", "k_win"} if config.compress_rope == "none" else {"q", "k_slc", "k_win"}
        sizes = {"q": (config.num_heads, config.head_dim), "k": (config.num_kv_heads, config.head_dim)}
        sizes["v"] = (config.num_kv_heads, config.value_dim)
        parts = [Heads(*sizes[name[0]], name in rotated) for name in projections]
        split = split_heads(nn.functional.linear(x, weight), parts, positions, self.rope)
        heads = dict(zip(projections, split, strict=True))
        if config.compress_rope == "none":
            heads["q_cmp"], heads["q"] = heads["q"], self._rotate(heads["q"], positions)
        if config.share_kv:
            key = self._rotate(heads["k"], positions)
            heads |= {"k_cmp": heads["k"], "k_slc": key, "k_win": key}
            heads |= {f"v_{branch}": heads["v"] for branch in BRANCHES}
        return heads

    @in_stage(PROJECTION)
    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """All heads of ``x [T, H, D]`` rotated."""
        return split_heads(x.flatten(-2), [Heads(x.shape[1], x.shape[2], rotated=True)], positions, self.rope)[0]

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            x: packed ``[T, width]`` or a dense batch ``[B, T, width]``.
            cu_seqlens: int32 ``[B + 1]`` offsets of the packed sequences; None means one sequence.
            max_seqlen: at least the longest sequence, tokens. Pass it with packed sequences that are short
                beside all tokens: on a GPU None stands for all of them, which is right but takes longer, see
                :func:`nsa.native_sparse_attention`.
            cache: decode cache; ``x`` then holds the tokens that follow those already cached, and the cache takes them in. No
                gradient is recorded.

        Returns:
            The layer's output, shaped like ``x``.

        Raises:
            ValueError: shapes or offsets do not fit.
        """
        name = "NativeSparseAttention"
        shape = x.shape
        x, cu_seqlens, max_seqlen = self._pack(name, x, cu_seqlens, max_seqlen)
        if cache is not None:
            check(cache.config == self.config, name, "cache", "be made for the module's config", cache.config)
            with torch.no_grad():
                return self._attend(x, cu_seqlens, max_seqlen, cache).view(shape)
        return self._attend(x, cu_seqlens, max_seqlen, None).view(shape)

    def _pack(
        self, name: str, x: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None
    ) -> tuple[Tensor, Tensor, int | None]:
        dtype = self.q_proj.weight.dtype
        fits = x.dtype == dtype or torch.is_autocast_enabled(x.device.type)
        check(fits, name, "x", f"have the dtype of the module's weights ({dtype}), or run under autocast", x.dtype)
        return pack_layer_input(name, x, self.width, cu_seqlens, max_seqlen)

    @torch.no_grad()
    def choose_blocks(self, x: Tensor, *, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
        """The blocks that the selected branch attends to in :meth:`forward`, for a look at them; the branch must be on.

        Args:
            x: packed ``[T, width]`` or a dense batch ``[B, T, width]``.
            cu_seqlens: as in :meth:`forward`.
            max_seqlen: as in :meth:`forward`.

        Returns:
            int32 ``[T, Hkv, n]`` (``[B * T, Hkv, n]`` for a dense batch), as :func:`nsa.select_blocks` gives them.

        Raises:
            ValueError: the branch is off; shapes or offsets do not fit.
        """
        name, config = "choose_blocks", self.config
        check("slc" in config.branches, name, "config.branches", "have slc", config.branches)
        x, cu_seqlens, max_seqlen = self._pack(name, x, cu_seqlens, max_seqlen)
        heads = self._project(x, locate(x.shape[0], cu_seqlens)[1])
        q = heads.get("q_cmp", heads["q"])
        k_cmp, _ = compress(heads["k_cmp"], self.phi_k.weights(), config, cu_seqlens)
        if config.compress_rope != "none":
            k_cmp = apply_rope(k_cmp, compressed_positions(config, cu_seqlens, k_cmp.shape[0]), self.rope)
        _, lse = compressed_attention(q, k_cmp, None, config, cu_seqlens_q=cu_seqlens, max_seqlen_q=max_seqlen)
        return select_blocks(q, k_cmp, lse, config, cu_seqlens_q=cu_seqlens, max_seqlen_q=max_seqlen)

    def _attend(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int | None, cache: LayerCache | None) -> Tensor:
        """The layer's output ``[T, width]`` for packed and checked tokens."""
        sequence, row, _ = locate(x.shape[0], cu_seqlens)
        positions = row if cache is None else row + cache.lengths(cu_seqlens)[sequence]
        heads, config = self._project(x, positions), self.config
        k_cmp = heads["k_cmp"] if config.scores_blocks else None
        v_cmp = heads["v_cmp"] if "cmp" in config.branches else None
        k_slc, k_win, v_slc, v_win = (
            heads[f"{kind}_{branch}"] if branch in config.branches else None for kind in "kv" for branch in ("slc", "win")
        )
        q_cmp = heads.get("q_cmp")
        inputs = (heads["q"], k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, self.gate(x), self._phi())
        if cache is None:
            out = native_sparse_attention(
                *inputs, config, q_cmp=q_cmp, rope=self.rope, cu_seqlens_q=cu_seqlens, max_seqlen_q=max_seqlen, sums=self.sums
            )
        else:
            out = cache.attend(*inputs, q_cmp=q_cmp, rope=self.rope, cu_seqlens_q=cu_seqlens)
        with stage(PROJECTION):
            return self.o_proj(out.flatten(-2))

    def _phi(self) -> Phi | None:
        if not self.config.scores_blocks:
            return None
        return self.phi_k.weights(), self.phi_v.weights() if "cmp" in self.config.branches else PhiWeights()
