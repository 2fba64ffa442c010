"""Gathered algorithm of the selected branch, fp32 in the interpreter, against the reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nsa import NSAConfig, selected_attention
from nsa.ops._layout import Gated
from nsa.ops._operator import Call
from nsa.ops._sequences import Sequences
from nsa.ops._triton.tuning import Tile, tiles_chosen_by
from nsa.ops.selected import index, launch
from nsa.ops.selected import types as design_rules
from nsa.ops.selected.launch import selected_backward, selected_forward
from nsa.ops.selected.types import SelectedInputs, SelectedResults
from nsa.testing import assert_within_budget, make_inputs
from tests.ops import cases

BLOCK = 16
PACKED = [84, 1, 0, 37]
FEWER = [21, 1, 0, 4]
TILE = Tile(32, 16, 4, 1)


def small(
    group: int, num_kv_heads: int = 2, n: int = 4, head_dim: int = 16, value_dim: int = 16
) -> NSAConfig:
    heads = {"num_heads": group * num_kv_heads, "num_kv_heads": num_kv_heads}
    sizes = {"head_dim": head_dim, "value_dim": value_dim, "num_selected_blocks": n}
    return cases.small(**heads, **sizes, block_size=BLOCK)


class Case:
    """Inputs in fp64 with a random choice of blocks, and what the reference makes of them in a
    given dtype.
    """

    def __init__(
        self,
        config: NSAConfig,
        lengths_k: Sequence[int],
        lengths_q: Sequence[int] | None = None,
        skewed: bool = False,
    ) -> None:
        x = make_inputs(config, lengths_k, lengths_q)
        lengths_q = lengths_q or lengths_k
        self.config, self.scale = config, config.head_dim**-0.5
        self.offsets: dict[str, Any] = {
            "cu_seqlens_q": x.cu_seqlens_q,
            "cu_seqlens_k": x.cu_seqlens_k,
        }
        self.longest = max(lengths_q), max(lengths_k)
        self.tensors = (x.q, x.k_slc, x.v_slc)
        generator = torch.Generator().manual_seed(1)
        self.d_out = torch.randn(
            x.q.shape[0], config.num_heads, config.value_dim, generator=generator
        ).double()
        # Any order; some ids are above a query's own block, some are -1: both are absent.
        rows = []
        for len_q, len_k in zip(lengths_q, lengths_k, strict=True):
            candidates = max(-(-len_k // BLOCK) + 1, config.num_selected_blocks)
            weight = torch.rand(len_q, config.num_kv_heads, candidates, generator=generator)
            if skewed:
                weight[..., 1] = 2.0
                weight[..., 3:] *= 0.1
            rows.append(weight.argsort(-1, descending=True)[..., : config.num_selected_blocks] - 1)
        self.indices = torch.cat(rows).int()

    def call(self, uniform: bool = False, algorithm: str = "gathered") -> Call:
        cu_q, cu_k = self.offsets["cu_seqlens_q"], self.offsets["cu_seqlens_k"]
        offsets = None if uniform else (cu_q, cu_k)
        sequences = Sequences(offsets, cu_q.shape[0] - 1, *self.longest, cu_q.device)
        return Call(self.config, sequences, self.scale, algorithm)

    @property
    def inputs(self) -> SelectedInputs:
        return SelectedInputs._make((*(x.float() for x in self.tensors), self.indices))

    def attend(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        q, k, v = tensors
        return selected_attention(
            q, k, v, self.indices, self.config, **self.offsets, backend="reference"
        )

    def reference(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """out, dq, dk, dv."""
        leaves = [x.detach().to(dtype).requires_grad_() for x in self.tensors]
        out, _ = self.attend(leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, self.d_out.to(dtype))

    def run(
        self,
        tile: Tile = TILE,
        segments: int | None = None,
        uniform: bool = False,
        algorithm: str = "gathered",
    ) -> tuple[Tensor, ...]:
        """lse, out, dq, dk, dv of the kernels."""
        with ExitStack() as stack:
            stack.enter_context(tiles_chosen_by(lambda key, _: tile))
            if segments is not None:
                fixed = mock.patch.object(launch, "num_segments", return_value=segments)
                stack.enter_context(fixed)
            return self._run(self.call(uniform, algorithm))

    def _run(self, call: Call) -> tuple[Tensor, ...]:
        inputs = self.inputs
        q, k, v, _ = inputs
        results = SelectedResults.new(q, v, self.indices, call.algorithm)
        selected_forward(inputs, call, results)
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        selected_backward(inputs, call, results, self.d_out.float(), grads, Gated())
        return results.lse, results.out, *grads


def compare(
    case: Case,
    tile: Tile = TILE,
    segments: int | None = None,
    uniform: bool = False,
    algorithm: str = "gathered",
    results: tuple[Tensor, ...] = (),
) -> None:
    """Run a case, unless its results are given, and compare it with the reference."""
    lse, *found = results or case.run(tile, segments, uniform, algorithm)
    exact, plain = case.reference(torch.float64), case.reference(torch.float32)
    for name, actual, baseline, oracle in zip(
        ("out", "dq", "dk", "dv"), found, plain, exact, strict=True
    ):
        # Sums in another order than the reference's: rounding, not more, is what the larger factor
        # leaves room for.
        assert_within_budget(actual, baseline, oracle, name, factor=4.0)
    torch.testing.assert_close(lse, case.attend(case.tensors)[1].float(), rtol=1e-5, atol=1e-5)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Chunks that short sequences fill, too, and merges of several steps; many rows a program,
    which is quick here.
    """
    monkeypatch.setattr(launch, "FORWARD_CHUNK", 12)
    monkeypatch.setattr(launch, "BACKWARD_CHUNK", 20)
    monkeypatch.setattr(launch, "DQ_CHUNK", 12)
    monkeypatch.setattr(launch, "MERGED", 32)
    monkeypatch.setattr(launch, "MERGE_ROWS", 64)


