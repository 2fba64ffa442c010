"""torch.export: one program of the layer or model serves all batch sizes and lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

from nsa import NativeSparseAttention
from nsa.config import RopeScaling
from tests.hf.tiny import tiny, tokens
from tests.ops.cases import small

# Around the block sizes, and longer than the selected blocks.
SHAPES = [(1, 1), (3, 2), (1, 3), (2, 5), (5, 8), (2, 17), (1, 130)]
BATCH, LENGTH = Dim("batch"), Dim("length")
# Scores of compressed keys in two stages, with optional steps; and scores of tokens.
PATTERNS: dict[str, dict[str, Any]] = {
    "compressed": {
        "phi": "mlp",
        "coarse_block_size": 32,
        "num_coarse_blocks": 4,
        "num_selected_blocks_table": ((-1, 40, 3),),
        "gate": "softmax",
        "gate_hidden_size": 8,
        "qk_norm": True,
        "compress_rope": "none",
        "branches": ("cmp", "slc"),
    },
    "shared index": {
        "scores": "index",
        "index_dim": 32,
        "index_keys": "shared",
        "score_precision": "fp8",
        "rope_scaling": RopeScaling("yarn", 4.0, 64),
        "branches": ("slc",),
        "share_kv": True,
        "gate": "fixed",
    },
}


def check_program(
    model: nn.Module, make: Callable[[int, int], dict[str, Tensor]], traced: int, strict: bool
) -> None:
    """The program of one shape gives the results of the model at others."""
    given = make(2, traced)
    shapes = {name: {0: BATCH, 1: LENGTH} for name in given}
    program = export(model, (), given, dynamic_shapes=shapes, strict=strict).module()
    for shape in SHAPES:
        found, wanted = program(**make(*shape)), model(**make(*shape))
        if not isinstance(wanted, Tensor):
            found, wanted = found["logits"], wanted["logits"]
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_layer(pattern):
    torch.manual_seed(0)
    layer = NativeSparseAttention(32, small(**PATTERNS[pattern])).double()

    def make(batch, length):
        return {
            "x": torch.sin(torch.arange(batch * length * 32.0).double()).view(batch, length, 32)
        }

    strict = "index" in pattern
    check_program(layer, make, 5 if strict else 70, strict=strict)


def test_a_language_model_of_dense_attention():
    model = tiny(attention="dense", num_layers=1)
    check_program(model.lm, lambda *shape: {"tokens": tokens(*shape)}, 70, strict=False)


def test_a_padded_batch_of_transformers():

    def make(batch, length):
        mask = torch.ones(batch, length, dtype=torch.int64)
        mask[0, : length // 3] = 0
        return {"input_ids": tokens(batch, length), "attention_mask": mask}

    model = tiny(num_layers=1, scores="token_max", branches=("slc", "win"))
    check_program(model, make, 70, strict=False)
