"""``nsa inspect``: statistics counted slowly, one text of a run, its page and JSON."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nsa import NativeSparseAttention
from nsa.config import BRANCHES
from nsa.lm.model import LanguageModel
from nsa.train.data import load_tokenizer
from nsa.train.run_folder import RunFolder
from nsa.train.runs import inspection
from nsa.train.runs.inspection import (
    HISTOGRAM_BINS,
    gate_figures,
    heat_map,
    heat_maps,
    inspect_run,
    inspect_text,
    inspection_page,
    selection_figures,
    selection_lines,
)
from nsa.train.runs.report import save_png
from tests.train.cases import MODEL, PATTERN, new_trainer, tiny_config
from tests.train.runs.test_report import SVG, Page

TEXT = torch.randint(256, (150,), generator=torch.Generator().manual_seed(0)).tolist()
SIZE = PATTERN.block_size


def model_of(num_layers: int = 2, **changes: Any) -> LanguageModel:
    torch.manual_seed(1)
    pattern = dataclasses.replace(PATTERN, **changes)
    model = LanguageModel(dataclasses.replace(MODEL, num_layers=num_layers, nsa=pattern))
    for parameter in model.parameters():  # larger than at the start, so that selections differ
        torch.nn.init.normal_(parameter, std=0.3) if parameter.requires_grad else None
    return model


# --- statistics of a text -------------------------------------------------------------------------
@pytest.mark.parametrize(
    "changes",
    [
        {"branches": ("slc", "win"), "compress_rope": "none"},
        {"branches": ("cmp", "win"), "gate": "softmax"},
        {"gate": "fixed", "share_kv": True},
        {"branches": ("slc", "win"), "scores": "token_max"},
        {"branches": ("slc", "win"), "scores": "index", "index_keys": "shared"},
    ],
)
def test_gates_and_blocks_are_those_of_the_layers(changes):
    model, inputs = model_of(**changes), list[Tensor]()
    for layer in model.decoder_layers():
        layer.attention.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    before = model.train()(torch.tensor(TEXT))
    inputs.clear()
    found = inspect_text(model, TEXT)
    assert model.training
    assert [layer.layer for layer in found] == [0, 1]
    for x, one, layer in zip(inputs, found, model.decoder_layers(), strict=True):
        attention = layer.attention
        assert isinstance(attention, NativeSparseAttention)
        gates = attention.gate(x)
        if gates is None:
            gates = torch.full((len(x), attention.config.num_heads, 3), 1 / 3)
        expected = gate_figures(gates.detach(), attention.config)
        for branch, gates in expected.items():
            assert one.gates[branch]["mean"] == pytest.approx(gates["mean"], rel=1e-5)
        assert (one.selection is None) == ("slc" not in attention.config.branches)
        if one.selection is not None:
            assert np.array_equal(one.blocks, attention.choose_blocks(x).numpy())
            has_index = attention.config.scores == "index"
            assert ("index_loss" in one.selection) == has_index
        assert attention.observer is None
    assert torch.equal(model(torch.tensor(TEXT)), before)
    assert inspect_text(LanguageModel(dataclasses.replace(MODEL, attention="dense")), TEXT) == []


def test_figures_of_selections(monkeypatch):
    """Counted by another program: each query has its own block, and one at most before it."""
    blocks = np.full((40, 2, 3), -1, np.int32)
    for t, head in np.ndindex(40, 2):
        ids = sorted({t // SIZE, (t * t + head) % (t // SIZE + 1)})
        blocks[t, head, : len(ids)] = ids
    shares = {1: 78 / 105, 2: 88 / 103, 4: 77 / 99, 8: 57 / 91, 16: 25 / 75, 32: 4 / 36}
    assert selection_figures(blocks, SIZE, [15, 38]) == {
        "block_size": 16,
        "keys_mean": 1048 / 80,
        "distance_mean": 9888 / 1048,
        "distance_tokens": [0, 16, 32],
        "distance_counts": [80, 24, 3],
        "overlap": [{"lag_tokens": lag, "share": share} for lag, share in shares.items()],
        "ranges": [
            {"query": 15, "kv_heads": [[(0, 16)], [(0, 16)]]},
            {"query": 38, "kv_heads": [[(16, 39)], [(32, 39)]]},
        ],
    }
    monkeypatch.setattr(inspection, "MAP_SIZE", 2)
    np.testing.assert_allclose(heat_map(blocks, SIZE, 30), [[0.5, 0.6], [0.35, 1]], rtol=1e-6)


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17])
def test_short_texts(num_tokens):
    (layer, _) = inspect_text(model_of(), TEXT[:num_tokens], queries=[num_tokens - 1])
    found = layer.selection
    assert found is not None
    assert found["ranges"] == [{"query": num_tokens - 1, "kv_heads": [[(0, num_tokens)]]}]
    assert found["keys_mean"] == (num_tokens + 1) / 2
    assert sum(found["distance_counts"]) == num_tokens + (num_tokens > 16)
    lags = [one["lag_tokens"] for one in found["overlap"]]
    assert lags == [lag for lag in (1, 2, 4, 8, 16) if lag < num_tokens]
    assert heat_map(layer.blocks, SIZE, 0).shape == (num_tokens, -(-num_tokens // 16))


def test_gates_counted_slowly():
    gates = torch.rand(101, 2, 3, generator=torch.Generator().manual_seed(0))
    gates[:, 1, 0] = 1.0
    found = gate_figures(gates, dataclasses.replace(PATTERN, branches=("cmp", "win")))
    assert list(found) == ["cmp", "win"]
    for name, figures in found.items():
        values = gates[..., BRANCHES.index(name)]
        assert figures["mean"] == pytest.approx(float(values.mean()))
        bins = (values * HISTOGRAM_BINS).long().clamp(max=HISTOGRAM_BINS - 1).flatten()
        counts = torch.bincount(bins, minlength=HISTOGRAM_BINS)
        assert figures["histogram"] == pytest.approx((counts / 202).tolist())


# --- a run ----------------------------------------------------------------------------------------
def make_run(path: Path, **changes: Any) -> RunFolder:
    trainer = new_trainer(path, steps=1, **changes)
    trainer.run()
    return trainer.run_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = {"num_layers": 2, "nsa": dataclasses.replace(PATTERN, num_kv_heads=2)}
    return make_run(tmp_path_factory.mktemp("inspected"), model=model)


def test_lines_page_and_json(folder, tmp_path):
    text = tmp_path / "a <b> & c.txt"
    text.write_text("caf\u00e9 <i> & lait, " * 30, encoding="utf-8")
    found = inspect_run(folder, text=str(text), num_tokens=150)
    tokens = load_tokenizer(folder.tokenizer).encode(text.read_bytes())[:150]
    assert found.tokens == tokens
    values = json.loads(json.dumps(found.json()))
    layers = values.pop("layers")
    assert layers[1]["selection"]["ranges"][-1]["query"] == 149
    assert values == {
        "run": str(folder.path),
        "checkpoint_step": 1,
        "device": "cpu",
        "compute_dtype": "fp32",
        "text": str(text),
        "num_tokens": 150,
    }
    page = Page(inspection_page(found))
    assert len(page.links) == 3
    assert all(link.startswith(SVG) for link in page.links)
    keys = str(round(layers[1]["selection"]["keys_mean"], 4))
    for part in ("Selected blocks", "Distance and overlap", "Gates", "recall", str(text), keys):
        assert part in page.shown, part
    first, *lines = found.lines()
    assert first.startswith(f"checkpoint: step 1 of {folder.path}, on cpu in fp32; 150 tokens")
    share = layers[1]["selection"]["overlap"][0]["share"]
    recall = layers[1]["selection"]["recall"]
    assert 0 < recall < 1
    ending = f"{share:.1%} shared with the query before, recall {recall:.1%}"
    assert lines[1].endswith(ending)


def test_a_model_without_selection_shows_its_gates(tmp_path):
    pattern = dataclasses.replace(PATTERN, branches=("cmp", "win"))
    found = inspect_run(make_run(tmp_path, model={"nsa": pattern}))
    assert found.json()["layers"][0]["selection"] is None
    assert [*found.lines()][1].startswith("layer 0: gates cmp 0.")
    page = Page(inspection_page(found))
    assert len(page.links) == 1
    assert "Selected blocks" not in page.shown


def test_text_of_masked_documents_and_of_synthetic_tasks(folder, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for name, content in (("a", "short"), ("b", "the longest of them"), ("c", "another")):
        (texts / name).write_text(content)
    found, tokenizer = inspect_run(folder, text=str(texts)), load_tokenizer(folder.tokenizer)
    assert tokenizer.decode(found.tokens) == b"the longest of them"
    assert found.tokens[-1] == 0, "with its separator, as in training"
    data = tiny_config(tmp_path).data
    unmasked = dataclasses.replace(data, document_mask=False)
    both = inspect_run(make_run(tmp_path / "1", data=unmasked), text=str(texts))
    assert tokenizer.decode(both.tokens) == b"shortthe longest of themanother"
    synthetic = dataclasses.replace(data, source="uniform", path=None)
    run = make_run(tmp_path / "2", data=synthetic)
    assert len(inspect_run(run).tokens) == 64
    with pytest.raises(ValueError, match="--text must be left out for this run"):
        inspect_run(run, text=str(texts))


# --- pictures of selections -----------------------------------------------------------------------
def test_lines_show_bars_and_ranges():
    tokens = torch.randint(256, (1600,), generator=torch.Generator().manual_seed(0)).tolist()
    layers = inspect_text(model_of(num_kv_heads=2), tokens[:170])
    title, *lines = selection_lines(layers)
    assert title.startswith("blocks selected for token 170 of the text (blocks of 16 tokens")
    for layer, line in zip(layers, lines, strict=True):
        ((number, bar, ranges),) = re.findall(r"^layer  (\d) \|(.{11})\| (.*)$", line)
        assert int(number) == layer.layer
        counts = [(layer.blocks[-1] == block).sum() for block in range(11)]
        assert bar == "".join(" ▒█"[count] for count in counts)
        assert ranges.endswith(":170")
    (_, line) = selection_lines(inspect_text(model_of(1), tokens))
    (bar,) = re.findall(r"\|(.{64})\|", line)
    assert bar[0] != " " != bar[-1]


@pytest.mark.parametrize("num_layers", [1, 5])
def test_heat_maps_are_drawn_for_each_layer(num_layers, tmp_path):
    layers = inspect_text(model_of(num_layers), TEXT[:70])
    figure = heat_maps(layers, 20)
    maps = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in maps] == [f"layer {i}" for i in range(num_layers)]
    for axes, layer in zip(maps, layers, strict=True):
        image = np.asarray(axes.images[0].get_array())
        assert np.array_equal(image, heat_map(layer.blocks, SIZE, 20))
    path = tmp_path / "maps.png"
    save_png(figure, path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert [*tmp_path.iterdir()] == [path]
