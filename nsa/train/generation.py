"""Text from a language model: sampling with the decode cache, streaming, in batches."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.errors import check
from nsa.lm.decoder import Decoder
from nsa.lm.model import LanguageModel
from nsa.train.data import Tokenizer
from nsa.train.execution.kernels_ahead import run_generation

_STEPS_AT_A_TIME = 64


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling, applied in the order of the list.

    Attributes:
        repetition_penalty: divides the logits above 0, and multiplies those below, of tokens that
            the prompt or the continuation already contains; 1 changes nothing (Keskar et al.,
            arXiv:1909.05858, with the treatment of negative logits of `transformers`).
        temperature: divides the logits; 0 selects the most likely token.
        top_k: draws among the k most likely tokens; 0 means all.
        top_p: draws among the likeliest tokens that together reach this probability (Holtzman et
            al., arXiv:1904.09751).
        min_p: draws among the tokens that have at least this fraction of the likeliest one's
            probability; 0 means all (Nguyen et al., arXiv:2407.01082).

    Raises:
        ValueError: a value is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        penalty = self.repetition_penalty
        check(self.temperature >= 0, "temperature", "be at least 0", self.temperature)
        check(self.top_k >= 0, "top_k", "be at least 0", self.top_k)
        check(0 < self.top_p <= 1, "top_p", "be above 0 and at most 1", self.top_p)
        check(0 <= self.min_p <= 1, "min_p", "be from 0 to 1", self.min_p)
        check(penalty > 0, "repetition_penalty", "be positive", penalty)

    def draw(self, logits: Tensor, uniform: Tensor, seen: Tensor | None = None) -> Tensor:
        """One token for each sequence, without waiting for the device.

        Args:
            logits: ``[B, vocab_size]``, fp32 or fp64.
            uniform: a number from 0 to below 1 for each sequence, fp64 ``[B]``; not used at
                temperature 0.
            seen: bool ``[B, vocab_size]``, the tokens that the penalty counts for; None for none.

        Returns:
            int64 ``[B]``; -1 for a sequence whose logits are not finite.
        """
        is_finite = logits.isfinite().all(-1)
        if seen is not None:
            penalty = self.repetition_penalty
            penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits = torch.where(seen, penalised, logits)
        if self.temperature == 0:
            return logits.argmax(-1).where(is_finite, -1)
        # The difference first: a small temperature must not make infinities.
        shifted = logits.double() - logits.double().amax(-1, keepdim=True)
        probability = (shifted / self.temperature).softmax(-1)
        token = None
        if self.top_k or self.top_p < 1 or self.min_p:
            probability, token = probability.sort(descending=True, stable=True)
            probability = self._without_discarded(probability)
        cumulative = probability.cumsum(-1)
        total = cumulative[:, -1:].contiguous()
        index = torch.searchsorted(cumulative, uniform[:, None] * total, right=True)
        # Rounding must not lead beyond the last token with any probability.
        index = index.minimum(torch.searchsorted(cumulative, total))
        index = index.clamp(max=logits.shape[-1] - 1)  # NaN sorts behind all
        drawn = index if token is None else token.gather(-1, index)
        return drawn.squeeze(-1).where(is_finite, -1)

    def _without_discarded(self, probability: Tensor) -> Tensor:
        """Set the probabilities of discarded tokens to 0; ``[B, vocab_size]``, descending."""
        if self.top_k:
            smallest = probability[:, min(self.top_k, probability.shape[-1]) - 1, None]
            probability = probability.where(probability >= smallest, 0.0)
            probability = probability / probability.sum(-1, keepdim=True)
        before = probability.cumsum(-1) - probability
        keep = (before < self.top_p) & (probability >= self.min_p * probability[:, :1])
        keep[:, 0] = True
        return probability.where(keep, 0.0)


def uniform_numbers(seeds: Sequence[int], device: torch.device) -> Iterator[Tensor]:
    """For each step the numbers that :meth:`Sampling.draw` takes.

    Those of a sequence follow from its own seed alone, and are the same on every device.

    Args:
        seeds: of each sequence.
        device: where the numbers go, many steps at a time.

    Yields:
        fp64 ``[B]`` from 0 to below 1, without end.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    while True:
        numbers = [
            torch.rand(_STEPS_AT_A_TIME, dtype=torch.float64, generator=generator)
            for generator in generators
        ]
        yield from torch.stack(numbers, dim=1).to(device)


