"""Memory of a training step, followed with fake tensors: no GPU is needed, and nothing of the model is allocated."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from nsa.lm.model import LanguageModel
from nsa.ops._backend import as_on_gpu
from nsa.plan.compiled import CompiledStep
from nsa.plan.gpu_operators import gpu_operators
from nsa.plan.scratch import scratch_bytes
from nsa.plan.timeline import GRADIENTS, OPTIMIZER, PASSING, SAVED, WEIGHTS, Timeline, fake_parameters
from nsa.train.config import TrainConfig
from nsa.train.data.synthetic import TASKS
from nsa.train.execution.precision import autocast
from nsa.train.loss import NextTokenLoss
from nsa.train.optim import ModelOptimizer

# Workspaces of cuBLAS, which PyTorch takes from its allocator: one for each thread and stream that multiplies (on an H200).
LIBRARIES = "cuBLAS"
WORKSPACE_BYTES = 32 * 2**20
KEPT = f"{SAVED}: kept by checkpointing"
# Of a process that holds a part of the model.
GATHERED, SENT = "gathered weights", "gradients that are sent"


@dataclass(frozen=True)
class Footprint:
    """Bytes in tensors when a training step holds most.

    Attributes:
        parts: bytes by what they are for.
        is_all: False where more is held than the parts say.
    """

    parts: dict[str, int]
    is_all: bool = True

    @property
    def peak(self) -> int:
        """All of them."""
        return sum(self.parts.values())


def step_memory(config: TrainConfig) -> Footprint:
    """What one process of a run holds at the peak of a step, once the first step is done.

    Args:
        config: the run.
    """
    followed = _followed(config)
    return followed if config.world_size == 1 or config.parallel.strategy == "ddp" else _sharded(config, followed)


def state_memory(config: TrainConfig) -> Footprint:
    """What one process holds whatever a step does: weights, gradients and the optimizer's state.

    That is all that can be said of a CPU, where attention runs as the reference, whose steps depend on the data.

    Args:
        config: the run.
    """
    model = _empty_model(config)
    with FakeTensorMode():
        fake_parameters(model)
        weights, state = _state_bytes(model, config)
    return Footprint({WEIGHTS: weights, GRADIENTS: weights, OPTIMIZER: state}, is_all=False)


def _followed(config: TrainConfig) -> Footprint:
    """A step of a process that holds the whole model."""
    alike = config.checkpointing.policy not in ("range", "every")
    if config.compile and alike:
        # Layers are alike: what a further one adds is the difference of two small models. Compiling a deep one takes minutes.
        few = min(config.model.num_layers, 2)
        parts = [_compiled(_with_layers(config, layers)) for layers in range(1, few + 1)]
        more = config.model.num_layers - few
        last, before = parts[-1].parts, parts[0].parts
        return Footprint({name: size + more * (size - before.get(name, 0)) for name, size in last.items()})
    return _compiled(config) if config.compile else _eager(config)


def _with_layers(config: TrainConfig, layers: int) -> TrainConfig:
    return replace(config, model=replace(config.model, num_layers=layers))


def _eager(config: TrainConfig) -> Footprint:
    model = _empty_model(config)
    with FakeTensorMode(), gpu_operators():
        fake_parameters(model)
        loss = NextTokenLoss(model, config.loss_chunk)
        timeline = Timeline(scratch_bytes)
        with timeline, timeline.by_part(_parts(model), otherwise="head and loss"):
            for parameter in model.parameters():
                timeline.hold(parameter, WEIGHTS)
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(lambda p: _label_gradient(timeline, p))
            optimizer = ModelOptimizer(model, config.optim)
            for state in optimizer.state_tensors().values():
                timeline.relabel(state, OPTIMIZER)
            for _ in range(2 if _has_gradients_before(config) else 1):
                inputs = _fake_batch(config)
                with autocast(torch.device("cpu"), config.compute_dtype):
                    total = loss(*inputs, config.seq_len)
                if config.checkpointing.policy == "operators":
                    timeline.relabel_all(PASSING, KEPT)  # what is still there is what the policy keeps
                (total / config.seq_len).backward()
                del total
            optimizer.step(torch.zeros(()))
            optimizer.zero_grad()
    return Footprint({**{name: size for name, size in timeline.at_peak.items() if size}, LIBRARIES: _library_bytes(config)})


def _compiled(config: TrainConfig) -> Footprint:
    model = _empty_model(config)
    with FakeTensorMode(), as_on_gpu():
        fake_parameters(model)
        step = CompiledStep(NextTokenLoss(model, config.loss_chunk), scratch_bytes)
        with autocast(torch.device("cpu"), config.compute_dtype):
            parts = step.memory(*_fake_batch(config), config.seq_len, gradients_before=_has_gradients_before(config))
        weights, state = _state_bytes(model, config)
    return Footprint({WEIGHTS: weights, OPTIMIZER: state, **parts, LIBRARIES: _library_bytes(config)})


def _state_bytes(model: LanguageModel, config: TrainConfig) -> tuple[int, int]:
    """Of the weights, and of the optimizer's state."""
    state = ModelOptimizer(model, config.optim).state_tensors().values()
    return sum(parameter.nbytes for parameter in model.parameters()), sum(tensor.nbytes for tensor in state)


