"""Words of ``nsa bench``; everything heavy is imported when a command runs."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from nsa.errors import check, fail

BENCH = """\
Measure the attention operators of this library beside others, tune the tiles of its kernels for this GPU, and make a report.
How to repeat the committed figures, and what each field of a row means: docs/benchmarks.md.
"""

ATTENTION = """\
Measure whole attention and each operator, forward and forward with backward, beside dense attention and FlexAttention of
PyTorch and the reference. A result is compared with fp64 on sampled rows before it is timed; a wrong one gets no figure, and
the exit code is 1. For example
  nsa bench attention --shape seed --seqs 2048,65536 --out benchmarks/results/mine.jsonl
  nsa bench attention --case attention.window --variant narrow:window_attention_*.keys=32
  nsa bench attention --provider reference --seqs 512 --tokens 512      (without a GPU)
"""

TRAIN = """\
Measure training steps of a configuration as it is, by the trainer itself, on the text that it
names, with everything on: tokens/s, step time, MFU, memory; and the forward pass alone. Beside it
its dense twin, and a dense model whose MLP is widened to as many parameters. What --set, --seqs,
--tokens and --micro-batch change stands in the rows. Loss and gradients are compared with the fp64
reference first; a wrong model gets no figure, and the exit code is 1. For example
  nsa bench train --config seed --out benchmarks/results/mine.jsonl
  nsa bench train --config seed --tokens 65536 --micro-batch 32 --dense-unmasked
  nsa bench train --config seed --seqs 8192 --set data.document_mask=false
  nsa bench train --config seed other.yaml            (A/B of two configurations)
  nsa bench train --variant eager:compile=false --provider nsa     (A/B of a setting)
"""

GUARD = """\
Compare ratios to dense attention, of time and of memory, with those of committed rows from the same kind of GPU. Exit code 1 if
one is worse by more than the tolerance, or if a row is wrong.
"""

SCALING = """\
Measure training steps of CONFIG on the processes that there are, by the trainer itself; the global batch stays that of CONFIG
and is divided among them. On GPUs the time of NCCL's kernels is told too, and the part of it in which nothing else runs. To be
started by torchrun, or alone for the speed of one process; rows of one file are compared. For example
  for n in 1 2 4; do torchrun --standalone --nproc-per-node $n -m nsa bench scaling seed --out rows.jsonl; done
  torchrun --standalone --nproc-per-node 2 -m nsa bench scaling seed --buckets 10 25 50 100
  torchrun --standalone --nproc-per-node 2 -m nsa bench scaling seed --set parallel.strategy=fsdp
"""

HOST = """\
Measure what the layer costs the CPU: milliseconds in which one call, forward or forward with backward, is issued while the GPU
waits, kernels launched, and the time that the GPU needs for them. The function and the module, eager and compiled, with bf16
weights and with fp32 weights under autocast, beside the attention layer of transformers' Llama (SDPA) in the same run. Results
are compared with fp64 first; a wrong one gets no figure, and the exit code is 1. For example
  nsa bench host --out benchmarks/host/mine.jsonl
  nsa bench host --case host.module --mode compiled,reduce_overhead --tokens 2048
