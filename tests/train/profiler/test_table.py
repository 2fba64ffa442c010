"""Time per stage, of traces whose every microsecond is known."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from nsa import stages
from nsa.lm.model import LanguageModel
from nsa.train.profiler.attribution import Attribution, Label, Place, align, product_stages
from nsa.train.profiler.table import StageTable, stage_table
from tests.train.cases import MODEL
from tests.train.profiler.hand_made import AUTOGRAD, HandMade

PRODUCTS = {(32, 64): stages.MLP, (32, 128): stages.PROJECTION}


def eager_step(hand: HandMade, number: int, begin: float) -> None:
    """100 microseconds: operators one by one, their backward in a thread of its own, communication beside it."""

    def at(time: float) -> float:
        return begin + time

    hand.step(number, at(0), at(100))
    hand.mark(stages.DATA, at(0), at(10))
    hand.mark(stages.FORWARD, at(10), at(40))
    hand.mark(stages.MLP, at(12), at(20))
    hand.host("aten::linear", at(13), at(19))
    hand.launch(at(14), ("gemm", at(14), at(24)))
    hand.host("aten::add", at(22), at(25))
    hand.launch(at(23), ("vectorized_add", at(24), at(26)))
    hand.host("nsa::window_attention", at(26), at(30))
    hand.launch(at(27), ("range_fwd_kernel", at(28), at(34)), call="cuLaunchKernelEx")
    hand.mark(stages.BACKWARD, at(40), at(70))
    hand.host("autograd::engine::evaluate_function: WindowBackward", at(41), at(50), AUTOGRAD)
    hand.host("WindowBackward", at(42), at(49), AUTOGRAD)
    hand.backward_of(at(26), at(42))
    hand.launch(at(44), ("range_dq_kernel", at(44), at(54)), thread=AUTOGRAD)
    hand.host("autograd::engine::evaluate_function: AddmmBackward0", at(50.5), at(59), AUTOGRAD)
    hand.host("AddmmBackward0", at(51), at(58), AUTOGRAD)
    hand.backward_of(at(13), at(51))
    hand.launch(at(52), ("gemm", at(54), at(60)), thread=AUTOGRAD)
    hand.host("aten::add", at(58.2), at(58.9), AUTOGRAD)  # of two gradients of one tensor
    hand.launch(at(58.3), ("vectorized_add", at(60), at(61)), thread=AUTOGRAD)
    hand.host("torch::autograd::AccumulateGrad", at(60), at(62), AUTOGRAD)
    hand.launch(at(60.5), ("vectorized_add", at(61), at(62)), thread=AUTOGRAD)
    hand.launch(at(62.5), ("ncclDevKernel_AllReduce", at(55), at(70)), thread=AUTOGRAD, stream=20)
    hand.mark(stages.OPTIMIZER, at(70), at(80))
    hand.launch(at(71), ("multi_tensor_apply", at(72), at(80)))


def table_of(hand: HandMade, **arguments: Any) -> StageTable:
    trace = hand.trace()
    return stage_table(trace, Attribution(trace, PRODUCTS, **arguments))


def micros(table: StageTable) -> dict[str, tuple[float, float]]:
    return {
        name: (round(1000 * first, 6), round(1000 * back, 6))
        for name, (first, back) in table.stages.items()
    }


def test_eager_steps() -> None:
    hand = HandMade()
    for number in range(3):
        eager_step(hand, number, 100.0 * number)
    table = table_of(hand)
    assert (table.device, table.steps) == ("gpu", 2)
    assert table.step_ms == pytest.approx(0.1)
    assert micros(table) == {
        stages.WINDOW: (6, 10), stages.MLP: (10, 7), stages.REST: (2, 0), stages.DATA: (10, 0), stages.GRADIENTS: (1, 0),
        stages.OPTIMIZER: (8, 0), stages.COMMUNICATION: (8, 0),
    }  # fmt: skip
    assert table.idle_ms == pytest.approx(0.038)
    assert table.unattributed_ms == 0
    assert table.hidden_communication_ms == pytest.approx(0.007)
    assert table.total_ms == pytest.approx(table.step_ms)
    (gemm,) = (
        kernel for kernel in table.kernels if kernel.name == "gemm" and kernel.place.backward
    )
    assert (gemm.place.stage, gemm.calls, gemm.time_us) == (stages.MLP, 2, 12)


def test_a_single_step_ends_with_its_last_kernel_or_its_host() -> None:
    hand = HandMade()
    eager_step(hand, 0, 0.0)
    table = table_of(hand)
    assert table.steps == 1
    assert table.step_ms == pytest.approx(0.086)
    assert table.total_ms == pytest.approx(table.step_ms)


def compiled_micro_batch(hand: HandMade, begin: float) -> None:
    """50 microseconds of compiled code: products, fused kernels, an opaque operator, something that nothing explains."""

    def at(time: float) -> float:
        return begin + time

    hand.mark(stages.FORWARD, at(0), at(25))
    hand.host("CompiledFunction", at(0.5), at(24))
    hand.host("## Call CompiledFxGraph f ##", at(1), at(24), category="user_annotation")
    hand.product([[512, 32], [32, 128], [512, 128]], at(2), at(4))
    hand.launch(at(3), ("nvjet", at(3), at(8)))
    hand.launch(at(5), ("triton_poi_fused__to_copy_silu_3", at(8), at(10)))
    hand.host("nsa::attention", at(7), at(15))
    hand.host("nsa::select_blocks", at(8), at(10))
    hand.launch(at(9), ("select_kernel", at(10), at(13)))
    hand.launch(at(11), ("radix_sort", at(13), at(14)))
    hand.product([[512, 77], [77, 99]], at(16), at(18))
    hand.launch(at(17), ("nvjet", at(14), at(15)))
    hand.mark(stages.BACKWARD, at(25), at(50))
    hand.host("CompiledFunctionBackward", at(26), at(49), AUTOGRAD)
    hand.host("## Call CompiledFxGraph b ##", at(27), at(49), AUTOGRAD, "user_annotation")
    hand.backward_of(at(0.5), at(26))
    hand.host("nsa::attention_backward", at(28), at(35), AUTOGRAD)
    hand.mark(stages.SELECTED, at(29), at(34), AUTOGRAD)
    hand.launch(at(30), ("radix_sort", at(30), at(33)), thread=AUTOGRAD)
    hand.product([[64, 512], [512, 32], [64, 32]], at(36), at(38), AUTOGRAD)
    hand.launch(at(37), ("nvjet", at(37), at(41)), thread=AUTOGRAD)
    hand.launch(
        at(39),
        ("triton_red_fused__to_copy_add_div_expand_mul_pow_sum_8", at(41), at(43)),
        thread=AUTOGRAD,
    )


COMPILED = {
    stages.PROJECTION: (5, 0), stages.CHOICE: (3, 0), stages.SELECTED: (0, 3), stages.GATES: (1, 0), stages.MLP: (2, 4),
    stages.REST: (0, 2),
}  # fmt: skip


def test_compiled_code() -> None:
    hand = HandMade()
    for number in range(2):
        hand.step(number, 60.0 * number, 60.0 * number + 60)
        compiled_micro_batch(hand, 60.0 * number)
    table = table_of(hand)
    assert micros(table) == COMPILED
    assert table.step_ms == pytest.approx(0.06)
    assert table.unattributed_ms == pytest.approx(0.001)
    assert table.idle_ms == pytest.approx(0.06 - 0.021)
    assert "more than 5%" not in table.text()


def test_replayed_graphs_are_read_by_a_step_that_launched_one_by_one() -> None:
    single = HandMade()
    single.step(0, 0, 110)
    for begin in (0.0, 50.0):
        compiled_micro_batch(single, begin)
    trace = single.trace()
    reference = Attribution(trace, PRODUCTS).micro_batch(trace)
    assert len(reference) == 8
    hand = HandMade()
    for number in range(2):
        begin = 80.0 * number
        hand.step(number, begin, begin + 80)
        at, kernels = begin + 5, []
        for event in trace.device[:8]:
            kernels.append((event.name, at, at + event.end - event.begin))
            at = kernels[-1][2]
        hand.launch(begin + 1, *kernels, call="cudaGraphLaunch")
    table = table_of(hand, reference=reference)
    assert micros(table) == COMPILED
    assert table.unattributed_ms == pytest.approx(0.001)
    blind = table_of(hand)
    assert not blind.stages
    assert blind.unattributed_ms == pytest.approx(0.021)
    assert (
        "more than 5% of the step is unattributed; the most of it:\n  0.010 ms nvjet"
        in blind.text()
    )


def test_kernels_that_the_reference_does_not_have_belong_nowhere() -> None:
    known = [Label(name, Place(name.upper())) for name in "abcab"]
    assert [place.stage for place in align("abcab", known)] == list("ABCAB")
    assert [place.stage for place in align("abxcab", known)] == ["A", "B", None, "C", "A", "B"]
    assert [place.stage for place in align("bcab", known)] == list("BCAB")


def test_kernels_of_two_streams_have_no_fixed_order() -> None:
    known = [
        Label(name, Place(name.upper() + turn))
        for name, turn in zip("abcdab", "111122", strict=True)
    ]
    found = [place.stage for place in align("dbacba", known)]
    assert found == ["D1", "B1", "A1", "C1", "B2", "A2"]


def test_shares_and_sum_in_text_and_json() -> None:
    hand = HandMade()
    for number in range(2):
        eager_step(hand, number, 100.0 * number)
    table = table_of(hand)
    rows = table.to_json()["stages"]
    assert sum(row["total_ms"] for row in rows) == pytest.approx(table.step_ms)
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    assert [row["stage"] for row in rows][-2:] == ["unattributed", "idle"]
    assert (
        "sum                                                                0.100   100.0%"
        in table.text()
    )
    assert table.kernels_text(1).count("\n") == 2


def test_a_trace_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="must hold steps"):
        Attribution(HandMade().trace(), {})


def test_sizes_of_products() -> None:
    model = LanguageModel(MODEL)
    found = product_stages(model)
    assert found[(32, 64)] == stages.MLP
    assert found[(6, 32)] == stages.GATES
    assert found[(32, 256)] == stages.LOSS
    assert found[(32, 32 + 6 * 16)] == stages.PROJECTION
    shared = LanguageModel(dataclasses.replace(MODEL, mlp_hidden_size=128))
    # the projection has the same sizes: nothing is guessed
    assert (32, 128) not in product_stages(shared)
