"""Options of ``nsa bench``; everything heavy is imported when a command runs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from nsa.errors import check, fail

BENCH = """\
Measure the attention operators and training steps of this library beside others, tune the tiles of
its kernels for this GPU, and make a report. How to repeat the committed figures, and what each
field of a row means: docs/benchmarks.md.
"""

ATTENTION = """\
Measure whole attention and each operator, forward and forward with backward, beside dense attention
and FlexAttention of PyTorch and the reference. A result is compared with fp64 on sampled rows
before it is timed; a wrong one gets no figure, and the exit code is 1. For example
  nsa bench attention --shape seed --seqs 2048,65536 --out benchmarks/results/mine.jsonl
  nsa bench attention --case attention.window --variant narrow:window_attention_*.keys=32
  nsa bench attention --provider reference --seqs 512 --tokens 512      (without a GPU)
"""

TRAIN = """\
Measure training steps of a configuration as it is, by the trainer itself, on the text that it
names, with everything on: tokens/s, step time, MFU, memory; and the forward pass alone. Beside it
the dense model, and a dense model whose MLP is widened to as many parameters. What --set, --seqs,
--tokens and --micro-batch change stands in the rows. Loss and gradients are compared with the fp64
reference first; a wrong model gets no figure, and the exit code is 1. For example
  nsa bench train --config seed --out benchmarks/results/mine.jsonl
  nsa bench train --config seed --tokens 65536 --micro-batch 32 --dense-unmasked
  nsa bench train --config seed --seqs 8192 --set data.document_mask=false
  nsa bench train --config seed other.yaml            (A/B of two configurations)
  nsa bench train --variant eager:compile=false --provider nsa     (A/B of a setting)
"""

GUARD = """\
Compare ratios to dense attention, of time and of memory, with those of committed rows from the same
kind of GPU. Exit code 1 if one is worse by more than the tolerance, or if a row is wrong.
"""

SCALING = """\
Measure training steps of CONFIG on the processes that there are, by the trainer itself; the global
batch stays that of CONFIG and is divided among them. On GPUs the time of NCCL's kernels is measured
too, and the part of it in which nothing else runs. To be started by torchrun, or alone for the
speed of one process; rows of one file are compared. For example
  nsa bench scaling seed --out rows.jsonl
  torchrun --standalone --nproc-per-node 2 -m nsa bench scaling seed --out rows.jsonl
  torchrun --standalone --nproc-per-node 2 -m nsa bench scaling seed --buckets 10 25 50 100
  torchrun --standalone --nproc-per-node 2 -m nsa bench scaling seed --set parallel.strategy=fsdp
"""

HOST = """\
Measure what the layer costs the CPU: milliseconds in which one call, forward or forward with
backward, is issued while the GPU is idle, kernels launched, and the time that the GPU needs for
them. The function and the module, eager and compiled, with bf16 weights and with fp32 weights under
autocast, beside the attention layer of transformers' Llama (SDPA) in the same run. Results are
compared with fp64 first; a wrong one gets no figure, and the exit code is 1. For example
  nsa bench host --out benchmarks/host/mine.jsonl
  nsa bench host --case host.module --mode compiled,reduce_overhead --tokens 2048