@pytest.mark.parametrize("group", [1, 6])
def test_packed_sequences(group):
    compare(Case(small(group), PACKED), segments=2)


def test_fewer_entries_make_smaller_chunks(monkeypatch):
    """By shapes alone, and a power of two; 131,072 entries are two sequences of 2,048 tokens of the
    seed shape.
    """
    monkeypatch.setattr(launch, "BACKWARD_CHUNK", 1024)
    expected = {0: 128, 1: 128, 65_535: 128, 131_072: 256, 300_000: 512, 524_288: 1024, 2**21: 1024}
    assert {entries: launch.chunk_size(entries) for entries in expected} == expected


class Noted:
    """Stands for the streams and notes what is asked of them, and which of the launchers' steps
    come when.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
        self.said = said
        monkeypatch.setattr(launch, "fork_join", self.open)
        names = (
            "new_gathered",
            "new_backward_index",
            "fill_index",
            "make_lists",
            "gather_forward",
            "_gather_gradients",
        )
        for name in names:
            monkeypatch.setattr(launch, name, self.noting(name, getattr(launch, name)))

    @contextmanager
    def open(self, device: torch.device, enabled: bool = True) -> Iterator[Noted]:
        self.said.append("fork" if enabled else "one stream")
        yield self
        self.said.append("join")

    def noting(self, name: str, function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.said.append(name)
            return function(*arguments, **named)

        return call

    @contextmanager
    def on_side(self) -> Iterator[None]:
        self.said.append("side")
        yield
        self.said.append("calling")

    def record(self) -> Any:
        return lambda: self.said.append("wait")

    def fork(self) -> None:
        self.said.append("fork")


def test_nothing_is_read_before_the_other_stream_has_made_it(monkeypatch):
    """The index is made while lists are; the gathered kernels wait for both, and those that leave
    at once for nothing.
    """
    said: list[str] = []
    Noted(monkeypatch, said)
    compare(Case(small(2), [25, 5]))
    made = "fork side fill_index calling make_lists wait"
    forward = f"new_gathered {made} gather_forward join"
    last = "fork side _gather_gradients calling _gather_gradients join"
    assert said == f"{forward} new_backward_index {made} {last}".split()


def test_the_tiled_forward_has_one_stream(monkeypatch):
    said: list[str] = []
    Noted(monkeypatch, said)
    case = Case(small(2), [25, 5])
    inputs = case.inputs
    results = SelectedResults.new(inputs.q, inputs.v, case.indices, "tiled")
    selected_forward(inputs, case.call(algorithm="tiled"), results)
    assert said == ["one stream", "make_lists", "wait", "join"]


def test_a_large_group():
    compare(Case(small(16, num_kv_heads=1, value_dim=32), [20, 5]))


@pytest.mark.parametrize("segments", [1, 20])
def test_segments(segments):
    """Segments that end inside a sequence; the last of twenty are empty. The fourth block sees the
    first that is gathered.
    """
    compare(Case(small(2), [84, 1]), segments=segments)


def test_fewer_queries_than_keys():
    compare(Case(small(3), PACKED, FEWER), segments=2)


def test_sequences_alike():
    compare(Case(small(2), [20, 20]), segments=3, uniform=True)


def test_a_block_that_every_query_chose():
    compare(Case(small(2, num_kv_heads=1), [70], skewed=True), segments=2)


@pytest.mark.parametrize("n", [3, 5, 12])
def test_numbers_of_slots(n):
    compare(Case(small(2, num_kv_heads=1, n=n), [50]), segments=2)


def test_blocks_in_parts():
    """A tile of fewer keys than a block has: a row of slots for each part, hidden ones included."""
    compare(Case(small(3, num_kv_heads=1), [40, 9]), Tile(16, 8, 4, 1), segments=2)


def test_one_step_merges_all_slots(monkeypatch):
    monkeypatch.setattr(launch, "MERGED", 1024)
    compare(Case(small(2, num_kv_heads=1), [30]))


def test_number_of_segments():
    """By shapes alone: none where the rows of slots are small, otherwise four rows of slots a query
    head.
    """
    assert launch.num_segments(2048, 16, 12 * 64 * 2) == 1
    assert launch.num_segments(65536, 16, 12 * 64 * 2) == 4
    assert launch.num_segments(65536, 12, 12 * 64 * 2) == 3
    assert launch.num_segments(3, 2**10, 2**20) == 3


@pytest.mark.parametrize("algorithm", ["tiled", "auto"])
def test_other_designs(algorithm):
    compare(Case(small(3), PACKED, FEWER), segments=2, algorithm=algorithm)


@pytest.mark.parametrize("scattered", [False, True])
def test_the_choice_decides(scattered, monkeypatch):
    """Long lists by the shapes: what runs follows from the choice; output and dQ are to the bit
    those of that one alone.
    """
    for module in (index, design_rules):
        monkeypatch.setattr(module, "SCATTER_THRESHOLD", 1.25)
    case = Case(small(2, num_kv_heads=1, n=3), [118])
    if not scattered:
        case.indices = torch.tensor([0, 1, -1]).int().expand(118, 1, 3).contiguous()
    results = case.run(TILE, 2, algorithm="auto")
    found = results[:3]
    for x, y in zip(
        found, case.run(TILE, 2, algorithm="gathered" if scattered else "tiled")[:3], strict=True
    ):
        assert torch.equal(x, y)
    other = case.run(TILE, 2, algorithm="tiled" if scattered else "gathered")[:3]
    assert not all(torch.equal(x, y) for x, y in zip(found, other, strict=True))
    compare(case, results=results)


def test_queries_without_a_block():
    """Output 0, lse -inf, no gradient: every id is above the query's own block, or below 0."""
    case = Case(small(2), [20, 5])
    case.indices[::2] = 7
    case.indices[::3] = -1
    without = (case.indices == case.indices[:, :1, :1]).all((1, 2))
    lse, out, dq, *_ = results = case.run(TILE, 2)
    assert without.sum() >= 16
    assert bool(lse[without].isneginf().all())
    assert not out[without].any()
    assert not dq[without].any()
    compare(case, results=results)


