"""Words of ``nsa plan``; everything heavy is imported when the command runs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nsa.errors import check

if TYPE_CHECKING:
    from nsa.train.config import TrainConfig

PLAN = """\
Say what a run will need before it runs: parameters, operations of a token, memory of a step by
part, time and cost. No GPU is needed. A run that does not fit into the GPU is refused (exit code
2), with a change under which it fits. For example
  nsa plan seed --gpu h200 --price-per-gpu-hour 3.5
  nsa plan seed --gpu l40s --micro-batch 32 --accumulation 1 --global-batch 32
  nsa plan seed seed-dense --measure          (on a GPU: planned beside measured memory)
Every setting of the file can be given here too, as of `nsa train`.
"""


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Words of ``nsa plan`` beside the settings of the configuration."""
    parser.add_argument(
        "config",
        metavar="CONFIG",
        nargs="+",
        help="name of a configuration (see nsa configs) or a YAML file",
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="for example h200, 'NVIDIA H100 PCIe', cpu (default that of this machine)",
    )
    memory = "memory of the GPU (default that of --gpu)"
    parser.add_argument("--memory-gib", type=float, metavar="X", help=memory)
    price = "gives the cost, in the same currency"
    parser.add_argument("--price-per-gpu-hour", type=float, metavar="X", help=price)
    parser.add_argument(
        "--mfu",
        type=float,
        metavar="X",
        help="share of the GPU's peak to reckon with, between 0 and 1",
    )
    rows = "files or folders of measured rows (default those that the package carries)"
    parser.add_argument("--rows", nargs="+", metavar="PATH", help=rows)
    parser.add_argument("--json", action="store_true", help="a JSON object a line")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="run a few steps and compare their memory with the plan's",
    )


def run_plan(args: argparse.Namespace, overrides: Mapping[str, str]) -> int:
    """``nsa plan``; ``overrides`` are settings given on the command line."""
    from nsa.train.load import load_config

    for option in ("memory_gib", "price_per_gpu_hour", "mfu"):
        value, name = getattr(args, option), f"--{option.replace('_', '-')}"
        check(value is None or value > 0, "nsa plan", name, "be positive", value)
    check(args.mfu is None or args.mfu <= 1, "nsa plan", "--mfu", "be at most 1", args.mfu)
    configs = {path: load_config(path, overrides) for path in args.config}
    if args.measure:
        return _measure(configs)
    import json

    from nsa.bench.rows import read_rows
    from nsa.cli.bench import carried_rows, row_files
    from nsa.plan.gpus import find_gpu
    from nsa.plan.plan import make_plan, refuse_what_does_not_fit
    from nsa.plan.report import plan_json, plan_lines

    gpu = find_gpu(args.gpu, args.memory_gib)
    given = args.rows and row_files("nsa plan", "--rows", args.rows)
    rows = read_rows(given or carried_rows("results", "memory"))
    for path, config in configs.items():
        plan = make_plan(config, gpu, rows, args.mfu)
        if args.json:
            print(json.dumps(plan_json(Path(path).stem, plan, args.price_per_gpu_hour)))
        else:
            print("\n".join(plan_lines(path, plan, args.price_per_gpu_hour)), flush=True)
        refuse_what_does_not_fit(plan)
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
