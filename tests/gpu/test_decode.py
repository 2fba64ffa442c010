"""Decode steps on kernels against fp64, at real sizes; in CUDA graphs; the keys that they read."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from nsa import NativeSparseAttention, NSACache, NSAConfig
from nsa.lm.config import LMConfig
from nsa.lm.decoder import Decoder
from nsa.lm.model import LanguageModel
from nsa.ops.decode import launch
from nsa.ops.decode.layout import Splits
from nsa.ops.linear import Linear
from nsa.testing import assert_within_budget, packed_offsets
from tests.gpu.matrix import BF16, DEVICE, FP16, FP32, SEED
from tests.gpu.test_execution import no_waiting
from tests.ops.decoding import Decoded
from tests.ops.public import Case

# Tokens before the step, of a batch of 4: nothing, less than a block, a full one, many.
SHORT, LONG = (0, 30, 127, 5000), (1, 700, 16_383, 69_990)


def sized(group: int, dim: int, value_dim: int | None = None, **changes: Any) -> NSAConfig:
    kv = 4 if group == 16 else 2
    sizes: dict[str, Any] = {"head_dim": dim, "value_dim": value_dim or dim}
    return NSAConfig(num_heads=group * kv, num_kv_heads=kv, **sizes, **changes)


def case_of(
    config: NSAConfig, dtype: torch.dtype, before: tuple[int, ...], queries: int, **changes: Any
) -> Case:
    config = dataclasses.replace(config, **changes)
    lengths = tuple(n + queries for n in before)
    return Case(config, lengths, (queries,) * len(before), dtype=dtype, device=DEVICE)


PLAIN, WIDE, PAPER = sized(6, 64), sized(16, 128), sized(16, 192, 128)
TOKENS: dict[str, Any] = {"scores": "token_max", "branches": ("slc", "win")}
INDEX: dict[str, Any] = {**TOKENS, "scores": "index", "index_dim": 32}
TABLE = {"num_selected_blocks_table": ((-1, 1000, 8),), "num_local_blocks": 3}
CASES: dict[str, Case] = {
    "bf16 G6 D64": case_of(PLAIN, BF16, LONG, 1),
    "bf16 G6 D64 short": case_of(PLAIN, BF16, SHORT, 1),
    "bf16 G6 D64 mlp, 8 queries": case_of(PLAIN, BF16, LONG, 8, phi="mlp"),
    "bf16 G6 D64 linear, 3 queries": case_of(PLAIN, BF16, SHORT, 3, phi="linear"),
    "bf16 G16 D128": case_of(WIDE, BF16, LONG, 1, phi="linear"),
    "bf16 G16 D128 5 queries": case_of(WIDE, BF16, SHORT, 5, compress_rope="none"),
    "bf16 G16 D192/128": case_of(PAPER, BF16, LONG, 1),
    "bf16 G16 D192/128 mlp": case_of(PAPER, BF16, SHORT, 2, phi="mlp"),
    "bf16 G64 D128": case_of(sized(16, 128), BF16, SHORT, 1, num_kv_heads=1),
    "bf16 G6 D80 table": case_of(sized(6, 80, 48), BF16, LONG, 2, **TABLE),
    "fp16 G6 D64": case_of(PLAIN, FP16, LONG, 4, compress_rope="start", rotary_dim=32),
    "fp16 G16 D192/128": case_of(PAPER, FP16, SHORT, 8),
    "fp32 G6 D64": case_of(PLAIN, FP32, LONG, 1),
    "fp32 G16 D128": case_of(WIDE, FP32, SHORT, 8, phi="mlp"),
    "bf16 G6 D64 tokens": case_of(PLAIN, BF16, LONG, 1, **TOKENS),
    "bf16 G16 D128 tokens, 8 queries": case_of(WIDE, BF16, LONG, 8, **{**TABLE, **TOKENS}),
    "bf16 G16 D192/128 tokens, cmp": case_of(PAPER, BF16, SHORT, 2, scores="token_max"),
    "fp32 G6 D64 tokens": case_of(PLAIN, FP32, SHORT, 3, block_size=128, **TOKENS),
    "bf16 G6 D64 index": case_of(PLAIN, BF16, LONG, 1, **INDEX),
    "bf16 G16 D128 shared index, 8 queries": case_of(
        WIDE, BF16, LONG, 8, **{**TABLE, **INDEX}, index_heads=20, index_keys="shared"
    ),
    "bf16 G6 D64 fp8": case_of(PLAIN, BF16, LONG, 1, score_precision="fp8"),
    "bf16 G6 D64 tokens, fp8": case_of(PLAIN, BF16, LONG, 1, score_precision="fp8", **TOKENS),
    "bf16 G16 D128 index, fp8": case_of(
        WIDE, BF16, LONG, 2, **INDEX, score_precision="fp8", block_size=128
    ),
    "fp32 G6 D192/128": case_of(sized(6, 192, 128), FP32, SHORT, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_step(name):
    """Outputs, selected blocks, compressed keys and reads; the same bits when taken again."""
    decoded = Decoded.of(CASES[name], num_chunks=2)
    decoded.check()
    decoded.take_back()
    first = decoded.step()
    for _ in range(3):
        decoded.take_back()
        torch.testing.assert_close(decoded.step(), first, rtol=0, atol=0)


@pytest.mark.parametrize(
    "splits",
    [Splits(1, 1, 1), Splits(64, 9, 16), Splits(5, 3, 6), Splits(0, 9, 3, 64), Splits(0, 1, 1, 5)],
    ids=str,
)
def test_any_number_of_programs(splits, monkeypatch):
    """The selection in chunks of 63 blocks, too: some 17 of the longest sequence."""
    monkeypatch.setattr(launch, "choose_splits", lambda *_: splits)
    monkeypatch.setattr(launch, "MAX_RANKED", 64)
    name = "bf16 G16 D128 tokens, 8 queries" if splits.scored else "bf16 G6 D64 mlp, 8 queries"
    Decoded.of(CASES[name]).check()


def layer_of(config: NSAConfig) -> NativeSparseAttention:
    torch.manual_seed(0)
    return NativeSparseAttention(256, config).to(DEVICE, BF16).requires_grad_(False)


def filled(
    module: NativeSparseAttention,
    lengths: tuple[int, ...],
    num_layers: int = 1,
    max_tokens: int | None = None,
) -> NSACache:
    """A cache with so many tokens of each sequence, the same in every call."""
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    x = torch.randn(sum(lengths), 256, generator=generator, device=DEVICE).to(BF16)
    most = max(lengths) + 500 if max_tokens is None else max_tokens
    cache = NSACache(module.config, num_layers, len(lengths), max_tokens=most)
    for layer in cache.layers:
        module(x, cu_seqlens=packed_offsets(lengths, DEVICE), max_seqlen=max(lengths), cache=layer)
    return cache


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("changes", [{}, {"phi": "mlp"}, TOKENS], ids=str)
def test_captured_step(changes, queries):
    """A step of two layers, replayed at other lengths and pages, gives the eager bits."""
    module = layer_of(dataclasses.replace(SEED, **changes))
    lengths, batch = (1, 60, 1000, 4090), 4
    eager, captured = (filled(module, lengths, num_layers=2) for _ in range(2))
    x = torch.zeros(batch, queries, 256, device=DEVICE, dtype=BF16)

    def step(cache):
        return [module((1 + i) * x, cache=layer) for i, layer in enumerate(cache.layers)]

    counts, graph = [queries] * batch, torch.cuda.CUDAGraph()
    step(captured)  # compiled and warm, then taken back
    for b, length in enumerate(lengths):
        captured.truncate(b, length)
    captured.reserve(counts)
    with captured.recording(), torch.cuda.graph(graph):
        found = step(captured)
    for i in range(40):
        x.normal_(generator=torch.Generator(device=DEVICE).manual_seed(i))
        captured.reserve(counts)
        graph.replay()
        captured.advance(counts)
        expected = step(eager)
        for replayed, wanted in zip(found, expected, strict=True):
            assert torch.equal(replayed, wanted), f"step {i}"
    assert captured.lengths == eager.lengths == [n + 40 * queries for n in lengths]
    assert captured.device_lengths.tolist() == captured.lengths
    for one, other in zip(captured.layers, eager.layers, strict=True):
        assert one.block_indices is not None
        assert other.block_indices is not None
        assert torch.equal(one.block_indices, other.block_indices)


@pytest.mark.parametrize("modes", [(True, False), (False, True)], ids=str)
def test_recorded_steps_of_a_model(modes):
    """Each layer selects by its own pattern, and steps may be taken in and out of inference mode.

    The second step records the graph that the later ones replay.
    """
    pattern = dataclasses.replace(SEED, num_selected_blocks_table=((0, 5000, 4),))
    sizes: dict[str, Any] = {"vocab_size": 256, "width": 256, "num_layers": 2}
    torch.manual_seed(0)
    model = LanguageModel(LMConfig(**sizes, nsa=pattern, mlp_hidden_size=512)).to(DEVICE, BF16)
    text = torch.randint(256, (1, 2000), generator=torch.Generator().manual_seed(1))

    def run(modes):
        decoder, found = Decoder(model, 1, max_tokens=2000), list[Tensor]()

        def take(logits):
            found.append(logits.clone())
            ids = [layer.block_indices for layer in decoder.cache.layers]
            counts = [(x[-1] >= 0).sum(-1).tolist() for x in ids if x is not None]
            assert counts == [[4] * SEED.num_kv_heads, [16] * SEED.num_kv_heads]

        for mode, (start, stop) in zip(modes, ((0, 1500), (1504, 1600)), strict=True):
            with torch.inference_mode(mode):
                take(decoder.prefill(text[:, start:stop].tolist()))
                for i in range(stop, stop + 4):
                    take(decoder.step(text[:, i : i + 1].to(DEVICE)))
        assert decoder._graphs[1] is not None
        return found

    for x, y in zip(run(modes), run((False, False)), strict=True):
        assert torch.equal(x, y)


def test_a_step_does_not_wait_and_compiles_nothing(monkeypatch):
    """At whatever lengths of caches of one size, once there is room for its tokens."""
    module = layer_of(SEED)
    x = torch.randn(3, 2, 256, device=DEVICE, dtype=BF16)
    lengths = (1, 1, 1), (5, 63, 2047), (900, 30, 16_384)
    caches = [filled(module, each, max_tokens=17_000) for each in lengths]
    module(x, cache=caches[0].layers[0])
    compiled: list[str] = []

    def note(*, repr, **_):
        compiled.append(repr)

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    for cache in caches:
        cache.reserve([2] * 3)
        with no_waiting():
            module(x, cache=cache.layers[0])
    assert not compiled


def test_forks_have_the_bits_of_sequences_without_shared_pages():
    """Pages that are shared, copied, given back and handed out again in another order."""
    module = layer_of(dataclasses.replace(SEED, phi="linear"))
    generator = torch.Generator(device=DEVICE).manual_seed(3)
    x = torch.randn(3, 800, 256, generator=generator, device=DEVICE).to(BF16)
    caches = [NSACache(module.config, 1, 3, max_tokens=1000) for _ in range(2)]

    def take(cache, given, lengths):
        offsets = packed_offsets(lengths, DEVICE)
        module(given, cu_seqlens=offsets, max_seqlen=max(lengths), cache=cache.layers[0])

    take(caches[0], torch.full((1500, 256), torch.nan, device=DEVICE).to(BF16), [900, 500, 100])
    for b in (1, 0, 2):
        caches[0].free(b)
    take(caches[0], x[0, :700], [700, 0, 0])
    caches[0].fork(0, 1)
    caches[0].fork(1, 2)
    for lengths in ([700, 0, 0], [0, 700, 0], [0, 0, 700]):
        take(caches[1], x[0, :700], lengths)
    for start in range(700, 800, 4):
        found, expected = (
            module(x[:, start : start + 4], cache=cache.layers[0]) for cache in caches
        )
        assert bool(expected.isfinite().all())
        assert torch.equal(found, expected)
    # the first 10 whole pages are shared by all
    assert caches[0].num_free_pages == caches[1].num_free_pages + 2 * 10


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("rows", [33, 64, 188, 256])
def test_products_behind_a_norm(rows, is_gated):
    """Right, and the same bits in every call: rows of the input are read twice."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    x, weight, gate = (
        torch.randn(n, 256, device=DEVICE, generator=generator).to(BF16) for n in (rows, 1584, 1584)
    )

    def layer(dtype):
        return Linear(weight.to(dtype), gate.to(dtype) if is_gated else None, eps=1e-6)

    first = layer(BF16)(x)
    plain = layer(BF16)(x, backend="reference")
    exact = layer(torch.float64)(x.double(), backend="reference")
    assert_within_budget(first, plain, exact, "product")
    for _ in range(200):
        assert torch.equal(layer(BF16)(x), first)
