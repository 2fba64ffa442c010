"""How kernels run: without waiting, in CUDA graphs, compiled, with no kernel for a new length."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import triton
from torch import Tensor

from nsa import NativeSparseAttention
from nsa.testing import packed_offsets
from tests.gpu.matrix import DEVICE, MATRIX, SEED, seed_case
from tests.ops.public import Case, sharing
from tests.ops.registration import (
    check_compiled,
    check_operator,
    check_plan,
    operator_names,
    record_calls,
    run_with_gradients,
    tensors_of,
    whole_of,
)

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def no_waiting() -> Iterator[None]:
    """An operation that waits for the device fails."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Synchronization debug mode is a prototype feature"
        )
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Step:
    """Forward and backward of the whole on fixed tensors."""

    def __init__(self, case: Case) -> None:
        self.case, self.function = case, whole_of(case.config, case.backend)
        self.tensors, self.cu_seqlens = tensors_of(case)
        self.dout = case.normal(*self.tensors["q"].shape, seed=3)

    def run(self) -> list[Tensor]:
        out = self.function(self.tensors, self.cu_seqlens)
        grads = torch.autograd.grad(out, list(self.tensors.values()), self.dout)
        # Detached: an autograd graph that lives on would tie the leaves to the stream of this run.
        return [out.detach(), *grads]


@pytest.mark.parametrize("lengths", [(1200, 0, 70), (20_000, 0, 70)], ids=["short", "long"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"phi": "linear"},
        {"phi": "mlp"},
        {"coarse_block_size": 256, "num_coarse_blocks": 5},
        {"score_precision": "fp8"},
    ],
    ids=["default", "linear", "mlp", "two stages", "fp8"],
)
def test_a_step_does_not_wait_for_the_device(changes, lengths):
    """Forward and backward with offsets on the GPU and no hint about lengths."""
    step = Step(
        dataclasses.replace(seed_case(*lengths), config=dataclasses.replace(SEED, **changes))
    )
    step.run()
    with no_waiting():
        step.run()


def captured(run: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A graph of ``run``, and the tensors that its replay fills."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    with no_waiting():
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


@pytest.mark.parametrize("times", [1, 16], ids=["short", "long"])
def test_cuda_graph_with_other_documents(times):
    """A captured step, replayed with other data and offsets, gives the bits of an eager step."""
    step = Step(seed_case(*(times * length for length in (1000, 200, 48, 0))))
    graph, results = captured(step.run)
    for shares in ((1000, 200, 48, 0), (1, 0, 1247, 0), (312, 312, 312, 312)):
        lengths = [times * share for share in shares]
        with torch.no_grad():
            step.cu_seqlens.copy_(packed_offsets(lengths, DEVICE))
            for index, tensor in enumerate((*step.tensors.values(), step.dout)):
                tensor.copy_(step.case.normal(*tensor.shape, seed=100 * sum(lengths[:2]) + index))
            step.tensors["gates"].abs_()
        graph.replay()
        torch.cuda.synchronize()
        found = [x.clone() for x in results]
        for index, (replayed, eager) in enumerate(zip(found, step.run(), strict=True)):
            assert torch.equal(replayed, eager), f"result {index} at lengths {lengths}"


@pytest.mark.parametrize("shape", [(700,), (2, 350)], ids=["one sequence", "batch"])
def test_cuda_graph_of_the_module(shape):
    """Without offsets the module makes its own, by kernels that a graph captures."""
    torch.manual_seed(0)
    module = NativeSparseAttention(256, SEED).to(DEVICE, torch.bfloat16)
    x = torch.randn(*shape, 256, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    dout = torch.randn_like(x)

    def run():
        out = module(x)
        return [out.detach(), *torch.autograd.grad(out, [x, *module.parameters()], dout)]

    graph, results = captured(run)
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            x.normal_()
        graph.replay()
        for replayed, eager in zip(results, run(), strict=True):
            assert torch.equal(replayed, eager)


@pytest.fixture(scope="module")
def calls():
    case = dataclasses.replace(MATRIX["bf16 G6 D64"], lengths_k=(300, 70))
    return record_calls(
        case, [dataclasses.replace(case, config=dataclasses.replace(case.config, phi="mlp"))]
    )


@pytest.mark.parametrize("name", operator_names())
def test_registration(name, calls):
    assert name in calls, "no public function calls it"
    check_operator(name, calls[name])


@pytest.mark.parametrize("name", operator_names())
def test_plan_of_an_operator(name, calls):
    check_plan(name, calls[name])


@pytest.mark.filterwarnings("default")  # warnings of the compiler
@pytest.mark.parametrize("share_kv", [False, True])
def test_compiled_whole_serves_all_lengths(share_kv):
    lengths = ((1000, 200), (517, 0), (3000, 2222), (20_000, 70))
    cases = (seed_case(*some) for some in lengths)
    check_compiled([sharing(case) if share_kv else case for case in cases], "inductor")


# Where one call is long enough for the next of them, sums are cut into chunks, lists of tiles come
# from words of 64 bits, then from sorting, the selected branch is gathered, in one or in several
# segments, and compressed keys have tiles for long sequences: each has kernels of its own.
REGIMES: tuple[tuple[int, ...], ...] = ((40,), (1000, 24), (3000,), (5000,), (7000,), (20000,))
OTHERS: tuple[tuple[int, ...], ...] = (
    *((1,), (16, 16), (1024,), (999, 1, 0), (7,) * 20),
    *((2500,), (4500, 30), (2048, 2048), (6500, 900), (17000, 300, 1)),
)


# Kernels that no other test loads into this process.
@pytest.mark.parametrize("name", ["bf16 G8 D64", "fp32 G1 D128 small linear"])
def test_a_new_length_compiles_no_kernel(name, monkeypatch):
    """Only algorithms for longer sequences have kernels of their own, whatever the lengths."""
    like = MATRIX[name]

    def step(*lengths):
        case = dataclasses.replace(like, lengths_k=lengths, lengths_q=None)
        run_with_gradients(whole_of(case.config, case.backend), case)

    compiled: list[str] = []  # by Triton, or loaded for the first time in this process

    def note(*, repr, **_):
        compiled.append(repr)

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    for lengths in REGIMES:
        step(*lengths)
    assert any("kernel" in name for name in compiled)
    assert len(compiled) < 100
    compiled.clear()
    for lengths in OTHERS:
        step(*lengths)
    assert not compiled


REPLAYED_BY_TORCH = """
import torch
from nsa import NativeSparseAttention
from tests.gpu.matrix import SEED

torch.manual_seed(0)
module = NativeSparseAttention(64, SEED).cuda()
compiled = torch.compile(module, mode="reduce-overhead")
x = torch.randn(2, 300, 64, device="cuda")
found = []
for _ in range(4):
    module.zero_grad()  # a gradient in a graph's memory cannot be added to
    torch.compiler.cudagraph_mark_step_begin()
    leaf = x.clone().requires_grad_()
    y = compiled(leaf)
    y.square().sum().backward()
    found.append((y.detach().clone(), leaf.grad.clone()))
leaf = x.clone().requires_grad_()
y = module(leaf)
y.square().sum().backward()
for each in found:
    for a, b in zip(each, (y, leaf.grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
"""


def test_replays_of_torch_compile_are_the_first_thing_a_process_does():
    """Tensors that an operator makes once and keeps are not in a graph's memory."""
    done = subprocess.run(
        [sys.executable, "-c", REPLAYED_BY_TORCH],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "skipping cudagraphs" not in done.stderr
