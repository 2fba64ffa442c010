"""The correctness gate: results of a provider against fp64 on sampled queries and keys, before anything is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.bench.cases import Case, Tensors, compress_and_rotate, prepare
from nsa.bench.oracle import (
    EXACT,
    Arithmetic,
    Branch,
    chosen_mask,
    compressed_branch,
    dense_branch,
    exact_choice,
    selected_branch,
    window_branch,
)
from nsa.bench.points import Point
from nsa.config import BRANCHES, NSAConfig
from nsa.ops.selection import select_blocks
from nsa.testing import assert_within_budget, measure

SAMPLED_QUERIES, SAMPLED_KEYS, SAMPLED_CHOICES = 64, 16, 256
# Dense attention is not ours: the gradients of its keys are taken where few queries see them.
_DENSE_TAIL = 1024

# What is expected: name -> (index of the rows in the result, fp64 values, and the same rounded as the dtype must).
Expected = dict[str, tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Verdict:
    """Outcome of the gate.

    Attributes:
        correct: None where nothing ran.
        errors: by result, ``||x - oracle|| / ||oracle||`` over what was sampled; the largest over the sequences looked at.
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
        self.scale = config.head_dim**-0.5
        self.sequences = sorted({0, point.batch - 1})
        generator = torch.Generator().manual_seed(7)
        # All of the first queries, which see few keys: there the differences that make up dq cancel most.
        edges = [*range(config.block_size + 1), config.num_selected_blocks * config.block_size, config.window_size]
        edges += [point.seq_len - 1]
        drawn = torch.randint(point.seq_len, (SAMPLED_QUERIES,), generator=generator)
        self.queries = self._positions(torch.cat((torch.tensor(edges), drawn)))
        drawn = torch.randint(point.seq_len, (SAMPLED_KEYS,), generator=generator)
        self.keys = self._positions(torch.cat((torch.tensor([0, config.block_size, point.seq_len - 1]), drawn)))
        self._known: dict[tuple[bool, bool], list[Expected]] = {}

    def _positions(self, wanted: Tensor) -> Tensor:
        return wanted[wanted < self.point.seq_len].unique().to(self.point.device)

    def check(self, results: Mapping[str, Tensor], *, dense: bool = False, backend: str = "auto") -> Verdict:
        """Compare.

        Args:
            results: outputs, and gradients as ``d`` and the input's name.
            dense: whether they are dense causal attention over q, k_slc, v_slc.
            backend: of the choice behind the results, which is looked at by itself and then given to the oracle.
        """
        errors: dict[str, float] = {}
        try:
            for name, result in results.items():
                finite = not result.dtype.is_floating_point or bool(result.isfinite().all())
                assert finite, f"{name}: values that are not finite"
            if self.case.name == "attention.choice":
                self._check_choice(results["block_indices"])
                return Verdict(True, {})
            for expected in self._expected(dense, len(results) > len(self.case.outputs), backend):
                for name, (index, oracle, baseline) in expected.items():
                    actual = results[name].detach()[tuple(index)]
                    errors[name] = round(max(errors.get(name, 0.0), measure(actual, oracle).total), 6)
                    assert_within_budget(actual, baseline, oracle, name)
        except AssertionError as error:
            return Verdict(False, errors, str(error))
        return Verdict(True, errors)

    # --- Expected values ------------------------------------------------------------------------------------------------
    def _expected(self, dense: bool, gradients: bool, backend: str) -> Iterator[Expected]:
        """For each sequence looked at; kept where it does not depend on who computes the choice."""
        if self.case.name == "attention" and not dense:
            choice = self._choice(backend)
            yield from (self._of_whole(b, choice[b], gradients) for b in self.sequences)
            return
        if (dense, gradients) not in self._known:
            build = self._of_dense if dense else self._of_operator
            self._known[dense, gradients] = [build(b, gradients) for b in self.sequences]
        yield from self._known[dense, gradients]

    def _pair(self, values: Callable[[Arithmetic], Tensors], index: Callable[[str], Tensor]) -> Expected:
        """Rows in fp64, and by the arithmetic of a kernel."""
        oracle, baseline = values(EXACT), values(Arithmetic(torch.float32, self.point.dtype))
        return {name: (index(name), oracle[name], baseline[name].to(self.point.dtype)) for name in oracle}

    def _of_operator(self, b: int, gradients: bool) -> Expected:
        name, config, scale = self.case.name, self.config, self.scale
        if name == "attention.compress":
            return self._of_compress(b, gradients)
        if name == "attention.combine":
            return self._of_combine(b, gradients)
        if name == "attention.compressed":
            k, v = self.tensors["k_cmp"], self.tensors["v_cmp"]

            def blocks(a: Arithmetic) -> Branch:
                return compressed_branch(self._blocks_of(b, k, a), self._blocks_of(b, v, a), config, scale)

            return self._of_branch(b, blocks, ("k_cmp", "v_cmp"), self._blocks(), gradients)
        names = ("k_win", "v_win") if name == "attention.window" else ("k_slc", "v_slc")

        def branch(a: Arithmetic) -> Branch:
            k, v = (self._of(b, key, a) for key in names)
            if name == "attention.window":
                return window_branch(k, v, config, scale)
            return selected_branch(k, v, self.tensors["block_indices"][b], config, scale)

        return self._of_branch(b, branch, names, self.keys, gradients)

    def _of_dense(self, b: int, gradients: bool) -> Expected:
        def branch(a: Arithmetic) -> Branch:
            return dense_branch(self._of(b, "k_slc", a), self._of(b, "v_slc", a), self.scale)

        tail = self.keys[self.keys >= self.point.seq_len - _DENSE_TAIL]
        return self._of_branch(b, branch, ("k_slc", "v_slc"), tail, gradients)

    def _of_branch(
        self, b: int, make: Callable[[Arithmetic], Branch], names: tuple[str, str], keys: Tensor, gradients: bool
    ) -> Expected:
        """Attention alone: out, dq, and the gradients of the sampled keys."""
        every = torch.arange(self.point.seq_len, device=self.point.device)

        def values(a: Arithmetic) -> Tensors:
            branch, q, dout = make(a), self._of(b, "q", a), self._of(b, "dout", a)
            out, dq = self._rows(branch, q, dout, a)
            if not gradients:
                return {"out": out}
            dk, dv = branch.key_gradients(q, dout, every, keys, a.round)
            return {"out": out, "dq": dq, f"d{names[0]}": dk, f"d{names[1]}": dv}

        packed = (keys + b * self._num_blocks())[None]
        at_keys = packed if names[0] == "k_cmp" else self._at(b, keys)
        return self._pair(values, lambda name: self._at(b, self.queries) if name in ("out", "dq") else at_keys)

    def _rows(self, branch: Branch, q: Tensor, dout: Tensor, a: Arithmetic) -> tuple[Tensor, Tensor]:
        """out and dq of the sampled queries."""
        t = self.queries
        parts = [(out, dq) for _, out, _, dq in branch.rows(q[t], t, dout[t], a.round)]
        return torch.cat([out for out, _ in parts]), torch.cat([dq for _, dq in parts if dq is not None])

    def _of_compress(self, b: int, gradients: bool) -> Expected:
        blocks, num = self._blocks(), self._num_blocks()

        def values(a: Arithmetic) -> Tensors:
            raw, (k, v) = self._compressed(b, a)
            found = {"k_cmp": k.detach()[blocks], "v_cmp": v.detach()[blocks]}
            for y, name, source in ((k, "dk_cmp", "k_cmp_raw"), (v, "dv_cmp", "v_cmp_raw")):
                if gradients:
                    dy = torch.zeros_like(y)
                    dy[:num] = self._blocks_of(b, self.tensors[name], a)
                    found[f"d{source}"] = torch.autograd.grad(y, raw[source], dy)[0][0, self.keys]
            return found

        rows = (blocks + b * num)[None]
        return self._pair(values, lambda name: rows if name in ("k_cmp", "v_cmp") else self._at(b, self.keys))

    def _compressed(self, b: int, a: Arithmetic) -> tuple[Tensors, tuple[Tensor, ...]]:
        """Raw keys and values of a sequence as leaves, and what the specification compresses and rotates them to."""
        raw = {name: self._of(b, name, a)[None].requires_grad_() for name in ("k_cmp_raw", "v_cmp_raw")}
        with torch.enable_grad():
            return raw, compress_and_rotate(raw, self.config, "reference")

    def _of_combine(self, b: int, gradients: bool) -> Expected:
        t = self.queries

        def values(a: Arithmetic) -> Tensors:
            outs = [self._of(b, f"out_{branch}", a)[t] for branch in BRANCHES]
            gates, dout = self._of(b, "gates", a)[t], self._of(b, "dout", a)[t]
            found = {"out": torch.stack([out * gates[..., i, None] for i, out in enumerate(outs)]).sum(0)}
            if gradients:
                found |= {f"dout_{name}": dout * gates[..., i, None] for i, name in enumerate(BRANCHES)}
                found["dgates"] = torch.stack([(dout * out).sum(-1) for out in outs], -1)
            return found

        return self._pair(values, lambda name: self._at(b, t))

    def _of_whole(self, b: int, chosen: Tensor, gradients: bool) -> Expected:
        """The gated sum of three branches; the gradients of raw keys through compression and rotation by autograd."""
        t = self.queries

        def values(a: Arithmetic) -> Tensors:
            raw, compressed = self._compressed(b, a)
            k_cmp, v_cmp = (a.round(y.detach())[: self._num_blocks()] for y in compressed)
            k_slc, v_slc, k_win, v_win = (self._of(b, name, a) for name in ("k_slc", "v_slc", "k_win", "v_win"))
            branches = (
                compressed_branch(k_cmp, v_cmp, self.config, self.scale),
                selected_branch(k_slc, v_slc, chosen, self.config, self.scale),
                window_branch(k_win, v_win, self.config, self.scale),
            )
            q, dout, gates = (self._of(b, name, a) for name in ("q", "dout", "gates"))
            found = {"out": torch.zeros_like(dout[t]), "dq": torch.zeros_like(q[t]), "dgates": torch.zeros_like(gates[t])}
            for i, (name, branch) in enumerate(zip(BRANCHES, branches, strict=True)):
                dout_branch = a.round(dout * gates[..., i, None])
                out, dq = self._rows(branch, q, dout_branch, a)
                found["out"] += gates[t][..., i, None] * out
                found["dq"] += dq
                found["dgates"][..., i] = (dout[t] * out).sum(-1)
                if gradients:
                    found |= self._key_gradients(name, branch, q, dout_branch, raw, compressed, a)
            return found if gradients else {"out": found["out"]}

        rows = ("out", "dq", "dgates")
        return self._pair(values, lambda name: self._at(b, t if name in rows else self.keys))

    def _key_gradients(
        self, name: str, branch: Branch, q: Tensor, dout: Tensor, raw: Tensors, compressed: tuple[Tensor, ...], a: Arithmetic
    ) -> Tensors:
        """Gradients of the sampled tokens' keys and values of one branch; of raw ones through the blocks that hold them."""
        t = torch.arange(self.point.seq_len, device=self.point.device)
        if name != "cmp":
            dk, dv = branch.key_gradients(q, dout, t, self.keys, a.round)
            return {f"dk_{name}": dk, f"dv_{name}": dv}
        size, stride = self.config.compress_block_size, self.config.compress_stride
        blocks = self.keys[:, None] // stride - torch.arange(size // stride, device=self.keys.device)
        blocks = blocks[(blocks >= 0) & (blocks < branch.k.shape[0])].unique()
        found = {}
        grads = branch.key_gradients(q, dout, t, blocks, a.round)
        for (source, x), y, grad in zip(raw.items(), compressed, grads, strict=True):
            dy = torch.zeros_like(y)
            dy[blocks] = grad
            found[f"d{source}"] = torch.autograd.grad(y, x, dy)[0][0, self.keys]
        return found

    # --- The choice -----------------------------------------------------------------------------------------------------
    def _choice(self, backend: str) -> Tensor:
        """The indices behind whole attention, looked at as those of the operator are."""
        prepared = prepare_choice(self.tensors, self.point, self.config, backend)
        chosen = select_blocks(prepared["q"], prepared["k_cmp"], prepared["lse"], self.config, backend=backend)
        self._check_choice(chosen, prepared)
        return chosen

    def _check_choice(self, chosen: Tensor, prepared: Tensors | None = None) -> None:
        """Fail unless the indices are legal everywhere and, unless the pattern approximates, exact on the sampled rows."""
        config = self.config
        t = torch.arange(self.point.seq_len, device=chosen.device)[None, :, None]
        current = t // config.block_size
        there = chosen >= 0
        after = torch.where(there, chosen, 2**30)
        rising = ((after[..., 1:] > after[..., :-1]) | ~there[..., 1:]).all() & (there[..., :-1] | ~there[..., 1:]).all()
        assert bool(rising), "block_indices: not ascending, or an absent id before a present one"
        assert bool((chosen <= current[..., None]).all()), "block_indices: a block of the future"
        init = torch.arange(config.num_init_blocks, device=chosen.device) + 0 * t[..., None]
        local = current[..., None] - torch.arange(config.num_local_blocks, device=chosen.device)
        for forced in torch.cat((init, local), -1).unbind(-1):
            wanted = (forced >= 0) & (forced <= current)
            assert bool(((chosen == forced[..., None]).any(-1) | ~wanted).all()), "block_indices: a forced block is missing"
        for b, chosen_rows, best, close in self._choices(chosen, prepared or self.tensors):
            wrong = ((chosen_rows ^ best) & ~close).any(-1) | (chosen_rows.sum(-1) != best.sum(-1))
            assert approximates(config) or not bool(wrong.any()), (
                f"block_indices: {int(wrong.sum())} of {wrong.numel()} sampled choices of sequence {b} differ from fp64"
            )

    def recall(self, chosen: Tensor) -> float:
        """Share of the exact choice's blocks that were chosen, over the sampled rows.

        A block counts as found, too, where another one was chosen in its place and the order of the two is too close to call.
        """
        found = wanted = 0
        for _, chosen_rows, best, close in self._choices(chosen, self.tensors):
            missed, instead = (best & ~chosen_rows & close).sum(-1), (chosen_rows & ~best & close).sum(-1)
            found += int((best & chosen_rows).sum() + torch.minimum(missed, instead).sum())
            wanted += int(best.sum())
        return round(found / wanted, 5)

    def _choices(self, chosen: Tensor, x: Tensors) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """Sequence; of its sampled rows the blocks chosen, the exact choice, and what is too close to call."""
        step = max(1, self.point.seq_len // SAMPLED_CHOICES)
        t = torch.cat((self.queries, torch.arange(0, self.point.seq_len, step, device=chosen.device))).unique()
        num_blocks = -(-self.point.seq_len // self.config.block_size)
        for b in self.sequences:
            k = self._blocks_of(b, x["k_cmp"], EXACT)
            p = compressed_branch(k, k, self.config, self.scale).group_probabilities(self._of(b, "q", EXACT)[t], t)
            best, close = exact_choice(p, t, num_blocks, self.config)
            yield b, chosen_mask(chosen[b, t], num_blocks), best, close

    # --- Where things lie -----------------------------------------------------------------------------------------------
    def _of(self, b: int, name: str, a: Arithmetic) -> Tensor:
        return a.of(self.tensors[name][b])

    def _num_blocks(self) -> int:
        """Compressed blocks C of a sequence."""
        return max((self.point.seq_len - self.config.compress_block_size) // self.config.compress_stride + 1, 0)

    def _blocks_of(self, b: int, x: Tensor, a: Arithmetic) -> Tensor:
        """A sequence's rows of packed compressed keys."""
        return a.of(x[b * self._num_blocks() : (b + 1) * self._num_blocks()])

    def _blocks(self) -> Tensor:
        """Sampled compressed blocks: those that start at or before the sampled keys."""
        blocks = self.keys // self.config.compress_stride
        return blocks[blocks < self._num_blocks()].unique()

    def _at(self, b: int, t: Tensor) -> Tensor:
        """Index of positions of a sequence in a dense batch."""
        return torch.stack((torch.full_like(t, b), t))


def approximates(config: NSAConfig) -> bool:
    """Whether the pattern's choice is not meant to be the exact one."""
    return config.coarse_block_size is not None or config.score_precision != "exact"


def prepare_choice(tensors: Tensors, point: Point, config: NSAConfig, backend: str) -> Tensors:
    """Compressed keys and lse as the choice takes them, beside the given tensors."""
    from nsa.bench.cases import CASES

    return prepare(CASES["attention.choice"], tensors, point, config, backend)
