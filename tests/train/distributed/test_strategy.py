"""Replicas and shards in one process: when they communicate, what a process holds, and shards
through checkpoints.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from nsa.lm.model import LanguageModel
from nsa.train.config import ParallelConfig, TrainConfig
from nsa.train.distributed.processes import Processes
from nsa.train.distributed.sharding import gather, own_part
from nsa.train.distributed.strategy import Replicated, Sharded, distribute
from nsa.train.loss import NextTokenLoss
from tests.train.cases import MODEL
from tests.train.execution.test_activations import Count

CPU = torch.device("cpu")
TOKENS, CU_SEQLENS = torch.arange(60), torch.tensor([0, 25, 60], dtype=torch.int32)
LAYERS = 3
COMPILER = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)


def make_loss() -> NextTokenLoss:
    torch.manual_seed(0)
    return NextTokenLoss(
        LanguageModel(dataclasses.replace(MODEL, num_layers=LAYERS, attention="dense")),
    )


@pytest.fixture
def four() -> Iterator[Processes]:
    """This process as the second of four, whose messages go nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield Processes(1, 4)
    dist.destroy_process_group()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Processes]:
    """A real process group, of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield Processes()
    dist.destroy_process_group()


def backward(module: Any) -> None:
    module(TOKENS, TOKENS, CU_SEQLENS, 35).backward()


def collectives(
    strategy: Replicated,
    module: nn.Module,
    micro_batches: int,
) -> list[dict[str, int]]:
    """Collectives in each micro-batch of an optimizer step, by name."""
    counts = []
    for number in range(micro_batches):
        with Count() as count, strategy.accumulating(last=number == micro_batches - 1):
            backward(module)
        counts.append(communication(count))
    return counts


def communication(count: Count) -> dict[str, int]:
    """Collectives by name."""
    found: dict[str, int] = {}
    for name, number in count.runs.items():
        kind, _, operator = str(name).partition(".")
        if kind == "c10d":
            found[operator.partition(".")[0]] = number
    return found


def raw_gradients(loss: NextTokenLoss) -> list[Tensor]:
    return [parameter.grad for parameter in loss.parameters() if parameter.grad is not None]


def gradients(loss: NextTokenLoss) -> list[Tensor]:
    found = [gather(gradient) for gradient in raw_gradients(loss)]
    loss.zero_grad()
    return found


# --- communication --------------------------------------------------------------------------------


def test_shards_exchange_gradients_in_the_last_micro_batch_alone(four: Processes) -> None:
    strategy = distribute(make_loss(), ParallelConfig("fsdp"), four, CPU)
    module = strategy.training_module(None)
    gathered = {"_allgather_base_": 2 * LAYERS + 1}  # the outermost unit is gathered once
    last = {**gathered, "_reduce_scatter_base_": LAYERS + 1}
    assert collectives(strategy, module, 3) == [gathered, gathered, last]
    assert collectives(strategy, module, 1) == [last]


def test_replicas_exchange_gradients_in_the_last_micro_batch_alone(alone: Processes) -> None:
    """And in the first one of all where the graph is static; a small bucket makes more messages."""
    alone.world_size = 2  # it believes
    messages = {}
    for size, is_static in ((25.0, False), (0.01, False), (25.0, True)):
        config = ParallelConfig(bucket_mib=size, static_graph=is_static)
        strategy = distribute(make_loss(), config, alone, CPU)
        module = strategy.training_module(None)
        steps = [collectives(strategy, module, 3) for _ in range(3)]
        first = [*steps[0][:1], *steps[2]]
        messages[size, is_static] = [count.get("allreduce_", 0) for count in first]
    assert messages[25.0, False] == [0, 0, 0, 1]
    assert messages[0.01, False][1:3] == [0, 0]
    assert messages[0.01, False][3] > 3
    assert messages[25.0, True][1:] == [0, 0, 1]
    assert messages[25.0, True][0] > 0


# --- what is held ---------------------------------------------------------------------------------


def test_every_process_holds_a_part_of_everything(four: Processes) -> None:
    loss = distribute(make_loss(), ParallelConfig("fsdp"), four, CPU).loss
    whole = sum(parameter.numel() for parameter in make_loss().parameters())
    assert sum(parameter.numel() for parameter in loss.parameters()) == whole
    assert sum(own_part(parameter).numel() for parameter in loss.parameters()) == whole / 4


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_layers_are_gathered_in_the_wanted_precision(four: Processes, dtype: Any) -> None:
    loss = distribute(make_loss(), ParallelConfig("fsdp", gather_dtype=dtype), four, CPU).loss
    seen: dict[str, torch.dtype] = {}

    def note(name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        seen[name] = next(module.parameters()).dtype

    layer = loss.model.decoder_layers()[1]
    for name, module in (
        ("norm", layer.mlp_norm),
        ("matrix", layer.mlp.up_proj),
        ("embedding", loss.model.embedding),
    ):
        module.register_forward_hook(functools.partial(note, name))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        backward(loss)
    layers = torch.bfloat16 if dtype == "bf16" else torch.float32
    assert seen == {"norm": layers, "matrix": layers, "embedding": torch.float32}
    assert {parameter.dtype for parameter in loss.parameters()} == {torch.float32}
    assert {gradient.dtype for gradient in raw_gradients(loss)} == {torch.float32}


def test_resharding_gives_back_what_an_evaluation_gathered(four: Processes) -> None:
    strategy = distribute(make_loss(), ParallelConfig("fsdp"), four, CPU)
    with torch.no_grad():
        strategy.loss(TOKENS, TOKENS, CU_SEQLENS, 35)
    head = strategy.loss.model.head
    assert own_part(head.weight).shape == (256, 32)
    strategy.reshard()
    assert own_part(head.weight).shape == (64, 32)


# --- one real process -----------------------------------------------------------------------------


def test_shards_compile_by_layer_and_evaluate_as_they_are(alone: Processes) -> None:
    plain = make_loss()
    backward(plain)
    wanted = gradients(plain)
    strategy = Sharded(make_loss(), ParallelConfig("fsdp"), alone, CPU)
    backward(strategy.loss)
    found = gradients(strategy.loss)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
    module = strategy.training_module(COMPILER)
    backward(module)
    found = gradients(strategy.loss)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
    watched = []
    strategy.loss.model.decoder_layers()[0].mlp.register_forward_hook(lambda *_: watched.append(1))
    with torch.no_grad():
        strategy.loss(TOKENS, TOKENS, CU_SEQLENS, 35)
    assert watched


def test_replicas_compile_by_layer_or_as_one_graph(alone: Processes) -> None:
    alone.world_size = 2  # it believes
    for by_layer in (True, False):
        loss, seen = make_loss(), list[Any]()
        wanted = [layer.forward for layer in loss.model.decoder_layers()] if by_layer else [loss]

        def note(function: Any, seen: list[Any] = seen) -> Any:
            seen.append(function)
            return function

        backward(
            distribute(loss, ParallelConfig(compile_layers=by_layer), alone, CPU).training_module(
                note,
            ),
        )
        assert seen == wanted


@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_gradients_of_replayed_passes_are_averaged_afterwards(
    alone: Processes,
    compression: Any,
) -> None:
    """The sum over this one process is what it has; it believes to be one of two, so half of it
    must come out.
    """
    alone.world_size = 2
    config = ParallelConfig(gradient_compression=compression, bucket_mib=0.02)
    strategy = Replicated(make_loss(), config, alone, CPU, captured=True)
    module = strategy.training_module(None)
    assert module is strategy.loss  # nothing around it
    with Count() as silent, strategy.accumulating(last=True):
        backward(module)
    parameters = raw_gradients(strategy.loss)
    wanted = [gradient / 2 for gradient in parameters]
    if compression == "bf16":
        wanted = [gradient.bfloat16().float() for gradient in wanted]
    with Count() as count:
        strategy.exchange(parameters)
    messages = [sum(communication(mode).values()) for mode in (silent, count)]
    assert messages[0] == 0
    assert 3 < messages[1] < len(parameters)
    for gradient, expected in zip(parameters, wanted, strict=True):
        torch.testing.assert_close(
            gradient,
            expected,
            rtol=1e-2 if compression == "bf16" else 0,
            atol=0,
        )


# --- refusals -------------------------------------------------------------------------------------


def test_settings_of_the_other_strategy_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"bucket_mib must be left at 25\.0 with strategy fsdp, got 10",
    ):
        ParallelConfig("fsdp", bucket_mib=10)
    with pytest.raises(
        ValueError,
        match="gather_dtype must be left at fp32 with strategy ddp, got bf16",
    ):
        ParallelConfig(gather_dtype="bf16")
    with pytest.raises(
        ValueError,
        match=r"parallel\.gather_dtype must be fp32 with compute_dtype fp32, got bf16",
    ):
        TrainConfig(parallel=ParallelConfig("fsdp", gather_dtype="bf16"), compute_dtype="fp32")


def test_what_shards_send_cannot_be_captured(four: Processes) -> None:
    why = r"cuda_graphs must be false with parallel\.strategy fsdp, got True\. Give --cuda"
    with pytest.raises(ValueError, match=why):
        distribute(make_loss(), ParallelConfig("fsdp"), four, CPU, captured=True)


def test_captured_passes_have_no_static_graph(four: Processes) -> None:
    config = ParallelConfig(static_graph=True)
    why = r"parallel\.static_graph must be false with cuda_graphs, got True\. Give --parallel"
    with pytest.raises(ValueError, match=why):
        distribute(make_loss(), config, four, CPU, captured=True)
    distribute(make_loss(), config, four, CPU)
    distribute(make_loss(), config, Processes(), CPU, captured=True)  # one process shares nothing


def test_one_process_shares_nothing() -> None:
    loss = make_loss()
    strategy = distribute(loss, ParallelConfig("fsdp"), Processes(), CPU)
    assert strategy.training_module(None) is loss
    assert not strategy.in_step
