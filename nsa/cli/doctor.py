"""``nsa doctor``: a report on this machine and on the kernels that run on it."""

from __future__ import annotations

import platform
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from nsa.bench.cases import parse_shape
from nsa.config import NSAConfig
from nsa.errors import check
from nsa.extras import CORE, EXTRAS, install_command, missing
from nsa.module import NativeSparseAttention
from nsa.ops._backend import LEAST_CAPABILITY, choose_backend, is_too_old
from nsa.ops._triton.tuning import (
    LONG_KEYS,
    TABLES,
    TileKey,
    TileTable,
    default_tile,
    device_table,
    load_table,
)
from nsa.ops.selected.types import SCATTER_THRESHOLD, always_tiled
from nsa.train import environment
from nsa.train.telemetry.throughput import utilisation_row

_MIN_FREE_GIB = 2.0  # three checkpoints of a small model, metrics and plots
_PROBE = NSAConfig(
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    value_dim=16,
    compress_block_size=8,
    compress_stride=4,
    block_size=16,
    num_selected_blocks=4,
    window_size=32,
)
_PROBE_TOKENS, _PROBE_WIDTH = 256, 32
Lines = Iterator[str]


class Problem(str):
    """A line about something that does not work."""


def diagnose(shape: str | None = None, seq_len: int = 0, dtype: str = "bf16") -> int:
    """Print the report.

    Args:
        shape: also report which kernels run for these heads, see
            :func:`nsa.bench.cases.parse_shape`.
        seq_len: tokens of the longest sequence, with ``shape``.
        dtype: ``bf16``, ``fp16`` or ``fp32``, with ``shape``.

    Returns:
        Number of problems.
    """
    sections = {
        "versions": _versions(),
        "extras": _extras(),
        "machine": _machine(),
        "GPUs": _gpus(),
        "attention operators": _operators(),
        "tiles of the kernels": _tiles(),
    }
    if shape is not None:
        check(seq_len > 0, "nsa doctor", "--seq", "be positive", seq_len)
        config = parse_shape(shape)
        heads = f"{config.num_heads} heads in {config.num_kv_heads} groups"
        sizes = f"D {config.head_dim}, Dv {config.value_dim}"
        title = f"{heads}, {sizes}, {dtype}, sequences of up to {seq_len:,} tokens"
        sections[title] = _kernels(config, seq_len, dtype)
    count = 0
    for title, lines in sections.items():
        print(title)
        for line in lines:
            is_problem = isinstance(line, Problem)
            print(f"  {'PROBLEM: ' * is_problem}{line}", flush=True)
            count += is_problem
    print(f"{count} problem{'s' * (count != 1)} found" if count else "no problem found")
    return count


def _versions() -> Lines:
    yield f"python {platform.python_version()} on {platform.platform()}"
    for name in environment.RECORDED:
        found = environment.version(name)
        if found is not None:
            yield f"{name} {found}"
        elif name == "triton" and sys.platform != "linux":
            yield f"no triton: there is none for {sys.platform}; operators run in eager PyTorch"
        elif name in CORE:  # the rest are in an extra
            yield Problem(f"{name} is not installed. Install it with: pip install {name}")
    code = environment.code_version()
    changed = ", with changes" if code["dirty"] else ""
    unknown = f"commit unknown: {code['note']}"
    yield f"commit {code['commit']}{changed}" if code["commit"] else unknown


def _extras() -> Lines:
    """Extras that are installed. A command without its extra ends with an error that names it."""
    for extra in EXTRAS:
        absent = ", ".join(missing(extra))
        without = f"without {absent}. Install with: {install_command(extra)}"
        yield f"{extra}: {without if absent else 'installed'}"


def _machine() -> Lines:
    cpu = environment.cpu()
    memory, threads = f"{cpu['memory_gib']} GiB of memory", torch.get_num_threads()
    yield f"{cpu['cores_count']} CPU cores, {memory}, {threads} threads for PyTorch"
    free_gib = shutil.disk_usage(Path.cwd()).free / 2**30
    line = f"{free_gib:.1f} GiB free on the disk of {Path.cwd()}"
    short = Problem(f"{line}; a small run takes up to {_MIN_FREE_GIB:.0f} GiB")
    yield line if free_gib >= _MIN_FREE_GIB else short


def _gpus() -> Lines:
    found = environment.cuda()
    if found is None:
        built = f"PyTorch for CUDA {torch.version.cuda} finds none"
        if torch.version.cuda is None:
            built = "PyTorch was built without CUDA"
        driver = environment.nvidia_driver()
        what = f"an NVIDIA driver ({driver}) is installed, but {built}"
        advice = "Install the CUDA build of PyTorch for that driver."
        none = f"none: {built}; training runs on the CPU"
        yield none if driver is None else Problem(f"{what}. {advice}")
        return
    yield f"driver {found['driver']}, CUDA {found['runtime']}, cuDNN {found['cudnn']}"
    count = len(found["gpus"])
    for index, gpu in enumerate(found["gpus"]):
        free, total = torch.cuda.mem_get_info(index)
        size = f"{gpu['multiprocessors_count']} multiprocessors"
        memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        capability = f"compute capability {gpu['compute_capability']}"
        yield f"{index}: {gpu['name']}, {capability}, {size}, {memory}"
        if is_too_old(index):
            needed = f"the Triton kernels need compute capability {_dotted(LEAST_CAPABILITY)}"
            old = f"{index}: {gpu['name']} is too old"
            yield Problem(f"{old}: {needed} or above. Train with: --device cpu")
    yield from _utilisation(count)
    yield from _connections(count)


