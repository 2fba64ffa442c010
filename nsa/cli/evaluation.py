"""``nsa eval``; everything heavy is imported when it runs."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Any, Literal

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
) -> int:
    """Measure a trained model on text.

    A checkpoint of RUN on its validation text, in bits per byte, compared with a smoothed bigram
    model of the training text on exactly the same text; a synthetic task is compared with the
    lowest possible loss instead. Or on any other text, whose files count from the first to the
    last byte, as lm-eval counts them:
      nsa eval runs/cpu-small-1 --checkpoint best
      nsa eval runs/nsa --against runs/dense --split test --seq-len 8192 --json
      nsa eval runs/cpu-small-1 --text letters.txt --json
      cat letters.txt | nsa eval runs/cpu-small-1 --text -
      nsa eval runs/cpu-small-1 --repeat 64 --windows 100

    Args:
        run: run folder, for example runs/cpu-small-1
        checkpoint: last, best or a step
        against: another run, measured on the same windows; the difference has an interval
        split: validation, by which choices are made, or test, for what is reported
        text: file or folder of text to measure, - for standard input
        seq_len: tokens of a window (default the run's)
        device: where to compute
        json: one JSON object instead of lines
        windows: windows to measure, spread over the text (default all)
        micro_batch: windows computed at a time (default the run's)
        save: file for the sums of each document, which nsa compare reads
        repeat: also measure how well the model repeats passages of so many tokens, by the distance
            back to them
    """
    from nsa.train.run_folder import RunFolder

    folder, figures = RunFolder.open(run), dict[str, Any]()
    other = None if against is None else RunFolder.open(against, "--against")
    config = folder.load_config()

    # PyTorch from here on: a mistyped path is answered without it.
    from nsa.train.execution.precision import choose_device
    from nsa.train.runs.evaluation import evaluate_run
    from nsa.train.watch.out_of_memory import check_fits, explained

    for one in (folder, other):
        if one is not None:
            check_fits("eval", one.load_config().model, choose_device(device), training=False)
    at_a_time = micro_batch or config.micro_batch
    fewer = f"--micro-batch {at_a_time // 2} or " if at_a_time > 1 else ""
    with explained("eval", "the evaluation", lambda: f"Give {fewer}--device cpu."):
        for finding in evaluate_run(
            folder,
            checkpoint=checkpoint,
            against=other,
            split=split,
            text=text,
            seq_len=seq_len,
            device=device,
            num_windows=windows,
            micro_batch=micro_batch,
            save=save,
            repeat=repeat,
        ):
            figures |= finding.figures
            if not json:
                print(finding.line, flush=True)
    if json:
        print(dumps(figures))
    return 0


def compare(files: tuple[Path, ...], *, against: tuple[Path, ...], json: bool = False) -> int:
    """Compare measured models, one seed or several.

    FILES and those of --against, written by nsa eval --save on the same windows, belong together
    in pairs, such as runs of equal seeds:
      nsa compare nsa-1.npz nsa-2.npz nsa-3.npz --against dense-1.npz dense-2.npz dense-3.npz
    The difference in bits per byte has a 95% interval over documents. With several seeds there is
    one over seeds, and one over both: the one to report.

    Args:
        files: measurements
        against: as many others, in the same order
        json: one JSON object instead of lines
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
