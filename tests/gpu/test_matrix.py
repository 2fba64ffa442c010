"""Every operator, forward and backward, on every case of the matrix, against fp64."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nsa import NSAConfig, compressed_attention, select_blocks
from tests.gpu.matrix import DEVICE, MATRIX, SEED, seed_case
from tests.gpu.test_properties import SETTING
from tests.ops import properties
from tests.ops.public import (
    ALGORITHMS,
    CHECKS,
    RUNS,
    check_project,
    check_selection,
    run_whole,
)

# Compiling takes most of the time, on one core a kernel: processes share the GPU and the cache of
# compiled kernels.
WORKERS = max(1, min(12, (os.cpu_count() or 2) - 2))


def run_check(operator: str, name: str) -> None:
    CHECKS[operator](MATRIX[name])


@pytest.fixture(scope="module")
def verdicts(request):
    """The checks of all selected tests of this module, in processes of their own."""
    with ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn")) as pool:
        selected = [
            (item.callspec.params["operator"], item.callspec.params["name"])
            for item in request.session.items
            if getattr(item, "originalname", None) == "test_operator"
            and item.module is request.module
        ]
        # Cases take turns, so that the kernels of one are compiled by several processes.
        yield {key: pool.submit(run_check, *key) for key in selected}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", MATRIX)
@pytest.mark.parametrize("operator", CHECKS)
def test_operator(operator, name, verdicts):
    verdicts[operator, name].result(timeout=600)


@pytest.mark.parametrize("length", [1, 31, 32, 63, 64, 65, 257, 1100])
def test_single_sequence(length):
    """One sequence alone, with and without offsets: no kernel more than for a batch."""
    for dense in (False, True):
        for run in RUNS.values():
            run(seed_case(length, dense=dense)).check()


def test_many_sequences():
    """More sequences than one step of a search for a tile looks at, most of them short or empty."""
    lengths = [(7 * i) % 41 if i % 9 else 0 for i in range(400)]
    for run in RUNS.values():
        run(seed_case(*lengths, 300)).check()


@pytest.mark.parametrize("length", [4096, 4097])
def test_longest_sequence_of_one_pass(length):
    RUNS["shared"](seed_case(length)).check()


def of_seed(**changes: Any) -> NSAConfig:
    return dataclasses.replace(SEED, **changes)


def shuffled_blocks(num_blocks: int) -> Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    order = torch.rand(770, 2, max(num_blocks, 12), generator=generator, device=DEVICE).argsort(-1)
    return order[..., :num_blocks]


@pytest.mark.parametrize("num_blocks", [0, 1, 3, 40])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_indices_of_the_caller(algorithm, num_blocks):
    """All queries name blocks 0 and 1 and nothing else, or any number of blocks as int64."""
    if num_blocks:
        case, ids = seed_case(700, 70), shuffled_blocks(num_blocks)
    else:
        case, ids = seed_case(3000, 70), torch.full((3070, 2, 16), -1, device=DEVICE).int()
        ids[..., 3], ids[..., 9] = 0, 1
    RUNS[algorithm](case, block_indices=ids).check()


def test_gathering_in_segments():
    """Queries in four parts, as for long sequences, where one part would need too much memory."""
    with mock.patch("nsa.ops.selected.launch.SMALL", 1):
        RUNS["gathered"](seed_case(1200, 70, 0, 33)).check()
        properties.test_same_bits_on_every_run("gathered", "bf16", SETTING)


SHARED_INDEX = {"scores": "index", "index_dim": 32, "index_heads": 4, "index_keys": "shared"}
SUBSETS = [("cmp",), ("slc",), ("win",), ("cmp", "slc"), ("slc", "win")]


@pytest.mark.parametrize(
    "changes",
    [
        *({"branches": branches} for branches in SUBSETS),
        {"compress_rope": "start"},
        {"compress_rope": "none"},
        {"scores": "token_max"},
        {"scores": "token_max", "branches": ("slc", "win"), "num_init_blocks": 0},
        {"scores": "token_max", "score_precision": "fp8", "compress_rope": "none"},
        {"scores": "index", "branches": ("slc", "win")},
        SHARED_INDEX,
        {"scores": "random"},
        {"branches": ("cmp", "win")},
    ],
    ids=str,
)
def test_options_of_the_whole(changes):
    run_whole(dataclasses.replace(seed_case(300, 1100), config=of_seed(**changes))).check()


@pytest.mark.parametrize("algorithm", ["tiled", "gathered"])
def test_algorithms_of_the_whole(algorithm):
    run_whole(dataclasses.replace(seed_case(300, 1, 0, 1100), algorithm=algorithm)).check()


@pytest.mark.parametrize(
    "changes",
    [
        {"num_selected_blocks_table": ((-1, 512, 5), (-1, 1024, 9))},
        {"coarse_block_size": 256, "num_coarse_blocks": 5},
        {"score_precision": "fp8"},
        {"num_init_blocks": 0, "num_local_blocks": 1},
        {"scores": "token_max", "num_selected_blocks_table": ((-1, 512, 5), (-1, 1024, 9))},
        {"scores": "token_max", "num_init_blocks": 0, "num_local_blocks": 1},
        *(
            {"scores": "token_max", "score_precision": "fp8", "block_size": size}
            for size in (32, 64, 128)
        ),
        {"scores": "index", "index_dim": 32},
        *({**SHARED_INDEX, "score_precision": precision} for precision in ("exact", "fp8")),
    ],
    ids=str,
)
def test_options_of_the_selection(changes):
    check_selection(dataclasses.replace(seed_case(3000, 70, 1, 200), config=of_seed(**changes)))


def test_ties_go_to_the_lower_block():
    """All keys have the same weight if q is 0: inner blocks tie exactly."""
    case = seed_case(3000)
    x = case.inputs()
    q, k = torch.zeros_like(x.q), x.k_cmp_raw[: 3000 // 16].contiguous()
    _, lse = compressed_attention(q, k, None, SEED, backend=case.backend)
    found = select_blocks(q, k, lse, SEED, backend=case.backend)
    assert torch.equal(
        found.cpu(), select_blocks(q.cpu(), k.cpu(), lse.cpu(), SEED, backend="reference")
    )
    config, k = of_seed(scores="token_max"), x.k_slc
    found = select_blocks(q, k, None, config, backend=case.backend)
    assert torch.equal(
        found.cpu(), select_blocks(q.cpu(), k.cpu(), None, config, backend="reference")
    )


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_gates_by_softmax(temperature):
    """The matrix has sigmoid gates."""
    config = of_seed(gate="softmax", gate_temperature=temperature)
    check_project(dataclasses.replace(MATRIX["bf16 G6 D64"], config=config))
