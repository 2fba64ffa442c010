"""Correctness gate: compare results with fp64 before timing them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor, nn

from nsa.bench.cases import CASES, Problem, Tensors, prepare
from nsa.bench.clock import Verdict, judge
from nsa.config import NSAConfig
from nsa.ops.selection import select_blocks
from nsa.rope import Rope
from nsa.testing import assert_within_budget, packed_offsets
from nsa.testing.sampled import (
    Phi,
    Sample,
    SampledSelection,
    Values,
    assert_legal,
    sample_rows,
    sampled_selection,
    sampled_values,
)
from nsa.train.execution.precision import autocast

SAMPLED_QUERIES, SAMPLED_KEYS, SAMPLED_SELECTIONS = 68, 18, 256
# Last tokens, where few queries see a key: the only compared gradients of keys for dense attention
# and very long sequences, for which the oracle would take minutes.
_TAIL = 1024
_LONGEST_WHOLE = 262_144

_BRANCHES = {
    "attention.compressed": "cmp",
    "attention.selected": "slc",
    "attention.window": "win",
    "dense": "win",  # a window as long as the sequence
}


class Gate:
    """Compares results of a problem with fp64 on sampled rows.

    The baseline is the same mathematics in the tested dtype; the allowed error is twice its error.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        point, config = problem.point, problem.config
        self._offsets = packed_offsets([point.seq_len] * point.batch, point.device)
        # dq has the largest cancellation in the first queries, which see few keys.
        edges = [*range(config.block_size + 1), config.num_selected_blocks * config.block_size]
        edges = [t for t in (*edges, config.window_size) if t < point.seq_len]
        drawn = sample_rows(self._offsets, SAMPLED_QUERIES)
        self.queries = torch.cat((drawn.new_tensor(edges), drawn)).unique()
        self.keys = sample_rows(self._offsets, SAMPLED_KEYS)
        if point.seq_len > _LONGEST_WHOLE:
            last = (point.batch - 1) * point.seq_len
            self.keys = (point.seq_len - 1 - self.keys % _TAIL).unique() + last
        step = max(1, point.tokens // SAMPLED_SELECTIONS)
        evenly = torch.arange(0, point.tokens, step, device=point.device)
        self.selections = torch.cat((self.queries, evenly)).unique()
        batch = (point.batch, point.seq_len)
        tensors = {name: x.detach() for name, x in problem.tensors.items()}
        self._packed = {
            name: x.flatten(0, 1) if x.shape[:2] == batch else x for name, x in tensors.items()
        }
        self._known: dict[str, dict[str, tuple[Tensor, Tensor, Tensor]]] = {}
        self._block_indices: Tensor | None = None  # for whole attention

    def check(self, results: Tensors, *, dense: bool = False, backend: str = "triton") -> Verdict:
        """Compare outputs and gradients; a gradient is named ``d`` plus the name of the input.

        Args:
            results: whole tensors by name.
            dense: whether the results are dense causal attention over q, k_slc, v_slc.
            backend: backend that computes the selection within whole attention, which is checked
                first and then passed to the oracle.
        """
        case = "dense" if dense else self.problem.case.name

        def measure(errors: dict[str, float]) -> None:
            for name, result in results.items():
                finite = not result.is_floating_point() or bool(result.isfinite().all())
                assert finite, f"{name}: values that are not finite"
            if case == "attention.choice":
                self._check_selection(results["block_indices"], self.problem)
                return
            if case == "attention":
                self._select(backend)
            if case not in self._known:
                self._known[case] = self._expected(case)
            unknown = sorted(set(results) - set(self._known[case]))
            assert not unknown, f"{', '.join(unknown)}: nothing to compare with"
            for name, result in results.items():
                rows, baseline, oracle = self._known[case][name]
                found, label = result.detach().flatten(0, -3)[rows], f"{case} {name}"
                errors[name] = assert_within_budget(found, baseline, oracle, label).total

        return judge(measure)

    def recall(self, chosen: Tensor) -> float:
        """Recall of the exact fp64 selection in ``chosen`` ``[B, S, Hkv, n]``.

        Includes the sampled queries whose n-th best block does not depend on rounding.
        """
        config = replace(self.problem.config, coarse_block_size=None, num_coarse_blocks=0)
        config = replace(config, score_precision="exact")
        x = self._packed
        sampled = self._selection(x["q"], x["k_cmp"], config)
        exact, clear = sampled.indices, sampled.clear
        actual = chosen.flatten(0, 1)[self.selections]
        wanted = (exact >= 0) & clear[..., None]
        found = (exact[..., None] == actual[..., None, :]).any(-1) & wanted
        return round(float(found.sum() / wanted.sum()), 5)

    # --- Sampled fp64 values
    def _expected(self, case: str) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """Sampled rows, the baseline and the oracle, by result."""
        dtypes = self.problem.point.dtype, torch.float64
        baseline, oracle = (self._sampled(case, dtype) for dtype in dtypes)
        return {name: (*baseline[name], oracle[name][1]) for name in oracle}

    def _sampled(self, case: str, dtype: torch.dtype) -> Values:
        """Rows and values of results, computed in ``dtype``."""
        x, config, queries, keys = self._packed, self.problem.config, self.queries, self.keys
        sample, rope = self._sample(queries), Rope.from_config(config)
        if case == "attention":  # uses the checked block indices
            assert self._block_indices is not None
            whole = {**x, "block_indices": self._block_indices.flatten(0, 1)}
            return sampled_values(case, whole, sample, config, dtype, Phi(rope=rope))
        if case == "attention.combine":  # rows are independent
            inputs = {name: x[name][queries].to(dtype) for name in self.problem.case.inputs}
            leaves = {name: y.requires_grad_() for name, y in inputs.items()}
            (out,) = self.problem.case.call(leaves, config, "reference")
            dout = x["dout"][queries].to(dtype)
            gradients = torch.autograd.grad(out, list(leaves.values()), dout)
            named = zip(("out", *(f"d{name}" for name in leaves)), (out, *gradients), strict=True)
            return {name: (queries, y.detach()) for name, y in named}
        if case == "attention.compress":
            found: Values = {}
            for kind, phi in (("k", Phi(rope=rope)), ("v", Phi())):
                given = {"x": x[f"{kind}_cmp_raw"], "dout": x[f"d{kind}_cmp"]}
                blocks = sample._replace(queries=self._blocks())
                values = sampled_values("compress", given, blocks, config, dtype, phi)
                found |= {f"{kind}_cmp": values["y"], f"d{kind}_cmp_raw": values["dx"]}
            return found
        name = _BRANCHES[case]
        label = "slc" if case == "dense" else name
        given = {"q": x["q"], "k": x[f"k_{label}"], "v": x[f"v_{label}"], "dout": x["dout"]}
        if name == "slc":
            given["block_indices"] = x["block_indices"]
        if case == "dense":
            seq_len = self.problem.point.seq_len
            config = replace(config, window_size=seq_len)
            keys = keys[keys % seq_len >= seq_len - _TAIL]
        keys = self._blocks() if name == "cmp" else keys
        values = sampled_values(name, given, sample._replace(keys=keys), config, dtype)
        return {f"{n}_{label}" if n in ("dk", "dv") else n: found for n, found in values.items()}

    def _sample(self, queries: Tensor) -> Sample:
        return Sample(queries, self.keys, self._offsets, self._offsets)

    def _blocks(self) -> Tensor:
        """Packed compressed rows that start at or before the sampled keys."""
        config, seq_len = self.problem.config, self.problem.point.seq_len
        blocks = (seq_len - config.compress_block_size) // config.compress_stride + 1
        inside = self.keys % seq_len // config.compress_stride
        return (self.keys // seq_len * blocks + inside)[inside < blocks].unique()

    # --- Selection
    def _select(self, backend: str) -> None:
        """Check the block indices of whole attention, on which its other results depend."""
        problem = self.problem
        base, point, config = problem.tensors, problem.point, problem.config
        made = prepare(CASES["attention.choice"], base, point, config, backend)
        x = made.tensors
        chosen = select_blocks(x["q"], x["k_cmp"], x["lse"], config, backend=backend)
        self._check_selection(chosen, made)
        if self._block_indices is None or not torch.equal(chosen, self._block_indices):
            self._block_indices = chosen
            self._known.pop("attention", None)

    def _check_selection(self, chosen: Tensor, problem: Problem) -> None:
        """Fail unless indices are valid, and equal to the fp64 selection on sampled rows.

        Args:
            chosen: ``[B, S, Hkv, n]``.
            problem: contains the ``q`` and ``k_cmp`` that were scored.
        """
        config, x = problem.config, problem.tensors
        t = torch.arange(problem.point.seq_len, device=chosen.device)
        assert_legal(chosen, t, config)
        t = t[:, None]
        current = t // config.block_size
        if config.coarse_block_size is None:
            n = torch.full_like(t, config.num_selected_blocks)
            for length, fewer in reversed(config.block_counts):
                n = torch.where(t < length, fewer, n)
            full = (chosen >= 0).sum(-1) == torch.minimum(n, current + 1)
            assert bool(full.all()), "block_indices: not as many blocks as there are to select"
        sampled = self._selection(x["q"].flatten(0, 1), x["k_cmp"], config)
        agreement = sampled.agreement(chosen.flatten(0, 1)[self.selections])
        different = f"{agreement.against} of {agreement.rows} sampled selections differ from fp64"
        assert agreement.against == 0, f"block_indices: {different}"

    def _selection(self, q: Tensor, k_cmp: Tensor, config: NSAConfig) -> SampledSelection:
        return sampled_selection(q, k_cmp, self._sample(self.selections), config)


def approximates(config: NSAConfig) -> bool:
    """Whether the pattern has an approximate selection."""
    return config.coarse_block_size is not None or config.score_precision != "exact"


# --- Modules
class ModelGate:
    """Compares a module's output, and gradients of its inputs and weights, with fp64 on the CPU.

    Args:
        module: the module on the CPU.
        inputs: positional arguments; float tensors get gradients.
        compute_dtype: autocast precision, see :func:`autocast`.
        dtype: dtype to which the baseline is rounded.
        part_of: maps a parameter's name to the part of the module whose gradients are compared.
        output: name of the output.
        options: keyword arguments of the call.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: Sequence[Tensor],
        compute_dtype: str,
        dtype: torch.dtype,
        part_of: Callable[[str], str],
        output: str = "out",
        **options: object,
    ) -> None:
        self._inputs, self._compute_dtype = inputs, compute_dtype
        self._part_of, self._output, self._options = part_of, output, options
        exact, cpu = deepcopy(module).double(), torch.device("cpu")
        double = [x.double() if x.is_floating_point() else x for x in inputs]
        self._oracle = self._results(exact, exact, double, autocast(cpu, "fp32"))
        plain = self._results(module, module, inputs, autocast(cpu, compute_dtype))
        self._baseline = {name: x.to(dtype) for name, x in plain.items()}

    def check(
        self,
        module: nn.Module,
        run: Callable[..., Tensor],
        device: torch.device,
        factor: float = 2.0,
    ) -> Verdict:
        """Compare ``run``, the measured form of ``module`` on the device.

        Args:
            module: copy of the module on the device.
            run: the module, or its compiled form.
            device: the measured device.
            factor: allowed error as a multiple of the CPU's error in the same precision.
        """
        inputs = [x.to(device) for x in self._inputs]
        found = self._results(module, run, inputs, autocast(device, self._compute_dtype))

        def measure(errors: dict[str, float]) -> None:
            for name, exact in self._oracle.items():
                compared = found[name], self._baseline[name], exact
                errors[name] = assert_within_budget(*compared, name, factor).total

        return judge(measure)

    def _results(
        self,
        module: nn.Module,
        run: Callable[..., Tensor],
        inputs: Sequence[Tensor],
        precision: torch.autocast,
    ) -> Tensors:
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
        with precision:
            out = run(*leaves, **self._options)
        module.zero_grad(set_to_none=True)
        out.backward(random_gradient(out))
        found = {self._output: torch.atleast_1d(out.detach())}
        found |= {f"dinput_{i}": x.grad for i, x in enumerate(leaves) if x.grad is not None}
        parts: dict[str, list[Tensor]] = {}
        for name, weight in module.named_parameters():
            if weight.grad is not None:
                parts.setdefault(f"d{self._part_of(name)}", []).append(weight.grad.flatten())
        found |= {part: torch.cat(gradients) for part, gradients in parts.items()}
        return {name: x.cpu() for name, x in found.items()}


def random_gradient(out: Tensor) -> Tensor:
    """Draw a gradient that is equal for all dtypes and devices, and exact in bfloat16."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(out.shape, generator=generator).bfloat16().to(out.device, out.dtype)
