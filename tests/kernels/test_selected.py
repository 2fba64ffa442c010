"""Kernels of the selected branch, fp32 in the interpreter, against the reference: every design."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import NSAConfig, selected_attention
from nsa.ops._packed import query_positions
from nsa.ops._triton.layout import Layout
from nsa.ops._triton.tuning import Tile
from nsa.ops.selected import triton_launch
from nsa.ops.selected.triton_launch import InverseIndex, make_index, make_lists, selected_backward, selected_forward, tile_of
from nsa.testing import assert_within_budget, make_inputs

PACKED = [100, 1, 0, 35]
SHORT_QUERIES = [40, 1, 0, 7]
TILE = Tile(64, 16, 4, 1)
DESIGNS = ["tile", "gather"]

# NumPy's words inside the interpreter: a maximum over NaN, powers of keys that are masked afterwards.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered", "ignore:overflow encountered in exp2")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks and segments so small that a short sequence has many; tiles that gather from the first blocks on."""
    monkeypatch.setattr(triton_launch, "CHUNK", 32)
    monkeypatch.setattr(triton_launch, "PART_SLOTS", 2)
    monkeypatch.setattr(triton_launch, "merge_shape", lambda block_d: {"ROWS": 64, "SLOTS": 4, "num_warps": 1})
    monkeypatch.setattr(triton_launch, "early_blocks", lambda block_q, n: 1)
    poisoned = torch.empty

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        """What nobody wrote shows: NaN, or numbers far out of range."""
        x = poisoned(*args, **kwargs)
        return x.fill_(torch.nan if x.dtype.is_floating_point else torch.iinfo(x.dtype).max // 2)

    monkeypatch.setattr(torch, "empty", empty)


def config_of(num_heads: int, num_kv_heads: int, block_size: int = 16, head_dim: int = 16, value_dim: int = 16) -> NSAConfig:
    return NSAConfig(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, value_dim=value_dim, compress_block_size=8,
        compress_stride=4, block_size=block_size, num_selected_blocks=4, window_size=32,
    )  # fmt: skip


def random_choice(t: Tensor, num_kv_heads: int, block_size: int, n: int, seed: int = 3) -> Tensor:
    """Unique ids ``[T, Hkv, n]`` in any order, of which about a quarter are absent: negative, or in the future."""
    generator = torch.Generator().manual_seed(seed)
    current = (t // block_size)[:, None, None]
    wide = max(n, int(t.max()) // block_size + 2) if t.numel() else n
    ids = torch.rand(len(t), num_kv_heads, wide, generator=generator).argsort(-1)[..., :n].int()
    ids = torch.where(ids > current + 1, -5, ids)
    absent = torch.rand(ids.shape, generator=generator) < 0.15
    return torch.where(absent, -1, ids).int()


class Case:
    """Inputs in fp64, and what the reference makes of them in a given dtype."""

    def __init__(
        self, config: NSAConfig, lengths_k: Sequence[int], lengths_q: Sequence[int] | None = None, n: int = 4,
        choose: Callable[[Tensor], Tensor] | None = None,
    ) -> None:  # fmt: skip
        x = make_inputs(config, lengths_k, lengths_q)
        self.config = config
        self.offsets: dict[str, Any] = {"cu_seqlens_q": x.cu_seqlens_q, "cu_seqlens_k": x.cu_seqlens_k}
        self.tensors = (x.q, x.k_slc, x.v_slc)
        self.t = query_positions(x.q.shape[0], x.cu_seqlens_q, x.cu_seqlens_k)
        self.block_indices = random_choice(self.t, config.num_kv_heads, config.block_size, n) if choose is None else choose(self.t)
        self.layout = Layout(
            x.cu_seqlens_q, x.cu_seqlens_k, len(lengths_k), max(lengths_q or lengths_k), max(lengths_k)
        )  # fmt: skip
        generator = torch.Generator().manual_seed(1)
        self.d_out = torch.randn(x.q.shape[0], config.num_heads, config.value_dim, generator=generator).double()

    def reference(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """out, dq, dk, dv."""
        leaves = [x.detach().to(dtype).requires_grad_() for x in self.tensors]
        out, _ = selected_attention(leaves[0], leaves[1], leaves[2], self.block_indices, self.config, **self.offsets)
        return out.detach(), *torch.autograd.grad(out, leaves, self.d_out.to(dtype))

    def run(
        self, design: str, tile: Tile = TILE, keys_as_rows: bool = False, tensors: Sequence[Tensor] | None = None,
        keep_index: bool = True,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """out, lse, dq, dk, dv by the kernels."""
        q, k, v = (x.float() for x in (self.tensors if tensors is None else tensors))
        rest = (self.layout, self.config.head_dim**-0.5, self.config.block_size)
        tiled, tile_dkv = design == "tile", Tile(tile.rows, tile.keys, 4, 1, keys_as_rows=keys_as_rows)
        out, lse, index = selected_forward(q, k, v, self.block_indices, *rest, tile, None if tiled else tile)
        assert (index is None) == (tiled or q.numel() == 0)
        grads = selected_backward(
            q, k, v, self.block_indices, out, self.d_out.float(), lse, *rest, tile if tiled else None, tile_dkv,
            index if keep_index else None,
        )  # fmt: skip
        return out, lse, *grads


def compare(case: Case, design: str, tile: Tile = TILE, keys_as_rows: bool = False, keep_index: bool = True) -> None:
    out, lse, *grads = case.run(design, tile, keys_as_rows, keep_index=keep_index)
    exact, plain = case.reference(torch.float64), case.reference(torch.float32)
    for name, actual, baseline, oracle in zip(("out", "dq", "dk", "dv"), (out, *grads), plain, exact, strict=True):
        # Sums in another order than the reference's: rounding, not more, is what the larger factor leaves room for.
        assert_within_budget(actual, baseline, oracle, f"{design} {name}", factor=4.0)
    q, k, v = case.tensors
    _, wanted = selected_attention(q, k, v, case.block_indices, case.config, **case.offsets)
    assert torch.equal(lse.isinf(), wanted.isinf())
    assert torch.allclose(lse[~lse.isinf()].double(), wanted[~wanted.isinf()], rtol=0, atol=2e-6)


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("lengths_q", [None, SHORT_QUERIES], ids=["as keys", "fewer queries"])
def test_packed_sequences(design, lengths_q):
    case = Case(config_of(6, 2, value_dim=32), PACKED, lengths_q)
    compare(case, design, keys_as_rows=lengths_q is None, keep_index=lengths_q is None)


@pytest.mark.parametrize("design", DESIGNS)
def test_sequences_alike_without_offsets(design):
    case = Case(config_of(3, 1, head_dim=48), [90, 90])
    case.layout = Layout(None, None, 2, 90, 90)
    compare(case, design, Tile(32, 16, 4, 1))


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("group", [1, 3, 16, 20])
def test_group_sizes(design, group):
    compare(Case(config_of(group, 1), [130]), design, keys_as_rows=group == 3)


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize(("block_size", "keys", "n"), [(16, 16, 9), (64, 64, 3), (64, 32, 2), (128, 64, 1)])
def test_block_sizes_and_numbers(design, block_size, keys, n):
    """Blocks in one step and in several, any number of choices."""
    compare(Case(config_of(2, 1, block_size), [400 if block_size > 16 else 210], [150], n), design, Tile(32, keys, 4, 1))
