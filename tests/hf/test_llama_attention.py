"""``nsa.hf.register``: sparse attention in Llama, dense up to n * l' tokens, sparse beyond."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import nsa.hf
from nsa import NSAConfig, native_sparse_attention
from tests.hf.tiny import left_padded, tokens
from tests.ops.cases import offsets, small

FIELDS = ("compress_block_size", "compress_stride", "block_size", "num_selected_blocks")
CHANGES: dict[str, Any] = {name: getattr(small(), name) for name in (*FIELDS, "window_size")}
PATTERN = NSAConfig(**CHANGES)
Models = tuple[LlamaForCausalLM, LlamaForCausalLM]
SAME = PATTERN.num_selected_blocks * PATTERN.block_size  # tokens until which all is selected
LENGTHS = (3 * SAME, 5, 2 * SAME)


def new_models(name: str) -> Models:
    """A Llama with the registered attention ``name``, and a dense one, with equal weights."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 40}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    eager = {"attn_implementation": "eager"}
    dense = LlamaForCausalLM._from_config(config, **eager).eval()
    state = dense.state_dict()
    sparse = LlamaForCausalLM._from_config(copy.deepcopy(config), attn_implementation=name).eval()
    sparse.load_state_dict(state)
    return sparse, dense


@pytest.fixture(scope="module")
def models():
    nsa.hf.register(**CHANGES, branches=("slc",))
    return new_models("nsa")


def test_logits_are_dense_up_to_the_selected_tokens(models):
    sparse, dense = models
    x = tokens(2, 3 * SAME)
    found, wanted = sparse(x).logits, dense(x).logits
    torch.testing.assert_close(found[:, :SAME], wanted[:, :SAME], rtol=0, atol=1e-6)
    assert (found - wanted)[:, -SAME:].abs().amax((0, 2)).min() > 1e-4
    options = {"max_new_tokens": 8, "do_sample": False}
    texts = [model.generate(x[:, : SAME - 8], **options) for model in (sparse, dense)]
    assert torch.equal(*texts)
    mask = torch.ones(2, 1, SAME, SAME, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"attention_mask must be \[B, S\], got 4 dimensions"):
        sparse(x[:, :SAME], attention_mask=mask)


def positions(lengths: tuple[int, ...]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def packed_rows(kind: str) -> tuple[Tensor, dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
    """Tokens, arguments that describe their documents, and each document with its place."""
    rows, cu = [tokens(n, seed=n) for n in LENGTHS], offsets(list(LENGTHS))
    flat = torch.cat(rows)[None]
    places = torch.arange(sum(LENGTHS)).split(LENGTHS)
    documents = list(zip(rows, places, strict=True))
    restart = {"position_ids": positions(LENGTHS)}
    if kind == "positions":
        return flat, restart, documents
    if kind == "both, with an empty document":
        return flat, {**restart, "cu_seq_lens_q": torch.cat((cu, cu[-1:]))}, documents
    batch, width = left_padded(rows), max(LENGTHS)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    first = width - mask.sum(1)
    if kind == "right":
        roll = (torch.arange(width) + first[:, None]) % width
        ids, mask, first = ids.gather(1, roll), mask.gather(1, roll), 0 * first
    given = {"attention_mask": mask}
    inside = [
        (row, i * width + start + torch.arange(len(row)))
        for i, (row, start) in enumerate(zip(rows, first.tolist(), strict=True))
    ]
    if kind != "left, two documents in a row":
        return ids, given, inside
    # the last columns of each row are a document of their own
    cut = width - SAME
    given["position_ids"] = torch.cat((torch.arange(cut), torch.arange(SAME)))[None]
    parts = []
    for row, place in inside:
        is_late = place % width >= cut
        parts += [(row[~is_late], place[~is_late]), (row[is_late], place[is_late])]
    return ids, given, [part for part in parts if len(part[0])]


@pytest.mark.parametrize("cached", [False, True], ids=["", "cached"])
@pytest.mark.parametrize(
    "kind",
    [
        "positions",
        "both, with an empty document",
        "left, two documents in a row",
        "right",
    ],
)
@torch.no_grad()
def test_documents_do_not_see_each_other(models, kind, cached):
    """Every document has the logits that it has alone, whatever tells it apart."""
    sparse, _ = models
    ids, given, documents = packed_rows(kind)
    logits = sparse(ids, **given, use_cache=cached).logits.flatten(0, 1)
    for document, place in documents:
        alone = sparse(document[None]).logits[0]
        torch.testing.assert_close(logits[place], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}], ids=str)