"""

TUNE = """\
Measure candidate tiles of the kernels on this GPU and write the tuning table that the library reads from then on. Nothing is
tuned unless this command is run.
"""

REPORT = """\
Make a report with plots from rows alone: times over length, ratios to dense attention, memory, fitted exponents, targets.
"""

_PACKAGE = Path(__file__).resolve().parents[1]
DTYPES = ("bfloat16", "float16", "float32")


def add_attention(parser: argparse.ArgumentParser) -> None:
    """Words of ``nsa bench attention``."""
    _add_where(parser, "2048,65536")
    parser.add_argument("--choice", default="random", metavar="LIST", help="random, shared4, shared16 (default random)")
    parser.add_argument("--case", metavar="LIST", help="for example attention,attention.window (default all)")
    parser.add_argument(
        "--provider",
        metavar="LIST",
        help="nsa, dense-cudnn, dense-fa2, flex, reference (default all); mask, ranges, gather, tiled, gathered",
    )
    parser.add_argument(
        "--variant", action="append", default=[], metavar="NAME:KEY=VALUE,...",
        help="ours with other options (a field of NSAConfig) or tiles (KERNEL.FIELD); may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--recall",
        action="store_true",
        help="say how much of the exact choice each provider finds (always, of patterns that approximate)",
    )
    parser.add_argument("--out", metavar="FILE", help="JSONL file to append the rows to")
    parser.add_argument("--commit", metavar="ID", help="commit to record where the checkout has no git")
    parser.add_argument(
        "--budget-ms", type=float, default=300.0, metavar="MS", help="time spent on the samples of a figure (default 300)"
    )


def add_tune(parser: argparse.ArgumentParser) -> None:
    """Words of ``nsa bench tune``."""
    _add_where(parser, "2048,65536")
    parser.add_argument("--kernel", default="*", metavar="PATTERN", help="for example window_attention_* (default all)")
    parser.add_argument("--out", metavar="FILE", help="table to write (default that of this GPU inside the package)")
    parser.add_argument("--minutes", type=float, metavar="N", help="stop looking after this time; what was found is written")
    parser.add_argument(
        "--jobs", type=int, default=max(1, min(8, (os.cpu_count() or 1) // 2)), metavar="N",
        help="processes that compile candidates ahead (default half of the cores, at most 8)",
    )  # fmt: skip


def add_train(parser: argparse.ArgumentParser) -> None:
    """Words of ``nsa bench train``."""
    parser.add_argument(
        "--config", nargs="+", default=["seed"], metavar="CONFIG",
        help="configuration; of several, the others are compared with the first (default seed)",
    )  # fmt: skip
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting for all configurations, for example compile=true",
    )
    parser.add_argument(
        "--variant", action="append", default=[], metavar="NAME:KEY=VALUE,...",
        help="the first configuration with other settings; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--provider",
        metavar="LIST",
        help="nsa, dense, dense-matched (default all; with several configurations the first's own)",
    )
    parser.add_argument(
        "--dense-unmasked",
        action="store_true",
        help="also the dense model whose documents see each other, as provider dense-unmasked",
    )
    parser.add_argument("--seqs", metavar="LIST", help="other lengths S, for example 2048,8192")
    parser.add_argument("--tokens", type=int, metavar="N", help="other tokens of an optimizer step")
    parser.add_argument(
        "--micro-batch",
        type=int,
        metavar="N",
        help="other windows of one forward and backward; with --tokens at most all of a step",
    )
    parser.add_argument("--mode", default="fwd,fwd_bwd", metavar="LIST", help="fwd, fwd_bwd (default both)")
    parser.add_argument("--warmup", type=int, default=20, metavar="N", help="steps before the timed ones (default 20)")
    parser.add_argument("--steps", type=int, default=40, metavar="N", help="timed steps (default 40)")
    parser.add_argument("--out", metavar="FILE", help="JSONL file to append the rows to")
    parser.add_argument("--commit", metavar="ID", help="commit to record where the checkout has no git")


def add_scaling(parser: argparse.ArgumentParser) -> None:
    """Words of ``nsa bench scaling``."""
    parser.add_argument("config", metavar="CONFIG", help="name of a configuration (see nsa configs) or a YAML file")
    parser.add_argument("--buckets", nargs="+", type=float, default=[], metavar="MIB", help="sizes of DDP's buckets to try")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of CONFIG, for example compile=true"
    )
    parser.add_argument("--warmup", type=int, default=10, metavar="N", help="steps before the timed ones (default 10)")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="timed steps (default 20)")
    parser.add_argument("--out", metavar="FILE", help="JSONL file to append the rows to")
    parser.add_argument("--commit", metavar="ID", help="commit to record where the checkout has no git")


def add_host(parser: argparse.ArgumentParser) -> None:
    """Words of ``nsa bench host``."""
    parser.add_argument("--shape", default="seed", metavar="SHAPE", help="seed, wide, paper or HqxHkvxDxDv (default seed)")
    parser.add_argument("--width", type=int, default=768, metavar="N", help="size of the layer's input (default 768)")
    parser.add_argument(
        "--tokens", default="256,2048,8192", metavar="LIST", help="tokens, one sequence each (default 256,2048,8192)"
    )
    parser.add_argument("--case", metavar="LIST", help="host.function, host.module (default both)")
    parser.add_argument("--provider", metavar="LIST", help="nsa, llama (default both)")
    parser.add_argument("--mode", metavar="LIST", help="fwd, fwd_bwd, compiled, reduce_overhead (default all)")
    parser.add_argument("--weights", metavar="LIST", help="bfloat16, float32 (default both)")
    parser.add_argument("--calls", type=int, default=40, metavar="N", help="timed calls of a figure (default 40)")
    parser.add_argument("--out", metavar="FILE", help="JSONL file to append the rows to")
    parser.add_argument("--commit", metavar="ID", help="commit to record where the checkout has no git")


def add_guard(parser: argparse.ArgumentParser) -> None:
    """Words of ``nsa bench guard``."""
    parser.add_argument("rows", nargs="+", metavar="ROWS.jsonl", help="files of new rows")
    parser.add_argument(
        "--baseline", nargs="+", metavar="PATH",
        help="files or folders of rows to hold them against (default those that the package carries)",
    )  # fmt: skip
    parser.add_argument(
        "--tolerance", type=float, default=0.05, metavar="X", help="share by which a ratio may be worse (default 0.05)"
    )


def add_report(parser: argparse.ArgumentParser) -> None:
    """Words of ``nsa bench report``."""
    parser.add_argument("rows", nargs="+", metavar="ROWS.jsonl", help="files of rows")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for report.md and its plots")


def _add_where(parser: argparse.ArgumentParser, seqs: str) -> None:
    parser.add_argument("--shape", default="seed", metavar="SHAPE", help="seed, wide, paper or HqxHkvxDxDv (default seed)")
    parser.add_argument("--seqs", default=seqs, metavar="LIST", help=f"lengths S (default {seqs})")
    parser.add_argument(
        "--tokens", type=int, metavar="N", help="tokens of all sequences together (default 65536 for seed, else one sequence)"
    )
    parser.add_argument("--dtype", default="bfloat16", metavar="DTYPE", help=f"{', '.join(DTYPES)} (default bfloat16)")


def run_attention(args: argparse.Namespace) -> int:
    """``nsa bench attention``."""
    from nsa.bench.attention import Plan, bench_attention
    from nsa.bench.cases import CASES
    from nsa.bench.points import CHOICES
    from nsa.bench.providers import PROVIDERS
    from nsa.bench.variants import parse_variant

    names = list(PROVIDERS)
    variants = []
    for text in args.variant:
        variants.append(parse_variant(text, names))
        names.append(variants[-1].name)
    plan = Plan(
        **_where(args),
        choices=_words("--choice", args.choice, list(CHOICES)),
        cases=None if args.case is None else _words("--case", args.case, list(CASES)),
        providers=None if args.provider is None else _words("--provider", args.provider, names),
        variants=variants,
        out=None if args.out is None else Path(args.out),
        recall=args.recall,
        commit=args.commit,
        budget_ms=args.budget_ms,
    )
    return 0 if bench_attention(plan, _device()) else 1


def run_train(args: argparse.Namespace) -> int:
    """``nsa bench train``."""
    from nsa.bench.cases import MODES
    from nsa.bench.subjects import PROVIDERS, Batching, find_subjects, parse_settings, parse_train_variant
    from nsa.bench.train import TrainPlan, bench_train

    for option in ("tokens", "micro_batch", "steps", "warmup"):
        value, least = getattr(args, option), 0 if option == "warmup" else 1
        name = f"--{option.replace('_', '-')}"
        check(value is None or value >= least, "nsa bench train", name, f"be at least {least}", value)
    paths = [Path(path) for path in args.config]
    names = None if args.provider is None else _words("--provider", args.provider, list(PROVIDERS))
    variants = dict(parse_train_variant(text) for text in args.variant)
    check(len(variants) == len(args.variant), "nsa bench train", "--variant", "have names of their own", args.variant)
    settings = parse_settings("nsa bench train", "--set", args.set)
    lengths: list[int | None] = [None] if args.seqs is None else [*_lengths(args.seqs)]
    plan = TrainPlan(
        shape=paths[0].stem,
        subjects=find_subjects(paths, settings, variants, names, unmasked=args.dense_unmasked),
        batchings=[Batching(length, args.tokens, args.micro_batch) for length in lengths],
        modes=_words("--mode", args.mode, list(MODES)),
        warmup=args.warmup,
        steps=args.steps,
        out=None if args.out is None else Path(args.out),
        commit=args.commit,
    )
    return 0 if bench_train(plan, _device()) else 1


def run_host(args: argparse.Namespace) -> int:
    """``nsa bench host``."""
    from nsa.bench.host import CASES, MODES, PROVIDERS, WEIGHTS, HostPlan, bench_host
    from nsa.bench.points import parse_shape

    for option in ("width", "calls"):
        check(getattr(args, option) > 0, "nsa bench host", f"--{option}", "be positive", getattr(args, option))
    known = {"case": CASES, "provider": PROVIDERS, "mode": MODES, "weights": WEIGHTS}
    asked = {name: getattr(args, name) for name in known}
    words = {
        name: list(known[name]) if text is None else _words(f"--{name}", text, list(known[name]))
        for name, text in asked.items()
    }
    plan = HostPlan(
        parse_shape(args.shape),
        args.width,
        _lengths(args.tokens, "--tokens"),
        cases=words["case"],
        providers=words["provider"],
        modes=words["mode"],
        weights=words["weights"],
        calls=args.calls,
        out=None if args.out is None else Path(args.out),
        commit=args.commit,
    )
    return 0 if bench_host(plan, _device()) else 1


def run_guard(args: argparse.Namespace) -> int:
    """``nsa bench guard``."""
    from nsa.bench.guard import guard
    from nsa.bench.rows import read_rows

    check(args.tolerance >= 0, "nsa bench guard", "--tolerance", "be at least 0", args.tolerance)
    new = row_files("nsa bench guard", "ROWS.jsonl", args.rows)
    known = carried_rows("results") if args.baseline is None else row_files("nsa bench guard", "--baseline", args.baseline)
    known = [path for path in known if path.resolve() not in {other.resolve() for other in new}]
    lines, passed = guard(read_rows(new), read_rows(known), args.tolerance)
    print("\n".join(lines))
    return 0 if passed else 1


def row_files(function: str, option: str, paths: list[str]) -> list[Path]:
    """Files of rows: those named, and those in the folders named; a folder may hold files of another kind beside them.

    Raises:
        ValueError: one does not exist.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        check(path.exists(), function, option, "be a file or folder of rows that exists", path)
        found += sorted(file for file in path.glob("*.jsonl") if _holds_rows(file)) if path.is_dir() else [path]
    return found


