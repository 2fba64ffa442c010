"""Sampling of tokens from logits, and stop strings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.errors import check

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
        min_p: draws among the tokens that have at least this share of the likeliest one's
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
        check(self.temperature >= 0, "generate", "temperature", "be at least 0", self.temperature)
        check(self.top_k >= 0, "generate", "top_k", "be at least 0", self.top_k)
        check(0 < self.top_p <= 1, "generate", "top_p", "be above 0 and at most 1", self.top_p)
        check(0 <= self.min_p <= 1, "generate", "min_p", "be from 0 to 1", self.min_p)
        check(penalty > 0, "generate", "repetition_penalty", "be positive", penalty)

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
            probability = self._kept(probability)
        cumulative = probability.cumsum(-1)
        total = cumulative[:, -1:].contiguous()
        place = torch.searchsorted(cumulative, uniform[:, None] * total, right=True)
        # Rounding must not lead beyond the last token with any probability.
        place = place.minimum(torch.searchsorted(cumulative, total))
        place = place.clamp(max=logits.shape[-1] - 1)  # NaN sorts behind all
        drawn = place if token is None else token.gather(-1, place)
        return drawn.squeeze(-1).where(is_finite, -1)

    def _kept(self, probability: Tensor) -> Tensor:
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
