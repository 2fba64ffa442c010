"""The suite of properties on a GPU, at lengths at which tiles and lists have edges.

Operators against fp64: test_matrix.py.
"""

from __future__ import annotations

import dataclasses

from tests.gpu.matrix import MATRIX
from tests.ops.properties import *  # noqa: F403
from tests.ops.properties import Setting, test_causality_bit_for_bit

del test_operator  # noqa: F821

LIKES = {"bf16": "bf16 G6 D64", "wide": "bf16 G16 D128", "fp32": "fp32 G6 D64"}
SETTING = Setting(
    {},
    {name: MATRIX[like] for name, like in LIKES.items()},
    one=1500,
    times=(900, 1037, 1151, 1400),
    packed=(300, 77, 1500, 0, 40),
    covered=1000,
    fewer=(0, 800),
)


def test_causality_of_the_whole_gathered():
    like = dataclasses.replace(SETTING.likes["bf16"], algorithm="gathered")
    setting = dataclasses.replace(SETTING, likes={"gathered": like})
    test_causality_bit_for_bit("whole", "gathered", setting)
