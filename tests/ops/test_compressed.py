"""nsa.compressed_attention against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from nsa import compressed_attention
from tests import oracle
from tests.ops.cases import (
    BATCHES,
    SHORT,
    Batch,
    array,
    grad,
    leaf,
    make_batch,
    named_batch,
    near,
    small,
    stack,
)


def expected(
    batch: Batch, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None
) -> list[np.ndarray]:
    def one(rows: slice, tokens: slice, blocks: slice) -> tuple[np.ndarray, np.ndarray]:
        num_rows, num_keys = rows.stop - rows.start, tokens.stop - tokens.start
        visible = oracle.visible_cmp(
            num_rows, num_keys, batch.config.compress_block_size, batch.config.compress_stride
        )
        return oracle.attention(array(q)[rows], array(k)[blocks], array(v)[blocks], visible, scale)

    return stack(batch, one)


def inputs(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return (
        batch.q(),
        batch.compressed(batch.config.head_dim),
        batch.compressed(batch.config.value_dim),
    )


@pytest.mark.parametrize("name", BATCHES)
def test_matches_the_oracle(name):
    batch = named_batch(name)
    q, k, v = inputs(batch)
    out, lse = compressed_attention(q, k, v, batch.config, **batch.kwargs)
    assert lse.dtype == torch.float64
    for actual, wanted in zip((out, lse), expected(batch, q, k, v), strict=True):
        near(actual, wanted)


@pytest.mark.parametrize(
    ("l", "d", "l_sel"), [(32, 16, 64), (16, 16, 16), (16, 4, 32), (4, 4, 16), (24, 8, 32)]
)
def test_other_block_sizes(l, d, l_sel):
    config = small(compress_block_size=l, compress_stride=d, block_size=l_sel)
    batch = make_batch(config, (257, l, l - 1, 3 * l + 1), (257, l, l - 1, 5))
    q, k, v = inputs(batch)
    for actual, wanted in zip(
        compressed_attention(q, k, v, config, **batch.kwargs), expected(batch, q, k, v), strict=True
    ):
        near(actual, wanted)


def test_every_short_length_alone():
    for length in SHORT:
        batch = make_batch(small(), (length,), seed=length)
        q, k, v = inputs(batch)
        for actual, wanted in zip(
            compressed_attention(q, k, v, batch.config), expected(batch, q, k, v), strict=True
        ):
            near(actual, wanted)


def test_first_visible_block():
    """The first query with a visible block sees that block alone; the one before it sees nothing."""
    batch = make_batch(small(), (128,))
    q, k, v = inputs(batch)
    out, lse = compressed_attention(q, k, v, batch.config)
    assert out is not None
    assert torch.equal(out[:7], torch.zeros(7, 4, 32).double())
    assert bool((lse[:7] == -torch.inf).all())
    near(out[7], array(v[0].repeat_interleave(2, dim=0)))
    near(out[10], array(v[0].repeat_interleave(2, dim=0)))
    assert float((out[11] - v[0].repeat_interleave(2, dim=0)).abs().min()) > 0


def test_scale():
    batch = named_batch("packed")
    q, k, v = inputs(batch)
    out, lse = compressed_attention(q, k, v, batch.config, softmax_scale=0.7, **batch.kwargs)
    for actual, wanted in zip((out, lse), expected(batch, q, k, v, 0.7), strict=True):
        near(actual, wanted)


@pytest.mark.parametrize("name", ["one", "packed", "chunks", "short"])
def test_gradients_match_the_oracle(name):
    batch = named_batch(name)
    q, k, v = (leaf(x) for x in inputs(batch))
    out, lse = compressed_attention(q, k, v, batch.config, **batch.kwargs)
    assert out is not None
    assert not lse.requires_grad
    d_out = batch.normal(*out.shape)
    out.backward(d_out)

    def one(rows: slice, tokens: slice, blocks: slice) -> tuple[np.ndarray, ...]:
        visible = oracle.visible_cmp(rows.stop - rows.start, tokens.stop - tokens.start, 8, 4)
        return oracle.attention_backward(
            array(d_out)[rows], array(q)[rows], array(k)[blocks], array(v)[blocks], visible
        )

    d_q, d_k, d_v = stack(batch, one)
    real = sum(batch.num_cmp)
    near(grad(q), d_q)
    near(grad(k)[:real], d_k)
    near(grad(v)[:real], d_v)
    # The rows that no sequence owns hold NaN here; nobody read them.
    assert not bool(grad(k)[real:].any())
    assert not bool(grad(v)[real:].any())


def test_gradcheck():
    config = small(num_heads=2, num_kv_heads=1, value_dim=16)
    batch = make_batch(config, (21, 5), (13, 5))
    q, k, v = batch.q(), batch.normal(6, 1, 16), batch.normal(6, 1, 16)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, _ = compressed_attention(q, k, v, config, **batch.kwargs)
        assert out is not None
        return out

    assert torch.autograd.gradcheck(run, (leaf(q), leaf(k), leaf(v)))


def test_queries_that_see_nothing():
    """Every sequence is shorter than l: output exactly 0, lse -inf, gradients exactly 0 and not None."""
    batch = make_batch(small(), (7, 1, 0, 3))
    q, k, v = leaf(batch.q()), leaf(batch.normal(2, 2, 16)), leaf(batch.normal(2, 2, 32))
    out, lse = compressed_attention(q, k, v, batch.config, **batch.kwargs)
    assert out is not None
    assert torch.equal(out, torch.zeros(11, 4, 32).double())
    assert torch.equal(lse, torch.full((11, 4), -torch.inf).double())
    out.sum().backward()
    for x in (q, k, v):
        assert torch.equal(grad(x), torch.zeros_like(x))


def test_no_query_at_all():
    batch = make_batch(small(), (0,))
    q, k, v = inputs(batch)
    out, lse = compressed_attention(q, k, v, batch.config)
    assert out is not None
    assert out.shape == (0, 4, 32)
    assert lse.shape == (0, 4)


def test_exact_number_of_rows_is_accepted_too():
    batch = named_batch("packed")
    q, k, v = inputs(batch)
    real = sum(batch.num_cmp)
    given = compressed_attention(q, k, v, batch.config, **batch.kwargs)
    cut = compressed_attention(q, k[:real], v[:real], batch.config, **batch.kwargs)
    for a, b in zip(given, cut, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


def test_lse_alone():
    batch = named_batch("chunks")
    q, k, v = inputs(batch)
    _, wanted = compressed_attention(q, k, v, batch.config, **batch.kwargs)
    out, lse = compressed_attention(q, k, None, batch.config, **batch.kwargs)
    assert out is None
    assert torch.equal(lse, wanted)


def test_lse_of_low_precision_inputs_is_fp32():
    batch = named_batch("packed")
    q, k, v = inputs(batch)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        rounded = q.to(dtype), k.to(dtype), v.to(dtype)
        out, lse = compressed_attention(*rounded, batch.config, **batch.kwargs)
        assert out is not None
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
        _, wanted = expected(batch, *rounded)
        near(lse, wanted, 1e-5)


@pytest.mark.parametrize("hint", [257, 300])
def test_length_hints_change_nothing(hint):
    batch = named_batch("packed")
    q, k, v = inputs(batch)
    out, lse = compressed_attention(
        q, k, v, batch.config, **batch.kwargs, max_seqlen_q=hint, max_seqlen_k=hint
    )
    for actual, wanted in zip((out, lse), expected(batch, q, k, v), strict=True):
        near(actual, wanted)


def test_oracle_counts_blocks_as_the_page_does():
    for t in range(200):
        for l, d in ((8, 4), (32, 16), (16, 16), (24, 8)):
            visible = oracle.visible_cmp(t + 1, t + 1, l, d)(t, 0)
            assert len(visible) == (0 if t + 1 < l else (t + 1 - l) // d + 1)
