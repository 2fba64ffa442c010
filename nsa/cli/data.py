"""``nsa data``; everything heavy is imported when a command runs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal

from nsa.cli.commands import Command, Group
from nsa.errors import check
from nsa.train.sources import is_mistyped_path

if TYPE_CHECKING:
    from nsa.train.data.preparation import Report

_LINE_S = 10.0  # from one line of progress to the next where there is no terminal


def prepare(
    source: str,
    *,
    out: str,
    subset: str | None = None,
    split: str = "train",
    revision: str | None = None,
    text_field: str = "text",
    tokenizer: Literal["byte", "gpt2", "bpe", "file"] = "gpt2",
    tokenizer_path: str | None = None,
    bpe_vocab_size: int = 8192,
    validation_fraction: float = 0.005,
    max_tokens: int | None = None,
    shard_tokens: int = 100_000_000,
    licence: str | None = None,
    workers: int | None = None,
    time_limit_s: float = 300.0,
) -> int:
    """Tokenise a data set into shards.

    They are memory-mapped files that training reads by number. SOURCE is a data set on the Hugging
    Face hub or a local file or folder: Parquet, JSON lines or text, maybe compressed. For example
      nsa data prepare HuggingFaceFW/fineweb-edu --subset sample-10BT --out data/fineweb-edu-10bt
      nsa data prepare texts/ --tokenizer byte --validation-fraction 0.1 --out data/texts
    Ended at any moment, the same command goes on where it stopped, and the result is bit for bit
    that of a single run.

    Args:
        source: owner/name on the hub, or a file or folder
        out: folder for the shards
        subset: the data set's configuration, for example sample-10BT
        split: its split
        revision: commit, branch or tag on the hub (default the newest commit)
        text_field: column that holds the text
        tokenizer: what makes tokens of it
        tokenizer_path: a tokenizers JSON file, with --tokenizer file
        bpe_vocab_size: with --tokenizer bpe, which is trained
        validation_fraction: documents held out, by hash
        max_tokens: end with the document that reaches N training tokens (default all)
        shard_tokens: size of a shard
        licence: of the text, for the index, where the hub does not state it
        workers: processes that tokenise (default one for each core; bytes need none)
        time_limit_s: give up after S seconds without text
    """
    mistyped = is_mistyped_path(source)
    check(not mistyped, "prepare", "SOURCE", "exist", source, "It is no name on the hub.")
    from nsa.train.data import preparation
    from nsa.train.data.stream import Origin

    config = preparation.PrepareConfig(
        origin=Origin(source, subset, split, revision, text_field),
        tokenizer=tokenizer,
        tokenizer_path=tokenizer_path,
        bpe_vocab_size=bpe_vocab_size,
        validation_fraction=validation_fraction,
        max_tokens=max_tokens,
        shard_tokens=shard_tokens,
        licence=licence,
    )
    with _ProgressLines(max_tokens) as lines:
        index = preparation.prepare(
            config,
            out,
            workers=workers,
            time_limit_s=time_limit_s,
            on_progress=lines.report,
        )
    for side, found in index["sides"].items():
        counts = f"{found['documents']:,} documents, {found['tokens']:,} tokens"
        print(f"{side}: {counts}, {found['text_bytes']:,} bytes of text")
    empty, unreadable = index["left_out"]["empty"], index["left_out"]["unreadable"]
    if empty or unreadable:
        rest = f"{unreadable:,} not UTF-8 or with a NUL byte"
        print(f"left out: {empty:,} rows without text, {rest}")
    kind, size = index["tokenizer"]["kind"], index["tokenizer"]["vocab_size"]
    words = f"--data.source shards --data.path {out} --data.tokenizer {kind}"
    print(f"train on it with: {words} --model.vocab-size {size}")
    return 0


class _ProgressLines:
    """How a preparation goes: a bar on a terminal, a line every ten seconds elsewhere."""

    def __init__(self, max_tokens: int | None) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        percent = TextColumn("{task.percentage:>3.0f}% {task.description}")
        self._bar = Progress(BarColumn(bar_width=16), percent, refresh_per_second=2)
        self._max_tokens = max_tokens
        self._begin: tuple[float, int] | None = None
        self._said = 0.0

    def __enter__(self) -> _ProgressLines:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for task in self._bar.task_ids:
            self._bar.update(task, completed=1.0 if kind is None else None)
        if self._bar.task_ids:
            self._bar.stop()

    def report(self, report: Report) -> None:
        """Show how far it has come."""
        now, is_terminal = time.monotonic(), self._bar.console.is_terminal
        if self._begin is None:  # an interrupted attempt says nothing about the speed of this one
            self._begin, self._said = (now, report.text_bytes), now
            if is_terminal:
                self._bar.add_task("", total=1.0)
                self._bar.start()
            return
        begin, before = self._begin
        done, files = report.files
        share = done / files
        if self._max_tokens is not None:
            share = min(report.train_tokens / self._max_tokens, 1.0)
        speed = f"{(report.text_bytes - before) / 1e6 / max(now - begin, 1e-9):.1f} MB/s"
        size, file = f"{report.text_bytes / 1e9:.2f} GB", f"file {min(done + 1, files)} of {files}"
        if is_terminal:  # all of it fits into 80 columns
            short = f"{speed} | {size} | {report.tokens / 1e9:.2f}G tokens | {file}"
            self._bar.update(self._bar.task_ids[0], completed=share, description=short)
        elif now - self._said >= _LINE_S:
            self._said = now
            counts = f"{report.tokens:,} tokens | {report.documents:,} documents"
            print(f"{speed} | {size} of text | {counts} | {file}", flush=True)


def verify(folder: str) -> int:
    """Compare shards with their SHA-256.

    Every shard of FOLDER is read again. Exit code 2 names what is damaged.

    Args:
        folder: made by nsa data prepare
    """
    from nsa.train.data.shards import open_shards

    files = open_shards(folder, verify=True).files()
    total = sum(size for size, _ in files.values())
    print(f"{len(files)} files, {total:,} bytes: all as {folder}/index.json says")
    return 0


def bench(folder: str, *, seq_len: int = 2048, micro_batch: int = 8, seconds: float = 5.0) -> int:
    """Measure the loader.

    How many tokens a second it delivers from the shards in FOLDER: random windows, collated to
    batches as in training, in this process alone.

    Args:
        folder: made by nsa data prepare
        seq_len: tokens of a window
        micro_batch: windows of a batch
        seconds: time to measure for
    """
    from nsa.train.data.shards import open_shards

    given = {"--seq-len": seq_len, "--micro-batch": micro_batch, "--seconds": seconds}
    for name, value in given.items():
        check(value > 0, "nsa data bench", name, "be positive", value)
    source = open_shards(folder).source("train")
    measured = measure_loader(source, seq_len, micro_batch, seconds)
    batches = f"batches of {micro_batch} windows of {seq_len} tokens"
    print(f"loader: {measured:,.0f} tokens/s, {batches}, one process")
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


COMMANDS = Group(
    "Prepare text for training.\n"
    "Also: check what was prepared, and measure how fast it is read. Formats and examples:\n"
    "docs/data.md.",
    {
        "prepare": Command(prepare, "data"),
        "verify": Command(verify, "train"),
        "bench": Command(bench, "train"),
    },
)
