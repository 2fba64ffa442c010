"""Frozen configuration of the sparse pattern, shared by all operators, kernels and caches."""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from typing import ClassVar, Literal

from nsa.errors import check, check_at_most, check_not_negative, check_positive
from nsa.fields import check_field, settle

Branch = Literal["cmp", "slc", "win"]
BRANCHES: tuple[Branch, ...] = ("cmp", "slc", "win")
_AT_MOST_2_30 = (
    "num_selected_blocks",
    "coarse_block_size",
    "num_coarse_blocks",
    "window_size",
    "compress_hidden_size",
    "gate_hidden_size",
)


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of the rotary frequencies for sequences longer than those trained on.

    Attributes:
        kind: ``linear`` divides every position by ``factor`` (Chen et al., arXiv:2306.15595);
            ``yarn`` interpolates by frequency and sharpens attention (Peng et al.,
            arXiv:2309.00071); ``llama3`` interpolates by frequency (Llama 3.1, arXiv:2407.21783).
        factor: how many times longer than ``original_max_position``, at least 1.
        original_max_position: longest position of the original training, tokens (not used by
            ``linear``).
        beta_fast: rotations over the original length above which a frequency is kept: 32 is usual
            for ``yarn``, 4 for ``llama3`` (its ``high_freq_factor``).
        beta_slow: rotations below which a frequency is divided by ``factor`` (``low_freq_factor``).
    """

    kind: Literal["linear", "yarn", "llama3"] = "linear"
    factor: float = 1.0
    original_max_position: int = 2048
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        settle(self)
        check_field(self, self.factor >= 1, "factor", "be at least 1")
        fits = 0 < self.beta_slow < self.beta_fast
        check_field(self, fits, "beta_slow", f"be positive and below beta_fast ({self.beta_fast})")
        check_positive(self, "original_max_position")
        check_at_most(self, 2**30, "original_max_position")


@dataclass(frozen=True)
class NSAConfig:
    """A Native Sparse Attention layer (arXiv:2502.11089); letters of the paper in brackets.

    Attributes:
        num_heads: query heads [Hq].
        num_kv_heads: key and value heads [Hkv]; divides ``num_heads``, with at most 64 query heads
            each [G].
        head_dim: size of a query and key head [D]: a multiple of 16 from 16 to 256.
        value_dim: size of a value head [Dv], likewise; set it together with ``head_dim`` unless
            they are meant to differ.
        compress_block_size: tokens of a compression block [l].
        compress_stride: tokens from one compression block to the next [d]: at least 4, divides
            ``compress_block_size`` and ``block_size``.
        block_size: tokens of a selection block [l']: 16, 32, 64 or 128, at least
            ``compress_block_size``.
        num_selected_blocks: blocks that a query attends to, forced ones included [n].
        num_init_blocks: forced first blocks.
        num_local_blocks: forced most recent blocks, the query's own included.
        num_selected_blocks_table: rows ``(layer, length, n)``: in that layer (-1: in every layer) a
            query at a position below ``length`` selects n blocks instead of
            ``num_selected_blocks``, which is still the width of the indices; the first matching
            row applies. See :meth:`for_layer`.
        scores: scores by which blocks are selected: ``compressed`` are the probabilities of the
            compressed keys (Eq. 9), ``token_max`` the largest weight of a token of the block,
            ``index`` the same of small queries and keys that are projected for the scores alone;
            ``random`` are hashes, a control for experiments that selects without content.
        index_heads: index queries per KV head, 1 to 64; the ``index_*`` fields are read with scores
            ``index`` only. No gradient flows through the selection: without the loss of an index
            (:func:`nsa.index_loss`) its projections keep their initial values, up to weight decay.
        index_dim: size of an index query and key: a multiple of 16 from 16 to 256.
        index_keys: ``group`` projects one index key and ``index_heads`` queries for each KV head,
            ``shared`` one key and ``index_heads`` queries in all, by which all KV heads select the
            same blocks.
        index_rotary_dim: rotated leading part of an index query and key, even; None means that of
            the other heads, at most ``index_dim``.
        coarse_block_size: tokens of a coarse block: a power of two times ``block_size``. If set,
            blocks are selected in two stages: the mean compressed key of each coarse block is
            scored first, and only the blocks inside the best ``num_coarse_blocks`` coarse blocks
            are then scored exactly. None scores all blocks.
        num_coarse_blocks: coarse blocks that the first stage keeps.
        score_precision: precision of the products of queries and keys in the selection: ``exact``
            multiplies them in their dtype, ``fp8`` rounds them to e4m3 first, with one scale per
            row (per block of keys with scores by tokens). The softmax is always fp32.
        window_size: tokens of the window, the query's own included [w].
        branches: the enabled branches, a non-empty subset of ``("cmp", "slc", "win")``.
        share_kv: one K and V projection for all branches instead of one each.
        phi: function that compresses a block to one key and one value.
        compress_hidden_size: hidden size of phi ``mlp``; None means twice the head size.
        compress_rope: position at which a compressed key is rotated: ``middle`` of its block,
            ``start``, or ``none`` (then the compressed branch and the scores use the unrotated
            query too).
        gate: ``sigmoid`` per head and branch, ``softmax`` over the branches, or ``fixed`` equal
            shares.
        gate_bias: initial bias of gate ``sigmoid``: with 0 gates start near 0.5, with 2 near 0.88;
            0 for other gates.
        gate_hidden_size: hidden size of the gate network; 0 means a single linear layer.
        gate_temperature: divisor of the logits of gate ``softmax``: above 1 makes the gates more
            uniform, below 1 less; 1 for other gates.
        rope_theta: base of the rotary frequencies.
        rotary_dim: rotated leading part of a head, even; None means ``head_dim``.
        rope_scaling: see :class:`RopeScaling`.
        qk_norm: RMSNorm of each query and key head before rotation and compression, with one
            weight ``[head_dim]`` per projection.
        qk_norm_eps: constant inside that RMSNorm.
        projection_bias: biases of the projections: ``none``, ``qkv`` (queries, keys and values) or
            ``all`` (also the output).

    Values may be those parsed from JSON: ``NSAConfig(**json.loads(json.dumps(asdict(config))))`` is
    equal to ``config``.

    Raises:
        ValueError: a value is not valid; the message names the argument, the rule and the value.
    """

    num_heads: int = 12
    num_kv_heads: int = 2
    head_dim: int = 64
    value_dim: int = 64
    compress_block_size: int = 32
    compress_stride: int = 16
    block_size: int = 64
    num_selected_blocks: int = 16
    num_init_blocks: int = 1
    num_local_blocks: int = 2
    num_selected_blocks_table: tuple[tuple[int, int, int], ...] = ()
    scores: Literal["compressed", "token_max", "index", "random"] = "compressed"
    index_heads: int = 1
    index_dim: int = 64
    index_keys: Literal["group", "shared"] = "group"
    index_rotary_dim: int | None = None
    coarse_block_size: int | None = None
    num_coarse_blocks: int = 0
    score_precision: Literal["exact", "fp8"] = "exact"
    window_size: int = 512
    branches: tuple[Branch, ...] = BRANCHES
    share_kv: bool = False
    phi: Literal["mean", "linear", "mlp"] = "mean"
    compress_hidden_size: int | None = None
    compress_rope: Literal["middle", "start", "none"] = "middle"
    gate: Literal["sigmoid", "softmax", "fixed"] = "sigmoid"
    gate_bias: float = 0.0
    gate_hidden_size: int = 0
    gate_temperature: float = 1.0
    rope_theta: float = 10_000.0
    rotary_dim: int | None = None
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False
    qk_norm_eps: float = 1e-6
    projection_bias: Literal["none", "qkv", "all"] = "none"

    # All fields as JSON, the form in which registered operators accept the pattern.
    text: ClassVar[str]
    # Pattern of the queries and keys that score blocks: with scores ``index`` that of the index
    # heads, with scores ``token_max``; otherwise this pattern.
    scoring: ClassVar[NSAConfig]

    def __post_init__(self) -> None:
        settle(self)
        self._check_heads()
        self._check_blocks()
        self._check_selection()
        plain = self.gate == "sigmoid" or self.gate_bias == 0
        check_field(self, plain, "gate_bias", f"be 0 with gate {self.gate}")
        check_positive(self, "gate_temperature", "qk_norm_eps")
        plain = self.gate == "softmax" or self.gate_temperature == 1
        check_field(self, plain, "gate_temperature", f"be 1 with gate {self.gate}")
        names = set(self.branches)
        rule = f"be a non-empty subset of {BRANCHES} without repeats"
        check_field(self, 0 < len(names) == len(self.branches), "branches", rule)
        object.__setattr__(self, "branches", tuple(name for name in BRANCHES if name in names))
        check_field(self, self.rope_theta > 1, "rope_theta", "be above 1")
        object.__setattr__(self, "text", json.dumps(dataclasses.asdict(self)))
        for name, of in (("rotary_dim", "head_dim"), ("index_rotary_dim", "index_dim")):
            rotary, size = getattr(self, name), getattr(self, of)
            fits = rotary is None or (0 < rotary <= size and rotary % 2 == 0)
            check_field(self, fits, name, f"be even and from 2 to {of} ({size})")
        object.__setattr__(self, "scoring", self._scoring())

    def _check_heads(self) -> None:
        check_positive(self, "num_heads", "num_kv_heads", "head_dim", "value_dim")
        # A dimension of a kernel's grid.
        check_field(self, self.num_kv_heads < 2**16, "num_kv_heads", "be less than 65,536")
        divides = self.num_heads % self.num_kv_heads == 0
        check_field(self, divides, "num_kv_heads", f"divide num_heads ({self.num_heads})")
        rule = f"be at most 64 times num_kv_heads ({self.num_kv_heads})"
        check_field(self, self.group_size <= 64, "num_heads", rule)
        for name in ("head_dim", "value_dim", "index_dim"):
            size = getattr(self, name)
            fits = size % 16 == 0 and 16 <= size <= 256
            check_field(self, fits, name, "be a multiple of 16 from 16 to 256")
        check_positive(self, "index_heads")
        check_at_most(self, 64, "index_heads")

    def _check_blocks(self) -> None:
        sizes = ("compress_block_size", "compress_stride", "window_size")
        check_positive(self, *sizes, "num_selected_blocks", "num_local_blocks")
        check_not_negative(self, "num_init_blocks", "gate_hidden_size")
        if self.compress_hidden_size is not None:
            check_positive(self, "compress_hidden_size")
        check_at_most(self, 2**30, *_AT_MOST_2_30)  # kernels add some to positions, in 32 bits
        l, d, l_sel = self.compress_block_size, self.compress_stride, self.block_size
        check_field(self, d >= 4, "compress_stride", "be at least 4")
        check_field(self, l % d == 0, "compress_stride", f"divide compress_block_size ({l})")
        fits = self.block_size in (16, 32, 64, 128)
        check_field(self, fits, "block_size", "be one of 16, 32, 64, 128")
        check_field(self, l_sel % d == 0, "compress_stride", f"divide block_size ({l_sel})")
        check_field(self, l <= l_sel, "compress_block_size", f"be at most block_size ({l_sel})")
        forced = self.num_init_blocks + self.num_local_blocks
        rule = f"be at least num_init_blocks + num_local_blocks ({forced})"
        check_field(self, self.num_selected_blocks >= forced, "num_selected_blocks", rule)

    def _check_selection(self) -> None:
        name, most = "num_selected_blocks_table", self.num_selected_blocks
        forced = self.num_init_blocks + self.num_local_blocks
        for row in self.num_selected_blocks_table:
            fits = row[0] >= -1 and 0 < row[1] < 2**63 and forced <= row[2] <= most
            rule = (
                f"have rows (layer from -1, length from 1 to 2**63 - 1, n from {forced} to {most})"
            )
            check(fits, name, rule, row)
        exact = self.score_precision == "exact" or self.scores != "random"
        check_field(self, exact, "score_precision", "be exact with scores random")
        if self.coarse_block_size is None:
            rule = "be 0 without coarse_block_size"
            check_field(self, self.num_coarse_blocks == 0, "num_coarse_blocks", rule)
            return
        by_mean = self.scores == "compressed"
        check_field(self, by_mean, "coarse_block_size", f"be None with scores {self.scores}")
        factor, rest = divmod(self.coarse_block_size, self.block_size)
        rule = f"be block_size ({self.block_size}) times a power of two above 1"
        is_power = rest == 0 and factor > 1 and factor & (factor - 1) == 0
        check_field(self, is_power, "coarse_block_size", rule)
        least = sum(self.forced_coarse_blocks)
        rule = f"be at least {least}, those that hold forced or incomplete blocks"
        check_field(self, self.num_coarse_blocks >= least, "num_coarse_blocks", rule)

    @classmethod
    @functools.cache
    def from_text(cls, text: str) -> NSAConfig:
        """Pattern from its :attr:`text`."""
        return cls(**json.loads(text))

    def for_layer(self, layer: int) -> NSAConfig:
        """Pattern of one layer, with its rows of ``num_selected_blocks_table``.

        Args:
            layer: index from 0.
        """
        rows = tuple(
            (-1, length, n)
            for where, length, n in self.num_selected_blocks_table
            if where in (-1, layer)
        )
        return dataclasses.replace(self, num_selected_blocks_table=rows)

    @property
    def block_counts(self) -> tuple[tuple[int, int], ...]:
        """Pairs ``(length, n)``: a query at a position below length selects n blocks.

        The first matching pair applies.

        Raises:
            ValueError: the table still has rows for single layers.
        """
        table = self.num_selected_blocks_table
        for_all = all(layer == -1 for layer, _, _ in table)
        rule = "hold rows for every layer (-1) alone where an operator runs"
        hint = "Give it config.for_layer(i)."
        check_field(self, for_all, "num_selected_blocks_table", rule, hint)
        return tuple((length, n) for _, length, n in table)

    @property
    def forced_coarse_blocks(self) -> tuple[int, int]:
        """Numbers of first and of most recent coarse blocks that the first stage always keeps.

        They contain the forced blocks, and all blocks with a compressed key that a query does not
        see yet.
        """
        assert self.coarse_block_size is not None
        local = self.num_local_blocks * self.block_size + self.compress_block_size
        return -(-self.num_init_blocks * self.block_size // self.coarse_block_size), -(
            -local // self.coarse_block_size
        ) + 1

    @property
    def group_size(self) -> int:
        """Query heads per KV head [G]."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_branches(self) -> int:
        """Number of enabled branches."""
        return len(self.branches)

    @property
    def compresses_keys(self) -> bool:
        """Whether compressed keys are needed: for their own branch or to score blocks."""
        return "cmp" in self.branches or ("slc" in self.branches and self.scores == "compressed")

    @property
    def scores_tokens(self) -> bool:
        """Whether a key of every token is read to score blocks."""
        return "slc" in self.branches and self.scoring.scores == "token_max"

    @property
    def has_index(self) -> bool:
        """Whether index queries and keys are needed."""
        return "slc" in self.branches and self.scores == "index"

    def _scoring(self) -> NSAConfig:
        if self.scores != "index":
            return self
        heads = self.num_kv_heads if self.index_keys == "group" else 1
        rotary = self.rotary_dim or self.head_dim
        return dataclasses.replace(
            self,
            num_heads=heads * self.index_heads,
            num_kv_heads=heads,
            head_dim=self.index_dim,
            rotary_dim=self.index_rotary_dim or min(rotary, self.index_dim),
            scores="token_max",
        )
