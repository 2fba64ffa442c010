"""Properties of docs/semantics.md that hold for every operator and for the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import (
    NSAConfig,
    PhiWeights,
    Rope,
    apply_rope,
    compress,
    compressed_attention,
    compressed_positions,
    native_sparse_attention,
    select_blocks,
    selected_attention,
    window_attention,
)
from tests.ops.cases import Batch, array, leaf, make_batch, near, small
from tests.ops.whole import phi_parameters

CONFIG = small(phi="linear")
ROPE = Rope.from_config(CONFIG)

# Token tensors of an operator by name, and the operator on them: every result has one row for each
# query.
Tokens = dict[str, Tensor]
Operator = Callable[[Tokens, Batch, dict[str, Any]], list[Tensor]]


def compressed_rows(x: Tokens, batch: Batch, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Compressed keys and values from raw tokens, so that causality can be asked of tokens."""
    weights = make_batch(CONFIG, batch.lengths_k, seed=99)
    phi_k, phi_v = (PhiWeights(**phi_parameters(weights, size)) for size in (16, 32))
    cu = batch.kwargs["cu_seqlens_k"]
    offsets = cu if kwargs else None
    k, _ = compress(x["k_cmp_raw"], phi_k, CONFIG, offsets)
    v, _ = compress(x["v_cmp_raw"], phi_v, CONFIG, offsets)
    return apply_rope(k, compressed_positions(CONFIG, cu, k.shape[0]), ROPE), v


def run_cmp(x: Tokens, batch: Batch, kwargs: dict[str, Any]) -> list[Tensor]:
    out, lse = compressed_attention(x["q"], *compressed_rows(x, batch, kwargs), CONFIG, **kwargs)
    assert out is not None
    return [out, lse]


def run_choice(x: Tokens, batch: Batch, kwargs: dict[str, Any]) -> list[Tensor]:
    k_cmp, _ = compressed_rows(x, batch, kwargs)
    _, lse = compressed_attention(x["q"], k_cmp, None, CONFIG, **kwargs)
    return [select_blocks(x["q"], k_cmp, lse, CONFIG, **kwargs)]


def run_slc(x: Tokens, batch: Batch, kwargs: dict[str, Any]) -> list[Tensor]:
    return list(
        selected_attention(x["q"], x["k_slc"], x["v_slc"], x["block_indices"], CONFIG, **kwargs)
    )


def run_win(x: Tokens, batch: Batch, kwargs: dict[str, Any]) -> list[Tensor]:
    return list(window_attention(x["q"], x["k_win"], x["v_win"], CONFIG, **kwargs))


def run_whole(x: Tokens, batch: Batch, kwargs: dict[str, Any]) -> list[Tensor]:
    weights = make_batch(CONFIG, batch.lengths_k, seed=99)
    phi = PhiWeights(**phi_parameters(weights, 16)), PhiWeights(**phi_parameters(weights, 32))
    given: dict[str, Any] = {name: tensor for name, tensor in x.items() if name != "block_indices"}
    return [native_sparse_attention(**given, phi=phi, config=CONFIG, rope=ROPE, **kwargs)]


OPERATORS: dict[str, Operator] = {
    "cmp": run_cmp,
    "choice": run_choice,
    "slc": run_slc,
    "win": run_win,
    "whole": run_whole,
}
DIFFERENTIABLE = [name for name in OPERATORS if name != "choice"]
OF_QUERIES = ("q", "gates", "block_indices")


def tokens_of(batch: Batch) -> Tokens:
    return {
        "q": batch.q(),
        "k_cmp_raw": batch.k(),
        "v_cmp_raw": batch.v(),
        "k_slc": batch.k(),
        "v_slc": batch.v(),
        "k_win": batch.k(),
        "v_win": batch.v(),
        "gates": batch.gates(),
        "block_indices": batch.block_indices(),
    }


def leaves_of(x: Tokens) -> Tokens:
    return {name: tensor if name == "block_indices" else leaf(tensor) for name, tensor in x.items()}


def gradients(name: str, x: Tokens, batch: Batch, seed: int = 5) -> dict[str, Tensor]:
    leaves = leaves_of(x)
    out = OPERATORS[name](leaves, batch, batch.kwargs)[0]
    out.backward(
        torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=out.dtype)
    )
    return {key: tensor.grad for key, tensor in leaves.items() if tensor.grad is not None}


