"""nsa.selected_attention against the oracle, mostly with hand-made block indices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from nsa import compressed_attention, select_blocks, selected_attention
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
    torch_dense,
)


def expected(
    batch: Batch, q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, scale: float | None = None
) -> list[np.ndarray]:
    def one(rows: slice, tokens: slice, _: slice) -> tuple[np.ndarray, np.ndarray]:
        ids = block_indices[rows].numpy()
        visible = oracle.visible_slc(
            rows.stop - rows.start, tokens.stop - tokens.start, ids, batch.config.block_size
        )
        return oracle.attention(array(q)[rows], array(k)[tokens], array(v)[tokens], visible, scale)

    return stack(batch, one)


@pytest.mark.parametrize("name", BATCHES)
def test_matches_the_oracle(name):
    batch = named_batch(name)
    q, k, v, ids = batch.q(), batch.k(), batch.v(), batch.block_indices()
    out, lse = selected_attention(q, k, v, ids, batch.config, **batch.kwargs)
    assert lse.dtype == torch.float64
    for actual, wanted in zip((out, lse), expected(batch, q, k, v, ids), strict=True):
        near(actual, wanted)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("num_blocks", [1, 2, 7])
def test_any_number_of_blocks_of_any_size(block_size, num_blocks):
    """The indices are the caller's: their number need not be that of the config."""
    batch = make_batch(small(block_size=block_size), (257, 140), (30, 140))
    q, k, v, ids = batch.q(), batch.k(), batch.v(), batch.block_indices(num_blocks)
    actual = selected_attention(q, k, v, ids, batch.config, **batch.kwargs)
    for x, wanted in zip(actual, expected(batch, q, k, v, ids), strict=True):
        near(x, wanted)


def test_every_short_length_alone():
    for length in SHORT:
        batch = make_batch(small(), (length,), seed=length)
        q, k, v, ids = batch.q(), batch.k(), batch.v(), batch.block_indices()
        actual = selected_attention(q, k, v, ids, batch.config)
        for x, wanted in zip(actual, expected(batch, q, k, v, ids), strict=True):
            near(x, wanted)


def test_scale():
    batch = named_batch("packed")
    q, k, v, ids = batch.q(), batch.k(), batch.v(), batch.block_indices()
    actual = selected_attention(q, k, v, ids, batch.config, softmax_scale=0.7, **batch.kwargs)
    for x, wanted in zip(actual, expected(batch, q, k, v, ids, 0.7), strict=True):
        near(x, wanted)


