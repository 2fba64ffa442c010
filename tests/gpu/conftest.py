"""Tests that need a CUDA GPU: skipped as a whole without one, and run by `make test-gpu` alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The matrix comes first: it compiles in parallel what the others use again.
    items.sort(key=lambda item: (HERE in item.path.parents, "test_matrix" not in item.path.name))
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
