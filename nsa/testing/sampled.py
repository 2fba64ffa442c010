"""fp64 values of sampled rows: the correctness gate at lengths too large for the reference.

:func:`sampled_values` computes results of sampled queries from all keys that they see, and
gradients of sampled keys from all queries that see them. Memory is linear in the sequence length,
with temporaries of at most 1 GiB.

With ``dtype`` fp64 the values are the oracle of the error budget. With other dtypes they are its
baseline, with the rounding of a plain kernel: products are summed in fp32; attention weights, their
gradients and all results are rounded to ``dtype``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from nsa.config import BRANCHES, NSAConfig
from nsa.ops._masked_attention import accumulate_dtype, grouped_scores
from nsa.ops._operator import Call
from nsa.ops._packed import compressed_cu_seqlens, locate, num_compressed, query_positions
from nsa.ops._sequences import Sequences
from nsa.ops.combination import combine_reference
from nsa.ops.compression.reference import (
    PhiWeights,
    compress_reference,
    compressed_positions,
    gather_blocks,
)
from nsa.ops.selection.reference import (
    SelectionInputs,
    block_scores,
    choose_blocks,
    coarse_keys,
    kept_coarse,
    random_scores,
    ranked_coarse,
    token_max_scores,
)
from nsa.rope import Rope, apply_rope
from nsa.testing.budget import Budget, assert_within_budget

# Maximum elements of a temporary tensor of attention.
PART_ELEMENTS = 2**27
# Selections may differ in blocks with a score within this relative distance of the n-th best.
BOUND = 1e-5
# With `token_max` a score is exp(m - L), so its relative error is the absolute error of m - L. Each
# of m and L is taken to carry 8 roundings of its magnitude: 2**-24 in fp32, and 2**-16 in products
# of e4m3, whose sum keeps about 13 bits on the tensor cores of Hopper.
ROUNDING = {"exact": 2.0**-20, "fp8": 2.0**-12}

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
    if operator == "attention":
        return _attention(x, sample, config, dtype, phi)
    values = _branch(operator, x, sample, config, dtype)
    return values if "dout" in x else {name: values[name] for name in ("out", "lse")}


# --- Branches
def _parts(rows: Tensor, cu_q: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    """Yield a sequence and indices of at most ``size`` of its queries in ``rows``."""
    sequence_of = torch.bucketize(rows, cu_q[1:].long(), right=True)
    for sequence in sequence_of.unique().tolist():
        for part in (sequence_of == sequence).nonzero()[:, 0].split(max(size, 1)):
            yield sequence, part


def _visible(
    name: str, x: Mapping[str, Tensor], rows: Tensor, t: Tensor, keys: Tensor, config: NSAConfig
) -> Tensor:
    """Visibility of keys of a sequence for queries at ``t [R, 1]``, bool ``[R, Hkv or 1, m]``."""
    if name == "cmp":
        return (keys * config.compress_stride + config.compress_block_size - 1 <= t)[:, None]
    if name == "win":
        return ((keys <= t) & (keys > t - config.window_size))[:, None]
    ids = x["block_indices"][rows][..., None]  # [R, Hkv, n, 1]
    return (ids == keys // config.block_size).any(2) & (keys <= t)[:, None]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Plain attention of scaled queries ``[R, Hkv, G, D]``: weights, output, and lse."""
    scores = torch.einsum("rhgd,khd->rhgk", q, k).masked_fill(~visible[:, :, None], -torch.inf)
    row_max = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).min)
    weights = torch.exp(scores - row_max)
    total = weights.sum(-1, keepdim=True)
    lse = (row_max + total.log()).flatten(1)
    total = torch.where(total > 0, total, 1.0)
    out = torch.einsum("rhgk,khd->rhgd", weights.to(dtype).to(q.dtype), v) / total
    return weights / total, out.to(dtype).to(q.dtype), lse