@pytest.mark.parametrize("lengths_q", [(257,), (60,)])
@pytest.mark.parametrize("name", OPERATORS)
def test_causality_bit_for_bit(name, lengths_q):
    """Other values for all tokens after t change no result up to t, in any bit."""
    batch = make_batch(CONFIG, (257,), lengths_q)
    x, other = tokens_of(batch), tokens_of(batch)
    expected = OPERATORS[name](x, batch, batch.kwargs)
    first = 257 - lengths_q[0]
    changed_later = False
    for t in (200, 203, 204, 207, 208, 223, 224, 240, 255):
        mixed = {}
        for key, tensor in x.items():
            cut = t + 1 - first if key in OF_QUERIES else t + 1
            factor = 1 if key == "block_indices" else 50
            mixed[key] = torch.cat((tensor[:cut], factor * other[key][cut:]))
        for actual, wanted in zip(
            OPERATORS[name](mixed, batch, batch.kwargs), expected, strict=True
        ):
            assert torch.equal(actual[: t + 1 - first], wanted[: t + 1 - first]), t
            changed_later |= not torch.equal(actual, wanted)
    assert changed_later


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradient_reaches_no_later_token(name):
    """The output up to t has gradient exactly 0 in every token after t."""
    batch = make_batch(CONFIG, (257,))
    x = tokens_of(batch)
    for t in (6, 7, 130, 131, 143, 144):
        leaves = leaves_of(x)
        OPERATORS[name](leaves, batch, batch.kwargs)[0][: t + 1].sum().backward()
        for tensor in leaves.values():
            assert tensor.grad is None or not bool(tensor.grad[t + 1 :].any()), t
        assert any(
            tensor.grad is not None and bool(tensor.grad[: t + 1].any())
            for tensor in leaves.values()
        ) == (t >= 7 or name != "cmp")


@pytest.mark.parametrize(
    "lengths", [((130, 0, 257, 1, 140), None), ((200, 131, 257), (1, 130, 33))]
)
@pytest.mark.parametrize("name", OPERATORS)
def test_packed_equals_separate(name, lengths):
    batch = make_batch(CONFIG, *lengths)
    x = tokens_of(batch)
    packed = OPERATORS[name](x, batch, batch.kwargs)
    for b, (rows, tokens, _) in enumerate(batch.slices):
        alone = make_batch(CONFIG, (batch.lengths_k[b],), (batch.lengths_q[b],))
        part = {key: tensor[rows if key in OF_QUERIES else tokens] for key, tensor in x.items()}
        for together, separate in zip(
            packed, OPERATORS[name](part, alone, alone.kwargs), strict=True
        ):
            near(separate, array(together[rows]))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_packed_gradients_equal_separate(name):
    batch = make_batch(CONFIG, (130, 0, 257, 5))
    x = tokens_of(batch)
    leaves = leaves_of(x)
    out = OPERATORS[name](leaves, batch, batch.kwargs)[0]
    d_out = batch.normal(*out.shape)
    out.backward(d_out)
    for b, (rows, tokens, _) in enumerate(batch.slices):
        alone = make_batch(CONFIG, (batch.lengths_k[b],))
        part = leaves_of(
            {key: tensor[rows if key in OF_QUERIES else tokens] for key, tensor in x.items()}
        )
        OPERATORS[name](part, alone, alone.kwargs)[0].backward(d_out[rows])
        for key, tensor in part.items():
            if tensor.grad is not None:
                together = leaves[key].grad
                assert together is not None
                near(tensor.grad, array(together[rows if key in OF_QUERIES else tokens]))


@pytest.mark.parametrize(
    ("name", "num_rows"),
    [*((name, 130) for name in OPERATORS), *((name, 9) for name in ("slc", "win", "whole"))],
)
def test_dense_equals_packed(name, num_rows):
    batch = make_batch(CONFIG, (130,) * 3, (num_rows,) * 3)
    x = tokens_of(batch)
    packed = OPERATORS[name](x, batch, batch.kwargs)
    dense = OPERATORS[name](
        {key: tensor.unflatten(0, (3, -1)) for key, tensor in x.items()}, batch, {}
    )
    for flat, shaped in zip(packed, dense, strict=True):
        near(shaped, array(flat.unflatten(0, (3, -1))), 1e-14)


