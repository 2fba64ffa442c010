"""Commands that read the folders of runs, and ``nsa convert``.

Heavy imports are inside the functions.
"""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nsa.errors import check_output, fail

if TYPE_CHECKING:
    from nsa.train.needles import NeedleConfig

Device = Literal["auto", "cpu", "cuda"]


def evaluate(
    run: str,
    *,
    checkpoint: str = "last",
    against: str | None = None,
    split: Literal["validation", "test"] = "validation",
    text: str | None = None,
    seq_len: int | None = None,
    device: Device = "auto",
    json: bool = False,
    windows: int | None = None,
    micro_batch: int | None = None,
    save: Path | None = None,
    repeat: int | None = None,
    needle: bool = False,
    lengths: str | None = None,
    depths: int = 11,
    cases: int = 100,
    distractors: int = 0,
    seed: int = 0,
    passage: int = 0,
    style: Literal["ruler", "recall"] = "ruler",
    recall: bool = False,
    scores: Literal["compressed", "token_max", "index", "random"] | None = None,
) -> int:
    """Measure a trained model on text.

    Evaluate a checkpoint of RUN on its validation text, in bits per byte, and compare it with a
    smoothed bigram model of the training text on the same text; a synthetic task is compared with
    the lowest possible loss instead. --text evaluates any other text from its first to its last
    byte, as lm-eval does:
      nsa eval runs/cpu-small-1 --checkpoint best
      nsa eval runs/nsa --against runs/dense --split test --seq-len 8192 --json
      nsa eval runs/cpu-small-1 --text letters.txt --json
      cat letters.txt | nsa eval runs/cpu-small-1 --text -
      nsa eval runs/cpu-small-1 --repeat 64 --windows 100
      nsa eval runs/nsa --needle --lengths 2048,16384 --windows 100

    Args:
        run: run folder, for example runs/cpu-small-1
        checkpoint: last, best or a step
        against: another run, measured on the same sequences; the difference has an interval
        split: validation for choices, test for reported results
        text: file or folder of text to measure, - for standard input
        seq_len: tokens of a sequence (default the run's)
        device: device to compute on
        json: print one JSON object instead of lines
        windows: number of sequences, evenly spaced in the text (default all)
        micro_batch: sequences computed at a time (default the run's)
        save: file for the sums of each document, which nsa compare reads
        repeat: also measure how well the model repeats passages of this many tokens, by the
            distance back to them
        needle: also measure retrieval: how often the model finds a word in a long context
        lengths: tokens of these contexts, for example 2048,16384 (default a sequence)
        depths: places of the word, evenly from the beginning to the end
        cases: contexts for each length and depth
        distractors: similar sentences about other words in each context
        seed: seed of the contexts
        passage: hide a passage of the text of so many tokens instead of a made-up word
        style: sentence with the word, that of RULER or a line of data.recall
        recall: also measure how often the model completes repeated lines, by the distance back
        scores: select blocks by other scores than in training, to measure what the selection is
            worth; --against keeps its own
    """
    from nsa.train.run_folder import RunFolder

    folder, figures = RunFolder.open(run), dict[str, Any]()
    other = None if against is None else RunFolder.open(against, "--against")
    at_a_time = micro_batch or folder.load_config().micro_batch

    # These import PyTorch; a mistyped path is reported before that.
    from nsa.train.runs.evaluation import evaluate_run
    from nsa.train.watch.out_of_memory import explained

    with explained("the evaluation", lambda: _less_memory(at_a_time, needle)):
        for finding in evaluate_run(
            folder,
            checkpoint=checkpoint,
            against=other,
            split=split,
            text=text,
            seq_len=seq_len,
            device=device,
            num_sequences=windows,
            micro_batch=micro_batch,
            save=save,
            repeat=repeat,
            needle=_needles(needle, lengths, depths, cases, distractors, seed, passage, style),
            recall=recall,
            scores=scores,
        ):
            figures |= finding.figures
            if not json:
                print(finding.line, flush=True)
    if json:
        print(dumps(figures))
    return 0


def _less_memory(micro_batch: int, needle: bool) -> str:
    fewer = f"--micro-batch {micro_batch // 2} or " if micro_batch > 1 else ""
    return f"Give {fewer}{'shorter --lengths or ' * needle}--device cpu."


