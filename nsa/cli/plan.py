"""``nsa plan``, ``nsa configs`` and ``nsa doctor``; heavy imports are inside the functions."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Literal

from nsa import configs as shipped
from nsa.errors import check


def plan(
    config: tuple[str, ...],
    *,
    gpu: str | None = None,
    memory_gib: float | None = None,
    price_per_gpu_hour: float | None = None,
    mfu: float | None = None,
    json: bool = False,
    **settings: str,
) -> int:
    """Estimate memory, time and cost of a run.

    Print parameters, operations per token, memory of a step by part, time and cost. No GPU is
    needed. If a run does not fit into the GPU, the command names a change that makes it fit and
    ends with exit code 2:
      nsa plan 78m --gpu h200 --price-per-gpu-hour 3.5
      nsa plan 78m --gpu l40s --micro-batch 32 --accumulation 1 --global-batch 32
    Options override settings of the file, as in `nsa train`.

    Args:
        config: name of a configuration (see nsa configs) or a YAML file
        gpu: for example h200, 'NVIDIA H100 PCIe', cpu (default the GPU of this machine)
        memory_gib: memory of the GPU (default the memory of --gpu)
        price_per_gpu_hour: price for the cost, in the same currency
        mfu: assumed part of the GPU's peak, between 0 and 1
        json: print one JSON object per line
        settings: settings of the configuration
    """
    from nsa.train.load import load_config

    price = price_per_gpu_hour
    given = {"--memory-gib": memory_gib, "--price-per-gpu-hour": price, "--mfu": mfu}
    for name, value in given.items():
        check(value is None or value > 0, name, "be positive", value)
    check(mfu is None or mfu <= 1, "--mfu", "be at most 1", mfu)
    configs = {path: load_config(path, settings) for path in config}

    from nsa import plan as planning
    from nsa.bench.rows import read_rows
    from nsa.cli.bench import carried_rows

    target = planning.find_gpu(gpu, memory_gib)
    known = read_rows(carried_rows("results", "memory"))
    for path, run in configs.items():
        found = planning.make_plan(run, target, known, mfu)
        if json:
            print(dumps(found.to_json(Path(path).stem, price)))
        else:
            print("\n".join(found.lines(path, price)), flush=True)
        planning.check_plan_fits(found)
    return 0


def configs(*, folder: bool = False) -> int:
    """List the configurations that come with the package.

    Commands take them by name; their YAML files are a start for others.

    Args:
        folder: print only the folder of the files
    """
    if folder:
        print(shipped.FOLDER)
        return 0
    width = max(map(len, shipped.names()))
    for name in shipped.names():
        print(f"{name:{width}}  {shipped.summary(name)}")
    return 0


def doctor(
    *,
    shape: str | None = None,
    seq: int | None = None,
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16",
) -> int:
    """Check this machine and installation.

    Print versions, GPUs and their connections, memory, free disk, and which implementation of the
    attention operators runs on which device. If something will not work, the exit code is 1. For a
    shape, print which kernels run, with which tiles, and why; and, measured on the GPU in a few
    minutes, from which length they are faster than dense attention (cuDNN, FlashAttention 2):
      nsa doctor --shape seed --seq 65536

    Args:
        shape: seed, wide, paper or HqxHkvxDxDv; with --seq
        seq: tokens of the longest sequence, with --shape
        dtype: data type, with --shape
    """
    from nsa.cli.doctor import diagnose

    together = (shape is None) == (seq is None)
    check(together, "--shape and --seq", "be given together", (shape, seq))
    return 1 if diagnose(shape, seq or 0, dtype) else 0
