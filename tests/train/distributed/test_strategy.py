"""Replicas and shards in one process: when they communicate, and what a process holds."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from nsa.lm.model import LanguageModel
from nsa.train.config import ParallelConfig
from nsa.train.distributed.processes import Processes, gather, own_part
from nsa.train.distributed.strategy import Replicated, Sharded, distribute
from nsa.train.loss import NextTokenLoss
from tests.train.cases import MODEL, all_equal
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
def four():
    """This process as the second of four, whose messages go nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield Processes(1, 4)
    dist.destroy_process_group()


@pytest.fixture
def alone(tmp_path):
    """A real process group, of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield Processes()
    dist.destroy_process_group()


def backward(module: Any) -> None:
    module(TOKENS, TOKENS, CU_SEQLENS, 35).backward()


def collectives(
    strategy: Replicated, module: nn.Module, micro_batches: int
) -> list[dict[str, int]]:
    """Collectives in each micro-batch of an optimizer step, by name."""
    counts = []
    for number in range(1, micro_batches + 1):
        with Count() as count, strategy.accumulating(last=number == micro_batches):
            backward(module)
        counts.append(communication(count))
    return counts


def communication(count: Count) -> dict[str, int]:
    """Collectives by name."""
    runs = {name.removeprefix("c10d."): runs for name, runs in count.runs.items()}
    return {name.split(".")[0]: runs[name] for name in runs.keys() - count.runs.keys()}


def raw_gradients(loss: NextTokenLoss) -> list[Tensor]:
    return [parameter.grad for parameter in loss.parameters() if parameter.grad is not None]


def gradients(loss: NextTokenLoss) -> list[Tensor]:
    found = [gather(gradient) for gradient in raw_gradients(loss)]
    loss.zero_grad()
    return found


# --- communication --------------------------------------------------------------------------------


def test_shards_exchange_gradients_in_the_last_micro_batch_alone(four):
    strategy = distribute(make_loss(), ParallelConfig("fsdp"), four, CPU)
    module = strategy.training_module(None)
    gathered = {"_allgather_base_": 2 * LAYERS + 1}  # the outermost unit is gathered once
    last = {**gathered, "_reduce_scatter_base_": LAYERS + 1}
    assert collectives(strategy, module, 3) == [gathered, gathered, last]
    assert collectives(strategy, module, 1) == [last]


@pytest.mark.parametrize(("bucket_mib", "is_static"), [(25.0, False), (0.01, False), (0.01, True)])
def test_replicas_exchange_gradients_in_the_last_micro_batch_alone(alone, bucket_mib, is_static):
    """A small bucket makes more messages; after the rehearsals the buckets stay as they are."""
    alone.world_size = 2  # it believes
    config = ParallelConfig(bucket_mib=bucket_mib, static_graph=is_static)
    strategy = distribute(make_loss(), config, alone, CPU)
    module = strategy.training_module(None)
    for _ in range(strategy.rehearsals):
        backward(module)
    steps = [collectives(strategy, module, 3) for _ in range(2)]
    first, second = ([count.get("allreduce_", 0) for count in step] for step in steps)
    assert first[:2] == [0, 0]
    assert (first[2] > 3) == (bucket_mib < 1)
    assert first == second


# --- what is held ---------------------------------------------------------------------------------


def test_every_process_holds_a_part_of_everything(four):
    loss = distribute(make_loss(), ParallelConfig("fsdp"), four, CPU).loss
    whole = sum(parameter.numel() for parameter in make_loss().parameters())
    assert sum(parameter.numel() for parameter in loss.parameters()) == whole
    assert sum(own_part(parameter).numel() for parameter in loss.parameters()) == whole / 4


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_layers_are_gathered_in_the_wanted_precision(four, dtype):
    loss = distribute(make_loss(), ParallelConfig("fsdp", gather_dtype=dtype), four, CPU).loss
    seen, layer = dict[Any, torch.dtype](), loss.model.decoder_layers()[1]
    modules = (layer.mlp_norm, layer.mlp.up_proj, loss.model.embedding)
    for module in modules:
        module.register_forward_hook(lambda m, *_: seen.update({m: next(m.parameters()).dtype}))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        backward(loss)
    layers = torch.bfloat16 if dtype == "bf16" else torch.float32
    assert [seen[module] for module in modules] == [layers, layers, torch.float32]
    tensors = [*loss.parameters(), *raw_gradients(loss)]
    assert {tensor.dtype for tensor in tensors} == {torch.float32}


def test_resharding_gives_back_what_an_evaluation_gathered(four):
    strategy = distribute(make_loss(), ParallelConfig("fsdp"), four, CPU)
    with torch.no_grad():
        strategy.loss(TOKENS, TOKENS, CU_SEQLENS, 35)
    head = strategy.loss.model.head
    assert own_part(head.weight).shape == (256, 32)
    strategy.reshard()
    assert own_part(head.weight).shape == (64, 32)


# --- one real process -----------------------------------------------------------------------------


def test_shards_compile_by_layer_and_evaluate_as_they_are(alone):
    plain = make_loss()
    backward(plain)
    wanted = gradients(plain)
    strategy = Sharded(make_loss(), ParallelConfig("fsdp"), alone, CPU)
    for compiler in (None, COMPILER):
        backward(strategy.training_module(compiler))
        assert all_equal(gradients(strategy.loss), wanted)
    hook = Mock(return_value=None)
    strategy.loss.model.decoder_layers()[0].mlp.register_forward_hook(hook)
    with torch.no_grad():
        strategy.loss(TOKENS, TOKENS, CU_SEQLENS, 35)
    assert hook.called


@pytest.mark.parametrize("by_layer", [True, False])
def test_replicas_compile_by_layer_or_as_one_graph(alone, by_layer):
    alone.world_size = 2  # it believes
    loss, compiler = make_loss(), Mock(side_effect=lambda function: function)
    wanted = [layer.forward for layer in loss.model.decoder_layers()] if by_layer else [loss]
    strategy = distribute(loss, ParallelConfig(compile_layers=by_layer), alone, CPU)
    backward(strategy.training_module(compiler))
    assert [call.args[0] for call in compiler.call_args_list] == wanted


@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_gradients_of_replayed_passes_are_averaged_afterwards(alone, compression):
    """Over one process that believes to be one of two: half of its gradients must come out."""
    alone.world_size = 2
    config = ParallelConfig(gradient_compression=compression, bucket_mib=0.02)
    if compression == "bf16":
        message = "gradient_compression must be none with parallel.strategy ddp on CPUs, got bf16"
        with pytest.raises(ValueError, match=message):
            distribute(make_loss(), config, alone, CPU)
    strategy = Replicated(make_loss(), config, alone, CPU, captured=True)
    module = strategy.training_module(None)
    assert module is strategy.loss  # nothing around it
    assert not any(collectives(strategy, module, 1))
    parameters = raw_gradients(strategy.loss)
    dtype = torch.bfloat16 if compression == "bf16" else torch.float32
    wanted = [gradient.to(dtype).float() / 2 for gradient in parameters]
    with Count() as count:
        strategy.exchange(parameters)
    assert 3 < sum(communication(count).values()) < len(parameters)
    assert all_equal(parameters, wanted)
