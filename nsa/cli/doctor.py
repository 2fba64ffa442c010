"""``nsa doctor``: a report on this machine and on the kernels that run on it."""

from __future__ import annotations

import platform
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from nsa.bench.cases import CASES, MODES, Point, batch_of, make_tensors, parse_shape, prepare
from nsa.bench.clock import Subject, measure, verdict
from nsa.config import NSAConfig
from nsa.errors import check
from nsa.extras import CORE, EXTRAS, install_command, missing
from nsa.module import NativeSparseAttention
from nsa.ops._backend import LEAST_CAPABILITY, choose_backend, is_too_old
from nsa.ops._layout import always_tiled
from nsa.ops._triton.tuning import (
    LONG_KEYS,
    TABLES,
    TileKey,
    TileTable,
    default_tile,
    device_table,
    load_table,
    scatter_of,
)
from nsa.train import environment

_PROBE = NSAConfig(num_heads=2, num_kv_heads=1, head_dim=16, value_dim=16)
_PROBE_TOKENS, _PROBE_WIDTH = 256, 32
# Lengths whose speed is compared with dense attention are doubled from this one, tokens.
SHORTEST = 1024
_DENSE = ("dense-cudnn", "dense-fa2")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Lines = Iterator[str]


class Problem(str):
    """A line about something that does not work."""