def _library_bytes(config: TrainConfig) -> int:
    """The program's thread and that of autograd multiply, and another stream while a graph is captured."""
    return (3 if config.cuda_graphs else 2) * WORKSPACE_BYTES


def has_masked_documents(config: TrainConfig) -> bool:
    """Whether documents inside a window are sequences of their own."""
    return config.data.document_mask and config.data.source not in TASKS


def _sharded(config: TrainConfig, whole: Footprint) -> Footprint:
    """The same with FSDP2: a part of all weights, gradients and moments, and what is gathered for the layers at hand.

    Two layers are gathered, one at work and the one that comes next; what belongs to no layer all the time. Gradients of one
    layer wait whole while those of another are sent; while micro-batches are accumulated, those of all layers do.
    """
    model = _empty_model(config)
    layer = sum(parameter.numel() for parameter in model.decoder_layers()[0].parameters())
    outer = sum(parameter.numel() for parameter in model.parameters()) - config.model.num_layers * layer
    element = 2 if config.parallel.gather_dtype == "bf16" else 4
    divided = {WEIGHTS, OPTIMIZER} if config.accumulation > 1 else {WEIGHTS, OPTIMIZER, GRADIENTS}
    parts = {name: -(-size // config.world_size) if name in divided else size for name, size in whole.parts.items()}
    return Footprint({**parts, GATHERED: 4 * outer + 2 * layer * element, SENT: 2 * layer * 4})


def _has_gradients_before(config: TrainConfig) -> bool:
    """Whether gradients exist when a micro-batch begins: those of the ones before, or what a CUDA graph adds to."""
    return config.accumulation > 1 or config.cuda_graphs


def _label_gradient(timeline: Timeline, parameter: Tensor) -> None:
    assert parameter.grad is not None
    timeline.relabel(parameter.grad, GRADIENTS)


def _empty_model(config: TrainConfig) -> LanguageModel:
    """The model on the meta device. PyTorch's fused attention on the CPU, which is traced for cuDNN's, has one head size."""
    model_config = config.model
    if model_config.attention == "dense":
        size = max(model_config.nsa.head_dim, model_config.nsa.value_dim)
        model_config = replace(model_config, nsa=replace(model_config.nsa, head_dim=size, value_dim=size))
    with torch.device("meta"):
        model = LanguageModel(model_config)
    for index, layer in enumerate(model.decoder_layers()):
        layer.keeps = config.checkpointing.keeps(index)
    return model


def _parts(model: LanguageModel) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = [("embedding", model.embedding), ("residual stream and norms", model.norm)]
    for layer in model.decoder_layers():
        found += [("residual stream and norms", layer), ("attention", layer.attention), ("MLP", layer.mlp)]
    return found


def _fake_batch(config: TrainConfig) -> tuple[Tensor, Tensor, Tensor]:
    """A micro-batch; with masked documents it has one sequence more than windows, so that it is not taken for a dense one."""
    masked = has_masked_documents(config)
    tokens = torch.empty(config.micro_batch * config.seq_len, dtype=torch.int64)
    cu_seqlens = torch.empty(config.micro_batch + 1 + masked, dtype=torch.int32)
    return tokens, torch.empty_like(tokens), cu_seqlens


def saved_bytes(footprint: Footprint) -> int:
    """Bytes that autograd keeps for the backward pass at the peak."""
    return sum(size for name, size in footprint.parts.items() if name.startswith(SAVED))
