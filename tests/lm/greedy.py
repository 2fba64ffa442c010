"""Greedy generation with the cache, and what the model says without one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa.lm.decoder import Decoder
from nsa.lm.model import LanguageModel


@torch.no_grad()
def greedy(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    count: int,
    *,
    chunk: int,
    queries: int,
    num_pages: int | None = None,
) -> list[list[int]]:
    """Continue prompts that are read in chunks, ``count`` tokens each, by steps of ``queries``.

    With several queries a step takes in one token that is known and guesses behind it, which are
    taken back, as speculative decoding does when they are wrong.
    """
    most = max(map(len, prompts)) + count + queries
    decoder = Decoder(model, len(prompts), max_tokens=most, num_pages=num_pages)
    device = model.embedding.weight.device
    token = torch.zeros(len(prompts), dtype=torch.int64, device=device)
    for start in range(0, max(map(len, prompts)), chunk):
        part = [prompt[start : start + chunk] for prompt in prompts]
        logits = decoder.prefill(part)
        has_new = torch.tensor([bool(new) for new in part], device=device)
        token = logits.argmax(-1).where(has_new, token)
    drawn = [token]
    for _ in range(count - 1):
        guesses = token[:, None] + torch.arange(queries, device=device)
        logits = decoder.step(guesses % model.config.vocab_size)
        if queries > 1:
            for b, length in enumerate(decoder.cache.lengths):
                decoder.cache.truncate(b, length - queries + 1)
        token = logits[:, 0].argmax(-1)
        drawn.append(token)
    return torch.stack(drawn, 1).tolist()


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