class StopStrings:
    """Ends a text before the first stop string in it, however the text arrives.

    First is the string that is complete first, of those that end together the longest. So the end
    depends on the bytes alone and not on how tokens divide them.

    Args:
        strings: the stop strings in UTF-8; may be none.
    """

    def __init__(self, strings: Sequence[bytes]) -> None:
        self._strings = strings
        self._longest = max(map(len, strings), default=0)
        self._withheld = b""

    def add(self, piece: bytes) -> tuple[bytes, bool]:
        """More of the text.

        Args:
            piece: its next bytes.

        Returns:
            What is certain to belong to the text now, and whether the text has ended. Bytes with
            which a stop string may begin are withheld.
        """
        text, self._withheld = self._withheld + piece, b""
        found = [(text.find(string) + len(string), string) for string in self._strings]
        ends = [(end, end - len(string)) for end, string in found if end >= len(string)]
        if ends:
            return text[: min(ends)[1]], True
        for size in range(min(len(text), self._longest - 1), 0, -1):
            if any(string.startswith(text[-size:]) for string in self._strings):
                self._withheld = text[-size:]
                return text[:-size], False
        return text, False

    def rest(self) -> bytes:
        """Return the withheld bytes, which are part of the text if it ends here; once."""
        rest, self._withheld = self._withheld, b""
        return rest


@dataclass
class Speed:
    """Tokens and time of a generation so far.

    Attributes:
        prefill_tokens: tokens of the prompts.
        prefill_s: seconds until their first tokens were drawn.
        decode_tokens: tokens drawn after the first ones.
        decode_s: seconds of these steps.
    """

    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_tokens: int = 0
    decode_s: float = 0.0

    def __add__(self, other: Speed) -> Speed:
        return Speed(
            self.prefill_tokens + other.prefill_tokens,
            self.prefill_s + other.prefill_s,
            self.decode_tokens + other.decode_tokens,
            self.decode_s + other.decode_s,
        )

    def line(self) -> str:
        """Tokens, seconds and tokens/s of prefill and decode."""
        parts = (
            ("prefill", self.prefill_tokens, self.prefill_s),
            ("decode", self.decode_tokens, self.decode_s),
        )
        return "; ".join(
            f"{name} {tokens:,} tokens in {seconds:.3f} s, {tokens / seconds:,.1f} tokens/s"
            for name, tokens, seconds in parts
            if seconds > 0
        )


