"""Text from a language model: sampling with the decode cache, streaming, in batches."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nsa.errors import check
from nsa.lm.decoder import Decoder
from nsa.lm.model import LanguageModel
from nsa.train.data import Tokenizer
from nsa.train.sampling import Sampling, StopStrings, uniform_numbers
from nsa.train.watch.out_of_memory import free_memory


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


@dataclass
class Generation(Iterator[list[bytes]]):
    """Iterator over the steps of a generation, created by :func:`generate`.

    Each step yields the new bytes of each text, empty bytes for a text that has ended. A character
    may be spread over several steps.

    Attributes:
        model: the language model.
        tokenizer: tokenizer of the model.
        tokens: prompt and drawn tokens of each text, without separators; up to the token that
            completed a stop string.
        max_new_tokens: tokens drawn for each prompt at most.
        sampling: how tokens are drawn.
        stop: stop strings in UTF-8.
        seeds: seed of each text.
        compute_dtype: ``bf16`` or ``fp32``.
        speed: tokens and seconds so far.
    """

    model: LanguageModel
    tokenizer: Tokenizer
    tokens: list[list[int]]
    max_new_tokens: int
    sampling: Sampling
    stop: list[bytes]
    seeds: list[int]
    compute_dtype: str
    speed: Speed = field(default_factory=Speed)

    def __post_init__(self) -> None:
        self._stops = [StopStrings(self.stop) for _ in self.tokens]
        self._ended = [False for _ in self.tokens]
        self._steps = self._run()

    def __next__(self) -> list[bytes]:
        return next(self._steps)

    def _run(self) -> Iterator[list[bytes]]:
        device = self.model.embedding.weight.device
        start = time.perf_counter()
        most = max(map(len, self.tokens)) + self.max_new_tokens
        dtype = torch.bfloat16 if self.compute_dtype == "bf16" else None
        decoder = Decoder(self.model, len(self.tokens), max_tokens=most, compute_dtype=dtype)
        uniform, seen = uniform_numbers(self.seeds, device), self._seen(device)
        number = sum(map(len, self.tokens))
        logits = decoder.prefill(self.tokens) if self.max_new_tokens else torch.empty(0)
        for left in range(self.max_new_tokens - 1, -1, -1):
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            drawn = self.sampling.draw(wide, next(uniform), seen)
            if seen is not None:
                seen.scatter_(1, drawn.clamp(min=0)[:, None], True)
            # The next step starts before the host reads these tokens.
            ids_of = _on_its_way(drawn)
            if left:
                logits = decoder.step(drawn.clamp(min=0)[:, None])[:, 0]
            ids = ids_of()
            seconds = time.perf_counter() - start
            is_first = left == self.max_new_tokens - 1
            self.speed += Speed(number, seconds) if is_first else Speed(0, 0.0, number, seconds)
            hint = "The run may have diverged: take an earlier --checkpoint."
            check(min(ids) >= 0, "generate", "the model", "give finite logits", "NaN or inf", hint)
            pieces = [self._take(index, token, not left) for index, token in enumerate(ids)]
            if not all(self._ended) or any(pieces):
                yield pieces
            if all(self._ended):
                return
            start, number = time.perf_counter(), self._ended.count(False)

    def _seen(self, device: torch.device) -> Tensor | None:
        """Mask of the tokens in each prompt, ``[B, vocab_size]``; None without a penalty."""
        if self.sampling.repetition_penalty == 1:
            return None
        seen = torch.zeros(len(self.tokens), self.tokenizer.vocab_size, dtype=torch.bool)
        for row, tokens in zip(seen, self.tokens, strict=True):
            row[tokens] = True
        return seen.to(device)

    def _take(self, index: int, token: int, is_last: bool) -> bytes:
        """Append a drawn token to a text and return its new bytes."""
        if self._ended[index]:
            return b""
        stop = self._stops[index]
        if token == self.tokenizer.separator_id:
            self._ended[index] = True
            return stop.rest()
        self.tokens[index].append(token)
        piece, is_over = stop.add(self.tokenizer.decode([token]))
        self._ended[index] = is_over or is_last
        return piece if is_over or not is_last else piece + stop.rest()


def generate(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str | bytes | list[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop: Sequence[str] = (),
    seed: int = 0,
    compute_dtype: str = "fp32",
) -> Generation:
    """Continue a batch of prompts, token by token.

    A text ends when the separator is drawn or when it contains a stop string, and the other texts
    continue. A text depends only on its prompt and seed, not on the other texts, up to rounding.

    Args:
        model: the language model.
        tokenizer: tokenizer of the model.
        prompts: texts or tokens, at least one token each; their lengths may differ.
        max_new_tokens: tokens drawn for each prompt at most.
        sampling: sampling settings; None draws among all tokens at temperature 1.
        stop: a continuation ends before the first stop string, no part of which is returned.
        seed: prompt i draws with seed ``seed + i``.
        compute_dtype: ``bf16`` or ``fp32``.

    Returns:
        An iterator over the new bytes of each text.

    Raises:
        ValueError: an empty prompt or stop string, or a sampling value out of range, before
            anything is computed; logits that are not finite.
    """
    check(len(prompts) > 0, "generate", "prompts", "hold at least one prompt", len(prompts))
    check(max_new_tokens >= 0, "generate", "max_new_tokens", "be at least 0", max_new_tokens)
    check(all(stop), "generate", "stop", "hold no empty string", [*stop])
    fits = all(not re.search("[\ud800-\udfff]", string) for string in stop)
    check(fits, "generate", "stop", "be valid UTF-8", [*stop])
    most = 2**63 - len(prompts)  # each prompt has one of its own
    check(0 <= seed <= most, "generate", "seed", f"be from 0 to {most}", seed)
    rule = f"have the model's vocabulary ({model.config.vocab_size})"
    fits = tokenizer.vocab_size == model.config.vocab_size
    check(fits, "generate", "tokenizer", rule, tokenizer.vocab_size)
    all_tokens = [list(p) if isinstance(p, list) else tokenizer.encode(p) for p in prompts]
    for prompt, tokens in zip(prompts, all_tokens, strict=True):
        check(len(tokens) > 0, "generate", "prompts", "hold at least one token each", repr(prompt))
    _check_fits(model, len(prompts), max(map(len, all_tokens)), max_new_tokens, compute_dtype)
    return Generation(
        model,
        tokenizer,
        all_tokens,
        max_new_tokens,
        sampling or Sampling(),
        [string.encode() for string in stop],
        [seed + index for index in range(len(prompts))],
        compute_dtype,
    )


def _check_fits(
    model: LanguageModel, batch_size: int, prompt_len: int, max_new_tokens: int, compute_dtype: str
) -> None:
    """Raise an error if the cache cannot fit into memory; the cache of a window does not grow."""
    longest = 2**30 - prompt_len  # positions are counted in 32 bits
    rule = f"be at most {longest:,} behind a prompt of {prompt_len:,} tokens"
    check(max_new_tokens <= longest, "generate", "max_new_tokens", rule, max_new_tokens)
    config, pattern = model.config, model.config.nsa
    if config.attention == "nsa" and "slc" not in pattern.branches:
        return
    row = pattern.num_kv_heads * (pattern.head_dim + pattern.value_dim)
    row *= 2 if compute_dtype == "bf16" else 4
    needed = batch_size * (prompt_len + max_new_tokens) * config.num_layers * row
    free = free_memory(model.embedding.weight.device)
    rule = f"be so few that their cache fits into {free / 2**30:.1f} GiB of free memory"
    found = f"{max_new_tokens} for {batch_size} prompts together ({needed / 2**30:.1f} GiB)"
    check(needed <= free, "generate", "max_new_tokens", rule, found)


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
