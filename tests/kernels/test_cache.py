"""The decode cache by kernels, as on a GPU: chunks of a prompt give what the reference gives."""

from __future__ import annotations

from unittest import mock

import torch

from nsa import NSACache
from nsa.cache import cache
from nsa.module import NativeSparseAttention
from nsa.ops.range import window_attention_op
from tests.ops.cases import small

CHUNKS = (37, 9, 12)  # the first is alone, the others come behind a past


def test_chunks_of_a_prompt():
    torch.manual_seed(0)
    layer = NativeSparseAttention(32, small(num_heads=2, num_kv_heads=1, value_dim=16))
    x = torch.randn(sum(CHUNKS), 32)
    kernels, reference = (NSACache(layer.config, 1, max_tokens=60) for _ in range(2))
    asked: list[str] = []
    launches = []

    def choose(function: str, backend: str, q: torch.Tensor) -> str:
        asked.append(backend)
        return "triton"

    for chunk in x.split(CHUNKS):
        expected = layer(chunk, cache=reference.layers[0])
        launched = mock.Mock(wraps=window_attention_op)
        with (
            mock.patch.object(cache, "choose_backend", choose),
            mock.patch("nsa.ops.range.window_attention_op", launched),
        ):
            found = layer(chunk, cache=kernels.layers[0])
        launches.append(launched.call_count)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert asked == ["auto"] * len(CHUNKS)
    assert launches == [0, 1, 1]  # the first goes through the operator for all branches
