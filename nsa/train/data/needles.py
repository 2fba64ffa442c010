"""Prompts that hide a number in a long text, for lm-eval: the first task of RULER.

Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?",
arXiv:2404.06654: ``niah_single_1``, a needle among repeated sentences.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from nsa.errors import check

_BEFORE = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.\n"
)
_LINE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
)
_NEEDLE = "One of the special magic numbers for {key} is: {answer}.\n"
_AFTER = (
    "What is the special magic number for {key} mentioned in the provided text? "
    "The special magic number for {key} mentioned in the provided text is"
)
_KEYS = ("apple", "bridge", "candle", "desert", "engine", "forest", "garden", "harbor")


def needle_prompts(size: int, number: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Prompts, each with a key and a number of seven digits at a random depth.

    Args:
        size: bytes of a prompt; it is as long as whole lines allow.
        number: how many.
        seed: of keys, numbers and depths.

    Yields:
        ``prompt``, ASCII; ``answer``, the digits; ``depth``, the share of the lines before the
        needle.

    Raises:
        ValueError: the size leaves no room for a line, or there would be no prompt.
    """
    random, longest = Random(seed), max(_KEYS, key=len)
    rest = len(_BEFORE) + len((_NEEDLE + _AFTER).format(key=longest, answer="0" * 7))
    shortest, lines = rest + len(_LINE), (size - rest) // len(_LINE)
    check(lines > 0, "needle_prompts", "size", f"be at least {shortest} bytes", size)
    check(0 < number <= 10**6, "needle_prompts", "number", "be from 1 to 1,000,000", number)
    for _ in range(number):
        key, answer = random.choice(_KEYS), str(random.randrange(10**6, 10**7))
        before = random.randint(0, lines)
        needle = _NEEDLE.format(key=key, answer=answer)
        text = _LINE * before + needle + _LINE * (lines - before)
        prompt = _BEFORE + text + _AFTER.format(key=key)
        yield {"prompt": prompt, "answer": answer, "depth": round(before / lines, 4)}
