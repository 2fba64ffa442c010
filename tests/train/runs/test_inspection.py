"""``nsa inspect``: one text as the model was trained on it, page, JSON, pictures of selections."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nsa.lm.inspection import LayerFigures, inspect_text
from nsa.lm.model import LanguageModel
from nsa.train.data import load_tokenizer
from nsa.train.run_folder import RunFolder
from nsa.train.runs.inputs import load_model
from nsa.train.runs.inspection import heat_maps, inspect_run, inspection_page, selection_lines
from nsa.train.runs.page import save_png
from tests.train.cases import MODEL, PATTERN, new_trainer, tiny_config
from tests.train.runs.test_report import SVG, Page


def make_run(path: Path, **changes: Any) -> RunFolder:
    trainer = new_trainer(path, steps=1, **changes)
    trainer.run()
    return trainer.run_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    model = {"num_layers": 2, "nsa": dataclasses.replace(PATTERN, num_kv_heads=2)}
    return make_run(tmp_path_factory.mktemp("inspected"), model=model)


def shape(value: Any) -> Any:
    """Structure of JSON: keys, lengths of lists of numbers, types."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [shape(value[0])]
    return len(value) if isinstance(value, list) else type(value).__name__


GATES = {"mean": "float", "quantiles": 5, "histogram": 20, "head_means": 2}
JSON = {
    "run": "str",
    "checkpoint_step": "int",
    "device": "str",
    "compute_dtype": "str",
    "text": "str",
    "num_tokens": "int",
    "gate_quantiles": 5,
    "layers": [
        {
            "layer": "int",
            "gates": {"cmp": GATES, "slc": GATES, "win": GATES},
            "selection": {
                "block_size": "int",
                "keys_mean": "float",
                "distance_mean": "float",
                "distance_tokens": 5,
                "distance_counts": 5,
                "overlap": [{"lag_tokens": "int", "share": "float"}],
                "ranges": [{"query": "int", "kv_heads": 2}],
            },
        }
    ],
}


def test_figures_page_and_json(folder: RunFolder, tmp_path: Path) -> None:
    """They are those of the checkpoint and the text."""
    text = tmp_path / "a <b> & c.txt"
    text.write_text("caf\u00e9 <i> & lait, " * 30, encoding="utf-8")
    found = inspect_run(folder, text=str(text), num_tokens=150)
    tokens = load_tokenizer(folder.tokenizer).encode(text.read_bytes())[:150]
    assert found.tokens == tokens
    path = next(folder.checkpoints.iterdir())
    model, _ = load_model(folder.load_config().model, path, torch.device("cpu"))
    for one, other in zip(found.layers, inspect_text(model, tokens, queries=[149]), strict=True):
        assert one.gates == other.gates
        assert one.selection is not None
        assert other.selection is not None
        assert torch.equal(one.selection.heat_map, other.selection.heat_map)
        assert one.selection.ranges[149] == other.selection.ranges[149]
    selection = found.layers[1].selection
    assert selection is not None
    values = json.loads(json.dumps(found.json()))
    assert shape(values) == JSON
    assert values["layers"][1]["selection"]["ranges"][-1]["query"] == 149
    page = Page(inspection_page(found))
    assert len(page.links) == 3
    assert all(link.startswith(SVG) for link in page.links)
    titles = ("Selected blocks", "Ranges of the last query", "Distance and overlap", "Gates")
    for part in (*titles, str(text), "caf\u00e9 <i> & lait, caf", f"{selection.keys_mean:.1f}"):
        assert part in page.shown, part
    first, *layers = found.lines()
    assert first.startswith(f"checkpoint: step 1 of {folder.path}, on cpu in fp32; 150 tokens")
    assert len(layers) == 2
    assert f"{selection.overlap[1]:.1%} shared with the query before" in layers[1]


def test_a_model_without_selection_shows_its_gates(tmp_path: Path) -> None:
    pattern = dataclasses.replace(PATTERN, branches=("cmp", "win"))
    found = inspect_run(make_run(tmp_path, model={"nsa": pattern}))
    assert found.json()["layers"][0]["selection"] is None
    assert [*found.lines()][1].startswith("layer 0: gates cmp 0.")
    page = Page(inspection_page(found))
    assert len(page.links) == 1
    assert "Selected blocks" not in page.shown


def test_the_longest_document_is_the_text_if_documents_are_masked(
    folder: RunFolder, tmp_path: Path
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for name, content in (("a", "short"), ("b", "the longest of them"), ("c", "another")):
        (texts / name).write_text(content)
    found = inspect_run(folder, text=str(texts))
    assert found.tokenizer.decode(found.tokens) == b"the longest of them"
    assert found.tokens[-1] == 0, "with its separator, as in training"
    data = dataclasses.replace(tiny_config(tmp_path).data, document_mask=False)
    both = inspect_run(make_run(tmp_path, data=data), text=str(texts))
    assert both.tokenizer.decode(both.tokens) == b"shortthe longest of themanother"


def test_a_synthetic_task_has_no_text_but_can_be_inspected(tmp_path: Path) -> None:
    data = dataclasses.replace(tiny_config(tmp_path).data, source="uniform", path=None)
    run = make_run(tmp_path, data=data)
    assert len(inspect_run(run).tokens) == 64
    with pytest.raises(ValueError, match="--text must be left out for this run"):
        inspect_run(run, text=str(tmp_path))


# --- pictures of selections -----------------------------------------------------------------------
def layers_of(num_layers: int, num_tokens: int) -> list[LayerFigures]:
    torch.manual_seed(0)
    pattern = dataclasses.replace(PATTERN, num_kv_heads=2)
    model = LanguageModel(dataclasses.replace(MODEL, num_layers=num_layers, nsa=pattern))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tokens = torch.randint(256, (num_tokens,)).tolist()
    return inspect_text(model, tokens, queries=[num_tokens - 1])


def test_lines_show_bars_and_ranges() -> None:
    layers = layers_of(2, 170)
    title, *lines = selection_lines(layers, 169)
    assert title.startswith("blocks selected for token 170 of the text (blocks of 16 tokens")
    for layer, line in zip(layers, lines, strict=True):
        assert layer.selection is not None
        heads = layer.selection.ranges[169]
        ((number, bar, ranges),) = re.findall(r"^layer  (\d) \|(.{11})\| (.*)$", line)
        assert int(number) == layer.layer
        counts = [
            sum(any(start <= 16 * block < end for start, end in head) for head in heads)
            for block in range(11)
        ]
        assert bar == "".join(" ▒█"[count] for count in counts)
        assert ranges.endswith(":170")
    (line,) = selection_lines(layers_of(1, 16 * 100), 16 * 100 - 1)[1:]
    (bar,) = re.findall(r"\|(.{64})\|", line)
    assert (bar[0] != " ", bar[-1] != " ") == (True, True)


@pytest.mark.parametrize("num_layers", [1, 5])
def test_heat_maps_are_drawn_for_each_layer(num_layers: int, tmp_path: Path) -> None:
    layers = layers_of(num_layers, 70)
    figure = heat_maps(layers, 70)
    maps = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in maps] == [f"layer {i}" for i in range(num_layers)]
    for axes, layer in zip(maps, layers, strict=True):
        assert layer.selection is not None
        image = np.asarray(axes.images[0].get_array())
        assert np.array_equal(image, layer.selection.heat_map.numpy())
    path = tmp_path / "maps.png"
    save_png(figure, path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert [*tmp_path.iterdir()] == [path]
