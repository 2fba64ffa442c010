"""Padded batches: a row equals the row alone, with padding to its left or its right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from nsa import NativeSparseAttention, NSACache, Sequences, native_sparse_attention
from nsa.lm.dense_attention import DenseAttention
from nsa.rope import Rope
from nsa.testing import make_inputs
from tests.ops.cases import offsets, small
from tests.ops.public import named_tensors

LENGTH = 70
# first token and first padding after it
ROWS = ((0, 70), (13, 70), (0, 41), (30, 33), (5, 66), (70, 70), (0, 0))


def mask_of(rows: tuple[tuple[int, int], ...] = ROWS, dtype: torch.dtype = torch.bool) -> Tensor:
    place = torch.arange(LENGTH)
    return torch.stack([(place >= begin) & (place < end) for begin, end in rows]).to(dtype)


def make(
    kind: type[NativeSparseAttention | DenseAttention] = NativeSparseAttention, **changes: Any
) -> Any:
    torch.manual_seed(0)
    return kind(24, small(**changes)).double()


@pytest.mark.parametrize("kind", [NativeSparseAttention, DenseAttention])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_a_padded_row_is_the_row_alone(kind, dtype):
    """Whatever the padding contains, it reaches no token and has no gradient."""
    module, mask = make(kind), mask_of()[..., None]
    x = torch.randn(len(ROWS), LENGTH, 24, dtype=torch.float64)
    x = torch.where(mask, x, 1e6).requires_grad_()
    out = module(x, attention_mask=mask_of(dtype=dtype))
    gradient = torch.randn_like(out) * mask
    out.backward(gradient)
    assert x.grad is not None
    for row, (begin, end) in enumerate(ROWS):
        if begin == end:
            continue
        alone = x[row, begin:end].detach().requires_grad_()
        expected = module(alone)
        expected.backward(gradient[row, begin:end])
        torch.testing.assert_close(out[row, begin:end], expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(x.grad[row, begin:end], alone.grad, rtol=1e-10, atol=1e-12)
        padding = torch.cat((x.grad[row, :begin], x.grad[row, end:]))
        assert not padding.any()


def test_described_once_for_function_and_layers():
    module, x, mask = make(), torch.randn(len(ROWS), LENGTH, 24, dtype=torch.float64), mask_of()
    sequences = Sequences.padded(mask).with_blocks(module.config)
    expected = module(x, attention_mask=mask)
    assert torch.equal(module(x, sequences=sequences), expected)
    assert torch.equal(module(x.flatten(0, 1), sequences=sequences), expected.flatten(0, 1))


def test_the_function_takes_sequences():
    config, rope = small(), Rope.from_config(small())
    x = make_inputs(config, [LENGTH] * len(ROWS), dtype=torch.float64)
    inputs = {name: y.unflatten(0, (len(ROWS), LENGTH)) for name, y in named_tensors(x).items()}

    def attend(inputs, **given):
        names: Any = {**inputs, **given}
        return native_sparse_attention(**names, phi=None, config=config, rope=rope)

    out = attend(inputs, sequences=Sequences.padded(mask_of()))
    assert out.shape[:2] == (len(ROWS), LENGTH)
    for row, (begin, end) in enumerate(ROWS):
        if begin < end:
            expected = attend({name: y[row, begin:end] for name, y in inputs.items()})
            torch.testing.assert_close(out[row, begin:end], expected, rtol=1e-10, atol=1e-12)
    cu = offsets((70, 3, 417))
    packed, flat = Sequences.packed(cu, 417), named_tensors(x)
    expected = attend(flat, cu_seqlens_q=cu)
    assert torch.equal(attend(flat, sequences=packed), expected)
    assert torch.equal(attend(inputs, sequences=packed).flatten(0, 1), expected)


class _NoReading(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads a value"
        return func(*args, **(kwargs or {}))


def test_nothing_is_read_on_a_gpu(monkeypatch):
    with pytest.raises(AssertionError, match="reads a value"), _NoReading():
        Sequences.padded(mask_of())
    for module in ("_sequences", "_checks"):  # as of a mask on a GPU
        monkeypatch.setattr(f"nsa.ops.{module}.reads_contents", lambda index: False)
    with _NoReading():
        Sequences.padded(mask_of())


def test_compiled_once_for_all_masks():
    counter = CompileCounter()
    compiled = torch.compile(
        lambda mask: Sequences.padded(mask).cu_q, backend=counter, fullgraph=True
    )
    masks = (
        mask_of(),
        mask_of()[[1, 2, 3, 4, 0, 5, 6]],
        mask_of(((2, 8), (9, 70), (0, 60), (0, 1), (7, 8), (0, 70), (69, 70))),
    )
    for mask in masks:
        assert torch.equal(compiled(mask), Sequences.padded(mask).cu_q)
    assert counter.frame_count == 1


ALL = torch.ones(2, 30, dtype=torch.bool)
HOLE = ALL & (torch.arange(30) != torch.tensor([[30], [10]]))
MISFITS: list[tuple[dict[str, Any], str]] = [
    (
        {"attention_mask": torch.ones(2, 3)},
        r"attention_mask must have the leading shape of x \(2, 30\), got \(2, 3\)",
    ),
    (
        {"attention_mask": ALL.float()},
        "attention_mask must be bool or integer, true for a token, got torch.float32",
    ),
    ({"attention_mask": ALL.to("meta")}, "attention_mask must be on cpu like x, got meta"),
    (
        {"attention_mask": HOLE},
        "attention_mask must have the tokens of each row together, "
        "got padding between tokens in row 1",
    ),
    ({"attention_mask": ALL, "cu_seqlens": offsets((60,))}, "cu_seqlens must be left out"),
    (
        {"attention_mask": ALL, "sequences": Sequences.packed(offsets((60,)))},
        "attention_mask must be left out with sequences",
    ),
    (
        {"sequences": Sequences.padded(torch.ones(3, 20, dtype=torch.bool))},
        r"sequences must be of a batch of shape \(2, 30\) like x, got \(3, 20\)",
    ),
    (
        {"attention_mask": ALL, "max_seqlen": 30},
        "max_seqlen must be left out with sequences or attention_mask, got 30",
    ),
    (
        {"sequences": Sequences.packed(offsets((40,)))},
        r"sequences must contain as many tokens as x \(60\), got 40",
    ),
    (
        {"attention_mask": ALL, "cache": NSACache(small(), 1, 2, max_tokens=30).layers[0]},
        "attention_mask must be left out with a cache",
    ),
]


@pytest.mark.parametrize(("given", "message"), MISFITS)
def test_masks_that_do_not_fit(given, message):
    with pytest.raises(ValueError, match=message):
        make()(torch.randn(2, 30, 24, dtype=torch.float64), **given)
    with pytest.raises(
        ValueError, match=r"attention_mask must have shape \[B, T\], got \(2, 1, 5, 5\)"
    ):
        Sequences.padded(torch.ones(2, 1, 5, 5, dtype=torch.bool))


def test_offsets_with_gaps_in_memory():
    module, x = make(), torch.randn(60, 24, dtype=torch.float64)
    cu = offsets((20, 0, 40))
    apart = torch.stack((cu, cu + 7), dim=-1)[:, 0]
    assert torch.equal(module(x, cu_seqlens=apart), module(x, cu_seqlens=cu))
    assert Sequences.packed(apart).cu_q.is_contiguous()
