"""Text from a language model: sampling with the decode cache, streaming, in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
        top_p: draws among the likeliest tokens that together reach this probability (Holtzman et
            al., arXiv:1904.09751).

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
        # The first token always stays.
        probability = probability.masked_fill(before >= self.top_p, 0.0)
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

    The prompts run through the decode cache once; each later step reads what the sparse pattern
    lets it see. A prompt ends when the separator is drawn, and the others go on. Its text depends
    on its own prompt and seed alone, not on its neighbours, up to rounding.

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
        For each step, the bytes that each prompt gained; empty for a prompt that has ended. A
        character may be spread over several steps.

    Raises:
        ValueError: an empty prompt, or a sampling value out of range; before anything is computed.
    """
    sampling = Sampling(temperature, top_k, top_p)
    check(len(prompts) > 0, "generate", "prompts", "hold at least one prompt", len(prompts))
    check(max_new_tokens >= 0, "generate", "max_new_tokens", "be at least 0", max_new_tokens)
    rule = f"have the model's vocabulary ({model.config.vocab_size})"
    fits = tokenizer.vocab_size == model.config.vocab_size
    check(fits, "generate", "tokenizer", rule, tokenizer.vocab_size)
    new_tokens = [list(p) if isinstance(p, list) else tokenizer.encode(p) for p in prompts]
    for prompt, tokens in zip(prompts, new_tokens, strict=True):
        check(len(tokens) > 0, "generate", "prompts", "hold at least one token each", repr(prompt))

    def steps() -> Iterator[list[bytes]]:
        cache = model.new_cache(len(prompts))
        generators = [torch.Generator().manual_seed(seed + i) for i in range(len(prompts))]
        for _ in range(max_new_tokens):
            logits = _next_logits(model, new_tokens, cache, compute_dtype)
            for index, generator in enumerate(generators):
                if new_tokens[index]:
                    token = sampling.draw(logits[index], generator)
                    new_tokens[index] = [] if token == tokenizer.separator_id else [token]
            if not any(new_tokens):
                return
            yield [tokenizer.decode(tokens) for tokens in new_tokens]

    return steps()


@torch.no_grad()
def _next_logits(
    model: LanguageModel,
    new_tokens: list[list[int]],
    cache: Cache,
    compute_dtype: str,
) -> Tensor:
    """Logits ``[B, vocab_size]`` on the CPU, meaningless for a sequence without new tokens."""
    device, lengths = model.embedding.weight.device, [len(tokens) for tokens in new_tokens]
    packed = torch.tensor([token for tokens in new_tokens for token in tokens], device=device)
    offsets = list(accumulate(lengths, initial=0))
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=device)
    was_training = model.training
    model.eval()
    with autocast(device, compute_dtype):
        hidden = model.hidden_states(packed, cu_seqlens, max(lengths), cache)
        logits = model.head(hidden[(cu_seqlens[1:].long() - 1).clamp(min=0)])
    model.train(was_training)
    return logits.to("cpu", torch.promote_types(logits.dtype, torch.float32))
