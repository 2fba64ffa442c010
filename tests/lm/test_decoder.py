"""The decoder: prompts and steps equal the model over the whole text."""

from __future__ import annotations

import dataclasses
import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.lm import decoder as decoding
from nsa.lm.config import LMConfig
from nsa.lm.decoder import Decoder, StepGraph, StepLayer
from nsa.lm.model import LanguageModel
from tests.ops.cases import small

CONFIG = LMConfig(
    vocab_size=40, width=24, num_layers=2, nsa=small(), mlp_hidden_size=32, init_std=0.2
)
LENGTHS = (75, 5, 33)  # of prompts: sparse, and shorter than a block
STEPS = (1, 3, 1, 8, 2)
# Layers that select by patterns of their own, where blocks compete.
TABLES: list[dict[str, Any]] = [
    {"num_selected_blocks": 5, "num_selected_blocks_table": table}
    for table in (((0, 200, 3),), ((1, 200, 3),), ((1, 70, 4), (0, 80, 3), (-1, 40, 4)))
]
# Dense layers, and layers whose blocks, heads, windows and branches differ.
MIXED: dict[str, Any] = {
    "num_layers": 5,
    "layers": {
        "0": {"attention": "dense"},
        "1": {"block_size": 32, "compress_block_size": 16, "compress_stride": 8, "num_kv_heads": 4},
        "3-4": {"window_size": 16, "branches": ("slc", "win"), "compress_rope": "none"},
    },
}


def make(**changes: Any) -> LanguageModel:
    torch.manual_seed(0)
    pattern = {key: changes.pop(key) for key in list(changes) if hasattr(CONFIG.nsa, key)}
    config = dataclasses.replace(CONFIG, nsa=small(**pattern), **changes)
    return LanguageModel(config).double()


def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    numbers = [torch.randint(0, 40, (n + sum(STEPS),), generator=generator) for n in LENGTHS]
    return [text.tolist() for text in numbers]


def whole(model: LanguageModel) -> list[Tensor]:
    with torch.no_grad():
        return [model(torch.tensor(text)) for text in texts()]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention": "dense"},
        {"phi": "linear", "mlp": "swiglu"},
        {"phi": "mlp", "tie_head": True},
        {"compress_rope": "none", "gate": "softmax"},
        {"gate": "fixed", "share_kv": True},
        {"qk_norm": True, "num_layers": 3, "layers": {"1": {"attention": "dense"}}},
        {"gate_hidden_size": 8},
        {"scores": "index", "index_dim": 16, "index_heads": 3, "index_keys": "shared"},
        {"scores": "token_max", "num_layers": 3, "layers": {"1": {"scores": "index"}}},
        {"scores": "random", "branches": ("slc", "win")},
        *TABLES,
        MIXED,
    ],
    ids=str,
)
def test_prompts_and_steps_equal_the_whole(changes):
    model = make(**changes)
    expected, prompts = whole(model), texts()
    decoder = Decoder(model, 3, max_tokens=max(LENGTHS) + sum(STEPS))
    logits = decoder.prefill([text[:n] for text, n in zip(prompts, LENGTHS, strict=True)])
    for b, n in enumerate(LENGTHS):
        torch.testing.assert_close(logits[b], expected[b][n - 1], rtol=1e-9, atol=1e-10)
    ends = list(itertools.accumulate(STEPS, initial=0))
    for start, stop in itertools.pairwise(ends):
        new = [text[n + start : n + stop] for text, n in zip(prompts, LENGTHS, strict=True)]
        logits = decoder.step(torch.tensor(new))
        for b, n in enumerate(LENGTHS):
            torch.testing.assert_close(
                logits[b], expected[b][n + start : n + stop], rtol=1e-9, atol=1e-10
            )
    assert decoder.cache.lengths == [n + sum(STEPS) for n in LENGTHS]