@pytest.mark.parametrize(
    ("algorithm", "dtype"),
    [("tiled", torch.int32), ("gathered", torch.int64), ("auto", torch.int32)],
)
def test_a_block_that_is_named_again_counts_once(algorithm, dtype):
    """To the bit what comes without the repetition, forward and backward; neighbours of the query
    are not touched.
    """
    case = Case(small(2, n=6), [60, 1, 0, 20])
    ids = case.indices
    ids[::2, :, 3] = ids[::2, :, 0]
    ids[::3, 0] = ids[::3, 0, 2:3]
    ids[1::4, 1, 1:] = ids[1::4, 1, :-1].clone()
    once = ids.clone()
    for slot in range(1, 6):
        again = (ids[..., :slot] == ids[..., slot : slot + 1]).any(-1)
        once[..., slot] = torch.where(again, -1, once[..., slot])
    assert ((ids != once) & (ids >= 0)).sum() > 100
    case.indices = ids.to(dtype)
    found = case.run(TILE, 2, algorithm=algorithm)
    compare(case, results=found)
    case.indices = once
    for x, y in zip(found, case.run(TILE, 2, algorithm=algorithm), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("algorithm", ["tiled", "gathered"])
def test_ids_of_64_bits_are_not_cut(algorithm):
    """An id that 32 bits do not hold is far above every block, not the block that its lower half
    names.
    """
    case = Case(small(2), [60, 1, 0, 20])
    expected = case.run(TILE, 2, algorithm=algorithm)
    ids = case.indices.long()
    case.indices = torch.where(ids < 0, ids + 2**32 + 1, ids)
    assert (case.indices == 2**32).any()
    for x, y in zip(case.run(TILE, 2, algorithm=algorithm), expected, strict=True):
        assert torch.equal(x, y)


def test_a_selection_of_nothing():
    case = Case(small(2), [20, 5])
    case.indices.fill_(-1)
    lse, *rest = case.run()
    assert bool(lse.isneginf().all())
    assert not any(x.any() for x in rest)


def test_unchosen_blocks_have_no_gradient():
    case = Case(small(2, num_kv_heads=1), [60], skewed=True)
    case.indices[case.indices == 1] = -1
    _, _, _, dk, dv = case.run(TILE, 3)
    for x in (dk, dv):
        assert not x[16:32].any()
        assert bool((x[:16] != 0).all())
        assert bool((x[32:48] != 0).all())


def test_same_bits_on_every_run():
    case = Case(small(3, num_kv_heads=1), [30])
    assert all(torch.equal(a, b) for a, b in zip(case.run(TILE, 3), case.run(TILE, 3), strict=True))


def test_later_queries_change_no_earlier_bit():
    """Other choices, queries and values from row 40 on: the same bits before, in the outputs and in
    dQ.
    """
    before = Case(small(3, num_kv_heads=1), [60])
    after = Case(small(3, num_kv_heads=1), [60])
    after.indices[40:] = after.indices[40:].roll(1, 0) * 2 - 1
    for x in (*after.tensors, after.d_out):
        x[40:] += 1.0
    first, second = before.run(TILE, 3)[:3], after.run(TILE, 3)[:3]
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x[:40], y[:40])
        assert not torch.equal(x[40:], y[40:])


def test_nan_reaches_no_other_sequence():
    case = Case(small(2, num_kv_heads=1), PACKED)
    clean = case.run(TILE, 2)
    for x in (*case.tensors, case.d_out):
        x[84:85] = torch.nan  # the second sequence, one token, behind a block that is not full
    for x, y in zip(clean, case.run(TILE, 2), strict=True):
        assert torch.equal(x[:84], y[:84])
        assert torch.equal(x[85:], y[85:])
        assert bool(y[84].isnan().all())
