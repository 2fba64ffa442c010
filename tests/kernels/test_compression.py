"""Kernels of compression and combination, fp32 in the interpreter, against the references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa import NSAConfig, PhiWeights, Rope, apply_rope, combine, compress, compressed_positions
from nsa.ops._sequences import Sequences
from nsa.ops._triton.tiles import cos_sin
from nsa.ops.compression import Raw, ops, run_compress
from nsa.testing import assert_within_budget, make_inputs
from tests.ops.cases import small


def reference(
    raw: Tensor,
    weight: Tensor | None,
    dy: Tensor,
    config: NSAConfig,
    cu_seqlens: Tensor,
    rotated: bool,
    dtype: torch.dtype,
) -> list[Tensor]:
    """y, dx and, with weights, dw."""
    leaves = [x.to(dtype).requires_grad_() for x in (raw, weight) if x is not None]
    y, _ = compress(
        leaves[0], None if weight is None else PhiWeights(weight=leaves[1]), config, cu_seqlens
    )
    if rotated:
        y = apply_rope(
            y, compressed_positions(config, cu_seqlens, y.shape[0]), Rope.from_config(config)
        )
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(dtype))]


@pytest.mark.parametrize("phi", ["mean", "linear"])
@pytest.mark.parametrize(
    ("pattern", "rotary_dim", "rotated", "lengths"),
    [
        ((8, 4), None, True, [70, 1, 0, 45]),
        ((8, 4), 16, True, [70, 7, 8, 45]),
        ((16, 4), None, True, [70, 33]),
        ((12, 4), None, True, [70, 33]),
        ((8, 8), None, False, [70]),
    ],
)
def test_compression(phi, pattern, rotary_dim, rotated, lengths, monkeypatch):
    # weights of more than 8 rows take several tiles
    monkeypatch.setattr(ops, "WEIGHT_TILE", 256)
    size, stride = pattern
    config = NSAConfig(
        num_heads=2,
        num_kv_heads=2,
        head_dim=32,
        value_dim=32,
        compress_block_size=size,
        compress_stride=stride,
        block_size=16,
        num_selected_blocks=4,
        window_size=32,
        phi=phi,
        rotary_dim=rotary_dim,
    )
    x = make_inputs(config, lengths)
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(2, size, 32, generator=generator).double() if phi == "linear" else None
    dy = torch.randn(x.k_cmp_raw.shape[0] // stride, 2, 32, generator=generator).double()
    leaves = [y.float().requires_grad_() for y in (x.k_cmp_raw, weight) if y is not None]
    weights = None if weight is None else PhiWeights(weight=leaves[1])
    sequences = Sequences.packed(x.cu_seqlens_k)
    rope = Rope.from_config(config) if rotated else None
    (y,) = run_compress([Raw(leaves[0], weights, rope)], config, sequences, "triton")
    found = [y.detach(), *torch.autograd.grad(y, leaves, dy.float())]
    exact, plain = (
        reference(x.k_cmp_raw, weight, dy, config, x.cu_seqlens_k, rotated, dtype)
        for dtype in (torch.float64, torch.float32)
    )
    for name, actual, baseline, oracle in zip(("y", "dx", "dw"), found, plain, exact, strict=False):
        assert_within_budget(actual, baseline, oracle, name, factor=4.0)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_the_rest_of_a_sequence(backend):
    """Tokens from a later position on are compressed to the bits that the whole sequence gives."""
    config = small(phi="linear")
    rope, skipped = Rope.from_config(config), 12
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(70 + 45, 2, 16, generator=generator)
    weight = torch.randn(2, 8, 16, generator=generator)

    def run(tokens: Tensor, lengths: list[int], starts: Tensor | None) -> tuple[Tensor, ...]:
        leaves = tokens.clone().requires_grad_(), weight.clone().requires_grad_()
        cu_seqlens = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32)
        where = Sequences.packed(cu_seqlens)
        raw = Raw(leaves[0], PhiWeights(weight=leaves[1]), rope)
        (y,) = run_compress([raw], config, where, backend, starts)
        y = y[: sum((n - 8) // 4 + 1 for n in lengths)]
        # the gradient of the 13 + 10 blocks that the rest has as well
        return y.detach(), *torch.autograd.grad(y[-23:].sin().sum(), leaves)

    whole, d_whole, dw_whole = run(x, [70, 45], None)
    starts = torch.tensor([skipped, 0], dtype=torch.int32)
    rest, d_rest, dw_rest = run(x[skipped:], [70 - skipped, 45], starts)
    assert torch.equal(rest, whole[skipped // 4 :])
    torch.testing.assert_close(d_rest, d_whole[skipped:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dw_rest, dw_whole, rtol=1e-5, atol=1e-4)


@triton.jit
def cos_sin_kernel(angle_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    cosine, sine = cos_sin(tl.load(angle_ptr + at))
    tl.store(out_ptr + at, cosine)
    tl.store(out_ptr + SIZE + at, sine)


@pytest.mark.parametrize("largest", [4.0, 1e3, 1e6, 1e8])
def test_cosine_and_sine(largest):
    generator = torch.Generator().manual_seed(0)
    angle = (torch.rand(4096, generator=generator) * 2 - 1) * largest
    angle[:9] = torch.arange(-4, 5) * torch.pi / 4  # where the quadrant changes
    out = torch.empty(2, 4096)
    cos_sin_kernel[(1,)](angle, out, SIZE=4096)
    exact = angle.double()
    assert (out.double() - torch.stack((exact.cos(), exact.sin()))).abs().max() < 1.1e-7


@pytest.mark.parametrize("off", [None, 0, 1, 2])
def test_combination(off):
    generator = torch.Generator().manual_seed(3)
    branches = [
        None if index == off else torch.randn(7, 3, 48, generator=generator).double()
        for index in range(3)
    ]
    gates = torch.rand(7, 3, 3, generator=generator).double()
    d_out = torch.randn(7, 3, 48, generator=generator).double()

    def run(dtype: torch.dtype, backend: str) -> list[Tensor]:
        leaves: Any = [None if x is None else x.to(dtype).requires_grad_() for x in branches]
        gate = gates.to(dtype).requires_grad_()
        out = combine(leaves[0], leaves[1], leaves[2], gate, backend=backend)
        wanted = [*(x for x in leaves if x is not None), gate]
        return [out.detach(), *torch.autograd.grad(out, wanted, d_out.to(dtype))]

    found = run(torch.float32, "triton")
    baselines, oracles = (run(dtype, "reference") for dtype in (torch.float32, torch.float64))
    for actual, baseline, oracle in zip(found, baselines, oracles, strict=True):
        assert_within_budget(actual, baseline, oracle, "combination", factor=4.0)
