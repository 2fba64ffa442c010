"""``nsa bench``; everything heavy is imported when a command runs."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

from nsa import configs
from nsa.cli.commands import Command, Group
from nsa.errors import check, fail, option

Dtype = Literal["bfloat16", "float16", "float32"]

_MOST = 2**30  # tokens, steps and the like: positions are counted in 32 bits
_PACKAGE = Path(__file__).resolve().parents[1]


def attention(
    *,
    shape: str = "seed",
    seqs: str = "2048,65536",
    tokens: int | None = None,
    dtype: Dtype = "bfloat16",
    choice: str = "random",
    recorded: Path | None = None,
    case: str | None = None,
    provider: str | None = None,
    variant: list[str] | None = None,
    recall: bool = False,
    out: Path | None = None,
    commit: str | None = None,
    budget_ms: float = 300.0,
) -> int:
    """Measure the attention operators.

    Whole attention and each operator, forward and forward with backward, compared with dense
    attention and FlexAttention of PyTorch and with the reference. A result is compared with fp64 on
    sampled rows before it is timed; a wrong one gets no figure, and the exit code is 1. For example
      nsa bench attention --shape seed --seqs 2048,65536 --out benchmarks/results/mine.jsonl
      nsa bench attention --case attention.window --variant narrow:window_attention_*.keys=32
      nsa bench attention --provider reference --seqs 512 --tokens 512      (without a GPU)

    Args:
        shape: seed, wide, paper or HqxHkvxDxDv
        seqs: lengths S
        tokens: of all sequences together (default 65536 for seed, else one sequence)
        dtype: of the inputs
        choice: random, shared4, shared16, recorded
        recorded: file of nsa inspect --record, for --case attention.selected --choice recorded
        case: for example attention,attention.window (default all)
        provider: nsa, dense-cudnn, dense-fa2, flex, reference (default all); tiled, gathered
        variant: NAME:KEY=VALUE,...: nsa with other options (a field of NSAConfig) or tiles
            (KERNEL.FIELD); may be given several times
        recall: how much of the exact selection each finds (always where the pattern approximates
            it)
        out: JSONL file to append the rows to
        commit: commit to record where the checkout has no git
        budget_ms: time spent on the samples of a figure
    """
    from nsa.bench.attention import Plan, bench_attention
    from nsa.bench.cases import CASES
    from nsa.bench.implementations import IMPLEMENTATIONS
    from nsa.bench.points import CHOICES, RECORDED
    from nsa.bench.variants import parse_variant

    names, variants = list(IMPLEMENTATIONS), []
    for text in variant or []:
        variants.append(parse_variant(text, names))
        names.append(variants[-1].name)
    plan = Plan(
        **_point(shape, seqs, tokens, dtype),
        choices=_words("--choice", choice, (*CHOICES, RECORDED)),
        recorded=recorded,
        cases=_words("--case", case, CASES),
        providers=None if provider is None else _words("--provider", provider, names),
        variants=variants,
        out=out,
        recall=recall,
        commit=commit,
        budget_ms=budget_ms,
    )
    return 0 if bench_attention(plan, _device()) else 1


def train(
    *,
    config: tuple[str, ...] = ("78m",),
    variant: list[str] | None = None,
    provider: str | None = None,
    dense_unmasked: bool = False,
    seqs: str | None = None,
    tokens: int | None = None,
    micro_batch: int | None = None,
    mode: str = "fwd,fwd_bwd",
    warmup: int = 20,
    steps: int = 40,
    out: Path | None = None,
    commit: str | None = None,
    **settings: str,
) -> int:
    """Measure training steps.

    Those of a configuration as it is, by the trainer itself, on the text that it names, with
    everything on: tokens/s, step time, MFU, memory; and the forward pass alone. It is compared
    with the dense model, and with a dense model whose MLP is widened to as many parameters. What
    settings, --seqs, --tokens and --micro-batch change stands in the rows. Loss and gradients are
    compared with the fp64 reference first; a wrong model gets no figure, and the exit code is 1.
    For example
      nsa bench train --config 78m --out benchmarks/results/mine.jsonl
      nsa bench train --config 78m --tokens 65536 --micro-batch 32 --dense-unmasked
      nsa bench train --config 78m --seqs 8192 --data.document-mask false
      nsa bench train --config 78m other.yaml            (A/B of two configurations)
      nsa bench train --variant eager:compile=false --provider nsa     (A/B of a setting)

    Args:
        config: configuration; of several, the others are compared with the first
        variant: NAME:KEY=VALUE,...: the first configuration with other settings; may be given
            several times
        provider: nsa, dense, dense-matched (default all; with several configurations the first's
            own)
        dense_unmasked: also dense attention across documents, as provider dense-unmasked
        seqs: other lengths S, for example 2048,8192
        tokens: other tokens of an optimizer step
        micro_batch: other windows of one forward and backward; with --tokens at most all of a step
        mode: fwd, fwd_bwd
        warmup: steps before the timed ones
        steps: timed steps
        out: JSONL file to append the rows to
        commit: commit to record where the checkout has no git
        settings: of all configurations
    """
    from nsa.bench.cases import MODES
    from nsa.bench.subjects import PROVIDERS, Batching, find_subjects
    from nsa.bench.train import TrainPlan, bench_train

    where = "nsa bench train"
    _in_range(where, 1, tokens=tokens, micro_batch=micro_batch, steps=steps)
    _in_range(where, 0, warmup=warmup)
    paths = [Path(path) for path in config]
    names = None if provider is None else _words("--provider", provider, PROVIDERS)
    subjects = find_subjects(paths, settings, variant or [], names, unmasked=dense_unmasked)
    lengths = [None] if seqs is None else _lengths(seqs)
    plan = TrainPlan(
        shape=configs.name_in_rows(paths[0]),
        subjects=subjects,
        batchings=[Batching(length, tokens, micro_batch) for length in lengths],
        modes=_words("--mode", mode, MODES),
        warmup=warmup,
        steps=steps,
        out=out,
        commit=commit,
    )
    return 0 if bench_train(plan, _device()) else 1


def scaling(
    config: str,
    *,
    buckets: tuple[float, ...] = (),
    warmup: int = 10,
    steps: int = 20,
    out: Path | None = None,
    commit: str | None = None,
    **settings: str,
) -> int:
    """Measure training on several processes.

    Training steps of CONFIG on the processes that there are, by the trainer itself; the global
    batch stays that of CONFIG and is divided among them. On GPUs the time of NCCL's kernels is
    measured too, and the part of it in which nothing else runs. To be started by torchrun, or alone
    for the speed of one process; rows of one file are compared. For example
      nsa bench scaling 78m --out rows.jsonl
      torchrun --standalone --nproc-per-node 2 -m nsa bench scaling 78m --out rows.jsonl
      torchrun --standalone --nproc-per-node 2 -m nsa bench scaling 78m --buckets 10 25 50 100
      torchrun --standalone --nproc-per-node 2 -m nsa bench scaling 78m --parallel.strategy fsdp

    Args:
        config: name of a configuration (see nsa configs) or a YAML file
        buckets: sizes of DDP's buckets to try, MiB
        warmup: steps before the timed ones
        steps: timed steps
        out: JSONL file to append the rows to
        commit: commit to record where the checkout has no git
        settings: of CONFIG
    """
    from nsa.bench.scaling import ScalingPlan, bench_scaling
    from nsa.train.distributed.launch import read_launch
    from nsa.train.load import load_config

    _in_range("nsa bench scaling", 0, warmup=warmup)
    _in_range("nsa bench scaling", 1, steps=steps)
    plan = ScalingPlan(
        name=configs.name_in_rows(config),
        config=load_config(config, settings),
        buckets_mib=buckets,
        warmup=warmup,
        steps=steps,
        out=out,
        commit=commit,
    )
    bench_scaling(plan, read_launch())
    return 0


def host(
    *,
    shape: str = "seed",
    width: int = 768,
    tokens: str = "256,2048,8192",
    case: str | None = None,
    provider: str | None = None,
    mode: str | None = None,
    weights: str | None = None,
    calls: int = 40,
    out: Path | None = None,
    commit: str | None = None,
) -> int:
    """Measure what a layer costs the CPU.

    Milliseconds in which one call, forward or forward with backward, is issued while the GPU is
    idle, kernels launched, and the time that the GPU needs for them. The function and the module,
    eager and compiled, with bf16 weights and with fp32 weights under autocast, compared with the
    attention layer of transformers' Llama (SDPA) in the same run. Results are compared with fp64
    first; a wrong one gets no figure, and the exit code is 1. For example
      nsa bench host --out benchmarks/host/mine.jsonl
      nsa bench host --case host.module --mode compiled,reduce_overhead --tokens 2048

    Args:
        shape: seed, wide, paper or HqxHkvxDxDv
        width: size of the layer's input
        tokens: tokens, one sequence each
        case: host.function, host.module (default both)
        provider: nsa, llama (default both)
        mode: fwd, fwd_bwd, compiled, reduce_overhead (default all)
        weights: bfloat16, float32 (default both)
        calls: timed calls of a figure
        out: JSONL file to append the rows to
        commit: commit to record where the checkout has no git
    """
    from nsa.bench.host import CASES, MODES, PROVIDERS, WEIGHTS, HostPlan, bench_host
    from nsa.bench.points import parse_shape

    _in_range("nsa bench host", 1, width=width, calls=calls)
    plan = HostPlan(
        shape=parse_shape(shape),
        width=width,
        tokens=_lengths(tokens, "--tokens"),
        cases=_words("--case", case, CASES),
        providers=_words("--provider", provider, PROVIDERS),
        modes=_words("--mode", mode, MODES),
        weights=_words("--weights", weights, WEIGHTS),
        calls=calls,
        out=out,
        commit=commit,
    )
    return 0 if bench_host(plan, _device()) else 1


def decode(
    *,
    case: str | None = None,
    shape: str = "wide",
    config: Path = Path("78m"),
    provider: str | None = None,
    points: str | None = None,
    prefill: str | None = None,
    steps: int = 64,
    out: Path | None = None,
    commit: str | None = None,
    budget_ms: float = 300.0,
) -> int:
    """Measure decoding.

    Attention of one step alone, beside the fastest dense attention over static keys and values;
    greedy steps of a whole model with random weights after a long context, and prompts, beside the
    dense model. Milliseconds, tokens/s, launches, and the bytes that a step reads. Results are
    compared with fp64 first; a wrong one gets no figure, and the exit code is 1. For example
      nsa bench decode --out benchmarks/results/mine.jsonl
      nsa bench decode --case decode.attention --shape seed --points 65536,65536x64
      nsa bench decode --case decode.model --config 78m --points 2048,16384x64
      nsa bench decode --case decode.model --config cpu-small --points 256      (without a GPU)

    Args:
        case: decode.attention, decode.model (default both)
        shape: of decode.attention: seed, wide, paper or HqxHkvxDxDv
        config: of decode.model (see nsa configs)
        provider: nsa; of attention also dense-cudnn, dense-fa2, dense-efficient-folded, dense-flex,
            dense-scan, .., reference; of models dense, dense-matched,
            and by generate() hf, transformers (extra hf)
        points: tokens of context, with xB for B sequences (default those of the targets)
        prefill: tokens of prompts that a model takes in (default 65536; none if --points is given)
        steps: timed steps of a model
        out: JSONL file to append the rows to
        commit: commit to record where the checkout has no git
        budget_ms: time spent on the samples of a figure of attention
    """
    from nsa.bench.decode import CASES, PROVIDERS, DecodePlan, bench_decode
    from nsa.bench.points import parse_shape

    _in_range("nsa bench decode", 1, steps=steps)
    plan = DecodePlan(
        shape=parse_shape(shape),
        config=config,
        name=configs.name_in_rows(config),
        cases=_words("--case", case, CASES),
        providers=None if provider is None else _words("--provider", provider, PROVIDERS),
        points=None if points is None else _points(points),
        prefills=None if prefill is None else _lengths(prefill, "--prefill"),
        steps=steps,
        out=out,
        commit=commit,
        budget_ms=budget_ms,
    )
    return 0 if bench_decode(plan, _device()) else 1


def tune(
    *,
    shape: str = "seed",
    seqs: str = "2048,65536",
    tokens: int | None = None,
    dtype: Dtype = "bfloat16",
    kernel: str = "*",
    out: Path | None = None,
    minutes: float | None = None,
    jobs: int = max(1, min(8, (os.cpu_count() or 1) // 2)),
) -> int:
    """Choose the tiles of the kernels for this GPU.

    Candidate tiles are measured, and the tuning table is written that the library reads from then
    on. Nothing is tuned unless this command is run.

    Args:
        shape: seed, wide, paper or HqxHkvxDxDv
        seqs: lengths S
        tokens: of all sequences together (default 65536 for seed, else one sequence)
        dtype: of the inputs
        kernel: pattern of their names, for example window_attention_*
        out: table to write (default that of this GPU inside the package)
        minutes: stop looking after this time; what was found is written
        jobs: processes that compile candidates ahead: half of the cores and at most 8 unless given
    """
    from nsa.bench.tune import TunePlan, bench_tune

    _in_range("nsa bench tune", 0, jobs=jobs)
    point = _point(shape, seqs, tokens, dtype)
    plan = TunePlan(**point, kernel=kernel, out=out, minutes=minutes, jobs=jobs)
    return 0 if bench_tune(plan, _device()) else 1


def guard(
    rows: tuple[str, ...],
    *,
    baseline: tuple[str, ...] | None = None,
    tolerance: float = 0.05,
) -> int:
    """Compare ratios with committed rows.

    Ratios to dense attention, of time and of memory, are compared with those of committed rows from
    the same kind of GPU. Exit code 1 if one is worse by more than the tolerance, or if a row is
    wrong.

    Args:
        rows: files of new rows
        baseline: files or folders of rows to compare with (default those that the package carries)
        tolerance: share by which a ratio may be worse
    """
    from nsa.bench import guard
    from nsa.bench.rows import read_rows

    where = "nsa bench guard"
    check(tolerance >= 0, where, "--tolerance", "be at least 0", tolerance)
    new = row_files(where, "ROWS", rows)
    known = carried_rows("results")
    if baseline is not None:
        known = row_files(where, "--baseline", baseline)
    known = [path for path in known if path.resolve() not in {other.resolve() for other in new}]
    lines, passed = guard.guard(read_rows(new), read_rows(known), tolerance)
    print("\n".join(lines))
    return 0 if passed else 1


def report(rows: tuple[Path, ...], *, out: Path) -> int:
    """Make a report from measured rows.

    With plots, from rows alone: times over length, ratios to dense attention, memory, targets.

    Args:
        rows: files of rows
        out: folder for report.md and its plots
    """
    from nsa.bench.report import write_report
    from nsa.bench.rows import read_rows

    print(write_report(read_rows(row_files("bench report", "ROWS", [*map(str, rows)])), out))
    return 0


def row_files(function: str, option: str, paths: Sequence[str]) -> list[Path]:
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


def _point(shape: str, seqs: str, tokens: int | None, dtype: Dtype) -> dict[str, Any]:
    import torch

    from nsa.bench.points import parse_shape

    _in_range("nsa bench", 1, tokens=tokens)
    lengths, kind = _lengths(seqs), getattr(torch, dtype)
    return {"shape": parse_shape(shape), "seqs": lengths, "tokens": tokens, "dtype": kind}


def _in_range(where: str, least: int, **given: int | None) -> None:
    for name, value in given.items():
        fits = value is None or least <= value <= _MOST
        check(fits, where, option(name), f"be from {least} to {_MOST:,}", value)


def _lengths(text: str, option: str = "--seqs") -> list[int]:
    words = text.split(",")
    if not all(re.fullmatch("[0-9]{1,10}", word) and 0 < int(word) <= _MOST for word in words):
        rule = f"be lengths from 1 to {_MOST:,} with commas between them"
        fail("nsa bench", option, rule, repr(text), "For example: 2048,65536")
    return [int(word) for word in words]


def _points(text: str) -> list[tuple[int, int]]:
    found = [
        re.fullmatch(r"([1-9][0-9]{0,9})(?:x([1-9][0-9]{0,9}))?", word) for word in text.split(",")
    ]
    points = [(int(each[1]), int(each[2] or 1)) for each in found if each]
    fits = all(found) and all(tokens * sequences <= _MOST for tokens, sequences in points)
    rule = "be tokens of context or TOKENSxSEQUENCES, with commas between them"
    hint = f"For example: 2048,65536x32; at most {_MOST:,} tokens."
    check(fits, "nsa bench decode", "--points", rule, repr(text), hint)
    return points


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


COMMANDS = Group(
    "Measure this library's speed and compare it with others.\n"
    "Also: tune the tiles of its kernels for this GPU, and make a report. How to repeat the\n"
    "committed figures, and what each field of a row means: docs/benchmarks.md.",
    {
        "attention": Command(attention, "bench"),
        "train": Command(train, "train"),
        "scaling": Command(scaling, "train"),
        "host": Command(host, "bench"),
        "decode": Command(decode, "train"),
        "tune": Command(tune, "bench"),
        "guard": Command(guard, "bench"),
        "report": Command(report, "bench"),
    },
)