@torch.no_grad()
def test_generate_from_padded_rows(models, options):
    sparse, _ = models
    rows = [tokens(n, seed=n) for n in LENGTHS]
    given = {"max_new_tokens": 6, "do_sample": False, **options}
    found = sparse.generate(**left_padded(rows), **given)[:, -6:]
    alone = [sparse.generate(row[None], max_new_tokens=6, do_sample=False)[0, -6:] for row in rows]
    assert torch.equal(found, torch.stack(alone))


@torch.no_grad()
def test_cached_step_behind_packed_documents(models):
    """By its position, the next token sees the last document alone."""
    sparse, _ = models
    ids, given, documents = packed_rows("positions")
    last = documents[-1][0]
    cache = sparse(ids, **given, use_cache=True).past_key_values
    chunk, at = tokens(1, 3, seed=9), torch.arange(len(last), len(last) + 3)[None]
    logits = sparse(chunk, past_key_values=cache, position_ids=at).logits[0]
    alone = sparse(torch.cat((last[None], chunk), dim=1)).logits[0, -3:]
    torch.testing.assert_close(logits, alone, rtol=0, atol=1e-5)


def test_a_pattern_that_selects_everything():
    """Logits and gradients are those of eager attention, with both branches."""
    everything = {**CHANGES, "num_selected_blocks": 8, "window_size": 128}
    nsa.hf.register("everything", **everything)
    models = new_models("everything")
    batch = left_padded([tokens(n, seed=n) for n in (120, 40)])
    valid = batch["attention_mask"] == 1
    for model in models:
        model.logits = model(**batch).logits[valid]
        model.logits.square().sum().backward()
    torch.testing.assert_close(models[0].logits, models[1].logits, rtol=0, atol=1e-6)
    for found, wanted in zip(*(model.parameters() for model in models), strict=True):
        assert found.grad is not None
        assert wanted.grad is not None
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-3, atol=1e-5)
    keys = (121 / 2 * 120 + 41 / 2 * 40) / 160
    assert nsa.hf.keys_read(models[0]) == pytest.approx([2 * keys] * 2)  # in each branch
    with pytest.raises(ValueError, match=r"model must have run with attention from nsa\.hf"):
        nsa.hf.keys_read(models[1])


@pytest.mark.parametrize("branches", [("slc", "win"), ("cmp", "slc", "win")])
def test_equals_the_function(branches):
    """A layer is the projections, Llama's rotation and ``native_sparse_attention``."""
    nsa.hf.register("sparse", **CHANGES, branches=branches)
    model, _ = new_models("sparse")
    x, layer = torch.randn(2, 150, 64), model.model.layers[0].self_attn
    positions = torch.arange(150)[None]
    cos_sin = model.model.rotary_emb(x, positions)
    mask = torch.ones(2, 150, dtype=torch.bool)
    given = {"position_embeddings": cos_sin, "position_ids": positions, "attention_mask": mask}
    found, _ = layer(x, **given)
    q, k, v = (
        projection(x).unflatten(-1, (-1, 16)).transpose(1, 2)
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    q, k, v = (y.transpose(1, 2) for y in (*apply_rotary_pos_emb(q, k, *cos_sin), v))
    heads: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "value_dim": 16}
    config = NSAConfig(**CHANGES, **heads, branches=branches, scores="token_max")
    gates = torch.full((2, 150, 4, 3), 1 / len(branches))
    out = native_sparse_attention(q, k, v, k, v, k, v, gates, None, config)
    torch.testing.assert_close(found, layer.o_proj(out.flatten(-2)), rtol=0, atol=1e-6)
    read = nsa.hf.keys_read(model)[0]
    size, stride = PATTERN.compress_block_size, PATTERN.compress_stride
    keys = sum(t + 1 + min(t + 1, PATTERN.window_size) for t in range(150))
    if "cmp" in branches:
        keys += sum(len(range(size, t + 2, stride)) for t in range(150))
    assert read == pytest.approx(keys / 150)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"num_heads": 4}, "num_heads must be left out, got 4"),
        ({"scores": "compressed"}, "scores must be left out, got compressed"),
        ({"block_size": 24}, "block_size must be"),
        ({"name": "x", "window": 4}, "window"),
    ],
)
def test_refused_patterns(arguments, match):
    with pytest.raises((ValueError, TypeError), match=match):
        nsa.hf.register(**arguments)


def test_refused_attention(models):
    sparse = copy.deepcopy(models[0]).train()
    sparse.model.layers[0].self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match="dropout must be left out or 0"):
        sparse(tokens(1, 8))
    with pytest.raises(ValueError, match="sliding_window must be left out or 0, got 4"):
        models[0](tokens(1, 8), sliding_window=4)
    with pytest.raises(ValueError, match="is_causal must be true, got False"):
        models[0](tokens(1, 8), is_causal=False)
