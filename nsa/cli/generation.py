"""``nsa generate`` and ``nsa demo``; heavy imports are inside the functions."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa.cli.runs import Device
from nsa.errors import check, check_output, fail
from nsa.files import new_file

if TYPE_CHECKING:
    import torch

    from nsa.demo import Answer, Hidden, Reader
    from nsa.ops._triton.ahead import KernelsAhead
    from nsa.train.generation import Generation, Speed
    from nsa.train.run_folder import RunFolder

Start = Callable[[Sequence[str], int], "Generation"]  # prompts and the number of the first one


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
    """Continue prompts with a trained model.

    The text is printed while it is drawn; of several prompts the first one is, and the others
    follow when it has ended. The same seed gives the same text on the same machine. Tokens and
    tokens/s are printed on standard error.
      nsa generate runs/cpu-small-1 --prompt 'Once' --min-p 0.05 --stop 'The end'
      nsa generate runs/cpu-small-1 --interactive

    Args:
        run: run folder, for example runs/cpu-small-1
        checkpoint: last, best or a step
        device: device to compute on
        prompt: text to continue, - for standard input; may be given several times
        prompt_file: file with one prompt per line; empty lines are ignored
        interactive: read prompts from the terminal; each line continues the text so far, an empty
            line ends the session, Ctrl-C stops a text
        max_new_tokens: largest number of tokens to draw
        temperature: lower values make unlikely tokens rarer, 0 takes the likeliest
        top_k: draw among the K likeliest tokens, 0 for all
        top_p: draw among the likeliest tokens that reach probability P
        min_p: draw among tokens with at least P times the probability of the likeliest
        repetition_penalty: above 1 tokens of prompt and continuation become less likely
        stop: end a text before this string; may be given several times
        seed: prompt i draws with seed N + i
        batch_size: prompts that are continued together
        show_selection: show the blocks that each layer selected, on standard error and as
            selection.png; for one prompt at a time
        selection_png: another file for that picture
    """
    from nsa.train.run_folder import RunFolder

    has_prompts, rule = bool(prompt or prompt_file), "be given, or --prompt-file or --interactive"
    check(has_prompts or interactive, "--prompt", rule, "none of them")
    rule = "be given without --prompt and --prompt-file"
    check(not (has_prompts and interactive), "--interactive", rule, "both")
    check(batch_size > 0, "--batch-size", "be positive", batch_size)
    folder = RunFolder.open(run)
    config = folder.load_config()
    prompts = [*_given(prompt or []), *_from_file(prompt_file)]
    picture = selection_png or (Path("selection.png") if show_selection else None)
    is_one = picture is None or interactive or len(prompts) == 1
    rule = "be left out for several prompts"
    check(is_one, "--show-selection", rule, len(prompts))
    check_output("--selection-png", picture)

    # These import PyTorch; a mistyped path is reported before that.
    from nsa.train.generation import Sampling
    from nsa.train.watch.out_of_memory import explained

    options = {
        "sampling": Sampling(temperature, top_k, top_p, min_p, repetition_penalty),
        "max_new_tokens": max_new_tokens,
        "stop": stop or [],
        "compute_dtype": config.compute_dtype,
    }
    hint = "Give a smaller --batch-size, fewer --max-new-tokens or --device cpu."
    with explained("the text", lambda: hint):
        first, selects = prompts[:batch_size], picture is not None
        start = _starter(folder, checkpoint, device, seed, options, first, selects=selects)
        if interactive:
            _converse(start, picture)
        else:
            _write(prompts, batch_size, start, picture)
    return 0


def _starter(
    folder: RunFolder,
    checkpoint: str,
    device: Device,
    seed: int,
    options: dict[str, Any],
    prompts: Sequence[str],
    *,
    selects: bool,
) -> Start:
    """Load the model of a run, which must have the selected branch if ``selects``.

    ``prompts`` are the first texts; there may be none yet.
    """
    from nsa.lm.model import LanguageModel
    from nsa.train import generation
    from nsa.train.checkpoint import find_checkpoint, load_tensors
    from nsa.train.data import load_tokenizer
    from nsa.train.execution.precision import choose_device
    from nsa.train.state import weights

    config = folder.load_config().model
    path, where = find_checkpoint(folder.checkpoints, checkpoint), choose_device(device)
    if selects:
        from nsa.train.runs.inspection import check_selects

        check_selects("--show-selection", config)
    model, tokenizer = LanguageModel(config).eval(), load_tokenizer(folder.tokenizer)

    def generate(texts: Sequence[str], number: int) -> generation.Generation:
        return generation.Generation(model, tokenizer, texts, seed=seed + number, **options)

    # The first kernels are compiled while the weights are loaded.
    ahead = _compiled_ahead(generate(prompts, 0).run_on_cpu, where) if prompts else None
    load_tensors(path, weights(model.to(where)))

    def start(texts: Sequence[str], number: int) -> generation.Generation:
        found = generate(texts, number)
        if number == 0:
            _wait(ahead or _compiled_ahead(found.run_on_cpu, where))
        return found

    return start


def _compiled_ahead(run: Callable[[], None], device: torch.device) -> KernelsAhead | None:
    """Start to compile the kernels that ``run`` records; None on a CPU."""
    if device.type != "cuda":
        return None
    from nsa.ops._triton.ahead import KernelsAhead

    return KernelsAhead(run, device)


def _wait(compiling: KernelsAhead | None) -> None:
    if compiling is not None:
        if not compiling.is_done(1.0):
            print("compiling kernels, once for this GPU and model", file=sys.stderr)
        compiling.wait()


# --- prompts --------------------------------------------------------------------------------------
def _given(prompts: Sequence[str]) -> list[str]:
    """Prompts of the command line, one of which may be standard input."""
    times = [*prompts].count("-")
    check(times <= 1, "--prompt -", "be given only once", f"it {times} times")
    return [
        _decoded("standard input", sys.stdin.buffer.read()) if prompt == "-" else prompt
        for prompt in prompts
    ]


def _from_file(path: Path | None) -> list[str]:
    """Prompts of a file; its empty lines are ignored."""
    if path is None:
        return []
    check(path.is_file(), "--prompt-file", "name an existing file", path)
    content = _decoded("--prompt-file", path.read_bytes())
    lines = content.replace("\r\n", "\n").split("\n")
    prompts = [line for line in lines if line.strip()]
    check(bool(prompts), "--prompt-file", "contain a prompt", f"none in {path}")
    return prompts


def _decoded(what: str, content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        fail(what, "be text in UTF-8", f"another byte at offset {error.start}")


def _lines() -> Iterator[str]:
    """Lines that are typed, until an empty one or the end of input."""
    mark = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    try:
        while line := input(mark):
            yield line
    except EOFError:
        return
    except UnicodeDecodeError as error:
        fail("standard input", "be text in UTF-8", f"byte {error.start} of a line")


# --- texts ----------------------------------------------------------------------------------------
def _write(prompts: Sequence[str], batch_size: int, start: Start, picture: Path | None) -> None:
    """Continue prompts; of a batch the first text is shown while it is drawn, then the others."""
    from nsa.train.generation import Speed

    speed = Speed()
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        generation = start(batch, first)
        prompt_len = len(generation.tokens[0])
        waiting, steps = [""] * len(batch), _texts(generation)
        for index, prompt in enumerate(batch):
            if len(prompts) > 1:
                _show(f"--- prompt {first + index + 1}\n")
            _show(prompt + waiting[index])
            for texts in steps:  # all of them while the first text is shown
                _show(texts[0])
                waiting = [old + new for old, new in zip(waiting, texts, strict=True)]
            _show("\n")
        speed += generation.speed
    _report(generation, prompt_len, speed, picture)


def _converse(start: Start, picture: Path | None) -> None:
    """Continue the text so far with each line that is typed; the model reads it all each time."""
    text = ""
    for turn, line in enumerate(_lines()):
        text += f"\n{line}" if text else line
        generation = start([text], turn)
        prompt_len = len(generation.tokens[0])
        try:
            for (piece,) in _texts(generation):
                _show(piece)
                text += piece
        except KeyboardInterrupt:  # ends this text only
            pass
        _show("\n")
        _report(generation, prompt_len, generation.speed, picture)


def _texts(generation: Generation) -> Iterator[list[str]]:
    """New text of each prompt in a step, in whole characters."""
    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in generation.tokens]
    for pieces in generation:
        yield [decoder.decode(piece) for decoder, piece in zip(decoders, pieces, strict=True)]
    yield [decoder.decode(b"", final=True) for decoder in decoders]


def _show(text: str) -> None:
    print(text, end="", flush=True)


def _report(generation: Generation, prompt_len: int, speed: Speed, picture: Path | None) -> None:
    """Print the speed and, with a picture, the selection of the first text."""
    print(speed.line(), file=sys.stderr)
    if picture is None:
        return
    from nsa.train.execution.precision import autocast
    from nsa.train.runs.inspection import heat_maps, inspect_text, selection_lines
    from nsa.train.runs.report import save_png

    # The model reads the text again, without the cache. The last drawn token has no selection.
    model, tokens = generation.model, generation.tokens[0]
    tokens = tokens[:-1] if len(tokens) > prompt_len else tokens
    with autocast(model.embedding.weight.device, generation.compute_dtype):
        layers = inspect_text(model, tokens)
    for line in selection_lines(layers):
        print(line, file=sys.stderr)
    save_png(heat_maps(layers, prompt_len - 1), picture)
    print(f"heat maps: {picture}", file=sys.stderr)


# --- nsa demo -------------------------------------------------------------------------------------
def demo(
    *,
    length: int = 65536,
    needles: int = 5,
    seed: int = 0,
    device: Device = "auto",
    text: Path | None = None,
    picture: Path = Path("demo.png"),
) -> int:
    """Find lines in a book with a small trained model.

    The model and the book come with the package. Lines such as 'The number of kavopi is 482135.'
    are inserted in the book, the model reads it once, answers a question about each line, and
    continues the book. A picture shows which blocks of the book it read for the answers.
      nsa demo --length 16384 --text letters.txt

    Args:
        length: tokens of the text with its lines; a token is a byte
        needles: lines
        seed: of the words in the lines and of the continuation
        device: device to compute on
        text: file with another text
        picture: file for the picture
    """
    check_output("--picture", picture)
    check(text is None or text.is_file(), "--text", "name an existing file", text)

    import torch

    from nsa import demo as shipped
    from nsa.train.execution.precision import choose_device

    content = shipped.book() if text is None else text.read_bytes()
    tokens, lines = shipped.hide_lines(content, length, needles, seed)
    model = shipped.load_model(choose_device(device))
    reader = shipped.Reader(model, tokens)
    _wait(_compiled_ahead(reader.run_on_cpu, reader.device))
    print(f"{text or shipped.BOOK}: {length:,} tokens with {needles} hidden lines", flush=True)
    if reader.device.type == "cpu":
        print(
            "65,536 tokens take a minute on idle cores; on busy ones set OMP_NUM_THREADS=1",
            flush=True,
        )
    with torch.inference_mode():
        print(f"Read in {reader.read():.1f} s on {reader.device.type}.")
        print(f"{shipped.keys_read(model.config, length)}\n", flush=True)
        answers = _asked(reader, lines, length)
        print("The text continues after the bar:\n")
        _show(bytes(tokens[-200:]).decode(errors="replace") + "|")
        for piece in codecs.iterdecode(reader.write(seed), "utf-8", "replace"):
            _show(piece)
        print("\n")
    if find_spec("matplotlib") is None:
        print("no picture: matplotlib is not installed")
        return 0
    with new_file(picture) as temporary:
        figure = shipped.draw(answers, length, model.config.nsa.block_size)
        figure.savefig(temporary, dpi=120, format="png")
    print(f"selected blocks: {picture}")
    return 0


def _asked(reader: Reader, lines: Sequence[Hidden], length: int) -> list[Answer]:
    """Print the answers while they are found."""
    answers: list[Answer] = []
    print(f"depth  tokens back  {'question':26} {'answer':8}         seconds", flush=True)
    for line in lines:
        answers.append(answer := reader.ask(line))
        outcome = "right" if answer.is_right else f"wrong: {line.value}"
        where = f"{line.start / length:5.0%}  {length - line.start:11,}"
        print(f"{where}  {line.question:26} {answer.text:8} {outcome:7} {answer.seconds:7.2f}")
    right = sum(answer.is_right for answer in answers)
    print(f"{right} of {len(lines)} lines found\n", flush=True)
    return answers
