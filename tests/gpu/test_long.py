"""Long sequences against sampled fp64 rows, and tensors of more than 2^31 elements."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch
from torch import Tensor

from nsa import (
    NSAConfig,
    combine,
    compress,
    compressed_attention,
    select_blocks,
    selected_attention,
    window_attention,
)
from nsa.testing import AttentionInputs, assert_within_budget, packed_offsets
from nsa.testing.sampled import (
    SampledCompression,
    check_sampled,
    sample_rows,
    sampled_choice,
    sampled_compressed,
    sampled_selected,
    sampled_window,
)
from tests.gpu.matrix import BF16, DEVICE, MATRIX, SEED, seed_case
from tests.ops.public import Case, agree, cu, run_whole

WIDE = NSAConfig(num_heads=64, num_kv_heads=4, head_dim=128, value_dim=128)


@pytest.fixture(autouse=True)
def memory_is_given_back():
    yield
    gc.collect()
    torch.cuda.empty_cache()


def check_whole(case: Case, num_rows: int, num_keys: int, dout: Tensor | None = None) -> None:
    """The whole, its choice and its gradients on some rows; all gradients finite."""
    results = run_whole(case, dout=dout)
    for name, x in {**results.of_queries, **results.of_keys}.items():
        assert bool(x.isfinite().all()), name
    cu_q, cu_k = (
        packed_offsets(lengths, case.device) for lengths in (case.queries, case.lengths_k)
    )
    results.check(sample_rows(cu_q, num_rows), sample_rows(cu_k, num_keys, seed=1))


@pytest.mark.parametrize(
    "lengths", [(8192,), (32768,), (131072,), (65536, 1, 4096, 61339)], ids=str
)
def test_seed_shape(lengths):
    check_whole(seed_case(*lengths), 96, 12)


@pytest.mark.parametrize("length", [8192, 65536])
def test_wide_shape(length):
    check_whole(Case(WIDE, (length,), dtype=BF16, device=DEVICE), 64, 8)


def test_chunk_of_a_long_prefill():
    check_whole(seed_case(131072, 70000, queries=(4096, 1)), 96, 8)


@pytest.mark.slow
def test_choice_among_a_million_tokens():
    case = seed_case(2**20)
    x = case.inputs()
    k, _ = compress(x.k_cmp_raw, None, SEED, x.cu_seqlens_k, backend=case.backend)
    _, lse = compressed_attention(x.q, k, None, SEED, backend=case.backend)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    chosen = select_blocks(x.q, k, lse, SEED, backend=case.backend)
    beyond = torch.cuda.max_memory_allocated() - before - chosen.numel() * chosen.element_size()
    assert beyond <= 12 * 1024 * 2**20  # bytes a token, beyond inputs and the choice
    agree(sampled_choice(x.q, k, SEED).agreement(sample_rows(x.cu_seqlens_q, 256), chosen))


@pytest.mark.slow
def test_whole_of_a_million_tokens():
    """The gradient comes in at 256 queries, so that fp64 needs no more of them; kernels do their work for all."""
    case = seed_case(2**20)
    dout = torch.zeros(2**20, SEED.num_heads, SEED.value_dim, dtype=BF16, device=DEVICE)
    rows = sample_rows(packed_offsets([2**20], DEVICE), 256)
    dout[rows] = case.normal(rows.numel(), *dout.shape[1:])
    check_whole(case, 256, 64, dout)


# 22 sequences of 131,072 tokens: q has 2.2e9 elements.
CASE = seed_case(*(131072,) * 22)


@pytest.fixture
def many():
    """Inputs where an offset in 32 bits would wrap; sampled rows lie on both sides of it."""
    x = CASE.inputs()
    assert x.q.numel() > 2**31
    return x


def rows_of(x: AttentionInputs) -> Tensor:
    total = x.q.shape[0]
    wrap = 2**31 // (x.q.shape[1] * x.q.shape[2])
    places = [0, 1, wrap - 1, wrap, wrap + 1, total - 70, total - 1]
    return torch.tensor(places, device=x.q.device)


def check_branch(case: Case, x: AttentionInputs, branch: str) -> None:
    config = case.config
    if branch == "cmp":
        k, v = (
            compress(raw, None, config, x.cu_seqlens_k, backend=case.backend)[0]
            for raw in (x.k_cmp_raw, x.v_cmp_raw)
        )
        sampled = sampled_compressed(x.q, k, v, config, **cu(x))
        leaves = [y.detach().requires_grad_() for y in (x.q, k, v)]
        out, lse = compressed_attention(leaves[0], leaves[1], leaves[2], config, **case.offsets(x))
        keys = torch.tensor([k.shape[0] - 200, sampled.cu_key[-1] - 1], device=x.q.device)
    elif branch == "slc":
        ids = spread_choice(x, config)
        sampled = sampled_selected(x.q, x.k_slc, x.v_slc, ids, config, **cu(x))
        leaves = [y.detach().requires_grad_() for y in (x.q, x.k_slc, x.v_slc)]
        out, lse = selected_attention(
            leaves[0], leaves[1], leaves[2], ids, config, **case.offsets(x)
        )
        keys = rows_of(x)[2:]
    else:
        sampled = sampled_window(x.q, x.k_win, x.v_win, config, **cu(x))
        leaves = [y.detach().requires_grad_() for y in (x.q, x.k_win, x.v_win)]
        out, lse = window_attention(leaves[0], leaves[1], leaves[2], config, **case.offsets(x))
        keys = rows_of(x)
    assert out is not None
    dout = case.normal(*out.shape)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    rows = rows_of(x)
    found = {"out": out.detach(), "lse": lse, "dq": dq}
    check_sampled(lambda d: sampled.at_queries(rows, d, dout), found, rows, case.dtype, branch)
    check_sampled(
        lambda d: sampled.at_keys(keys, d, dout), {"dk": dk, "dv": dv}, keys, case.dtype, branch
    )


@pytest.mark.parametrize("branch", ["win", "cmp", "slc"])
def test_branch_beyond_31_bits(many, branch):
    check_branch(CASE, many, branch)


def test_choice_beyond_31_bits(many):
    case, x, config = CASE, many, SEED
    k, _ = compress(x.k_cmp_raw, None, config, x.cu_seqlens_k, backend=case.backend)
    _, lse = compressed_attention(x.q, k, None, config, **case.offsets(x))
    chosen = select_blocks(x.q, k, lse, config, **case.offsets(x))
    agree(sampled_choice(x.q, k, config, **cu(x)).agreement(rows_of(x), chosen))


def test_combine_beyond_31_bits(many):
    outs = [CASE.normal(*many.q.shape, seed=i).requires_grad_() for i in range(3)]
    leaves = [*outs, many.gates.detach().requires_grad_()]
    out = combine(leaves[0], leaves[1], leaves[2], leaves[3], backend=CASE.backend)
    actual = [out.detach(), *torch.autograd.grad(out, leaves, many.q)]
    rows = rows_of(many)
    expected = {}
    for dtype in (CASE.dtype, torch.float64):
        few = [y.detach()[rows].to(dtype).requires_grad_() for y in leaves]
        out = combine(few[0], few[1], few[2], few[3], backend="reference")
        expected[dtype] = [out.detach(), *torch.autograd.grad(out, few, many.q[rows].to(dtype))]
    for found, plain, exact in zip(actual, *expected.values(), strict=True):
        assert_within_budget(found[rows], plain, exact, "combine")


def test_keys_beyond_31_bits():
    """More than 2^31 elements of keys and values."""
    like = MATRIX["bf16 G1 D64"].config
    config = dataclasses.replace(like, num_heads=32, num_kv_heads=32)
    case = Case(config, (2**17,) * 9, dtype=BF16, device=DEVICE)
    x = case.inputs()
    assert x.k_win.numel() > 2**31
    check_branch(case, x, "win")


def test_compress_beyond_31_bits():
    config = dataclasses.replace(MATRIX["bf16 G1 D64"].config, num_heads=32, num_kv_heads=32)
    raw = torch.randn(2**17 * 9, 32, 64, device=DEVICE, dtype=BF16).requires_grad_()
    assert raw.numel() > 2**31
    y, _ = compress(raw, None, config, backend="triton")
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, raw, dy)
    sampled = SampledCompression(raw, None, config, packed_offsets([raw.shape[0]], DEVICE))
    blocks = torch.tensor([0, sampled.num_blocks // 2, sampled.num_blocks - 1], device=DEVICE)
    tokens = torch.tensor([0, 100, raw.shape[0] - 40, raw.shape[0] - 1], device=DEVICE)
    check_sampled(
        lambda d: sampled.at_blocks(blocks, d), {"y": y.detach()}, blocks, BF16, "compress"
    )
    check_sampled(lambda d: sampled.at_tokens(tokens, d, dy), {"dx": dx}, tokens, BF16, "compress")


def spread_choice(x: AttentionInputs, config: NSAConfig) -> Tensor:
    """A choice without scores: block 0, the query's own, and blocks spread over what lies before."""
    positions = torch.arange(x.q.shape[0], device=x.q.device) % CASE.lengths_k[0]
    current = (positions // config.block_size)[:, None, None]
    step = torch.arange(config.num_selected_blocks, device=x.q.device)
    head = torch.arange(config.num_kv_heads, device=x.q.device)[:, None]
    ids = torch.where(
        step == 0, current, (current * step // config.num_selected_blocks + head * (step == 3))
    )
    earlier = (ids[..., :, None] == ids[..., None, :]).tril(-1).any(-1)
    return torch.where(earlier, -1, ids).int().contiguous()
