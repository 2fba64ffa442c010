"""Each public operator on one case, forward and backward, against fp64: any backend, device, dtype.

Tests of kernels run these in Triton's interpreter on small cases, and on a GPU on large ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

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
from nsa.ops._sequences import Sequences
from nsa.ops.attention import AttentionResult, BranchInputs, run_attention
from nsa.ops.combination import combine_reference
from nsa.ops.statistics import Statistics, add_statistics, new_statistics
from nsa.testing import PackedInputs, assert_within_budget, make_inputs
from nsa.testing.budget import CEILING
from nsa.testing.sampled import (
    SampledAttention,
    SampledCompression,
    SampledWhole,
    check_sampled,
    sampled_compressed,
    sampled_selected,
    sampled_selection,
    sampled_window,
)
from tests.ops.cases import make_batch
from tests.ops.whole import phi_parameters

# The selected branch with each of its algorithms.
ALGORITHMS = {"selected": "tiled", "gathered": "gathered"}
# Rows that may differ from fp64 within the agreement rule.
MAX_NEAR = 1e-3


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of an operator.

    Attributes:
        config: the sparse pattern.
        lengths_k, lengths_q: tokens of each sequence; queries None for as many as keys.
        dtype: of everything.
        device: where it runs.
        dense: whether sequences, all alike, are given as a dense batch.
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
        return x.unflatten(0, (len(self.lengths_k), -1)) if self.dense else x

    def flat(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1) if self.dense else x

    def offsets(self, x: PackedInputs) -> dict[str, Any]:
        given = (
            {} if self.dense else {"cu_seqlens_q": x.cu_seqlens_q, "cu_seqlens_k": x.cu_seqlens_k}
        )
        return {**given, "backend": self.backend}


def cu(x: PackedInputs) -> dict[str, Any]:
    """Offsets for the oracle."""
    return {"cu_seqlens_q": x.cu_seqlens_q, "cu_seqlens_k": x.cu_seqlens_k}


def named_tensors(x: PackedInputs) -> dict[str, Tensor]:
    """What has one row for each token, by name."""
    names = [f.name for f in dataclasses.fields(x) if not f.name.startswith("cu_")]
    return {name: getattr(x, name) for name in names}


def leaves_of(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def every(x: Tensor) -> Tensor:
    """All rows of ``x``."""
    return torch.arange(x.shape[0], device=x.device)


@dataclasses.dataclass
class Results:
    """Packed results and gradients of an operator by name, and what computes them in fp64.

    ``scored`` holds the queries and compressed keys by which the whole selected its blocks.
    """

    name: str
    case: Case
    of_queries: dict[str, Tensor]
    of_keys: dict[str, Tensor]
    dout: Tensor
    sampled: SampledAttention | SampledWhole
    num_keys: int
    of_weights: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    scored: tuple[Tensor, Tensor] | None = None

    def check(self, rows: Tensor | None = None, keys: Tensor | None = None) -> None:
        """Hold everything, or some ``rows`` and ``keys``, against fp64."""
        name, dtype, factor = self.name, self.case.dtype, self.case.factor
        sampled, dout = self.sampled, self.dout
        # Rows of compressed keys that no block owns have no gradient; nothing else may stand there.
        for key, grad in self.of_keys.items():
            assert not bool(grad[self.num_keys :].any()), (
                f"{name} {key}: not 0 in rows that no block owns"
            )
        weights = rows is None and keys is None and bool(self.of_weights)
        rows = every(dout) if rows is None else rows
        keys = torch.arange(self.num_keys, device=dout.device) if keys is None else keys
        at_keys = sampled.at_tokens if isinstance(sampled, SampledWhole) else sampled.at_keys
        queries = {d: sampled.at_queries(rows, d, dout) for d in (dtype, torch.float64)}
        tokens = {d: at_keys(keys, d, dout) for d in (dtype, torch.float64)}
        exact = {**queries[torch.float64], **tokens[torch.float64]}
        size = max(
            float(exact[key].norm()) for key in (*self.of_queries, *self.of_keys) if key != "lse"
        )
        for values, actual, index in (
            (queries, self.of_queries, rows),
            (tokens, self.of_keys, keys),
        ):
            zero = [
                key for key in actual if key != "lse" and float(exact[key].norm()) < 1e-12 * size
            ]
            # Where no query sees two keys, dQ and dK are 0 but for rounding: no relative error is
            # defined.
            for key in zero:
                assert float(actual[key][index].norm()) <= CEILING[dtype] * size, (
                    f"{name} {key}: should vanish"
                )
            others = {key: x for key, x in actual.items() if key not in zero}
            check_sampled(values.__getitem__, others, index, dtype, name, factor)
        if isinstance(sampled, SampledWhole):
            if self.scored is not None:
                selected = sampled_selection(*self.scored, self.case.config, **cu(sampled.inputs))
                assert sampled.block_indices is not None
                agree(selected.agreement(rows, sampled.block_indices))
            if weights:
                plain, double = (sampled.weight_gradients(d, dout) for d in (dtype, torch.float64))
                compare(self.of_weights, plain, double, name, factor)


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
    sample: Any
    ids, options = [], case.offsets(x)
    if name == "compressed":
        function, sample = compressed_attention, sampled_compressed
        k, v = (compressed_rows(case, raw, x) for raw in (x.k_cmp_raw, x.v_cmp_raw))
    elif name == "window":
        function, sample, k, v = window_attention, sampled_window, x.k_win, x.v_win
    else:
        function, sample, k, v = selected_attention, sampled_selected, x.k_slc, x.v_slc
        ids = [case.block_indices() if block_indices is None else block_indices]
        options["algorithm"] = ALGORITHMS[name]
    leaves = leaves_of(x.q, k, v)
    q, *keys = leaves
    if name != "compressed":  # whose keys are packed always
        keys = [case.shaped(y) for y in keys]
    out, lse = function(case.shaped(q), *keys, *(case.shaped(y) for y in ids), config, **options)
    assert out is not None
    out, lse = case.flat(out), case.flat(lse)
    assert (out.dtype, lse.dtype) == (case.dtype, torch.float32)
    dout = case.normal(*out.shape) if dout is None else dout
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    assert all(grad.dtype == case.dtype for grad in (dq, dk, dv))
    of_queries = {"out": out.detach(), "lse": lse, "dq": dq}
    sampled = sample(x.q, k, v, *ids, config, **cu(x))
    return Results(name, case, of_queries, {"dk": dk, "dv": dv}, dout, sampled, sampled.cu_key[-1])


def compressed_rows(case: Case, raw: Tensor, x: PackedInputs) -> Tensor:
    """Compressed ``raw`` as `compress` packs it, made without a kernel.

    Rows that no block owns are NaN, since they must not be read.
    """
    config = dataclasses.replace(case.config, phi="mean")
    sampled = SampledCompression(raw, None, config, x.cu_seqlens_k)
    rows = raw.new_full((raw.shape[0] // config.compress_stride, *raw.shape[1:]), torch.nan)
    blocks = torch.arange(sampled.num_blocks, device=raw.device)
    rows[: sampled.num_blocks] = sampled.at_blocks(blocks, case.dtype)["y"]
    return rows


def check_selection(case: Case, rows: Tensor | None = None) -> Tensor:
    """The blocks selected by compressed keys as stored; returns them."""
    x, config = case.inputs(), case.config
    k = compressed_rows(case, x.k_cmp_raw, x)
    q = case.shaped(x.q)
    _, lse = compressed_attention(q, k, None, config, **case.offsets(x))
    chosen = case.flat(select_blocks(q, k, lse, config, **case.offsets(x)))
    rows = every(x.q) if rows is None else rows
    agree(sampled_selection(x.q, k, config, **cu(x)).agreement(rows, chosen))
    return chosen


def agree(found: Any) -> None:
    assert found.against == 0, (
        f"selection: {found.against} of {found.rows} rows break the agreement rule with fp64"
    )
    assert found.near <= max(1, MAX_NEAR * found.rows), (
        f"selection: {found.near} of {found.rows} rows left out"
    )


def check_compress(case: Case, seed: int = 4) -> None:
    x, config = case.inputs(), case.config
    batch = make_batch(config, case.lengths_k, seed=seed)
    for raw, size in ((x.k_cmp_raw, config.head_dim), (x.v_cmp_raw, config.value_dim)):
        parameters = {
            name: w.to(case.device, case.dtype) for name, w in phi_parameters(batch, size).items()
        }
        leaves = leaves_of(raw, *parameters.values())
        weights = (
            PhiWeights(**dict(zip(parameters, leaves[1:], strict=True))) if parameters else None
        )
        offsets = None if case.dense else x.cu_seqlens_k
        y, cu_cmp = compress(case.shaped(leaves[0]), weights, config, offsets, backend=case.backend)
        sampled = SampledCompression(raw, weights, config, x.cu_seqlens_k)
        assert int(cu_cmp[-1]) == sampled.num_blocks
        assert not bool(y[sampled.num_blocks :].any()), (
            "compress: rows that no block owns must be 0"
        )
        dy = case.normal(*y.shape)
        dx, *dw = torch.autograd.grad(y, leaves, dy)
        blocks = torch.arange(sampled.num_blocks, device=case.device)
        both = (case.dtype, "compress", case.factor)
        check_sampled(
            lambda dtype, b=blocks, s=sampled: s.at_blocks(b, dtype),  # type: ignore[misc]
            {"y": y.detach()},
            blocks,
            *both,
        )
        tokens = every(raw)
        check_sampled(
            lambda dtype, t=tokens, s=sampled, g=dy: s.at_tokens(t, dtype, g),  # type: ignore[misc]
            {"dx": dx},
            tokens,
            *both,
        )
        found = dict(zip(parameters, dw, strict=True))
        compare(
            found,
            sampled.weight_gradients(case.dtype, dy),
            sampled.weight_gradients(torch.float64, dy),
            *both[1:],
        )


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

    def run(dtype: torch.dtype, function: Callable[..., Tensor]) -> dict[str, Tensor]:
        leaves: Any = [None if x is None else leaves_of(x.to(dtype))[0] for x in (*outs, gates)]
        out = function(leaves[:3], leaves[3])
        wanted = [x for x in leaves if x is not None]
        grads = torch.autograd.grad(out, wanted, dout.to(dtype))
        return {"out": out.detach(), **dict(zip(names, grads, strict=True))}

    def tested(given: Any, gate: Tensor) -> Tensor:
        return combine(given[0], given[1], given[2], gate, backend=case.backend)

    found = run(case.dtype, tested)
    plain, exact = (run(dtype, combine_reference) for dtype in (case.dtype, torch.float64))
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
    offsets = None if case.dense else (x.cu_seqlens_q, x.cu_seqlens_k)
    sequences = Sequences(
        offsets, len(case.queries), max(case.queries), max(case.lengths_k), x.q.device
    )
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
        if case.backend == "triton":
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
    rope = Rope.from_config(config) if rope is None else rope
    parameters, tokens = parameters_of(case), named_tensors(x)
    if config.compress_rope == "none":
        tokens["q_cmp"] = case.normal(*x.q.shape, seed=9)
    leaves = leaves_of(*tokens.values(), *parameters.values())
    named: dict[str, Tensor] = dict(zip([*tokens, *parameters], leaves, strict=True))
    phi = phi_of(named)
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def recorded(inputs: BranchInputs, call: Call, backend: str) -> AttentionResult:
        result = run_attention(inputs, dataclasses.replace(call, algorithm=case.algorithm), backend)
        if inputs.k_cmp is not None and result.block_indices is not None:
            scored = (inputs.scoring_queries.detach(), inputs.k_cmp.detach())
            seen.append((*scored, result.block_indices))
        return result

    given: Any = {name: case.shaped(named[name]) for name in tokens}
    with mock.patch("nsa.attention.run_attention", recorded):
        out = native_sparse_attention(**given, phi=phi, config=config, rope=rope, **case.offsets(x))
    out = case.flat(out)
    dout = case.normal(*out.shape, seed=11) if dout is None else dout
    found = torch.autograd.grad(out, leaves, dout, allow_unused=True)
    grads = {name: grad for name, grad in zip(named, found, strict=True) if grad is not None}
    on = [
        f"{kind}_{b}{'_raw' if b == 'cmp' else ''}" for b in config.branches for kind in ("k", "v")
    ]
    of_keys = {name: grads[name] for name in on}
    of_weights = {name: grads[name] for name in parameters if "cmp" in config.branches}
    of_queries = {"out": out.detach()} | {
        name: grads[name] for name in ("q", "gates", "q_cmp") if name in grads
    }
    scored, ids = (seen[0][:2], seen[0][2]) if seen else (None, None)
    sampled = SampledWhole(x, config, ids, phi, tokens.get("q_cmp"), rope)
    return Results(
        "whole",
        case,
        of_queries,
        of_keys,
        dout,
        sampled,
        x.k_win.shape[0],
        of_weights,
        scored,
    )


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
}
