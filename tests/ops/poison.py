"""Fresh memory filled with values that no kernel may read: NaN and meaningless integers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

NONSENSE = 0x7F7F7F7F


def poison(x: Tensor) -> Tensor:
    if x.dtype.is_floating_point:
        return x.fill_(torch.nan)
    return (
        x.fill_(True)
        if x.dtype == torch.bool
        else x.fill_(NONSENSE % (torch.iinfo(x.dtype).max + 1))
    )


@contextmanager
def poisoned_memory() -> Iterator[Callable[[], int]]:
    """``torch.empty`` and its like give poisoned memory; yields a count of their calls."""
    count = 0

    def poisoned(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(*args: Any, **kwargs: Any) -> Tensor:
            nonlocal count
            count += 1
            return poison(real(*args, **kwargs))

        return make

    with (
        mock.patch("torch.empty", poisoned(torch.empty)),
        mock.patch("torch.empty_like", poisoned(torch.empty_like)),
        mock.patch.object(Tensor, "new_empty", poisoned(Tensor.new_empty)),
    ):
        yield lambda: count
