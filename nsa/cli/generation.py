"""``nsa generate``; everything heavy is imported when it runs."""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa.cli.evaluation import Device
from nsa.errors import check, check_output, fail

if TYPE_CHECKING:
    from nsa.train.generation import Generation, Speed
    from nsa.train.run_folder import RunFolder


def generate(
    run: str,
    *,
    checkpoint: str = "last",
    device: Device = "auto",
    prompt: list[str] | None = None,
    prompt_file: Path | None = None,
    interactive: bool = False,
    max_new_tokens: int = 256,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: list[str] | None = None,
    seed: int = 0,
    batch_size: int = 16,
    show_selection: bool = False,
    selection_png: Path | None = None,
) -> int:
    """Let a trained model continue a prompt.

    The text is printed as it is drawn; of several prompts the first one is, and the others follow
    when it has ended. The same seed gives the same text on the same machine. Tokens and tokens/s
    follow on standard error.
      nsa generate runs/cpu-small-1 --prompt 'Once' --min-p 0.05 --stop 'The end'
      nsa generate runs/cpu-small-1 --interactive

    Args:
        run: run folder, for example runs/cpu-small-1
        checkpoint: last, best or a step
        device: where to compute
        prompt: text to continue, - for standard input as it is; may be given several times
        prompt_file: file of prompts, one a line; with .jsonl one object a line, its field prompt or
            text; empty lines do not count
        interactive: read prompts from the terminal; each line continues the text so far, an empty
            one ends, Ctrl-C stops a text
        max_new_tokens: tokens to draw at most
        temperature: below 1 bolder guesses are rarer, 0 takes the likeliest
        top_k: draw among the K likeliest tokens, 0 for all
        top_p: draw among the likeliest tokens that reach probability P
        min_p: draw among tokens with at least P times the probability of the likeliest
        repetition_penalty: above 1 tokens of prompt and continuation become less likely
        stop: end a text before this string; may be given several times
        seed: prompt i draws with seed N + i
        batch_size: prompts that are continued together
        show_selection: show where each layer looked, on standard error and as selection.png; for
            one prompt at a time
        selection_png: another file for that picture
    """
    from nsa.train.run_folder import RunFolder

    _check_sources(prompt or [], prompt_file, interactive)
    check(batch_size > 0, "generate", "--batch-size", "be positive", batch_size)
    folder = RunFolder.open(run)
    folder.load_config()
    prompts = [*_given(prompt or []), *_from_file(prompt_file)]
    picture = selection_png or (Path("selection.png") if show_selection else None)
    is_one = picture is None or interactive or len(prompts) == 1
    check(is_one, "generate", "--show-selection", "go with one prompt", len(prompts))
    check_output("generate", "--selection-png", picture)

    # PyTorch from here on: a mistyped path is answered without it.
    from nsa.train.sampling import Sampling

    options = {
        "sampling": Sampling(temperature, top_k, top_p, min_p, repetition_penalty),
        "max_new_tokens": max_new_tokens,
        "stop": stop or [],
    }
    with _writer(folder, checkpoint, device, seed, picture, options) as writer:
        if interactive:
            writer.converse()
        else:
            writer.write(prompts, batch_size)
    return 0


# --- prompts --------------------------------------------------------------------------------------
def _check_sources(prompt: Sequence[str], prompt_file: Path | None, interactive: bool) -> None:
    """Refuse words without a prompt, or with prompts that exclude each other."""
    name, has_prompts = "generate", bool(prompt) or prompt_file is not None
    rule = "be given, or --prompt-file or --interactive"
    check(has_prompts or interactive, name, "--prompt", rule, "none of them")
    rule = "stand without --prompt and --prompt-file"
    check(not (has_prompts and interactive), name, "--interactive", rule, "both")
    times = [*prompt].count("-")
    check(times <= 1, name, "--prompt", "be - once", f"it {times} times")


def _given(prompts: Sequence[str]) -> list[str]:
    """The prompts of the command line, one of which may be standard input."""
    return [
        _decoded("standard input", sys.stdin.buffer.read()) if prompt == "-" else prompt
        for prompt in prompts
    ]


def _from_file(path: Path | None) -> list[str]:
    """The prompts of a file; its empty lines do not count."""
    if path is None:
        return []
    name, argument = "generate", "--prompt-file"
    check(path.is_file(), name, argument, "name an existing file", path)
    content = _decoded(argument, path.read_bytes())
    if path.suffix == ".jsonl":
        content = content.removeprefix("\ufeff")  # the mark belongs to the file, not to a text
    lines = content.replace("\r\n", "\n").split("\n")
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if path.suffix == ".jsonl":
            found = _field(line)
            rule = "hold objects with a text under prompt or text"
            check(found is not None, name, argument, rule, f"line {number} of {path}")
            line = found or ""
        prompts.append(line)
    check(bool(prompts), name, argument, "hold a prompt", f"none in {path}")
    return prompts


