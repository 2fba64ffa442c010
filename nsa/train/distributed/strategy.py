"""How the processes of a run share the training of one model: equal replicas (DDP) or shards (FSDP2)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from nsa.errors import check
from nsa.train.config import ParallelConfig
from nsa.train.distributed.processes import Processes
from nsa.train.distributed.sharding import own_part
from nsa.train.loss import NextTokenLoss
from nsa.train.telemetry.throughput import MIB

logger = logging.getLogger(__name__)

Compiler = Callable[[Any], Any]


class Replicated:
    """One process, or several that hold equal replicas and average their gradients in the backward pass.

    Every trainable parameter must take part in every backward pass.

    Args:
        loss: the model with its loss; changed in place where the strategy needs it.
        config: what the processes send each other, and when.
        processes: this process among those of the run.
        device: where this process computes.
        captured: whether backward passes are replayed from CUDA graphs, in which DDP cannot send anything; gradients are then
            averaged after the last of them.

    Attributes:
        loss: the module without what training wraps around it, for evaluations.
        in_step: whether no process can run the module alone.
    """

    in_step = False

    def __init__(
        self, loss: NextTokenLoss, config: ParallelConfig, processes: Processes, device: torch.device, *, captured: bool = False
    ) -> None:
        self.loss, self._config, self._processes, self._device = loss, config, processes, device
        self._captured = captured
        self._replica: DistributedDataParallel | None = None
        self._is_first = True

    def training_module(self, compiler: Compiler | None) -> nn.Module:
        """What is called in training.

        Args:
            compiler: from a module or function to its compiled form; None leaves it as it is.
        """
        is_alone = self._processes.world_size == 1
        loss: nn.Module = self.loss
        if compiler is not None:
            by_layer = self._config.compile_layers
            loss = _with_compiled_layers(self.loss, compiler) if by_layer else cast(nn.Module, compiler(self.loss))
        if is_alone or self._captured:
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

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Context of the forward and backward pass of one micro-batch: only the last one of a step exchanges gradients."""
        # A static graph is learnt from the first backward pass, which must exchange gradients for that.
        first, self._is_first = self._is_first, False
        if self._replica is None or last or (first and self._config.static_graph):
            return nullcontext()
        return self._replica.no_sync()

    def exchange(self, gradients: Sequence[Tensor]) -> None:
        """Average gradients over the processes in place, after the last micro-batch, where no backward pass has done it."""
        if not self._captured or self._processes.world_size == 1:
            return
        dtype = torch.bfloat16 if self._config.gradient_compression == "bf16" else torch.float32
        for bucket in _buckets(gradients, self._config.bucket_mib):
            sent = torch.cat([gradient.flatten().to(dtype) for gradient in bucket])
            self._processes.sum(sent.div_(self._processes.world_size))
            parts = sent.split([gradient.numel() for gradient in bucket])
            torch._foreach_copy_(bucket, [part.view_as(gradient) for part, gradient in zip(parts, bucket, strict=True)])

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Euclidean norm over all gradients, fp32 scalar, the same on every process; nothing waits for the device."""
        return get_total_norm(list(gradients))

    def rest(self) -> None:
        """After passes without gradients: hold no more of the model than between two steps."""


class Sharded(Replicated):
    """Several processes that each hold a part of every weight, gradient and moment (FSDP2).

    A layer's weights are gathered before its forward pass and again before its backward pass, its gradients are averaged and
    scattered after it, each beside the computation of its neighbours. Embedding, last norm and head form the outermost unit.
    """

    in_step = True

    def __init__(self, loss: NextTokenLoss, config: ParallelConfig, processes: Processes, device: torch.device) -> None:
        super().__init__(loss, config, processes, device)
        mesh = init_device_mesh(device.type, (processes.world_size,))
        reduced = torch.bfloat16 if config.gradient_compression == "bf16" else torch.float32
        gathered = torch.bfloat16 if config.gather_dtype == "bf16" else None
        # The residual stream begins in the embedding and stays fp32, so the outermost unit is gathered as it is stored.
        of_layers = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=reduced, cast_forward_inputs=False)
        for layer in loss.model.decoder_layers():
            fully_shard(layer, mesh=mesh, mp_policy=of_layers)
        fully_shard(loss, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduced, cast_forward_inputs=False))

    def training_module(self, compiler: Compiler | None) -> nn.Module:
        """What is called in training; compiled is each layer, since gathering and scattering stand between them."""
        return self.loss if compiler is None else _with_compiled_layers(self.loss, compiler)

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Sets it for all modules until the next call; gradients wait unsharded for the last micro-batch."""
        root = cast(FSDPModule, self.loss)
        root.set_requires_gradient_sync(last)
        root.set_is_last_backward(last)
        return nullcontext()

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Of the parts that each process holds; summed in fp64, so that squares neither overflow nor vanish."""
        of_parts = get_total_norm([own_part(gradient) for gradient in gradients])
        return self._processes.sum(of_parts.double().square()).sqrt().float()

    def rest(self) -> None:
        """After a backward pass the outermost unit is sharded again by itself."""
        cast(FSDPModule, self.loss).reshard()


def _buckets(gradients: Sequence[Tensor], bucket_mib: float) -> list[list[Tensor]]:
    """Gradients in their order, together as many as fit into a bucket, at least one."""
    buckets, size = list[list[Tensor]](), 0
    for gradient in gradients:
        if not buckets or size + gradient.nbytes > bucket_mib * MIB:
            buckets.append([])
            size = 0
        buckets[-1].append(gradient)
        size += gradient.nbytes
    return buckets


def _with_compiled_layers(loss: NextTokenLoss, compiler: Compiler) -> NextTokenLoss:
    """``loss`` itself, each of whose layers is now a graph of its own in passes that record gradients."""
    for layer in loss.model.decoder_layers():
        layer.forward = _in_training(compiler(layer.forward), layer.forward)  # type: ignore[method-assign]
    return loss


def _in_training(compiled: Callable[..., Tensor], eager: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Evaluations run the layer as it is: they would need a graph of their own."""

    def forward(*args: Any) -> Tensor:
        return (compiled if torch.is_grad_enabled() else eager)(*args)

    return forward


