"""Dense attention against a formula written out query by query."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nsa.config import NSAConfig
from nsa.lm.dense_attention import DenseAttention, causal_attention

CONFIG = NSAConfig(
    num_heads=4, num_kv_heads=2, head_dim=16, value_dim=32, compress_block_size=8, compress_stride=4, block_size=16,
    num_selected_blocks=4, window_size=32,
)  # fmt: skip


def query_by_query(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    out, start = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype), 0
    for length in lengths:
        for t in range(start, start + length):
            for h in range(q.shape[1]):
                group = h // (q.shape[1] // k.shape[1])
                weights = (k[start : t + 1, group] @ q[t, h] / q.shape[2] ** 0.5).softmax(0)
                out[t, h] = weights @ v[start : t + 1, group]
        start += length
    return out


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """Half-split rotation by complex numbers."""
    half = x.shape[-1] // 2
    angle = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.cat((turned.real, turned.imag), dim=-1)


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=7),
    slack=st.one_of(st.none(), st.integers(0, 5)),
    seed=st.integers(0, 5),
)
def test_documents_of_any_length(lengths: list[int], slack: int | None, seed: int) -> None:
    if sum(lengths) == 0:
        lengths = [1]
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(sum(lengths), heads, 16, dtype=torch.float64, generator=generator)
        for heads in (4, 2, 2)
    )
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    bound = None if slack is None else max(lengths) + slack
    out = causal_attention(q, k, v, cu_seqlens, bound)
    torch.testing.assert_close(out, query_by_query(q, k, v, lengths), rtol=1e-10, atol=1e-12)


def test_equal_windows_take_the_causal_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[Tensor | None] = []
    real = torch.nn.functional.scaled_dot_product_attention

    def spy(
        q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        masks.append(attn_mask)
        return real(q, k, v, attn_mask=attn_mask, is_causal=is_causal)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    q, k, v = (torch.randn(64, heads, 16) for heads in (4, 2, 2))
    causal_attention(q, k, v, torch.tensor([0, 16, 32, 48, 64], dtype=torch.int32), 16)
    causal_attention(q, k, v, torch.tensor([0, 16, 32, 45, 48, 64], dtype=torch.int32), 16)
    assert masks[0] is None
    assert masks[1] is not None
    # twice the longest sequence a token, not the number of tokens
    assert masks[1].numel() == 64 * 32


def test_gradients_stay_inside_a_document() -> None:
    q, k, v = (
        torch.randn(40, heads, 16, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
    )
    out = causal_attention(q, k, v, torch.tensor([0, 13, 40], dtype=torch.int32), 30)
    out[13:].sum().backward()
    for x in (q, k, v):
        assert x.grad is not None
        assert x.grad[:13].abs().max() == 0
        assert x.grad[13:].isfinite().all()
    assert v.grad is not None
    assert v.grad[13:].abs().min() > 0


@pytest.mark.parametrize("theta", [10_000.0, 500.0])
def test_layer_written_out(theta: float) -> None:
    torch.manual_seed(0)
    config = dataclasses.replace(CONFIG, rope_theta=theta)
    layer = DenseAttention(24, config).double()
    x = torch.randn(11, 24, dtype=torch.float64)
    heads = {
        name: (x @ getattr(layer, f"{name}_proj").weight.T).unflatten(-1, (count, -1))
        for name, count in (("q", 4), ("k", 2), ("v", 2))
    }
    q, k = (
        torch.stack([rotate(row, t, theta) for t, row in enumerate(heads[name])])
        for name in ("q", "k")
    )
    expected = query_by_query(q, k, heads["v"], [11]).flatten(-2) @ layer.o_proj.weight.T
    torch.testing.assert_close(layer(x), expected, rtol=1e-6, atol=1e-8)  # rotation angles are fp32
    torch.testing.assert_close(layer(x[None])[0], expected, rtol=1e-6, atol=1e-8)


def test_bad_input_is_refused() -> None:
    layer = DenseAttention(24, CONFIG)
    with pytest.raises(
        ValueError,
        match=r"DenseAttention: x must have shape \[T, 24\] or \[B, T, 24\], got \(3, 25\)",
    ):
        layer(torch.zeros(3, 25))
    with pytest.raises(ValueError, match="cu_seqlens must be left out with a dense batch"):
        layer(torch.zeros(1, 3, 24), cu_seqlens=torch.tensor([0, 3], dtype=torch.int32))