def _field(line: str) -> str | None:
    """The prompt of a line of JSON."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    found = [row.get(name) for name in ("prompt", "text")] if isinstance(row, dict) else []
    return next((text for text in found if isinstance(text, str)), None)


def _decoded(what: str, content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        fail("generate", what, "be text in UTF-8", f"another byte at offset {error.start}")


def _lines() -> Iterator[str]:
    """Lines that are typed, until an empty one or the end of input."""
    mark = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    try:
        while line := input(mark):
            yield line
    except EOFError:
        return
    except UnicodeDecodeError as error:
        fail("generate", "standard input", "be text in UTF-8", f"byte {error.start} of a line")


# --- texts ----------------------------------------------------------------------------------------
@contextmanager
def _writer(
    folder: RunFolder,
    checkpoint: str,
    device: Device,
    seed: int,
    picture: Path | None,
    options: dict[str, Any],
) -> Iterator[_Writer]:
    """What prints the texts of a run's model, loaded for the while."""
    from nsa.train import generation
    from nsa.train.checkpoint import find_checkpoint
    from nsa.train.data import load_tokenizer
    from nsa.train.execution.precision import choose_device
    from nsa.train.runs.inputs import load_model
    from nsa.train.runs.inspection import check_selects
    from nsa.train.watch.out_of_memory import check_fits, explained

    config = folder.load_config()
    path = find_checkpoint("generate", folder.checkpoints, checkpoint)
    where = choose_device(device)
    check_fits("generate", config.model, where, training=False)
    if picture is not None:
        check_selects("generate", "--show-selection", config.model)
    hint = "Give a smaller --batch-size, fewer --max-new-tokens or --device cpu."
    with explained("generate", "the text", lambda: hint):
        model, _ = load_model(config.model, path, where)
        tokenizer, dtype = load_tokenizer(folder.tokenizer), config.compute_dtype

        def start(prompts: Sequence[str], number: int) -> Generation:
            given = {**options, "seed": seed + number, "compute_dtype": dtype}
            return generation.generate(model, tokenizer, prompts, **given)

        def look(generation: Generation, prompt_len: int) -> Iterator[str]:
            assert picture is not None
            return _selection(generation, prompt_len, picture)

        yield _Writer(start, None if picture is None else look)


def _selection(generation: Generation, prompt_len: int, picture: Path) -> Iterator[str]:
    """Lines on where each layer looked for the first text, and the heat maps as a file.

    The model reads the text once more, without the cache.
    """
    from nsa.lm.inspection import inspect_text
    from nsa.train.execution.precision import autocast
    from nsa.train.runs.inspection import heat_maps, selection_lines
    from nsa.train.runs.page import save_png

    model, tokens = generation.model, generation.tokens[0]
    # The last token was drawn and has looked nowhere yet.
    tokens = tokens[:-1] if len(tokens) > prompt_len else tokens
    last, first = len(tokens) - 1, prompt_len - 1
    with autocast(model.embedding.weight.device, generation.compute_dtype):
        layers = inspect_text(model, tokens, queries=[last], first_query=first)
    yield from selection_lines(layers, last)
    save_png(heat_maps(layers, len(tokens)), picture)
    yield f"heat maps: {picture}"


@dataclass(frozen=True)
class _Writer:
    """Prints texts as they are drawn.

    Attributes:
        start: continues prompts, the first of which has this number.
        look: lines on where each layer looked for the first text, whose prompt has so many tokens;
            None for none.
    """

    start: Callable[[Sequence[str], int], Generation]
    look: Callable[[Generation, int], Iterator[str]] | None

    def write(self, prompts: Sequence[str], batch_size: int) -> None:
        """Continue prompts; of a batch the first text is shown as it comes, then the others."""
        from nsa.train.generation import Speed

        speed = Speed()
        for first in range(0, len(prompts), batch_size):
            batch = prompts[first : first + batch_size]
            generation = self.start(batch, first)
            prompt_len = len(generation.tokens[0])
            waiting, steps = [""] * len(batch), _texts(generation)
            for index, prompt in enumerate(batch):
                if len(prompts) > 1:
                    _show(f"--- prompt {first + index + 1}\n")
                _show(prompt + waiting[index])
                for texts in steps:  # all of them with the first text
                    _show(texts[0])
                    waiting = [old + new for old, new in zip(waiting, texts, strict=True)]
                _show("\n")
            speed += generation.speed
        self._tell(generation, prompt_len, speed)

    def converse(self) -> None:
        """Continue the text so far with each line that is typed.

        The model reads all of it again each time: what is on the terminal, and nothing else.
        """
        text = ""
        for turn, line in enumerate(_lines()):
            text += f"\n{line}" if text else line
            generation = self.start([text], turn)
            prompt_len = len(generation.tokens[0])
            try:
                for (piece,) in _texts(generation):
                    _show(piece)
                    text += piece
            except KeyboardInterrupt:  # ends this text alone
                pass
            _show("\n")
            self._tell(generation, prompt_len, generation.speed)

    def _tell(self, generation: Generation, prompt_len: int, speed: Speed) -> None:
        """What there is to say beside the text."""
        looked = () if self.look is None else self.look(generation, prompt_len)
        for line in (speed.line(), *looked):
            print(line, file=sys.stderr)


def _texts(generation: Generation) -> Iterator[list[str]]:
    """What each text gains in a step, in whole characters."""
    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in generation.tokens]
    for pieces in generation:
        yield [decoder.decode(piece) for decoder, piece in zip(decoders, pieces, strict=True)]
    yield [decoder.decode(b"", final=True) for decoder in decoders]


def _show(text: str) -> None:
    print(text, end="", flush=True)
