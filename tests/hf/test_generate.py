"""``generate`` with the decode cache writes what the model says without one, in fp64."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.hf import GenerationCache, NSAForCausalLM
from tests.hf.tiny import VOCAB, left_padded, tiny, tokens
from tests.lm.test_decoder import MIXED, TABLES

NEW = 8
LENGTHS = (70, 5, 33)  # sparse, and shorter than a block
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}


def model_of(**changes: Any) -> NSAForCausalLM:
    model = tiny(**changes)
    model.model.head.weight.data *= 20  # so that texts do not stop at one token
    return model


@torch.no_grad()
def without_cache(model: NSAForCausalLM, row: Tensor, count: int = NEW) -> list[int]:
    """Greedy, by the model alone."""
    for _ in range(count):
        row = torch.cat((row, model.lm(row)[-1].argmax()[None]))
    return row[-count:].tolist()


DENSE = {"attention": "dense"}


@pytest.mark.parametrize(("changes", "chunk"), [({}, 11), (DENSE, 1), (MIXED, None)], ids=str)
def test_left_padded_batch_equals_each_row_alone(changes, chunk):
    model = model_of(**changes)
    rows = [tokens(n, seed=n) for n in LENGTHS]
    wanted = [without_cache(model, row) for row in rows]
    batch = left_padded(rows)
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    for given in ({}, {"position_ids": positions}):
        found = model.generate(**batch, **GREEDY, **given, prefill_chunk_size=chunk)
        assert found[:, -NEW:].tolist() == wanted
    assert len({*itertools.chain(*wanted)}) > 3


@torch.no_grad()
def best_beams(model: NSAForCausalLM, row: Tensor, beams: int, count: int) -> list[int]:
    """Beam search without a cache; no text ends."""
    found = [(0.0, row)]
    for _ in range(count):
        wider = []
        for score, text in found:
            chances = model.lm(text)[-1].log_softmax(-1)
            wider += [
                (score + float(x), torch.cat((text, torch.tensor([i]))))
                for i, x in enumerate(chances)
            ]
        found = sorted(wider, key=lambda pair: -pair[0])[:beams]
    return found[0][1][-count:].tolist()


def test_beam_search():
    """Two rows of different lengths, three beams each, against a search in plain Python."""
    model, rows = tiny(), [tokens(n, seed=n) for n in (37, 12)]
    found = model.generate(**left_padded(rows), max_new_tokens=6, num_beams=3, do_sample=False)
    assert found[:, -6:].tolist() == [best_beams(model, row, 3, 6) for row in rows]


BY_TOKEN = {"scores": "token_max", "branches": ("slc", "win")}
SHARED = {"scores": "index", "index_dim": 32, "index_keys": "shared"}


@pytest.mark.parametrize("changes", [{}, TABLES[0], BY_TOKEN, SHARED], ids=str)
def test_a_cache_goes_on(changes):
    """What it holds is not computed again; steps of several tokens; it starts anew."""
    model, x = model_of(**changes), tokens(2, 100)
    cache = model.new_cache(2, max_tokens=120)
    logits = model(x).logits
    for start, stop in ((0, 30), (30, 75), (75, 76), (76, 100)):
        with torch.inference_mode(start == 30):  # may begin and end between calls
            found = model(x[:, start:stop], past_key_values=cache)
        assert found.past_key_values is cache
        torch.testing.assert_close(found.logits, logits[:, start:stop], rtol=0, atol=1e-11)
    assert (cache.get_seq_length(), cache.get_max_length()) == (100, 120)
    more = model.generate(torch.cat((x, x[:, :1]), 1), **GREEDY, past_key_values=cache)
    assert more[:, -NEW:].tolist() == [without_cache(model, torch.cat((r, r[:1]))) for r in x]
    cache.reset()
    found = model(x, past_key_values=cache, logits_to_keep=1)
    torch.testing.assert_close(found.logits, logits[:, -1:], rtol=0, atol=1e-11)


def test_autocast():
    """A cache that is made under autocast computes in that dtype."""
    model, x = tiny().float(), tokens(1, 30)
    with torch.autocast("cpu", torch.bfloat16):
        found = model.generate(x, **GREEDY, return_dict_in_generate=True)
    assert isinstance(found.past_key_values, GenerationCache)
    assert found.past_key_values.decoder.dtype == torch.bfloat16
    assert found.sequences.shape == (1, 30 + NEW)


def test_refused_kind_of_cache():
    with pytest.raises(ValueError, match="cache_implementation must be left out"):
        tiny().generate(tokens(1, 20), **GREEDY, cache_implementation="quantized")


@pytest.mark.parametrize(  # more than 8 are not a decode step
    ("changes", "number"), [({}, 3), (MIXED, 12)], ids=str
)
def test_assisted_generation(changes, number):
    """Prompt lookup and an assistant, some of whose candidates are wrong, change no token."""
    model, text = model_of(**changes), tokens(1, 25).repeat(1, 3)
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    wanted = model.generate(text, **options)
    assert wanted[0].tolist()[-16:] == without_cache(model, text[0], 16)
    found = model.generate(text, **options, prompt_lookup_num_tokens=number)
    assert torch.equal(found, wanted)
    assistant = copy.deepcopy(model)
    assistant.lm.head.weight.data[wanted[0, -12]] *= -1
    accepted = list[int]()
    for helper in (assistant, copy.deepcopy(model)):
        settings = helper.generation_config
        settings.num_assistant_tokens, settings.assistant_confidence_threshold = number, 0
        steps = list[int]()
        handle = model.register_forward_hook(lambda *_, steps=steps: steps.append(1))
        found = model.generate(text, **options, assistant_model=helper)
        handle.remove()
        assert torch.equal(found, wanted)
        accepted.append(16 - len(steps))
    assert 0 < accepted[0] < accepted[1]


def test_crop():
    """Tokens are removed and others follow, as far back as the window or by 8 tokens."""
    model, batch = model_of(), left_padded([tokens(70), tokens(9, seed=2)])
    ids, mask = batch["input_ids"], batch["attention_mask"]
    wanted, window = model(**batch).logits, model.config.lm.nsa.window_size
    for most in (8, window):
        cache = model.new_cache(2, max_tokens=90)
        if most == window:
            cache.activate_past_recording()
        model(ids, attention_mask=mask, past_key_values=cache)
        cache.activate_past_recording()  # too late
        for number in (-most - 1, 69 - most):
            with pytest.raises(ValueError, match=f"must remove at most {most} columns"):
                cache.crop(number)
        assert (cache.get_seq_length(), cache.decoder.cache.lengths) == (70, [70, 9])
        for number, left in ((0, 70), (100, 70), (-1, 69), (66, 66), (66 - most + 4, 70 - most)):
            cache.crop(number)
            assert cache.get_seq_length() == left
        found = model(ids[:, left:], attention_mask=mask, past_key_values=cache).logits
        is_token = mask[:, left:] == 1
        torch.testing.assert_close(found[is_token], wanted[:, left:][is_token], rtol=0, atol=1e-11)
    cache.crop(-70)
    assert cache.decoder.cache.lengths == [0, 0]


def test_embeddings_as_prompt_and_hidden_states():
    model, text = model_of(), tokens(1, 30)
    embedded = model.lm.embedding(text)
    wanted = model.generate(text, **GREEDY)[:, 30:]
    options = {"return_dict_in_generate": True, "output_hidden_states": True}
    found = model.generate(inputs_embeds=embedded, **GREEDY, **options)
    assert torch.equal(found.sequences, wanted)
    states = torch.cat([step[-1] for step in found.hidden_states], dim=1)
    whole = model.base_model(torch.cat((text, wanted[:, :-1]), dim=1)).last_hidden_state
    torch.testing.assert_close(states, whole, rtol=0, atol=1e-11)


def test_refused_tokens():
    """A full cache, padding behind a token, another number of rows: nothing has changed then."""
    model, x = tiny(), tokens(2, 30)
    cache = model.new_cache(2, max_tokens=30)
    behind = torch.ones_like(x).index_fill(1, torch.tensor([20]), 0)
    bad: list[tuple[Tensor, Tensor | None, str]] = [
        (x, behind, "attention_mask must have padding on the left alone"),
        (x, behind[:, :9], "attention_mask must have 30 columns"),
        (x[:1], None, "input_ids must have 2 rows, as the cache, got 1"),
        (x.repeat(1, 2), None, "max_tokens must be at least 60"),
    ]
    for ids, mask, match in bad:
        with pytest.raises(ValueError, match=match):
            model(ids, attention_mask=mask, past_key_values=cache)
    model(x[:, :9], past_key_values=cache)
    later = torch.ones_like(x)[:, :20].index_fill(1, torch.tensor([9]), 0)
    with pytest.raises(ValueError, match="attention_mask must have padding on the left alone"):
        model(x[:, 9:20], attention_mask=later, past_key_values=cache)
    model(x[:, 9:29], past_key_values=cache)
    model(x[:, 29:], past_key_values=cache)
    with pytest.raises(ValueError, match="max_tokens must be at least 31"):
        model(x[:, :1], past_key_values=cache)
    assert cache.get_seq_length() == 30
    assert model(x).logits.shape[-1] == VOCAB
