"""Parallel training of one model: equal replicas (DDP) or shards (FSDP2)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from nsa.errors import check
from nsa.train.config import ParallelConfig
from nsa.train.distributed.processes import Processes, own_part
from nsa.train.loss import NextTokenLoss
from nsa.train.telemetry.throughput import MIB

logger = logging.getLogger(__name__)

Compiler = Callable[[Any], Any]
Layer = Callable[..., Tensor]

_GRAPHS_PER_KIND = 8  # PyTorch's limit for one function


class Replicated:
    """One process, or several that keep equal replicas and average their gradients.

    Every trainable parameter must take part in every backward pass.

    Args:
        loss: the model with its loss; changed in place where the strategy needs it.
        config: settings of the communication.
        processes: this process and the other ranks of the run.
        device: where this process computes.
        captured: whether backward passes are replayed from CUDA graphs, in which DDP cannot
            communicate; gradients are then averaged after the last pass.

    Attributes:
        loss: the module without DDP or compilation, for evaluations.
        in_step: whether all processes must take part in every pass.
    """

    in_step = False

    def __init__(
        self,
        loss: NextTokenLoss,
        config: ParallelConfig,
        processes: Processes,
        device: torch.device,
        *,
        captured: bool = False,
    ) -> None:
        self.loss, self._config, self._processes, self._device = loss, config, processes, device
        self._captured = captured
        self._replica: DistributedDataParallel | None = None

    def training_module(self, compiler: Compiler | None) -> nn.Module:
        """Return the module for training.

        Args:
            compiler: compiles a module or function; None disables compilation.
        """
        loss: nn.Module = self.loss
        if compiler is not None and self._config.compile_layers:
            _compile_layers(self.loss, compiler)
        elif compiler is not None:
            loss = compiler(self.loss)
        if self._processes.world_size == 1 or self._captured:
            return loss
        self._replica = DistributedDataParallel(
            loss,
            device_ids=[self._device.index] if self._device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            bucket_cap_mb=self._config.bucket_mib,
            static_graph=self._config.static_graph,
        )
        if self._config.gradient_compression == "bf16":
            self._replica.register_comm_hook(None, bf16_compress_hook)
        return self._replica

    @property
    def rehearsals(self) -> int:
        """Backward passes that must exchange gradients before the first step of a process.

        DDP rebuilds its buckets after the first exchange, with a static graph after the second. The
        position of a gradient in its bucket decides the order of summation over processes: without
        rehearsals the first step of a resumed run would be rounded differently.
        """
        return 0 if self._replica is None else 1 + self._config.static_graph

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Context of a micro-batch: only the last one of a step exchanges gradients."""
        return nullcontext() if self._replica is None or last else self._replica.no_sync()

    def exchange(self, gradients: Sequence[Tensor]) -> None:
        """Average gradients in place after the last micro-batch if no backward pass does."""
        if not self._captured or self._processes.world_size == 1:
            return
        dtype = _reduce_dtype(self._config)
        for bucket in _take_tensors(gradients, self._config.bucket_mib * MIB):
            sent = _flatten_dense_tensors(bucket).to(dtype)
            self._processes.sum(sent.div_(self._processes.world_size))
            torch._foreach_copy_(bucket, _unflatten_dense_tensors(sent, bucket))

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Euclidean norm over all gradients, fp32 scalar, the same on every process.

        Nothing waits for the device.
        """
        return get_total_norm(list(gradients))

    def reshard(self) -> None:
        """Free gathered weights after passes without gradients."""


class Sharded(Replicated):
    """Several processes that each store a shard of every weight, gradient and moment (FSDP2).

    A layer's weights are gathered before its forward pass and again before its backward pass, its
    gradients are averaged and scattered after it, while its neighbours compute. Embedding, last
    norm and head form the outermost unit.
    """

    in_step = True

    def __init__(
        self,
        loss: NextTokenLoss,
        config: ParallelConfig,
        processes: Processes,
        device: torch.device,
    ) -> None:
        super().__init__(loss, config, processes, device)
        mesh = init_device_mesh(device.type, (processes.world_size,))
        gathered = torch.bfloat16 if config.gather_dtype == "bf16" else None
        policy = functools.partial(
            MixedPrecisionPolicy,
            reduce_dtype=_reduce_dtype(config),
            cast_forward_inputs=False,
        )
        for layer in loss.model.decoder_layers():
            fully_shard(layer, mesh=mesh, mp_policy=policy(param_dtype=gathered))
        # The residual stream begins in the embedding and stays fp32: gathered as it is stored.
        fully_shard(loss, mesh=mesh, mp_policy=policy())

    def training_module(self, compiler: Compiler | None) -> nn.Module:
        """Return the module for training; layers are compiled one by one."""
        if compiler is not None:
            _compile_layers(self.loss, compiler)
        return self.loss

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Set the mode until the next call: gradients are reduced in the last micro-batch."""
        root = cast(FSDPModule, self.loss)
        root.set_requires_gradient_sync(last)
        root.set_is_last_backward(last)
        return nullcontext()

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Norm over the parts of all processes, summed in fp64 against overflow and underflow."""
        of_parts = get_total_norm([own_part(gradient) for gradient in gradients])
        return self._processes.sum(of_parts.double().square()).sqrt().float()

    def reshard(self) -> None:
        """Shard the outermost unit again; only a backward pass does so automatically."""
        cast(FSDPModule, self.loss).reshard()


def _reduce_dtype(config: ParallelConfig) -> torch.dtype:
    return torch.bfloat16 if config.gradient_compression == "bf16" else torch.float32


def _compile_layers(loss: NextTokenLoss, compiler: Compiler) -> None:
    """Compile each layer for training; evaluations would need another graph and run eagerly."""

    def in_training(compiled: Layer, eager: Layer) -> Layer:
        return lambda *args: (compiled if torch.is_grad_enabled() else eager)(*args)

    # All layers share the code of their forward pass, and so the graphs that it may have: one for
    # each kind of layer, and more while sizes vary.
    limit = _GRAPHS_PER_KIND * len(loss.model.config.kinds)
    dynamo.recompile_limit = max(dynamo.recompile_limit, limit)
    for layer in loss.model.decoder_layers():
        forward = in_training(compiler(layer.forward), layer.forward)
        layer.forward = forward  # type: ignore[method-assign]


def distribute(
    loss: NextTokenLoss,
    config: ParallelConfig,
    processes: Processes,
    device: torch.device,
    *,
    captured: bool = False,
) -> Replicated:
    """Make the strategy of a run; a single process needs none.

    Args:
        loss: the model with its loss on ``device``, its weights equal on all processes.
        config: strategy and its settings.
        processes: this process and the other ranks of the run.
        device: where this process computes.
        captured: whether backward passes are replayed from CUDA graphs.

    Raises:
        ValueError: ``ddp`` on CPUs cannot send bf16.
    """
    if processes.world_size == 1:
        return Replicated(loss, config, processes, device, captured=captured)
    is_sharded, sent = config.strategy == "fsdp", config.gradient_compression
    fits = is_sharded or sent == "none" or device.type == "cuda"
    rule = "be none with parallel.strategy ddp on CPUs"
    check(fits, "parallel.gradient_compression", rule, sent)
    text = "parallel: %s over %d processes, gradients sent in %s"
    kind = "bf16" if sent == "bf16" else "fp32"
    logger.info(text, config.strategy, processes.world_size, kind)
    if is_sharded:
        return Sharded(loss, config, processes, device)
    return Replicated(loss, config, processes, device, captured=captured)
