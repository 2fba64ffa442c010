"""How the kernel of a projection moves heads, as compiled for Hopper."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch

from nsa import NSAConfig, Sequences
from nsa.module import NativeSparseAttention
from nsa.ops._triton.kernel import Kernel
from nsa.ops.projection import project
from tools.compile_only.driver import absent_gpu


@pytest.mark.parametrize("offsets", [None, (0, 60, 128)], ids=["dense", "packed"])
def test_heads_move_in_words_of_16_bytes(offsets):
    """The number of columns is no multiple of 8 where there are gates, but rows are padded."""
    config = NSAConfig(num_heads=12, num_kv_heads=2)
    layer = NativeSparseAttention(64, config).bfloat16()
    columns, sequences = layer.columns, Sequences(None, 1, 128, 128, torch.device("cpu"))
    assert sum(columns.sizes) % 8
    if offsets is not None:
        sequences = Sequences.packed(torch.tensor(offsets, dtype=torch.int32), 68)
    x = torch.zeros(128, 64, dtype=torch.bfloat16, requires_grad=True)
    compiled: list[Any] = []

    def run(*arguments, **constants):
        compiled.append(original(*arguments, **constants))
        return compiled[-1]

    original = Kernel.run
    with absent_gpu(90), mock.patch.object(Kernel, "run", run):
        plain = layer.plain_weights()
        assert plain is not None
        found = project(x, *plain, columns, sequences, layer.rope, backend="triton")
        torch.autograd.grad(found, x, [torch.zeros_like(y) for y in found])
    assert [one.metadata.name for one in compiled] == ["heads_kernel"] * 2
    # A thread moves heads of 64 in 16 bytes; the 36 columns of the gates come one by one.
    for way, one in zip(("ld", "st"), compiled, strict=True):
        words = Counter(line.split()[-2] for line in _accesses(one.asm["ptx"], way))
        wide, narrow = words[f"{way}.global.v4.b32"], words[f"{way}.global.b16"]
        assert wide >= 14
        assert narrow <= 32


def _accesses(ptx: str, way: str) -> list[str]:
    """Lines that read or write global memory, up to the operation's name and what follows it."""
    lines = (line.split("{")[0].split("[")[0].strip() + " ." for line in ptx.splitlines())
    return [line for line in lines if f"{way}.global." in line]