"""

TUNE = """\
Measure candidate tiles of the kernels on this GPU and write the tuning table that the library reads
from then on. Nothing is tuned unless this command is run.
"""

REPORT = """\
Make a report with plots from rows alone: times over length, ratios to dense attention, memory,
targets.
"""

_PACKAGE = Path(__file__).resolve().parents[1]
DTYPES = ("bfloat16", "float16", "float32")
_SHAPES = "seed, wide, paper or HqxHkvxDxDv (default seed)"


def add_attention(parser: argparse.ArgumentParser) -> None:
    """Options of ``nsa bench attention``."""
    add = parser.add_argument
    _add_point(parser)
    choices = "random, shared4, shared16 (default random)"
    add("--choice", default="random", metavar="LIST", help=choices)
    add("--case", metavar="LIST", help="for example attention,attention.window (default all)")
    providers = "nsa, dense-cudnn, dense-fa2, flex, reference (default all); tiled, gathered"
    add("--provider", metavar="LIST", help=providers)
    variant = "nsa with other options (a field of NSAConfig) or tiles (KERNEL.FIELD)"
    _add_list(parser, "--variant", "NAME:KEY=VALUE,...", variant)
    recall = "how much of the exact selection each finds (always where the pattern approximates it)"
    add("--recall", action="store_true", help=recall)
    budget = "time spent on the samples of a figure (default 300)"
    add("--budget-ms", type=float, default=300.0, metavar="MS", help=budget)
    _add_output(parser)


def add_tune(parser: argparse.ArgumentParser) -> None:
    """Options of ``nsa bench tune``."""
    add = parser.add_argument
    _add_point(parser)
    kernels = "for example window_attention_* (default all)"
    add("--kernel", default="*", metavar="PATTERN", help=kernels)
    add("--out", metavar="FILE", help="table to write (default that of this GPU in the package)")
    minutes = "stop looking after this time; what was found is written"
    add("--minutes", type=float, metavar="N", help=minutes)
    jobs = max(1, min(8, (os.cpu_count() or 1) // 2))
    text = "processes that compile candidates ahead (default half of the cores, at most 8)"
    add("--jobs", type=int, default=jobs, metavar="N", help=text)


def add_train(parser: argparse.ArgumentParser) -> None:
    """Options of ``nsa bench train``."""
    add = parser.add_argument
    configs = "configuration; of several, the others are compared with the first (default seed)"
    add("--config", nargs="+", default=["seed"], metavar="CONFIG", help=configs)
    _add_list(parser, "--set", "KEY=VALUE", "a setting for all, for example compile=true")
    variant = "the first configuration with other settings"
    _add_list(parser, "--variant", "NAME:KEY=VALUE,...", variant)
    providers = "nsa, dense, dense-matched (default all; of several configurations the first's own)"
    add("--provider", metavar="LIST", help=providers)
    unmasked = "also dense attention across documents, as provider dense-unmasked"
    add("--dense-unmasked", action="store_true", help=unmasked)
    add("--seqs", metavar="LIST", help="other lengths S, for example 2048,8192")
    add("--tokens", type=int, metavar="N", help="other tokens of an optimizer step")
    micro_batch = "other windows of one forward and backward; with --tokens at most all of a step"
    add("--micro-batch", type=int, metavar="N", help=micro_batch)
    modes = "fwd, fwd_bwd (default both)"
    add("--mode", default="fwd,fwd_bwd", metavar="LIST", help=modes)
    _add_steps(parser, warmup=20, steps=40)
    _add_output(parser)


def add_scaling(parser: argparse.ArgumentParser) -> None:
    """Options of ``nsa bench scaling``."""
    add = parser.add_argument
    add("config", metavar="CONFIG", help="name of a configuration (see nsa configs) or a YAML file")
    buckets = "sizes of DDP's buckets to try"
    add("--buckets", nargs="+", type=float, default=[], metavar="MIB", help=buckets)
    _add_list(parser, "--set", "KEY=VALUE", "a setting of CONFIG, for example compile=true")
    _add_steps(parser, warmup=10, steps=20)
    _add_output(parser)


def add_host(parser: argparse.ArgumentParser) -> None:
    """Options of ``nsa bench host``."""
    add = parser.add_argument
    add("--shape", default="seed", metavar="SHAPE", help=_SHAPES)
    add("--width", type=int, default=768, metavar="N", help="of the layer's input (default 768)")
    tokens = "256,2048,8192"
    text = f"tokens, one sequence each (default {tokens})"
    add("--tokens", default=tokens, metavar="LIST", help=text)
    add("--case", metavar="LIST", help="host.function, host.module (default both)")
    add("--provider", metavar="LIST", help="nsa, llama (default both)")
    modes = "fwd, fwd_bwd, compiled, reduce_overhead (default all)"
    add("--mode", metavar="LIST", help=modes)
    add("--weights", metavar="LIST", help="bfloat16, float32 (default both)")
    add("--calls", type=int, default=40, metavar="N", help="timed calls of a figure (default 40)")
    _add_output(parser)


def add_guard(parser: argparse.ArgumentParser) -> None:
    """Options of ``nsa bench guard``."""
    add = parser.add_argument
    add("rows", nargs="+", metavar="ROWS.jsonl", help="files of new rows")
    baseline = "files or folders of rows to compare with (default those that the package carries)"
    add("--baseline", nargs="+", metavar="PATH", help=baseline)
    tolerance = "share by which a ratio may be worse (default 0.05)"
    add("--tolerance", type=float, default=0.05, metavar="X", help=tolerance)


def add_report(parser: argparse.ArgumentParser) -> None:
    """Options of ``nsa bench report``."""
    parser.add_argument("rows", nargs="+", metavar="ROWS.jsonl", help="files of rows")
    folder = "folder for report.md and its plots"
    parser.add_argument("--out", required=True, metavar="DIR", help=folder)


def _add_point(parser: argparse.ArgumentParser) -> None:
    add, seqs = parser.add_argument, "2048,65536"
    add("--shape", default="seed", metavar="SHAPE", help=_SHAPES)
    add("--seqs", default=seqs, metavar="LIST", help=f"lengths S (default {seqs})")
    tokens = "tokens of all sequences together (default 65536 for seed, else one sequence)"
    add("--tokens", type=int, metavar="N", help=tokens)
    dtypes = f"{', '.join(DTYPES)} (default bfloat16)"
    add("--dtype", default="bfloat16", metavar="DTYPE", help=dtypes)


def _add_list(parser: argparse.ArgumentParser, name: str, metavar: str, text: str) -> None:
    text += "; may be given several times"
    parser.add_argument(name, action="append", default=[], metavar=metavar, help=text)


def _add_steps(parser: argparse.ArgumentParser, *, warmup: int, steps: int) -> None:
    add = parser.add_argument
    text = f"steps before the timed ones (default {warmup})"
    add("--warmup", type=int, default=warmup, metavar="N", help=text)
    add("--steps", type=int, default=steps, metavar="N", help=f"timed steps (default {steps})")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE", help="JSONL file to append the rows to")
    text = "commit to record where the checkout has no git"
    parser.add_argument("--commit", metavar="ID", help=text)


def run_attention(args: argparse.Namespace) -> int:
    """``nsa bench attention``."""
    from nsa.bench.attention import Plan, bench_attention
    from nsa.bench.cases import CASES
    from nsa.bench.implementations import IMPLEMENTATIONS
    from nsa.bench.points import CHOICES
    from nsa.bench.variants import parse_variant

    names, variants = list(IMPLEMENTATIONS), []
    for text in args.variant:
        variants.append(parse_variant(text, names))
        names.append(variants[-1].name)
    plan = Plan(
        **_point(args),
        **_output(args),
        choices=_words("--choice", args.choice, CHOICES),
        cases=_words("--case", args.case, CASES),
        providers=None if args.provider is None else _words("--provider", args.provider, names),
        variants=variants,
        recall=args.recall,
        budget_ms=args.budget_ms,
    )
    return 0 if bench_attention(plan, _device()) else 1


def run_train(args: argparse.Namespace) -> int:
    """``nsa bench train``."""
    from nsa.bench.cases import MODES
    from nsa.bench.subjects import PROVIDERS, Batching, find_subjects
    from nsa.bench.train import TrainPlan, bench_train
    from nsa.bench.variants import parse_settings

    _check_least("nsa bench train", args, tokens=1, micro_batch=1, steps=1, warmup=0)
    paths = [Path(path) for path in args.config]
    names = None if args.provider is None else _words("--provider", args.provider, PROVIDERS)
    settings = parse_settings("nsa bench train", "--set", args.set)
    lengths = [None] if args.seqs is None else _lengths(args.seqs)
    plan = TrainPlan(
        **_output(args),
        shape=paths[0].stem,
        subjects=find_subjects(paths, settings, args.variant, names, unmasked=args.dense_unmasked),
        batchings=[Batching(length, args.tokens, args.micro_batch) for length in lengths],
        modes=_words("--mode", args.mode, MODES),
        warmup=args.warmup,
        steps=args.steps,
    )
    return 0 if bench_train(plan, _device()) else 1


def run_host(args: argparse.Namespace) -> int:
    """``nsa bench host``."""
    from nsa.bench.host import CASES, MODES, PROVIDERS, WEIGHTS, HostPlan, bench_host
    from nsa.bench.points import parse_shape

    _check_least("nsa bench host", args, width=1, calls=1)
    plan = HostPlan(
        **_output(args),
        shape=parse_shape(args.shape),
        width=args.width,
        tokens=_lengths(args.tokens, "--tokens"),
        cases=_words("--case", args.case, CASES),
        providers=_words("--provider", args.provider, PROVIDERS),
        modes=_words("--mode", args.mode, MODES),
        weights=_words("--weights", args.weights, WEIGHTS),
        calls=args.calls,
    )
    return 0 if bench_host(plan, _device()) else 1


def run_guard(args: argparse.Namespace) -> int:
    """``nsa bench guard``."""
    from nsa.bench.guard import guard
    from nsa.bench.rows import read_rows

    where = "nsa bench guard"
    _check_least(where, args, tolerance=0)
    new = row_files(where, "ROWS.jsonl", args.rows)
    known = carried_rows("results")
    if args.baseline is not None:
        known = row_files(where, "--baseline", args.baseline)
    given = {path.resolve() for path in new}
    known = [path for path in known if path.resolve() not in given]
    lines, passed = guard(read_rows(new), read_rows(known), args.tolerance)
    print("\n".join(lines))
    return 0 if passed else 1


def row_files(function: str, option: str, paths: list[str]) -> list[Path]:
    """Files of rows: those named, and those in named folders, which may hold other files too.

    Raises:
        ValueError: one does not exist.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        check(path.exists(), function, option, "be a file or folder of rows that exists", path)
        found += _rows_in(path) if path.is_dir() else [path]
    return found


