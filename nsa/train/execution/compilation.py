"""Start of a run: the times of its phases, and counts of compilations and captures.

Three things make a step of training slow the first time and should not happen again later:
``torch.compile`` compiles a graph, a CUDA graph is captured, and Triton compiles a kernel at its
first launch, or loads it from its cache on disk.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler

from nsa.train.config import TrainConfig
from nsa.train.data.batch import TokenSource

logger = logging.getLogger(__name__)

# Mean length of documents in tokens that is assumed without an index.
SHORT_DOCUMENT = 64


class Compiled(NamedTuple):
    """Counts since the start of the process.

    Attributes:
        graphs: compilations by ``torch.compile``, recompilations included.
        captures: CUDA graphs captured by the trainer.
        kernels: Triton kernels compiled or loaded at their launch; not those that
            ``torch.compile`` makes.
    """

    graphs: int = 0
    captures: int = 0
    kernels: int = 0

    @property
    def compilations(self) -> int:
        """Compilations by ``torch.compile`` and captures, as the metric of this name counts."""
        return self.graphs + self.captures

    def since(self, before: Compiled) -> str:
        """Counts after ``before`` in words; empty without any."""
        names = ("torch.compile graphs compiled", "CUDA graphs captured", "Triton kernels compiled")
        counts = zip(names, before, self, strict=True)
        return ", ".join(f"{name}: {new - old}" for name, old, new in counts if new > old)


class CompilationCounter:
    """Counts and logs compilations and captures of this process.

    ``torch.compile`` reports through PyTorch's compilation callbacks. ``torch.compiler.reset``
    removes them: call :meth:`listen` again afterwards. Kernels are reported through Triton's hook
    before a compilation at launch; a hook that was set before is still called. The code that
    captures CUDA graphs reports them, see :meth:`capturing`.

    Attributes:
        now: the counts since the first :meth:`listen`.
        before_kernel: called before a kernel is compiled or loaded at its launch.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # the backward pass compiles in threads of autograd
        self.now = Compiled()
        self._graph_begin = 0.0
        self._has_hook = False
        self.before_kernel: Callable[[], None] = lambda: None

    def listen(self, device: torch.device) -> None:
        """Start counting; further calls change nothing.

        Args:
            device: device of the run. On a CPU no Triton kernel runs, and Triton is not
                imported.
        """
        if self._graph_begins not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._graph_begins)
            callback_handler.register_end_callback(self._graph_ends)
        if device.type == "cuda" and not self._has_hook:
            self._has_hook = True
            self._hook_into_triton()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Context manager of the capture of a CUDA graph; a failed one does not count."""
        logger.info("capturing a CUDA graph of the training step")
        yield
        self.add(Compiled(captures=1))

    def add(self, more: Compiled) -> None:
        """Add to the counts."""
        with self._lock:
            self.now = Compiled(*map(sum, zip(self.now, more, strict=True)))

    def _graph_begins(self, cause: CallbackArgs) -> None:
        self._graph_begin = time.perf_counter()
        logger.info("torch.compile is compiling")

    def _graph_ends(self, cause: CallbackArgs) -> None:
        # A backward pass compiled at its first run is part of the graph of the forward pass.
        is_graph = cause.callback_trigger != CallbackTrigger.LAZY_BACKWARD
        self.add(Compiled(graphs=int(is_graph)))
        seconds = time.perf_counter() - self._graph_begin
        logger.info("torch.compile has compiled in %.1f s", seconds)

    def _hook_into_triton(self) -> None:
        import triton

        runtime = triton.knobs.runtime
        before = runtime.jit_cache_hook

        def at_launch(**details: Any) -> bool | None:
            skip = None if before is None else before(**details)
            # True: the hook has dealt with the kernel, and nothing is compiled. A kernel that is
            # compiled ahead is not launched yet.
            if not (skip or details.get("is_manual_warmup")):
                if self.now.kernels == 0:
                    logger.info("compiling Triton kernels, or loading them from Triton's cache")
                self.before_kernel()
                self.add(Compiled(kernels=1))
            return skip

        runtime.jit_cache_hook = at_launch


# One for the process, as PyTorch's callbacks and Triton's hooks are.
compilations = CompilationCounter()


class Startup:
    """Times the phases of a start; each ends where the next one begins.

    Attributes:
        first_step_s: duration of the start, seconds; None before the end of the first step.
    """

    def __init__(self) -> None:
        self.first_step_s: float | None = None
        self._begins: dict[str, float] = {}

    def begin(self, phase: str) -> None:
        """End the phase before and begin this one.

        Args:
            phase: a noun: ``data``, ``model``.
        """
        self._begins[phase] = time.perf_counter()
        logger.info("start: %s", phase)

    def end_step(self, device: torch.device) -> None:
        """Wait until ``device`` has finished the first step, and log the duration of each phase."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        marks = [*self._begins.values(), time.perf_counter()]
        self.first_step_s = marks[-1] - marks[0]
        phases = zip(self._begins, itertools.pairwise(marks), strict=True)
        parts = ", ".join(f"{name} {end - begin:.1f} s" for name, (begin, end) in phases)
        logger.info("first step after %.1f s: %s", self.first_step_s, parts)


def first_capacity(config: TrainConfig, source: TokenSource) -> int:
    """Number of sequences that micro-batches of a new stage are padded to; 0 without padding.

    Compiled code and CUDA graphs take a fixed number of sequences; batches of documents differ in
    it. The index of the data gives the largest number of document parts in a micro-batch. A stream
    has no index: its capacity is one sequence for ``SHORT_DOCUMENT`` tokens.
    """
    documents = config.data.document_mask and source.separator_id is not None
    if not documents or not (config.compile or config.cuda_graphs):
        return 0
    most = source.most_sequences(config.seq_len, config.micro_batch)
    if most is None:
        most = config.micro_batch * config.seq_len // SHORT_DOCUMENT
    # More than micro_batch: sequences without a boundary would be computed by other code.
    return max(most, config.micro_batch + 1)
