"""The model of ``nsa demo``, its book, and questions about lines that are hidden in a text.

Louisa May Alcott (1832 to 1888) published "Little Men" in 1871; ``book.txt.xz`` is its beginning.
The model was trained on other books with lines of :mod:`nsa.train.data.recall`.
"""

from __future__ import annotations

import lzma
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from nsa.errors import check
from nsa.lm.config import LMConfig
from nsa.lm.decoder import Decoder
from nsa.lm.flops import keys_per_query
from nsa.lm.model import LanguageModel
from nsa.train.data import ByteTokenizer
from nsa.train.data.recall import Line, lines
from nsa.train.execution.kernels_ahead import run_generation
from nsa.train.generation import Sampling, uniform_numbers
from nsa.train.load import load_config

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = Path(__file__).parent
BOOK = "Little Men by Louisa May Alcott"
TOKENIZER = ByteTokenizer()
_MOST_NEW = 256  # tokens after the context: a question and its answer, or the continuation
_LONGEST_ANSWER = 10
WRITTEN = 200  # bytes of the continuation
_TOKENS_PER_LINE = 64  # of the context, at least
_SAMPLING = Sampling(temperature=0.7, min_p=0.05)

Blocks = dict[int, list[list[int]]]  # selected blocks of each KV head, by layer


class Hidden(NamedTuple):
    """A line in a context.

    Attributes:
        line: its tokens.
        start: index of its first token.
    """

    line: Line
    start: int

    @property
    def question(self) -> str:
        """Text of the question."""
        return TOKENIZER.decode(self.line.question).decode().strip()

    @property
    def value(self) -> str:
        """Text of the answer in the line."""
        return TOKENIZER.decode(self.line.value).decode().strip()

    @property
    def size(self) -> int:
        """Tokens of the line."""
        return sum(map(len, self.line))


class Answer(NamedTuple):
    """Answer to the question of a hidden line.

    Attributes:
        hidden: the line.
        text: generated text up to the period.
        seconds: time of question and answer.
        blocks: blocks that the last token of the question selected, and those of the first token of
            the answer.
    """

    hidden: Hidden
    text: str
    seconds: float
    blocks: tuple[Blocks, Blocks]

    @property
    def is_right(self) -> bool:
        """Whether the answer is what the line says."""
        return self.text == self.hidden.value


def book() -> bytes:
    """Text of the book."""
    return lzma.decompress((FOLDER / "book.txt.xz").read_bytes())


def load_model(device: torch.device) -> LanguageModel:
    """Load the trained model, with fp32 weights."""
    model = LanguageModel(load_config(FOLDER / "config.yaml").model)
    stored = load_file(FOLDER / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): x for name, x in stored.items()})
    return model.to(device).eval()


def hide_lines(text: bytes, length: int, number: int, seed: int) -> tuple[list[int], list[Hidden]]:
    """Insert lines at evenly spaced depths of a text.

    Args:
        text: the text, of which the beginning is used.
        length: tokens of the result.
        number: lines.
        seed: seed of the words.

    Returns:
        Tokens, and the lines in their order.

    Raises:
        UserError: the text is too short, or there is too little room for the lines.
    """
    most = length // _TOKENS_PER_LINE
    rule = f"be from 1 to {most} for {length:,} tokens"
    check(1 <= number <= most, "--needles", rule, number)
    found = [*islice(lines(TOKENIZER, Random(seed), held_out=True), number)]
    whole = [[*line.question, *line.value, *line.end] for line in found]
    rest = length - sum(map(len, whole))
    rule = f"be at most {len(text) + length - rest:,} for this text and its lines"
    check(rest <= len(text), "--length", rule, length)
    filler, tokens, hidden, before = TOKENIZER.encode(text[:rest]), list[int](), list[Hidden](), 0
    for index, (line, inserted) in enumerate(zip(found, whole, strict=True)):
        cut = round((index + 0.5) / number * rest)
        tokens += filler[before:cut]
        hidden.append(Hidden(line, len(tokens)))
        tokens += inserted
        before = cut
    return tokens + filler[before:], hidden


def keys_read(config: LMConfig, length: int) -> str:
    """Sentence about the keys that the model reads, mean over the positions of a text."""
    kinds = config.kinds.items()
    total = sum(keys_per_query(kind, length) * len(layers) for kind, layers in kinds)
    selecting = sum(len(layers) for kind, layers in kinds if "slc" in kind.nsa.branches)
    keys, dense = f"{total / config.num_layers:,.0f}", f"{(length + 1) / 2:,.0f}"
    layers = f"{selecting} of {config.num_layers} layers compare it with all earlier keys to select"
    return (
        f"On average a token attends to {keys} keys in a layer, dense attention {dense}; {layers}."
    )


