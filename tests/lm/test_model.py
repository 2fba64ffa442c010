"""The language model: sizes, start, attention by one word, precision, decoding with its cache."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nsa.lm.config import LMConfig
from nsa.lm.flops import flops_per_token, keys_per_query
from nsa.lm.model import MLP, LanguageModel
from tests.ops.cases import small

PATTERN = small(value_dim=16)
SMALL = LMConfig(vocab_size=61, width=32, num_layers=2, nsa=PATTERN, mlp_hidden_size=64)
ATTENTION = pytest.mark.parametrize("attention", ["nsa", "dense"])


def make(attention: Any, seed: int = 0, **changes: Any) -> LanguageModel:
    torch.manual_seed(seed)
    return LanguageModel(dataclasses.replace(SMALL, attention=attention, **changes))


def tokens(*shape: int, vocab: int = 61, seed: int = 1) -> Tensor:
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "total", "gates"),
    [
        ({}, 78_601_392, 332_208),  # 78.3M and its gates
        ({"attention": "dense"}, 73_550_592, 0),
        ({"vocab_size": 50_257, "tie_head": True, "attention": "dense"}, 111_754_752, 0),
    ],
)
def test_parameters_of_the_78m_configuration(changes, total, gates):
    with torch.device("meta"):
        model = LanguageModel(LMConfig(**changes))
    count = model.num_parameters()
    assert count["total"] == total == sum(parameter.numel() for parameter in model.parameters())
    assert count["gate"] == gates
    assert f"{total / 1e6:.1f}M parameters" in model.parameter_summary()


@pytest.mark.parametrize("phi", ["mean", "linear", "mlp"])
@pytest.mark.parametrize("mlp", ["silu", "swiglu"])
def test_parameter_parts_by_hand(phi, mlp):
    model = make("nsa", mlp=mlp, nsa=dataclasses.replace(PATTERN, phi=phi))
    size, length = PATTERN.head_dim, PATTERN.compress_block_size
    linear = length * size
    phi_head = {"mean": 0, "linear": linear, "mlp": linear + 2 * size**2 * (length + 1)}[phi]
    layers = SMALL.num_layers
    expected = {
        "embedding": 61 * 32,
        "attention": layers * (2 * 32 * 64 + 6 * 32 * 32),
        "gate": layers * (32 + 1) * 3 * 4,
        "phi": layers * 2 * 2 * phi_head,
        "mlp": layers * (3 if mlp == "swiglu" else 2) * 32 * 64,
        "norm": (2 * layers + 1) * 32,
        "head": 61 * 32,
    }
    assert model.num_parameters() == {**expected, "total": sum(expected.values())}


def test_mlp_formulas():
    x = torch.randn(5, 32)
    plain, gated = MLP(SMALL), MLP(dataclasses.replace(SMALL, mlp="swiglu"))
    up = x @ plain.up_proj.weight.T
    torch.testing.assert_close(plain(x), (up * up.sigmoid()) @ plain.down_proj.weight.T)
    assert gated.gate_proj is not None
    gate = x @ gated.gate_proj.weight.T
    expected = (gate * gate.sigmoid() * (x @ gated.up_proj.weight.T)) @ gated.down_proj.weight.T
    torch.testing.assert_close(gated(x), expected)


@pytest.mark.parametrize("seq_len", [1, 7, 64, 130])
def test_keys_per_query_counted_one_by_one(seq_len):
    p, total = PATTERN, 0
    for t in range(seq_len):
        starts = range(0, seq_len, p.compress_stride)
        compressed = sum(start + p.compress_block_size - 1 <= t for start in starts)
        selected = min(t // p.block_size + 1, p.num_selected_blocks)
        # the current block is always among them
        total += compressed + (selected - 1) * p.block_size + t % p.block_size + 1
        total += min(p.window_size, t + 1)
    assert keys_per_query(SMALL, seq_len) == pytest.approx(total / seq_len, rel=1e-12)
    dense = dataclasses.replace(SMALL, attention="dense")
    assert keys_per_query(dense, seq_len) == pytest.approx((seq_len + 1) / 2, rel=1e-12)


def test_flops_of_a_token():
    model = make("dense")
    matrices = (
        sum(p.numel() for p in model.parameters() if p.ndim == 2) - model.embedding.weight.numel()
    )
    attention = 2 * 4 * (16 + 16) * (100 + 1) / 2 * SMALL.num_layers
    assert flops_per_token(model.config, 100) == pytest.approx(
        3 * (2 * matrices + attention), rel=1e-12
    )


@pytest.mark.parametrize("branches", [("win",), ("slc", "win"), ("cmp", "slc", "win")])
def test_flops_of_scores_by_tokens(branches):
    """2 D per layer, query head and key, in the forward pass alone."""
    pattern = dataclasses.replace(PATTERN, branches=branches, scores="token_max")
    config = make("nsa", nsa=pattern).config
    scores = 2 * 16 * 4 * SMALL.num_layers * (100 + 1) / 2 * ("slc" in branches)
    both, forward = (flops_per_token(config, 100, backward=value) for value in (True, False))
    assert both - scores == pytest.approx(3 * (forward - scores), rel=1e-12)
    if "cmp" in branches:
        other = dataclasses.replace(config, nsa=dataclasses.replace(pattern, scores="compressed"))
        assert both - flops_per_token(other, 100) == pytest.approx(scores, rel=1e-9)


@pytest.mark.parametrize(("keys", "heads"), [("group", 6), ("shared", 3)])
def test_flops_of_an_index(keys, heads):
    """2 D per layer, index head and key, forward alone; its projections are parameters."""
    pattern = dataclasses.replace(
        PATTERN, scores="index", index_heads=3, index_dim=32, index_keys=keys
    )
    model = make("nsa", nsa=pattern)
    plain = make("nsa", nsa=dataclasses.replace(PATTERN, scores="random"))
    more = sum(p.numel() for name, p in model.named_parameters() if "_idx_proj" in name)
    assert more == (heads + heads // 3) * 32 * SMALL.width * SMALL.num_layers
    counts = [m.num_parameters()["attention"] for m in (model, plain)]
    assert counts[0] - counts[1] == more
    scores = 2 * 32 * heads * SMALL.num_layers * (100 + 1) / 2
    for backward, factor in ((True, 3), (False, 1)):
        found, other = (flops_per_token(m.config, 100, backward=backward) for m in (model, plain))
        assert found - other == pytest.approx(factor * 2 * more + scores, rel=1e-9)


# --- start ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tie_head", [False, True])
@pytest.mark.parametrize(
    ("attention", "vocab", "width", "layers", "mlp"),
    [("nsa", 256, 128, 4, "silu"), ("dense", 256, 1024, 1, "swiglu"), ("nsa", 8192, 64, 1, "silu")],
)
def test_first_loss_is_that_of_a_uniform_guess(attention, tie_head, vocab, width, layers, mlp):
    torch.manual_seed(3)
    config = LMConfig(
        vocab_size=vocab,
        width=width,
        num_layers=layers,
        attention=attention,
        nsa=PATTERN,
        mlp=mlp,
        mlp_hidden_size=4 * width,
        tie_head=tie_head,
    )
    data = tokens(4, 65, vocab=vocab)
    with torch.no_grad():
        logits = LanguageModel(config)(data[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten()).item()
    assert loss == pytest.approx(math.log(vocab), rel=0.05)


@ATTENTION
def test_every_parameter_gets_a_gradient(attention):
    model = make(attention)
    model(tokens(2, 5)).square().sum().backward()  # shorter than a compression block
    assert all(parameter.grad is not None for parameter in model.parameters())


# --- attention ------------------------------------------------------------------------------------


@ATTENTION
def test_packed_equals_separate_and_batch(attention):
    model = make(attention).double()
    lengths = (5, 1, 64, 0, 30)
    data = tokens(sum(lengths))
    cu_seqlens = torch.tensor([0, 5, 6, 70, 70, 100], dtype=torch.int32)
    packed = model(data, cu_seqlens, 64)
    for logits, part in zip(packed.split(lengths), data.split(lengths), strict=True):
        if part.numel():
            torch.testing.assert_close(logits, model(part), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        model(data.view(2, 50)).flatten(0, 1), model(data, torch.tensor([0, 50, 100]).int(), 50)
    )


# --- precision ------------------------------------------------------------------------------------


@ATTENTION
def test_bf16_compute_over_fp32_parameters(attention):
    model = make(attention)
    seen: dict[str, torch.dtype] = {}
    layer = model.decoder_layers()[0]
    modules = {
        "norm": layer.mlp_norm,
        "projection": layer.mlp.up_proj,
        "residual": layer,
        "output": layer.attention.o_proj,
    }
    for name, module in modules.items():
        module.register_forward_hook(lambda _m, _i, out, name=name: seen.update({name: out.dtype}))
    data = tokens(2, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = model(data)
    fp32, bf16 = torch.float32, torch.bfloat16
    assert seen == {"norm": fp32, "projection": bf16, "residual": fp32, "output": bf16}
    low.float().square().sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert (parameter.dtype, parameter.grad.dtype) == (fp32, fp32)
    torch.testing.assert_close(low.float(), model(data), rtol=0.05, atol=0.05)
