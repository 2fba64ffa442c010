"""What gates do and which blocks are chosen, as sums of whole numbers, in eager PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nsa.ops._packed import locate, query_positions
from nsa.ops._sequences import Sequences

# Places in the sums of a layer. ON is no sum: only where it is 1 is anything added. Shares and
# means are kept as whole numbers, so that sums are the same in any order. The last two are the
# largest of what was seen: most keys of a query, and LARGE less the fewest, of queries that have n
# blocks' tokens before them.
SUMS = (
    "on", "gate_cmp", "gate_slc", "gate_win", "entropy", "gates", "keys", "distance_2", "choices", "shared", "preceded_blocks",
    "tiled", "gathered", "reference", "most_keys", "large_less_fewest_keys",
)  # fmt: skip
ON, GATES, ENTROPY, NUM_GATES, KEYS, DISTANCE_2, CHOICES, SHARED, NUM_SHARED, TILED, GATHERED, REFERENCE, MOST, FEWEST = (
    SUMS.index(name)
    for name in ("on", "gate_cmp", "entropy", "gates", "keys", "distance_2", "choices", "shared", "preceded_blocks", "tiled",
                 "gathered", "reference", "most_keys", "large_less_fewest_keys")
)  # fmt: skip
LARGE = 2**40
# A gate or an entropy of 1.
UNIT = 2**30


def new_sums(device: torch.device | str) -> Tensor:
    """int64 ``[len(SUMS)]``: nothing yet, and switched off."""
    return torch.zeros(len(SUMS), dtype=torch.int64, device=device)


def observe_reference(
    gates: Tensor, block_indices: Tensor | None, sums: Tensor, sequences: Sequences, block_size: int, columns: list[int]
) -> None:  # fmt: skip
    """See :func:`nsa.ops.observation.observe`."""
    on = sums[ON].clone()
    found = torch.zeros_like(sums)
    cu_q, cu_k = sequences.cu_q, sequences.cu_k
    _, row, is_real = locate(gates.shape[0], cu_q)
    active = gates[..., columns].float().nan_to_num() * is_real[:, None, None]
    total = active.sum(-1, keepdim=True)
    entropy = torch.special.entr(active / torch.where(total > 0, total, 1)).sum(-1) / math.log(
        max(len(columns), 2)
    )
    for index, column in enumerate(columns):
        found[GATES + column] = (active[..., index] * UNIT).long().sum()
    found[ENTROPY] = (entropy * UNIT).long().sum()
    found[NUM_GATES] = is_real.sum() * gates.shape[1]
    found[REFERENCE] = 1
    if block_indices is not None:
        position = query_positions(gates.shape[0], cu_q, cu_k)
        found[KEYS : NUM_SHARED + 1], found[MOST:] = _choice_sums(
            block_indices.long(), row, is_real, position, block_size
        )
    found[ON] = 0
    found *= on
    sums[:MOST] += found[:MOST]
    sums[MOST:] = torch.maximum(sums[MOST:], found[MOST:])


def _choice_sums(
    blocks: Tensor, row: Tensor, is_real: Tensor, position: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """int64 of blocks ``[T, Hkv, n]``: KEYS, DISTANCE_2, CHOICES, SHARED, NUM_SHARED; MOST, FEWEST."""
    position = position[:, None, None]
    first = blocks * size
    chosen = (blocks >= 0) & (first <= position) & is_real[:, None, None]
    last = torch.minimum(first + size - 1, position)
    num_keys = torch.where(chosen, last - first + 1, 0)
    shared = torch.zeros_like(chosen)
    # a query's slots, one after another, against all slots of the query before
    for slot in range(blocks.shape[-1]):
        shared[1:] |= blocks[1:] == blocks[:-1, :, slot : slot + 1]
    has_before = chosen & (row > 0)[:, None, None]
    distance_2 = num_keys * (2 * position - first - last)
    sums = torch.stack(
        [x.sum() for x in (num_keys, distance_2, chosen.any(-1), shared & has_before, has_before)]
    )
    of_query = num_keys.sum(-1)
    extremes = torch.stack((of_query, LARGE - of_query), dim=-1)
    counts = is_real & (position[:, 0, 0] + 1 >= blocks.shape[-1] * size)
    return sums, torch.where(counts[:, None, None], extremes, 0).amax((0, 1))
