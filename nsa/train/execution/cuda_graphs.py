"""Passes of a micro-batch and updates of weights as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nsa.train.data import Batch
from nsa.train.execution.compilation import compilations
from nsa.train.watch.out_of_memory import is_out_of_memory


class CaptureError(RuntimeError):
    """Part of a step could not be captured as a CUDA graph; the message says what to do."""


class _Captured(NamedTuple):
    """A graph with the inputs that it reads and the result that it writes."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Any, ...]
    result: Any


class Replay:
    """Runs micro-batches from two graphs: the first writes gradients, the second adds.

    The first step runs without graphs and compiles, and so does the first one with sequences of
    another length or after :meth:`restart`. The graphs are captured in the step after it, and again
    when a micro-batch of another shape begins a step, which is rare: the trainer pads micro-batches
    to one number of sequences. A new shape is captured at once with the compiled
    code; without a graph it would need as much memory again. A graph writes each ``.grad`` to the
    address that it was captured with, so gradients must not be dropped between steps and need no
    zeroing. The optimizer's update has a third graph. Graphs share their memory, since one runs at
    a time.

    Args:
        run: forward and backward of a micro-batch on the device. It divides the loss by a scalar
            before the backward pass, returns the loss before the division, and must not wait for
            the device.
        parameters: parameters with gradients.
    """

    def __init__(
        self,
        run: Callable[[Batch, Tensor], Tensor],
        parameters: Sequence[nn.Parameter],
    ) -> None:
        self._run, self._parameters = run, parameters
        self._steps, self._seq_len = 0, 0
        self._captured: dict[Any, _Captured] = {}
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, batch: Batch, divisor: Tensor, is_first: bool) -> Tensor:
        """Run a micro-batch from the host or the device, and return its loss.

        Args:
            batch: the micro-batch.
            divisor: scalar on the device.
            is_first: whether this micro-batch writes the gradients; otherwise it adds to them.
        """
        if is_first and batch.max_seqlen != self._seq_len:
            self._forget()
            self._steps, self._seq_len = 0, batch.max_seqlen
        self._steps += is_first
        if self._steps == 1:
            return self._run(batch.to(divisor.device), divisor)
        tokens, sequences = batch.tokens.shape[0], batch.num_sequences
        key = (tokens, sequences, is_first)
        if is_first and key not in self._captured:
            self._forget()
        name = f"a micro-batch of {tokens} tokens in {sequences} sequences"
        loss: Tensor = self._play(key, name, self._run, batch, divisor)
        return loss.clone()

    def update(self, run: Callable[[Tensor], None], cancel: Tensor) -> None:
        """Update the weights from the gradients of the last call.

        Args:
            run: the update, the same in every step; it must not wait for the device.
            cancel: argument of ``run``, scalar on the device.
        """
        if self._steps == 1:
            run(cancel)
        else:
            self._play("update", "the optimizer's update", run, cancel)

    def restart(self) -> None:
        """Run the next step without graphs, and capture them anew in the one after it."""
        self._seq_len = 0

    def _forget(self) -> None:
        """Drop all graphs and their gradients; the next capture creates new ones."""
        self._captured.clear()
        for parameter in self._parameters:
            parameter.grad = None

    def _play(self, key: Any, name: str, run: Callable[..., Any], *inputs: Batch | Tensor) -> Any:
        """Replay ``run`` with inputs of the same shapes as those that it was captured with."""
        if key not in self._captured:
            self._captured[key] = self._capture(name, run, tuple(map(self._own, inputs)))
        captured = self._captured[key]
        for own, given in zip(captured.inputs, inputs, strict=True):
            own.copy_(given)
        captured.graph.replay()
        return captured.result

    def _own(self, given: Batch | Tensor) -> Batch | Tensor:
        if isinstance(given, Tensor):
            return given.clone()
        # The host's counts are valid for this batch only, not for later replays.
        return replace(given.to(self._parameters[0].device), num_bytes=0, num_targets=0)

    def _capture(self, name: str, run: Callable[..., Any], inputs: tuple[Any, ...]) -> _Captured:
        """Capture ``run``, called ``name`` in errors."""
        pool = next((captured.graph.pool() for captured in self._captured.values()), None)
        # All graphs use one stream, by which they share memory. PyTorch's own stream is on the
        # device of the first capture of the process.
        self._stream = self._stream or torch.cuda.Stream(self._parameters[0].device)
        graph = torch.cuda.CUDAGraph()
        # Other threads, which fetch data and write checkpoints, may use CUDA meanwhile. A
        # compilation would copy to the device and invalidate the capture: the stance turns it into
        # an error with a clear message.
        try:
            with (
                torch.compiler.set_stance("fail_on_recompile"),
                compilations.capturing(),
                torch.cuda.graph(
                    graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"
                ),
            ):
                result = run(*inputs)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            first = (str(error) or type(error).__name__).splitlines()[0]
            raise CaptureError(
                f"cuda_graphs: {name} could not be captured ({first}). "
                "Give --cuda-graphs false to run without CUDA graphs."
            ) from error
        return _Captured(graph, inputs, result)
