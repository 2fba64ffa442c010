"""Memory that is planned without data is the memory that a step with data takes."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from nsa.lm.model import LanguageModel
from nsa.lm.twins import twin
from nsa.plan import memory
from nsa.plan.compiled import CHOSEN, CompiledStep, GraphMemory
from nsa.plan.gpu_operators import gpu_operators
from nsa.plan.memory import KEPT, LIBRARIES, step_memory
from nsa.plan.timeline import GRADIENTS, OPTIMIZER, PASSING, SAVED, SCRATCH, WEIGHTS, Timeline, fake_parameters
from nsa.train.config import CheckpointingConfig, DataConfig, OptimConfig, ParallelConfig, TrainConfig
from nsa.train.execution.activations import kept_bytes
from nsa.train.load import load_config
from nsa.train.loss import NextTokenLoss
from nsa.train.optim import ModelOptimizer
from tests.train.cases import MODEL

DENSE = twin(replace(MODEL, num_layers=2), "dense")
KIB = 2**10


def config_of(**changes: Any) -> TrainConfig:
    given: dict[str, Any] = {
        "model": DENSE, "data": DataConfig(document_mask=False), "optim": OptimConfig(), "seq_len": 256, "micro_batch": 2,
        "accumulation": 2, "compute_dtype": "fp32",
    }  # fmt: skip
    given |= changes
    product = given["micro_batch"] * given["accumulation"] * given.get("world_size", 1)
    return TrainConfig(**{**given, "global_batch": product})


def real_step(config: TrainConfig) -> Timeline:
    """The same step with data, every tensor counted."""
    model = LanguageModel(config.model)
    loss, optimizer = NextTokenLoss(model, config.loss_chunk), ModelOptimizer(model, config.optim)
    timeline = Timeline()
    for parameter in model.parameters():
        timeline.hold(parameter, WEIGHTS)
    for state in optimizer.state_tensors().values():
        timeline.hold(state, OPTIMIZER)
    cu_seqlens = torch.arange(config.micro_batch + 1, dtype=torch.int32) * config.seq_len
    with timeline:
        for _ in range(config.accumulation):
            tokens = torch.zeros(config.micro_batch * config.seq_len, dtype=torch.int64)
            with torch.autocast("cpu", torch.bfloat16, enabled=config.compute_dtype == "bf16"):
                total = loss(tokens, tokens.clone(), cu_seqlens, config.seq_len)
            (total / config.seq_len).backward()
            del total
        optimizer.step(torch.zeros(()))
        optimizer.zero_grad()
    return timeline


@pytest.mark.parametrize(
    "changes",
    [{}, {"compute_dtype": "bf16"}, {"accumulation": 1}, {"loss_chunk": 64}, {"optim": OptimConfig(name="muon")}],
    ids=str,
)
def test_the_plan_is_what_a_step_with_data_takes(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "gpu_operators", nullcontext)
    monkeypatch.setattr(memory, "scratch_bytes", lambda name, arguments: 0)
    for module in ("_sequences", "_checks"):  # as of offsets on a GPU
        monkeypatch.setattr(f"nsa.ops.{module}.reads_contents", lambda index: False)
    config = config_of(**changes)
    planned, real = step_memory(config).parts, real_step(config).at_peak
    assert planned[LIBRARIES] == 2 * memory.WORKSPACE_BYTES
    assert sum(planned.values()) - planned[LIBRARIES] == pytest.approx(sum(real.values()), rel=0.005)
    for part in (WEIGHTS, OPTIMIZER):
        assert planned[part] == real[part]


def test_parts_of_a_sparse_step() -> None:
    """Known by hand: 12 query heads in 2 groups of 64 elements, one layer, amid the backward of whose MLP most is held."""
    model = replace(load_config("78m").model, num_layers=1)
    config = config_of(model=model, seq_len=2048, micro_batch=32, accumulation=1, compute_dtype="bf16")
    parts = step_memory(config).parts
    parameters = 256 * 768 * 2 + 768 * 3 + 768 * (1536 + 768) + 36 * 769 + 2 * 768 * 3072
    assert parts[WEIGHTS] == pytest.approx(4 * parameters, rel=1e-3)
    assert parts[OPTIMIZER] == pytest.approx(8 * parameters, rel=1e-3)
    tokens = 65_536
    out, statistics, choice = 2 * 12 * 64 * tokens, 4 * 12 * tokens, 4 * 2 * 16 * tokens
    keys, gates = 4 * 2 * 2 * 64 * tokens, 4 * 36 * tokens
    # The normalised input of the projection, q, keys and values, three outputs and their sum.
    attention = 2 * 768 * tokens + out + keys + 4 * out + 3 * statistics + choice + gates
    assert parts[f"{SAVED}: attention"] == pytest.approx(attention, rel=0.02)
    assert parts[f"{SAVED}: MLP"] == pytest.approx((2 * 768 + 2 * 2 * 3072) * tokens, rel=0.02)
    assert parts[f"{SAVED}: residual stream and norms"] == pytest.approx(2 * 4 * 768 * tokens, rel=0.02)


@pytest.mark.parametrize("policy", ["full", "operators"])
def test_what_a_checkpointing_policy_keeps(policy: Any) -> None:
    model = replace(load_config("78m").model, num_layers=4)
    config = config_of(
        model=model,
        seq_len=2048,
        micro_batch=32,
        accumulation=1,
        compute_dtype="bf16",
        checkpointing=CheckpointingConfig(policy),
    )
    kept = kept_bytes(model, config.checkpointing.keeps(0))
    parts = step_memory(config).parts
    tokens = 65_536
    assert parts[f"{SAVED}: residual stream and norms"] == pytest.approx(4 * kept.pop("input") * tokens, rel=0.01)
    assert parts.get(KEPT, 0) == pytest.approx(4 * sum(kept.values()) * tokens, rel=0.01)
    assert sum(parts.values()) < 0.6 * step_memory(replace(config, checkpointing=CheckpointingConfig())).peak


def test_frozen_parameters_have_no_gradients() -> None:
    """Those that only score blocks."""
    pattern = replace(MODEL.nsa, branches=("slc", "win"))
    config = config_of(model=replace(MODEL, nsa=pattern), accumulation=2, optim=OptimConfig(name="muon"))
    with torch.device("meta"):
        model = LanguageModel(config.model)
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    parts = step_memory(config).parts
    assert trained < parts[WEIGHTS]
    assert parts[GRADIENTS] <= trained + 512 * len([*model.parameters()])


def test_every_second_layer_saves_little() -> None:
    model = replace(load_config("78m").model, num_layers=4)
    config = config_of(model=model, seq_len=2048, micro_batch=32, accumulation=1, compute_dtype="bf16")
    whole, half = (
        step_memory(replace(config, checkpointing=policy)).parts
        for policy in (CheckpointingConfig(), CheckpointingConfig("every"))
    )
    assert half[f"{SAVED}: MLP"] == pytest.approx(whole[f"{SAVED}: MLP"] / 2, rel=0.01)


def test_a_process_of_fsdp_holds_its_part() -> None:
    config = config_of(accumulation=1, world_size=4)
    whole = step_memory(config).parts
    sharded = step_memory(replace(config, parallel=ParallelConfig("fsdp"))).parts
    for part in (WEIGHTS, OPTIMIZER, GRADIENTS):
        assert sharded.get(part, 0) == pytest.approx(whole.get(part, 0) / 4, abs=1)
    layer = 32 * 96 * 2 + 32 * 64 * 2 + 2 * 32  # attention, MLP, norms
    outer = 2 * 256 * 32 + 32
    assert sharded[memory.GATHERED] == pytest.approx(4 * (outer + 2 * layer), rel=0.35)
    waiting = step_memory(replace(config, parallel=ParallelConfig("fsdp"), accumulation=2, global_batch=16)).parts
    assert waiting[GRADIENTS] == pytest.approx(step_memory(replace(config, accumulation=2, global_batch=16)).parts[GRADIENTS])


def test_a_compiled_step_saves_less_and_grows_by_the_layer() -> None:
    model = replace(load_config("78m").model, num_layers=3)
    config = config_of(model=model, seq_len=2048, micro_batch=8, accumulation=1, compute_dtype="bf16", compile=True)
    planned = step_memory(config).peak  # from one layer and two
    assert planned == pytest.approx(memory._compiled(config).peak, rel=1e-3)
    assert 0.85 < planned / step_memory(replace(config, compile=False)).peak < 1


def test_what_the_compiler_saves_is_what_is_saved() -> None:
    """A dense model, compiled for real with the same division: autograd's saved tensors are counted."""
    config = config_of(compile=True, accumulation=1)
    tokens, cu_seqlens = torch.zeros(512, dtype=torch.int64), torch.tensor([0, 256, 512], dtype=torch.int32)
    batch = (tokens, tokens.clone(), cu_seqlens, 256)
    model = LanguageModel(config.model)
    step = CompiledStep(NextTokenLoss(model), lambda name, arguments: 0)
    step.memory(*batch, gradients_before=False)
    planned = [*GraphMemory(step._graphs["forward"], step._scratch).moments(CHOSEN)][-1][CHOSEN]
    ours = {parameter.data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def save(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in ours:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch.compiler.reset()
    compiled = torch.compile(NextTokenLoss(model), backend="aot_eager_decomp_partition", fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        compiled(*batch)
    torch.compiler.reset()
    assert planned == pytest.approx(sum(saved.values()) - 2 * tokens.nbytes, rel=0.02)


def test_lifetimes_in_a_graph() -> None:
    """Of ``relu(x @ w) @ w + 1`` relu is written for the second product, + 1 into its result's place."""
    size = 4 * 64 * 64

    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(x @ w) @ w + 1

    graph = make_fx(function, tracing_mode="fake")(torch.ones(64, 64), torch.ones(64, 64)).graph
    names = [node.name for node in graph.nodes]
    moments = dict(
        zip(names, GraphMemory(graph, lambda name, arguments: 7 if "mm" in name else 0).moments(GRADIENTS), strict=True)
    )
    assert moments["mm"] == {CHOSEN: 2 * size, PASSING: size, SCRATCH: 7}
    assert moments["relu"] == {CHOSEN: size, PASSING: size, SCRATCH: 0}  # x is gone, and relu has the product's place
    assert moments["mm_1"] == {CHOSEN: size, PASSING: 2 * size, SCRATCH: 7}
    assert moments["add"] == {CHOSEN: 0, PASSING: 0, GRADIENTS: size, SCRATCH: 0}


def test_a_timeline_counts_storages_once_and_forgets_them() -> None:
    timeline = Timeline(lambda name, arguments: 10_000 if "mm" in name else 0)
    with FakeTensorMode(), timeline:
        x = torch.empty(64, 64)  # 16 KiB
        y = x.view(-1)
        assert timeline.held == {PASSING: 16 * KIB}
        z = x @ x
        assert timeline.at_peak == {PASSING: 32 * KIB, SCRATCH: 10_000}
        timeline.relabel(z, "kept")
        del x
        assert timeline.held[PASSING] == 16 * KIB  # y is a view of it
        del y
        assert timeline.held == {PASSING: 0, "kept": 16 * KIB}
        assert torch.empty(1).numel() == 1
    assert sum(timeline.at_peak.values()) == 32 * KIB + 10_000


def test_saved_tensors_are_counted_by_part() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    timeline = Timeline()
    with FakeTensorMode():
        fake_parameters(model)
        with timeline, timeline.by_part([("first", model[0])], otherwise="rest"):
            for parameter in model.parameters():
                timeline.hold(parameter, WEIGHTS)
            out = model(torch.empty(32, 64)).square().sum()
            assert timeline.held[WEIGHTS] == 2 * 16 * KIB
            assert timeline.held[f"{SAVED}: first"] == 8 * KIB  # its input
            assert timeline.held[f"{SAVED}: rest"] == 2 * 8 * KIB  # the second one's input, and what was squared
            out.backward()
            del out
            assert timeline.held[f"{SAVED}: first"] == timeline.held[f"{SAVED}: rest"] == 0
    assert not model[0]._forward_hooks


def test_tied_parameters_stay_tied() -> None:
    with torch.device("meta"):
        model = LanguageModel(replace(MODEL, tie_head=True))
    with FakeTensorMode():
        fake_parameters(model)
        assert model.head.weight is model.embedding.weight
        assert model.head.weight.device.type == "cpu"


def test_normalisation_is_that_of_a_gpu_only_where_a_step_is_followed() -> None:
    x, weight = torch.randn(3, 4), torch.ones(4)
    before = nn.functional.rms_norm(x, (4,), weight)
    timeline = Timeline()
    with FakeTensorMode(), gpu_operators(), timeline, timeline.by_part([], otherwise="norm"):
        fake, scale = torch.empty(1024, 64, requires_grad=True), nn.Parameter(torch.empty(64))
        result = nn.functional.rms_norm(fake, (64,), scale)
        timeline.relabel(fake, "given")
        timeline.relabel(scale, "given")
        assert timeline.held[f"{SAVED}: norm"] == 4 * KIB  # a number a row; the result is a tensor of its own
        assert timeline.held[PASSING] == 256 * KIB
        torch.autograd.backward(result, torch.empty_like(result))
        assert fake.grad is not None
    assert torch.equal(nn.functional.rms_norm(x, (4,), weight), before)
