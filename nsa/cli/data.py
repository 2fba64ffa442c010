"""``nsa data``; everything heavy is imported when a command runs."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Literal

from nsa.cli.commands import Command, Group
from nsa.errors import check_output


def prepare(
    source: str,
    *,
    out: str,
    subset: str | None = None,
    split: str = "train",
    revision: str | None = None,
    text_field: str = "text",
    pattern: str | None = None,
    tokenizer: Literal["byte", "gpt2", "bpe", "file"] = "gpt2",
    tokenizer_path: str | None = None,
    bpe_vocab_size: int = 8192,
    validation_fraction: float = 0.005,
    test_fraction: float = 0.0,
    max_tokens: int | None = None,
    shard_tokens: int = 100_000_000,
    licence: str | None = None,
    workers: int | None = None,
    time_limit_s: float = 300.0,
) -> int:
    """Tokenise a data set into shards.

    Shards are memory-mapped files, which training reads in any order. SOURCE is a data set on the
    Hugging Face hub or a local file or folder: Parquet, JSON lines or text (.txt, .md), which may
    be compressed. For example
      nsa data prepare HuggingFaceFW/fineweb-edu --subset sample-10BT --out data/fineweb-edu-10bt
      nsa data prepare texts/ --tokenizer byte --validation-fraction 0.1 --out data/texts
    If it is interrupted, the same command goes on where it stopped, and the result is bit for bit
    that of a single run.

    Args:
        source: owner/name on the hub, or a file or folder
        out: folder for the shards
        subset: the data set's configuration, for example sample-10BT
        split: its split
        revision: commit, branch or tag on the hub (default the newest commit)
        text_field: column that contains the text
        pattern: files of a local folder, for example '*.py' (default all of a known format)
        tokenizer: what makes tokens of it
        tokenizer_path: a tokenizers JSON file, with --tokenizer file
        bpe_vocab_size: with --tokenizer bpe, which is trained
        validation_fraction: documents for validation, by hash
        test_fraction: documents for the test split, by hash
        max_tokens: end with the document that reaches N training tokens (default all)
        shard_tokens: size of a shard
        licence: of the text, for the index, where the hub does not state it
        workers: threads that tokenise (default one for each core; bytes need one)
        time_limit_s: give up after S seconds without text
    """
    from nsa.train import data
    from nsa.train.data.reader import Pace
    from nsa.train.data.shards import INDEX

    config = data.PrepareConfig(
        origin=data.Origin(source, subset, split, revision, text_field, pattern),
        tokenizer=tokenizer,
        tokenizer_path=tokenizer_path,
        bpe_vocab_size=bpe_vocab_size,
        validation_fraction=validation_fraction,
        test_fraction=test_fraction,
        max_tokens=max_tokens,
        shard_tokens=shard_tokens,
        licence=licence,
    )
    is_complete, pace = (Path(out) / INDEX).exists(), Pace()
    index = data.prepare(
        config,
        out,
        workers=workers,
        time_limit_s=time_limit_s,
        on_progress=lambda line: pace.is_due() and print(line, flush=True),
    )
    if is_complete:
        print(f"{out} was complete; SOURCE was not read again")
    for side, found in index["sides"].items():
        counts = f"{found['documents']:,} documents, {found['tokens']:,} tokens"
        print(f"{side}: {counts}, {found['text_bytes']:,} bytes of text")
    empty, unreadable = index["left_out"]["empty"], index["left_out"]["unreadable"]
    if empty or unreadable:
        odd = f"{unreadable:,} not UTF-8 or with a NUL byte"
        print(f"left out: {empty:,} rows without text, {odd}")
    kind, size = index["tokenizer"]["kind"], index["tokenizer"]["vocab_size"]
    words = f"--data.source shards --data.path {out} --data.tokenizer {kind}"
    print(f"train on it with: {words} --model.vocab-size {size}")
    return 0


def verify(folder: str) -> int:
    """Compare shards with their SHA-256.

    Every shard of FOLDER is read again. Exit code 2 names what is damaged.

    Args:
        folder: made by nsa data prepare
    """
    from nsa.train.data import open_shards

    files = open_shards(folder, verify=True).files()
    total = sum(size for size, _ in files.values())
    print(f"{len(files)} files, {total:,} bytes: all as {folder}/index.json says")
    return 0


def needles(
    out: str,
    *,
    size: int = 2048,
    number: int = 100,
    seed: int = 0,
    task: Literal["single", "multi_key", "variables"] = "single",
) -> int:
    """Write prompts that hide what they ask for in a text.

    One JSON object a line, with prompt, answer and depth, as lm-eval reads them by
    docs/lm_eval/needles.yaml, multi_key.yaml and variables.yaml. They resemble RULER's tasks
    niah_single_1, niah_multikey_1 and vt.

    Args:
        out: file to make
        size: bytes of a prompt
        number: prompts
        seed: of what is hidden, and where
        task: one number, one of four numbers, or the variables of one of two chains
    """
    from nsa.files import replace_text
    from nsa.train.needles import needle_prompts

    check_output("OUT", Path(out), is_new=True)
    lines = [dumps(row) for row in needle_prompts(size, number, seed, task)]
    replace_text(Path(out), "\n".join(lines) + "\n")
    print(f"{out}: {number:,} prompts of at most {size:,} bytes")
    return 0


COMMANDS = Group(
    "Prepare text for training.\n"
    "Also: check what was prepared, and make prompts to evaluate with. Formats and examples:\n"
    "docs/data.md.",
    {
        "prepare": Command(prepare, "train"),
        "verify": Command(verify, "train"),
        "needles": Command(needles, "train"),
    },
)
