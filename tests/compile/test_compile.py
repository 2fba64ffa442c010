"""Resources of every kernel, compiled without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from nsa import NSAConfig, window_attention
from nsa.ops._triton.tuning import Tile, tiles_chosen_by
from tools.compile_only.driver import SHARED_MEMORY_LIMIT, Usage, absent_gpu
from tools.compile_only.launches import LONG, jitted_functions, launches, reached_from
from tools.compile_only.survey import (
    ALLOWED_STACK_BYTES,
    ARCHS,
    MAX_STACK_BYTES,
    PART,
    STACK_THAT_WINS,
    Case,
    Record,
    Tuning,
    compiled,
    tunings,
    whole,
)


def launched_by(cases: list[Case]) -> set[JITFunction[Any]]:
    with launches() as launched:
        for case in cases:
            case.launch()
    return launched


def unlaunched(cases: list[Case]) -> set[str]:
    left = jitted_functions() - reached_from(launched_by(cases))
    return {function.__name__ for function in left}


# Each kernel once: those of a decode step with one query for Ampere, all others for Hopper. For
# Blackwell those of window and selection in a long text with the heads that need most. `make
# test-faults` compiles more of them for each.
ONCE = [case for case in PART[64, 64] if case.group_size == 6 or case.queries]
SHARE = {
    80: [replace(case, changes=()) for case in ONCE if case.queries == 1],
    90: [case for case in ONCE if case.queries != 1],
    100: [Case(192, 128, 6, longest=LONG, changes=(("branches", ("slc", "win")),))],
}


def needs(arch: int, cases: list[Case]) -> None:
    records = list(compiled([Tuning(arch)], cases))
    faults = [fault for record in records if (fault := record.fault(lenient=False))]
    assert not faults, "\n".join(faults)
    names = {kernel.__name__ for kernel in launched_by(cases)}
    assert {record.usage.kernel for record in records} == names


@pytest.mark.parametrize("arch", [80, 90, pytest.param(100, marks=pytest.mark.faults)])
def test_needs_of_kernels(arch):
    needs(arch, SHARE[arch])


@pytest.mark.faults
@pytest.mark.parametrize("sizes", PART, ids=str)
@pytest.mark.parametrize("arch", ARCHS)
def test_needs_of_every_kernel(arch, sizes):
    needs(arch, PART[sizes])


@pytest.mark.parametrize("cases", [*PART.values(), [*SHARE[80], *SHARE[90]]])
def test_every_kernel_is_launched(cases):
    assert not unlaunched(cases)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, marks=[] if number == len(whole()) - 1 else pytest.mark.faults)
        for number in range(len(whole()))
    ],
)
def test_whole_matrix_launches(number):
    """Of its parts, sizes of heads and types, the last holds what else a config can change."""
    for case in whole()[number]:
        assert launched_by([case]), case


def test_large_tile_is_seen_to_spill():
    q, k, v = (torch.zeros(64, heads, 128, dtype=torch.bfloat16) for heads in (12, 2, 2))
    tile = Tile(64, 64, 4, 5, max_registers=64)
    with absent_gpu(89) as usages, tiles_chosen_by(lambda key, _: tile):
        window_attention(q, k, v, NSAConfig(head_dim=128, value_dim=128), backend="triton")
    (usage,) = usages
    assert usage.kernel == "range_fwd_kernel"
    assert usage.stack > MAX_STACK_BYTES
    assert usage.shared > SHARED_MEMORY_LIMIT[89]


H200 = tunings(90)[1]


@pytest.mark.parametrize(
    ("tuning", "kernel", "size", "stack", "shared", "rule"),
    [
        (Tuning(89), "some_kernel", 128, 0, 101_376, ""),
        (Tuning(89), "some_kernel", 128, 0, 101_377, "of shared memory"),
        (Tuning(89), "some_kernel", 128, 8, 0, "more than 0 bytes of stack"),
        (Tuning(89), "some_kernel", 192, 8, 0, "more than 0 bytes of stack, lenient"),
        # Stack that is allowed belongs to a row of a table.
        (H200, "select_kernel", 128, 256, 0, ""),
        (H200, "select_kernel", 128, 264, 0, "more than 256 bytes of stack"),
        (Tuning(90), "select_kernel", 128, 8, 0, "more than 0 bytes of stack"),
    ],
)
def test_faults(tuning, kernel, size, stack, shared, rule):
    record = Record(tuning, Case(size, 64, 6), Usage(kernel, 255, stack, shared))
    expected, _, is_lenient = rule.partition(", ")
    assert expected in (record.fault(lenient=False) or "")
    assert bool(record.fault(lenient=False)) == bool(expected)
    assert bool(record.fault(lenient=True)) == (bool(expected) and not is_lenient)


def test_allowed_stack_is_that_of_kernels_and_rows():
    kernels = {function.__name__ for function in jitted_functions()}
    assert H200.table
    for kernel, head_size in STACK_THAT_WINS:
        assert kernel in kernels
        assert any(key.head_size == head_size for key in H200.table.rows)
    assert {kernel for _, kernel in ALLOWED_STACK_BYTES} <= kernels
    unmeasured = {arch for arch, kernel in ALLOWED_STACK_BYTES if kernel != "heads_kernel"}
    assert not unmeasured & {*ARCHS}


@triton.jit
def _product_of_a_tile_read_twice(x_ptr, y_ptr, out_ptr, K: tl.constexpr):
    m, n, k = tl.arange(0, 64), tl.arange(0, 16), tl.arange(0, 128)
    acc, squares = tl.zeros([64, 16], tl.float32), tl.zeros([64, 128], tl.float32)
    for k0 in tl.range(0, K, 128, num_stages=4):
        x = tl.load(x_ptr + m[:, None] * K + k0 + k[None, :])
        y = tl.load(y_ptr + n[None, :] * K + k0 + k[:, None])
        squares += x.to(tl.float32) * x.to(tl.float32)
        acc = tl.dot(x, y, acc)
    tl.store(out_ptr + m[:, None] * 16 + n[None, :], acc + tl.sum(squares, 1)[:, None])


def test_a_tile_that_is_overwritten_while_a_product_reads_it_is_seen():
    x, y, out = (torch.zeros(rows, 256, dtype=torch.bfloat16) for rows in (64, 16, 64))
    with absent_gpu(90) as usages:
        _product_of_a_tile_read_twice[(1,)](x, y, out.float(), 256)
    assert usages[0].hazards
    record = Record(Tuning(90), Case(64, 64, 6), usages[0])
    assert "while a product reads it" in (record.fault(lenient=False) or "")
