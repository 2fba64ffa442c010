"""Forward and backward of a micro-batch as one CUDA graph, which the host launches instead of thousands of kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nsa.train.data import Batch


class CaptureError(RuntimeError):
    """A micro-batch that could not be captured as a CUDA graph; the message says what to do.

    Args:
        batch: the micro-batch.
        error: what PyTorch said.
    """

    def __init__(self, batch: Batch, error: RuntimeError) -> None:
        shape = f"{batch.tokens.shape[0]} tokens in {batch.num_sequences} sequences"
        first = next(iter(str(error).splitlines()), type(error).__name__)
        super().__init__(
            f"cuda_graphs: a micro-batch of {shape} could not be captured ({first}). "
            "Give --cuda-graphs false to run without CUDA graphs."
        )


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
    captured where their shape is new. The trainer pads them to one number of sequences, so there is one shape until a batch
    exceeds it. Run as it is, a new shape would need as much memory again beside that of the graphs, so it is captured at once,
    and the code that the first one compiled must compute it. Gradients are added to the ``.grad`` that exists then: it must
    stay where it is, so it is set to zero and never dropped. Graphs share their memory, since one runs at a time.

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
        # Compilation copies to the device, which would spoil the capture: the stance makes it an error of its own.
        try:
            with (
                torch.compiler.set_stance("fail_on_recompile"),
                torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
            ):
                loss = self._run(batch, divisor)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CaptureError(batch, error) from error
        return _Captured(graph, batch, divisor, loss)
