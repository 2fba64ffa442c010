"""Kernels of the loss of an index head, in the interpreter, against fp64."""

from __future__ import annotations

import dataclasses

import pytest

from tests.kernels.test_operators import heads
from tests.ops.index_loss import IndexCase, check_index_loss

TOKENS = (108, 1, 0, 37)
CASES = {
    "G 1": IndexCase(heads(1, 2), TOKENS),
    "G 6": IndexCase(heads(6, 2), (70, 9), index_heads=2),
    "shared": IndexCase(heads(3, 2), TOKENS, shared=True),
    "shared, 3 index heads": IndexCase(heads(2, 2), TOKENS, shared=True, index_heads=3),
    "fewer queries": IndexCase(heads(3, 2), (200, 64, 9), (20, 0, 9), index_heads=2),
    "dense": IndexCase(heads(2, 2), (70, 70), dense=True),
    "Di 64, D 48": IndexCase(heads(2, head_dim=48), (90,), index_dim=64),
    "repeated": IndexCase(heads(2, 2), (90,), repeats=True),
    "n 20": IndexCase(heads(2, num_selected_blocks=20), (340,), (30,), index_heads=2),
    **{
        f"forced {init} {local}": IndexCase(
            heads(2, num_init_blocks=init, num_local_blocks=local), (150, 33), index_heads=2
        )
        for init, local in ((0, 1), (2, 2), (1, 3))
    },
    **{
        f"l' {size}": IndexCase(heads(2, block_size=size), (6 * size + 5,), (40,), index_heads=2)
        for size in (32, 128)
    },
}


@pytest.mark.parametrize("selected", [True, False], ids=["selected", "all"])
@pytest.mark.parametrize("name", CASES)
def test_index_loss(name, selected):
    check_index_loss(dataclasses.replace(CASES[name], selected=selected))
