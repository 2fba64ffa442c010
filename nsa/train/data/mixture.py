"""Training sequences of several sources, drawn by weights."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from nsa.train.data.batch import Mask, Sampler, TextSource, TokenSource
from nsa.train.data.tokenizer import Ids


class MixtureSource(TokenSource):
    """Sequences of several sources; part k of n has the indices that are k modulo n.

    Args:
        parts: sources with the same tokenizer.
        weights: of the parts; they need not add up to 1.
    """

    def __init__(self, parts: Sequence[TokenSource], weights: Sequence[float]) -> None:
        self.separator_id, self.token_bytes = parts[0].separator_id, parts[0].token_bytes
        self.parts, self.weights = parts, weights

    @property
    def text(self) -> TextSource | None:
        """See :class:`TokenSource`: that of the first part."""
        return self.parts[0].text

    def sampler(self, seq_len: int, seed: int) -> MixtureSampler:
        """See :class:`TokenSource`."""
        return MixtureSampler(self, seq_len, seed)

    def num_sequences(self, seq_len: int) -> int:
        """See :class:`TokenSource`."""
        return len(self.parts) * max(part.num_sequences(seq_len) for part in self.parts)

    def sequence(self, seq_len: int, index: int) -> Ids:
        """See :class:`TokenSource`."""
        return self._part(index).sequence(seq_len, index // len(self.parts))

    def target_mask(self, seq_len: int, index: int) -> Mask | None:
        """See :class:`TokenSource`."""
        return self._part(index).target_mask(seq_len, index // len(self.parts))

    def most_sequences(self, seq_len: int, num_sequences: int) -> int | None:
        """See :class:`TokenSource`: documents beyond one a sequence may be those of any part."""
        found = num_sequences
        for part in self.parts:
            most = part.most_sequences(seq_len, num_sequences)
            if most is None:
                return None
            found += most - num_sequences
        return found

    def _part(self, index: int) -> TokenSource:
        return self.parts[index % len(self.parts)]


class MixtureSampler(Sampler):
    """Draws the part of each position by the weights, and its next sequence from its own sampler.

    The part is a function of (seed, position). The state contains those of the parts.

    Args:
        source: the mixture.
        seq_len: tokens of a sequence.
        seed: seed of the order.
    """

    def __init__(self, source: MixtureSource, seq_len: int, seed: int) -> None:
        super().__init__(source, seq_len, seed)
        self._weights = source.weights
        seeds = enumerate(source.parts, start=seed)
        self._samplers = [part.sampler(seq_len, own) for own, part in seeds]

    def resize(self, seq_len: int) -> None:
        """See :class:`Sampler`."""
        super().resize(seq_len)
        for sampler in self._samplers:
            sampler.resize(seq_len)

    def next_indices(self, micro_batch: int, *, rank: int = 0, world_size: int = 1) -> list[int]:
        """See :class:`Sampler`; those of other ranks are drawn too."""
        drawn, number = list[int](), len(self._samplers)
        for _ in range(micro_batch * world_size):
            random = Random(f"{self.seed} {self.position}")
            (part,) = random.choices(range(number), self._weights)
            (index,) = self._samplers[part].next_indices(1)
            drawn.append(index * number + part)
            self.position += 1
        return drawn[rank * micro_batch :][:micro_batch]

    def state_dict(self) -> dict[str, Any]:
        """State of a :class:`Sampler`, with the states of ``parts``."""
        parts = [sampler.state_dict() for sampler in self._samplers]
        return {**super().state_dict(), "parts": parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of a :meth:`state_dict`."""
        super().load_state_dict(state)
        for sampler, part in zip(self._samplers, state["parts"], strict=True):
            sampler.load_state_dict(part)