def carried_rows(*folders: str) -> list[Path]:
    """Files of the rows that this project measured, which a wheel has inside the package and a checkout in ``benchmarks/``.

    Args:
        folders: of them, for example ``results``.
    """
    inside = _PACKAGE / "benchmarks"
    root = inside if inside.is_dir() else _PACKAGE.parent / "benchmarks"
    return [file for folder in folders for file in sorted((root / folder).glob("*.jsonl")) if _holds_rows(file)]


def _holds_rows(path: Path) -> bool:
    """Whether the first line has a field that only rows of measured cases have."""
    with path.open(encoding="utf-8") as file:
        return '"case":' in file.readline()


def run_tune(args: argparse.Namespace) -> int:
    """``nsa bench tune``."""
    from nsa.bench.tune import TunePlan, bench_tune

    check(args.jobs >= 0, "nsa bench tune", "--jobs", "be at least 0", args.jobs)
    out = None if args.out is None else Path(args.out)
    plan = TunePlan(**_where(args), kernel=args.kernel, out=out, minutes=args.minutes, jobs=args.jobs)
    return 0 if bench_tune(plan, _device()) else 1


def run_scaling(args: argparse.Namespace) -> int:
    """``nsa bench scaling``."""
    from nsa.bench.scaling import ScalingPlan, bench_scaling
    from nsa.bench.subjects import parse_settings
    from nsa.train.distributed.launch import read_launch
    from nsa.train.load import load_config

    for option, least in (("warmup", 0), ("steps", 1)):
        value = getattr(args, option)
        check(value >= least, "nsa bench scaling", f"--{option}", f"be at least {least}", value)
    settings = parse_settings("nsa bench scaling", "--set", args.set)
    path, out = Path(args.config), None if args.out is None else Path(args.out)
    config = load_config(path, settings)
    bench_scaling(ScalingPlan(path.stem, config, args.buckets, args.warmup, args.steps, out, args.commit), read_launch())
    return 0


