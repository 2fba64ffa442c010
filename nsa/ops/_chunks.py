"""Chunks of queries, in which the reference computes long calls without gradients on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.ops._backend import reads_contents
from nsa.ops._operator import Call
from nsa.ops._packed import compressed_cu_seqlens
from nsa.ops._sequences import Sequences

_LONG = 1 << 22  # scores of a head that the reference computes at once
_MANY_KEYS = 8192  # of which few queries may need few
_QUERIES = 128  # of a chunk


class Part(NamedTuple):
    """A chunk of the queries of a sequence, and the keys that it may see.

    Attributes:
        queries: rows of the packed queries.
        keys: rows of the packed keys; the last one has the position of the last query.
        blocks: rows of the compressed keys of the whole sequence.
        call: the call for these rows.
    """

    queries: slice
    keys: slice
    blocks: slice
    call: Call


def is_long(call: Call, *inputs: Tensor | None, with_few: bool = False) -> bool:
    """Whether to compute a call in chunks; the first input is a tensor.

    Calls of few queries only ``with_few``, and if they have many keys.
    """
    given = [x for x in inputs if x is not None]
    if not reads_contents(given[0]):  # traced sizes must not be compared
        return False
    has_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    queries, keys = call.sequences.max_q, call.sequences.max_k
    is_large = queries > _QUERIES and queries * keys > _LONG
    is_large = is_large or (with_few and keys > _MANY_KEYS)
    return is_large and not has_gradient


def parts(call: Call, *, reach: int | None = None, queries: int = _QUERIES) -> Iterator[Part]:
    """Chunks of at most ``queries`` queries, in order.

    With ``reach``, keys are left out that are farther back than so many tokens from every query.
    """
    sequences = call.sequences
    cu_cmp = compressed_cu_seqlens(sequences.cu_k, call.config)
    edges = [x.tolist() for x in (sequences.cu_q, sequences.cu_k, cu_cmp)]
    for q, q_end, k, k_end, c, c_end in zip(*(y for x in edges for y in (x, x[1:])), strict=False):
        for first in range(q, q_end, queries):
            last = min(first + queries, q_end)
            end = k_end - (q_end - last)
            begin = k if reach is None else max(end - (last - first) + 1 - reach, k)
            rows = slice(first, last), slice(begin, end), slice(c, c_end)
            one = Sequences(None, 1, last - first, end - begin, sequences.device)
            yield Part(*rows, replace(call, sequences=one))


def concatenated(
    function: Callable[[Part], Iterable[Tensor | None]], chunks: Iterator[Part]
) -> tuple[Tensor, ...]:
    """Concatenate each result of a function over all chunks."""
    return tuple(torch.cat(x) for x in zip(*map(function, chunks), strict=True))
