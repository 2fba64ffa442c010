"""Compiles the Triton kernels of a training step in other processes while the run starts.

A step launches some 30 kernels. Triton compiles each one at its first launch, one after another,
and before version 3.7 also builds a launcher in C: some 25 s in all on an H200 machine. Here a
second process records the launches of one forward and backward pass of each kind of layer, without
a GPU and without running kernels, and compiles them on several cores. The run then finds them in
Triton's cache on disk. It compiles other kernels itself, so its result never depends on this.
"""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import nsa.ops
from nsa.lm.dense_attention import DenseAttention
from nsa.lm.model import Embedding
from nsa.module import NativeSparseAttention
from nsa.ops._backend import as_on_gpu
from nsa.ops.statistics import new_statistics
from nsa.train.config import TrainConfig
from nsa.train.distributed.launch import Launch
from nsa.train.execution.precision import autocast
from nsa.train.load import load_config, to_yaml

logger = logging.getLogger(__name__)

MAX_PROCESSES = 8
# Enough for all kernels, unless the machine is busy with other work.
LONGEST_WAIT_S = 60

Launched = tuple[Any, tuple[Any, ...], dict[str, Any]]  # kernel, positional and keyword arguments


class KernelsAhead:
    """The process that compiles.

    Args:
        config: the run.
        device: device of the run; on a CPU there is nothing to compile.
        launch: launch of this process. Only the first process of each machine compiles and waits.
    """

    def __init__(self, config: TrainConfig, device: torch.device, launch: Launch) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if device.type != "cuda" or launch.local_rank != 0:
            return
        gpu = torch.cuda.get_device_properties(device)
        stamp = _stamp(config, gpu.name)
        if stamp.exists():
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, gpu.name, str(gpu.major), str(gpu.minor), str(stamp)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(to_yaml(config).encode())
        self._process.stdin = None  # done with
        # A trainer that is dropped before it has run leaves no process behind.
        self._finish = weakref.finalize(self, _end, self._process)

    def wait(self) -> None:
        """Wait for the kernels; otherwise the first launch would compile them again."""
        if self._process is None:
            return
        try:
            _, errors = self._process.communicate(timeout=LONGEST_WAIT_S)
            if self._process.returncode:
                last = errors.decode(errors="replace").strip().rpartition("\n")[2]
                text = "kernels could not be compiled ahead (%s): the first step takes longer"
                logger.warning(text, last)
        except subprocess.TimeoutExpired:
            text = "kernels are not compiled after %d s: the run compiles them itself"
            logger.warning(text, LONGEST_WAIT_S)
        self.close()

    def close(self) -> None:
        """End the process; its work is useless once the kernels have been launched."""
        if self._process is not None:
            self._finish()
            self._process = None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.communicate()


def _stamp(config: TrainConfig, gpu: str) -> Path:
    """File in Triton's cache that marks the kernels of a configuration as compiled."""
    import triton

    decisive = (config.seq_len, config.micro_batch, config.compute_dtype, config.telemetry)
    versions = (torch.__version__, triton.__version__)
    digest = hashlib.sha256(f"{to_yaml(config.model)}{decisive}{gpu}{versions}".encode())
    for path in sorted(Path(nsa.ops.__path__[0]).rglob("*")):
        if path.suffix in (".py", ".json"):  # kernels, launchers and tuning tables
            digest.update(path.read_bytes())
    return Path(triton.knobs.cache.dir) / f"nsa-{digest.hexdigest()[:32]}"


