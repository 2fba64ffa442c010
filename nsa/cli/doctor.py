"""``nsa doctor``: what this machine has, what will run on it, and what will not."""

from __future__ import annotations

import platform
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from nsa import configs
from nsa.bench.points import Shape, parse_shape
from nsa.config import NSAConfig
from nsa.errors import UserError, check
from nsa.extras import CORE, EXTRAS, install_command, lacking, missing
from nsa.module import NativeSparseAttention
from nsa.ops._backend import choose_backend
from nsa.ops._capability import LEAST_CAPABILITY, is_too_old
from nsa.ops._triton.tuning import LONG_KEYS, TABLES, TileKey, TileTable, default_tile, device_table, load_table
from nsa.ops.selected.algorithm import SCATTER_THRESHOLD, always_tiled
from nsa.train import environment
from nsa.train.telemetry.throughput import utilisation_row

_MIN_FREE_GIB = 2.0  # three checkpoints of a small model, metrics and plots
_PROBE = NSAConfig(
    num_heads=2, num_kv_heads=1, head_dim=16, value_dim=16, compress_block_size=8, compress_stride=4, block_size=16,
    num_selected_blocks=4, window_size=32,
)  # fmt: skip
_PROBE_TOKENS, _PROBE_WIDTH = 256, 32


class Problem(str):
    """A line about something that will not work."""


@dataclass(frozen=True)
class Question:
    """What would run for a shape?

    Attributes:
        shape: heads and their sizes.
        seq_len: tokens of the longest sequence.
        dtype: ``bf16``, ``fp16`` or ``fp32``.
    """

    shape: Shape
    seq_len: int
    dtype: str = "bf16"

    @classmethod
    def of(cls, shape: str, seq_len: int, dtype: str) -> Question:
        """From the words of a command line.

        Raises:
            UserError: no such shape, or no tokens.
        """
        check(seq_len > 0, "nsa doctor", "--seq", "be positive", seq_len)
        return cls(parse_shape(shape), seq_len, dtype)


def diagnose(folder: Path | None = None, question: Question | None = None) -> int:
    """Print what there is.

    Args:
        folder: of configurations to check; None takes those of the package.
        question: a shape to answer for, too.

    Returns:
        Number of problems.
    """
    problems: list[str] = []
    for title, lines in _sections(folder, question):
        print(title)
        for line in lines:
            is_problem = isinstance(line, Problem)
            print(f"  {'PROBLEM: ' if is_problem else ''}{line}", flush=True)
            problems += [line] * is_problem
    print(f"{len(problems)} problem{'s' * (len(problems) != 1)} found" if problems else "no problem found")
    return len(problems)


def _sections(folder: Path | None, question: Question | None) -> Iterator[tuple[str, Iterator[str]]]:
    yield "versions", _versions()
    yield "extras", _extras()
    yield "machine", _machine()
    yield "GPUs", _gpus()
    yield "attention operators", _operators()
    yield "tiles of the kernels", _tiles()
    if question is not None:
        heads = f"{question.shape.num_heads} heads in {question.shape.num_kv_heads} groups"
        sizes = f"D {question.shape.head_dim}, Dv {question.shape.value_dim}"
        yield f"{heads}, {sizes}, {question.dtype}, sequences of up to {question.seq_len:,} tokens", _kernels(question)
    yield "configurations", _configs(folder)


def _versions() -> Iterator[str]:
    yield f"python {platform.python_version()} on {platform.platform()}"
    for name in environment.RECORDED:
        found = environment.version(name)
        if found is None and name not in CORE:
            continue  # of an extra
        if name == "triton" and not found and sys.platform != "linux":
            yield f"no triton: there is none for {sys.platform}; operators run in eager PyTorch"
            continue
        yield f"{name} {found}" if found else Problem(f"{name} is not installed. Install it with: pip install {name}")
    code = environment.code_version()
    yield (
        f"commit {code['commit']}{', with changes' if code['dirty'] else ''}"
        if code["commit"]
        else f"commit unknown: {code['note']}"
    )


def _extras() -> Iterator[str]:
    """Which extras are installed; commands that need another one refuse and name it."""
    for extra in EXTRAS:
        absent = missing(extra)
        without = f"without {', '.join(absent)}. Install with: {install_command(extra)}"
        yield f"{extra}: {without if absent else 'installed'}"


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
        if is_too_old(index):
            least = ".".join(map(str, LEAST_CAPABILITY))
            needed = f"the Triton kernels need compute capability {least} or above"
            yield Problem(f"{index}: {gpu['name']} is too old: {needed}. Train with: --device cpu")
    yield from _utilisation(len(found["gpus"]))
    yield from _connections(len(found["gpus"]))


def _utilisation(num_gpus: int) -> Iterator[str]:
    """Whether rows of metrics will say how busy the GPUs are."""
    version = environment.version("nvidia-ml-py")
    if version is None:
        yield "runs will not record gpu_utilisation_percent: no nvidia-ml-py. Install it with: pip install nvidia-ml-py"
        return
    for index in range(num_gpus):
        row = utilisation_row(torch.device("cuda", index))
        said = f"{row['gpu_utilisation_percent']:.0f}% busy" if row else "the driver keeps no gpu_utilisation_percent"
        yield f"{index}: {said} (nvidia-ml-py {version})"


