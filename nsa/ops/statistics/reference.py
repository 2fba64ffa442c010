"""Statistics of gates and selected blocks as integers, in eager PyTorch: the specification."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.ops._packed import locate, query_positions
from nsa.ops._sequences import Sequences


class Statistics(NamedTuple):
    """Index of each of a layer's statistics in their tensor.

    All are sums but the first and the last two. Shares and means are kept as integers, so that sums
    are the same in any order.

    Attributes:
        on: a switch: nothing is added unless it is 1.
        gate_cmp, gate_slc, gate_win: gates, in units of 1 / ``UNIT``.
        entropy: of the gates of a query and head, in the same unit; at most 1.
        gates: queries by heads.
        keys: keys that queries selected.
        distance_2: twice the distance of these, in tokens.
        selections: queries by KV heads with a selected block.
        shared: selected blocks that the query before has selected too.
        preceded_blocks: selected blocks of queries with a query before them.
        tiled, gathered, reference: calls, by algorithm of the selected branch.
        most_keys: largest number of keys of a query, among queries with n blocks of tokens.
        large_less_fewest_keys: ``LARGE`` less the smallest number of keys of these.
    """

    on: int
    gate_cmp: int
    gate_slc: int
    gate_win: int
    entropy: int
    gates: int
    keys: int
    distance_2: int
    selections: int
    shared: int
    preceded_blocks: int
    tiled: int
    gathered: int
    reference: int
    most_keys: int
    large_less_fewest_keys: int


AT = Statistics(*range(len(Statistics._fields)))
# From here on statistics are maxima.
MAXIMA = AT.most_keys
LARGE = 2**40
UNIT = 2**30


def new_statistics(device: torch.device | str) -> Tensor:
    """int64 ``[len(Statistics._fields)]``: all 0, and so switched off."""
    return torch.zeros(len(AT), dtype=torch.int64, device=device)


def add_statistics_reference(
    statistics: Tensor,
    gates: Tensor,
    block_indices: Tensor | None,
    sequences: Sequences,
    block_size: int,
    columns: list[int],
) -> None:
    """See :func:`nsa.ops.statistics.add_statistics`."""
    found = torch.zeros_like(statistics)
    _, row, is_real = locate(gates.shape[0], sequences.cu_q)
    active = gates[..., columns].float().nan_to_num() * is_real[:, None, None]
    total = active.sum(-1, keepdim=True)
    share = active / torch.where(total > 0, total, 1)
    entropy = torch.special.entr(share).sum(-1) / math.log(max(len(columns), 2))
    for index, column in enumerate(columns):
        found[AT.gate_cmp + column] = (active[..., index] * UNIT).long().sum()
    found[AT.entropy] = (entropy * UNIT).long().sum()
    found[AT.gates] = is_real.sum() * gates.shape[1]
    found[AT.reference] = 1
    if block_indices is not None:
        position = query_positions(gates.shape[0], sequences.cu_q, sequences.cu_k)
        _add_selection(found, block_indices.long(), row, is_real, position, block_size)
    found *= statistics[AT.on]
    statistics[:MAXIMA] += found[:MAXIMA]
    statistics[MAXIMA:] = torch.maximum(statistics[MAXIMA:], found[MAXIMA:])


def _add_selection(
    found: Tensor, blocks: Tensor, row: Tensor, is_real: Tensor, position: Tensor, size: int
) -> None:
    """Fill in what follows from the selected blocks ``[T, Hkv, n]``."""
    row, is_real, position = (x[:, None, None] for x in (row, is_real, position))
    first = blocks * size
    selected = (blocks >= 0) & (first <= position) & is_real
    last = torch.minimum(first + size - 1, position)
    num_keys = torch.where(selected, last - first + 1, 0)
    shared = torch.zeros_like(selected)
    # The slots of a query, one after another, against all slots of the query before.
    for slot in range(blocks.shape[-1]):
        shared[1:] |= blocks[1:] == blocks[:-1, :, slot : slot + 1]
    preceded = selected & (row > 0)
    found[AT.keys] = num_keys.sum()
    found[AT.distance_2] = (num_keys * (2 * position - first - last)).sum()
    found[AT.selections] = selected.any(-1).sum()
    found[AT.shared] = (shared & preceded).sum()
    found[AT.preceded_blocks] = preceded.sum()
    keys_of_query = num_keys.sum(-1, keepdim=True)
    counts = is_real & (position + 1 >= blocks.shape[-1] * size)
    found[AT.most_keys] = torch.where(counts, keys_of_query, 0).amax()
    found[AT.large_less_fewest_keys] = torch.where(counts, LARGE - keys_of_query, 0).amax()
