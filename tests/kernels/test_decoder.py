"""Steps of a decoder by kernels, as on a GPU."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nsa.lm.decoder import Decoder
from nsa.lm.model import LanguageModel
from nsa.ops.linear import Linear
from tests.lm.test_decoder import LENGTHS, MIXED, make, texts

# As :func:`nsa.hf.convert` makes them.
CONVERTED: dict[str, Any] = {"branches": ("slc",), "share_kv": True, "gate": "fixed"}
# Operators of PyTorch in a step: embeddings, lengths, memory, and copies by the interpreter.
FOREIGN = {"embedding", "add_", "view", "select", "empty", "new_empty", "set_", "copy_"}


class Names(TorchDispatchMode):
    """Collects the names of the operators of PyTorch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.found = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":
            self.found.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "changes",
    [MIXED, {**CONVERTED, "scores": "token_max"}, {**CONVERTED, "scores": "index"}],
    ids=["mixed", "tokens", "index"],
)
def test_steps(changes, monkeypatch):
    """Of dense and sparse layers of several patterns: kernels of the library alone."""
    model: LanguageModel = make(**changes, mlp="swiglu").float()
    decoder = Decoder(model, 3, max_tokens=100)
    prompts = texts()
    decoder.prefill([text[:n] for text, n in zip(prompts, LENGTHS, strict=True)])
    for place in ("nsa.cache.cache", "nsa.ops.linear", "nsa.ops.projection"):
        monkeypatch.setattr(f"{place}.choose_backend", lambda *_: "triton")
    tokens = torch.tensor([text[n : n + 2] for text, n in zip(prompts, LENGTHS, strict=True)])
    with Names() as names:
        logits = decoder.step(tokens)
    assert names.found <= FOREIGN
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
