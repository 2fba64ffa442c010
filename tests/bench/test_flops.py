"""Useful operations against counting what the reference lets a query see."""

from __future__ import annotations

import pytest
import torch

from nsa import NSAConfig
from nsa.bench import flops
from nsa.bench.points import Point, hand_made_choice, parse_shape
from nsa.ops._sequences import open_sequences
from nsa.ops._visibility import visible_compressed, visible_tokens, visible_window
from nsa.ops.selected.reference import visible_selected

SMALL = {
    "compress_block_size": 8, "compress_stride": 4, "block_size": 16, "num_selected_blocks": 4, "window_size": 32,
}  # fmt: skip


def counted(at: Point, config: NSAConfig) -> dict[str, int]:
    """Visible pairs of one sequence, by the reference's masks."""
    q = torch.zeros(1, at.seq_len, config.num_heads, config.head_dim)
    sequences = open_sequences("test", q, (1, at.seq_len), None, None, None, None, "reference")
    choice = hand_made_choice(at, config).flatten(0, 1)
    chosen = visible_selected(choice, config, sequences)
    assert bool((chosen.sum((0, 2, 3)) == chosen[:, 0].sum()).all())
    return {
        "dense": int(visible_tokens(sequences).sum()),
        "attention.window": int(visible_window(sequences, config).sum()),
        "attention.compressed": int(visible_compressed(sequences, config).sum()),
        "attention.selected": int(chosen[:, 0].sum()),
    }


@pytest.mark.parametrize("seq_len", [1, 7, 8, 16, 17, 64, 65, 200])
def test_pairs_are_those_that_the_reference_sees(seq_len: int) -> None:
    at = Point(parse_shape("4x2x16x32"), seq_len, 1, "random", torch.float32, torch.device("cpu"))
    config = at.shape.config(SMALL)
    pairs = counted(at, config)
    many = Point(at.shape, seq_len, 3, "random", at.dtype, at.device)
    heads = 3 * 4  # sequences by heads
    forward, both = 2 * 16 + 2 * 32, (2 * 16 + 2 * 32) + (6 * 16 + 4 * 32)
    assert flops.dense_flops(many, config, backward=False) == heads * pairs.pop("dense") * forward
    for case, count in pairs.items():
        assert flops.useful_flops(case, many, config, backward=False) == heads * count * forward
        assert flops.useful_flops(case, many, config, backward=True) == heads * count * both
    whole = flops.useful_flops("attention", many, config, backward=True)
    assert whole == heads * sum(pairs.values()) * both
    choice = flops.useful_flops("attention.choice", many, config, backward=False)
    assert choice == heads * pairs["attention.compressed"] * 2 * 16


def test_what_moves_bytes_has_no_operations() -> None:
    at = Point(parse_shape("4x2x16x32"), 64, 1, "random", torch.float32, torch.device("cpu"))
    for case in ("attention.compress", "attention.combine"):
        assert flops.useful_flops(case, at, at.shape.config(), backward=True) is None