def test_current_block_is_causal_token_by_token():
    """Only the query's own block: the first token of a block sees itself alone, the last one the whole block."""
    batch = make_batch(small(), (128,))
    q, k, v = batch.q(), batch.k(), batch.v()
    own = (torch.arange(128) // 16).int()[:, None, None].expand(-1, 2, 4).clone()
    own[..., 1:] = -1
    out, _ = selected_attention(q, k, v, own, batch.config)
    for t in range(128):
        own_block = slice(t // 16 * 16, t + 1)
        keys, values = array(k)[own_block], array(v)[own_block]
        wanted, _ = oracle.attention(
            array(q)[t : t + 1], keys, values, oracle.visible_dense(1, len(keys))
        )
        near(out[t : t + 1], wanted)
    near(out[::16], array(v[::16].repeat_interleave(2, dim=1)))


def test_indices_belong_to_their_kv_head():
    """Each group reads its own blocks: swapping the heads' indices is not the same as leaving them."""
    batch = make_batch(small(), (160,), (1,))
    q, k, v = batch.q(), batch.k(), batch.v()
    ids = torch.tensor([[[0, 3, 9, -1], [5, 9, 1, -1]]], dtype=torch.int32)
    out, _ = selected_attention(q, k, v, ids, batch.config)
    near(out, expected(batch, q, k, v, ids)[0])
    swapped, _ = selected_attention(q, k, v, ids.flip(1), batch.config)
    assert float((swapped - out).abs().min(-1).values.min()) > 0


@pytest.mark.parametrize("name", ["one", "packed", "chunks", "short"])
def test_gradients_match_the_oracle(name):
    batch = named_batch(name)
    q, k, v, ids = leaf(batch.q()), leaf(batch.k()), leaf(batch.v()), batch.block_indices()
    out, lse = selected_attention(q, k, v, ids, batch.config, **batch.kwargs)
    assert not lse.requires_grad
    d_out = batch.normal(*out.shape)
    out.backward(d_out)

    def one(rows: slice, tokens: slice, _: slice) -> tuple[np.ndarray, ...]:
        visible = oracle.visible_slc(
            rows.stop - rows.start, tokens.stop - tokens.start, ids[rows].numpy(), 16
        )
        return oracle.attention_backward(
            array(d_out)[rows], array(q)[rows], array(k)[tokens], array(v)[tokens], visible
        )

    for x, wanted in zip((q, k, v), stack(batch, one), strict=True):
        near(grad(x), wanted)


def test_gradcheck():
    config = small(num_heads=2, num_kv_heads=1, value_dim=16)
    batch = make_batch(config, (37, 5), (4, 3))
    ids = torch.tensor(
        [[2, 0, -1], [1, 9, 2], [-1, -1, -1], [0, 1, 2], [0, -1, 1], [-3, -1, 1], [0, -1, -1]]
    )
    ids = ids[:, None].int()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return selected_attention(q, k, v, ids, config, **batch.kwargs)[0]

    assert torch.autograd.gradcheck(
        run, (leaf(batch.q()), leaf(batch.k()), leaf(batch.v())), fast_mode=True
    )


def test_block_that_nobody_selected_has_no_gradient():
    """dK and dV of blocks 2 and 6 are exactly 0; those of every block that was selected are not."""
    batch = make_batch(small(), (130, 130))
    q, k, v = leaf(batch.q()), leaf(batch.k()), leaf(batch.v())
    ids = batch.block_indices()
    ids[torch.isin(ids, torch.tensor([2, 6], dtype=torch.int32))] = -1
    out, _ = selected_attention(q, k, v, ids, batch.config, **batch.kwargs)
    out.backward(batch.normal(*out.shape))
    for x in (k, v):
        blocks = grad(x).unflatten(0, (2, 130))[:, :128].unflatten(1, (8, 16))
        touched = blocks.abs().amax(dim=(0, 2, 4))  # [8, Hkv]
        assert not bool(touched[[2, 6]].any())
        assert bool((touched[[0, 1, 3, 4, 5, 7]] > 0).all())


@pytest.mark.parametrize("name", ["one", "packed", "steps"])
def test_order_of_the_indices_does_not_matter(name):
    batch = named_batch(name)
    q, k, v, ids = batch.q(), batch.k(), batch.v(), batch.block_indices()
    out, lse = selected_attention(q, k, v, ids, batch.config, **batch.kwargs)
    for order in ([3, 2, 1, 0], [2, 0, 3, 1]):
        other_out, other_lse = selected_attention(
            q, k, v, ids[..., order], batch.config, **batch.kwargs
        )
        near(other_out, array(out), 1e-14)
        near(other_lse, array(lse), 1e-14)


def test_a_block_that_is_named_again_counts_once():
    batch = named_batch("packed")
    ids, (q, k, v) = (
        batch.block_indices(6),
        (x.requires_grad_() for x in (batch.q(), batch.k(), batch.v())),
    )
    repeated = torch.cat((ids, ids.flip(-1)), dim=-1)
    results = [
        selected_attention(q, k, v, given, batch.config, **batch.kwargs)
        for given in (ids, repeated)
    ]
    grads = [torch.autograd.grad(out.sum(), (q, k, v)) for out, _ in results]
    for x, y in zip((*results[0], *grads[0]), (*results[1], *grads[1]), strict=True):
        assert torch.equal(x, y)


def test_absent_ids_are_never_read():
    """Blocks named only from the past (as future ids) hold NaN; the result is that of -1."""
    batch = make_batch(small(), (160,), (100,))
    q, k, v, ids = batch.q(), batch.k(), batch.v(), batch.block_indices()
    current = torch.from_numpy(batch.positions // 16)[:, None, None]
    absent = (ids < 0) | (ids > current)
    assert bool(absent.any())
    assert bool((absent & (ids > 0)).any())
    out, lse = selected_attention(q, k, v, ids, batch.config)
    cleaned, cleaned_lse = selected_attention(q, k, v, ids.masked_fill(absent, -1), batch.config)
    assert torch.equal(out, cleaned)
    assert torch.equal(lse, cleaned_lse)


def test_rows_without_a_block():
    """Output exactly 0, lse -inf, zero gradient; other rows are not disturbed."""
    batch = make_batch(small(), (257,))
    q, k, v, ids = leaf(batch.q()), leaf(batch.k()), leaf(batch.v()), batch.block_indices()
    ids[40:60] = torch.tensor([-1, 99, -5, 4], dtype=torch.int32)
    out, lse = selected_attention(q, k, v, ids, batch.config)
    assert torch.equal(out[40:60], torch.zeros(20, 4, 32).double())
    assert bool((lse[40:60] == -torch.inf).all())
    out.sum().backward()
    assert not bool(grad(q)[40:60].any())
    for x in (q, k, v):
        assert not bool(grad(x).isnan().any())
    everything = selected_attention(q, k, v, torch.full_like(ids, -1), batch.config)
    assert not bool(everything[0].any())
    assert bool((everything[1] == -torch.inf).all())


def test_full_coverage_is_dense_causal_attention():
    """n * l' >= S: with the choice of the library itself, whatever the scores."""
    config = small(num_selected_blocks=17)
    batch = make_batch(config, (257,))
    q, k, v, k_cmp = batch.q(), batch.k(), batch.v(), batch.compressed(16)
    _, lse_cmp = compressed_attention(q, k_cmp, None, config)
    ids = select_blocks(q, k_cmp, lse_cmp, config)
    out, lse = selected_attention(q, k, v, ids, config)
    dense, dense_lse = oracle.attention(
        array(q), array(k), array(v), oracle.visible_dense(257, 257)
    )
    near(out, dense)
    near(lse, dense_lse)
    near(out, array(torch_dense(q, k, v)))


def test_sparse_choice_is_not_dense():
    """The test above could not tell a sparse result from a dense one if this failed."""
    batch = make_batch(small(), (257,))
    q, k, v, k_cmp = batch.q(), batch.k(), batch.v(), batch.compressed(16)
    _, lse_cmp = compressed_attention(q, k_cmp, None, batch.config)
    out, _ = selected_attention(
        q, k, v, select_blocks(q, k_cmp, lse_cmp, batch.config), batch.config
    )
    dense, _ = oracle.attention(array(q), array(k), array(v), oracle.visible_dense(257, 257))
    near(out[:64], dense[:64])
    assert float(np.abs(array(out)[64:] - dense[64:]).max()) > 0.1


def test_dense_batch_with_more_keys_than_queries():
    batch = make_batch(small(), (130, 130), (9, 9))
    q, k, v, ids = batch.q(), batch.k(), batch.v(), batch.block_indices()
    dense_q, dense_k, dense_v, dense_ids = (x.unflatten(0, (2, -1)) for x in (q, k, v, ids))
    out, lse = selected_attention(dense_q, dense_k, dense_v, dense_ids, batch.config)
    wanted_out, wanted_lse = expected(batch, q, k, v, ids)
    near(out, wanted_out.reshape(2, 9, 4, 32))
    near(lse, wanted_lse.reshape(2, 9, 4))
