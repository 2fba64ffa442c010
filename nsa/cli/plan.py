"""``nsa plan``; everything heavy is imported when it runs."""

from __future__ import annotations

from collections.abc import Mapping
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING

from nsa.errors import check

if TYPE_CHECKING:
    from nsa.train.config import TrainConfig


def plan(
    config: tuple[str, ...],
    *,
    gpu: str | None = None,
    memory_gib: float | None = None,
    price_per_gpu_hour: float | None = None,
    mfu: float | None = None,
    rows: tuple[str, ...] = (),
    json: bool = False,
    measure: bool = False,
    **settings: str,
) -> int:
    """Say what a run will need before it runs.

    Parameters, operations of a token, memory of a step by part, time and cost. No GPU is needed. A
    run that does not fit into the GPU is refused (exit code 2), with a change under which it fits.
    For example
      nsa plan 78m --gpu h200 --price-per-gpu-hour 3.5
      nsa plan 78m --gpu l40s --micro-batch 32 --accumulation 1 --global-batch 32
      nsa plan 78m 78m-dense --measure          (on a GPU: planned and measured memory)
    Every setting of the file can be given here too, as of `nsa train`.

    Args:
        config: name of a configuration (see nsa configs) or a YAML file
        gpu: for example h200, 'NVIDIA H100 PCIe', cpu (default that of this machine)
        memory_gib: memory of the GPU (default that of --gpu)
        price_per_gpu_hour: gives the cost, in the same currency
        mfu: share of the GPU's peak to reckon with, between 0 and 1
        rows: files or folders of measured rows (default those that the package carries)
        json: a JSON object a line
        measure: run a few steps and compare their memory with the plan's
        settings: of the configuration
    """
    from nsa.train.load import load_config

    price = price_per_gpu_hour
    given = {"--memory-gib": memory_gib, "--price-per-gpu-hour": price, "--mfu": mfu}
    for name, value in given.items():
        check(value is None or value > 0, "nsa plan", name, "be positive", value)
    check(mfu is None or mfu <= 1, "nsa plan", "--mfu", "be at most 1", mfu)
    configs = {path: load_config(path, settings) for path in config}
    if measure:
        return _measure(configs)

    from nsa.bench.rows import read_rows
    from nsa.cli.bench import carried_rows, row_files
    from nsa.plan.gpus import find_gpu
    from nsa.plan.plan import make_plan, refuse_what_does_not_fit
    from nsa.plan.report import plan_json, plan_lines

    target = find_gpu(gpu, memory_gib)
    files = row_files("nsa plan", "--rows", rows) if rows else carried_rows("results", "memory")
    measured = read_rows(files)
    for path, run in configs.items():
        found = make_plan(run, target, measured, mfu)
        if json:
            print(dumps(plan_json(Path(path).stem, found, price)))
        else:
            print("\n".join(plan_lines(path, found, price)), flush=True)
        refuse_what_does_not_fit(found)
    return 0


def _measure(configs: Mapping[str, TrainConfig]) -> int:
    from nsa.plan.measure import compare
    from nsa.train.execution.precision import choose_device

    passed = True
    for path, config in configs.items():
        line, near_enough = compare(config, choose_device(config.device))
        print(f"{path}: {line}", flush=True)
        passed = passed and near_enough
    return 0 if passed else 1