class Generation(Iterator[list[bytes]]):
    """Continuation of a batch of prompts, token by token.

    Each step yields the new bytes of each text, empty bytes for a text that has ended. A character
    may be spread over several steps. A text ends when the separator is drawn or when it contains a
    stop string, and the other texts continue. A text depends only on its prompt and seed, not on
    the other texts, up to rounding.

    Attributes:
        model: the language model.
        compute_dtype: ``bf16`` or ``fp32``.
        tokens: prompt and drawn tokens of each text, without separators; up to the token that
            completed a stop string.
        speed: tokens and seconds so far.

    Args:
        model: the language model.
        tokenizer: tokenizer of the model.
        prompts: texts or tokens, at least one token each; their lengths may differ.
        max_new_tokens: tokens drawn for each prompt at most.
        sampling: sampling settings; None draws among all tokens at temperature 1.
        stop: a continuation ends before the first stop string, no part of which is returned.
        seed: prompt i draws with seed ``seed + i``.
        compute_dtype: ``bf16`` or ``fp32``.

    Raises:
        ValueError: an empty prompt or stop string, or a value out of range, before anything is
            computed; logits that are not finite.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        prompts: Sequence[str | bytes | list[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        seed: int = 0,
        compute_dtype: str = "fp32",
    ) -> None:
        check(len(prompts) > 0, "prompts", "contain at least one prompt", len(prompts))
        check(max_new_tokens >= 0, "max_new_tokens", "be at least 0", max_new_tokens)
        check(all(stop), "stop", "contain no empty string", [*stop])
        fits = all(not re.search("[\ud800-\udfff]", string) for string in stop)
        check(fits, "stop", "be valid UTF-8", [*stop])
        most = 2**63 - len(prompts)  # each prompt has its own
        check(0 <= seed <= most, "seed", f"be from 0 to {most}", seed)
        rule = f"have the model's vocabulary ({model.config.vocab_size})"
        fits = tokenizer.vocab_size == model.config.vocab_size
        check(fits, "tokenizer", rule, tokenizer.vocab_size)
        self.tokens = [list(p) if isinstance(p, list) else tokenizer.encode(p) for p in prompts]
        rule = "contain at least one token each"
        for prompt, tokens in zip(prompts, self.tokens, strict=True):
            check(len(tokens) > 0, "prompts", rule, repr(prompt))
        self.speed = Speed()
        self.model, self._tokenizer, self._max_new_tokens = model, tokenizer, max_new_tokens
        self._sampling, self.compute_dtype = sampling or Sampling(), compute_dtype
        self._dtype = torch.bfloat16 if compute_dtype == "bf16" else None
        self._seeds = [seed + index for index in range(len(prompts))]
        strings = [string.encode() for string in stop]
        self._stops = [StopStrings(strings) for _ in prompts]
        self._ended = [False for _ in prompts]
        self._steps = self._run()

    def __next__(self) -> list[bytes]:
        return next(self._steps)

    def run_on_cpu(self) -> None:
        """Record the kernels of the prompts and of a first step, see ``nsa.ops._triton.ahead``."""
        lengths = [len(tokens) for tokens in self.tokens]
        run_generation(self.model.config, lengths, max(lengths) + self._max_new_tokens, self._dtype)

    def _run(self) -> Iterator[list[bytes]]:
        device = self.model.embedding.weight.device
        start = time.perf_counter()
        most = max(map(len, self.tokens)) + self._max_new_tokens
        decoder = Decoder(self.model, len(self.tokens), max_tokens=most, compute_dtype=self._dtype)
        uniform, seen = uniform_numbers(self._seeds, device), self._seen(device)
        number = sum(map(len, self.tokens))
        logits = decoder.prefill(self.tokens) if self._max_new_tokens else torch.empty(0)
        for left in range(self._max_new_tokens - 1, -1, -1):
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            drawn = self._sampling.draw(wide, next(uniform), seen)
            if seen is not None:
                seen.scatter_(1, drawn.clamp(min=0)[:, None], True)
            # The next step starts before the host reads these tokens.
            ids_of = _on_its_way(drawn)
            if left:
                logits = decoder.step(drawn.clamp(min=0)[:, None])[:, 0]
            ids = ids_of()
            seconds = time.perf_counter() - start
            is_first = left == self._max_new_tokens - 1
            self.speed += Speed(number, seconds) if is_first else Speed(0, 0.0, number, seconds)
            hint = "The run may have diverged: take an earlier --checkpoint."
            check(min(ids) >= 0, "the model", "give finite logits", "NaN or inf", hint)
            pieces = [self._take(index, token, not left) for index, token in enumerate(ids)]
            if not all(self._ended) or any(pieces):
                yield pieces
            if all(self._ended):
                return
            start, number = time.perf_counter(), self._ended.count(False)

    def _seen(self, device: torch.device) -> Tensor | None:
        """Mask of the tokens in each prompt, ``[B, vocab_size]``; None without a penalty."""
        if self._sampling.repetition_penalty == 1:
            return None
        seen = torch.zeros(len(self.tokens), self._tokenizer.vocab_size, dtype=torch.bool)
        for row, tokens in zip(seen, self.tokens, strict=True):
            row[tokens] = True
        return seen.to(device)

    def _take(self, index: int, token: int, is_last: bool) -> bytes:
        """Append a drawn token to a text and return its new bytes."""
        if self._ended[index]:
            return b""
        stop = self._stops[index]
        if token == self._tokenizer.separator_id:
            self._ended[index] = True
            return stop.rest()
        self.tokens[index].append(token)
        piece, is_over = stop.add(self._tokenizer.decode([token]))
        self._ended[index] = is_over or is_last
        return piece if is_over or not is_last else piece + stop.rest()


def _on_its_way(drawn: Tensor) -> Callable[[], list[int]]:
    """Copy tokens ``[B]`` to the host; the function returned waits for them."""
    if not drawn.is_cuda:
        ids: list[int] = drawn.tolist()
        return lambda: ids
    host = torch.empty(drawn.shape, dtype=drawn.dtype, pin_memory=True)
    host.copy_(drawn, non_blocking=True)
    copied = torch.cuda.current_stream(drawn.device).record_event()

    def wait() -> list[int]:
        copied.synchronize()
        found: list[int] = host.tolist()
        return found

    return wait
