"""Lines of code whose loss no other test notices."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from nsa.lm.config import LMConfig
from nsa.lm.model import LanguageModel
from nsa.module import NativeSparseAttention
from nsa.ops.selection import select_blocks
from nsa.ops.selection.reference import to_fp8
from tests.ops.cases import small

PATTERN = small(value_dim=16)


def test_every_layer_has_its_own_rows_of_the_table():
    """The outputs of the second layer change with its row, and not with that of the first."""
    tokens = torch.arange(200) % 90
    config = LMConfig(vocab_size=90, width=32, num_layers=2)
    found = list[list[torch.Tensor]]()
    for layers in ((), (0,), (1,), (-1,)):
        table = tuple((layer, 10_000, 3) for layer in layers)
        pattern = small(value_dim=16, num_selected_blocks_table=table)
        torch.manual_seed(1)
        model = LanguageModel(dataclasses.replace(config, nsa=pattern))
        outputs = list[torch.Tensor]()
        for layer in model.decoder_layers():
            layer.attention.register_forward_hook(lambda _, __, out, kept=outputs: kept.append(out))
        with torch.no_grad():
            model(tokens)
        found.append(outputs)
    none, first, second, every = found
    assert torch.equal(second[0], none[0])
    assert torch.equal(first[0], every[0])
    for a, b in ((first[0], none[0]), (second[1], none[1]), (first[1], every[1])):
        assert not torch.equal(a, b)


def test_a_tied_head_starts_small_whatever_init_std_says():
    """The last hidden state is close to the token's own embedding, whose logit must start small."""
    torch.manual_seed(0)
    config = LMConfig(vocab_size=500, width=64, num_layers=1, nsa=PATTERN, init_std=0.5)
    model = LanguageModel(dataclasses.replace(config, tie_head=True))
    assert model.head.weight is model.embedding.weight
    assert model.embedding.weight.std().item() == pytest.approx(3 / 64, rel=0.05)
    untied = LanguageModel(config)
    assert untied.embedding.weight.std().item() == pytest.approx(0.5, rel=0.05)
    assert untied.head.weight.std().item() == pytest.approx(0.5 / 8, rel=0.05)


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
def test_gates_of_bf16_logits_are_fp32(gate):
    torch.manual_seed(0)
    layer = NativeSparseAttention(64, small(value_dim=16, gate=gate))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        gates = layer.gate(torch.randn(50, 64))
    assert gates.dtype == torch.float32
    assert not torch.equal(gates, gates.bfloat16().float()), "rounded before the activation"
    if gate == "softmax":
        torch.testing.assert_close(gates.sum(-1), torch.ones(50, 4), rtol=0, atol=1e-6)


@pytest.mark.parametrize("zeros", ["query", "key"])
def test_a_row_of_zeros_is_scored_in_fp8(zeros):
    """Its largest magnitude is no scale to divide by."""
    torch.manual_seed(0)
    q, k_cmp, lse = torch.randn(256, 4, 16), torch.randn(63, 2, 16), torch.full((256, 4), 4.0)
    (q if zeros == "query" else k_cmp)[40:50] = 0.0
    exact, low = (
        select_blocks(q, k_cmp, lse, small(value_dim=16, score_precision=precision))
        for precision in ("exact", "fp8")
    )
    if zeros == "query":
        assert torch.equal(exact[40:50], low[40:50])
    assert (exact == low).float().mean() > 0.8
    rows, scales = to_fp8(q if zeros == "query" else k_cmp)
    assert rows.float().isfinite().all()
    assert torch.equal(scales[40:50], torch.ones_like(scales[40:50]))
