"""Text from a language model: sampling with the decode cache, streaming, in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from nsa.errors import check
from nsa.lm.model import Cache, LanguageModel
from nsa.train.data import Tokenizer
from nsa.train.execution.precision import autocast


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draws among the k likeliest tokens; 0 means all.
        top_p: draws among the likeliest tokens that together reach this probability (Holtzman et al., arXiv:1904.09751).

    Raises:
        ValueError: a value is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check(self.temperature >= 0, "generate", "temperature", "be at least 0", self.temperature)
        check(self.top_k >= 0, "generate", "top_k", "be at least 0", self.top_k)
        check(0 < self.top_p <= 1, "generate", "top_p", "be above 0 and at most 1", self.top_p)

    def draw(self, logits: Tensor, generator: torch.Generator) -> int:
        """One token.

        Args:
            logits: ``[vocab_size]`` on the CPU, fp32 or fp64.
            generator: source of randomness, on the CPU; not used at temperature 0.
        """
        if self.temperature == 0:
            return int(logits.argmax())
        logits = logits.double() / self.temperature
        if self.top_k:
            smallest = logits.topk(min(self.top_k, logits.shape[0])).values[-1]
            logits = logits.masked_fill(logits < smallest, -torch.inf)
        probability, token = logits.softmax(-1).sort(descending=True, stable=True)
        before = probability.cumsum(-1) - probability
        probability = probability.masked_fill(before >= self.top_p, 0.0)  # the first token always stays
        return int(token[torch.multinomial(probability, 1, generator=generator)])


def generate(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str | bytes | list[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    compute_dtype: str = "fp32",
) -> Iterator[list[bytes]]:
    """Continue prompts, token by token, all of them together.

    The prompts run through the decode cache once; each later step reads what the sparse pattern lets it see. A prompt ends when
    the separator is drawn, and the others go on. Its text depends on its own prompt and seed alone, not on its neighbours,
    up to rounding.

    Args:
        model: the language model.
        tokenizer: the one that it was trained with.
        prompts: texts, or tokens, at least one token each; their lengths may differ.
        max_new_tokens: tokens drawn for each prompt at most.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draws among the k likeliest tokens; 0 means all.
        top_p: draws among the likeliest tokens that together reach this probability.
        seed: prompt i draws with seed ``seed + i``.
        compute_dtype: ``bf16`` or ``fp32``.

    Yields:
        For each step, the bytes that each prompt gained; empty for a prompt that has ended. A character may be spread over
        several steps.

    Raises:
        ValueError: an empty prompt, or a sampling value out of range; before anything is computed.
    """
    sampling = Sampling(temperature, top_k, top_p)
    check(len(prompts) > 0, "generate", "prompts", "hold at least one prompt", len(prompts))
    check(max_new_tokens >= 0, "generate", "max_new_tokens", "be at least 0", max_new_tokens)
    check(
        tokenizer.vocab_size == model.config.vocab_size,
        "generate", "tokenizer", f"have the model's vocabulary ({model.config.vocab_size})", tokenizer.vocab_size,
    )  # fmt: skip
    encoded = [list(prompt) if isinstance(prompt, list) else tokenizer.encode(prompt) for prompt in prompts]
    for prompt, tokens in zip(prompts, encoded, strict=True):
        check(len(tokens) > 0, "generate", "prompts", "hold at least one token each", repr(prompt))
    return _stream(model, tokenizer, encoded, max_new_tokens, sampling, seed, compute_dtype)


def complete(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str | bytes | list[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    compute_dtype: str = "fp32",
    until: Callable[[], bool] = lambda: False,
) -> list[bytes]:
    """What :func:`generate` gives, joined: the continuation of each prompt, without the prompt.

    ``until`` is asked after each token; True ends the texts there.
    """
    steps = generate(
        model, tokenizer, prompts, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        seed=seed, compute_dtype=compute_dtype,
    )  # fmt: skip
    texts = [b""] * len(prompts)
    for pieces in steps:
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
        if until():
            break
    return texts


def _stream(
    model: LanguageModel,
    tokenizer: Tokenizer,
    new_tokens: list[list[int]],
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    compute_dtype: str,
) -> Iterator[list[bytes]]:
    cache = model.new_cache(len(new_tokens))
    generators = [torch.Generator().manual_seed(seed + index) for index in range(len(new_tokens))]
    for _ in range(max_new_tokens):
        logits = _next_logits(model, new_tokens, cache, compute_dtype)
        pieces: list[bytes] = []
        for index, generator in enumerate(generators):
            drawn = [sampling.draw(logits[index], generator)] if new_tokens[index] else []
            if drawn == [tokenizer.separator_id]:
                drawn = []
            new_tokens[index] = drawn
            pieces.append(tokenizer.decode(drawn))
        if not any(new_tokens):
            return
        yield pieces


@torch.no_grad()
def _next_logits(model: LanguageModel, new_tokens: list[list[int]], cache: Cache, compute_dtype: str) -> Tensor:
    """Logits ``[B, vocab_size]`` on the CPU after the new tokens of each sequence; meaningless for one without new tokens."""
    device = model.embedding.weight.device
    offsets = [0, *accumulate(len(tokens) for tokens in new_tokens)]
    packed = torch.tensor([token for tokens in new_tokens for token in tokens], device=device)
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=device)
    was_training = model.training
    model.eval()
    with autocast(device, compute_dtype):
        hidden = model.hidden_states(packed, cu_seqlens, max(len(tokens) for tokens in new_tokens), cache)
        logits = model.head(hidden[(cu_seqlens[1:].long() - 1).clamp(min=0)])
    model.train(was_training)
    return logits.float().cpu() if logits.dtype != torch.float64 else logits.cpu()
