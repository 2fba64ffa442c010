"""How much one call of a kernel can number.

Addresses are computed in 64 bits, everything else in 32: rows, blocks, entries and the tiles that
they are cut into. These limits lie above what the memory of a present GPU holds; beyond them
kernels would read and write the wrong rows. They are checked when an operator runs, not when it is
traced, and messages are made when a check has failed.
"""

from __future__ import annotations

from torch import Tensor

from nsa.errors import fail

# 32-bit numbers, less those past the end that the last tile still looks at.
NUMBERS = 2**31 - 2**16
# Tokens of keys, so that a window, itself at most 2**30, ends below 2**31 wherever it begins.
TOKENS = 2**30 - 2**16
# Places that the entries of a tile are sorted to, blocks by entries.
SORTED = 2**31 - 1
# Blocks in the list of a tile: two of their counts share a number.
LISTED = 2**16
FEWER = "Give fewer tokens a call."


def check_numbers(
    function: str,
    argument: str,
    number: int,
    what: str,
    limit: int | None = None,
    hint: str = FEWER,
) -> None:
    """Raise unless ``number``, of ``what``, is below ``limit`` (``NUMBERS`` if it is None)."""
    limit = NUMBERS if limit is None else limit
    if number >= limit:
        fail(function, argument, f"have fewer than {limit} {what}", number, hint)


def check_queries(function: str, q: Tensor) -> None:
    """Rows of ``q [T, Hq, D]`` can be numbered."""
    check_numbers(function, "q", q.shape[0] * q.shape[1], "rows (tokens times query heads)")


def check_keys(function: str, argument: str, k: Tensor, stride: int = 1) -> None:
    """So can the tokens of ``k [N, Hkv, D]``, a row of which stands for ``stride`` tokens."""
    check_numbers(function, argument, k.shape[0] * stride, "tokens of keys", TOKENS)
