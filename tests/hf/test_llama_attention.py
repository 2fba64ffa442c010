"""The example that puts NSA into Llama's attention: dense up to n * l' tokens, sparse beyond."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from examples import llama
from tests.hf.tiny import left_padded, tokens
from tests.ops.cases import offsets, small

PATTERN = small()
SAME = PATTERN.num_selected_blocks * PATTERN.block_size  # tokens until which all is selected
LENGTHS = (3 * SAME, 5, 2 * SAME)


@pytest.fixture(scope="module")
def models() -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """By NSA, and dense, with equal weights."""
    llama.register(PATTERN)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 40}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    dense = LlamaForCausalLM(config).eval()
    state = dense.state_dict()
    other = copy.deepcopy(config)
    sparse = LlamaForCausalLM._from_config(other, attn_implementation="nsa").eval()
    sparse.load_state_dict(state)
    return sparse, dense


Models = tuple[LlamaForCausalLM, LlamaForCausalLM]


def test_logits_are_dense_up_to_the_selected_tokens(models: Models) -> None:
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
def test_documents_do_not_see_each_other(models: Models, kind: str, cached: bool) -> None:
    """Every document has the logits that it has alone, whatever tells it apart."""
    sparse, _ = models
    ids, given, documents = packed_rows(kind)
    logits = sparse(ids, **given, use_cache=cached).logits.flatten(0, 1)
    for document, place in documents:
        alone = sparse(document[None]).logits[0]
        torch.testing.assert_close(logits[place], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}], ids=str)
@torch.no_grad()
def test_generate_from_padded_rows(models: Models, options: dict[str, Any]) -> None:
    sparse, _ = models
    rows = [tokens(n, seed=n) for n in LENGTHS]
    given = {"max_new_tokens": 6, "do_sample": False, **options}
    found = sparse.generate(**left_padded(rows), **given)[:, -6:]
    alone = [sparse.generate(row[None], max_new_tokens=6, do_sample=False)[0, -6:] for row in rows]
    assert torch.equal(found, torch.stack(alone))


@torch.no_grad()
def test_cached_step_behind_packed_documents(models: Models) -> None:
    """By its position, the next token sees the last document alone."""
    sparse, _ = models
    ids, given, documents = packed_rows("positions")
    last = documents[-1][0]
    cache = sparse(ids, **given, use_cache=True).past_key_values
    chunk, at = tokens(1, 3, seed=9), torch.arange(len(last), len(last) + 3)[None]
    logits = sparse(chunk, past_key_values=cache, position_ids=at).logits[0]
    alone = sparse(torch.cat((last[None], chunk), dim=1)).logits[0, -3:]
    torch.testing.assert_close(logits, alone, rtol=0, atol=1e-5)
