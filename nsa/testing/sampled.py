"""fp64 values of sampled rows: the correctness gate at lengths too large for the reference.

:func:`sampled_values` computes results of sampled queries from all keys that they see, and
gradients of sampled keys from all queries that see them. Memory is linear in the sequence length,
with temporaries of at most 1 GiB.

With ``dtype`` fp64 the values are the oracle of the error budget. With other dtypes they are its
baseline, with the rounding of a plain kernel: products are summed in fp32; attention weights, their
gradients and all results are rounded to ``dtype``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from nsa.config import BRANCHES, NSAConfig
from nsa.ops._masked_attention import accumulate_dtype, grouped_scores
from nsa.ops._packed import compressed_cu_seqlens, locate, query_positions
from nsa.ops._sequences import Sequences
from nsa.ops.combination import combine_reference
from nsa.ops.compression.reference import (
    PhiWeights,
    compress_reference,
    compressed_positions,
    gather_blocks,
)
from nsa.ops.selection.reference import (
    choose_blocks,
    coarse_keys,
    kept_coarse,
    ranked_coarse,
    rounded_for_scores,
    spread,
)
from nsa.rope import Rope, apply_rope
from nsa.testing.budget import Budget, assert_within_budget

# Maximum elements of a temporary tensor of attention.
PART_ELEMENTS = 2**27
# Selections may differ in blocks with a score within this relative distance of the n-th best.
BOUND = 1e-5

# Rows and their values, by name of the result.
Values = dict[str, tuple[Tensor, Tensor]]


class Sample(NamedTuple):
    """Sampled rows, and the offsets of the sequences.

    Attributes:
        queries: int64, packed query rows of the results.
        keys: int64, packed tokens (rows of ``k`` and ``v`` of a branch) with gradients.
        cu_q: int32 ``[B + 1]``, offsets of the queries.
        cu_k: int32 ``[B + 1]``, offsets of the key tokens.
    """

    queries: Tensor
    keys: Tensor
    cu_q: Tensor
    cu_k: Tensor


class Phi(NamedTuple):
    """Parameters of the compression of raw keys and values.

    Attributes:
        k: parameters for keys; None for phi ``mean``.
        v: parameters for values.
        rope: rotates compressed keys; None for no rotation.
    """

    k: PhiWeights | None = None
    v: PhiWeights | None = None
    rope: Rope | None = None


def sampled_values(
    operator: str,
    x: Mapping[str, Tensor],
    sample: Sample,
    config: NSAConfig,
    dtype: torch.dtype,
    phi: Phi | None = None,
    scale: float | None = None,
) -> Values:
    """Compute the results of an operator at sampled rows in ``dtype``.

    Args:
        operator: a branch (``cmp``, ``slc``, ``win``), ``compress``, or ``attention`` for whole
            attention.
        x: packed inputs in their stored dtype: for a branch ``q``, ``k``, ``v``, and for ``slc``
            ``block_indices``; for ``compress`` ``x``; for ``attention`` the fields of
            :class:`nsa.testing.PackedInputs`, ``block_indices`` with the selected branch, and
            ``q_cmp`` if there is one. ``dout`` is the gradient of the output; without it no
            gradients are computed.
        sample: sampled rows; for ``compress`` the queries are compressed rows.
        config: the sparse pattern.
        dtype: dtype of the computation.
        phi: compression for ``attention`` and ``compress``, which only uses ``k``.
        scale: factor on the scores; None means ``D ** -0.5``.

    Returns:
        ``out`` (``y`` for ``compress``), ``lse`` for a branch, and gradients, named ``d`` plus the
        name of the input. Gradients of phi's parameters are whole tensors, which are correct only
        if all tokens are sampled.
    """
    phi = phi or Phi()
    if operator == "compress":
        y, leaves = _compress(x["x"], phi.k, phi.rope, config, sample.cu_k, dtype)
        found: Values = {"y": (sample.queries, y.detach()[sample.queries])}
        if "dout" in x:
            found |= _raw_gradients(y, leaves, x["dout"][: len(y)], sample.keys, "dx", "d")
        return found
    scale = config.head_dim**-0.5 if scale is None else scale
    if operator == "attention":
        return _attention(x, sample, config, dtype, phi, scale)
    return _Branch(operator, x, sample, config, dtype, scale).values()


# --- Branches
def _parts(rows: Tensor, cu_q: list[int], size: int) -> Iterator[tuple[int, Tensor]]:
    """Yield a sequence and indices of at most ``size`` of its queries in ``rows``."""
    sequence_of = torch.bucketize(rows, torch.tensor(cu_q[1:], device=rows.device), right=True)
    for sequence in sequence_of.unique().tolist():
        for part in (sequence_of == sequence).nonzero()[:, 0].split(max(size, 1)):
            yield sequence, part


class _Branch:
    """Softmax attention over the keys of one branch; ``gate`` ``[T, Hq]`` scales its gradient."""

    def __init__(
        self,
        name: str,
        x: Mapping[str, Tensor],
        sample: Sample,
        config: NSAConfig,
        dtype: torch.dtype,
        scale: float,
        gate: Tensor | None = None,
    ) -> None:
        self.name, self.x, self.sample, self.config = name, x, sample, config
        self.dtype, self.scale, self.gate = dtype, scale, gate
        self.compute = torch.promote_types(dtype, torch.float32)
        self.k, self.v = (x[kind].to(self.compute) for kind in "kv")
        self.positions = query_positions(x["q"].shape[0], sample.cu_q, sample.cu_k)
        cu_key = compressed_cu_seqlens(sample.cu_k, config) if name == "cmp" else sample.cu_k
        self.cu_q, self.cu_key = sample.cu_q.tolist(), cu_key.tolist()
        self.longest = max((b - a for a, b in pairwise(self.cu_key)), default=0)

    @torch.no_grad()
    def values(self) -> Values:
        """Results of the sampled queries, and gradients of the sampled keys."""
        queries, keys = self.sample.queries, self.sample.keys
        names = ("out", "lse", "dq")[: 3 if "dout" in self.x else 2]
        found = self.run(queries, keys[:0])
        values = {name: (queries, found[name]) for name in names}
        if "dout" in self.x:
            found = self.run(self.seeing(keys), keys)
            values |= {name: (keys, found[name]) for name in ("dk", "dv")}
        return values

    def visible(self, rows: Tensor, keys: Tensor, sequence: int) -> Tensor:
        """Visibility mask of queries and keys of one sequence, bool ``[R, Hkv or 1, m]``."""
        t, config = self.positions[rows][:, None], self.config
        if self.name == "cmp":
            end = keys * config.compress_stride + config.compress_block_size - 1
            return (end <= t)[:, None]
        if self.name == "win":
            return ((keys <= t) & (keys > t - config.window_size))[:, None]
        ids = self.x["block_indices"][rows].long()
        ids = torch.where(ids <= t[..., None] // config.block_size, ids, -1)
        num_blocks = -(-(self.cu_key[sequence + 1] - self.cu_key[sequence]) // config.block_size)
        return _marked(ids, num_blocks)[..., keys // config.block_size] & (keys <= t)[:, None]

    def seeing(self, keys: Tensor) -> Tensor:
        """Query rows that see at least one of the packed keys."""
        rows = self.x["dout"].flatten(1).any(1).nonzero()[:, 0]
        found = [rows[:0]]
        # Size of the mask: a bool for each key and each block of at least 16 tokens.
        size = PART_ELEMENTS // (self.k.shape[1] * (len(keys) + self.longest // 16 + 1))
        for sequence, part in _parts(rows, self.cu_q, size):
            first, end = self.cu_key[sequence : sequence + 2]
            inside = keys[(keys >= first) & (keys < end)] - first
            seen = self.visible(rows[part], inside, sequence).flatten(1).any(1)
            found.append(rows[part][seen])
        return torch.cat(found)

    def run(self, rows: Tensor, keys: Tensor) -> dict[str, Tensor]:
        """Results of queries, and their contributions to the gradients of packed keys."""
        (heads, dim), value_dim = self.x["q"].shape[1:], self.v.shape[-1]
        out = rows.new_zeros(len(rows), heads, value_dim, dtype=self.dtype)
        dq = rows.new_zeros(len(rows), heads, dim, dtype=self.dtype)
        lse = rows.new_full((len(rows), heads), -torch.inf, dtype=self.compute)
        dk, dv = (x.new_zeros(len(keys), *x.shape[1:]) for x in (self.k, self.v))
        size = PART_ELEMENTS // (max(self.longest, 1) * heads)
        for sequence, part in _parts(rows, self.cu_q, size):
            first = self.cu_key[sequence]
            t = self.positions[rows[part]]
            start, stop = 0, int(t.max()) + 1
            if self.name == "cmp":
                stop = (stop - self.config.compress_block_size) // self.config.compress_stride + 1
            if self.name == "win":
                start = max(int(t.min()) - self.config.window_size + 1, 0)
            if stop <= start:
                continue
            span = torch.arange(start, stop, device=rows.device)
            visible = self.visible(rows[part], span, sequence)
            k, v = (x[first + start : first + stop] for x in (self.k, self.v))
            q, weights, out[part], lse[part] = self.forward(rows[part], k, v, visible)
            if "dout" not in self.x:
                continue
            dout = self.gradient(rows[part])
            delta = (out[part].to(self.compute).unflatten(1, dout.shape[1:3]) * dout).sum(-1)
            ds = weights * (torch.einsum("rhgd,khd->rhgk", dout, v) - delta[..., None])
            weights, ds = (y.to(self.dtype).to(self.compute) for y in (weights, ds))
            rows_dq = torch.einsum("rhgk,khd->rhgd", ds, k) * self.scale
            dq[part] = rows_dq.flatten(1, 2).to(self.dtype)
            mine = ((keys >= first + start) & (keys < first + stop)).nonzero()[:, 0]
            column = keys[mine] - first - start
            dv[mine] += torch.einsum("rhgm,rhgd->mhd", weights[..., column], dout)
            dk[mine] += torch.einsum("rhgm,rhgd->mhd", ds[..., column], q) * self.scale
        dk, dv = dk.to(self.dtype), dv.to(self.dtype)
        return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}

    def forward(
        self, rows: Tensor, k: Tensor, v: Tensor, visible: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Grouped queries and attention weights ``[R, Hkv, G, ...]``, out, and lse."""
        q = self.x["q"][rows].to(self.compute).unflatten(1, (k.shape[1], -1))
        scores = torch.einsum("rhgd,khd->rhgk", q, k) * self.scale
        scores = scores.masked_fill(~visible[:, :, None], -torch.inf)
        row_max = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(self.compute).min)
        weights = torch.exp(scores - row_max)
        total = weights.sum(-1, keepdim=True)
        out = torch.einsum("rhgk,khd->rhgd", weights.to(self.dtype).to(self.compute), v)
        lse = (row_max + total.log()).flatten(1)
        total = torch.where(total > 0, total, 1.0)
        return q, weights / total, (out / total).flatten(1, 2).to(self.dtype), lse

    def gradient(self, rows: Tensor) -> Tensor:
        """Gradient of the branch's output, ``[R, Hkv, G, Dv]``."""
        dout = self.x["dout"][rows].to(self.compute)
        if self.gate is not None:
            dout = (dout * self.gate[rows, :, None].to(self.compute)).to(self.dtype)
        return dout.to(self.dtype).to(self.compute).unflatten(1, (self.k.shape[1], -1))