class Reader:
    """A model that reads a context once and continues it several times.

    Args:
        model: the model; bf16 is computed on a GPU, fp32 on a CPU.
        tokens: the context.
    """

    def __init__(self, model: LanguageModel, tokens: Sequence[int]) -> None:
        self.device = model.embedding.weight.device
        self._model, self._tokens, self._most = model, tokens, len(tokens) + _MOST_NEW
        self._dtype = torch.bfloat16 if self.device.type == "cuda" else None
        self._decoder = Decoder(model, max_tokens=self._most, compute_dtype=self._dtype)
        self._decoder.cache.rollback = _MOST_NEW

    def run_on_cpu(self) -> None:
        """Record the kernels of the context and of a step, see ``nsa.ops._triton.ahead``."""
        lengths = [len(self._tokens)]
        run_generation(self._model.config, lengths, self._most, self._dtype, rollback=_MOST_NEW)

    def read(self) -> float:
        """Read the context into the cache; return the seconds that it took."""
        start = time.perf_counter()
        self._logits = self._decoder.prefill([self._tokens])
        self._logits.tolist()  # waits for the device
        return time.perf_counter() - start

    def ask(self, hidden: Hidden) -> Answer:
        """Append the question of a line to the context, and generate the likeliest answer."""
        start = time.perf_counter()
        logits = self._append(hidden.line.question)
        asked, answered, answer = self._blocks(), Blocks(), list[int]()
        while len(answer) < _LONGEST_ANSWER and hidden.line.end[0] not in answer:
            answer.append(int(logits.argmax()))
            logits = self._append(answer[-1:])
            answered = answered or self._blocks()
        self._forget()
        text = TOKENIZER.decode(answer).decode(errors="replace").partition(".")[0].strip()
        return Answer(hidden, text, time.perf_counter() - start, (asked, answered))

    def write(self, seed: int) -> Iterator[bytes]:
        """Continue the context by ``WRITTEN`` bytes, drawn at temperature 0.7."""
        logits, uniform = self._logits, uniform_numbers([seed], self.device)
        for _ in range(WRITTEN):
            token = int(_SAMPLING.draw(logits.float(), next(uniform)))
            yield TOKENIZER.decode([token])
            logits = self._append([token])
        self._forget()

    def _append(self, tokens: Sequence[int]) -> Tensor:
        """Logits ``[1, vocab_size]`` after more tokens; on a GPU all steps are one CUDA graph."""
        new = torch.tensor([tokens], device=self.device)
        if self.device.type == "cpu":
            return self._decoder.take(new)[:, -1]
        for token in new.split(1, dim=1):
            logits = self._decoder.step(token)[:, -1]
        return logits

    def _blocks(self) -> Blocks:
        """Blocks that the last token selected."""
        caches = enumerate(self._decoder.cache.layers)
        found = {n: cache.block_indices for n, cache in caches}
        return {n: ids[-1].tolist() for n, ids in found.items() if ids is not None}

    def _forget(self) -> None:
        """Remove the tokens after the context."""
        self._decoder.cache.truncate(0, len(self._tokens))


def draw(answers: Sequence[Answer], length: int, block_size: int) -> Figure:
    """Draw the selected blocks of each question: positions to the right, layers and KV heads down.

    Args:
        answers: the answers, at least one.
        length: tokens of the context.
        block_size: tokens of a block.
    """
    from matplotlib.figure import Figure

    rows = [(n, head) for n, heads in answers[0].blocks[0].items() for head in range(len(heads))]
    figure = Figure(figsize=(10, 0.9 + 1.1 * len(answers)), layout="constrained")
    right = sum(answer.is_right for answer in answers)
    figure.suptitle(f"{right} of {len(answers)} lines found in {length:,} tokens")
    every = figure.subplots(len(answers), 1, sharex=True, squeeze=False)[:, 0]
    for axes, answer in zip(every, answers, strict=True):
        hidden = answer.hidden
        first, last = hidden.start // block_size, (hidden.start + hidden.size - 1) // block_size
        for row, (layer, head) in enumerate(rows):
            for part, blocks in enumerate(answer.blocks):
                for block in blocks[layer][head]:
                    is_line, top = first <= block <= last, row + 0.42 * part
                    style = {"color": "black", "lw": 3} if is_line else {"color": "0.55", "lw": 1}
                    axes.vlines((block + 0.5) * block_size, top, top + 0.36, **style)
        axes.plot(hidden.start, -0.5, "kv", clip_on=False)
        outcome = "right" if answer.is_right else f"wrong, the line says {hidden.value}"
        axes.set_title(f"{hidden.question} {answer.text}: {outcome}", fontsize=9, loc="left")
        names = [f"layer {layer}, head {head}" for layer, head in rows]
        axes.set_yticks([row + 0.4 for row in range(len(rows))], names, fontsize=7)
        axes.set_ylim(len(rows), -0.5)
        axes.set_xlim(-length / 100, length + _MOST_NEW)
    figure.supxlabel(
        f"position in the text, tokens. Ticks: the blocks of {block_size} tokens that a head reads "
        "for the last token of the question (upper)\nand the first token of the answer (lower), "
        "black if the line is in the block. Triangle: the line.",
        fontsize=8,
    )
    return figure