def distribute(
    loss: NextTokenLoss, config: ParallelConfig, processes: Processes, device: torch.device, *, captured: bool = False
) -> Replicated:
    """The strategy of a run; a single process has nothing to share, whatever the configuration says.

    Args:
        loss: the model with its loss on ``device``, its weights equal on all processes.
        config: which strategy, and its settings.
        processes: this process among those of the run.
        device: where this process computes.
        captured: whether backward passes are replayed from CUDA graphs.

    Raises:
        ValueError: ``ddp`` on CPUs cannot send bf16; what ``fsdp`` sends cannot be captured, and in captured passes ``ddp`` has
            no static graph.
    """
    if processes.world_size == 1:
        return Replicated(loss, config, processes, device, captured=captured)
    hint = "Give --cuda-graphs false."
    check(
        config.strategy == "ddp" or not captured, "train", "cuda_graphs", "be false with parallel.strategy fsdp", captured, hint
    )
    check(
        not (config.static_graph and captured), "train", "parallel.static_graph", "be false with cuda_graphs", True,
        "Give --parallel.static-graph false: captured passes send nothing; or --cuda-graphs false.",
    )  # fmt: skip
    check(
        config.strategy == "fsdp" or config.gradient_compression == "none" or device.type == "cuda",
        "train", "parallel.gradient_compression", "be none with parallel.strategy ddp on CPUs", config.gradient_compression,
    )  # fmt: skip
    logger.info(
        "parallel: %s over %d processes, gradients sent in %s",
        config.strategy, processes.world_size, "bf16" if config.gradient_compression == "bf16" else "fp32",
    )  # fmt: skip
    if config.strategy == "fsdp":
        return Sharded(loss, config, processes, device)
    return Replicated(loss, config, processes, device, captured=captured)
