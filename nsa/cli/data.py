"""Words of ``nsa data``; everything heavy is imported when a command runs."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from nsa.errors import check
from nsa.train.sources import is_mistyped_path

if TYPE_CHECKING:
    from nsa.train.data.preparation import Report

DATA = """\
Prepare text for training, check what was prepared, and measure how fast it is read. Formats and
examples: docs/data.md.
"""

PREPARE = """\
Tokenise a data set once, into memory-mapped shards that training reads by number. SOURCE is a data
set on the Hugging Face hub or a local file or folder: Parquet, JSON lines or text, which may be
compressed. For example
  nsa data prepare HuggingFaceFW/fineweb-edu --subset sample-10BT --out data/fineweb-edu-10bt
  nsa data prepare texts/ --tokenizer byte --validation-fraction 0.1 --out data/texts
Ended at any moment, the same command goes on where it stopped, and the result is bit for bit that
of a single run.
"""

VERIFY = """\
Read every shard of FOLDER again and compare it with its SHA-256. Exit code 2 names what is damaged.
"""

BENCH = """\
Measure how many tokens a second the loader delivers from the shards in FOLDER: random windows,
collated to batches as in training, in this process alone.
"""

_LINE_S = 10.0  # from one line of progress to the next where there is no terminal


def add_prepare(parser: argparse.ArgumentParser) -> None:
    """Words of ``nsa data prepare``."""
    add = parser.add_argument
    add("source", metavar="SOURCE", help="owner/name on the hub, or a file or folder")
    add("--out", metavar="FOLDER", required=True, help="folder for the shards")
    add("--subset", metavar="NAME", help="the data set's configuration, for example sample-10BT")
    add("--split", default="train", metavar="NAME", help="its split (default %(default)s)")
    add("--revision", metavar="ID", help="commit, branch or tag on the hub (default the newest)")
    add(
        "--text-field",
        default="text",
        metavar="NAME",
        help="column that holds the text (default %(default)s)",
    )
    kinds = ("byte", "gpt2", "bpe", "file")
    add("--tokenizer", default="gpt2", choices=kinds, help="(default %(default)s)")
    add("--tokenizer-path", metavar="FILE", help="a tokenizers JSON file, with --tokenizer file")
    add(
        "--bpe-vocab-size",
        type=int,
        default=8192,
        metavar="N",
        help="with --tokenizer bpe, which is trained (default %(default)s)",
    )
    add(
        "--validation-fraction",
        type=float,
        default=0.005,
        metavar="X",
        help="documents for validation, by hash (default %(default)s)",
    )
    add(
        "--max-tokens",
        type=int,
        metavar="N",
        help="end with the document that reaches N training tokens (default: all)",
    )
    add(
        "--shard-tokens",
        type=int,
        default=100_000_000,
        metavar="N",
        help="size of a shard (default %(default)s)",
    )
    add("--licence", metavar="TEXT", help="of the text, where the hub does not state it")
    add(
        "--workers",
        type=int,
        metavar="N",
        help="threads that tokenise (default one for each core; bytes need one)",
    )
    add(
        "--time-limit-s",
        type=float,
        default=300.0,
        metavar="S",
        help="give up after S seconds without text (default %(default)g)",
    )


def run_prepare(args: argparse.Namespace) -> int:
    """``nsa data prepare``."""
    hint = "It is no name on the hub."
    check(not is_mistyped_path(args.source), "prepare", "SOURCE", "exist", args.source, hint)
    from nsa.train.data import Origin, PrepareConfig, prepare

    given = vars(args)
    origin = Origin(**{name: given[name] for name in Origin.__dataclass_fields__})
    names = PrepareConfig.__dataclass_fields__.keys() - {"origin"}
    config = PrepareConfig(origin, **{name: given[name] for name in names})
    lines = _ProgressLines(args.max_tokens)
    with lines.bar:
        index = prepare(
            config,
            args.out,
            workers=args.workers,
            time_limit_s=args.time_limit_s,
            on_progress=lines.report,
        )
    for side, found in index["sides"].items():
        documents, tokens = f"{found['documents']:,} documents", f"{found['tokens']:,} tokens"
        print(f"{side}: {documents}, {tokens}, {found['text_bytes']:,} bytes of text")
    empty, unreadable = (index["left_out"][name] for name in ("empty", "unreadable"))
    if empty or unreadable:
        print(f"left out: {empty:,} rows without text, {unreadable:,} not UTF-8 or with a NUL byte")
    tokenizer = index["tokenizer"]
    data = f"--data.source shards --data.path {args.out} --data.tokenizer {tokenizer['kind']}"
    print(f"train on it with: {data} --model.vocab-size {tokenizer['vocab_size']}")
    return 0


class _ProgressLines:
    """How a preparation goes: a bar on a terminal, a line every ten seconds elsewhere."""

    def __init__(self, max_tokens: int | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._max_tokens = max_tokens
        self._is_terminal = Console().is_terminal
        percentage = TextColumn("{task.percentage:>3.0f}%")
        self.bar = Progress(
            BarColumn(bar_width=16),
            percentage,
            TextColumn("{task.description}"),
            refresh_per_second=2,
            disable=not self._is_terminal,
        )
        self._task = self.bar.add_task("", total=1.0)
        self._begin: tuple[float, int] | None = None
        self._said = time.monotonic()

    def report(self, report: Report) -> None:
        """Show how far it has come."""
        now, progress = time.monotonic(), report.progress
        size = sum(progress.text_bytes.values())
        # What an interrupted attempt did says nothing about the speed of this one.
        begin, before = self._begin = self._begin or (now, size)
        tokens = sum(writer.total("tokens") for writer in report.writers.values())
        done, files = progress.place[0], len(report.found.files)
        share = done / files
        if self._max_tokens is not None:
            share = min(report.writers["train"].total("tokens") / self._max_tokens, 1.0)
        speed = f"{(size - before) / 1e6 / max(now - begin, 1e-9):.1f} MB/s"
        text, file = f"{size / 1e9:.2f} GB", f"file {min(done + 1, files)} of {files}"
        short = f"{speed} | {text} | {tokens / 1e9:.2f}G tokens | {file}"  # fits into 80 columns
        self.bar.update(self._task, completed=share, description=short)
        if not self._is_terminal and now - self._said >= _LINE_S:
            self._said = now
            documents = sum(writer.total("documents") for writer in report.writers.values())
            counts = f"{tokens:,} tokens | {documents:,} documents"
            print(f"{speed} | {text} of text | {counts} | {file}", flush=True)


def add_verify(parser: argparse.ArgumentParser) -> None:
    """Words of ``nsa data verify``."""
    parser.add_argument("folder", metavar="FOLDER", help="made by nsa data prepare")


def run_verify(args: argparse.Namespace) -> int:
    """``nsa data verify``."""
    from nsa.train.data import open_shards

    files = open_shards(args.folder, verify=True).files()
    total = sum(size for size, _ in files.values())
    print(f"{len(files)} files, {total:,} bytes: all as {args.folder}/index.json says")
    return 0


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Words of ``nsa data bench``."""
    add_verify(parser)
    add = parser.add_argument
    windows, batch = "tokens of a window", "windows of a batch"
    add("--seq-len", type=int, default=2048, metavar="N", help=f"{windows} (default %(default)s)")
    add("--micro-batch", type=int, default=8, metavar="N", help=f"{batch} (default %(default)s)")
    add("--seconds", type=float, default=5.0, metavar="S", help="time to measure for (default 5)")


def run_bench(args: argparse.Namespace) -> int:
    """``nsa data bench``."""
    from nsa.train.data import Sampler, collate, open_shards

    for name in ("seq_len", "micro_batch", "seconds"):
        option, value = f"--{name.replace('_', '-')}", getattr(args, name)
        check(value > 0, "nsa data bench", option, "be positive", value)
    source, windows = open_shards(args.folder).source("train"), args.micro_batch
    sampler = Sampler(source.num_windows(args.seq_len), seed=0)
    begin, batches = time.perf_counter(), 0  # the start of an epoch is included
    while (elapsed := time.perf_counter() - begin) < args.seconds:
        indices = sampler.next_windows(windows)
        collate(source, indices, args.seq_len, document_mask=True)
        batches += 1
    speed = batches * windows * args.seq_len / elapsed
    batch = f"batches of {windows} windows of {args.seq_len} tokens"
    print(f"loader: {speed:,.0f} tokens/s, {batch}, one process")
    return 0