def carried_rows(*folders: str) -> list[Path]:
    """Files of the rows that this project measured: in a wheel, or in ``benchmarks/``.

    Args:
        folders: of them, for example ``results``.
    """
    inside = _PACKAGE / "benchmarks"
    root = inside if inside.is_dir() else _PACKAGE.parent / "benchmarks"
    return [file for folder in folders for file in _rows_in(root / folder)]


def _rows_in(folder: Path) -> list[Path]:
    """Files whose first line has a field that only rows of measured cases have."""
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        with path.open(encoding="utf-8") as file:
            if '"case":' in file.readline():
                found.append(path)
    return found


def run_tune(args: argparse.Namespace) -> int:
    """``nsa bench tune``."""
    from nsa.bench.tune import TunePlan, bench_tune

    _check_least("nsa bench tune", args, jobs=0)
    out = None if args.out is None else Path(args.out)
    options = {"kernel": args.kernel, "out": out, "minutes": args.minutes, "jobs": args.jobs}
    return 0 if bench_tune(TunePlan(**_point(args), **options), _device()) else 1


def run_scaling(args: argparse.Namespace) -> int:
    """``nsa bench scaling``."""
    from nsa.bench.scaling import ScalingPlan, bench_scaling
    from nsa.bench.variants import parse_settings
    from nsa.train.distributed.launch import read_launch
    from nsa.train.load import load_config

    where = "nsa bench scaling"
    _check_least(where, args, warmup=0, steps=1)
    path = Path(args.config)
    plan = ScalingPlan(
        **_output(args),
        name=path.stem,
        config=load_config(path, parse_settings(where, "--set", args.set)),
        buckets_mib=args.buckets,
        warmup=args.warmup,
        steps=args.steps,
    )
    bench_scaling(plan, read_launch())
    return 0


