"""Which rows are sampled, where they lie, and how their values are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.testing.budget import Budget, assert_within_budget


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of sums and softmax statistics for results in ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Offsets:
    """Offsets of packed queries and key tokens, on the host."""

    q: list[int]
    k: list[int]

    @classmethod
    def read(
        cls, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, num_q: int, num_k: int
    ) -> Offsets:
        """Offsets as the operators understand them; waits for the device."""
        if cu_seqlens_q is None:
            return cls([0, num_q], [0, num_k])
        cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        return cls(cu_seqlens_q.tolist(), cu_seqlens_k.tolist())

    def positions(self, sequence: int, rows: Tensor) -> Tensor:
        """Positions of packed queries of one sequence: queries are aligned at the end of keys."""
        return rows - self.q[sequence + 1] + self.k[sequence + 1] - self.k[sequence]

    def parts(self, rows: Tensor, size_of: Callable[[int], int]) -> Iterator[tuple[int, Tensor]]:
        """Sequence, and places in ``rows`` of some of its queries.

        Args:
            rows: packed queries.
            size_of: how many queries of a sequence fit into one part; at least one is taken.
        """
        ends = torch.tensor(self.q[1:], device=rows.device)
        sequence_of = torch.bucketize(rows, ends, right=True)
        for sequence in sequence_of.unique().tolist():
            places = (sequence_of == sequence).nonzero()[:, 0]
            for part in places.split(max(size_of(sequence), 1)):
                yield sequence, part


def sample_rows(cu_seqlens: Tensor, count: int, seed: int = 0) -> Tensor:
    """At most ``count`` packed rows, ascending: the ends of some sequences, others at random.

    Args:
        cu_seqlens: ``[B + 1]``; its contents are read.
        count: at least 2.
        seed: of the random rows.

    Returns:
        int64 on the device of ``cu_seqlens``, unique; empty when there is no row.
    """
    offsets = cu_seqlens.long().cpu()
    full = (offsets[1:] > offsets[:-1]).nonzero()[:, 0]
    if full.numel() == 0:
        return full.to(cu_seqlens.device)
    some = full[torch.linspace(0, full.numel() - 1, min(full.numel(), max(count // 4, 1))).long()]
    edges = torch.cat((offsets[some], offsets[some + 1] - 1))
    generator = torch.Generator().manual_seed(seed)
    random = torch.randint(int(offsets[-1]), (max(count - edges.numel(), 0),), generator=generator)
    return torch.cat((edges, random)).unique().to(cu_seqlens.device)


def check_sampled(
    values: Callable[[torch.dtype], Mapping[str, Tensor]],
    actual: Mapping[str, Tensor],
    rows: Tensor,
    dtype: torch.dtype,
    name: str,
    factor: float = 2.0,
) -> dict[str, Budget]:
    """Fail unless the sampled rows of ``actual`` lie within the error budget.

    Args:
        values: the sampled values by name; called with fp64 for the oracle and with ``dtype`` for
            the baseline.
        actual: whole tensors under test by name: all or some of those of ``values``.
        rows: int64, which rows of them were sampled.
        dtype: the tested one.
        name: what is compared, for messages.
        factor: how many times the baseline's error is allowed.

    Returns:
        The errors of ``actual`` by name.

    Raises:
        AssertionError: an error is above the budget, or lse is infinite elsewhere than it should
            be.
    """
    found: dict[str, Budget] = {}
    if rows.numel() == 0:
        return found
    exact, plain = values(torch.float64), values(dtype)
    for key, whole in actual.items():
        x, baseline, oracle = whole[rows], plain[key], exact[key]
        if key == "lse":
            empty = oracle.isinf()
            right = torch.equal(x.isinf() & (x < 0), empty)
            assert right, f"{name} lse: -inf where keys are visible, or finite where none is"
            x, baseline, oracle = (y[~empty][:, None] for y in (x, baseline, oracle))
        found[key] = assert_within_budget(x, baseline, oracle, f"{name} {key}", factor)
    return found
