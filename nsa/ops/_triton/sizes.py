"""Sizes of tiles and grids, for the host.

Triton's functions of these names cost microseconds a call outside kernels.
"""

from __future__ import annotations


def cdiv(number: int, size: int) -> int:
    """Parts of ``size`` that hold ``number``, at least 0."""
    return -(-number // size)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least ``number``, itself at least 1."""
    return 1 << (number - 1).bit_length()
