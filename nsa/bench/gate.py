"""The correctness gate: results of a provider against fp64 on sampled rows, before anything is timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from nsa.bench.cases import CASES, Case, Tensors, prepare
from nsa.bench.points import Point
from nsa.config import BRANCHES, NSAConfig
from nsa.ops.combination.reference import combine_reference
from nsa.ops.selection import select_blocks
from nsa.rope import Rope
from nsa.testing import AttentionInputs, packed_offsets
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

SAMPLED_QUERIES, SAMPLED_KEYS, SAMPLED_CHOICES = 64, 12, 256
# Gradients of keys are taken where few queries see them: of dense attention, which is not ours, and of sequences so long that
# the softmax of all queries behind a key would take the oracle minutes.
_TAIL = 1024
_LONGEST_WHOLE = 262_144

Values = Callable[[torch.dtype], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Verdict:
    """Outcome of the gate.

    Attributes:
        correct: None where nothing ran.
        errors: by result, ``||x - oracle|| / ||oracle||`` over what was sampled.
        note: what is wrong, or why nothing ran.
    """

    correct: bool | None
    errors: dict[str, float]
    note: str | None = None


class Gate:
    """Compares results of one case at one point.

    Args:
        case: the operator.
        tensors: its inputs, see ``nsa.bench.cases.prepare``.
        point: where it is measured.
        config: the sparse pattern.
    """

    def __init__(self, case: Case, tensors: Tensors, point: Point, config: NSAConfig) -> None:
        self.case, self.tensors, self.point, self.config = case, tensors, point, config
        # All of the first queries, which see few keys: there the differences that make up dq cancel most.
        edges = [*range(config.block_size + 1), config.num_selected_blocks * config.block_size, config.window_size]
        self.queries = self._sample([*edges, point.seq_len - 1], SAMPLED_QUERIES, seed=7)
        self.keys = self._sample([0, config.block_size, point.seq_len - 1], SAMPLED_KEYS, seed=8)
        if point.seq_len > _LONGEST_WHOLE:
            self.keys = (point.seq_len - 1 - self.keys % _TAIL).unique() + (point.batch - 1) * point.seq_len
        self._known: dict[str, dict[torch.dtype, Mapping[str, Tensor]]] = {}
        self._choice_known: Tensor | None = None

    def _sample(self, positions: list[int], drawn: int, seed: int) -> Tensor:
        """Packed rows: these positions of the first and the last sequence, and some anywhere."""
        generator = torch.Generator().manual_seed(seed)
        rows = torch.tensor([position for position in positions if position < self.point.seq_len])
        last = (self.point.batch - 1) * self.point.seq_len
        anywhere = torch.randint(self.point.tokens, (drawn,), generator=generator)
        return torch.cat((rows, rows + last, anywhere)).unique().to(self.point.device)

    def check(self, results: Mapping[str, Tensor], *, dense: bool = False, backend: str = "reference") -> Verdict:
        """Compare.

        Args:
            results: outputs, and gradients as ``d`` and the input's name.
            dense: whether they are dense causal attention over q, k_slc, v_slc.
            backend: of the choice behind whole attention, which is looked at by itself and then given to the oracle.
        """
        errors: dict[str, float] = {}
        try:
            for name, result in results.items():
                finite = not result.dtype.is_floating_point or bool(result.isfinite().all())
                assert finite, f"{name}: values that are not finite"
            if self.case.name == "attention.choice":
                self.check_choice(results["block_indices"], self.tensors)
                return Verdict(True, {})
            if self.case.name == "attention" and not dense:
                self._choose(backend)
            for names, rows, values in self._groups("dense" if dense else self.case.name):
                actual = {name: results[name].detach() for name in names if name in results}
                packed = {name: x.flatten(0, 1) if x.ndim == 4 else x for name, x in actual.items()}
                if packed:
                    found = check_sampled(values, packed, rows, self.point.dtype, self.case.name)
                    errors |= {name: round(budget.total, 6) for name, budget in found.items()}
            left = sorted(set(results) - set(errors))
            assert not left, f"{', '.join(left)}: nothing to compare with"
        except AssertionError as error:
            return Verdict(False, errors, str(error))
        return Verdict(True, errors)

    # --- Expected values ------------------------------------------------------------------------------------------------
    def _groups(self, name: str) -> list[tuple[tuple[str, ...], Tensor, Values]]:
        """Results that are sampled on the same rows: names, packed rows, and values by dtype."""
        x, config, queries, keys = self._packed, self.config, self.queries, self.keys
        if name == "attention":
            tokens = tuple(f"d{key}" for key in self.case.inputs if key not in ("q", "gates"))
            return [
                (("out", "dq", "dgates"), queries, self._whole("q", lambda whole, t: whole.at_queries(queries, t, x["dout"]))),
                (tokens, keys, self._whole("k", lambda whole, t: whole.at_tokens(keys, t, x["dout"]))),
            ]
        if name == "attention.combine":
            return [(("out", "dgates", *(f"dout_{branch}" for branch in BRANCHES)), queries, self._combined)]
        if name == "attention.compress":
            return [group for kind in ("k", "v") for group in self._compressed(kind)]
        if name == "attention.compressed":
            branch = sampled_compressed(x["q"], x["k_cmp"], x["v_cmp"], config, cu_seqlens_q=self._offsets)
            return self._branch(branch, ("k_cmp", "v_cmp"), self._blocks)
        if name == "attention.window":
            branch = sampled_window(x["q"], x["k_win"], x["v_win"], config, cu_seqlens_q=self._offsets)
            return self._branch(branch, ("k_win", "v_win"), keys)
        if name == "attention.selected":
            branch = sampled_selected(x["q"], x["k_slc"], x["v_slc"], x["block_indices"], config, cu_seqlens_q=self._offsets)
            return self._branch(branch, ("k_slc", "v_slc"), keys)
        assert name == "dense"
        offsets = self._offsets.tolist()
        every = CompressedKeys(size=1, stride=1)  # blocks of one token: all up to the query's own
        branch = SampledAttention(x["q"], x["k_slc"], x["v_slc"], every, offsets, offsets, offsets, config.head_dim**-0.5)
        tail = keys[keys % self.point.seq_len >= self.point.seq_len - _TAIL]
        return self._branch(branch, ("k_slc", "v_slc"), tail)

    def _branch(
        self, branch: SampledAttention, names: tuple[str, str], keys: Tensor
    ) -> list[tuple[tuple[str, ...], Tensor, Values]]:
        """Attention alone: out and dq of queries, dk and dv of keys."""
        dout, label = self._packed["dout"], names[0]

        def of_keys(dtype: torch.dtype) -> Mapping[str, Tensor]:
            found = branch.at_keys(keys, dtype, dout)
            return {f"d{names[0]}": found["dk"], f"d{names[1]}": found["dv"]}

        of_queries = self._once(f"{label} q", lambda dtype: branch.at_queries(self.queries, dtype, dout))
        return [
            (("out", "dq"), self.queries, of_queries),
            ((f"d{names[0]}", f"d{names[1]}"), keys, self._once(f"{label} k", of_keys)),
        ]

    def _compressed(self, kind: str) -> list[tuple[tuple[str, ...], Tensor, Values]]:
        """Compressed keys, rotated, or values; and the gradient of the raw ones."""
        raw, y = f"{kind}_cmp_raw", f"{kind}_cmp"
        rope = Rope.from_config(self.config) if kind == "k" else None
        compression = SampledCompression(self._packed[raw], None, self.config, self._offsets, rope)
        dy = self._packed[f"d{y}"]
        return [
            ((y,), self._blocks, lambda dtype: {y: compression.at_blocks(self._blocks, dtype)["y"]}),
            ((f"d{raw}",), self.keys, lambda dtype: {f"d{raw}": compression.at_tokens(self.keys, dtype, dy)["dx"]}),
        ]

    def _combined(self, dtype: torch.dtype) -> Mapping[str, Tensor]:
        """The gated sum and its gradients."""
        x = {name: self._packed[name][self.queries].to(dtype) for name in (*(f"out_{b}" for b in BRANCHES), "gates", "dout")}
        leaves = {name: x[name].requires_grad_() for name in x if name != "dout"}
        outs = leaves["out_cmp"], leaves["out_slc"], leaves["out_win"]
        out = combine_reference(outs, leaves["gates"])
        grads = torch.autograd.grad(out, tuple(leaves.values()), x["dout"])
        return {"out": out.detach(), **{f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}}

    def _whole(self, label: str, values: Callable[[SampledWhole, torch.dtype], Mapping[str, Tensor]]) -> Values:
        """Whole attention over the choice at hand; gradients are named as in ``results``."""

        def named(dtype: torch.dtype) -> Mapping[str, Tensor]:
            names = {field.name for field in fields(AttentionInputs)}
            inputs = AttentionInputs(**{name: self._packed[name] for name in names if name in self._packed},
                                     cu_seqlens_q=self._offsets, cu_seqlens_k=self._offsets)  # fmt: skip
            assert self._choice_known is not None
            whole = SampledWhole(inputs, self.config, self._choice_known.flatten(0, 1), rope=Rope.from_config(self.config))
            found = values(whole, dtype)
            return {name if name == "out" else f"d{name}": x for name, x in found.items()}

        return self._once(f"whole {label}", named)

    def _once(self, label: str, values: Values) -> Values:
        """The same, computed once for each dtype."""

        def remembered(dtype: torch.dtype) -> Mapping[str, Tensor]:
            known = self._known.setdefault(label, {})
            if dtype not in known:
                known[dtype] = values(dtype)
            return known[dtype]

        return remembered

    # --- The choice -----------------------------------------------------------------------------------------------------
    def _choose(self, backend: str) -> None:
        """The indices behind whole attention, looked at as those of the operator are; another choice, other values."""
        x = prepare(CASES["attention.choice"], self.tensors, self.point, self.config, backend)
        chosen = select_blocks(x["q"], x["k_cmp"], x["lse"], self.config, backend=backend)
        self.check_choice(chosen, x)
        if self._choice_known is None or not torch.equal(chosen, self._choice_known):
            self._choice_known = chosen
            self._known.clear()

    def check_choice(self, chosen: Tensor, x: Tensors) -> None:
        """Fail unless indices are legal everywhere, and on sampled rows those that fp64 chooses by the options of the pattern.

        Args:
            chosen: ``[B, S, Hkv, n]``.
            x: ``q`` and the ``k_cmp`` that the choice was made from.
        """
        config = self.config
        t = torch.arange(self.point.seq_len, device=chosen.device)[None, :, None]
        current = t // config.block_size
        there = chosen >= 0
        rising = (chosen[..., 1:] > chosen[..., :-1]) | ~there[..., 1:]
        assert bool((rising & (there[..., :-1] | ~there[..., 1:])).all()), "block_indices: not ascending, -1 at the end"
        assert bool((chosen <= current[..., None]).all()), "block_indices: a block of the future"
        if config.coarse_block_size is None:
            n = torch.full_like(t, config.num_selected_blocks)
            for length, fewer in reversed(config.block_counts):
                n = torch.where(t < length, fewer, n)
            whole = there.sum(-1) == torch.minimum(n, current + 1)
            assert bool(whole.all()), "block_indices: not as many blocks as there are to choose"
        init = torch.arange(config.num_init_blocks, device=chosen.device) + 0 * t[..., None]
        local = current[..., None] - torch.arange(config.num_local_blocks, device=chosen.device)
        for forced in torch.cat((init, local), -1).unbind(-1):
            wanted = (forced >= 0) & (forced <= current)
            assert bool(((chosen == forced[..., None]).any(-1) | ~wanted).all()), "block_indices: a forced block is missing"
        sampled = sampled_choice(x["q"].flatten(0, 1), x["k_cmp"], config, cu_seqlens_q=self._offsets)
        found = sampled.agreement(self._choices, chosen.flatten(0, 1))
        assert found.against == 0, f"block_indices: {found.against} of {found.rows} sampled choices differ from fp64"

    def recall(self, chosen: Tensor) -> float:
        """Share of the blocks of the exact choice, in fp64 and without approximation, that were chosen ``[B, S, Hkv, n]``.

        Over the sampled rows in which it is clear which block is the n-th best.
        """
        config = replace(self.config, coarse_block_size=None, num_coarse_blocks=0, score_precision="exact")
        sampled = sampled_choice(self._packed["q"], self.tensors["k_cmp"], config, cu_seqlens_q=self._offsets)
        exact, clear = sampled.at_queries(self._choices)
        actual = chosen.flatten(0, 1)[self._choices]
        wanted = (exact >= 0) & clear[..., None]
        found = (exact[..., None] == actual[..., None, :]).any(-1) & wanted
        return round(float(found.sum() / wanted.sum()), 5)

    # --- Where things lie -----------------------------------------------------------------------------------------------
    @cached_property
    def _packed(self) -> Tensors:
        """All tensors, those of a dense batch as packed tokens."""
        batch = (self.point.batch, self.point.seq_len)
        return {name: x.detach().flatten(0, 1) if x.shape[:2] == batch else x.detach() for name, x in self.tensors.items()}

    @cached_property
    def _offsets(self) -> Tensor:
        return packed_offsets([self.point.seq_len] * self.point.batch, self.point.device)

    @cached_property
    def _choices(self) -> Tensor:
        """Packed rows on which choices are compared: the sampled queries, and others evenly over all tokens."""
        step = max(1, self.point.tokens // SAMPLED_CHOICES)
        return torch.cat((self.queries, torch.arange(0, self.point.tokens, step, device=self.point.device))).unique()

    @cached_property
    def _blocks(self) -> Tensor:
        """Packed compressed rows: blocks that start at or before the sampled keys."""
        size, stride, seq_len = self.config.compress_block_size, self.config.compress_stride, self.point.seq_len
        blocks = (seq_len - size) // stride + 1
        inside = self.keys % seq_len // stride
        return (self.keys // seq_len * blocks + inside)[inside < blocks].unique()


def approximates(config: NSAConfig) -> bool:
    """Whether the pattern's choice is not meant to be the exact one."""
    return config.coarse_block_size is not None or config.score_precision != "exact"
