"""What kernels cannot number is refused, by argument, rule and value; kernels are left out."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import KernelInterface

from nsa import (
    NSAConfig,
    compress,
    compressed_attention,
    native_sparse_attention,
    select_blocks,
    selected_attention,
    window_attention,
)
from nsa.ops import _limits
from tests.ops.cases import make_batch, small

LENGTH = 200
CONFIG = small(num_heads=4, num_kv_heads=2)
BATCH = make_batch(CONFIG, (LENGTH,))


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        KernelInterface, "__getitem__", lambda self, grid: lambda *args, **kwargs: None
    )
    monkeypatch.setattr("nsa.ops._backend.kernels_run_on_cpu", lambda: True)


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    return tuple(x.float().requires_grad_() for x in (BATCH.q(), BATCH.k(), BATCH.v()))  # type: ignore[return-value]


def cmp() -> tuple[Tensor, Tensor]:
    rows = LENGTH // CONFIG.compress_stride
    return torch.zeros(rows, 2, 16), torch.zeros(rows, 2, 32)


def run_whole(**changes: Any) -> None:
    q, k, v = tensors()
    config = dataclasses.replace(CONFIG, **changes)
    native_sparse_attention(
        q, k, v, k, v, k, v, BATCH.gates().float(), None, config, backend="triton"
    )


def run_selected(algorithm: str, n: int = 4, backward: bool = False, **changes: Any) -> None:
    q, k, v = tensors()
    ids = torch.zeros(LENGTH, 2, n, dtype=torch.int32)
    config = dataclasses.replace(CONFIG, **changes)
    out, _ = selected_attention(q, k, v, ids, config, algorithm=algorithm, backend="triton")
    if backward:
        out.sum().backward()


def run_window() -> None:
    window_attention(*tensors(), CONFIG, backend="triton")


def run_compressed() -> None:
    compressed_attention(tensors()[0], *cmp(), CONFIG, backend="triton")


def run_selection() -> None:
    select_blocks(tensors()[0], cmp()[0], torch.zeros(LENGTH, 4), CONFIG, backend="triton")


def run_compress(config: NSAConfig = CONFIG) -> None:
    compress(tensors()[1], None, config, backend="triton")


ROWS = LENGTH * 4  # queries by heads
ENTRIES = LENGTH * 2 * 4
BLOCKS = -(-LENGTH // 16)
QUERIES = 16  # of a tile of 32 rows, 2 heads a group

# What runs, the limit that is set, the number that must stay below it, and what the message says.
CASES: dict[str, tuple[Callable[[], None], str, int, str]] = {
    "whole, rows": (
        lambda: run_whole(branches=("cmp", "win")),
        "NUMBERS",
        ROWS,
        "native_sparse_attention: q .* rows (tokens times query heads)",
    ),
    "whole, keys": (
        lambda: run_whole(branches=("win",)),
        "TOKENS",
        LENGTH,
        "native_sparse_attention: k_win .* tokens of keys",
    ),
    "whole, tokens": (run_whole, "TOKENS", LENGTH, "compress: x .* tokens of keys"),
    "window, rows": (
        run_window,
        "NUMBERS",
        ROWS,
        "window_attention: q .* rows (tokens times query heads)",
    ),
    "window, tokens": (run_window, "TOKENS", LENGTH, "window_attention: k .* tokens of keys"),
    "compressed, rows": (run_compressed, "NUMBERS", ROWS, "compressed_attention: q .* rows"),
    "compressed, tokens": (
        run_compressed,
        "TOKENS",
        LENGTH,
        "compressed_attention: k_cmp .* tokens of keys",
    ),
    "selection, rows": (run_selection, "NUMBERS", ROWS, "select_blocks: q .* rows"),
    "selection, tokens": (
        run_selection,
        "TOKENS",
        LENGTH,
        "select_blocks: k_cmp .* tokens of keys",
    ),
    "compress, tokens": (run_compress, "TOKENS", LENGTH, "compress: x .* tokens of keys"),
    "selected, tokens": (
        lambda: run_selected("tiled"),
        "TOKENS",
        LENGTH,
        "selected_attention: k .* tokens of keys",
    ),
    "selected, selections": (
        lambda: run_selected("tiled"),
        "NUMBERS",
        ENTRIES,
        "selected_attention: block_indices .* selections",
    ),
    "selected, slots": (
        lambda: run_selected("gathered", 8),
        "NUMBERS",
        LENGTH * 4 * 8,
        "selected_attention: q .* partial results",
    ),
    "selected, lists": (
        lambda: run_selected("tiled"),
        "LISTED",
        QUERIES * 4,
        "selected_attention: block_indices .* slots",
    ),
    "selected, sorted": (
        lambda: run_selected("tiled"),
        "SORTED",
        BLOCKS * QUERIES * 4,
        "selected_attention: k .* blocks a sequence",
    ),
    "selected, sums": (
        lambda: run_selected("tiled", backward=True, block_size=128),
        "NUMBERS",
        (ENTRIES // 128 + 2 * 2) * 128,
        "selected_attention: k .* rows of sums of dK and dV",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_numbered_is_refused(name, monkeypatch):
    run, limit, number, message = CASES[name]
    factor = QUERIES * 4 if limit == "SORTED" else 1
    monkeypatch.setattr(_limits, limit, number + factor)
    run()
    monkeypatch.setattr(_limits, limit, number)
    pattern = re.escape(message).replace(r"\.\*", f"must have fewer than {number // factor}")
    with pytest.raises(ValueError, match=rf"^{pattern}.*, got {number // factor}\. Give "):
        run()


def test_slots_of_the_backward(monkeypatch):
    """They are not those of the forward: dQ has another tile."""
    ids = torch.zeros(LENGTH, 2, 8, dtype=torch.int32)
    out, _ = selected_attention(*tensors(), ids, CONFIG, algorithm="gathered", backend="triton")
    monkeypatch.setattr(_limits, "NUMBERS", LENGTH * 4 * 8)
    with pytest.raises(
        ValueError,
        match=r"^selected_attention: q must have fewer than 6400 partial results .*, got 6400\.",
    ):
        out.sum().backward()


def test_keys_of_the_index(monkeypatch):
    """Blocks by KV heads by segments are more than anything else only where sequences are many: called directly."""
    monkeypatch.setattr(_limits, "NUMBERS", 26)
    with pytest.raises(
        ValueError,
        match=r"^selected_attention: k must have fewer than 26 blocks times KV heads .*, got 26\.",
    ):
        new_index_of(1)
    monkeypatch.setattr(_limits, "NUMBERS", 27)
    assert new_index_of(1).absent == 26


def new_index_of(segments: int) -> Any:
    from nsa.ops._sequences import Sequences
    from nsa.ops.selected.index import new_index

    ids = torch.zeros(LENGTH, 2, 4, dtype=torch.int32)
    return new_index(ids, Sequences(None, 1, LENGTH, LENGTH, ids.device), 16, LENGTH, segments)


@pytest.mark.parametrize(
    ("tokens", "heads", "fits"),
    [(2**29 - 2**14 - 1, 4, True), (2**29 - 2**14, 4, False), (2**30, 2, False)],
)
def test_limits_as_they_are(tokens, heads, fits):
    """Without memory for so many."""
    q = torch.empty(tokens, heads, 16, device="meta")
    if fits:
        _limits.check_queries("window_attention", q)
        _limits.check_keys("window_attention", "k", q)
        return
    with pytest.raises(
        ValueError, match=rf"q must have fewer than 2147418112 rows .*, got {tokens * heads}\."
    ):
        _limits.check_queries("window_attention", q)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window_size": 2**30 + 1}, "window_size must be at most 2**30, got 1073741825"),
        (
            {"num_heads": 2**16, "num_kv_heads": 2**16},
            "num_kv_heads must be less than 65,536, got 65536",
        ),
    ],
)
def test_patterns_that_kernels_cannot_number(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        NSAConfig(**changes)


def test_a_hint_beyond_all_tokens():
    cu = torch.tensor([0, LENGTH], dtype=torch.int32)
    with pytest.raises(
        ValueError,
        match=re.escape("max_seqlen_q must be at least 0 and at most 2**30, got 2147483647"),
    ):
        window_attention(
            *tensors(), CONFIG, cu_seqlens_q=cu, max_seqlen_q=2**31 - 1, backend="triton"
        )
