"""Time by stage, of traces in which every microsecond is known."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from nsa import stages
from nsa.lm.model import LanguageModel
from nsa.train.profiler.attribution import Attribution, Place, align, product_stages
from nsa.train.profiler.table import IDLE, UNATTRIBUTED, StageTable, stage_table
from tests.train.cases import MODEL
from tests.train.profiler.hand_made import AUTOGRAD, HandMade

PRODUCTS = {(32, 64): stages.MLP, (32, 128): stages.PROJECTION}


def eager_steps(number: int) -> HandMade:
    """Steps of 100 microseconds: operators one by one, their backward pass in its own thread,
    communication at the same time.
    """
    hand = HandMade()
    for step in range(number):
        hand.origin = 100.0 * step
        hand.step(step, 0, 100)
        hand.mark(stages.DATA, 0, 10)
        hand.mark(stages.FORWARD, 10, 40)
        hand.mark(stages.MLP, 12, 20)
        hand.host("aten::linear", 13, 19)
        hand.launch(14, ("gemm", 14, 24))
        hand.host("aten::add", 22, 25)
        hand.launch(23, ("vectorized_add", 24, 26))
        hand.host("nsa::window_attention", 26, 30)
        hand.launch(27, ("range_fwd_kernel", 28, 34), call="cuLaunchKernelEx")
        hand.mark(stages.BACKWARD, 40, 70)
        hand.host("autograd::engine::evaluate_function: WindowBackward", 41, 50, AUTOGRAD)
        hand.host("WindowBackward", 42, 49, AUTOGRAD)
        hand.backward_of(26, 42)
        hand.launch(44, ("range_dq_kernel", 44, 54), thread=AUTOGRAD)
        hand.host("autograd::engine::evaluate_function: AddmmBackward0", 50.5, 59, AUTOGRAD)
        hand.host("AddmmBackward0", 51, 58, AUTOGRAD)
        hand.backward_of(13, 51)
        hand.launch(52, ("gemm", 54, 60), thread=AUTOGRAD)
        hand.host("aten::add", 58.2, 58.9, AUTOGRAD)  # of two gradients of one tensor
        hand.launch(58.3, ("vectorized_add", 60, 61), thread=AUTOGRAD)
        hand.host("torch::autograd::AccumulateGrad", 60, 62, AUTOGRAD)
        hand.launch(60.5, ("vectorized_add", 61, 62), thread=AUTOGRAD)
        hand.launch(62.5, ("ncclDevKernel_AllReduce", 55, 70), thread=AUTOGRAD, stream=20)
        hand.mark(stages.OPTIMIZER, 70, 80)
        hand.launch(71, ("multi_tensor_apply", 72, 80))
    return hand


def table_of(hand: HandMade, **arguments: Any) -> StageTable:
    trace = hand.trace()
    return stage_table(trace, Attribution(trace, PRODUCTS, **arguments))


def micros(table: StageTable) -> dict[str, tuple[float, ...]]:
    return {
        name: tuple(round(1000 * ms, 6) for ms in parts) for name, parts in table.stages.items()
    }


def test_eager_steps() -> None:
    table = table_of(eager_steps(3))
    assert (table.device, table.steps) == ("gpu", 2)
    assert table.step_ms == pytest.approx(0.1)
    assert micros(table) == {
        stages.WINDOW: (6, 10),
        stages.MLP: (10, 7),
        stages.REST: (2, 0),
        stages.DATA: (10, 0),
        stages.GRADIENTS: (1, 0),
        stages.OPTIMIZER: (8, 0),
        stages.COMMUNICATION: (8, 0),
        UNATTRIBUTED: (0, 0),
        IDLE: (38, 0),
    }
    assert table.hidden_communication_ms == pytest.approx(0.007)
    (gemm,) = (one for one in table.kernels if one.name == "gemm" and one.backward)
    assert (gemm.stage, gemm.calls_per_step) == (stages.MLP, 1)
    assert gemm.ms_per_step == pytest.approx(0.006)
    rows = table.to_json()["stages"]
    assert sum(row["total_ms"] for row in rows) == pytest.approx(table.step_ms)
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    assert [row["stage"] for row in rows][-2:] == [UNATTRIBUTED, IDLE]
    assert f"\n{'sum':64}   0.100   100.0%" in table.text()
    assert table.kernels_text(1).count("\n") == 2


def test_a_single_step_ends_with_its_last_kernel_or_its_host() -> None:
    table = table_of(eager_steps(1))
    assert table.steps == 1
    assert table.step_ms == pytest.approx(0.086)
    assert sum(map(sum, table.stages.values())) == pytest.approx(table.step_ms)


def compiled_micro_batch(hand: HandMade, origin: float) -> None:
    """50 microseconds of compiled code: products, fused kernels, an opaque operator, and a product
    that nothing explains.
    """
    hand.origin = origin
    hand.mark(stages.FORWARD, 0, 25)
    hand.host("CompiledFunction", 0.5, 24)
    hand.host("## Call CompiledFxGraph f ##", 1, 24, category="user_annotation")
    hand.product([[512, 32], [32, 128], [512, 128]], 2, 4)
    hand.launch(3, ("nvjet", 3, 8))
    hand.launch(5, ("triton_poi_fused__to_copy_silu_3", 8, 10))
    hand.host("nsa::attention", 7, 15)
    hand.host("nsa::select_blocks", 8, 10)
    hand.launch(9, ("select_kernel", 10, 13))
    hand.launch(11, ("radix_sort", 13, 14))
    hand.product([[512, 77], [77, 99]], 16, 18)
    hand.launch(17, ("nvjet", 14, 15))
    hand.mark(stages.BACKWARD, 25, 50)
    hand.host("CompiledFunctionBackward", 26, 49, AUTOGRAD)
    hand.host("## Call CompiledFxGraph b ##", 27, 49, AUTOGRAD, "user_annotation")
    hand.backward_of(0.5, 26)
    hand.host("nsa::attention_backward", 28, 35, AUTOGRAD)
    hand.mark(stages.SELECTED, 29, 34, AUTOGRAD)
    hand.launch(30, ("radix_sort", 30, 33), thread=AUTOGRAD)
    hand.product([[64, 512], [512, 32], [64, 32]], 36, 38, AUTOGRAD)
    hand.launch(37, ("nvjet", 37, 41), thread=AUTOGRAD)
    fused = "triton_red_fused__to_copy_add_div_expand_mul_pow_sum_8"
    hand.launch(39, (fused, 41, 43), thread=AUTOGRAD)


COMPILED = {
    stages.PROJECTION: (5, 0),
    stages.SELECTION: (3, 0),
    stages.SELECTED: (0, 3),
    stages.GATES: (1, 0),
    stages.MLP: (2, 4),
    stages.REST: (0, 2),
    UNATTRIBUTED: (1, 0),
}


def test_compiled_code() -> None:
    hand = HandMade()
    for number in range(2):
        compiled_micro_batch(hand, 60.0 * number)
        hand.step(number, 0, 60)
    table = table_of(hand)
    assert micros(table) == {**COMPILED, IDLE: (60 - 21, 0)}
    assert "more than 5%" not in table.text()


def test_replayed_graphs_are_read_by_a_step_that_launched_one_by_one() -> None:
    single = HandMade()
    single.step(0, 0, 110)
    for origin in (0.0, 50.0):
        compiled_micro_batch(single, origin)
    trace = single.trace()
    reference = Attribution(trace, PRODUCTS).micro_batch(trace)
    assert len(reference) == 8
    hand = HandMade()
    for number in range(2):
        hand.origin, at, kernels = 80.0 * number, 5.0, []
        hand.step(number, 0, 80)
        for event in trace.device[:8]:
            kernels.append((event.name, at, at + event.end - event.begin))
            at = kernels[-1][2]
        hand.launch(1, *kernels, call="cudaGraphLaunch")
        hand.mark(stages.OPTIMIZER, 2, 4)
        hand.launch(3, ("nvjet", at + 1, at + 5), call="cudaGraphLaunch")  # a graph of its own
    update = {stages.OPTIMIZER: (4, 0), IDLE: (80 - 25, 0)}
    assert micros(table_of(hand, reference=reference)) == {**COMPILED, **update}
    blind = table_of(hand)
    assert micros(blind) == {UNATTRIBUTED: (21, 0), **update}
    most = "more than 5% of the step is unattributed; most of it:\n  0.010 ms nvjet"
    assert most in blind.text()


@pytest.mark.parametrize(
    ("names", "known", "places"),
    [
        ("abcab", "abcab", "A1 B1 C1 A2 B2"),
        ("abxcab", "abcab", "A1 B1 - C1 A2 B2"),  # one that the reference does not have
        ("bcab", "abcab", "B1 C1 A2 B2"),
        ("dbacba", "abcdab", "D1 B1 A1 C1 B2 A2"),  # of two streams, without a fixed order
    ],
)
def test_alignment_of_replayed_kernels(names: str, known: str, places: str) -> None:
    turns = [f"{name.upper()}{known[:at].count(name) + 1}" for at, name in enumerate(known)]
    labels = [(name, Place(turn)) for name, turn in zip(known, turns, strict=True)]
    assert [place.stage or "-" for place in align(names, labels)] == places.split()


def test_a_trace_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="must hold steps"):
        Attribution(HandMade().trace(), {})


def test_sizes_of_products() -> None:
    found = product_stages(LanguageModel(MODEL))
    assert found[32, 64] == stages.MLP
    assert found[6, 32] == stages.GATES
    assert found[32, 256] == stages.LOSS
    assert found[32, 32 + 6 * 16] == stages.PROJECTION
    shared = LanguageModel(dataclasses.replace(MODEL, mlp_hidden_size=128))
    # the projection has the same sizes: nothing is guessed
    assert (32, 128) not in product_stages(shared)
