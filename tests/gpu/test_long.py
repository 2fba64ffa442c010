"""Long sequences against sampled fp64 rows, and tensors of more than 2^31 elements."""

from __future__ import annotations

import dataclasses
import gc
from functools import partial

import pytest
import torch
from torch import Tensor

from nsa import NSAConfig, combine, compress, compressed_attention, select_blocks
from nsa.testing import assert_within_budget, packed_offsets
from nsa.testing.sampled import (
    Sample,
    check_sampled,
    sample_rows,
    sampled_selection,
    sampled_values,
)
from tests.gpu.matrix import BF16, DEVICE, MATRIX, SEED, seed_case
from tests.ops.public import (
    ALGORITHMS,
    RUNS,
    Case,
    agree,
    check_selection,
    check_token_max,
    run_whole,
)

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
def test_selection_among_a_million_tokens():
    case = seed_case(2**20)
    x = case.inputs()
    k, _ = compress(x.k_cmp_raw, None, SEED, x.cu_seqlens_k, backend=case.backend)
    _, lse = compressed_attention(x.q, k, None, SEED, backend=case.backend)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    selected = select_blocks(x.q, k, lse, SEED, backend=case.backend)
    beyond = torch.cuda.max_memory_allocated() - before - selected.numel() * selected.element_size()
    assert beyond <= 12 * 1024 * 2**20  # bytes a token, beyond inputs and the selection
    rows = sample_rows(x.cu_seqlens_q, 256)
    sample = Sample(rows, rows[:0], x.cu_seqlens_q, x.cu_seqlens_k)
    agree(sampled_selection(x.q, k, sample, SEED).agreement(selected[rows]))


@pytest.mark.slow
def test_whole_of_a_million_tokens():
    """The gradient comes in at 256 queries, so that fp64 needs no others; kernels compute all."""
    case = seed_case(2**20)
    dout = torch.zeros(2**20, SEED.num_heads, SEED.value_dim, dtype=BF16, device=DEVICE)
    rows = sample_rows(packed_offsets([2**20], DEVICE), 256)
    dout[rows] = case.normal(rows.numel(), *dout.shape[1:])
    check_whole(case, 256, 64, dout)


# 22 sequences of 131,072 tokens: q has 2.2e9 elements, so that an offset in 32 bits would wrap.
CASE = seed_case(*(131072,) * 22)
TOTAL = sum(CASE.lengths_k)


def rows_of(config: NSAConfig) -> Tensor:
    """Rows of queries on both sides of the place where an offset would wrap."""
    wrap = 2**31 // (config.num_heads * config.head_dim)
    assert wrap + 1 < TOTAL - 70
    return torch.tensor([0, 1, wrap - 1, wrap, wrap + 1, TOTAL - 70, TOTAL - 1], device=DEVICE)


@pytest.mark.parametrize("branch", ["window", "compressed", "selected", "gathered"])
def test_branch_beyond_31_bits(branch):
    rows = rows_of(SEED)
    given = {"block_indices": spread_blocks()} if branch in ALGORITHMS else {}
    results = RUNS[branch](CASE, **given)
    last = results.num_keys - 1
    compressed = torch.tensor([last - 199, last], device=DEVICE)
    results.check(rows, compressed if branch == "compressed" else rows[2:])


def test_selection_beyond_31_bits():
    for check in (check_selection, check_token_max):
        check(CASE, rows_of(SEED))


def test_combine_beyond_31_bits():
    rows, shape = rows_of(SEED), (TOTAL, SEED.num_heads, SEED.value_dim)
    leaves = [CASE.normal(*shape, seed=i).requires_grad_() for i in range(3)]
    leaves.append(torch.rand(*shape[:2], 3, device=DEVICE).to(BF16).requires_grad_())
    dout = CASE.normal(*shape, seed=4)

    def run(inputs, dout, backend):
        out = combine(inputs[0], inputs[1], inputs[2], inputs[3], backend=backend)
        return [out.detach(), *torch.autograd.grad(out, inputs, dout)]

    plain, exact = (
        run(
            [y.detach()[rows].to(d).requires_grad_() for y in leaves], dout[rows].to(d), "reference"
        )
        for d in (BF16, torch.float64)
    )
    for found, *expected in zip(run(leaves, dout, "triton"), plain, exact, strict=True):
        assert_within_budget(found[rows], expected[0], expected[1], "combine")


MANY_HEADS = dataclasses.replace(MATRIX["bf16 G1 D64"].config, num_heads=32, num_kv_heads=32)


def test_keys_beyond_31_bits():
    """More than 2^31 elements of keys and values."""
    case = Case(MANY_HEADS, (2**17,) * 9, dtype=BF16, device=DEVICE)
    wrap, total = 2**31 // (32 * 64), 9 * 2**17
    rows = torch.tensor([0, 1, wrap - 1, wrap, wrap + 1, total - 70, total - 1], device=DEVICE)
    RUNS["window"](case).check(rows, rows)


def test_compress_beyond_31_bits():
    raw = torch.randn(2**17 * 9, 32, 64, device=DEVICE, dtype=BF16).requires_grad_()
    assert raw.numel() > 2**31
    y, _ = compress(raw, None, MANY_HEADS, backend="triton")
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, raw, dy)
    # The oracle compresses whole sequences: pieces at both ends and where an offset would wrap.
    for first in (0, 2**31 // (32 * 64) - 512, raw.shape[0] - 1024):
        last, row = first + 1024, first // MANY_HEADS.compress_stride
        piece, cu = raw.detach()[first:last], packed_offsets([1024], DEVICE)
        rows, tokens = (torch.arange(n, device=DEVICE) for n in (63, 1024))
        inputs = {"x": piece, "dout": dy[row : row + 63]}
        # Tokens at the ends of a piece belong to blocks of its neighbours, too.
        sample = Sample(rows, tokens[16:-16], cu, cu)
        check_sampled(
            partial(sampled_values, "compress", inputs, sample, MANY_HEADS),
            {"y": y.detach()[row : row + 63], "dx": dx[first:last]},
            BF16,
            "compress",
        )


def spread_blocks() -> Tensor:
    """Block 0, the query's own, and blocks spread over the tokens before it, without scores."""
    current = torch.arange(TOTAL, device=DEVICE) % CASE.lengths_k[0] // SEED.block_size
    current = current[:, None, None]
    step = torch.arange(SEED.num_selected_blocks, device=DEVICE)
    head = torch.arange(SEED.num_kv_heads, device=DEVICE)[:, None]
    ids = torch.where(
        step == 0, current, current * step // SEED.num_selected_blocks + head * (step == 3)
    )
    earlier = (ids[..., :, None] == ids[..., None, :]).tril(-1).any(-1)
    return torch.where(earlier, -1, ids).int().contiguous()