def diagnose(shape: str | None, seq_len: int, dtype: str) -> int:
    """Print the report.

    Args:
        shape: also report which kernels run for these heads, see
            :func:`nsa.bench.cases.parse_shape`, and from which length they are faster than dense
            attention.
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
        check(seq_len > 0, "--seq", "be positive", seq_len)
        config = parse_shape(shape)
        heads = f"{config.num_heads} heads in {config.num_kv_heads} groups"
        sizes = f"D {config.head_dim}, Dv {config.value_dim}"
        title = f"{heads}, {sizes}, {dtype}, sequences of up to {seq_len:,} tokens"
        sections[title] = _kernels(config, seq_len, dtype)
        sections["speed compared with dense attention"] = _speed(shape, seq_len, dtype)
    count = 0
    for title, lines in sections.items():
        print(title)
        for line in lines:
            is_problem = isinstance(line, Problem)
            print(f"  {'PROBLEM: ' * is_problem}{line}", flush=True)
            count += is_problem
    print(f"{count or 'no'} problem{'s' * (count > 1)} found")
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
    cpu, threads = environment.cpu(), torch.get_num_threads()
    memory = f"{cpu['memory_gib']} GiB of memory"
    yield f"{cpu['cores_count']} CPU cores, {memory}, {threads} threads for PyTorch"
    free_gib = shutil.disk_usage(Path.cwd()).free / 2**30
    yield f"{free_gib:.1f} GiB free on the disk of {Path.cwd()}"


def _gpus() -> Lines:
    found = environment.cuda()
    if found is None:
        built = "PyTorch was built without CUDA"
        if torch.version.cuda is not None:
            built = f"PyTorch for CUDA {torch.version.cuda} finds none"
        driver = environment.nvidia_driver()
        if driver is None:
            yield f"none: {built}; training runs on the CPU"
        else:
            what = f"an NVIDIA driver ({driver}) is installed, but {built}"
            yield Problem(f"{what}. Install the CUDA build of PyTorch for that driver.")
        return
    yield f"driver {found['driver']}, CUDA {found['runtime']}, cuDNN {found['cudnn']}"
    for index, gpu in enumerate(found["gpus"]):
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(index))
        size = f"{gpu['multiprocessors_count']} multiprocessors"
        capability = f"compute capability {gpu['compute_capability']}"
        name = f"{index}: {gpu['name']}"
        yield f"{name}, {capability}, {size}, {free:.1f} of {total:.1f} GiB free"
        if is_too_old(index):
            needed = f"the Triton kernels need compute capability {_dotted(LEAST_CAPABILITY)}"
            yield Problem(f"{name} is too old: {needed} or above. Train with: --device cpu")
    yield from _connections(len(found["gpus"]))


def _dotted(capability: tuple[int, ...]) -> str:
    return ".".join(map(str, capability))


def _connections(num_gpus: int) -> Lines:
    """Connections of the GPUs to the host and to each other."""
    for index, (generation, width) in enumerate(environment.pcie_links() or []):
        yield f"{index}: PCIe generation {generation}, {width} lanes"
    if num_gpus < 2:
        return
    topology = environment.nvidia_topology()
    if topology is None:
        yield "connections unknown: nvidia-smi topo -m returned nothing"
    else:
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
        is_eager = choose_backend("auto", x) == "reference"
        what = "eager PyTorch" if is_eager else "Triton kernels"
        yield f"{device}: {what}. A first forward and backward of {took}."
        if not finite:
            yield Problem(f"the attention layer returned values that are not finite on {device}")


def _tables() -> Iterator[tuple[str, tuple[int, int] | None, TileTable | None]]:
    """Name, compute capability and tuning table of each GPU."""
    for index in range(torch.cuda.device_count()):
        table, capability = device_table(index)
        yield f"GPU {index}, {torch.cuda.get_device_name(index)}", capability, table


def _tiles() -> Lines:
    """The tuning table of each GPU."""
    for name, capability, table in _tables():
        where = f"defaults of compute capability {_dotted(capability or ())}"
        where += ". Measure better ones with: nsa bench tune"
        if table is not None:
            where = f"{len(table.rows)} measured on {table.gpu}; defaults for the others"
        yield f"{name}: {where}"
    if not torch.cuda.device_count():
        yield "none: no GPU"


def _kernels(config: NSAConfig, seq_len: int, dtype: str) -> Lines:
    """Kernels and algorithms that run for a shape, with their tiles, and the reason."""
    yield "on a CPU: eager PyTorch"
    n, lengths = config.num_selected_blocks, (seq_len, seq_len, config.block_size)
    size, item_size = max(config.head_dim, config.value_dim), 4 if dtype == "fp32" else 2
    where = (size, item_size, 0 if torch.cuda.is_available() else None)
    forward, dq = (scatter_of(f"selected_attention_{kind}", *where) for kind in ("fwd", "dq"))
    tiled = always_tiled("auto", config.group_size, n, *lengths, forward)
    limit = f"{forward * n:g} blocks or fewer"
    if tiled:
        why = f"because in sequences so short a tile selects {limit}"
        yield f"selected branch: the tiled algorithm, {why}, the mean over tiles"
    else:
        yield "selected branch: decided on the GPU in each call (in training the metrics"
        yield "  selected_tiled_calls and selected_gathered_calls count the calls):"
        yield f"  tiled while a tile selects {limit} (backward: {dq * n:g}), the mean over tiles;"
        yield "  otherwise gathered"
    shipped = [load_table(path) for path in sorted(TABLES.glob("*.json"))]
    without = [(f"no GPU; {table.gpu}", None, table) for table in shipped]
    for gpu, capability, table in [*_tables()] or without:
        yield f"{gpu}:"
        for kernel in kernel_names(seq_len, tiled, config):
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


def _speed(shape: str, seq_len: int, dtype: str) -> Lines:
    """From which length whole attention is faster than dense attention, measured on the GPU."""
    if not torch.cuda.is_available():
        yield "not measured: no GPU"
        return
    if absent := missing("bench"):
        command = install_command("bench")
        yield f"not measured: without {', '.join(absent)}. Install with: {command}"
        return
    lengths, config = [SHORTEST], parse_shape(shape)
    while 2 * lengths[-1] <= seq_len:
        lengths.append(2 * lengths[-1])
    for mode, name in zip(MODES, ("forward", "forward and backward"), strict=True):
        gains, device = dict[int, float](), torch.device("cuda", torch.cuda.current_device())
        for length in lengths:
            batch = batch_of(shape, length, None)
            point = Point(shape, config, length, batch, "random", _DTYPES[dtype], device)
            nsa, *dense = (attention_ms(each, point, mode) for each in ("nsa", *_DENSE))
            if nsa is not None and any(dense):
                gains[length] = min(filter(None, dense)) / nsa
        last_slower = max((length for length, gain in gains.items() if gain <= 1), default=0)
        faster = [f"faster from {length:,} tokens" for length in gains if length > last_slower]
        each = ", ".join(f"{length:,}: {gain:.2f}x" for length, gain in gains.items())
        yield f"{name}: {[*faster, 'not faster'][0]} ({each or 'dense attention did not run'})"
    yield "the attention of the configuration runs at every length: none falls back to the other"


def attention_ms(provider: str, point: Point, mode: str) -> float | None:
    """Time of whole attention, ms; None if it cannot run here.

    Args:
        provider: a key of :data:`nsa.bench.attention.PROVIDERS`.
        point: heads, length, dtype and device.
        mode: ``fwd`` or ``fwd_bwd``.
    """
    from nsa.bench.attention import PROVIDERS  # needs packages of an extra

    def make() -> Subject:
        problem = prepare(CASES["attention"], make_tensors(point), point, "reference")
        return Subject(PROVIDERS[provider].work(problem, mode).run, lambda: verdict(True))

    ms: float | None = measure(make, point.device, is_ours=provider == "nsa").get("ms_p50")
    return ms


def _tile_line(
    key: TileKey,
    capability: tuple[int, int] | None,
    table: TileTable | None,
) -> str:
    version = f"compute capability {_dotted(capability)}" if capability else "the smallest GPU"
    tile, why = default_tile(key, capability), f"default of {version}"
    if table is not None and (found := table.find(key)) is not None:
        larger = "" if key in table.rows else " for larger heads"
        tile, why = found, f"measured on {table.gpu}{larger}"
    loads = ", loads by TMA if tensors are aligned to 16 bytes" if tile.tma else ""
    counts = f"{tile.rows} rows, {tile.keys} keys, {tile.warps} warps, {tile.stages} stages"
    return f"{counts}{loads} ({why})"
