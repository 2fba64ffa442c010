"""Words of ``nsa data``; everything heavy is imported when a command runs."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from nsa.errors import check
from nsa.train.sources import is_mistyped_path

if TYPE_CHECKING:
    from nsa.train.data.preparation import Report

DATA = """\
Prepare text for training, check what was prepared, and measure how fast it is read. Formats and examples: docs/data.md.
"""

PREPARE = """\
Tokenise a data set once, into memory-mapped shards that training reads by number. SOURCE is a data set on the Hugging Face hub
or a local file or folder: Parquet, JSON lines or text, maybe compressed. For example
  nsa data prepare HuggingFaceFW/fineweb-edu --subset sample-10BT --out data/fineweb-edu-10bt
  nsa data prepare texts/ --tokenizer byte --validation-fraction 0.1 --out data/texts
Ended at any moment, the same command goes on where it stopped, and the result is bit for bit that of a single run.
"""

VERIFY = """\
Read every shard of FOLDER again and compare it with its SHA-256. Exit code 2 names what is damaged.
"""

BENCH = """\
Measure how many tokens a second the loader delivers from the shards in FOLDER: random windows, collated to batches as in
training, in this process alone.
"""

_LINE_S = 10.0  # from one line of progress to the next where there is no terminal


def add_prepare(parser: argparse.ArgumentParser) -> None:
    """Words of ``nsa data prepare``."""
    add = parser.add_argument
    add("source", metavar="SOURCE", help="owner/name on the hub, or a file or folder")
    add("--out", metavar="FOLDER", required=True, help="folder for the shards")
    add("--subset", metavar="NAME", help="the data set's configuration, for example sample-10BT")
    add("--split", default="train", metavar="NAME", help="its split (default train)")
    add("--revision", metavar="ID", help="commit, branch or tag on the hub (default the newest commit)")
    add("--text-field", default="text", metavar="NAME", help="column that holds the text (default text)")
    add("--tokenizer", default="gpt2", choices=("byte", "gpt2", "bpe", "file"), help="(default gpt2)")
    add("--tokenizer-path", metavar="FILE", help="a tokenizers JSON file, with --tokenizer file")
    add("--bpe-vocab-size", type=int, default=8192, metavar="N", help="with --tokenizer bpe, which is trained (default 8192)")
    add("--validation-fraction", type=float, default=0.005, metavar="X", help="documents held out, by hash (default 0.005)")
    add("--max-tokens", type=int, metavar="N", help="end with the document that reaches N training tokens (default: all)")
    add("--shard-tokens", type=int, default=100_000_000, metavar="N", help="size of a shard (default 100000000)")
    add("--licence", metavar="TEXT", help="of the text, for the index, where the hub does not state it")
    add("--workers", type=int, metavar="N", help="processes that tokenise (default one for each core; bytes need none)")
    add("--time-limit-s", type=float, default=300.0, metavar="S", help="give up after S seconds without text (default 300)")


def run_prepare(args: argparse.Namespace) -> int:
    """``nsa data prepare``."""
    check(not is_mistyped_path(args.source), "prepare", "SOURCE", "exist", args.source, "It is no name on the hub.")
    from nsa.train.data.preparation import PrepareConfig, prepare
    from nsa.train.data.stream import Origin

    config = PrepareConfig(
        origin=Origin(args.source, args.subset, args.split, args.revision, args.text_field),
        tokenizer=args.tokenizer,
        tokenizer_path=args.tokenizer_path,
        bpe_vocab_size=args.bpe_vocab_size,
        validation_fraction=args.validation_fraction,
        max_tokens=args.max_tokens,
        shard_tokens=args.shard_tokens,
        licence=args.licence,
    )
    with _ProgressLines(args.max_tokens) as lines:
        index = prepare(config, args.out, workers=args.workers, time_limit_s=args.time_limit_s, on_progress=lines.report)
    for side, found in index["sides"].items():
        print(f"{side}: {found['documents']:,} documents, {found['tokens']:,} tokens, {found['text_bytes']:,} bytes of text")
    left_out = index["left_out"]
    if any(left_out.values()):
        print(f"left out: {left_out['empty']:,} rows without text, {left_out['unreadable']:,} not UTF-8 or with a NUL byte")
    tokenizer = index["tokenizer"]
    words = f"--data.source shards --data.path {args.out} --data.tokenizer {tokenizer['kind']}"
    print(f"train on it with: {words} --model.vocab-size {tokenizer['vocab_size']}")
    return 0


class _ProgressLines:
    """How a preparation goes: a bar on a terminal, a line every ten seconds elsewhere."""

    def __init__(self, max_tokens: int | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._max_tokens = max_tokens
        self._console = Console()
        columns = (BarColumn(bar_width=16), TextColumn("{task.percentage:>3.0f}%"), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=self._console, refresh_per_second=2)
        self._begin: tuple[float, int] | None = None
        self._said = 0.0

    def __enter__(self) -> _ProgressLines:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar.task_ids:
            if kind is None:
                self._bar.update(self._bar.task_ids[0], completed=1.0)
            self._bar.stop()

    def report(self, report: Report) -> None:
        """Show how far it has come."""
        now = time.monotonic()
        if self._begin is None:  # what an interrupted attempt did says nothing about the speed of this one
            self._begin = (now, report.text_bytes)
            self._said = now
            if self._console.is_terminal:
                self._bar.add_task("", total=1.0)
                self._bar.start()
            return
        rate = (report.text_bytes - self._begin[1]) / 1e6 / max(now - self._begin[0], 1e-9)
        done, files = report.files
        share = done / files if self._max_tokens is None else min(report.train_tokens / self._max_tokens, 1.0)
        speed, size, file = f"{rate:.1f} MB/s", f"{report.text_bytes / 1e9:.2f} GB", f"file {min(done + 1, files)} of {files}"
        if self._console.is_terminal:  # all of it fits into 80 columns
            short = f"{speed} | {size} | {report.tokens / 1e9:.2f}G tokens | {file}"
            self._bar.update(self._bar.task_ids[0], completed=share, description=short)
        elif now - self._said >= _LINE_S:
            self._said = now
            print(f"{speed} | {size} of text | {report.tokens:,} tokens | {report.documents:,} documents | {file}", flush=True)


def add_verify(parser: argparse.ArgumentParser) -> None:
    """Words of ``nsa data verify``."""
    parser.add_argument("folder", metavar="FOLDER", help="made by nsa data prepare")


def run_verify(args: argparse.Namespace) -> int:
    """``nsa data verify``."""
    from nsa.train.data.shards import open_shards

    shards = open_shards(args.folder, verify=True)
    files = shards.files()
    total = sum(size for size, _ in files.values())
    print(f"{len(files)} files, {total:,} bytes: all as {args.folder}/index.json says")
    return 0


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Words of ``nsa data bench``."""
    add_verify(parser)
    parser.add_argument("--seq-len", type=int, default=2048, metavar="N", help="tokens of a window (default 2048)")
    parser.add_argument("--micro-batch", type=int, default=8, metavar="N", help="windows of a batch (default 8)")
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help="time to measure for (default 5)")


def run_bench(args: argparse.Namespace) -> int:
    """``nsa data bench``."""
    from nsa.train.data.shards import open_shards

    for name in ("seq_len", "micro_batch", "seconds"):
        check(getattr(args, name) > 0, "nsa data bench", f"--{name.replace('_', '-')}", "be positive", getattr(args, name))
    measured = measure_loader(open_shards(args.folder).source("train"), args.seq_len, args.micro_batch, args.seconds)
    print(f"loader: {measured:,.0f} tokens/s, batches of {args.micro_batch} windows of {args.seq_len} tokens, one process")
    return 0


def measure_loader(source: Any, seq_len: int, micro_batch: int, seconds: float) -> float:
    """Tokens a second that sampler and collation deliver, the start of an epoch included.

    Args:
        source: a :class:`nsa.train.data.source.TokenSource`.
        seq_len: tokens of a window.
        micro_batch: windows of a batch.
        seconds: time to measure for.
    """
    from nsa.train.data import Sampler, collate

    sampler = Sampler(source.num_windows(seq_len), seed=0)
    begin, batches = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - begin) < seconds:
        collate(source, sampler.next_windows(micro_batch), seq_len, document_mask=True)
        batches += 1
    return batches * micro_batch * seq_len / elapsed
