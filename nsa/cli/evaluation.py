"""``nsa eval`` and ``nsa generate``; everything heavy is imported when a command runs."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Sequence
from json import dumps
from typing import Any, Literal

from nsa.errors import check, fail

Device = Literal["auto", "cpu", "cuda"]


def evaluate(
    run: str,
    *,
    checkpoint: str = "last",
    device: Device = "auto",
    text: str | None = None,
    json: bool = False,
    windows: int | None = None,
    micro_batch: int | None = None,
) -> int:
    """Measure a trained model on text.

    A checkpoint of RUN on its validation text, in bits per byte, compared with a smoothed bigram
    model of the training text on exactly the same text; a synthetic task is compared with the
    lowest possible loss instead. Or on any other text:
      nsa eval runs/cpu-small-1 --checkpoint best
      nsa eval runs/cpu-small-1 --text letters.txt --json
      cat letters.txt | nsa eval runs/cpu-small-1 --text -

    Args:
        run: run folder, for example runs/cpu-small-1
        checkpoint: last, best or a step
        device: where to compute
        text: file or folder of text to measure, - for standard input
        json: one JSON object instead of lines
        windows: windows to measure, the first ones (default all)
        micro_batch: windows computed at a time (default the run's)
    """
    from nsa.train.run_folder import RunFolder

    folder, figures = RunFolder.open(run), dict[str, Any]()
    config = folder.load_config()

    # PyTorch from here on: a mistyped path is answered without it.
    from nsa.train.execution.precision import choose_device
    from nsa.train.runs.evaluation import evaluate_run
    from nsa.train.watch.out_of_memory import check_fits, explained

    check_fits("eval", config.model, choose_device(device), training=False)
    at_a_time = micro_batch or config.micro_batch
    fewer = f"--micro-batch {at_a_time // 2} or " if at_a_time > 1 else ""
    with explained("eval", "the evaluation", lambda: f"Give {fewer}--device cpu."):
        for finding in evaluate_run(
            folder,
            checkpoint=checkpoint,
            text=text,
            device=device,
            num_windows=windows,
            micro_batch=micro_batch,
        ):
            figures |= finding.figures
            if not json:
                print(finding.line, flush=True)
    if json:
        print(dumps(figures))
    return 0


def generate(
    run: str,
    *,
    checkpoint: str = "last",
    device: Device = "auto",
    prompt: list[str],
    max_new_tokens: int = 256,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> int:
    """Let a trained model continue a prompt.

    The text is printed as it is drawn; of several prompts the first one is, and the others follow
    when it has ended. The same seed gives the same text on the same machine.

    Args:
        run: run folder, for example runs/cpu-small-1
        checkpoint: last, best or a step
        device: where to compute
        prompt: text to continue, - for standard input as it is; may be given several times
        max_new_tokens: tokens to draw at most
        temperature: below 1 bolder guesses are rarer, 0 takes the likeliest
        top_k: draw among the K likeliest tokens, 0 for all
        top_p: draw among the likeliest tokens that reach probability P
        seed: prompt i draws with seed N + i
    """
    from nsa.train.run_folder import RunFolder

    folder = RunFolder.open(run)
    config = folder.load_config()

    # PyTorch from here on, as above.
    from nsa.train import generation
    from nsa.train.checkpoint import find_checkpoint
    from nsa.train.data import load_tokenizer
    from nsa.train.execution.precision import choose_device
    from nsa.train.runs.inference import load_model
    from nsa.train.watch.out_of_memory import check_fits, explained

    path = find_checkpoint("generate", folder.checkpoints, checkpoint)
    where = choose_device(device)
    check_fits("generate", config.model, where, training=False)
    prompts = _prompts(prompt)
    hint = "Give fewer prompts, fewer --max-new-tokens or --device cpu."
    with explained("generate", "the text", lambda: hint):
        model, _ = load_model(config.model, path, where)
        steps = generation.generate(
            model,
            load_tokenizer(folder.tokenizer),
            prompts,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            compute_dtype=config.compute_dtype,
        )
        _print_texts(prompts, steps)
    return 0


def _prompts(given: Sequence[str]) -> list[str]:
    """The prompts, one of which may be standard input."""
    times = given.count("-")
    check(times <= 1, "generate", "--prompt", "be - once", f"it {times} times")
    return [_standard_input() if prompt == "-" else prompt for prompt in given]


def _standard_input() -> str:
    content = sys.stdin.buffer.read()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        fail(
            "generate",
            "standard input",
            "be text in UTF-8",
            f"another byte at offset {error.start}",
        )


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