@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize("modes", [(True, False), (False, True)], ids=str)
def test_inference_mode_may_begin_and_end_between_calls(attention, modes):
    model, text = make(attention=attention), torch.tensor(texts()[0][:60])
    expected = model(text).detach()
    with torch.inference_mode(modes[0]):
        decoder, cache = Decoder(model, 1, max_tokens=60), model.new_cache(1, max_tokens=60)
    found = []
    for mode, (start, stop) in zip(modes, ((0, 30), (30, 60)), strict=True):
        with torch.inference_mode(mode):
            found.append(model(text[start:stop], cache=cache).detach())
            first = decoder.prefill([text[start : stop - 2].tolist()])
            rest = [decoder.step(text[None, i : i + 1])[0] for i in range(stop - 2, stop)]
            found.append(torch.cat((first, *rest)))
            cache.truncate(0, stop)
    torch.testing.assert_close(torch.cat(found[::2]), expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(torch.cat(found[1::2]), expected[[27, 28, 29, 57, 58, 59]])
    assert model(text).requires_grad


def test_a_step_is_recorded_on_the_device_of_its_tokens(monkeypatch):
    """Stand-ins for CUDA. The graph reads memory that calls outside of inference mode may write."""
    decoder, entered = Decoder(make(), 1, max_tokens=20), list[object]()
    decoder.prefill([[1, 2, 3]])

    def graph(graph, *, stream):
        entered.append(stream)
        return nullcontext()

    def device(index):
        entered.append(index)
        return nullcontext()

    stand_ins = {"CUDAGraph": object, "Stream": lambda at: ("stream", at), "graph": graph}
    for name, stand_in in {**stand_ins, "device": device}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    tokens = torch.tensor([[4]])
    with torch.inference_mode():
        recorded = StepGraph(decoder, tokens)
    assert entered == [tokens.device, ("stream", tokens.device)]
    assert not recorded.tokens.is_inference()
    assert not recorded.logits.is_inference()
    assert not recorded.logits.requires_grad
    assert decoder.cache.lengths == [3]


@pytest.mark.parametrize("count", [5, 30])
def test_a_step_that_raised_between_layers(count):
    """Few tokens can be given again; many have overwritten the past of the first layer."""
    model, text = make(), torch.tensor(texts()[0][:80])
    rows, cache = torch.stack((text, text.flip(0))), model.new_cache(2, max_tokens=80)
    expected = model(rows).detach()
    step = rows[:, 40 : 40 + count]

    def fail(*_):
        raise RuntimeError("out of memory")

    model(rows[:, :40], cache=cache)
    handle = model.decoder_layers()[0].mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(step, cache=cache)
    handle.remove()
    with pytest.raises(ValueError, match=r"layers\[0\] must .*, truncate\(b, lengths\[b\]\)"):
        model(step, cache=cache)
    assert cache.lengths == [40, 40]
    if count <= 8:
        cache.truncate(0, 40)
    else:
        with pytest.raises(ValueError, match=r"^length must be 0, got 40"):
            cache.truncate(0, 40)
        cache.truncate(0, 0)
        with pytest.raises(ValueError, match=r"sequence 1 must hold .* Call truncate\(1, 0\)"):
            model(step, cache=cache)
        cache.truncate(1, 0)
        model(rows[:, :40], cache=cache)
    torch.testing.assert_close(model(step, cache=cache), expected[:, 40 : 40 + count])


def test_a_chunk_behind_a_prompt():
    """Sequences may go on at different times; one without new tokens stays as it is."""
    model = make()
    expected, prompts = whole(model), texts()
    decoder = Decoder(model, 3, max_tokens=100)
    decoder.prefill([prompts[0][:20], prompts[1][:5], []])
    logits = decoder.prefill([prompts[0][20:75], [], prompts[2][:33]])
    for b in (0, 2):
        end = LENGTHS[b] - 1
        torch.testing.assert_close(logits[b], expected[b][end], rtol=1e-9, atol=1e-10)
    assert decoder.cache.lengths == list(LENGTHS)


WINDOW: dict[str, Any] = {"branches": ("win",), "window_size": 8}
# Layers behind the last one that reads all tokens, and tokens of a prompt that they read: rings
# have 16 rows, and a window adds 7.
BEHIND: dict[str, tuple[dict[str, Any], int, int]] = {
    "selected": ({"0": WINDOW, "1": {"scores": "token_max"}, "2-3": WINDOW}, 2, 23),
    "index": ({"0": {"scores": "index", "index_dim": 16}, "3": WINDOW}, 1, 16),
    "means, phi": ({"0-1": {"phi": "mlp"}, "2-3": WINDOW}, 2, 23),
    "dense": ({"0": {"attention": "dense"}, "1-3": WINDOW}, 3, 30),
    "windows": ({"0-3": WINDOW}, 4, 37),
    "none": ({"2": WINDOW}, 0, 75),
}


@pytest.mark.parametrize("name", BEHIND)
def test_layers_behind_the_last_that_reads_all_tokens_see_the_end_of_a_prompt(name, monkeypatch):
    """Two chunks, truncation as far as rings reach, and steps equal the whole."""
    monkeypatch.setattr(decoding, "LONG_PROMPT", 1)
    layers, behind, rows = BEHIND[name]
    model = make(num_layers=4, layers=layers)
    expected, prompts = whole(model), texts()
    decoder, called, call = Decoder(model, 3, max_tokens=100), list[int](), StepLayer.__call__

    def counted(layer, x, *rest):
        called.append(len(x))
        return call(layer, x, *rest)

    monkeypatch.setattr(StepLayer, "__call__", counted)
    decoder.prefill([prompts[0][:20], [], prompts[2][:10]])
    called.clear()
    logits = decoder.prefill([prompts[0][20:75], prompts[1][:5], prompts[2][10:33]])
    read = sum(min(count, rows) for count in (55, 5, 23))
    assert called[-max(behind, 1) :] == [read] * max(behind, 1)
    for b, n in enumerate(LENGTHS):
        torch.testing.assert_close(logits[b], expected[b][n - 1], rtol=1e-9, atol=1e-10)
    decoder.cache.truncate(0, 67)
    decoder.cache.truncate(2, 33 - 8)
    for i in range(8):
        rows_of = prompts[0][67 + i], prompts[1][5 + i], prompts[2][25 + i]
        logits = decoder.step(torch.tensor(rows_of)[:, None])[:, 0]
        for b, n in enumerate((67, 5, 25)):
            torch.testing.assert_close(logits[b], expected[b][n + i], rtol=1e-9, atol=1e-10)


def test_a_prompt_read_in_two_passes_that_does_not_fit_leaves_the_cache_unchanged(monkeypatch):
    monkeypatch.setattr(decoding, "LONG_PROMPT", 1)
    model, text = make(num_layers=2, layers={"1": WINDOW}), texts()[0]
    decoder = Decoder(model, 1, max_tokens=64)
    with pytest.raises(ValueError, match="max_tokens must be at least 75"):
        decoder.prefill([text[:75]])
    assert decoder.cache.lengths == [0]
    expected = model(torch.tensor(text[:64]))[-1:]
    torch.testing.assert_close(decoder.prefill([text[:64]]), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("shape", [(3,), (2, 1), (3, 0), (3, 9)])
def test_steps_of_another_shape(shape):
    decoder = Decoder(make(), 3, max_tokens=100)
    with pytest.raises(ValueError, match=r"^tokens must have shape \[3, 1 to 8\], got "):
        decoder.step(torch.zeros(shape, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^tokens must be 3 lists, got 2"):
        decoder.prefill([[1], [2]])
    with pytest.raises(ValueError, match=r"^tokens must have a token in some list, got"):
        decoder.prefill([[], [], []])
    assert decoder.cache.lengths == [0, 0, 0]


def test_steps_in_two_stages_are_not_captured():
    """They run the operators of training, which are told lengths by the host."""
    assert Decoder(make(score_precision="fp8"), 1, max_tokens=10)._is_captured
    changes = {"coarse_block_size": 32, "num_coarse_blocks": 4}
    assert not Decoder(make(**changes), 1, max_tokens=10)._is_captured


def test_after_a_reset_the_weights_are_those_of_the_model():
    model, text = make(), torch.arange(20)
    decoder = Decoder(model, 1, max_tokens=20)
    for _ in range(2):
        with torch.no_grad():
            expected = model(text)
        first = decoder.prefill([text[:15].tolist()])
        rest = decoder.step(text[None, 15:])
        torch.testing.assert_close(torch.cat((first, rest[0])), expected[14:])
        decoder.reset()
        assert decoder.cache.lengths == [0]
        for parameter in model.parameters():  # as adapters are merged: no version counter changes
            parameter.data *= 2
        decoder.reset()
