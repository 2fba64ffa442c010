"""``nsa bench``; everything heavy is imported when a command runs."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

from nsa import configs
from nsa.cli.commands import Command, Group
from nsa.errors import check, option

Dtype = Literal["bfloat16", "float16", "float32"]

_MOST = 2**30  # tokens, steps and the like: positions are counted in 32 bits
_PACKAGE = Path(__file__).resolve().parents[1]
COMMITTED = "committed"  # rows that the package carries


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
    out: Path | None = None,
    commit: str | None = None,
) -> int:
    """Measure the attention operators.

    Whole attention and each operator, forward and forward with backward, compared with dense
    attention and FlexAttention of PyTorch and with the reference. A result is compared with fp64 on
    sampled rows before it is timed; a wrong one gets no time, and the exit code is 1. For example
      nsa bench attention --shape seed --seqs 2048,65536 --out benchmarks/results/mine.jsonl
      nsa bench attention --case attention.choice --variant fp8:score_precision=fp8
      nsa bench attention --case attention.selected --choice random,recorded --recorded run.npz
      nsa bench attention --provider reference --seqs 512 --tokens 512      (without a GPU)

    Args:
        shape: seed, wide, paper or HqxHkvxDxDv
        seqs: lengths S
        tokens: of all sequences together (default 65536 for seed, else one sequence)
        dtype: of the inputs
        choice: random, shared4, shared16, or recorded with case attention.selected
        recorded: file of nsa inspect --record with the selections of a trained model
        case: for example attention,attention.window (default all)
        provider: nsa, dense-cudnn, dense-fa2, flex, reference (default all)
        variant: NAME:KEY=VALUE,...: nsa with other fields of NSAConfig; may be given several times
        out: JSONL file to append the rows to
        commit: commit to record if the checkout has no git
    """
    from nsa.bench import attention as bench
    from nsa.bench.cases import CASES

    words = _words("--provider", provider, bench.PROVIDERS)
    variants = [bench.parse_variant(text) for text in variant or []]
    providers = [*(bench.PROVIDERS[name] for name in words), *variants]
    cases = _words("--case", case, CASES)
    fits, rule = recorded is None or cases == ["attention.selected"], "be attention.selected"
    check(fits, "--case", f"{rule} with --recorded", case)
    points = _points(shape, seqs, tokens, dtype, choice, recorded)
    bench.check_machine(providers, points)
    results = _results(out, commit)
    bench.bench_attention(results, points, providers, cases)
    return results.finish()


def train(
    *,
    config: str = "78m",
    variant: list[str] | None = None,
    provider: str | None = None,
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
    """Measure training steps, on one GPU or several.

    Steps of a configuration by the trainer itself, on the text that it names: tokens/s, step time,
    MFU, memory; and the forward pass alone. It is compared with the dense model, and with a dense
    model whose MLP is widened to as many parameters. Loss and gradients are compared with the fp64
    reference first; a wrong model gets no time, and the exit code is 1. Under torchrun the global
    batch is divided among the processes, and the time of NCCL's kernels is measured too, with the
    part of it in which nothing else runs. For example
      nsa bench train --config 78m --out benchmarks/results/mine.jsonl
      nsa bench train --config 78m --tokens 65536 --micro-batch 32 --provider nsa,dense
      nsa bench train --variant eager:compile=false --provider nsa     (A/B of a setting)
      torchrun --standalone --nproc-per-node 2 -m nsa bench train --provider nsa --out rows.jsonl

    Args:
        config: configuration
        variant: NAME:KEY=VALUE,...: the configuration with other settings; may be given several
            times
        provider: nsa, dense, dense-matched (default all)
        seqs: other lengths S, for example 2048,8192
        tokens: other tokens of an optimizer step
        micro_batch: most sequences of one forward and backward
        mode: fwd, fwd_bwd; under torchrun fwd_bwd alone
        warmup: steps before the timed ones
        steps: timed steps
        out: JSONL file to append the rows to
        commit: commit to record if the checkout has no git
        settings: of all runs
    """
    from nsa.bench.cases import MODES
    from nsa.bench.train import PROVIDERS, bench_train, find_runs

    _in_range(1, tokens=tokens, micro_batch=micro_batch, steps=steps)
    _in_range(0, warmup=warmup)
    names = _words("--provider", provider, PROVIDERS)
    return bench_train(
        find_runs(Path(config), settings, variant or [], names),
        configs.name_in_rows(Path(config)),
        seqs=[None] if seqs is None else parse_lengths("--seqs", seqs),
        tokens=tokens,
        micro_batch=micro_batch,
        modes=_words("--mode", mode, MODES),
        warmup=warmup,
        steps=steps,
        out=out,
        commit=commit,
    )


def host(
    *,
    shape: str = "seed",
    tokens: str = "256,2048,8192",
    provider: str | None = None,
    mode: str | None = None,
    lora: int = 0,
    out: Path | None = None,
    commit: str | None = None,
) -> int:
    """Measure what a layer costs the CPU.

    Milliseconds in which one call, forward or forward with backward, is issued while the GPU is
    idle, and kernels launched: a layer with bf16 weights,
    eager and compiled, compared with the attention layer of transformers' Llama (SDPA) in the same
    run. Results are compared with fp64 first; a wrong one gets no time, and the exit code is 1. For
    example
      nsa bench host --out benchmarks/host/mine.jsonl
      nsa bench host --mode compiled --tokens 2048
      nsa bench host --mode fwd,fwd_bwd --lora 16

    Args:
        shape: seed, wide, paper or HqxHkvxDxDv
        tokens: tokens, one sequence each
        provider: nsa, llama (default both)
        mode: fwd, fwd_bwd, compiled (default all)
        lora: rank of LoRA adapters on all projections, which are then trained alone (default none)
        out: JSONL file to append the rows to
        commit: commit to record if the checkout has no git
    """
    from nsa.bench.cases import parse_shape
    from nsa.bench.host import MODES, PROVIDERS, bench_host

    heads, lengths = parse_shape(shape), parse_lengths("--tokens", tokens)
    names, modes = _words("--provider", provider, PROVIDERS), _words("--mode", mode, MODES)
    check(lora >= 0, "--lora", "be at least 0", lora)
    results = _results(out, commit)
    bench_host(results, shape, heads, lengths, providers=names, modes=modes, lora=lora)
    return results.finish()


def decode(
    *,
    case: str | None = None,
    shape: str = "wide",
    config: Path = Path("78m"),
    provider: str | None = None,
    points: str | None = None,
    variant: list[str] | None = None,
    out: Path | None = None,
    commit: str | None = None,
    **settings: str,
) -> int:
    """Measure decoding.

    Attention of one step alone, compared with the fastest dense attention over static keys and
    values; greedy steps of a whole model with random weights after a long context, compared with
    the dense model. Milliseconds, tokens/s, launches, and the bytes that attention reads. Results
    are compared with fp64 first; a wrong one gets no time, and the exit code is 1. For example
      nsa bench decode --out benchmarks/results/mine.jsonl
      nsa bench decode --case decode.attention --shape seed --points 65536,65536x64
      nsa bench decode --case decode.model --config 78m-8k --points 2048,16384x64
      nsa bench decode --config 78m-8k --shape seed --variant index:scores=index
      nsa bench decode --case decode.model --config cpu-small --points 256      (without a GPU)

    Args:
        case: decode.attention, decode.model (default both)
        shape: of decode.attention: seed, wide, paper or HqxHkvxDxDv
        config: of decode.model (see nsa configs)
        provider: nsa; of attention also dense-cudnn, dense-fa2, dense-efficient-folded, dense-flex,
            dense-scan, .., reference; of models dense, dense-matched, hf (generate of transformers
            with this library's model), transformers (with a Llama of equal size)
        points: tokens of context, with xB for B sequences (default those of the targets)
        variant: NAME:KEY=VALUE,...: nsa with other fields of NSAConfig; may be given several times
        out: JSONL file to append the rows to
        commit: commit to record if the checkout has no git
        settings: of the models
    """
    from nsa.bench.attention import parse_variant
    from nsa.bench.cases import parse_shape
    from nsa.bench.decode import CASES, PROVIDERS, bench_decode
    from nsa.bench.train import differences
    from nsa.train.load import load_config

    cases, heads = _words("--case", case, CASES), parse_shape(shape)
    names = None if provider is None else _words("--provider", provider, PROVIDERS)
    found = None if points is None else _contexts(points)
    hint = "Without one give short contexts: nsa bench decode --config cpu-small --points 256"
    fits = found is not None or _device().type == "cuda"
    check(fits, "this machine", "have a CUDA GPU", "none", hint)
    variants = [parse_variant(text, PROVIDERS) for text in variant or []]
    run, results = load_config(config, settings), _results(out, commit)
    bench_decode(
        results,
        shape,
        heads,
        run,
        configs.name_in_rows(config),
        cases=cases,
        providers=names,
        points=found,
        variants=variants,
        changed=differences(load_config(config), run),
    )
    return results.finish()


def consumers(
    *,
    shape: str = "seed",
    seqs: str = "2048,8192",
    tokens: int | None = None,
    dtype: Dtype = "bfloat16",
    choice: str = "random",
    recorded: Path | None = None,
    out: Path | None = None,
    commit: str | None = None,
) -> int:
    """Measure four ways to attend to selected blocks.

    The selected branch by its block indices; FlexAttention with a block mask; FlexAttention with
    token ranges that are merged on the GPU; and keys and values that are gathered for each query.
    Rows have the time of each stage, tokens/s and peak memory. Results are compared with fp64
    first; a wrong one gets no time, and the exit code is 1.

    Args:
        shape: seed, wide, paper or HqxHkvxDxDv
        seqs: lengths S
        tokens: of all sequences together (default 65536 for seed, else one sequence)
        dtype: of the inputs
        choice: random, shared4, shared16, recorded
        recorded: file of nsa inspect --record with the selections of a trained model
        out: JSONL file to append the rows to
        commit: commit to record if the checkout has no git
    """
    from nsa.bench.attention import bench_attention
    from nsa.bench.consumers import CONSUMERS

    points = _points(shape, seqs, tokens, dtype, choice, recorded)
    results = _results(out, commit)
    bench_attention(results, points, CONSUMERS)
    return results.finish()


def tune(
    *,
    shape: str = "seed",
    seqs: str = "2048,65536",
    kernel: str = "*",
    out: Path | None = None,
) -> int:
    """Choose the tiles of the kernels for this GPU.

    Candidate tiles are measured, and the tuning table is written that the library reads from then
    on. Nothing is tuned unless this command is run.

    Args:
        shape: seed, wide, paper or HqxHkvxDxDv
        seqs: lengths S
        kernel: pattern of their names, for example window_attention_*
        out: table to write (default that of this GPU inside the package)
    """
    from nsa.bench.tune import bench_tune

    points = _points(shape, seqs, None, "bfloat16", "random")
    return bench_tune(points, kernel=kernel, out=out)


def report(
    rows: tuple[str, ...],
    *,
    out: Path | None = None,
    guard: tuple[str, ...] | None = None,
    tolerance: float = 0.05,
) -> int:
    """Make a report from measured rows, or compare them with earlier ones.

    A table with ratios and targets. With --out also a page with plots: times over length, ratios to
    dense attention, memory. With --guard the ratios to dense attention, of time and of memory, are
    compared with those of a baseline from the same kind of GPU; exit code 1 if one is worse by more
    than the tolerance, or if a row is wrong. For example
      nsa bench report mine.jsonl --out report
      nsa bench report mine.jsonl --guard committed

    Args:
        rows: files of rows, or folders of them
        out: folder for report.md and its plots
        guard: files or folders of baseline rows; committed: those that the package carries
        tolerance: fraction by which a ratio may be worse
    """
    from nsa.bench import report as pages
    from nsa.bench.rows import read_rows

    check(tolerance >= 0, "--tolerance", "be at least 0", tolerance)
    files = row_files("ROWS", rows)
    new = read_rows(files)
    print(pages.write_report(new, out) if out is not None else pages.result_table(new))
    if guard is None:
        return 0
    known = [] if COMMITTED not in guard else carried_rows("results")
    known += row_files("--guard", [path for path in guard if path != COMMITTED])
    own = {path.resolve() for path in files}
    baseline = read_rows([path for path in known if path.resolve() not in own])
    lines, passed = pages.guard(new, baseline, tolerance)
    print("\n".join(lines))
    return 0 if passed else 1


def row_files(option: str, paths: Sequence[str]) -> list[Path]:
    """Return files of rows: named files, and those in named folders, which may contain others.

    Raises:
        ValueError: a path does not exist.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        check(path.exists(), option, "be a file or folder of rows that exists", path)
        found += _rows_in(path) if path.is_dir() else [path]
    return found


def carried_rows(*folders: str) -> list[Path]:
    """Return files of committed rows, from the wheel or from ``benchmarks/``.

    Args:
        folders: folders of ``benchmarks``, for example ``results``.
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


def _points(
    shape: str,
    seqs: str,
    tokens: int | None,
    dtype: Dtype,
    choice: str,
    recorded: Path | None = None,
) -> list[Any]:
    import torch

    from nsa.bench.cases import CHOICES, Point, batch_of, parse_shape

    _in_range(1, tokens=tokens)
    heads, device, kind = parse_shape(shape), _device(), getattr(torch, dtype)
    choices = _words("--choice", choice, CHOICES)
    fits = ("recorded" in choices) == (recorded is not None)
    check(fits, "--recorded", "be given with choice recorded and only then", recorded)
    return [
        Point(shape, heads, seq_len, batch_of(shape, seq_len, tokens), each, kind, device, recorded)
        for each in choices
        for seq_len in parse_lengths("--seqs", seqs)
    ]


def _results(out: Path | None, commit: str | None) -> Any:
    from nsa.bench.report import Results

    return Results(out, _device(), commit)


def _in_range(least: int, **given: int | None) -> None:
    for name, value in given.items():
        fits = value is None or least <= value <= _MOST
        check(fits, option(name), f"be from {least} to {_MOST:,}", value)


def parse_lengths(option: str, text: str) -> list[int]:
    """Read lengths with commas between them; ``option`` names them in errors."""
    words = text.split(",")
    fits = all(re.fullmatch("[0-9]{1,10}", word) and 0 < int(word) <= _MOST for word in words)
    rule = f"be lengths from 1 to {_MOST:,} with commas between them"
    check(fits, option, rule, repr(text), "For example: 2048,65536")
    return [int(word) for word in words]


def _contexts(text: str) -> list[tuple[int, int]]:
    from nsa.bench.attention import MIN_LENGTH

    form, words = r"([1-9][0-9]{0,9})(?:x([1-9][0-9]{0,9}))?", text.split(",")
    found = [word for word in (re.fullmatch(form, word) for word in words) if word]
    points = [(int(word[1]), int(word[2] or 1)) for word in found]
    fits = len(points) == len(words)
    fits &= all(a >= MIN_LENGTH and a * b <= _MOST for a, b in points)
    rule = f"be at least {MIN_LENGTH} tokens or TOKENSxSEQUENCES, with commas between them"
    hint = f"For example: 2048,65536x32; at most {_MOST:,} tokens."
    check(fits, "--points", rule, repr(text), hint)
    return points


def _words(option: str, text: str | None, known: Collection[str]) -> list[str]:
    """Split words at commas, each once; None means all that are known."""
    words = list(known) if text is None else list(dict.fromkeys(text.split(",")))
    for word in words:
        check(word in known, option, f"be among {', '.join(known)}", repr(word))
    return words


def _device() -> Any:
    import torch

    cuda = torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


COMMANDS = Group(
    "Measure this library's speed and compare it with others.\n"
    "Also: tune the tiles of its kernels for this GPU, and make a report. How to repeat the\n"
    "committed measurements, and what each field of a row means: docs/benchmarks.md.",
    {
        "attention": Command(attention, "bench"),
        "train": Command(train, "train"),
        "host": Command(host, "bench"),
        "decode": Command(decode, "train"),
        "consumers": Command(consumers, "bench"),
        "tune": Command(tune, "bench"),
        "report": Command(report, "bench"),
    },
)