# --- Compression
def _compress(
    raw: Tensor,
    weights: PhiWeights | None,
    rope: Rope | None,
    config: NSAConfig,
    cu_seqlens: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compressed rows ``[C, Hkv, D]`` by the reference, and leaves: tokens ("") and parameters."""
    # Weighted sums use parameters in their stored dtype, matrix products in that of the tokens.
    stored = config.phi == "linear" and dtype != torch.float64
    leaves = {
        name: w.detach().to(w.dtype if stored else dtype).requires_grad_()
        for name, w in ({} if weights is None else vars(weights)).items()
        if w is not None
    }
    weights = PhiWeights(**leaves) if leaves else None
    # Values rounded to `dtype`, stored wider: gradients from several blocks are summed in it.
    leaf = raw.detach().to(dtype)
    leaf = leaf.to(accumulate_dtype(leaf)).requires_grad_()
    with torch.enable_grad():
        if config.phi == "mlp" and dtype in (torch.float16, torch.bfloat16):
            assert weights is not None
            y = _plain_mlp(gather_blocks(leaf, cu_seqlens, config)[0].to(dtype), weights)
        else:
            y = compress_reference(leaf, weights, config, cu_seqlens)[0].to(dtype)
        if rope is not None and config.compress_rope != "none":
            y = apply_rope(y, compressed_positions(config, cu_seqlens, y.shape[0]), rope)
        y = y[: int(compressed_cu_seqlens(cu_seqlens, config)[-1])]
    return y, {"": leaf, **leaves}


def _plain_mlp(blocks: Tensor, weights: PhiWeights) -> Tensor:
    """Phi ``mlp`` of blocks ``[C, l, Hkv, D]`` in their dtype, each product rounded separately."""
    assert weights.position is not None and weights.w1 is not None and weights.w2 is not None
    placed = blocks.transpose(1, 2) + weights.position
    hidden = torch.einsum("che,heo->cho", placed.flatten(2), weights.w1)
    out = torch.einsum("cho,hod->chd", silu(hidden), weights.w2)
    return blocks.float().mean(1).to(blocks.dtype) + out


def _raw_gradients(
    y: Tensor, leaves: dict[str, Tensor], dy: Tensor, tokens: Tensor, name: str, prefix: str
) -> Values:
    """Gradients of sampled tokens (``name``) and whole parameters, from those of rows ``y``."""
    dx, *rest = torch.autograd.grad(y, list(leaves.values()), dy.to(y.dtype))
    found = {name: (tokens, dx[tokens].to(y.dtype))}
    for parameter, gradient in zip(list(leaves)[1:], rest, strict=True):
        rows = torch.arange(len(gradient), device=gradient.device)
        found[prefix + parameter] = rows, gradient
    return found


# --- The whole
def _attention(
    x: Mapping[str, Tensor],
    sample: Sample,
    config: NSAConfig,
    dtype: torch.dtype,
    phi: Phi,
    scale: float,
) -> Values:
    """Whole attention with given block indices."""
    queries, tokens = sample.queries, sample.keys
    found: Values = {}
    results = dict[str, Values]()
    for name in config.branches:
        given = {kind: x[f"{kind}_{name}"] for kind in "kv" if name != "cmp"}
        compressed = {}
        if name == "cmp":
            for kind, weights, rope in (("k", phi.k, phi.rope), ("v", phi.v, None)):
                raw = x[f"{kind}_cmp_raw"]
                compressed[kind] = _compress(raw, weights, rope, config, sample.cu_k, dtype)
                given[kind] = compressed[kind][0].detach()
            sample = sample._replace(keys=_blocks_of(tokens, config, sample.cu_k))
        given["q"] = x.get("q_cmp", x["q"]) if name == "cmp" else x["q"]
        given |= {key: x[key] for key in ("block_indices", "dout") if key in x}
        gate = x["gates"][..., BRANCHES.index(name)]
        results[name] = values = _Branch(name, given, sample, config, dtype, scale, gate).values()
        sample = sample._replace(keys=tokens)
        for kind in "kv" if "dout" in x else "":
            rows, gradient = values[f"d{kind}"]
            if name != "cmp":
                found[f"d{kind}_{name}"] = rows, gradient
                continue
            y, leaves = compressed[kind]
            dy = torch.zeros_like(y).index_copy(0, rows, gradient)
            names = f"d{kind}_cmp_raw", f"dphi_{kind}."
            found |= _raw_gradients(y, leaves, dy, tokens, *names)
    # The gradient of a gate is the dot product of dout and the branch's output.
    compute = torch.promote_types(dtype, torch.float32)
    outs = [results[name]["out"][1].to(compute) if name in results else None for name in BRANCHES]
    gates = x["gates"][queries].to(dtype).to(compute).requires_grad_()
    out = combine_reference((outs[0], outs[1], outs[2]), gates)
    found["out"] = queries, out.detach().to(dtype)
    if "dout" in x:
        dout = x["dout"][queries].to(dtype).to(compute)
        found["dgates"] = queries, torch.autograd.grad(out, gates, dout)[0].to(dtype)
        dq = {name: values["dq"][1] for name, values in results.items()}
        if "q_cmp" in x and "cmp" in dq:
            found["dq_cmp"] = queries, dq.pop("cmp")
        found["dq"] = queries, sum(dq.values(), torch.zeros((), dtype=dtype, device=out.device))
    return found


def _blocks_of(tokens: Tensor, config: NSAConfig, cu_seqlens: Tensor) -> Tensor:
    """Packed compressed rows whose blocks contain at least one of the tokens."""
    cu_cmp = compressed_cu_seqlens(cu_seqlens, config).long()
    sequence, inside, _ = (y[tokens, None] for y in locate(int(cu_seqlens[-1]), cu_seqlens))
    back = torch.arange(config.compress_block_size // config.compress_stride, device=tokens.device)
    block = cu_cmp[sequence] + inside // config.compress_stride - back
    return block[(block >= cu_cmp[sequence]) & (block < cu_cmp[sequence + 1])].unique()


# --- Rows and comparison
def sample_rows(cu_seqlens: Tensor, count: int, seed: int = 0) -> Tensor:
    """Sample packed rows: the ends of some sequences, and random rows.

    Args:
        cu_seqlens: ``[B + 1]``; its contents are read.
        count: maximum number of rows, at least 2.
        seed: seed of the random rows.

    Returns:
        int64 on the device of ``cu_seqlens``, ascending and unique; empty if there are no rows.
    """
    offsets = cu_seqlens.long().cpu()
    edges = torch.stack((offsets[:-1], offsets[1:] - 1), 1)[offsets[1:] > offsets[:-1]]
    some = torch.linspace(0, len(edges) - 1, min(len(edges), max(count // 4, 1))).long()
    edges = edges[some].flatten()
    generator = torch.Generator().manual_seed(seed)
    most = max(count - len(edges), 0) if len(edges) else 0
    random = torch.randint(int(offsets[-1]) or 1, (most,), generator=generator)
    return torch.cat((edges, random)).unique().to(cu_seqlens.device)


def check_sampled(
    values: Callable[[torch.dtype], Values],
    actual: Mapping[str, Tensor],
    dtype: torch.dtype,
    name: str,
    factor: float = 2.0,
) -> dict[str, Budget]:
    """Fail unless the sampled rows of ``actual`` are within the error budget.

    Args:
        values: :func:`sampled_values` without its dtype.
        actual: whole tensors under test by name: all or some of the names in ``values``.
        dtype: the tested dtype.
        name: name of the comparison, for messages.
        factor: allowed error as a multiple of the baseline's.

    Returns:
        The errors of ``actual`` by name.

    Raises:
        AssertionError: an error is above the budget, a result is unknown, or lse is infinite in
            other rows than expected.
    """
    found: dict[str, Budget] = {}
    exact, plain = values(torch.float64), values(dtype)
    for key, whole in actual.items():
        assert key in exact, f"{name} {key}: nothing to compare with"
        (rows, oracle), (_, baseline) = exact[key], plain[key]
        x = whole[rows]
        if key == "lse":
            empty = oracle.isinf()
            right = torch.equal(x.isinf() & (x < 0), empty)
            assert right, f"{name} lse: -inf where keys are visible, or finite where none is"
            x, baseline, oracle = (y[~empty][:, None] for y in (x, baseline, oracle))
        found[key] = assert_within_budget(x, baseline, oracle.double(), f"{name} {key}", factor)
    return found


# --- Selection
def assert_legal(block_indices: Tensor, positions: Tensor, config: NSAConfig) -> None:
    """Fail unless indices ascend within ``0 .. t // l'``, with -1 only at the end.

    Args:
        block_indices: ``[..., R, Hkv, n]``.
        positions: positions of the queries, ``[R]``.
        config: the sparse pattern.
    """
    before, after = block_indices[..., :-1], block_indices[..., 1:]
    follows = torch.where(after < 0, after == -1, (after > before) & (before >= 0))
    assert bool(follows.all()), "block_indices: not ascending with -1 at the end"
    current = (positions // config.block_size)[:, None, None]
    inside = (block_indices >= -1) & (block_indices <= current)
    assert bool(inside.all()), "block_indices: a block outside 0 .. t // l'"


class Agreement(NamedTuple):
    """Comparison of a selection with fp64; a row is a query and KV head.

    Attributes:
        rows: number of compared rows.
        near: number of rows that differ only in blocks whose fp64 score is within ``BOUND`` of the
            n-th best.
        against: number of rows that differ in other blocks.
    """

    rows: int
    near: int
    against: int


class SampledSelection(NamedTuple):
    """fp64 selection of sampled queries; M is the number of blocks of the longest sequence.

    Attributes:
        config: the sparse pattern.
        positions: positions of the queries, ``[R]``.
        indices: int32 ``[R, Hkv, n]``.
        must, may: bool ``[R, Hkv, M]``, blocks that another implementation must select and may
            select. They differ in rows that depend on rounding.
    """

    config: NSAConfig
    positions: Tensor
    indices: Tensor
    must: Tensor
    may: Tensor

    @property
    def clear(self) -> Tensor:
        """Rows that do not depend on rounding, bool ``[R, Hkv]``."""
        return (self.must == self.may).all(-1)

    def agreement(self, block_indices: Tensor) -> Agreement:
        """Compare with the same rows of another selection, ``[R, Hkv, n]``.

        Raises:
            AssertionError: the indices are not valid, see :func:`assert_legal`.
        """
        assert_legal(block_indices, self.positions, self.config)
        num_blocks = self.must.shape[-1]
        found, exact = (_marked(ids.long(), num_blocks) for ids in (block_indices, self.indices))
        wrong = ((found & ~self.may) | (self.must & ~found)).any(-1)
        near = (found != exact).any(-1) & ~wrong
        return Agreement(wrong.numel(), int(near.sum()), int(wrong.sum()))


@torch.no_grad()
def sampled_selection(
    q: Tensor, k_cmp: Tensor, sample: Sample, config: NSAConfig, scale: float | None = None
) -> SampledSelection:
    """Select blocks in fp64 for sampled queries.

    Args:
        q: packed ``[T, Hq, D]``, as stored: two implementations must see the same values.
        k_cmp: packed ``[C, Hkv, D]``.
        sample: the queries.
        config: the sparse pattern, including options of the selection.
        scale: factor on the scores; None means ``D ** -0.5``.
    """
    rows, cu_k = sample.queries, sample.cu_k.tolist()
    cu_cmp = compressed_cu_seqlens(sample.cu_k, config).tolist()
    longest = max((b - a for a, b in pairwise(cu_k)), default=0)
    num_blocks = max(-(-longest // config.block_size), 1)
    positions = query_positions(q.shape[0], sample.cu_q, sample.cu_k)[rows]
    shape = (rows.numel(), k_cmp.shape[1])
    indices = rows.new_zeros(*shape, config.num_selected_blocks, dtype=torch.int32)
    must, may = (rows.new_zeros(*shape, num_blocks, dtype=torch.bool) for _ in range(2))
    size = PART_ELEMENTS // (q.shape[1] * max(longest // config.compress_stride, 1))
    scale = config.head_dim**-0.5 if scale is None else scale
    for sequence, part in _parts(rows, sample.cu_q.tolist(), size):
        keys = k_cmp[slice(*cu_cmp[sequence : sequence + 2])]
        scores, kept, unsure = _scores(
            q[rows[part]], keys, positions[part], num_blocks, config, scale
        )
        indices[part] = choose_blocks(scores, positions[part], config, kept)
        selected = _marked(indices[part].long(), num_blocks)
        block = torch.arange(num_blocks, device=q.device)
        current = (positions[part] // config.block_size)[:, None, None]
        free = (block >= config.num_init_blocks) & (block <= current - config.num_local_blocks)
        nth_best = scores.masked_fill(~(selected & free), torch.inf).amin(-1, keepdim=True)
        close = free & ((scores - nth_best).abs() <= BOUND * nth_best) & nth_best.isfinite()
        if kept is not None:
            inside = block * config.block_size // (config.coarse_block_size or 1)
            close &= kept[..., inside.clamp(max=kept.shape[-1] - 1)]
        # The n-th best block is always near itself: it is ambiguous only if another block is.
        close &= (close & ~selected).any(-1, keepdim=True)
        must[part] = selected & ~close & ~unsure
        may[part] = selected | close | unsure
    return SampledSelection(config, positions, indices, must, may)


def _scores(
    q: Tensor, keys: Tensor, positions: Tensor, num_blocks: int, config: NSAConfig, scale: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Block scores ``[R, Hkv, M]`` for queries of one sequence, and the result of the first stage.

    The first stage returns bool ``[R, Hkv, coarse blocks]`` or None, and bool ``[R, Hkv, 1]``,
    whether it depends on rounding.
    """

    def logits(q: Tensor, k: Tensor) -> Tensor:  # [Hkv, G, R, C]
        return grouped_scores(q.double()[None], k.double()[None], scale)[0]

    row = torch.arange(len(keys), device=q.device)
    visible = row * config.compress_stride + config.compress_block_size - 1 <= positions[:, None]
    exact = logits(q, keys)
    lse = exact.masked_fill(~visible, -torch.inf).logsumexp(-1, keepdim=True)
    if config.score_precision != "exact":
        exact = logits(rounded_for_scores(q, config), rounded_for_scores(keys, config))
    group = torch.where(visible, torch.exp(exact - lse), 0.0).sum(1).transpose(0, 1)
    scores = spread(group, num_blocks, config)
    unsure = scores.new_zeros(*scores.shape[:2], 1, dtype=torch.bool)
    if config.coarse_block_size is None:
        return scores, None, unsure
    # Offsets of as many tokens as the keys of whole coarse blocks need.
    num_keys = (len(keys) - 1) * config.compress_stride + config.compress_block_size
    cu_k = torch.tensor([0, num_keys], dtype=torch.int32, device=q.device)
    means, _ = coarse_keys(keys, config, Sequences((cu_k, cu_k), 1, 0, 0, q.device))
    coarse = torch.exp(logits(q, means) - lse).sum(1).transpose(0, 1)
    num_coarse = -(-num_blocks * config.block_size // config.coarse_block_size)
    coarse = pad(coarse, (0, num_coarse - coarse.shape[-1]))
    ranked = ranked_coarse(coarse, positions, config)
    kept = kept_coarse(ranked, config)
    lowest = ranked.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)
    unsure = ranked.masked_fill(kept, -torch.inf).amax(-1, keepdim=True) >= lowest * (1 - BOUND)
    return scores, kept, unsure


def _marked(ids: Tensor, num_blocks: int) -> Tensor:
    """Convert block indices ``[R, Hkv, n]`` to a mask, bool ``[R, Hkv, M]``."""
    marked = ids.new_zeros(*ids.shape[:2], num_blocks + 1, dtype=torch.bool)
    return marked.scatter(-1, torch.where(ids < 0, num_blocks, ids), True)[..., :num_blocks]
