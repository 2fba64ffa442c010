"""``nsa doctor``: what this machine has, what will run on it, and what will not."""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from nsa.config import NSAConfig
from nsa.errors import UserError
from nsa.module import NativeSparseAttention
from nsa.ops._boundary import choose_backend
from nsa.ops._triton.tuning import device_table
from nsa.train import environment
from nsa.train.load import load_config

_MIN_FREE_GIB = 2.0  # three checkpoints of a small model, metrics and plots
_PROBE = NSAConfig(
    num_heads=2, num_kv_heads=1, head_dim=16, value_dim=16, compress_block_size=8, compress_stride=4, block_size=16,
    num_selected_blocks=4, window_size=32,
)  # fmt: skip
_PROBE_TOKENS, _PROBE_WIDTH = 256, 32


class Problem(str):
    """A line about something that will not work."""


def diagnose(configs: Path | None = None) -> int:
    """Print what there is.

    Args:
        configs: folder of configurations to check; None takes ``configs`` where there is one.

    Returns:
        Number of problems.
    """
    problems: list[str] = []
    for title, lines in _sections(configs):
        print(title)
        for line in lines:
            is_problem = isinstance(line, Problem)
            print(f"  {'PROBLEM: ' if is_problem else ''}{line}", flush=True)
            problems += [line] * is_problem
    print(f"{len(problems)} problem{'s' * (len(problems) != 1)} found" if problems else "no problem found")
    return len(problems)


def _sections(configs: Path | None) -> Iterator[tuple[str, Iterator[str]]]:
    yield "versions", _versions()
    yield "machine", _machine()
    yield "GPUs", _gpus()
    yield "attention operators", _operators()
    yield "tiles of the kernels", _tiles()
    yield "configurations", _configs(configs)


def _versions() -> Iterator[str]:
    yield f"python {platform.python_version()} on {platform.platform()}"
    for name in environment.RECORDED:
        found = environment.version(name)
        yield f"{name} {found}" if found else Problem(f"{name} is not installed. Install it with: pip install {name}")
    code = environment.code_version()
    yield (
        f"commit {code['commit']}{', with changes' if code['dirty'] else ''}"
        if code["commit"]
        else f"commit unknown: {code['note']}"
    )


def _machine() -> Iterator[str]:
    cpu = environment.cpu()
    yield f"{cpu['cores_count']} CPU cores, {cpu['memory_gib']} GiB of memory, {torch.get_num_threads()} threads for PyTorch"
    free_gib = shutil.disk_usage(Path.cwd()).free / 2**30
    line = f"{free_gib:.1f} GiB free on the disk of {Path.cwd()}"
    yield line if free_gib >= _MIN_FREE_GIB else Problem(f"{line}; a small run takes up to {_MIN_FREE_GIB:.0f} GiB")


def _gpus() -> Iterator[str]:
    found = environment.cuda()
    if found is None:
        built = (
            "PyTorch was built without CUDA"
            if torch.version.cuda is None
            else f"PyTorch for CUDA {torch.version.cuda} finds none"
        )
        driver = environment.nvidia_driver()
        if driver is None:
            yield f"none: {built}; training runs on the CPU"
        else:
            yield Problem(
                f"an NVIDIA driver ({driver}) is there, but {built}. Install the CUDA build of PyTorch for that driver."
            )
        return
    yield f"driver {found['driver']}, CUDA {found['runtime']}, cuDNN {found['cudnn']}"
    for index, gpu in enumerate(found["gpus"]):
        free, total = torch.cuda.mem_get_info(index)
        yield (
            f"{index}: {gpu['name']}, compute capability {gpu['compute_capability']}, {gpu['multiprocessors_count']} "
            f"multiprocessors, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        )
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        yield Problem("no bf16 arithmetic on this GPU. Train with: --compute-dtype fp32")
    if len(found["gpus"]) > 1:
        topology = environment.nvidia_topology()
        yield from topology.splitlines() if topology else ["topology unknown: nvidia-smi topo -m gave nothing"]


def _operators() -> Iterator[str]:
    """Which implementation runs on each device and why, shown by running it."""
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        layer = NativeSparseAttention(_PROBE_WIDTH, _PROBE).to(device)
        x = torch.randn(_PROBE_TOKENS, _PROBE_WIDTH, device=device)
        begin = time.perf_counter()
        out = layer(x)
        out.sum().backward()
        finite = bool(out.isfinite().all())
        elapsed_ms = 1000 * (time.perf_counter() - begin)
        what = {"reference": "eager PyTorch", "triton": "Triton kernels"}[choose_backend("nsa doctor", "auto", x)]
        yield f"{device}: {what}. A first forward and backward of {_PROBE_TOKENS} tokens took {elapsed_ms:.0f} ms."
        if not finite:
            yield Problem(f"the attention layer gave values that are not finite on {device}")


def _tiles() -> Iterator[str]:
    """Which tuning table each GPU takes."""
    for index in range(torch.cuda.device_count()):
        table, capability = device_table(index)
        if table is None:
            where = f"defaults of compute capability {'.'.join(map(str, capability))}. Measure better ones with: nsa bench tune"
        else:
            where = f"{len(table.rows)} measured on {table.gpu}; defaults for the rest"
        yield f"GPU {index}, {torch.cuda.get_device_name(index)}: {where}"
    if not torch.cuda.device_count():
        yield "none: no GPU"


def _configs(folder: Path | None) -> Iterator[str]:
    chosen = Path("configs") if folder is None else folder
    if not chosen.is_dir():
        yield f"no folder {chosen} here" if folder is None else Problem(f"no folder {chosen}")
        return
    paths = sorted(chosen.glob("*.yaml"))
    for path in paths:
        try:
            config = load_config(path)
        except UserError as error:
            yield Problem(str(error))
        else:
            step_tokens = config.global_batch * config.seq_len
            yield f"{path}: loads; {config.model.attention}, {config.steps:,} steps of {step_tokens:,} tokens"
    if not paths:
        yield f"no *.yaml in {chosen}" if folder is None else Problem(f"no *.yaml in {chosen}")
