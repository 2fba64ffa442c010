"""Correctness gate: compare results with fp64 before timing them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from nsa.bench.cases import (
    BRANCHES,
    CASES,
    INDEX_INPUTS,
    Problem,
    Tensors,
    prepare,
    scored,
    selected_counts,
    shares_keys,
    with_window,
)
from nsa.bench.clock import Fields, judge
from nsa.config import NSAConfig
from nsa.ops.index_loss import index_loss
from nsa.rope import Rope
from nsa.testing import assert_within_budget, packed_offsets
from nsa.testing.sampled import (
    PART_ELEMENTS,
    Phi,
    Sample,
    SampledSelection,
    Values,
    assert_legal,
    check_sampled,
    sample_rows,
    sampled_selection,
    sampled_values,
)

SAMPLED_QUERIES, SAMPLED_KEYS, SAMPLED_SELECTIONS = 68, 18, 256
# Last tokens, where few queries see a key: the only compared gradients of keys for dense attention
# and very long sequences, for which the oracle would take minutes.
_TAIL = 1024
_LONGEST_WHOLE = 262_144


class Gate:
    """Compares results of a problem with fp64 on sampled rows.

    The baseline is the same mathematics in the tested dtype; the allowed error is twice its error.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        point, config = problem.point, problem.point.config
        self._offsets = packed_offsets([point.seq_len] * point.batch, point.device)
        # dq has the largest cancellation in the first queries, which see few keys.
        edges = [*range(config.block_size + 1), config.num_selected_blocks * config.block_size]
        edges = [t for t in (*edges, config.window_size) if t < point.seq_len]
        drawn = sample_rows(self._offsets, SAMPLED_QUERIES)
        self.queries = torch.cat((drawn.new_tensor(edges), drawn)).unique()
        self.keys = sample_rows(self._offsets, SAMPLED_KEYS)
        if point.seq_len > _LONGEST_WHOLE:
            last = point.tokens - point.seq_len
            self.keys = (point.seq_len - 1 - self.keys % _TAIL).unique() + last
        step = max(1, point.tokens // SAMPLED_SELECTIONS)
        evenly = torch.arange(0, point.tokens, step, device=point.device)
        self.selections = torch.cat((self.queries, evenly)).unique()
        batch = (point.batch, point.seq_len)
        tensors = {name: x.detach() for name, x in problem.tensors.items()}
        self._packed = {
            name: x.flatten(0, 1) if x.shape[:2] == batch else x for name, x in tensors.items()
        }
        self._known = dict[tuple[str, torch.dtype], Values]()
        self._block_indices: Tensor | None = None  # for whole attention

    def check(self, results: Tensors, *, dense: bool = False, backend: str = "triton") -> Fields:
        """Compare outputs and gradients; a gradient is named ``d`` plus the name of the input.

        Args:
            results: whole tensors by name.
            dense: whether the results are dense causal attention over q, k_slc, v_slc.
            backend: backend that computes the selection within whole attention, which is checked
                first and then passed to the oracle.
        """
        case = "dense" if dense else self.problem.case.name

        def compare() -> dict[str, float]:
            for name, result in results.items():
                finite = not result.is_floating_point() or bool(result.isfinite().all())
                assert finite, f"{name}: values that are not finite"
            if case == "attention.choice":
                self._check_selection(results["out"], self.problem)
                return {}
            if self.problem.case.is_whole and not dense:
                self._select(backend)
            # The loss of an index, a scalar, is not compared, but its gradients are.
            packed = {name: x.detach().flatten(0, -3) for name, x in results.items() if x.ndim}
            values, dtype = partial(self._values, case), self.problem.point.dtype
            return {name: x.total for name, x in check_sampled(values, packed, dtype, case).items()}

        return judge(compare)

    def recall(self, chosen: Tensor) -> float:
        """Recall of the exact fp64 selection in ``chosen`` ``[B, S, Hkv, n]``.

        Includes the sampled queries whose n-th best block does not depend on rounding.
        """
        plain = {"coarse_block_size": None, "num_coarse_blocks": 0, "score_precision": "exact"}
        config = replace(self.problem.point.config, **plain)  # type: ignore[arg-type]
        sampled = self._selection(self._packed, config)
        actual = chosen.flatten(0, 1)[self.selections]
        wanted = (sampled.indices >= 0) & sampled.clear[..., None]
        found = (sampled.indices[..., None] == actual[..., None, :]).any(-1) & wanted
        return round(float(found.sum() / wanted.sum()), 5)

    def _values(self, case: str, dtype: torch.dtype) -> Values:
        if (case, dtype) not in self._known:
            self._known[case, dtype] = self._sampled(case, dtype)
        return self._known[case, dtype]

    def _sampled(self, case: str, dtype: torch.dtype) -> Values:
        """Sampled rows and values of the results, computed in ``dtype``."""
        x, config, keys = self._packed, self.problem.point.config, self.keys
        sample = Sample(self.queries, keys, self._offsets, self._offsets)
        if self.problem.case.is_whole and case != "dense":  # uses the checked block indices
            assert self._block_indices is not None
            whole = {**with_window(x, config), "block_indices": self._block_indices.flatten(0, 1)}
            phi = Phi(rope=Rope.from_config(config))
            values = sampled_values("attention", whole, sample, config, dtype, phi)
            if "index_loss" in self.problem.case.outputs:
                values |= self._index_gradients(dtype)
            for kind in "kv" if shares_keys(config) else "":
                rows, gradient = values[f"d{kind}_slc"]
                values[f"d{kind}_slc"] = rows, gradient + values.pop(f"d{kind}_win")[1]
            return values
        if case == "attention.combine":
            return self._combined(dtype)
        if case == "attention.compress":
            return self._compressed(dtype)
        name, branch = BRANCHES.get(case, "slc"), BRANCHES.get(case, "win")
        if case == "dense":  # a window as long as the sequence
            seq_len = self.problem.point.seq_len
            config = replace(config, window_size=seq_len)
            keys = keys[keys % seq_len >= seq_len - _TAIL]
        if name == "cmp":
            keys = self._blocks()
        given = {"q": x["q"], "k": x[f"k_{name}"], "v": x[f"v_{name}"], "dout": x["dout"]}
        if branch == "slc":
            given["block_indices"] = x["block_indices"]
        values = sampled_values(branch, given, sample._replace(keys=keys), config, dtype)
        return {f"{key}_{name}" if key in ("dk", "dv") else key: y for key, y in values.items()}

    def _index_gradients(self, dtype: torch.dtype) -> Values:
        """Gradients of the index's loss: of sampled queries, and of the last keys (``_TAIL``)."""
        point, ids, names = self.problem.point, self._block_indices, (*INDEX_INPUTS, "q", "k_slc")
        assert ids is not None
        ids, compute = ids.flatten(0, 1), torch.promote_types(dtype, torch.float32)
        q_idx, k_idx, q, k = (self._packed[name].to(compute) for name in names)
        begin = max(point.tokens - _TAIL, point.tokens - point.seq_len)
        last = torch.arange(begin, point.tokens, device=q.device)
        size = max(1, PART_ELEMENTS // (point.config.num_heads * point.seq_len))
        given: list[Tensor] = [x.requires_grad_() for x in (q_idx, k_idx)]
        # Each part is consecutive queries of one sequence, which are its last ones.
        for part in (*self.queries[self.queries < begin][:, None], *last.split(size)):
            first, end = int(part[0]), int(part[-1]) + 1
            queries, keys = slice(first, end), slice(first // point.seq_len * point.seq_len, end)
            x = (q_idx[queries], k_idx[keys], q[queries], k[keys], ids[queries])
            index_loss(*x, point.config, backend="reference").total.backward()
        dq, dk = (torch.zeros_like(x) if x.grad is None else x.grad.to(dtype) for x in given)
        return {"dq_idx": (self.queries, dq[self.queries]), "dk_idx": (last, dk[last])}

    def _combined(self, dtype: torch.dtype) -> Values:
        """Values of the gated sum, whose rows are independent."""
        case, x, rows = self.problem.case, self._packed, self.queries
        leaves = {name: x[name][rows].to(dtype).requires_grad_() for name in case.inputs}
        out = case.call(leaves, self.problem.point.config, "reference")
        gradients = torch.autograd.grad(out, tuple(leaves.values()), x["dout"][rows].to(dtype))
        found = {"out": (rows, out.detach())}
        return found | {f"d{name}": (rows, y) for name, y in zip(leaves, gradients, strict=True)}

    def _compressed(self, dtype: torch.dtype) -> Values:
        """Values of the compression of keys, which are rotated, and of values."""
        x, config, found = self._packed, self.problem.point.config, Values()
        sample = Sample(self._blocks(), self.keys, self._offsets, self._offsets)
        for kind, phi in (("k", Phi(rope=Rope.from_config(config))), ("v", Phi())):
            given = {"x": x[f"{kind}_cmp_raw"], "dout": x[f"d{kind}_cmp"]}
            values = sampled_values("compress", given, sample, config, dtype, phi)
            found |= {f"{kind}_cmp": values["y"], f"d{kind}_cmp_raw": values["dx"]}
        return found

    def _blocks(self) -> Tensor:
        """Packed compressed rows that start at or before the sampled keys."""
        config, seq_len = self.problem.point.config, self.problem.point.seq_len
        blocks = (seq_len - config.compress_block_size) // config.compress_stride + 1
        inside = self.keys % seq_len // config.compress_stride
        return (self.keys // seq_len * blocks + inside)[inside < blocks].unique()

    # --- Selection
    def _select(self, backend: str) -> None:
        """Check the block indices of whole attention, on which its other results depend."""
        case, point = CASES["attention.choice"], self.problem.point
        made = prepare(case, self.problem.tensors, point, backend)
        chosen = case.call(made.tensors, point.config, backend)
        self._check_selection(chosen, made)
        if self._block_indices is None or not torch.equal(chosen, self._block_indices):
            self._block_indices = chosen
            self._known.clear()

    def _check_selection(self, chosen: Tensor, problem: Problem) -> None:
        """Fail unless indices are valid, and equal to the fp64 selection on sampled rows.

        Args:
            chosen: ``[B, S, Hkv, n]``.
            problem: contains the queries and keys that were scored.
        """
        config, x = problem.point.config, problem.tensors
        t = torch.arange(problem.point.seq_len, device=chosen.device)
        assert_legal(chosen, t, config)
        if config.coarse_block_size is None:
            wanted = torch.minimum(selected_counts(t, config), t // config.block_size + 1)
            full = (chosen >= 0).sum(-1) == wanted[:, None]
            assert bool(full.all()), "block_indices: not as many blocks as there are to select"
        packed = {name: y.flatten(0, 1) if y.ndim == 4 else y for name, y in x.items()}
        sampled = self._selection(packed, config)
        agreement = sampled.agreement(chosen.flatten(0, 1)[self.selections])
        different = f"{agreement.against} of {agreement.rows} sampled selections differ from fp64"
        assert agreement.against == 0, f"block_indices: {different}"

    def _selection(self, packed: Tensors, config: NSAConfig) -> SampledSelection:
        sample = Sample(self.selections, self.keys, self._offsets, self._offsets)
        return sampled_selection(*scored(packed, config), sample, config)


def approximates(config: NSAConfig) -> bool:
    """Whether the pattern has an approximate selection."""
    return config.coarse_block_size is not None or config.score_precision != "exact"


# --- Modules
def module_results(
    module: nn.Module,
    run: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    precision: torch.autocast,
    output: str = "out",
    part_of: Callable[[str], str] = lambda parameter: "weights",
    **options: object,
) -> Tensors:
    """Output of a module, and the gradients of its inputs and weights, on the CPU.

    Args:
        module: contains the weights.
        run: the module, or its compiled form.
        inputs: positional arguments; float tensors get gradients.
        precision: context of the forward pass.
        output: name of the output.
        part_of: maps a parameter's name to the part whose gradients form one result.
        options: keyword arguments of the call.
    """
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    with precision:
        out = run(*leaves, **options)
    module.zero_grad(set_to_none=True)
    out.backward(random_gradient(out))
    found = {output: torch.atleast_1d(out.detach())}
    found |= {f"dinput_{i}": x.grad for i, x in enumerate(leaves) if x.grad is not None}
    parts: dict[str, list[Tensor]] = {}
    for name, weight in module.named_parameters():
        if weight.grad is not None:
            parts.setdefault(f"d{part_of(name)}", []).append(weight.grad.flatten())
    found |= {part: torch.cat(gradients) for part, gradients in parts.items()}
    return {name: x.cpu() for name, x in found.items()}


def judge_module(
    found: Tensors, plain: Tensors, exact: Tensors, dtype: torch.dtype, factor: float = 2.0
) -> Fields:
    """Compare :func:`module_results` of the measured module with those of the CPU.

    Args:
        found: results of the measured module.
        plain: results on the CPU in the same precision.
        exact: results in fp64.
        dtype: dtype to which the plain results are rounded.
        factor: allowed error as a multiple of the plain results' error.
    """

    def error_of(name: str) -> float:
        compared = found[name], plain[name].to(dtype), exact[name]
        return assert_within_budget(*compared, name, factor).total

    return judge(lambda: {name: error_of(name) for name in exact})


def random_gradient(out: Tensor) -> Tensor:
    """Draw a gradient that is equal for all dtypes and devices, and exact in bfloat16."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(out.shape, generator=generator).bfloat16().to(out.device, out.dtype)
