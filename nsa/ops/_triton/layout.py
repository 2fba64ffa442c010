"""Where the sequences of a call lie, as every kernel takes it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Packed sequences.

    Attributes:
        cu_q: int32 ``[B + 1]`` offsets of the queries; None when all sequences are alike.
        cu_k: the same of the key tokens.
        num_sequences: B.
        len_q: queries of each sequence when ``cu_q`` is None, otherwise at least the longest.
        len_k: the same in key tokens.
    """

    cu_q: Tensor | None
    cu_k: Tensor | None
    num_sequences: int
    len_q: int
    len_k: int

    def num_tiles(self, rows: int, tile: int, each: int) -> int:
        """Tiles of ``tile`` rows that cover ``rows`` packed rows, ``each`` of a sequence; with offsets an upper bound."""
        if self.cu_q is None:
            return self.num_sequences * -(-each // tile)
        return rows // tile + self.num_sequences

    def arguments(self) -> tuple[Tensor | int | None, ...]:
        """``cu_q, cu_k, len_q, len_k, num_sequences``: what every kernel takes."""
        return self.cu_q, self.cu_k, self.len_q, self.len_k, self.num_sequences


@dataclass(frozen=True)
class Gated:
    """A branch's part in the backward of the gated sum; without gates the branch stands alone.

    Attributes:
        gates: ``[T, Hq, 3]``, contiguous, order (cmp, slc, win).
        dgates: their gradients, in the same form: each branch writes its own.
        adds: whether dq holds the gradient from branches before, to which this one's is added.
    """

    gates: Tensor | None = None
    dgates: Tensor | None = None
    adds: bool = False