@contextmanager
def _launches_of(gpu: str, capability: tuple[int, int]) -> Iterator[list[Launched]]:
    """Context manager that selects kernels for this GPU and lists their launches.

    PyTorch's products are skipped: launches do not depend on their values.
    """
    from triton.runtime.jit import JITFunction

    from nsa.ops._triton.tuning import default_tile, find_table, tiles_chosen_by

    launched: list[Launched] = []
    table = find_table(gpu, capability)

    def tile(key: Any, _: Any) -> Any:
        return (table and table.find(key)) or default_tile(key, capability)

    def note(kernel: Any, *args: Any, warmup: bool, **kwargs: Any) -> None:
        launched.append((kernel, args, kwargs))

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        return _of_columns(x.to(dtype), weight.shape[0])

    replacements: list[tuple[Any, str, Any]] = [
        (JITFunction, "run", note),
        (torch, "mm", lambda a, b: a.new_empty(a.shape[0], b.shape[1])),
        (nn.functional, "linear", linear),
        (
            nn.functional,
            "scaled_dot_product_attention",
            lambda q, k, v, **_: _of_columns(q, v.shape[-1]),
        ),
    ]
    originals = [getattr(owner, name) for owner, name, _ in replacements]
    for owner, name, replacement in replacements:
        setattr(owner, name, replacement)
    try:
        with as_on_gpu(), tiles_chosen_by(tile):
            yield launched
    finally:
        for (owner, name, _), original in zip(replacements, originals, strict=True):
            setattr(owner, name, original)


def _of_columns(x: Tensor, columns: int) -> Tensor:
    """Rows with this number of columns, whose gradient reaches ``x``."""
    return x[..., :1].expand(*x.shape[:-1], columns).contiguous()


def launches_of_a_step(
    config: TrainConfig,
    gpu: str,
    capability: tuple[int, int],
) -> list[Launched]:
    """Launches of a training step, one of each kind, the slowest to compile first.

    Args:
        config: the run.
        gpu: name of the GPU, which selects the tiles.
        capability: its compute capability, major and minor.
    """
    model, num_tokens = config.model, config.micro_batch * config.seq_len
    # Documents would be more sequences; kernels of dense attention are PyTorch's in any case.
    offsets = torch.arange(config.micro_batch + 1, dtype=torch.int32) * config.seq_len
    with (
        _launches_of(gpu, capability) as launched,
        autocast(torch.device("cpu"), config.compute_dtype),
    ):
        embedding = Embedding(model.vocab_size, model.width)
        embedding(torch.zeros(num_tokens, dtype=torch.int64)).sum().backward()
        patterns = dict.fromkeys(map(model.nsa.for_layer, range(model.num_layers)))
        for pattern in patterns:
            dense = model.attention == "dense"
            attention = (DenseAttention if dense else NativeSparseAttention)(model.width, pattern)
            if isinstance(attention, NativeSparseAttention) and config.telemetry:
                attention.statistics = new_statistics("cpu")
            x = torch.empty(num_tokens, model.width, requires_grad=True)
            attention(x, cu_seqlens=offsets, max_seqlen=config.seq_len).sum().backward()
    kinds = {_kind(*launch): launch for launch in launched}
    return sorted(kinds.values(), key=lambda launch: -len(launch[0].src))


def _kind(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
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
    return kernel, *map(kind, args), *options


_launches: list[Launched] = []  # forked processes inherit it: kernels cannot be sent


def _compile(number: int) -> None:
    from triton.backends.nvidia import driver

    kernel, args, kwargs = _launches[number]
    compiled = kernel.warmup(*args, **kwargs)
    # Before Triton 3.7 each kernel has a launcher in C, which is also stored on disk.
    if hasattr(driver, "make_launcher"):
        driver.CudaLauncher(compiled.src, compiled.metadata)


def main(gpu: str, major: str, minor: str, stamp: str) -> None:
    """Compile for the configuration on standard input into Triton's cache, in forked processes.

    Args:
        gpu: name of the GPU.
        major: major number of its compute capability.
        minor: minor number of its compute capability.
        stamp: file that is created when all kernels are compiled.
    """
    import triton

    from nsa.ops._triton.absent_gpu import AbsentGPU

    torch.set_num_threads(1)  # forked processes inherit no threads
    _launches.extend(launches_of_a_step(load_config("/dev/stdin"), gpu, (int(major), int(minor))))
    triton.runtime.driver.set_active(AbsentGPU(int(major + minor)))
    processes = max(1, min(MAX_PROCESSES, len(os.sched_getaffinity(0)) // 2))
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        pool.map(_compile, range(len(_launches)), chunksize=1)
    Path(stamp).parent.mkdir(parents=True, exist_ok=True)
    Path(stamp).touch()


if __name__ == "__main__":
    main(*sys.argv[1:])