def _dotted(capability: tuple[int, ...]) -> str:
    return ".".join(map(str, capability))


def _utilisation(num_gpus: int) -> Lines:
    """Whether rows of metrics will contain the utilisation of the GPUs."""
    version = environment.version("nvidia-ml-py")
    if version is None:
        lost = "runs will not record gpu_utilisation_percent: no nvidia-ml-py"
        yield f"{lost}. Install it with: pip install nvidia-ml-py"
        return
    for index in range(num_gpus):
        row = utilisation_row(torch.device("cuda", index))
        said = "the driver keeps no gpu_utilisation_percent"
        if row:
            said = f"{row['gpu_utilisation_percent']:.0f}% busy"
        yield f"{index}: {said} (nvidia-ml-py {version})"


def _connections(num_gpus: int) -> Lines:
    """Connections of the GPUs to the host and to each other."""
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
        yield f"GPU {first} to GPU {second}: {code}; direct access {'yes' if peers else 'no'}"
    yield from topology.splitlines()


def _operators() -> Lines:
    """The implementation that runs on each device, shown by running it."""
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        if device == "cuda" and is_too_old(torch.cuda.current_device()):
            yield "cuda: none, the GPU is too old for the Triton kernels"
            continue
        layer = NativeSparseAttention(_PROBE_WIDTH, _PROBE).to(device)
        x = torch.randn(_PROBE_TOKENS, _PROBE_WIDTH, device=device)
        begin = time.perf_counter()
        out = layer(x)
        out.sum().backward()
        finite = bool(out.isfinite().all())
        took = f"{_PROBE_TOKENS} tokens took {1000 * (time.perf_counter() - begin):.0f} ms"
        is_eager = choose_backend("nsa doctor", "auto", x) == "reference"
        what = "eager PyTorch" if is_eager else "Triton kernels"
        yield f"{device}: {what}. A first forward and backward of {took}."
        if not finite:
            yield Problem(f"the attention layer gave values that are not finite on {device}")


def _tiles() -> Lines:
    """The tuning table of each GPU."""
    for index in range(torch.cuda.device_count()):
        table, capability = device_table(index)
        where = f"defaults of compute capability {_dotted(capability)}"
        where += ". Measure better ones with: nsa bench tune"
        if table is not None:
            where = f"{len(table.rows)} measured on {table.gpu}; defaults for the others"
        yield f"GPU {index}, {torch.cuda.get_device_name(index)}: {where}"
    if not torch.cuda.device_count():
        yield "none: no GPU"


def _kernels(config: NSAConfig, seq_len: int, dtype: str) -> Lines:
    """Kernels and algorithms that run for a shape, with their tiles, and why."""
    yield "on a CPU: eager PyTorch"
    n, lengths = config.num_selected_blocks, (seq_len, seq_len, config.block_size)
    tiled = always_tiled("auto", config.group_size, n, *lengths)
    limit = f"{SCATTER_THRESHOLD * n:g} blocks or fewer"
    if tiled:
        why = f"because in sequences so short a tile chooses {limit}"
        yield f"selected branch: the tiled algorithm, {why}, the mean over tiles"
    else:
        yield "selected branch: decided on the GPU in each call (in training the metrics"
        yield "  selected_tiled_calls and selected_gathered_calls say what ran):"
        yield f"  tiled while a tile chooses {limit}, the mean over tiles; otherwise gathered"
    for gpu, capability, table in _gpus_or_tables():
        yield f"{gpu}:"
        for kernel in kernel_names(seq_len, tiled, config):
            size, item_size = max(config.head_dim, config.value_dim), 4 if dtype == "fp32" else 2
            yield f"  {kernel}: {_tile_line(TileKey(kernel, size, item_size), capability, table)}"


def kernel_names(seq_len: int, tiled: bool, config: NSAConfig) -> list[str]:
    """Names in tuning tables of the kernels of attention, forward and backward.

    Args:
        seq_len: tokens of the longest sequence.
        tiled: whether the selected branch always runs the tiled algorithm.
        config: the sparse pattern.
    """
    num_compressed = max((seq_len - config.compress_block_size) // config.compress_stride + 1, 0)
    long = "_long" if num_compressed >= LONG_KEYS else ""
    names = [f"compressed_attention_{kind}{long}" for kind in ("fwd", "dq", "dkv")]
    names += ["select_blocks", *(f"selected_attention_{kind}" for kind in ("fwd", "dq", "dkv"))]
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


def _tile_line(
    key: TileKey,
    capability: tuple[int, int] | None,
    table: TileTable | None,
) -> str:
    version = f"compute capability {_dotted(capability)}" if capability else "the smallest GPU"
    tile, why = default_tile(key, capability), f"default of {version}"
    found = None if table is None else table.find(key)
    if found is not None and table is not None:
        larger = "" if key in table.rows else " for larger heads"
        tile, why = found, f"measured on {table.gpu}{larger}"
    loads = ", loads by TMA where tensors are aligned to 16 bytes" if tile.tma else ""
    counts = f"{tile.rows} rows, {tile.keys} keys, {tile.warps} warps, {tile.stages} stages"
    return f"{counts}{loads} ({why})"