@torch.no_grad()
def _branch(
    name: str,
    x: Mapping[str, Tensor],
    sample: Sample,
    config: NSAConfig,
    dtype: torch.dtype,
    gate: Tensor | None = None,
) -> Values:
    """Results of softmax attention over the keys of one branch at sampled queries and keys.

    ``gate`` ``[T, Hq]`` scales the gradient of the output.
    """
    compute, keys = torch.promote_types(dtype, torch.float32), sample.keys
    scale = config.head_dim**-0.5
    k, v = (x[kind].to(compute) for kind in "kv")
    positions = query_positions(x["q"].shape[0], sample.cu_q, sample.cu_k)[:, None]
    cu_key = compressed_cu_seqlens(sample.cu_k, config) if name == "cmp" else sample.cu_k
    edges, kv_heads = cu_key.tolist(), k.shape[1]
    seeing = [sample.queries]
    if "dout" in x:  # and all queries that see a sampled key
        rows = x["dout"].flatten(1).any(1).nonzero()[:, 0]
        size = PART_ELEMENTS // (kv_heads * config.num_selected_blocks * (len(keys) + 1))
        for sequence, part in _parts(rows, sample.cu_q, size):
            first, end = edges[sequence : sequence + 2]
            inside, some = keys[(keys >= first) & (keys < end)] - first, rows[part]
            seen = _visible(name, x, some, positions[some], inside, config)
            seeing.append(some[seen.flatten(1).any(1)])
    rows = torch.cat(seeing).unique()
    out = rows.new_zeros(len(rows), *x["q"].shape[1:-1], v.shape[-1], dtype=dtype)
    dq = rows.new_zeros(len(rows), *x["q"].shape[1:], dtype=dtype)
    lse = rows.new_full(out.shape[:2], -torch.inf, dtype=compute)
    dk, dv = (y.new_zeros(len(keys), *y.shape[1:]) for y in (k, v))
    longest = max((b - a for a, b in pairwise(edges)), default=0)
    size = PART_ELEMENTS // (max(longest, 1) * out.shape[1])
    for sequence, part in _parts(rows, sample.cu_q, size):
        (first, end), some = edges[sequence : sequence + 2], rows[part]
        if first == end:
            continue
        own = torch.arange(end - first, device=rows.device)
        visible = _visible(name, x, some, positions[some], own, config)
        q = x["q"][some].to(compute).unflatten(1, (kv_heads, -1)) * scale
        weights, own_out, lse[part] = _attend(q, k[first:end], v[first:end], visible, dtype)
        out[part] = own_out.flatten(1, 2).to(dtype)
        if "dout" in x:
            dout = x["dout"][some].to(compute)
            dout = dout if gate is None else dout * gate[some, :, None].to(compute)
            dout = dout.to(dtype).to(compute).unflatten(1, (kv_heads, -1))
            dp = torch.einsum("rhgd,khd->rhgk", dout, v[first:end])
            ds = weights * (dp - (own_out * dout).sum(-1, keepdim=True))
            weights, ds = (y.to(dtype).to(compute) for y in (weights, ds))
            own_dq = torch.einsum("rhgk,khd->rhgd", ds, k[first:end]) * scale
            dq[part] = own_dq.flatten(1, 2).to(dtype)
            mine = ((keys >= first) & (keys < end)).nonzero()[:, 0]
            column = keys[mine] - first
            dv[mine] += torch.einsum("rhgm,rhgd->mhd", weights[..., column], dout)
            dk[mine] += torch.einsum("rhgm,rhgd->mhd", ds[..., column], q)
    at = torch.searchsorted(rows, sample.queries)
    values = {name: (sample.queries, y[at]) for name, y in (("out", out), ("lse", lse), ("dq", dq))}
    return values | {"dk": (keys, dk.to(dtype)), "dv": (keys, dv.to(dtype))}


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
        results[name] = values = _branch(name, given, sample, config, dtype, gate)
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
        near: number of rows that differ only in blocks whose fp64 score equals the n-th best up to
            rounding, see ``BOUND``.
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
def sampled_selection(q: Tensor, k: Tensor, sample: Sample, config: NSAConfig) -> SampledSelection:
    """Select blocks in fp64 for sampled queries.

    Args:
        q: packed ``[T, Hq, D]``, as stored: two implementations must see the same values.
        k: packed compressed keys ``[C, Hkv, D]``; with other scores those of the selected branch or
            of the index, ``[S, Hkv, D]``.
        sample: the queries.
        config: the sparse pattern, including options of the selection.
    """
    by_token = config.scores != "compressed"
    positions = query_positions(q.shape[0], sample.cu_q, sample.cu_k)[sample.queries]
    first = sample.cu_k if by_token else compressed_cu_seqlens(sample.cu_k, config)
    num_keys = positions + 1 if by_token else num_compressed(positions + 1, config)
    starts = first.tolist()
    shape = (len(positions), config.num_kv_heads)
    num_blocks = int(positions.amax()) // config.block_size + 1 if len(positions) else 1
    indices = positions.new_zeros(*shape, config.num_selected_blocks, dtype=torch.int32)
    must, may = (positions.new_zeros(*shape, num_blocks, dtype=torch.bool) for _ in range(2))
    for sequence, part in _parts(sample.queries, sample.cu_q, 1):
        keys = k[starts[sequence] :][: int(num_keys[part])]
        row = q[sample.queries[part]].double(), keys
        found = _select(*row, positions[part], config)
        indices[part] = found[0]
        for whole, mask in zip((must, may), found[1:], strict=True):
            whole[part, :, : mask.shape[-1]] = mask
    return SampledSelection(config, positions, indices, must, may)


