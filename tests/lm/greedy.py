"""Prompts, and what a model says without a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa.lm.model import LanguageModel


@torch.no_grad()
def first_differences(
    model: LanguageModel, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
) -> dict[int, tuple[int, float]]:
    """First token of each text that the model without a cache would not have written.

    Returns, by the index of the text, the position of the token and the distance of its logit from
    the largest one.
    """
    found = dict[int, tuple[int, float]]()
    device = model.embedding.weight.device
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        logits: Tensor = model(torch.tensor([*prompt, *text[:-1]], device=device))
        logits = logits[len(prompt) - 1 :]
        best, said = logits.argmax(-1), torch.tensor(text, device=device)
        wrong = (best != said).nonzero().flatten().tolist()
        if wrong:
            row = logits[wrong[0]]
            found[number] = wrong[0], float(row.max() - row[said[wrong[0]]])
    return found


def make_prompts(lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(0)
    numbers = (torch.randint(0, vocab_size, (n,), generator=generator) for n in lengths)
    return [prompt.tolist() for prompt in numbers]
