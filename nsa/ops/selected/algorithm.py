"""Which algorithm of the selected branch runs, as far as shapes say it.

Without Triton: shapes of outputs depend on it.
"""

from __future__ import annotations

ALGORITHMS = ("auto", "tiled", "gathered")

# Queries of a tile: as many as a query mask has bits.
MAX_QUERIES = 32
# Selections scatter when the list of a tile holds on average more than so many times n blocks.
SCATTER_THRESHOLD = 2.75


def queries_of_tile(group_size: int) -> int:
    """Whole queries of a tile of 64 rows, each of ``group_size`` heads."""
    return min(max(64 // group_size, 1), MAX_QUERIES)


def always_tiled(
    algorithm: str, group_size: int, n: int, len_q: int, len_k: int, block_size: int
) -> bool:
    """Whether the tiled algorithm runs whatever the selection is.

    Args:
        algorithm: ``tiled``, ``gathered``, or ``auto``: tiled where lists are short by the shapes
            alone, and otherwise what suits the selection, decided on the device.
        group_size: query heads of a KV head.
        n: slots of a query.
        len_q: at least the longest sequence in queries.
        len_k: the same in key tokens.
        block_size: tokens of a block.
    """
    queries = queries_of_tile(group_size)
    blocks = -(-len_k // block_size)
    # Queries of all positions see half of the blocks on average.
    longest = min(queries * n, blocks if len_q < len_k else (blocks + 1) // 2)
    return algorithm == "tiled" or (algorithm == "auto" and longest <= SCATTER_THRESHOLD * n)
