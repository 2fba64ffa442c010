"""Triton kernels of a training step, compiled by processes of their own while the run starts.

A step launches some 30 kernels. Triton compiles each at its first launch, one after another, and
before version 3.7 builds a launcher in C for it: some 25 s altogether on an H200 machine. Here a
second process follows the launches of one forward and backward pass of each kind of layer, without
a GPU and without running anything, and compiles what they ask for on several cores. The run then
finds the kernels in Triton's cache on disk. What was not foreseen it compiles itself, so the result
never depends on this.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import multiprocessing
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

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
# Longer than the kernels ever take, unless the machine is busy with other work.
LONGEST_WAIT_S = 60

Launched = tuple[Any, tuple[Any, ...], dict[str, Any]]  # kernel, positional and keyword arguments


class KernelsAhead:
    """The process that compiles, seen from the run.

    Args:
        config: the run.
        device: where it computes; on a CPU there is nothing to compile.
        launch: the first process of each machine has them compiled and waits for them; the others
            find what is ready when they need it.
    """

    def __init__(self, config: TrainConfig, device: torch.device, launch: Launch) -> None:
        self._end: weakref.finalize[..., Any] | None = None
        if device.type != "cuda" or launch.local_rank != 0:
            return
        properties = torch.cuda.get_device_properties(device)
        target = (properties.name, str(properties.major), str(properties.minor))
        stamp = _stamp(config, properties.name)
        if stamp.exists():
            return
        with ExitStack() as files:
            self._said = files.enter_context(tempfile.TemporaryFile())
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, *target, "--stamp", str(stamp)],
                stdin=subprocess.PIPE,
                stdout=self._said,
                stderr=self._said,
            )
            files.pop_all()  # closed with the process
        assert self._process.stdin is not None
        self._process.stdin.write(to_yaml(config).encode())
        self._process.stdin.close()
        self._end = weakref.finalize(self, _end, self._process, self._said)

    def wait(self) -> None:
        """Wait for the kernels: the first launch would otherwise compile them a second time."""
        if self._end is None or not self._end.alive:
            return
        try:
            self._process.wait(LONGEST_WAIT_S)
        except subprocess.TimeoutExpired:
            logger.warning(
                "kernels are not compiled after %d s: the run compiles them itself",
                LONGEST_WAIT_S,
            )
        if self._process.returncode:
            self._said.seek(0)
            last = self._said.read().decode(errors="replace").strip().rpartition("\n")[2]
            logger.warning(
                "kernels could not be compiled ahead (%s): the first step takes longer",
                last,
            )
        self.close()

    def close(self) -> None:
        """End the process, whose work is of no use once the kernels have been launched."""
        if self._end is not None:
            self._end()


def _stamp(config: TrainConfig, gpu: str) -> Path:
    """The file in Triton's cache that says that the kernels of a configuration are there."""
    import triton

    decisive = (config.seq_len, config.micro_batch, config.compute_dtype, config.telemetry)
    versions = (torch.__version__, triton.__version__)
    digest = hashlib.sha256(f"{to_yaml(config.model)}{decisive}{gpu}{versions}".encode())
    for path in sorted(Path(nsa.ops.__path__[0]).rglob("*")):
        if path.suffix in (".py", ".json"):  # kernels, launchers and tuning tables
            digest.update(path.read_bytes())
    return Path(triton.knobs.cache.dir) / f"nsa-{digest.hexdigest()[:32]}"


def _end(process: subprocess.Popen[bytes], said: IO[bytes]) -> None:
    process.terminate()
    process.wait()
    said.close()


class _Unmultiplied(torch.autograd.Function):
    """A product of rows that gives memory as it is, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
        ctx.like = x.shape, x.dtype
        return x.new_empty(*x.shape[:-1], columns, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        shape, dtype = ctx.like
        return torch.empty(shape, dtype=dtype), None, None


class _WithoutProducts(TorchFunctionMode):
    """Leaves out PyTorch's products: which kernels are launched does not depend on their values."""

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if function is nn.functional.linear:
            x, weight = args[:2]
            dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
            return _Unmultiplied.apply(x, weight.shape[0], dtype)
        if function is nn.functional.scaled_dot_product_attention:
            q, _, v = args[:3]
            return _Unmultiplied.apply(q, v.shape[-1], q.dtype)
        return function(*args, **(kwargs or {}))


