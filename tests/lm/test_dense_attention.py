"""Dense attention against a formula written out query by query."""

from __future__ import annotations

from unittest.mock import Mock

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nsa.lm.dense_attention import DenseAttention, causal_attention
from tests.ops.cases import offsets, small


def inputs(num_tokens: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q of four heads, k and v of two."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(num_tokens, heads, 16, dtype=dtype, generator=generator, requires_grad=True)
        for heads in (4, 2, 2)
    ]


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
    turn = torch.polar(torch.ones_like(angle), angle)
    turned = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat((turned.real, turned.imag), dim=-1)


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=7),
    slack=st.one_of(st.none(), st.integers(0, 5)),
    seed=st.integers(0, 5),
)
def test_documents_of_any_length(lengths, slack, seed):
    lengths = lengths if sum(lengths) else [1]
    q, k, v = inputs(sum(lengths), seed)
    bound = None if slack is None else max(lengths) + slack
    out = causal_attention(q, k, v, offsets(lengths), bound)
    torch.testing.assert_close(out, query_by_query(q, k, v, lengths), rtol=1e-10, atol=1e-12)


def test_sequences_of_one_length_take_the_causal_kernel(monkeypatch):
    attend = Mock(wraps=torch.nn.functional.scaled_dot_product_attention)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    q, k, v = inputs(64)
    causal_attention(q, k, v, offsets([16] * 4), 16)
    causal_attention(q, k, v, offsets([16, 16, 13, 3, 16]), 16)
    equal, different = (call.kwargs["attn_mask"] for call in attend.call_args_list)
    assert equal is None
    # twice the longest sequence a token, not the number of tokens
    assert different.numel() == 64 * 32


def test_layer_written_out():
    torch.manual_seed(0)
    theta = 500.0
    config = small(rope_theta=theta)
    layer = DenseAttention(24, config).double()
    x = torch.randn(11, 24, dtype=torch.float64)
    q, k, v = (
        (x @ matrix.weight.T).unflatten(-1, (count, -1))
        for matrix, count in ((layer.q_proj, 4), (layer.k_proj, 2), (layer.v_proj, 2))
    )
    q, k = (torch.stack([rotate(row, t, theta) for t, row in enumerate(x)]) for x in (q, k))
    expected = query_by_query(q, k, v, [11]).flatten(-2) @ layer.o_proj.weight.T
    torch.testing.assert_close(layer(x), expected, rtol=1e-6, atol=1e-8)  # rotation angles are fp32
    torch.testing.assert_close(layer(x[None])[0], expected, rtol=1e-6, atol=1e-8)
