"""Statistics of gates and selected blocks as integers, in eager PyTorch: the specification."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.ops._packed import locate, query_positions
from nsa.ops._sequences import Sequences


class Statistics(NamedTuple):
    """Index of each statistic in a layer's statistics tensor.

    All are sums except the first and the last two. Fractions and means are stored as integers, so
    that sums do not depend on the order.

    Attributes:
        on: switch: nothing is added unless it is 1.
        gate_cmp, gate_slc, gate_win: gates, in units of 1 / ``UNIT``.
        entropy: entropy of the gates per query and head, in the same unit; at most 1.
        gates: number of queries by heads.
        keys: number of keys selected by queries.
        distance_2: twice the distance of these keys, in tokens.
        selections: number of queries by KV heads with a selected block.
        shared: number of selected blocks that the previous query selected as well.
        preceded_blocks: number of selected blocks of queries with a previous query.
        tiled, gathered, reference: number of calls, by algorithm of the selected branch.
        most_keys: maximum number of keys per query, among queries with n blocks of tokens.
        large_less_fewest_keys: ``LARGE`` minus the minimum number of keys of these queries.
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
# Statistics from this index on are maxima.
MAXIMA = AT.most_keys
LARGE = 2**40
UNIT = 2**30


def new_statistics(device: torch.device | str) -> Tensor:
    """Allocate int64 ``[len(Statistics._fields)]``, all 0 and therefore disabled."""
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
    """Compute the statistics of the selected blocks ``[T, Hkv, n]``."""
    row, is_real, position = (x[:, None, None] for x in (row, is_real, position))
    first = blocks * size
    selected = (blocks >= 0) & (first <= position) & is_real
    last = torch.minimum(first + size - 1, position)
    num_keys = torch.where(selected, last - first + 1, 0)
    shared = torch.zeros_like(selected)
    # Compare each slot of a query with all slots of the previous query.
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
