"""Checks of each operator on one case, forward and backward, against fp64.

They run on any backend, device and dtype: on the references, on kernels in Triton's interpreter
with small cases, and on a GPU with large ones.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from nsa import (
    NSAConfig,
    PhiWeights,
    Rope,
    combine,
    compress,
    compressed_attention,
    native_sparse_attention,
    select_blocks,
    selected_attention,
    window_attention,
)
from nsa.config import BRANCHES
from nsa.ops._operator import Call
from nsa.ops._packed import compressed_cu_seqlens
from nsa.ops._sequences import Sequences
from nsa.ops.attention import AttentionResult, BranchInputs, run_attention
from nsa.ops.embedding import embed
from nsa.ops.projection import Columns, Gates, Heads, project
from nsa.ops.statistics import Statistics, add_statistics, new_statistics
from nsa.testing import PackedInputs, assert_within_budget, make_inputs
from nsa.testing.budget import CEILING
from nsa.testing.sampled import (
    Agreement,
    Phi,
    Sample,
    check_sampled,
    sampled_selection,
    sampled_values,
)
from tests.ops.cases import make_batch
from tests.ops.index_loss import check_index_loss
from tests.ops.whole import phi_parameters

# The selected branch with each of its algorithms.
ALGORITHMS = {"selected": "tiled", "gathered": "gathered"}
# Rows that may differ from fp64 within the agreement rule, and the share on GPUs with `token_max`
# of fp8, whose sums of products have few bits.
MAX_NEAR, MAX_NEAR_FP8 = 1e-3, 0.05


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of an operator.

    Attributes:
        config: the sparse pattern.
        lengths_k, lengths_q: tokens of each sequence; queries None for as many as keys.
        dtype: of everything.
        device: where it runs.
        dense: whether sequences, of equal lengths, are given as a dense batch.
        backend: the one under test.
        algorithm: of the selected branch.
        seed: of the inputs.
    """

    config: NSAConfig
    lengths_k: tuple[int, ...]
    lengths_q: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    dense: bool = False
    backend: str = "triton"
    algorithm: str = "auto"
    seed: int = 0

    def inputs(self) -> PackedInputs:
        lengths = self.lengths_k, self.lengths_q
        return make_inputs(
            self.config, *lengths, seed=self.seed, dtype=self.dtype, device=self.device
        )

    @property
    def queries(self) -> tuple[int, ...]:
        return self.lengths_k if self.lengths_q is None else self.lengths_q

    @property
    def factor(self) -> float:
        """How many times the baseline's error is allowed.

        In fp32 only sums are rounded, in another order than the baseline's; the worst of a few rows
        varies by more than 2 from order to order.
        """
        return 4.0 if self.dtype == torch.float32 else 2.0

    @property
    def most_near(self) -> float:
        """Share of the rows whose selection may differ from fp64 within rounding."""
        config = self.config.scoring
        by_token = config.scores == "token_max" and config.score_precision == "fp8"
        return MAX_NEAR_FP8 if by_token and self.device != "cpu" else MAX_NEAR

    def normal(self, *shape: int, seed: int = 1) -> Tensor:
        generator = torch.Generator(device=self.device).manual_seed(seed)
        return torch.randn(*shape, generator=generator, device=self.device).to(self.dtype)

    def block_indices(self, seed: int = 0) -> Tensor:
        """Unique ids in any order; about a quarter absent."""
        return (
            make_batch(self.config, self.lengths_k, self.lengths_q, seed)
            .block_indices()
            .to(self.device)
        )

    def shaped(self, x: Tensor) -> Tensor:
        """Packed tokens as the operator gets them."""
        if not self.dense:
            return x
        batch = len(self.lengths_k)
        return x.unflatten(0, (batch, x.shape[0] // batch if batch else 40))

    def flat(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1) if self.dense else x

    def offsets(self, x: PackedInputs) -> dict[str, Any]:
        given = {} if self.dense else cu(x)
        return {**given, "backend": self.backend}

    def sequences(self, x: PackedInputs) -> Sequences:
        """Sequences of as many queries as keys, or of fewer."""
        offsets = None if self.dense else (x.cu_seqlens_q, x.cu_seqlens_k)
        max_q, max_k = (max(lengths, default=0) for lengths in (self.queries, self.lengths_k))
        return Sequences(offsets, len(self.queries), max_q, max_k, x.q.device)


def cu(x: PackedInputs) -> dict[str, Any]:
    return {"cu_seqlens_q": x.cu_seqlens_q, "cu_seqlens_k": x.cu_seqlens_k}


def named_tensors(x: PackedInputs) -> dict[str, Tensor]:
    """Tensors that have one row for each token, by name."""
    names = [f.name for f in dataclasses.fields(x) if not f.name.startswith("cu_")]
    return {name: y for name in names if (y := getattr(x, name)) is not None}


def leaves_of(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def every(x: Tensor) -> Tensor:
    """All rows of ``x``."""
    return torch.arange(x.shape[0], device=x.device)


@dataclasses.dataclass
class Results:
    """Packed results and gradients of an operator by name, and what computes them in fp64.

    Attributes:
        operator: name in :func:`sampled_values`.
        inputs: of the oracle, the gradient of the output among them.
        num_keys: rows of keys that belong to a sequence.
        scored: queries and keys by which the whole selected its blocks.
    """

    case: Case
    operator: str
    inputs: dict[str, Tensor]
    x: PackedInputs
    of_queries: dict[str, Tensor]
    of_keys: dict[str, Tensor]
    num_keys: int
    of_weights: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    phi: Phi | None = None
    scored: tuple[Tensor, Tensor] | None = None

    @property
    def dout(self) -> Tensor:
        return self.inputs["dout"]

    def check(self, rows: Tensor | None = None, keys: Tensor | None = None) -> None:
        """Compare everything, or some ``rows`` and ``keys``, with fp64."""
        name, dtype, config = self.operator, self.case.dtype, self.case.config
        # Rows of compressed keys that no block owns have no gradient.
        for key, grad in self.of_keys.items():
            assert not bool(grad[self.num_keys :].any()), f"{name} {key}: rows that no block owns"
        actual = {**self.of_queries, **self.of_keys}
        if rows is None and keys is None:
            actual |= self.of_weights
        rows = every(self.dout) if rows is None else rows
        keys = torch.arange(self.num_keys, device=rows.device) if keys is None else keys
        sample = Sample(rows, keys, self.x.cu_seqlens_q, self.x.cu_seqlens_k)
        values = {
            d: sampled_values(name, self.inputs, sample, config, d, self.phi)
            for d in (dtype, torch.float64)
        }
        if name == "attention" and config.share_kv:
            for of_dtype, kind in itertools.product(values.values(), "kv"):
                (own, slc), (_, win) = of_dtype[f"d{kind}_slc"], of_dtype[f"d{kind}_win"]
                of_dtype[f"d{kind}_slc"] = own, slc + win
        exact = values[torch.float64]
        size = max(float(exact[key][1].norm()) for key in actual if key != "lse")
        # If no query sees two keys, dQ and dK are 0 but for rounding: no relative error is defined.
        zero = {
            key for key in actual if key != "lse" and float(exact[key][1].norm()) < 1e-12 * size
        }
        for key in zero:
            found = float(actual.pop(key)[exact[key][0]].norm())
            assert found <= CEILING[dtype] * size, f"{name} {key}: should vanish"
        check_sampled(values.__getitem__, actual, dtype, name, self.case.factor)
        if self.scored is not None:
            selected = sampled_selection(*self.scored, sample, config)
            agree(selected.agreement(self.inputs["block_indices"][rows]), self.case.most_near)


def run_branch(
    name: str,
    case: Case,
    x: PackedInputs | None = None,
    dout: Tensor | None = None,
    block_indices: Tensor | None = None,
) -> Results:
    """One of the operators of the branches."""
    x, config = x or case.inputs(), case.config
    function: Any
    ids, options, num_keys = [], case.offsets(x), x.k_win.shape[0]
    if name == "compressed":
        function, label = compressed_attention, "cmp"
        k, v = (compressed_rows(case, raw, x) for raw in (x.k_cmp_raw, x.v_cmp_raw))
        num_keys = int(compressed_cu_seqlens(x.cu_seqlens_k, config)[-1])
    elif name == "window":
        function, label, k, v = window_attention, "win", x.k_win, x.v_win
    else:
        function, label, k, v = selected_attention, "slc", x.k_slc, x.v_slc
        ids = [case.block_indices() if block_indices is None else block_indices]
        options["algorithm"] = ALGORITHMS.get(name, case.algorithm)
    leaves = leaves_of(x.q, k, v)
    q, *keys = leaves
    if name != "compressed":  # whose keys are packed always
        keys = [case.shaped(y) for y in keys]
    out, lse = function(case.shaped(q), *keys, *(case.shaped(y) for y in ids), config, **options)
    assert out is not None
    out, lse = case.flat(out), case.flat(lse)
    assert out.dtype == case.dtype
    assert lse.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
    dout = case.normal(*out.shape) if dout is None else dout
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    assert all(grad.dtype == case.dtype for grad in (dq, dk, dv))
    inputs = {"q": x.q, "k": k, "v": v, "dout": dout} | dict(
        zip(["block_indices"], ids, strict=False)
    )
    of_queries = {"out": out.detach(), "lse": lse, "dq": dq}
    return Results(case, label, inputs, x, of_queries, {"dk": dk, "dv": dv}, num_keys)


def compressed_rows(case: Case, raw: Tensor, x: PackedInputs) -> Tensor:
    """Compressed ``raw`` as `compress` packs it, by the reference.

    Rows that no block owns are NaN, since they must not be read.
    """
    config = dataclasses.replace(case.config, phi="mean")
    rows, cu_cmp = compress(raw, None, config, x.cu_seqlens_k, backend="reference")
    rows[int(cu_cmp[-1]) :] = torch.nan
    return rows


def scoring_keys(case: Case, x: PackedInputs) -> Tensor:
    """Keys by which :func:`select` scores blocks: compressed ones, or those of the tokens."""
    if case.config.scores == "compressed":
        return compressed_rows(case, x.k_cmp_raw, x)
    return x.k_slc if x.k_idx is None else x.k_idx


def select(case: Case, q: Tensor, k: Tensor, x: PackedInputs) -> Tensor:
    """Block indices ``[T, Hkv, n]`` by packed queries and :func:`scoring_keys`."""
    q, lse, options = case.shaped(q), None, case.offsets(x)
    if case.config.scores != "compressed":
        k = case.shaped(k)
    else:
        _, lse = compressed_attention(q, k, None, case.config, **options)
    return case.flat(select_blocks(q, k, lse, case.config, **options))


def check_selection(case: Case, rows: Tensor | None = None) -> None:
    """The blocks selected by keys as stored."""
    x = case.inputs()
    q, k = x.q if x.q_idx is None else x.q_idx, scoring_keys(case, x)
    rows = every(x.q) if rows is None else rows
    sample = Sample(rows, rows[:0], x.cu_seqlens_q, x.cu_seqlens_k)
    selected = sampled_selection(q, k, sample, case.config)
    agree(selected.agreement(select(case, q, k, x)[rows]), case.most_near)


def check_token_max(case: Case, rows: Tensor | None = None) -> None:
    """The blocks selected by tokens, in a pattern that may name other scores."""
    check_selection(dataclasses.replace(case, config=by_token(case.config)), rows)


def by_token(config: NSAConfig, **changes: Any) -> NSAConfig:
    return dataclasses.replace(config, scores="token_max", **changes)


def agree(found: Agreement, most: float = MAX_NEAR) -> None:
    assert found.against == 0, f"selection: {found.against} of {found.rows} rows differ from fp64"
    assert found.near <= max(1, most * found.rows), (
        f"selection: {found.near} of {found.rows} rows differ within rounding"
    )


def check_compress(case: Case, seed: int = 4) -> None:
    x, config = case.inputs(), case.config
    batch = make_batch(config, case.lengths_k, seed=seed)
    for raw, size in ((x.k_cmp_raw, config.head_dim), (x.v_cmp_raw, config.value_dim)):
        parameters = {
            name: w.to(case.device, case.dtype) for name, w in phi_parameters(batch, size).items()
        }
        leaves = leaves_of(raw, *parameters.values())
        weights = PhiWeights(**dict(zip(parameters, leaves[1:], strict=True)))
        offsets = None if case.dense else x.cu_seqlens_k
        given = case.shaped(leaves[0]), weights if parameters else None
        y, cu_cmp = compress(*given, config, offsets, backend=case.backend)
        num_blocks = int(cu_cmp[-1])
        assert num_blocks == int(compressed_cu_seqlens(x.cu_seqlens_k, config)[-1])
        assert not bool(y[num_blocks:].any()), "compress: rows that no block owns must be 0"
        dy = case.normal(*y.shape)
        found = dict(zip(["x", *parameters], torch.autograd.grad(y, leaves, dy), strict=True))
        actual = {"y": y.detach(), **{f"d{name}": grad for name, grad in found.items()}}
        blocks = torch.arange(num_blocks, device=case.device)
        sample = Sample(blocks, every(raw), x.cu_seqlens_q, x.cu_seqlens_k)
        inputs, phi = {"x": raw, "dout": dy}, Phi(weights if parameters else None)
        values = partial(sampled_values, "compress", inputs, sample, config, phi=phi)
        check_sampled(values, actual, case.dtype, "compress", case.factor)


def compare(
    actual: Mapping[str, Tensor],
    plain: Mapping[str, Tensor],
    exact: Mapping[str, Tensor],
    name: str,
    factor: float,
) -> None:
    for key, x in actual.items():
        assert_within_budget(x, plain[key], exact[key].double(), f"{name} {key}", factor)


def check_combine(case: Case, branches: Sequence[str] = BRANCHES) -> None:
    shape = (sum(case.queries), case.config.num_heads, case.config.value_dim)
    outs = [case.normal(*shape, seed=i) if b in branches else None for i, b in enumerate(BRANCHES)]
    names = [*(f"d{b}" for b in BRANCHES if b in branches), "gates"]
    gates, dout = case.inputs().gates, case.normal(*shape, seed=7)

    def run(dtype: torch.dtype, backend: str) -> dict[str, Tensor]:
        leaves: Any = [None if x is None else leaves_of(x.to(dtype))[0] for x in (*outs, gates)]
        out = combine(*leaves, backend=backend)
        wanted = [x for x in leaves if x is not None]
        grads = torch.autograd.grad(out, wanted, dout.to(dtype))
        return {"out": out.detach(), **dict(zip(names, grads, strict=True))}

    found = run(case.dtype, case.backend)
    plain, exact = (run(dtype, "reference") for dtype in (case.dtype, torch.float64))
    compare(found, plain, exact, "combine", case.factor)
    off = [i for i, out in enumerate(outs) if out is None]
    assert not bool(found["gates"][..., off].any()), (
        "combine: a branch that is off gives its gate a gradient"
    )


def check_statistics(case: Case) -> None:
    """Statistics of gates and block indices: those of eager PyTorch, and none while switched off.

    They differ by the rounding of a logarithm.
    """
    x, config = case.inputs(), case.config
    indices = case.block_indices() if "slc" in config.branches else None
    sequences = case.sequences(x)
    for algorithm, blocks in (("tiled", 24), ("gathered", 25)):
        given = (x.gates, indices, torch.tensor([blocks, 2], device=case.device), 12.0)
        found = []
        for backend in ("reference", case.backend):
            statistics = new_statistics(case.device)
            add_statistics(statistics, *given, config, sequences, backend)
            assert not statistics.any()
            statistics[0] = 1
            add_statistics(statistics, *given, config, sequences, backend)
            found.append(Statistics(*statistics.tolist())._asdict())
        expected, actual = found
        if case.backend == "triton" and x.gates.numel():
            expected |= {algorithm: 1, "reference": 0}
        rounding = 1e-5 * 2**30 * max(expected["gates"], 1)
        assert abs(actual.pop("entropy") - expected.pop("entropy")) <= rounding
        assert actual == expected


def run_whole(
    case: Case,
    x: PackedInputs | None = None,
    dout: Tensor | None = None,
    rope: Rope | None = None,
) -> Results:
    """The whole, its gradients, and the blocks that it selected on the way."""
    config, x = case.config, x or case.inputs()
    if config.share_kv:
        x = dataclasses.replace(x, k_win=x.k_slc, v_win=x.v_slc)
    rope = Rope.from_config(config) if rope is None else rope
    parameters, tokens = parameters_of(case), named_tensors(x)
    if config.compress_rope == "none":
        tokens["q_cmp"] = case.normal(*x.q.shape, seed=9)
    leaves = leaves_of(*tokens.values(), *parameters.values())
    named: dict[str, Tensor] = dict(zip([*tokens, *parameters], leaves, strict=True))
    if config.share_kv:
        named |= {f"{kind}_win": named[f"{kind}_slc"] for kind in "kv"}
    phi = phi_of(named)
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def recorded(inputs: BranchInputs, call: Call, backend: str) -> AttentionResult:
        result = run_attention(inputs, dataclasses.replace(call, algorithm=case.algorithm), backend)
        if result.block_indices is not None:
            scored, _ = inputs.scored(call, None)
            seen.append((scored.q.detach(), scored.k.detach(), result.block_indices))
        return result

    given: Any = {name: case.shaped(named[name]) for name in tokens}
    with mock.patch("nsa.attention.run_attention", recorded):
        out = native_sparse_attention(**given, phi=phi, config=config, rope=rope, **case.offsets(x))
    out = case.flat(out)
    dout = case.normal(*out.shape, seed=11) if dout is None else dout
    found = torch.autograd.grad(out, leaves, dout, allow_unused=True)
    grads = {f"d{n}": grad for n, grad in zip(named, found, strict=True) if grad is not None}
    own = [b for b in config.branches if b != "win" or not config.share_kv]
    on = [f"{kind}_{b}{'_raw' * (b == 'cmp')}" for b in own for kind in ("k", "v")]
    of_keys = {f"d{name}": grads[f"d{name}"] for name in on}
    of_weights = {f"d{name}": grads[f"d{name}"] for name in parameters if "cmp" in config.branches}
    names = [name for name in ("dq", "dgates", "dq_cmp") if name in grads]
    of_queries = {"out": out.detach()} | {name: grads[name] for name in names}
    inputs = {**tokens, "dout": dout}
    scored: tuple[Tensor, Tensor] | None = None
    if seen:
        q, k, inputs["block_indices"] = seen[0]
        scored = q, k
    oracle = Phi(rope=rope) if phi is None else Phi(phi[0], phi[1], rope)
    results = Results(case, "attention", inputs, x, of_queries, of_keys, x.k_win.shape[0])
    return dataclasses.replace(results, of_weights=of_weights, phi=oracle, scored=scored)


def parameters_of(case: Case) -> dict[str, Tensor]:
    """Parameters of phi by name, ``phi_k.weight`` and so on."""
    batch = make_batch(case.config, (1,), seed=4)
    sizes = {"phi_k": case.config.head_dim, "phi_v": case.config.value_dim}
    return {
        f"{kind}.{name}": w.to(case.device, case.dtype)
        for kind, size in sizes.items()
        for name, w in phi_parameters(batch, size).items()
    }


def phi_of(named: Mapping[str, Tensor]) -> tuple[PhiWeights, PhiWeights] | None:
    """The parameters of phi among named tensors; None where there are none."""
    both: list[dict[str, Tensor]] = [
        {name.removeprefix(kind): x for name, x in named.items() if name.startswith(kind)}
        for kind in ("phi_k.", "phi_v.")
    ]
    return (PhiWeights(**both[0]), PhiWeights(**both[1])) if both[0] else None


RUNS: dict[str, Callable[..., Results]] = {
    **{name: partial(run_branch, name) for name in ("compressed", *ALGORITHMS, "window")},
    "whole": run_whole,
    "shared": lambda case: run_whole(sharing(case)),
}


def sharing(case: Case) -> Case:
    """The case with the same keys and values in selected branch and window."""
    return dataclasses.replace(case, config=dataclasses.replace(case.config, share_kv=True))


def check_project(case: Case) -> None:
    """Heads unrotated, rotated, both, with other frequencies and detached, and gates."""
    config = case.config
    rope = Rope.from_config(config)
    pair = (config.num_kv_heads, config.head_dim)
    parts = (
        Heads(config.num_heads, config.head_dim, (False, True)),
        Heads(config.num_kv_heads, config.value_dim),
        Heads(*pair, (True,)),
        Heads(1, rope.dim, (True,), rope.dim // 2, detached=True),
    )
    branches = tuple(BRANCHES.index(name) for name in config.branches)
    sharpness = 1.0 / config.gate_temperature if config.gate == "softmax" else 0.0
    gates = Gates(config.num_heads, branches, sharpness)
    columns = Columns(parts, gates)
    width, num_tokens = 24, sum(case.lengths_k)
    whole = dataclasses.replace(case, lengths_q=None)
    sequences = whole.sequences(whole.inputs())
    x = case.normal(num_tokens, width, seed=1)
    weights = [
        nn.Parameter(case.normal(size, width, seed=i))
        for i, size in enumerate(columns.sizes, start=2)
    ]
    bias = case.normal(columns.sizes[-1], seed=9)
    queries, values = (config.num_heads, config.head_dim), (config.num_kv_heads, config.value_dim)
    shapes = [queries, queries, values, pair, (1, rope.dim), (config.num_heads, 3)]
    douts = [case.normal(num_tokens, *shape, seed=i) for i, shape in enumerate(shapes, start=10)]
    # Branches differ in the mean, or the gradient of the bias is a sum that cancels.
    douts[-1] += torch.arange(3.0, device=case.device) - 1
    names = ("q", "q rotated", "v", "k", "k_idx", "gates")

    def run(
        dtype: torch.dtype, backend: str, given: Sequence[Tensor], *, is_split: bool = False
    ) -> dict[str, Tensor]:
        leaf, leaf_bias = leaves_of(x.to(dtype), bias.to(dtype))
        rest = (leaf_bias, columns, sequences, rope)
        if is_split:
            pairs = zip(given, columns.detached, strict=True)
            products = [nn.functional.linear(leaf.detach() if cut else leaf, w) for w, cut in pairs]
            product = torch.cat(products, dim=-1)
            out = project(product, (), *rest, backend=backend)
        else:
            out = project(leaf, given, *rest, backend=backend)
        grads = torch.autograd.grad(
            out,
            [leaf, leaf_bias, *given],
            [dout.to(y.dtype) for dout, y in zip(douts, out, strict=True)],
        )
        found = {name: y.detach() for name, y in zip(names, out, strict=True)}
        found |= {f"dweight {i}": grad for i, grad in enumerate(grads[2:])}
        return {**found, "dx": grads[0], "dbias": grads[1]}

    plain, exact = (
        run(dtype, "reference", leaves_of(*(w.to(dtype) for w in weights)))
        for dtype in (case.dtype, torch.float64)
    )
    # Gates are fp32 of a product in the tested dtype, and have no more digits than it.
    rounded = {key: x.to(case.dtype) for key, x in plain.items()}
    for is_split in (False, True):
        found = run(case.dtype, case.backend, weights, is_split=is_split)
        compare(found, rounded, exact, "split" if is_split else "project", case.factor)


def check_embed(case: Case) -> None:
    """One token is frequent, so that its places are cut into pieces, and some never occur."""
    num_tokens, num_rows, width = 6 * max(case.lengths_k, default=0), 40, 3 * case.config.head_dim
    often = torch.arange(num_tokens) % 3 == 0
    rare = torch.randint(0, num_rows - 5, (num_tokens,), generator=torch.Generator().manual_seed(1))
    tokens = torch.where(often, 7, rare).to(case.device)
    weight, dout = case.normal(num_rows, width, seed=2), case.normal(num_tokens, width, seed=3)

    def run(dtype: torch.dtype, function: Callable[..., Tensor]) -> dict[str, Tensor]:
        leaf = leaves_of(weight.to(dtype))[0]
        out = function(tokens, leaf)
        (dweight,) = torch.autograd.grad(out, [leaf], [dout.to(dtype)])
        return {"out": out.detach(), "dweight": dweight}

    found = run(case.dtype, partial(embed, backend=case.backend))
    plain, exact = (run(dtype, functional.embedding) for dtype in (case.dtype, torch.float64))
    compare(found, plain, exact, "embed", case.factor)
    assert torch.equal(found["out"], plain["out"]), "embed: rows of the table are copied"
    assert not found["dweight"][-5:].any(), "embed: a token that does not occur has no gradient"
    again = run(case.dtype, partial(embed, backend=case.backend))
    assert torch.equal(found["dweight"], again["dweight"]), "embed: the same bits again"


def check_run(name: str, case: Case) -> None:
    RUNS[name](case).check()


CHECKS: dict[str, Callable[[Case], Any]] = {
    "compress": check_compress,
    "choice": check_selection,
    "token_max": check_token_max,
    "combine": check_combine,
    "statistics": check_statistics,
    "project": check_project,
    "embed": check_embed,
    "index_loss": check_index_loss,
    **{name: partial(check_run, name) for name in RUNS},
}
