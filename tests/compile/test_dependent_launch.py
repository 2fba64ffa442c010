"""Kernels that may start while the one before them runs: what they do before they wait for it."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
from triton.compiler import CompiledKernel

from nsa import NSAConfig
from tools.compile_only.driver import absent_gpu
from tools.compile_only.launches import decode

ACCESS = re.compile(r"\b(ld\.global|st\.global|cp\.async\.cg|atom\.global|red\.global|\w+\.tensor)")
# Before they wait, they read weights, or lengths and cached rows, which no kernel of a step writes.
READS_EARLY = {"linear_rows_kernel", "decode_scan_kernel"}


def compiled_for(arch: int) -> dict[str, list[str]]:
    """PTX of the kernels of a decode step, by their names."""
    found = dict[str, list[str]]()
    make = CompiledKernel.__init__

    def note(self: CompiledKernel, *args: object) -> None:
        make(self, *args)
        found.setdefault(self.metadata.name, []).append(self.asm["ptx"])

    # Sizes of test_compile.py, whose kernels these are.
    sizes: dict[str, Any] = {"num_heads": 12, "num_kv_heads": 2, "head_dim": 64, "value_dim": 64}
    with mock.patch.object(CompiledKernel, "__init__", note), absent_gpu(arch):
        for config in (NSAConfig(**sizes, phi="mlp"), NSAConfig(**sizes, scores="token_max")):
            decode(config, torch.bfloat16, 1, 4096)
    return found


@pytest.mark.parametrize("arch", [90, pytest.param(100, marks=pytest.mark.faults)])
def test_nothing_is_read_or_written_before_the_wait(arch):
    found = compiled_for(arch)
    assert len(found) == 7, found.keys()
    for name, codes in found.items():
        for ptx in codes:
            before, wait, after = ptx.partition("griddepcontrol.wait")
            assert wait, name
            assert ACCESS.search(after), name
            assert set(ACCESS.findall(before)) <= (
                {"ld.global"} if name in READS_EARLY else set()
            ), name