def _connections(num_gpus: int) -> Iterator[str]:
    """How GPUs are connected to the host and to each other."""
    for index, (generation, width) in enumerate(environment.pcie_links() or []):
        yield f"{index}: PCIe generation {generation}, {width} lanes"
    if num_gpus < 2:
        return
    topology = environment.nvidia_topology()
    if topology is None:
        yield "connections unknown: nvidia-smi topo -m gave nothing"
        return
    for (first, second), code in environment.gpu_links(topology).items():
        peers = torch.cuda.can_device_access_peer(first, second)
        yield f"GPU {first} to GPU {second}: {_link_meaning(code)}; direct access {'yes' if peers else 'no'}"
    yield from topology.splitlines()


def _link_meaning(code: str) -> str:
    """An entry of the driver's matrix in words."""
    if code.startswith("NV"):
        return f"NVLink, {code[2:]} links"
    ways = {
        "PIX": "PCIe, one switch", "PXB": "PCIe, several switches", "PHB": "PCIe through the CPU's bridge",
        "NODE": "PCIe through the bridges of one NUMA node", "SYS": "PCIe and the link between CPUs",
    }  # fmt: skip
    return ways.get(code, code)


def _operators() -> Iterator[str]:
    """Which implementation runs on each device and why, shown by running it."""
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        if device == "cuda" and is_too_old(torch.cuda.current_device()):
            yield "cuda: nothing, the GPU is too old for the Triton kernels"
            continue
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


def _kernels(question: Question) -> Iterator[str]:
    """Which kernels and algorithms run for a shape, with which tiles, and why."""
    config = question.shape.config()
    yield "on a CPU: eager PyTorch"
    lengths = (question.seq_len, question.seq_len, config.block_size)
    tiled = always_tiled("auto", config.group_size, config.num_selected_blocks, *lengths)
    limit = f"{SCATTER_THRESHOLD * config.num_selected_blocks:g} blocks or fewer, the mean over tiles of neighbouring queries"
    if tiled:
        yield f"selected branch: the tiled algorithm, because in sequences so short a tile chooses {limit}"
    else:
        yield f"selected branch: decided on the GPU in each call: tiled while a tile chooses {limit}; otherwise gathered"
        yield "  (in training the metrics selected_tiled_calls and selected_gathered_calls say what ran)"
    for gpu, capability, table in _gpus_or_tables():
        yield f"{gpu}:"
        for kernel in kernel_names(question.seq_len, tiled, config):
            yield f"  {kernel}: {_tile_line(kernel, question, capability, table)}"


def kernel_names(seq_len: int, tiled: bool, config: NSAConfig) -> list[str]:
    """Kernels of whole attention that have tiles, forward and backward, as tiles are looked up.

    Args:
        seq_len: tokens of the longest sequence.
        tiled: whether the tiled algorithm of the selected branch runs whatever is chosen.
        config: the sparse pattern.
    """
    num_compressed = max((seq_len - config.compress_block_size) // config.compress_stride + 1, 0)
    long = "_long" if num_compressed >= LONG_KEYS else ""
    names = [f"compressed_attention_{kind}{long}" for kind in ("fwd", "dq", "dkv")]
    names += ["select_blocks", "selected_attention_fwd", "selected_attention_dq", "selected_attention_dkv"]
    names += [] if tiled else ["selected_gather_fwd", "selected_gather_dkv"]
    return [*names, *(f"window_attention_{kind}" for kind in ("fwd", "dq", "dkv"))]


def _gpus_or_tables() -> Iterator[tuple[str, tuple[int, int] | None, TileTable | None]]:
    """The GPUs of this machine with their tables; without one, the GPUs that have a table."""
    for index in range(torch.cuda.device_count()):
        table, capability = device_table(index)
        yield f"on GPU {index}, {torch.cuda.get_device_name(index)}", capability, table
    if not torch.cuda.device_count():
        for table in map(load_table, sorted(TABLES.glob("*.json"))):
            yield f"no GPU is here; on the {table.gpu}", None, table


def _tile_line(kernel: str, question: Question, capability: tuple[int, int] | None, table: TileTable | None) -> str:
    size = max(question.shape.head_dim, question.shape.value_dim)
    key = TileKey(kernel, size, 4 if question.dtype == "fp32" else 2)
    found = None if table is None else table.find(key)
    tile = found or default_tile(key, capability)
    loads = ", loads by TMA where tensors are aligned to 16 bytes" if tile.tma else ""
    if found is None or table is None:
        version = "the smallest GPU" if capability is None else f"compute capability {'.'.join(map(str, capability))}"
        why = f"default of {version}"
    else:
        why = f"measured on {table.gpu}" if key in table.rows else f"measured on {table.gpu} for larger heads"
    return f"{tile.rows} rows, {tile.keys} keys, {tile.warps} warps, {tile.stages} stages{loads} ({why})"


def _configs(folder: Path | None) -> Iterator[str]:
    chosen = configs.FOLDER if folder is None else folder
    if not chosen.is_dir():
        yield Problem(f"no folder {chosen}")
        return
    if lacking("train"):
        yield "not loaded: that needs the extra train"
        return
    from nsa.train.load import load_config

    paths = sorted(chosen.glob("*.yaml"))
    for path in paths:
        try:
            config = load_config(path)
        except UserError as error:
            yield Problem(str(error))
        else:
            step_tokens = config.global_batch * config.seq_len
            name = path.stem if folder is None else path
            yield f"{name}: loads; {config.model.attention}, {config.steps:,} steps of {step_tokens:,} tokens"
    if not paths:
        yield Problem(f"no *.yaml in {chosen}")
