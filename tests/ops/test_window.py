"""nsa.window_attention against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from nsa import window_attention
from nsa.testing import assert_within_budget
from tests import oracle
from tests.ops.cases import (
    BATCHES,
    SHORT,
    Batch,
    array,
    grad,
    leaf,
    make_batch,
    mask_of,
    named_batch,
    near,
    plain_attention,
    small,
    stack,
    torch_dense,
)


def expected(
    batch: Batch, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None
) -> list[np.ndarray]:
    def one(rows: slice, tokens: slice, _: slice) -> tuple[np.ndarray, np.ndarray]:
        visible = oracle.visible_win(
            rows.stop - rows.start, tokens.stop - tokens.start, batch.config.window_size
        )
        return oracle.attention(array(q)[rows], array(k)[tokens], array(v)[tokens], visible, scale)

    return stack(batch, one)


@pytest.mark.parametrize("name", BATCHES)
def test_matches_the_oracle(name):
    batch = named_batch(name)
    q, k, v = batch.q(), batch.k(), batch.v()
    out, lse = window_attention(q, k, v, batch.config, **batch.kwargs)
    assert lse.dtype == torch.float64
    for actual, wanted in zip((out, lse), expected(batch, q, k, v), strict=True):
        near(actual, wanted)


@pytest.mark.parametrize("w", [1, 2, 7, 63, 64, 300])
def test_other_window_sizes(w):
    batch = make_batch(small(window_size=w), (257, 64, 1, 66), (257, 64, 1, 3))
    q, k, v = batch.q(), batch.k(), batch.v()
    for actual, wanted in zip(
        window_attention(q, k, v, batch.config, **batch.kwargs),
        expected(batch, q, k, v),
        strict=True,
    ):
        near(actual, wanted)


def test_every_short_length_alone():
    for length in SHORT:
        batch = make_batch(small(window_size=8), (length,), seed=length)
        q, k, v = batch.q(), batch.k(), batch.v()
        for actual, wanted in zip(
            window_attention(q, k, v, batch.config), expected(batch, q, k, v), strict=True
        ):
            near(actual, wanted)


def test_window_of_one_token_is_the_token_itself():
    batch = make_batch(small(window_size=1), (130, 5))
    q, k, v = batch.q(), batch.k(), batch.v()
    out, _ = window_attention(q, k, v, batch.config, **batch.kwargs)
    near(out, array(v.repeat_interleave(2, dim=1)))


@pytest.mark.parametrize("w", [257, 1000])
def test_full_window_is_dense_causal_attention(w):
    batch = make_batch(small(window_size=w), (257,))
    q, k, v = batch.q(), batch.k(), batch.v()
    out, lse = window_attention(q, k, v, batch.config)
    dense, dense_lse = oracle.attention(
        array(q), array(k), array(v), oracle.visible_dense(257, 257)
    )
    near(out, dense)
    near(lse, dense_lse)
    near(out, array(torch_dense(q, k, v)))


def test_scale():
    batch = named_batch("packed")
    q, k, v = batch.q(), batch.k(), batch.v()
    out, lse = window_attention(q, k, v, batch.config, softmax_scale=0.7, **batch.kwargs)
    for actual, wanted in zip((out, lse), expected(batch, q, k, v, 0.7), strict=True):
        near(actual, wanted)


@pytest.mark.parametrize("name", ["one", "packed", "chunks", "short"])
def test_gradients_match_the_oracle(name):
    batch = named_batch(name)
    q, k, v = leaf(batch.q()), leaf(batch.k()), leaf(batch.v())
    out, lse = window_attention(q, k, v, batch.config, **batch.kwargs)
    assert not lse.requires_grad
    d_out = batch.normal(*out.shape)
    out.backward(d_out)

    def one(rows: slice, tokens: slice, _: slice) -> tuple[np.ndarray, ...]:
        visible = oracle.visible_win(rows.stop - rows.start, tokens.stop - tokens.start, 32)
        return oracle.attention_backward(
            array(d_out)[rows], array(q)[rows], array(k)[tokens], array(v)[tokens], visible
        )

    for x, wanted in zip((q, k, v), stack(batch, one), strict=True):
        near(grad(x), wanted)


def test_gradcheck():
    config = small(num_heads=2, num_kv_heads=1, value_dim=16, window_size=5)
    batch = make_batch(config, (11, 3), (4, 3))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return window_attention(q, k, v, config, **batch.kwargs)[0]

    assert torch.autograd.gradcheck(run, (leaf(batch.q()), leaf(batch.k()), leaf(batch.v())))


def test_dense_batch_with_more_keys_than_queries():
    batch = make_batch(small(), (130, 130), (9, 9))
    q, k, v = batch.q(), batch.k(), batch.v()
    out, lse = window_attention(
        q.unflatten(0, (2, 9)), k.unflatten(0, (2, 130)), v.unflatten(0, (2, 130)), batch.config
    )
    wanted_out, wanted_lse = expected(batch, q, k, v)
    near(out, wanted_out.reshape(2, 9, 4, 32))
    near(lse, wanted_lse.reshape(2, 9, 4))


def test_one_sequence_without_offsets_may_have_more_keys():
    batch = make_batch(small(), (130,), (9,))
    q, k, v = batch.q(), batch.k(), batch.v()
    for actual, wanted in zip(
        window_attention(q, k, v, batch.config), expected(batch, q, k, v), strict=True
    ):
        near(actual, wanted)


@pytest.mark.parametrize("hint", [257, 300])
def test_length_hints_change_nothing(hint):
    batch = named_batch("packed")
    q, k, v = batch.q(), batch.k(), batch.v()
    out, lse = window_attention(
        q, k, v, batch.config, **batch.kwargs, max_seqlen_q=hint, max_seqlen_k=hint
    )
    for actual, wanted in zip((out, lse), expected(batch, q, k, v), strict=True):
        near(actual, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_low_precision(dtype):
    batch = make_batch(small(), (130,))
    q, k, v = (x.to(dtype) for x in (batch.q(), batch.k(), batch.v()))
    out, lse = window_attention(q, k, v, batch.config)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    wanted, wanted_lse = expected(batch, q, k, v)
    visible = mask_of(oracle.visible_win(130, 130, 32), 130, 2, 130)
    assert_within_budget(
        out, plain_attention(q, k, v, visible, 0.25), torch.from_numpy(wanted), "out"
    )
    near(lse, wanted_lse, 1e-5)
