"""Kernels of the window and the compressed branch, fp32 in the interpreter, and the references."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import NSAConfig, compress, compressed_attention, window_attention
from nsa.ops._layout import Gated
from nsa.ops._operator import Call, KeyRange
from nsa.ops._packed import compressed_cu_seqlens
from nsa.ops._sequences import Sequences
from nsa.ops._triton.tuning import Tile, tiles_chosen_by
from nsa.ops.range import launch as range_launch
from nsa.ops.range.launch import RangeBackward, range_forward
from nsa.ops.range.reference import RangeInputs, RangeResults
from nsa.testing import assert_within_budget, make_inputs
from tests.ops import cases

PACKED = [70, 1, 0, 45]
SHORT_QUERIES = [20, 1, 0, 7]


def small(num_heads: int, num_kv_heads: int, head_dim: int = 16, value_dim: int = 16) -> NSAConfig:
    sizes = {"head_dim": head_dim, "value_dim": value_dim, "window_size": 32}
    return cases.small(num_heads=num_heads, num_kv_heads=num_kv_heads, **sizes)


class Case:
    """Inputs of one branch in fp64, and what the reference makes of them in a given dtype."""

    def __init__(
        self,
        config: NSAConfig,
        window: bool,
        lengths_k: Sequence[int],
        lengths_q: Sequence[int] | None = None,
    ) -> None:
        x = make_inputs(config, lengths_k, lengths_q)
        self.config, self.window = config, window
        self.offsets: dict[str, Any] = {
            "cu_seqlens_q": x.cu_seqlens_q,
            "cu_seqlens_k": x.cu_seqlens_k,
        }
        self.longest = max(lengths_q or lengths_k), max(lengths_k)
        self.count = len(lengths_k)
        self.tensors: tuple[Tensor, ...]
        if window:
            self.tensors = (x.q, x.k_win, x.v_win)
        else:
            k, v = (
                compress(raw, None, config, x.cu_seqlens_k)[0] for raw in (x.k_cmp_raw, x.v_cmp_raw)
            )
            self.tensors = (x.q, k, v)
        generator = torch.Generator().manual_seed(1)
        self.d_out = torch.randn(
            x.q.shape[0], config.num_heads, config.value_dim, generator=generator
        ).double()

    def keys(self, uniform: bool) -> KeyRange:
        cu_seqlens = self.offsets["cu_seqlens_q"], self.offsets["cu_seqlens_k"]
        offsets = None if uniform else cu_seqlens
        sequences = Sequences(offsets, self.count, *self.longest, torch.device("cpu"))
        call = Call(self.config, sequences, self.config.head_dim**-0.5)
        return KeyRange.of_window(call) if self.window else KeyRange.of_blocks(call)

    def reference(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """out, dq, dk, dv; lse apart."""
        leaves = [x.detach().to(dtype).requires_grad_() for x in self.tensors]
        attention: Any = window_attention if self.window else compressed_attention
        out, _ = attention(*leaves, self.config, **self.offsets)
        return out.detach(), *torch.autograd.grad(out, leaves, self.d_out.to(dtype))


def forward(inputs: RangeInputs, keys: KeyRange, scale: float, tile: Tile) -> RangeResults:
    """out and lse ``[T, Hq]``."""
    out, lse = RangeResults.new(inputs.q, inputs.v)
    with tiles_chosen_by(lambda *_: tile):
        range_forward("window_attention", inputs, out, lse.t(), keys, scale)
    return RangeResults(out, lse)


def gradients(
    inputs: RangeInputs,
    results: RangeResults,
    dout: Tensor,
    keys: KeyRange,
    scale: float,
    *tiles: Tile,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv; one tile for dq, one for dk and dv."""
    dq = torch.empty_like(inputs.q)
    backward = RangeBackward.new("window", inputs, results, dout, dq, keys, scale, Gated())
    with tiles_chosen_by(lambda *_: tiles[0]):
        backward.query_gradient()
    with tiles_chosen_by(lambda *_: tiles[1]):
        return dq, *backward.key_gradients()


