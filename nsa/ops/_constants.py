"""What kernels are compiled for, where a number or a tuple does not say it."""

from __future__ import annotations

from typing import Any


class Constants(dict[str, Any]):
    """Base of frozen dataclasses that kernels take as constants.

    For what a tuple cannot hold: Triton takes no tuple of tuples. A dictionary of its own fields,
    since Triton writes constants as JSON wherever something looks on while it compiles.
    """

    def __post_init__(self) -> None:
        self.update(vars(self))