def _needles(needle: bool, lengths: str | None, *others: Any) -> NeedleConfig | None:
    """Settings of --needle; without it, other options than the defaults are an error."""
    from nsa.cli.bench import parse_lengths
    from nsa.train.needles import NeedleConfig

    tokens = () if lengths is None else tuple(parse_lengths("--lengths", lengths))
    config = NeedleConfig(tokens, *others)
    if not needle and config != NeedleConfig():
        fail("--needle", "be given with --lengths and the options after it", "none")
    return config if needle else None


def compare(files: tuple[Path, ...], *, against: tuple[Path, ...], json: bool = False) -> int:
    """Compare measured models, one seed or several.

    FILES and those of --against were written by nsa eval --save on the same sequences and form
    pairs, such as runs of equal seeds:
      nsa compare nsa-1.npz nsa-2.npz nsa-3.npz --against dense-1.npz dense-2.npz dense-3.npz
    The difference in bits per byte has a 95% interval over documents. With several seeds it also
    has one over seeds, and one over both, which is the one to report.

    Args:
        files: measurements
        against: as many other measurements, in the same order
        json: print one JSON object instead of lines
    """
    from nsa.train.evaluation import in_words
    from nsa.train.measurements import compare

    found = compare(files, against)
    if json:
        print(dumps(found))
        return 0
    for one, other in zip(found["runs"], found["against"], strict=True):
        bits = f"{one['bits_per_byte']:.4f} against {other['bits_per_byte']:.4f} bits per byte"
        print(f"{one['run']} step {one['step']}, {other['run']} step {other['step']}: {bits}")
    print(in_words(found))
    return 0


def inspect(
    run: str,
    *,
    checkpoint: str = "last",
    device: Device = "auto",
    text: str | None = None,
    tokens: int | None = None,
    json: bool = False,
    output: Path | None = None,
    record: Path | None = None,
) -> int:
    """Show which blocks the layers of a model select in a text, and their gates.

    Print a line for each layer of RUN, with the distance of the selected blocks and their overlap
    for neighbouring queries, and write a page with heat maps and curves; --json prints all values.
      nsa inspect runs/cpu-small-1
      nsa inspect runs/cpu-small-1 --text letters.txt --tokens 4096 --json

    Args:
        run: run folder, for example runs/cpu-small-1
        checkpoint: last, best or a step
        device: device to compute on
        text: file or folder of text, - for standard input (default the run's validation text)
        tokens: number of tokens from the start of the text (default a sequence of the run)
        json: print one JSON object instead of lines, with the merged token ranges of eight queries
        output: page to write (default inspection.html in the run)
        record: new .npz file for the block indices of all layers
    """
    from nsa.files import replace_text
    from nsa.train.run_folder import RunFolder

    check_output("--record", record, is_new=True)
    check_output("--output", output)
    folder = RunFolder.open(run)

    from nsa.train.runs.inspection import inspect_run, inspection_page
    from nsa.train.watch.out_of_memory import explained

    with explained("the text", lambda: "Give fewer --tokens or --device cpu."):
        found = inspect_run(
            folder, checkpoint=checkpoint, text=text, device=device, num_tokens=tokens
        )
    target = output or folder.path / "inspection.html"
    replace_text(target, inspection_page(found))
    if record is not None:
        found.record(record)
    if json:
        print(dumps(found.json()))
        return 0
    for line in found.lines():
        print(line)
    print(f"page: {target}")
    return 0


def export(
    run: str,
    folder: Path,
    *,
    checkpoint: str = "last",
    layout: Literal["nsa", "llama"] = "nsa",
    dtype: Literal["fp32", "bf16"] = "fp32",
    shard_size: str = "5GB",
) -> int:
    """Write a trained model as a folder that transformers loads.

    The folder contains weights, configuration, tokenizer and a model card. nsa train CONFIG
    --init-from FOLDER starts a run with its weights.
      nsa export runs/cpu-small-1 my-model
      nsa export runs/cpu-small-dense-1 my-llama --layout llama

    Args:
        run: run folder, for example runs/cpu-small-1
        folder: folder to create
        checkpoint: last, best or a step
        layout: llama for a dense model with SwiGLU, which transformers reads without this package
        dtype: data type of the weights
        shard_size: largest size of a file, for example 500MB
    """
    from nsa.extras import require
    from nsa.train.run_folder import RunFolder

    require("nsa export", "hf")
    opened = RunFolder.open(run)

    from nsa.hf.export import export_run

    print(
        export_run(
            opened, folder, layout=layout, checkpoint=checkpoint, dtype=dtype, shard_size=shard_size
        )
    )
    return 0