@pytest.mark.parametrize("name", ["cmp", "choice"])
def test_dense_queries_with_compressed_keys_of_more_tokens(name):
    """How many tokens lie behind compressed keys cannot be told without offsets: refused, not guessed."""
    batch = make_batch(CONFIG, (130,) * 3, (9,) * 3)
    with pytest.raises(ValueError, match=r": k_cmp must .*, got "):
        OPERATORS[name](
            {key: t.unflatten(0, (3, -1)) for key, t in tokens_of(batch).items()}, batch, {}
        )


@pytest.mark.parametrize("name", OPERATORS)
def test_nan_reaches_no_other_sequence(name):
    """One sequence is all NaN: the others' results and gradients keep every bit."""
    batch = make_batch(CONFIG, (130, 140, 257))
    x = tokens_of(batch)
    poisoned = {key: tensor.clone() for key, tensor in x.items()}
    for key, tensor in poisoned.items():
        if key != "block_indices":
            tensor[130:270] = torch.nan
    others = torch.ones(527, dtype=torch.bool)
    others[130:270] = False
    clean, dirty = (OPERATORS[name](y, batch, batch.kwargs) for y in (x, poisoned))
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a[others], b[others])
    if name != "choice":
        assert bool(dirty[0][~others].isnan().any())
        clean_gradients, dirty_gradients = (
            gradients(name, x, batch),
            gradients(name, poisoned, batch),
        )
        assert clean_gradients.keys() == dirty_gradients.keys()
        for key, gradient in clean_gradients.items():
            assert torch.equal(gradient[others], dirty_gradients[key][others]), key


@pytest.mark.parametrize("name", OPERATORS)
def test_same_bits_on_every_run(name):
    batch = make_batch(CONFIG, (130, 257), (130, 60))
    x = tokens_of(batch)
    first = [tensor.clone() for tensor in OPERATORS[name](x, batch, batch.kwargs)]
    for _ in range(2):
        for a, b in zip(first, OPERATORS[name](x, batch, batch.kwargs), strict=True):
            assert torch.equal(a, b)
    if name != "choice":
        once, again = gradients(name, x, batch), gradients(name, x, batch)
        for key, gradient in once.items():
            assert torch.equal(gradient, again[key]), key


@pytest.mark.parametrize("name", OPERATORS)
def test_inputs_are_left_alone(name):
    batch = make_batch(CONFIG, (130, 9))
    x = tokens_of(batch)
    before = {key: tensor.clone() for key, tensor in x.items()}
    OPERATORS[name](x, batch, batch.kwargs)
    for key, tensor in x.items():
        assert torch.equal(tensor, before[key]), key


@pytest.mark.parametrize("name", OPERATORS)
def test_strides_do_not_matter(name):
    """Heads that are slices of a wider projection give the results of contiguous ones."""
    batch = make_batch(CONFIG, (130, 140))
    x = tokens_of(batch)
    wide = {
        key: torch.cat((tensor, tensor), dim=1)[:, : tensor.shape[1]] for key, tensor in x.items()
    }
    assert not wide["q"].is_contiguous()
    pairs = zip(
        OPERATORS[name](wide, batch, batch.kwargs),
        OPERATORS[name](x, batch, batch.kwargs),
        strict=True,
    )
    for a, b in pairs:
        near(a, array(b), 1e-14)


@pytest.mark.parametrize("name", OPERATORS)
def test_autocast_does_not_lower_the_precision(name):
    """Operators compute in the dtype of their inputs: fp32 stays fp32 under bf16 autocast."""
    batch = make_batch(CONFIG, (130,))
    x = {key: t if key == "block_indices" else t.float() for key, t in tokens_of(batch).items()}
    expected = OPERATORS[name](x, batch, batch.kwargs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = OPERATORS[name](x, batch, batch.kwargs)
    for a, b in zip(under, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_values_are_linear():
    """Twice the values, twice the output; the choice and lse do not see values."""
    batch = make_batch(CONFIG, (257,))
    x = tokens_of(batch)
    doubled = {key: 2 * tensor if key.startswith("v_") else tensor for key, tensor in x.items()}
    near(run_whole(doubled, batch, {})[0], 2 * array(run_whole(x, batch, {})[0]), 1e-14)
    for name in ("cmp", "slc", "win"):
        assert torch.equal(OPERATORS[name](doubled, batch, {})[1], OPERATORS[name](x, batch, {})[1])


def test_the_pattern_is_truly_sparse():
    """At the lengths above, n * l' <= S / 2 and w <= S / 4 hold: full coverage would hide mistakes."""
    config: NSAConfig = CONFIG
    assert config.num_selected_blocks * config.block_size <= 130 / 2
    assert config.window_size <= 130 / 4
