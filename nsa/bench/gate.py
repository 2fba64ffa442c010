"""The correctness gate: results are compared with fp64 on sampled rows before anything is timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, partial

import torch
from torch import Tensor, nn

from nsa.bench.cases import CASES, Problem, Tensors, prepare
from nsa.config import NSAConfig
from nsa.ops.selection import select_blocks
from nsa.rope import Rope
from nsa.testing import AttentionInputs, assert_within_budget, packed_offsets
from nsa.testing.sampled import (
    SampledAttention,
    SampledCompression,
    SampledWhole,
    check_sampled,
    sampled_choice,
    sampled_compressed,
    sampled_selected,
    sampled_window,
)
from nsa.testing.sampled.attention import CompressedKeys

SAMPLED_QUERIES, SAMPLED_KEYS, SAMPLED_SELECTIONS = 64, 12, 256
# Gradients of keys are compared where few queries see them: of dense attention, which is not ours,
# and of sequences so long that all queries behind a key would take the oracle minutes.
_TAIL = 1024
_LONGEST_WHOLE = 262_144

_SAMPLED: Mapping[str, Callable[..., SampledAttention]] = {
    "cmp": sampled_compressed,
    "slc": sampled_selected,
    "win": sampled_window,
}

Values = Callable[[torch.dtype], Mapping[str, Tensor]]
Group = tuple[tuple[str, ...], Tensor, Values]  # results, their sampled rows, and values by dtype


@dataclass(frozen=True)
class Verdict:
    """Outcome of a gate.

    Attributes:
        correct: None where nothing ran.
        errors: by result, ``||x - oracle|| / ||oracle||`` over what was sampled.
        note: what is wrong, or why nothing ran.
    """

    correct: bool | None
    errors: dict[str, float]
    note: str | None = None


def judge(measure: Callable[[dict[str, float]], None]) -> Verdict:
    """The verdict of a comparison that fills in errors and fails where one is too large."""
    errors, note = dict[str, float](), None
    try:
        measure(errors)
    except AssertionError as error:
        note = str(error)
    rounded = {name: float(f"{error:.3g}") for name, error in errors.items()}
    return Verdict(note is None, rounded, note)


def compare(
    found: Tensors,
    baseline: Tensors,
    oracle: Tensors,
    factor: float = 2.0,
    prefix: str = "",
) -> Verdict:
    """Whole results beside fp64; the budget is ``factor`` times the error of the baseline."""

    def measure(errors: dict[str, float]) -> None:
        for name, exact in oracle.items():
            tested = found[name], baseline[name], exact
            errors[name] = assert_within_budget(*tested, f"{prefix}{name}", factor).total

    return judge(measure)


def weight_gradients(module: nn.Module, part_of: Callable[[str], str]) -> Tensors:
    """Gradients of the weights in one row for each part, as ``d`` and its name, on the CPU."""
    rows: dict[str, list[Tensor]] = {}
    for name, weight in module.named_parameters():
        if weight.grad is not None:
            rows.setdefault(f"d{part_of(name)}", []).append(weight.grad.flatten().cpu())
    return {part: torch.cat(row) for part, row in rows.items()}


class Gate:
    """Compares results of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        point, config = problem.point, problem.config
        # Differences that make up dq cancel most in the first queries, which see few keys.
        edges = [*range(config.block_size + 1), config.num_selected_blocks * config.block_size]
        edges += [config.window_size, point.seq_len - 1]
        self.queries = self._sample(edges, SAMPLED_QUERIES, seed=7)
        self.keys = self._sample([0, config.block_size, point.seq_len - 1], SAMPLED_KEYS, seed=8)
        if point.seq_len > _LONGEST_WHOLE:
            last = (point.batch - 1) * point.seq_len
            self.keys = (point.seq_len - 1 - self.keys % _TAIL).unique() + last
        self._known: dict[str, list[Group]] = {}
        self._selection: Tensor | None = None

    def _sample(self, positions: list[int], drawn: int, seed: int) -> Tensor:
        """Packed rows: these positions of the first and the last sequence, and random ones."""
        point = self.problem.point
        generator = torch.Generator().manual_seed(seed)
        rows = torch.tensor([position for position in positions if position < point.seq_len])
        last = (point.batch - 1) * point.seq_len
        anywhere = torch.randint(point.tokens, (drawn,), generator=generator)
        return torch.cat((rows, rows + last, anywhere)).unique().to(point.device)

    def check(
        self,
        results: Tensors,
        *,
        dense: bool = False,
        backend: str = "reference",
    ) -> Verdict:
        """Compare.

        Args:
            results: outputs, and gradients as ``d`` and the input's name.
            dense: whether they are dense causal attention over q, k_slc, v_slc.
            backend: of the selection within whole attention, which is checked by itself and then
                given to the oracle.
        """
        return judge(partial(self._check, results, dense, backend))

    def _check(self, results: Tensors, dense: bool, backend: str, errors: dict[str, float]) -> None:
        case, dtype = self.problem.case.name, self.problem.point.dtype
        for name, result in results.items():
            finite = not result.is_floating_point() or bool(result.isfinite().all())
            assert finite, f"{name}: values that are not finite"
        if case == "attention.choice":
            self.check_selection(results["block_indices"], self.problem)
            return
        if case == "attention" and not dense:
            self._select(backend)
        for names, rows, values in self._groups("dense" if dense else case):
            actual = {name: results[name].detach() for name in names if name in results}
            packed = {name: x.flatten(0, -3) for name, x in actual.items()}
            if packed:
                found = check_sampled(values, packed, rows, dtype, case)
                errors |= {name: budget.total for name, budget in found.items()}
        left = sorted(set(results) - set(errors))
        assert not left, f"{', '.join(left)}: nothing to compare with"

    # --- Expected values
    def _groups(self, name: str) -> list[Group]:
        """Results that are sampled on the same rows; values are computed once for each dtype."""
        if name not in self._known:
            groups = self._whole() if name == "attention" else self._alone(name)
            self._known[name] = [(names, rows, cache(values)) for names, rows, values in groups]
        return self._known[name]

    def _alone(self, name: str) -> list[Group]:
        """Groups of one operator, or of dense attention."""
        x, config, keys = self._packed, self.problem.config, self.keys
        if name == "attention.combine":
            return [self._rows_alone()]
        if name == "attention.compress":
            return [*self._compressed("k", Rope.from_config(config)), *self._compressed("v", None)]
        label = {"attention.compressed": "cmp", "attention.window": "win"}.get(name, "slc")
        args = [x["q"], x[f"k_{label}"], x[f"v_{label}"]]
        if name == "dense":
            seq_len, offsets = self.problem.point.seq_len, self._offsets.tolist()
            every = CompressedKeys(size=1, stride=1)  # blocks of one token: all up to its own
            scale = config.head_dim**-0.5
            q, k, v = args
            branch = SampledAttention(q, k, v, every, offsets, offsets, offsets, scale)
            return self._branch(branch, label, keys[keys % seq_len >= seq_len - _TAIL])
        if name == "attention.selected":
            args.append(x["block_indices"])
        branch = _SAMPLED[label](*args, config, cu_seqlens_q=self._offsets)
        return self._branch(branch, label, self._blocks if label == "cmp" else keys)

    def _rows_alone(self) -> Group:
        """A case whose rows do not depend on each other: it is computed of the sampled ones."""
        case, config, queries = self.problem.case, self.problem.config, self.queries
        rows = {name: self._packed[name][queries] for name in (*case.inputs, "dout")}

        def values(dtype: torch.dtype) -> Mapping[str, Tensor]:
            x = {name: row.to(dtype).requires_grad_() for name, row in rows.items()}
            (out,) = case.call(x, config, "reference")
            grads = torch.autograd.grad(out, [x[name] for name in case.inputs], x["dout"])
            names = (f"d{name}" for name in case.inputs)
            return {"out": out.detach(), **dict(zip(names, grads, strict=True))}

        return ("out", *(f"d{name}" for name in case.inputs)), queries, values

    def _branch(self, branch: SampledAttention, name: str, keys: Tensor) -> list[Group]:
        """Attention alone: out and dq of queries, dk and dv of keys."""
        dout, queries, names = self._packed["dout"], self.queries, (f"dk_{name}", f"dv_{name}")

        def of_keys(dtype: torch.dtype) -> Mapping[str, Tensor]:
            found = branch.at_keys(keys, dtype, dout)
            return dict(zip(names, (found["dk"], found["dv"]), strict=True))

        def of_queries(dtype: torch.dtype) -> Mapping[str, Tensor]:
            return branch.at_queries(queries, dtype, dout)

        return [(("out", "dq"), queries, of_queries), (names, keys, of_keys)]

    def _compressed(self, kind: str, rope: Rope | None) -> list[Group]:
        """Compressed keys, rotated, or values; and the gradient of the raw ones."""
        y, raw, blocks, keys = f"{kind}_cmp", f"{kind}_cmp_raw", self._blocks, self.keys
        config, dy = self.problem.config, self._packed[f"d{kind}_cmp"]
        compression = SampledCompression(self._packed[raw], None, config, self._offsets, rope)
        return [
            ((y,), blocks, lambda dtype: {y: compression.at_blocks(blocks, dtype)["y"]}),
            (
                (f"d{raw}",),
                keys,
                lambda dtype: {f"d{raw}": compression.at_tokens(keys, dtype, dy)["dx"]},
            ),
        ]

    def _whole(self) -> list[Group]:
        """Whole attention over the selection at hand."""
        x, queries, keys, offsets = self._packed, self.queries, self.keys, self._offsets
        names = [field.name for field in fields(AttentionInputs) if field.name in x]
        inputs = AttentionInputs(
            **{name: x[name] for name in names},
            cu_seqlens_q=offsets,
            cu_seqlens_k=offsets,
        )
        assert self._selection is not None
        chosen, config = self._selection.flatten(0, 1), self.problem.config
        whole = SampledWhole(inputs, config, chosen, rope=Rope.from_config(config))

        def of_queries(dtype: torch.dtype) -> Mapping[str, Tensor]:
            found = whole.at_queries(queries, dtype, x["dout"])
            return {name if name == "out" else f"d{name}": y for name, y in found.items()}

        def of_keys(dtype: torch.dtype) -> Mapping[str, Tensor]:
            return {f"d{name}": y for name, y in whole.at_tokens(keys, dtype, x["dout"]).items()}

        of_tokens = tuple(f"d{name}" for name in names if name not in ("q", "gates"))
        return [(("out", "dq", "dgates"), queries, of_queries), (of_tokens, keys, of_keys)]

    # --- Selection
    def _select(self, backend: str) -> None:
        """Checks the block indices within whole attention; with others, values are others too."""
        problem = self.problem
        base, point, config = problem.tensors, problem.point, problem.config
        made = prepare(CASES["attention.choice"], base, point, config, backend)
        x = made.tensors
        chosen = select_blocks(x["q"], x["k_cmp"], x["lse"], config, backend=backend)
        self.check_selection(chosen, made)
        if self._selection is None or not torch.equal(chosen, self._selection):
            self._selection = chosen
            self._known.pop("attention", None)

    def check_selection(self, chosen: Tensor, problem: Problem) -> None:
        """Fail unless indices are legal everywhere, and on sampled rows those that fp64 selects.

        Args:
            chosen: ``[B, S, Hkv, n]``.
            problem: with the ``q`` and the ``k_cmp`` that were scored.
        """
        config, x = problem.config, problem.tensors
        t = torch.arange(problem.point.seq_len, device=chosen.device)[None, :, None]
        current, there = t // config.block_size, chosen >= 0
        ascending = (chosen[..., 1:] > chosen[..., :-1]) & there[..., :-1]
        ascending |= ~there[..., 1:]
        assert bool(ascending.all()), "block_indices: not ascending, -1 at the end"
        assert bool((chosen <= current[..., None]).all()), "block_indices: a block of the future"
        if config.coarse_block_size is None:
            n = torch.full_like(t, config.num_selected_blocks)
            for length, fewer in reversed(config.block_counts):
                n = torch.where(t < length, fewer, n)
            whole = there.sum(-1) == torch.minimum(n, current + 1)
            assert bool(whole.all()), "block_indices: not as many blocks as there are to select"
        init = torch.arange(config.num_init_blocks, device=chosen.device) + 0 * t[..., None]
        local = current[..., None] - torch.arange(config.num_local_blocks, device=chosen.device)
        for forced in torch.cat((init, local), -1).unbind(-1):
            absent = (forced < 0) | (forced > current)
            found = (chosen == forced[..., None]).any(-1) | absent
            assert bool(found.all()), "block_indices: a forced block is missing"
        q = x["q"].flatten(0, 1)
        sampled = sampled_choice(q, x["k_cmp"], config, cu_seqlens_q=self._offsets)
        agreement = sampled.agreement(self._selections, chosen.flatten(0, 1))
        different = f"{agreement.against} of {agreement.rows} sampled selections differ from fp64"
        assert agreement.against == 0, f"block_indices: {different}"

    def recall(self, chosen: Tensor) -> float:
        """Share of the blocks of the exact fp64 selection found in ``chosen`` ``[B, S, Hkv, n]``.

        Over the sampled rows in which it is clear which block is the n-th best.
        """
        config, x = self.problem.config, self._packed
        config = replace(
            config,
            coarse_block_size=None,
            num_coarse_blocks=0,
            score_precision="exact",
        )
        sampled = sampled_choice(x["q"], x["k_cmp"], config, cu_seqlens_q=self._offsets)
        exact, clear = sampled.at_queries(self._selections)
        actual = chosen.flatten(0, 1)[self._selections]
        wanted = (exact >= 0) & clear[..., None]
        found = (exact[..., None] == actual[..., None, :]).any(-1) & wanted
        return round(float(found.sum() / wanted.sum()), 5)

    # --- Where things lie
    @cached_property
    def _packed(self) -> Tensors:
        """All tensors, those of a dense batch as packed tokens."""
        batch = (self.problem.point.batch, self.problem.point.seq_len)
        tensors = {name: x.detach() for name, x in self.problem.tensors.items()}
        return {name: x.flatten(0, 1) if x.shape[:2] == batch else x for name, x in tensors.items()}

    @cached_property
    def _offsets(self) -> Tensor:
        point = self.problem.point
        return packed_offsets([point.seq_len] * point.batch, point.device)

    @cached_property
    def _selections(self) -> Tensor:
        """Packed rows on which selections are compared: the sampled queries, and evenly others."""
        point = self.problem.point
        step = max(1, point.tokens // SAMPLED_SELECTIONS)
        evenly = torch.arange(0, point.tokens, step, device=point.device)
        return torch.cat((self.queries, evenly)).unique()

    @cached_property
    def _blocks(self) -> Tensor:
        """Packed compressed rows: blocks that start at or before the sampled keys."""
        config, seq_len = self.problem.config, self.problem.point.seq_len
        blocks = (seq_len - config.compress_block_size) // config.compress_stride + 1
        inside = self.keys % seq_len // config.compress_stride
        return (self.keys // seq_len * blocks + inside)[inside < blocks].unique()


def approximates(config: NSAConfig) -> bool:
    """Whether the pattern's selection is not meant to be the exact one."""
    return config.coarse_block_size is not None or config.score_precision != "exact"
