"""How often this process has compiled or captured something, and how long that took.

Three things make a step of training slow the first time and should not happen again later:
``torch.compile`` compiles a graph, a CUDA graph is captured, and Triton compiles a kernel at its
first launch, or loads it from its cache on disk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler

logger = logging.getLogger(__name__)

_BACKWARD = CallbackTrigger.LAZY_BACKWARD


@dataclass(frozen=True)
class Compiled:
    """Counts and times; the difference of two of them is what happened in between.

    Attributes:
        graphs: compilations by ``torch.compile``, first ones and recompilations.
        captures: CUDA graphs captured by the trainer.
        kernels: Triton kernels compiled or loaded at their launch; not those that
            ``torch.compile`` makes.
        graphs_s: time of the compilations, seconds; that of a backward pass at its first run
            included.
        captures_s: time of the captures, seconds; kernels compiled meanwhile included.
        kernels_s: time of the kernels, seconds.
    """

    graphs: int = 0
    captures: int = 0
    kernels: int = 0
    graphs_s: float = 0.0
    captures_s: float = 0.0
    kernels_s: float = 0.0

    @property
    def compilations(self) -> int:
        """Compilations by ``torch.compile`` and captures, as the metric of this name counts."""
        return self.graphs + self.captures

    def __add__(self, other: Compiled) -> Compiled:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Compiled(*(one + two for one, two in pairs))

    def __sub__(self, other: Compiled) -> Compiled:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Compiled(*(one - two for one, two in pairs))

    def __str__(self) -> str:
        """What happened: ``torch.compile compiled 1 graph (3.2 s)``; empty where nothing did."""
        parts = []
        if self.graphs_s > 0:
            what = _number(self.graphs, "graph") if self.graphs else "a backward pass"
            parts.append(f"torch.compile compiled {what} ({self.graphs_s:.1f} s)")
        if self.captures:
            what = _number(self.captures, "CUDA graph")
            parts.append(f"{what} captured ({self.captures_s:.1f} s)")
        if self.kernels:
            what = _number(self.kernels, "Triton kernel")
            parts.append(f"{what} compiled or loaded ({self.kernels_s:.1f} s)")
        return ", ".join(parts)


def _number(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' * (count != 1)}"


class CompilationCounter:
    """Counts what this process compiles and captures, and logs it while it happens.

    ``torch.compile`` reports through PyTorch's compilation callbacks, which
    ``torch.compiler.reset`` removes: who calls that calls :meth:`listen` afterwards. Kernels are
    reported through Triton's hooks around a compilation at launch, which call those that were there
    before. Captures are reported by the code that makes them, see :meth:`capturing`.

    Attributes:
        before_kernel: called before a kernel is compiled or loaded at its launch.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # the backward pass compiles in threads of autograd
        self._now = Compiled()
        self._graph_begin = 0.0
        self._kernel_begin = threading.local()
        self._has_hooks = False
        self.before_kernel: Callable[[], None] = lambda: None

    @property
    def now(self) -> Compiled:
        """What has happened in this process since the first :meth:`listen`."""
        return self._now

    def listen(self, device: torch.device) -> None:
        """Count from now on; to be called again after ``torch.compiler.reset``, harmless otherwise.

        Args:
            device: where the run computes. On a CPU no Triton kernel runs, and Triton is not
                imported.
        """
        if self._graph_begins not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._graph_begins)
            callback_handler.register_end_callback(self._graph_ends)
        if device.type == "cuda" and not self._has_hooks:
            _chain_hooks(self._kernel_begins, self._kernel_ends)
            self._has_hooks = True

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Around the capture of a CUDA graph; one that fails does not count."""
        logger.info("capturing a CUDA graph of the training step")
        begin = time.perf_counter()
        yield
        self._add(Compiled(captures=1, captures_s=time.perf_counter() - begin))

    def _add(self, more: Compiled) -> None:
        with self._lock:
            self._now += more

    def _graph_begins(self, cause: CallbackArgs) -> None:
        self._graph_begin = time.perf_counter()
        part = " the backward pass" if cause.callback_trigger == _BACKWARD else ""
        logger.info("torch.compile is compiling%s", part)

    def _graph_ends(self, cause: CallbackArgs) -> None:
        seconds = time.perf_counter() - self._graph_begin
        # A backward pass compiled at its first run belongs to the graph of the forward pass.
        is_graph = cause.callback_trigger != _BACKWARD
        self._add(Compiled(graphs=int(is_graph), graphs_s=seconds))
        part = "" if is_graph else " the backward pass"
        logger.info("torch.compile has compiled%s in %.1f s", part, seconds)

    def _kernel_begins(self) -> None:
        if self._now.kernels == 0:
            logger.info("compiling Triton kernels, or loading them from Triton's cache")
        self.before_kernel()
        self._kernel_begin.value = time.perf_counter()

    def _kernel_ends(self) -> None:
        seconds = time.perf_counter() - self._kernel_begin.value
        self._add(Compiled(kernels=1, kernels_s=seconds))


def _chain_hooks(begins: Callable[[], None], ends: Callable[[], None]) -> None:
    """Have Triton call these before and after a compilation at launch, and its other hooks too."""
    import triton

    runtime = triton.knobs.runtime
    before, after = runtime.jit_cache_hook, runtime.jit_post_compile_hook

    def at_begin(**details: Any) -> bool | None:
        skip = None if before is None else before(**details)
        if not skip:  # True: the hook has dealt with the kernel, and nothing is compiled
            begins()
        return skip

    def at_end(**details: Any) -> bool | None:
        ends()
        return None if after is None else after(**details)

    runtime.jit_cache_hook, runtime.jit_post_compile_hook = at_begin, at_end


# Of this process, as PyTorch's callbacks and Triton's hooks are.
compilations = CompilationCounter()