def run_report(args: argparse.Namespace) -> int:
    """``nsa bench report``."""
    from nsa.bench.report import write_report
    from nsa.bench.rows import read_rows

    print(write_report(read_rows([Path(path) for path in args.rows]), Path(args.out)))
    return 0


def _where(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from nsa.bench.points import parse_shape

    check(args.dtype in DTYPES, "nsa bench", "--dtype", f"be one of {', '.join(DTYPES)}", repr(args.dtype))
    check(args.tokens is None or args.tokens > 0, "nsa bench", "--tokens", "be positive", args.tokens)
    return {
        "shape": parse_shape(args.shape),
        "seqs": _lengths(args.seqs),
        "tokens": args.tokens,
        "dtype": getattr(torch, args.dtype),
    }


def _lengths(text: str, option: str = "--seqs") -> list[int]:
    words = text.split(",")
    if not all(word.isdigit() and int(word) > 0 for word in words):
        fail("nsa bench", option, "be positive lengths with commas between them", repr(text), "For example: 2048,65536")
    return [int(word) for word in words]


def _words(option: str, text: str, known: list[str]) -> list[str]:
    words = list(dict.fromkeys(text.split(",")))
    for word in words:
        check(word in known, "nsa bench", option, f"be among {', '.join(known)}", repr(word))
    return words


def _device() -> Any:
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
