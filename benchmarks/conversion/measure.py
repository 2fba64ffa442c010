"""Measure a dense model and the sparse ones that nsa convert makes of it, without training.

python -m benchmarks.conversion.measure MODEL --text prose.txt --text code.txt --out rows.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.conversion.models import (
    DENSE,
    PATTERN,
    Foreign,
    Row,
    measure_times,
    open_models,
    with_yarn,
)
from nsa.bench.rows import origin
from nsa.cli.bench import parse_lengths
from nsa.errors import check
from nsa.hf.convert import dequantize
from nsa.lm.decoder import Decoder
from nsa.lm.model import LanguageModel
from nsa.ops.index_loss import block_recall
from nsa.train.config import DataConfig
from nsa.train.data import TextSource
from nsa.train.data.tokenizer import Tokenizer, make_tokenizer
from nsa.train.evaluation import student_t
from nsa.train.execution.precision import choose_device
from nsa.train.loss import cross_entropy_of_tokens
from nsa.train.needles import NeedleConfig, Needles, find_needles, row_of

CASES = "loss,copy,needle,mass,answer,times"  # of which times are prefill and decode
NUM_BLOCKS, BLOCK = PATTERN["num_selected_blocks"], PATTERN["block_size"]
SAME = NUM_BLOCKS * BLOCK  # tokens for which all blocks are selected
UNIT = 256  # positions whose mean difference is one observation
PASSAGE, PASSAGES, DISTANCES = 128, 4, (512, 1024, 2048, 3072, 6144)
DEPTHS, CONTEXTS = 11, 2
QUERIES = 64  # of a sequence, whose attention mass is computed
PROMPT = "{}\n\nWhat is this text about? Answer in one sentence."
CHARACTERS, ANSWER = 10_000, 48  # of a text in a prompt; tokens


@dataclass
class Measurements:
    """Measurements of one model after the other, the dense one first.

    Attributes:
        texts: tokens of the texts by name.
        prompts: tokens of the prompts that are answered.
        tokenizer: tokenizer of all models.
        device: measured device.
        dense: values of the dense model.
    """

    texts: dict[str, TextSource]
    prompts: list[list[int]]
    tokenizer: Tokenizer
    device: torch.device
    dense: dict[Any, Any] = field(default_factory=dict)

    def rows(
        self, name: str, model: Any, cases: list[str], lengths: list[int], times: list[int]
    ) -> Iterator[Row]:
        """Rows of a model, of the given ones of ``CASES``."""
        measured = {"loss": self.loss, "copy": self.copies, "needle": self.needles}
        measured |= {} if name in DENSE else {"mass": self.mass}
        for text, length in ((text, length) for text in self.texts for length in lengths):
            for case in (case for case in cases if case in measured):
                rows = measured[case](model, text, length)
                yield from ({"text": text, "length": length, **row} for row in rows)
        yield from self.answers(model) if "answer" in cases else ()
        for length in times if "times" in cases else ():
            yield from ({"length": length, **row} for row in measure_times(model, length))

    def tokens(self, text: str, start: int, length: int) -> Tensor:
        """Inputs and targets, ``length + 1`` tokens from ``start``."""
        found = self.texts[text].read(start, start + length + 1).astype(np.int64)
        return torch.from_numpy(found).to(self.device)

    def loss(self, model: Any, text: str, length: int) -> Iterator[Row]:
        """Loss beyond the first ``SAME`` tokens, nats, and its difference to the dense model's."""
        starts = range(0, self.texts[text].num_tokens - length, length)
        found = torch.stack([losses(model, self.tokens(text, x, length))[SAME:] for x in starts])
        before = self.dense.setdefault(("loss", text, length), found)
        units = (found - before)[:, : (length - SAME) // UNIT * UNIT].unflatten(1, (-1, UNIT))
        yield {"case": "loss", "loss": float(found.mean()), **interval(units.mean(-1).flatten())}

    def copies(self, model: Any, text: str, length: int) -> Iterator[Row]:
        """Gain of the second half of a repeated passage, nats, by the distance back to it."""
        last, half = self.texts[text].num_tokens - length - 1, PASSAGE // 2
        for distance in (x for x in DISTANCES if x + PASSAGE <= length):
            gains = []
            for number in range(PASSAGES):
                tokens = self.tokens(text, last * number // max(PASSAGES - 1, 1), length)
                tokens[-PASSAGE:] = tokens[-PASSAGE - distance :][:PASSAGE].clone()
                found = losses(model, tokens)
                gains.append(found[-half - distance :][:half].mean() - found[-half:].mean())
            gain = torch.stack(gains)
            before = self.dense.setdefault(("copy", text, length, distance), gain)
            shown = {"gain": float(gain.mean()), "dense_gain": float(before.mean())}
            yield {"case": "copy", "distance": distance, **shown, **interval(gain - before)}

    def needles(self, model: Any, text: str, length: int) -> Iterator[Row]:
        """Exact matches of made-up words hidden in the text, by depth; None for all depths."""
        config, source = NeedleConfig((length,), DEPTHS, CONTEXTS), self.texts[text]
        needles = Needles(config, self.tokenizer, source, length, 4 * length)
        answers = find_needles(model, needles, length, "fp32")  # fp32 means without autocast
        for depth, part in [*zip(needles.depths, answers, strict=True), (None, answers)]:
            yield {"case": "needle", **row_of(part, depth=depth)}

    @torch.no_grad()
    def mass(self, model: LanguageModel, text: str, length: int) -> Iterator[Row]:
        """Attention mass outside forced blocks, over that of the best as many blocks.

        For queries after ``SAME`` tokens, mean over the layers. Of a window's blocks the oldest is
        left out, which a query sees in part.
        """
        tokens, shares = self.tokens(text, 0, length - 1)[None], list[float]()
        rows = torch.linspace(SAME, length - 1, QUERIES, device=self.device).long()

        def observe(layer: Any, inputs: Any, blocks: Tensor | None) -> None:
            keys = inputs.k_win if blocks is None else inputs.k_slc
            if blocks is None:
                own = torch.arange(length, device=self.device)[:, None, None] // BLOCK
                blocks = own - torch.arange(NUM_BLOCKS - 1, device=self.device)
                blocks = blocks.clamp(min=-1).expand(-1, keys.shape[1], -1).int()
            pattern = replace(layer.config, **PATTERN)
            found = block_recall(inputs.q, keys, blocks, pattern, rows)
            shares.append(float(found.kept.sum() / found.best.sum()))

        for layer in model.decoder_layers():
            layer.attention.observer = partial(observe, layer.attention)
        model.hidden_states(tokens)
        for layer in model.decoder_layers():
            layer.attention.observer = None
        yield {"case": "mass", "recall": fmean(shares)}

    @torch.no_grad()
    def answers(self, model: Any) -> Iterator[Row]:
        """Greedy answers to the prompts as one batch, and their first tokens equal to dense."""
        most = max(map(len, self.prompts))
        if isinstance(model, Foreign):
            rows = [[0] * (most - len(x)) + x for x in self.prompts]
            mask = [[0] * (most - len(x)) + [1] * len(x) for x in self.prompts]
            ids, valid = (torch.tensor(x, device=self.device) for x in (rows, mask))
            options: Row = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            options |= {"attention_mask": valid, "max_new_tokens": ANSWER}
            found = model.model.generate(ids, **options)[:, most:]
        else:
            decoder = Decoder(model, len(self.prompts), max_tokens=most + ANSWER)
            steps = [decoder.prefill(self.prompts).argmax(-1, keepdim=True)]
            while len(steps) < ANSWER:
                steps.append(decoder.step(steps[-1]).argmax(-1))
            found = torch.cat(steps, 1)
        before = self.dense.setdefault("answers", found)
        equal = (found == before).long().cumprod(1).sum(1).tolist()
        for prompt, number, answer in zip(self.prompts, equal, found.tolist(), strict=True):
            text = self.tokenizer.decode(answer).decode(errors="replace")
            yield {"case": "answer", "prompt_tokens": len(prompt), "equal": number, "answer": text}


@torch.no_grad()
def losses(model: Any, tokens: Tensor) -> Tensor:
    """Loss of the targets of ``tokens [T + 1]``, nats, fp64 ``[T]`` on the CPU."""
    hidden = model.hidden_states(tokens[None, :-1])[0]
    return cross_entropy_of_tokens(hidden, model.head.weight, tokens[1:], 4096).double().cpu()


def interval(values: Tensor) -> Row:
    """Mean of at least two independent values, with its 95% interval (Student's t)."""
    mean, number = float(values.mean()), len(values)
    error = float(values.std()) / number**0.5 * student_t(number - 1)
    return {"difference": mean, "low": mean - error, "high": mean + error, "units": number}


def open_prompts(folder: Path, files: Sequence[Path], tokenizer: Tokenizer) -> list[list[int]]:
    """A question about each text, in the chat template of the model if it has one."""
    prompts = [PROMPT.format(file.read_text("utf-8")[:CHARACTERS]) for file in files]
    chat = AutoTokenizer.from_pretrained(folder)
    if chat.chat_template is None:
        return [tokenizer.encode(prompt) for prompt in prompts]
    options: Row = {"add_generation_prompt": True, "return_dict": False}
    messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return [chat.apply_chat_template(message, **options) for message in messages]


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="folder of transformers, or a GGUF file")
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--lengths", default="4096,8192", help="tokens of a sequence")
    parser.add_argument("--times", default="4096,8192,65536", help="tokens of timed prompts")
    parser.add_argument("--cases", default=CASES, help="what is measured, with commas between")
    parser.add_argument("--yarn", type=float, help="factor of a longer context, for all models")
    parser.add_argument("--index", help="run folder of a trained index")
    parser.add_argument("--only", help="names of untrained sparse models")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to append rows to")
    parser.add_argument("--commit", help="recorded if the checkout has no git")
    given = parser.parse_args(words)
    cases = given.cases.split(",")
    check(set(cases) <= {*CASES.split(",")}, "--cases", f"be some of {CASES}", given.cases)
    device = choose_device(given.device)
    lengths, times = (parse_lengths(f"--{x}", getattr(given, x)) for x in ("lengths", "times"))
    with TemporaryDirectory() as scratch, given.out.open("a", encoding="utf-8") as out:
        folder = given.model
        if folder.suffix == ".gguf":
            folder = Path(scratch) / "dense"
            dequantize(given.model, folder)
        if given.yarn is not None:
            folder = with_yarn(folder, Path(scratch) / "yarn", given.yarn)
        path = str(folder / "tokenizer.json")
        tokenizer = make_tokenizer(DataConfig("folder", path, "*", "file", path), [])
        separator, token_bytes = tokenizer.separator_id, tokenizer.token_bytes
        texts = {
            file.stem: TextSource(
                tokenizer.encode_documents([file.read_bytes()]), separator, token_bytes
            )
            for file in given.text
        }
        prompts = open_prompts(folder, given.text, tokenizer)
        measurements = Measurements(texts, prompts, tokenizer, device)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        here = {**origin(device, given.commit), "model": given.model.name}
        here |= {"dtype": str(dtype), "yarn": given.yarn, **PATTERN}
        only = None if given.only is None else given.only.split(",")
        for name, model in open_models(folder, Path(scratch), given.index, only):
            model = model.to(device, dtype).eval()
            for row in measurements.rows(name, model, cases, lengths, times):
                print(name, row, flush=True)
                print(json.dumps({**here, "name": name, **row}), file=out, flush=True)


if __name__ == "__main__":
    main()
