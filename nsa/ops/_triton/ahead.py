"""Kernels of a pass compiled before it runs, several at a time.

A training step launches some 30 kernels, a first generated token some 20. Triton compiles each one
at its first launch, one after another: 10 to 25 s on an H100 machine. Here one pass is recorded on
CPU tensors, without running kernels, and they are compiled in several threads, which Triton's
compiler leaves free to run side by side. Other kernels are compiled at their launch as usual, so
that results never depend on this.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from triton.backends.nvidia import driver
from triton.runtime.jit import JITFunction

from nsa.ops._backend import as_on_gpu
from nsa.ops._triton import kernel
from nsa.ops._triton.tuning import default_tile, find_table, tiles_chosen_by

logger = logging.getLogger(__name__)

MAX_THREADS = 8

Launched = tuple[Any, tuple[Any, ...], dict[str, Any]]  # kernel, positional and keyword arguments


class KernelsAhead:
    """Kernels that are being compiled.

    Args:
        run: runs the pass on CPU tensors; none of its results are used.
        device: the CUDA device that will run it.
    """

    def __init__(self, run: Callable[[], None], device: torch.device) -> None:
        gpu = torch.cuda.get_device_properties(device)
        launches = launches_of(run, gpu.name, (gpu.major, gpu.minor))
        # The other cores are for the run, which loads data and traces meanwhile.
        threads = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // 2))
        self._pool = ThreadPoolExecutor(threads)
        self._compiled = [self._pool.submit(_compile, launch, device) for launch in launches]

    def is_done(self, seconds: float) -> bool:
        """Whether all kernels are compiled after at most so many seconds."""
        return not wait(self._compiled, seconds).not_done

    def wait(self) -> None:
        """Wait until all kernels are compiled; a launch would compile the same kernel again."""
        for compiled in self._compiled:
            if (error := compiled.exception()) is not None:
                logger.warning("a kernel could not be compiled ahead: %s", error)
        self._compiled = []
        self._pool.shutdown(wait=False)


def launches_of(run: Callable[[], None], gpu: str, capability: tuple[int, int]) -> list[Launched]:
    """Launches of a pass on CPU tensors, one of each kind, the slowest to compile first.

    PyTorch's products and initial values are skipped: launches do not depend on them.

    Args:
        run: runs the pass.
        gpu: name of the GPU, which selects the tiles.
        capability: its compute capability, major and minor.
    """
    launched: list[Launched] = []
    table = find_table(gpu, capability)

    def tile(key: Any, _: Any) -> Any:
        return (table and table.find(key)) or default_tile(key, capability)

    def note(function: Any, *args: Any, warmup: bool, **kwargs: Any) -> None:
        launched.append((function, args, kwargs))

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        return _of_columns(x.to(dtype), weight.shape[0])

    with (
        torch.random.fork_rng(devices=[]),  # initial weights of a run follow from its seed
        _replaced(
            (JITFunction, "run", note),
            (kernel, "EARLY_WITHOUT_GPU", capability >= (9, 0)),
            (torch, "mm", lambda a, b: a.new_empty(a.shape[0], b.shape[1])),
            (nn.functional, "linear", linear),
            (
                nn.functional,
                "scaled_dot_product_attention",
                lambda q, k, v, **_: _of_columns(q, v.shape[-1]),
            ),
            (nn.init, "normal_", lambda x, *_, **__: x),
            (nn.init, "kaiming_uniform_", lambda x, *_, **__: x),
        ),
        as_on_gpu(),
        tiles_chosen_by(tile),
    ):
        run()
    kinds = {_kind(*launch): launch for launch in launched}
    return sorted(kinds.values(), key=lambda launch: -len(launch[0].src))


@contextmanager
def _replaced(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    originals = [getattr(owner, name) for owner, name, _ in replacements]
    for owner, name, replacement in replacements:
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for (owner, name, _), original in zip(replacements, originals, strict=True):
            setattr(owner, name, original)


def _of_columns(x: Tensor, columns: int) -> Tensor:
    """Rows with this number of columns, whose gradient reaches ``x``."""
    return x[..., :1].expand(*x.shape[:-1], columns).contiguous()


def _kind(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Key of the compiled kernel of a launch."""

    def kind(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.dtype, x.data_ptr() % 16 == 0
        if isinstance(x, int):
            return x == 1, x % 16 == 0
        if isinstance(x, tuple):
            return tuple(map(kind, x))
        return (x.base.dtype, tuple(x.block_shape)) if hasattr(x, "block_shape") else type(x)

    options = sorted((name, str(value)) for name, value in kwargs.items() if name != "grid")
    return function, *map(kind, args), *options


def _compile(launch: Launched, device: torch.device) -> None:
    function, args, kwargs = launch
    with torch.cuda.device(device):
        compiled = function.warmup(*args, **kwargs)
    # Before Triton 3.7 each kernel has a launcher in C, which is also stored on disk.
    if hasattr(driver, "make_launcher"):
        driver.CudaLauncher(compiled.src, compiled.metadata)