def compare(case: Case, tile: Tile, keys_as_rows: bool, uniform: bool = False) -> None:
    inputs = RangeInputs(*(x.float() for x in case.tensors))
    keys, scale = case.keys(uniform), case.config.head_dim**-0.5
    out, lse = results = forward(inputs, keys, scale, tile)
    tile_dkv = Tile(tile.rows, tile.keys, 4, 1, keys_as_rows=keys_as_rows)
    grads = gradients(inputs, results, case.d_out.float(), keys, scale, tile, tile_dkv)
    exact, plain = case.reference(torch.float64), case.reference(torch.float32)
    for name, actual, baseline, oracle in zip(
        ("out", "dq", "dk", "dv"), (out, *grads), plain, exact, strict=True
    ):
        # Sums in another order than the reference's: rounding, not more, is what the larger factor
        # leaves room for.
        assert_within_budget(actual, baseline, oracle, name, factor=4.0)
    attention: Any = window_attention if case.window else compressed_attention
    _, wanted = attention(*case.tensors, case.config, **case.offsets)
    assert torch.equal(lse.isinf(), wanted.isinf())
    assert torch.allclose(lse[~lse.isinf()].double(), wanted[~wanted.isinf()], rtol=0, atol=2e-6)


@pytest.mark.parametrize("window", [True, False], ids=["win", "cmp"])
@pytest.mark.parametrize("lengths_q", [None, SHORT_QUERIES], ids=["as keys", "fewer queries"])
def test_packed_sequences(window, lengths_q):
    compare(
        Case(small(6, 2, 16, 32), window, PACKED, lengths_q),
        Tile(16, 16, 4, 1),
        keys_as_rows=lengths_q is None,
    )


@pytest.mark.parametrize("window", [True, False], ids=["win", "cmp"])
def test_sequences_alike_without_offsets(window):
    case = Case(small(3, 1, 48, 16), window, [66, 66])
    # without offsets, the blocks of a sequence follow those of the one before without a gap
    if not window:
        num_blocks = (66 - 8) // 4 + 1
        case.tensors = (case.tensors[0], *(x[: 2 * num_blocks] for x in case.tensors[1:]))
    compare(case, Tile(32, 16, 4, 1), keys_as_rows=False, uniform=True)


@pytest.mark.parametrize("window", [True, False], ids=["win", "cmp"])
@pytest.mark.parametrize("group", [1, 5, 16])
def test_group_sizes(window, group):
    compare(Case(small(group, 1), window, [61]), Tile(16, 16, 4, 1), keys_as_rows=group == 5)


@pytest.mark.parametrize("window", [True, False], ids=["win", "cmp"])
def test_partial_sums_of_chunks(window, monkeypatch):
    """Queries cut into chunks give the same sums, also where some chunks see no key of a block."""
    monkeypatch.setattr(range_launch, "chunks_of", lambda len_q, *rest: (-(-len_q // 16), 16))
    compare(Case(small(6, 2), window, PACKED), Tile(16, 16, 4, 1), keys_as_rows=True)


@pytest.mark.parametrize("rows", [16, 64, 128])
@pytest.mark.parametrize("num_programs", [1, 128, 256, 100_000])
@pytest.mark.parametrize("len_q", [1, 512, 513, 8_192, 30_000, 65_536, 1_048_576])
def test_chunks_are_of_whole_tiles_and_hold_all_queries(len_q, num_programs, rows):
    count, queries = range_launch.chunks_of(len_q, len_q, False, num_programs, rows)
    assert (count - 1) * queries < len_q <= count * queries
    assert count == 1 or (queries % rows == 0 and queries > 256)
    assert count <= 40
    assert count == 1 or count * num_programs <= 10_240


def test_chunks_of_the_seed_shape():
    """As measured: docs/kernels/range-attention.md."""
    assert [
        range_launch.chunks_of(s, s, False, 128, 64)[0] for s in (2_048, 8_192, 32_768, 65_536)
    ] == [4, 16, 40, 40]
    assert range_launch.chunks_of(65_536, 512, True, 2_048, 64)[0] == 1


# NumPy's word, inside the interpreter
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
@pytest.mark.parametrize("window", [True, False], ids=["win", "cmp"])
def test_nan_of_one_sequence_reaches_no_other(window):
    case = Case(small(2, 1), window, [30, 41])
    first = (
        case.tensors[1].shape[0]
        if window
        else int(compressed_cu_seqlens(case.offsets["cu_seqlens_k"], case.config)[-1])
    )
    inputs = RangeInputs(*(x.float().clone() for x in case.tensors))
    keys, tile = case.keys(False), Tile(16, 16, 4, 1)
    clean = forward(inputs, keys, 0.25, tile).out[:30]
    own = 30 if window else int(compressed_cu_seqlens(case.offsets["cu_seqlens_k"], case.config)[1])
    for x in (inputs.k, inputs.v):
        x[own:first] = torch.nan
    results = forward(inputs, keys, 0.25, tile)
    assert torch.equal(results.out[:30], clean)
    dq, dk, dv = gradients(inputs, results, case.d_out.float(), keys, 0.25, tile, tile)
    assert dq[:30].isfinite().all()
    assert dk[:own].isfinite().all()
    assert dv[:own].isfinite().all()