@contextmanager
def _launches_of(gpu: str, capability: tuple[int, int]) -> Iterator[list[Launched]]:
    """Within, kernels are chosen as for this GPU, and their launches are listed instead of done."""
    from triton.runtime.jit import JITFunction

    from nsa.ops._triton.tuning import default_tile, find_table, tiles_chosen_by

    launched: list[Launched] = []
    table, run, product = find_table(gpu, capability), JITFunction.run, torch.mm

    def note(kernel: Any, *args: Any, warmup: bool, **kwargs: Any) -> None:
        launched.append((kernel, args, kwargs))

    JITFunction.run = note
    # Of our operators, into which a mode does not see.
    torch.mm = lambda a, b: a.new_empty(a.shape[0], b.shape[1])  # type: ignore[assignment]
    try:
        with (
            as_on_gpu(),
            tiles_chosen_by(
                lambda key, _: (table and table.find(key)) or default_tile(key, capability),
            ),
        ):
            yield launched
    finally:
        JITFunction.run, torch.mm = run, product


def launches_of_a_step(
    config: TrainConfig,
    gpu: str,
    capability: tuple[int, int],
) -> list[Launched]:
    """The launches of a training step, one of each kind, those first that take longest to compile.

    Args:
        config: the run.
        gpu: name of the GPU, which chooses the tiles.
        capability: its compute capability, major and minor.
    """
    model, num_tokens = config.model, config.micro_batch * config.seq_len
    # Of documents there would be more; kernels of dense attention are PyTorch's in any case.
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
            with _WithoutProducts():
                attention(x, cu_seqlens=offsets, max_seqlen=config.seq_len).sum().backward()
    kinds = {_kind(*launch): launch for launch in launched}
    return sorted(kinds.values(), key=lambda launch: -len(launch[0].src))


def _kind(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Launches of one kind are served by one compiled kernel."""

    def kind(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.dtype, x.data_ptr() % 16 == 0
        if isinstance(x, int):
            return x == 1, x % 16 == 0
        if isinstance(x, tuple):
            return tuple(kind(member) for member in x)
        return (x.base.dtype, tuple(x.block_shape)) if hasattr(x, "block_shape") else type(x)

    options = {name: value for name, value in kwargs.items() if name != "grid"}
    return (
        kernel,
        tuple(kind(x) for x in args),
        tuple(sorted((name, str(value)) for name, value in options.items())),
    )


def compile_launches(launches: list[Launched], arch: int, processes: int) -> None:
    """Compile for a compute capability (two digits) into Triton's cache, in forked processes."""
    import triton

    from nsa.ops._triton.absent_gpu import AbsentGPU

    triton.runtime.driver.set_active(AbsentGPU(arch))
    global _launches
    _launches = launches
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for _ in pool.imap_unordered(_compile, range(len(launches)), chunksize=1):
            pass


_launches: list[Launched] = []  # of this process and those forked from it: kernels cannot be sent


def _compile(number: int) -> None:
    from triton.backends.nvidia import driver

    kernel, args, kwargs = _launches[number]
    compiled = kernel.warmup(*args, **kwargs)
    if hasattr(
        driver,
        "make_launcher",
    ):  # before Triton 3.7 each has a launcher in C, which is kept on disk as well
        driver.CudaLauncher(compiled.src, compiled.metadata)


def main() -> None:
    """Compile for the configuration on standard input; arguments: the GPU and its capability."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("gpu")
    parser.add_argument("capability", type=int, nargs=2)
    parser.add_argument("--stamp", type=Path, help="file that is made once all kernels are there")
    options = parser.parse_args()
    major, minor = options.capability
    torch.set_num_threads(1)  # forked processes inherit no threads
    launches = launches_of_a_step(load_config("/dev/stdin"), options.gpu, (major, minor))
    processes = max(1, min(MAX_PROCESSES, len(os.sched_getaffinity(0)) // 2))
    compile_launches(launches, 10 * major + minor, processes)
    if options.stamp is not None:
        options.stamp.parent.mkdir(parents=True, exist_ok=True)
        options.stamp.touch()


if __name__ == "__main__":
    main()
