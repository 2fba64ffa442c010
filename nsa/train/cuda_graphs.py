"""Forward and backward of a micro-batch as one CUDA graph, which the host launches instead of thousands of kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nsa.train.compilation import compilations
from nsa.train.data import Batch


@dataclass(frozen=True)
class _Captured:
    """A graph with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    divisor: Tensor
    loss: Tensor


class Replay:
    """Runs micro-batches from graphs, one for each shape.

    The very first micro-batch runs as it is, which compiles what has to be compiled and makes the gradients; later ones are
    captured where their shape is new. A new shape may come at any step: run as it is, it would need as much memory again beside
    that of the graphs. So it must be computed by the code that the first one compiled, see ``Batch.with_few_shapes``. Gradients
    are added to the ``.grad`` that exists then: it must stay where it is, so it is set to zero and never dropped. Graphs share
    their memory, since one runs at a time.

    Args:
        run: forward and backward of a micro-batch on the device, its loss divided by a scalar before the backward pass; gives
            the loss that was divided. It may not wait for the device.
    """

    def __init__(self, run: Callable[[Batch, Tensor], Tensor]) -> None:
        self._run = run
        self._is_first = True
        self._captured: dict[tuple[int, int], _Captured] = {}

    def __call__(self, batch: Batch, divisor: Tensor) -> Tensor:
        """The loss of ``batch``, from the host or the device; gradients are added."""
        shape = (batch.tokens.shape[0], batch.cu_seqlens.shape[0])
        if self._is_first:
            self._is_first = False
            return self._run(batch.to(divisor.device), divisor)
        if shape not in self._captured:
            self._captured[shape] = self._capture(batch.to(divisor.device), divisor.clone())
        captured = self._captured[shape]
        captured.batch.copy_(batch)
        captured.divisor.copy_(divisor)
        captured.graph.replay()
        return captured.loss.clone()

    def _capture(self, batch: Batch, divisor: Tensor) -> _Captured:
        pool = next((captured.graph.pool() for captured in self._captured.values()), None)
        # The host's figures are of this batch alone; whoever replays the graph has those of theirs.
        batch = replace(batch, num_bytes=0, num_targets=0)
        graph = torch.cuda.CUDAGraph()
        # Other threads fetch data and write checkpoints meanwhile; what they ask of CUDA is none of the capture's business.
        mode = "thread_local"
        with compilations.capturing(), torch.cuda.graph(graph, pool=pool, capture_error_mode=mode):
            loss = self._run(batch, divisor)
        return _Captured(graph, batch, divisor, loss)
