"""Words of ``nsa eval`` and ``nsa generate``; everything heavy is imported when a command runs."""

from __future__ import annotations

import argparse
import codecs
import json
import sys
from collections.abc import Sequence
from typing import Any

from nsa.errors import check, fail

EVAL = """\
Measure a checkpoint of RUN on its held-out text, in bits per byte, beside a smoothed bigram model of the training text on
exactly the same held-out text; a synthetic task has the lowest possible loss beside it instead. Or on any other text:
  nsa eval runs/cpu-small-1 --checkpoint best
  nsa eval runs/cpu-small-1 --text letters.txt --json
  cat letters.txt | nsa eval runs/cpu-small-1 --text -
"""

GENERATE = """\
Continue prompts with a checkpoint of RUN. The text is printed as it is drawn; of several prompts the first one is, and the
others follow when it has ended. The same seed gives the same text on the same machine.
"""


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="run folder, for example runs/cpu-small-1")
    parser.add_argument("--checkpoint", default="last", metavar="WHICH", help="last, best or a step (default last)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), help="where to compute (default auto)")


def add_eval(parser: argparse.ArgumentParser) -> None:
    """Words of ``nsa eval``."""
    _add_run(parser)
    parser.add_argument("--text", metavar="PATH", help="file or folder of text to measure, - for standard input")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--windows", type=int, metavar="N", help="windows to measure, the first ones (default all)")
    parser.add_argument(
        "--micro-batch",
        type=int,
        metavar="N",
        help="windows computed at a time (default the run's)",
    )


def run_eval(args: argparse.Namespace) -> int:
    """``nsa eval``."""
    from nsa.train.run_folder import RunFolder

    folder, figures = RunFolder.open(args.run), dict[str, Any]()
    config = folder.load_config()
    from nsa.train.execution.precision import choose_device
    from nsa.train.runs.evaluation import evaluate_run  # PyTorch from here on: a mistyped path is answered without it
    from nsa.train.watch.out_of_memory import check_fits, explained

    check_fits("eval", config.model, choose_device(args.device or "auto"), training=False)
    windows = args.micro_batch or config.micro_batch
    fewer = f"--micro-batch {windows // 2} or " if windows > 1 else ""
    with explained("eval", "the evaluation", lambda: f"Give {fewer}--device cpu."):
        for finding in evaluate_run(
            folder, checkpoint=args.checkpoint, text=args.text, device=args.device or "auto", num_windows=args.windows,
            micro_batch=args.micro_batch,
        ):  # fmt: skip
            figures |= finding.figures
            if not args.json:
                print(finding.line, flush=True)
    if args.json:
        print(json.dumps(figures))
    return 0


def add_generate(parser: argparse.ArgumentParser) -> None:
    """Words of ``nsa generate``."""
    _add_run(parser)
    parser.add_argument(
        "--prompt",
        action="append",
        required=True,
        metavar="TEXT",
        help="text to continue, - for standard input as it is; may be given several times",
    )
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="tokens to draw at most (default 256)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="X",
        help="below 1 bolder guesses are rarer, 0 takes the likeliest (default 0.8)",
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="draw among the K likeliest tokens (default 0: all)")
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw among the likeliest tokens that reach probability P (default 1)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="prompt i draws with seed N + i (default 0)")


def run_generate(args: argparse.Namespace) -> int:
    """``nsa generate``."""
    from nsa.train.run_folder import RunFolder

    folder = RunFolder.open(args.run)
    config = folder.load_config()
    from nsa.train.checkpoint import find_checkpoint
    from nsa.train.data import load_tokenizer
    from nsa.train.execution.precision import choose_device
    from nsa.train.generation import generate  # PyTorch from here on, as above
    from nsa.train.runs.inference import load_model
    from nsa.train.watch.out_of_memory import check_fits, explained

    checkpoint = find_checkpoint("generate", folder.checkpoints, args.checkpoint)
    device = choose_device(args.device or "auto")
    check_fits("generate", config.model, device, training=False)
    prompts = _prompts(args.prompt)
    hint = "Give fewer prompts, fewer --max-new-tokens or --device cpu."
    with explained("generate", "the text", lambda: hint):
        model, _ = load_model(config.model, checkpoint, device)
        steps = generate(
            model, load_tokenizer(folder.tokenizer), prompts,
            max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_k=args.top_k,
            top_p=args.top_p, seed=args.seed, compute_dtype=config.compute_dtype,
        )  # fmt: skip
        _print_texts(prompts, steps)
    return 0


def _prompts(given: Sequence[str]) -> list[str]:
    """The prompts, one of which may be standard input."""
    check(given.count("-") <= 1, "generate", "--prompt", "be - once", f"it {given.count('-')} times")
    return [_standard_input() if prompt == "-" else prompt for prompt in given]


def _standard_input() -> str:
    content = sys.stdin.buffer.read()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        fail("generate", "standard input", "be text in UTF-8", f"another byte at offset {error.start}")


def _print_texts(prompts: Sequence[str], steps: Any) -> None:
    """Print the first continuation as it comes, then the others."""
    decoders = [codecs.getincrementaldecoder("utf-8")(errors="replace") for _ in prompts]
    waiting = [""] * len(prompts)

    def show(text: str) -> None:
        print(text, end="", flush=True)

    for index, prompt in enumerate(prompts):
        if len(prompts) > 1:
            show(f"--- prompt {index + 1}\n")
        show(prompt + waiting[index])
        for pieces in steps if index == 0 else ():
            texts = [decoder.decode(piece) for decoder, piece in zip(decoders, pieces, strict=True)]
            show(texts[0])
            waiting = [before + text for before, text in zip(waiting, texts, strict=True)]
        show(decoders[index].decode(b"", final=True) + "\n")
