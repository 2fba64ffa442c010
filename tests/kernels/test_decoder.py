"""Steps of a decoder by kernels, as on a GPU."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from nsa.lm.decoder import Decoder
from nsa.lm.model import LanguageModel
from nsa.ops.linear import Linear
from tests.lm.test_decoder import LENGTHS, MIXED, make, texts


def test_steps(monkeypatch):
    """Of dense and sparse layers of several patterns."""
    model: LanguageModel = make(**MIXED, mlp="swiglu").float()
    decoder = Decoder(model, 3, max_tokens=100)
    prompts = texts()
    decoder.prefill([text[:n] for text, n in zip(prompts, LENGTHS, strict=True)])
    for place in ("nsa.cache.cache", "nsa.ops.linear", "nsa.ops.projection"):
        monkeypatch.setattr(f"{place}.choose_backend", lambda *_: "triton")
    logits = decoder.step(
        torch.tensor([text[n : n + 2] for text, n in zip(prompts, LENGTHS, strict=True)])
    )
    monkeypatch.undo()
    for b, n in enumerate(LENGTHS):
        whole = model(torch.tensor(prompts[b][: n + 2])).detach()[n:]
        torch.testing.assert_close(logits[b], whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 12, 70])
@pytest.mark.parametrize(("width", "columns"), [(24, 40), (1100, 17)])
def test_linear(rows, width, columns):
    generator = torch.Generator().manual_seed(rows)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    x, weight, gate = normal(rows, width), normal(columns, width) / 5, normal(columns, width) / 5
    residual = normal(rows, columns)
    for layer in (
        Linear(weight),
        Linear(weight, silu=True),
        Linear(weight, eps=1e-2),
        Linear(weight, gate=gate, eps=1e-6),
    ):
        for added in (None, residual):
            found = layer(x, added, backend="triton")
            expected = layer(x, added, backend="reference")
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_many_rows_are_multiplied_by_pytorch():
    """The result then takes the memory of what it is added to."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(257, 8, generator=generator), torch.randn(6, 8, generator=generator)
    residual = torch.randn(257, 6, generator=generator)
    expected = residual.double() + x.double() @ weight.double().t()
    layer = Linear(weight)
    with mock.patch("nsa.ops.linear._launch") as launch:
        found = layer(x, residual, backend="triton")
        assert not launch.called
        layer(x[:256], residual[:256], backend="triton")
        assert launch.called
    assert found.data_ptr() == residual.data_ptr()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