def _select(
    q: Tensor, keys: Tensor, position: Tensor, config: NSAConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Selection of one query ``[1, Hq, D]``: indices, and blocks that must and may be selected.

    Keys have their stored dtype. So have their means, by which all implementations rank coarse
    blocks: rounding them changes scores by more than ``BOUND``.
    """
    length, stored, keys = int(position) + 1, keys, keys.double()
    scale = config.scoring.head_dim**-0.5
    sequences = Sequences(None, 1, 1, length, q.device)
    products = grouped_scores(q[None], keys[None], scale)  # [1, Hkv, G, keys]
    lse = products.logsumexp(-1).view(1, -1)  # [1, Hq]
    bound, least = products.new_tensor(BOUND), 0.0
    if config.scoring.scores == "token_max":
        inputs, call = SelectionInputs(q, keys, None), Call(config, sequences, scale)
        scores = token_max_scores(inputs, call)
        forced = (config.num_init_blocks + config.num_local_blocks) * config.block_size
        # An upper bound on |m| and |L|. Smaller scores than fp32 has are equal, too.
        largest = products.abs().amax((2, 3))[..., None] + math.log(forced)  # [1, Hkv, 1]
        bound = (ROUNDING[config.score_precision] * largest).clamp(min=BOUND)
        least = config.scoring.group_size * torch.finfo(torch.float32).tiny
    elif config.scores == "random":
        scores = random_scores(position, keys.shape[1], -(-length // config.block_size))
    else:
        scores = block_scores(q, keys, lse, config, sequences, scale)
    scores = scores[..., : -(-length // config.block_size)]  # [1, Hkv, M]
    block, kept = torch.arange(scores.shape[-1], device=q.device), None
    unsure = torch.zeros_like(block[:1], dtype=torch.bool)
    free = (block >= config.num_init_blocks) & (block <= block[-1] - config.num_local_blocks)
    if config.coarse_block_size is not None:
        means, _ = coarse_keys(stored, config, sequences)
        group = grouped_scores(q[None], means[None].double(), scale)[0]  # [Hkv, G, coarse blocks]
        coarse = torch.exp(group - lse.view(*group.shape[:2], 1)).sum(1)[None]
        coarse = pad(coarse, (0, -(-length // config.coarse_block_size) - coarse.shape[-1]))
        ranked = ranked_coarse(coarse, position, config)
        kept = kept_coarse(ranked, config)
        lowest = ranked.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)
        unsure = ranked.masked_fill(kept, -torch.inf).amax(-1, keepdim=True) >= lowest * (1 - BOUND)
        free = free & kept[..., block * config.block_size // config.coarse_block_size]
    indices = choose_blocks(scores, position, config, kept)
    selected = _marked(indices.long(), len(block))
    nth_best = scores.masked_fill(~(selected & free), torch.inf).amin(-1, keepdim=True)
    close = (scores - nth_best).abs() <= bound * nth_best + least
    close = free & close & nth_best.isfinite()
    # The n-th best block is always near itself: it is ambiguous only if another block is.
    close = close & (close & ~selected).any(-1, keepdim=True)
    return indices, selected & ~close & ~unsure, selected | close | unsure


def _marked(ids: Tensor, num_blocks: int) -> Tensor:
    """Convert block indices ``[R, Hkv, n]`` to a mask, bool ``[R, Hkv, M]``."""
    marked = ids.new_zeros(*ids.shape[:2], num_blocks + 1, dtype=torch.bool)
    return marked.scatter(-1, torch.where(ids < 0, num_blocks, ids), True)[..., :num_blocks]