def run_report(args: argparse.Namespace) -> int:
    """``nsa bench report``."""
    from nsa.bench.report import write_report
    from nsa.bench.rows import read_rows

    print(write_report(read_rows([Path(path) for path in args.rows]), Path(args.out)))
    return 0


def _point(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from nsa.bench.points import parse_shape

    rule = f"be one of {', '.join(DTYPES)}"
    check(args.dtype in DTYPES, "nsa bench", "--dtype", rule, repr(args.dtype))
    _check_least("nsa bench", args, tokens=1)
    return {
        "shape": parse_shape(args.shape),
        "seqs": _lengths(args.seqs),
        "tokens": args.tokens,
        "dtype": getattr(torch, args.dtype),
    }


def _output(args: argparse.Namespace) -> dict[str, Any]:
    return {"out": None if args.out is None else Path(args.out), "commit": args.commit}


def _check_least(function: str, args: argparse.Namespace, **least: int) -> None:
    for name, bound in least.items():
        value, option = getattr(args, name), f"--{name.replace('_', '-')}"
        check(value is None or value >= bound, function, option, f"be at least {bound}", value)


def _lengths(text: str, option: str = "--seqs") -> list[int]:
    words = text.split(",")
    if not all(word.isdigit() and int(word) > 0 for word in words):
        rule = "be positive lengths with commas between them"
        fail("nsa bench", option, rule, repr(text), "For example: 2048,65536")
    return [int(word) for word in words]


def _words(option: str, text: str | None, known: Collection[str]) -> list[str]:
    """Words with commas between them, each once; None means all that are known."""
    words = list(known) if text is None else list(dict.fromkeys(text.split(",")))
    for word in words:
        check(word in known, "nsa bench", option, f"be among {', '.join(known)}", repr(word))
    return words


def _device() -> Any:
    import torch

    cuda = torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