def convert(
    model: Path,
    out: Path,
    *,
    num_selected_blocks: int = 24,
    num_init_blocks: int = 1,
    num_local_blocks: int = 9,
    block_size: int = 64,
    scores: Literal["token_max", "compressed", "index", "random"] = "token_max",
    index_dim: int | None = None,
    index_heads: int = 1,
    index_keys: Literal["group", "shared"] = "group",
) -> int:
    """Make a dense pretrained model sparse, without training.

    MODEL is a folder of transformers with a Llama, Mistral, Qwen 2 or Qwen 3. OUT links or copies
    its weights and describes a model that has the selected branch alone. Logits are those of the
    dense model for the first N * SIZE tokens, with N selected blocks of SIZE tokens. Beyond that
    the model reads less than it was trained with: measure it, or train it further.
      nsa convert Qwen3-0.6B sparse
      nsa convert Qwen3-0.6B sparse --num-selected-blocks 64

    Args:
        model: folder with config.json and weights as safetensors, or a GGUF file
        out: folder to create
        num_selected_blocks: blocks that a query attends to, with the forced ones
        num_init_blocks: forced first blocks
        num_local_blocks: forced most recent blocks
        block_size: tokens of a block, 16, 32, 64 or 128
        scores: scores of blocks; token_max is the largest weight of a token; an index is
            smaller, and has to be trained
        index_dim: size of an index query and key; as of the heads if not given
        index_heads: index queries of an index key
        index_keys: one index key for each KV head, or one that all share
    """
    from nsa.extras import require

    require("nsa convert", "hf")

    from nsa.hf.convert import convert

    line = convert(
        model,
        out,
        num_selected_blocks=num_selected_blocks,
        num_init_blocks=num_init_blocks,
        num_local_blocks=num_local_blocks,
        block_size=block_size,
        scores=scores,
        index_dim=index_dim,
        index_heads=index_heads,
        index_keys=index_keys,
    )
    print(line)
    return 0


def check(run: str) -> int:
    """Check that the records of a run agree.

    Recompute step counts, tokens and tokens/s of RUN from its records, and compare metrics.jsonl,
    metrics.csv and TensorBoard value by value. If they differ, print the first differences and end
    with exit code 1.

    Args:
        run: run folder, for example runs/cpu-small-1
    """
    from nsa.train.run_folder import RunFolder
    from nsa.train.runs.check import check_run

    folder = RunFolder.open(run)
    summary, found = check_run(folder)
    result = f"{len(found)} records disagree" if found else "everything agrees"
    for line in summary:
        print(f"{folder.path}: {line}")
    for line in found:
        print(f"  {line}")
    print(f"{folder.path}: {result}")
    return 1 if found else 0


def report(runs: tuple[str, ...], *, output: Path | None = None) -> int:
    """Write an HTML page about one run or several.

    The page shows curves, gates, events, environment and differences of the configurations. It is
    one file that needs no network.

    Args:
        runs: run folders; several are compared
        output: page to write (default report.html in the first run)
    """
    from nsa.files import replace_text
    from nsa.train.run_folder import RunFolder
    from nsa.train.runs.report import report_page

    check_output("--output", output)
    folders = [RunFolder.open(run) for run in runs]
    target = output or folders[0].path / "report.html"
    replace_text(target, report_page(folders))
    print(f"report: {target}")
    return 0


def track(
    run: str,
    *,
    to: str,
    project: str = "nsa",
    follow: bool = False,
) -> int:
    """Send the metrics of a run to a tracker.

    trackio keeps them on this machine; wandb sends them to Weights & Biases. Training never waits
    for a tracker: this command reads metrics.jsonl during the run or afterwards, and continues
    after the last row that it has sent.

    Args:
        run: run folder, for example runs/cpu-small-1
        to: trackio or wandb; the package must be installed
        project: project of the tracker
        follow: continue with new rows until the run ends
    """
    from nsa.train.run_folder import RunFolder
    from nsa.train.runs import tracking

    for line in tracking.track(RunFolder.open(run), to, project=project, follow=follow):
        print(line, flush=True)
    return 0
