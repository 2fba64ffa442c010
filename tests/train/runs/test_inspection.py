"""What ``nsa inspect`` reads and shows: one text as the model was trained on it, page and JSON."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from nsa.lm.inspection import LayerFigures, inspect_text
from nsa.lm.model import LanguageModel
from nsa.train.data import load_tokenizer
from nsa.train.run_folder import RunFolder
from nsa.train.runs.inputs import load_model
from nsa.train.runs.inspection import heat_maps, inspect_run, inspection_page, selection_lines
from nsa.train.runs.page import save_png
from tests.train.cases import MODEL, PATTERN, make_trainer, tiny_config
from tests.train.runs.test_report import SVG, Page

NUMBER = (int, float)


def make_run(path: Path, **changes: Any) -> RunFolder:
    make_trainer(tiny_config(path, steps=1, **changes), path / "run").run()
    return RunFolder.open(path / "run")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    model = {"num_layers": 2, "nsa": dataclasses.replace(PATTERN, num_kv_heads=2)}
    return make_run(tmp_path_factory.mktemp("inspected"), model=model)


def test_figures_are_those_of_the_checkpoint_and_the_text(
    folder: RunFolder, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("caf\u00e9 au lait, " * 30, encoding="utf-8")
    found = inspect_run(folder, text=str(text), num_tokens=150)
    tokens = load_tokenizer(folder.tokenizer).encode(text.read_bytes())[:150]
    assert found.tokens == tokens
    path = next(folder.checkpoints.iterdir())
    model, _ = load_model(folder.load_config().model, path, torch.device("cpu"))
    expected = inspect_text(model, tokens, queries=[*found.layers[0].selection.ranges])  # type: ignore[union-attr]
    for one, other in zip(found.layers, expected, strict=True):
        assert one.gates == other.gates
        assert one.selection is not None
        assert other.selection is not None
        assert torch.equal(one.selection.heat_map, other.selection.heat_map)
        assert one.selection.ranges == other.selection.ranges
    assert [*expected[0].selection.ranges][-1] == 149  # type: ignore[union-attr]


def test_json_has_all_figures(folder: RunFolder) -> None:
    found = json.loads(json.dumps(inspect_run(folder).json()))
    texts = {name: found.pop(name) for name in ("run", "device", "compute_dtype", "text")}
    assert all(isinstance(text, str) for text in texts.values())
    layers, num_tokens = found.pop("layers"), found.pop("num_tokens")
    assert found == {"checkpoint_step": 1, "gate_quantiles": [0.05, 0.25, 0.5, 0.75, 0.95]}
    assert [layer["layer"] for layer in layers] == [0, 1]
    for layer in layers:
        assert set(layer) == {"layer", "gates", "selection"}
        assert set(layer["gates"]) == {"cmp", "slc", "win"}
        for gates in layer["gates"].values():
            sizes = {name: len(gates[name]) for name in ("quantiles", "histogram", "head_means")}
            assert sizes == {"quantiles": 5, "histogram": 20, "head_means": 2}
            assert sorted(gates["quantiles"]) == gates["quantiles"]
            assert isinstance(gates["mean"], float)
        selection = layer["selection"]
        assert {name for name, value in selection.items() if isinstance(value, NUMBER)} == {
            "block_size",
            "keys_mean",
            "distance_mean",
        }
        assert len(selection["distance_tokens"]) == len(selection["distance_counts"])
        assert [each["lag_tokens"] for each in selection["overlap"]][:3] == [1, 2, 4]
        assert selection["ranges"][-1]["query"] == num_tokens - 1
        for head in selection["ranges"][-1]["kv_heads"]:
            assert head[0][0] == 0
            assert head[-1][1] == num_tokens
        assert len(selection["ranges"][-1]["kv_heads"]) == 2


def parsed(text: str, monkeypatch: pytest.MonkeyPatch) -> Page:
    monkeypatch.setattr("tests.train.runs.test_report.report_page", lambda _: text)
    return Page()


def test_page_is_whole_in_itself(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "a <b> & c.txt"
    text.write_text("one <i> & two, " * 20)
    found = inspect_run(folder, text=str(text))
    page = parsed(inspection_page(found), monkeypatch)
    assert len(page.links) == 3
    assert all(link.startswith(SVG) for link in page.links)
    assert str(text) in page.shown
    assert "one <i> & two, one" in page.shown, "the text of a range"
    for title in ("Selected blocks", "Ranges of the last query", "Distance and overlap", "Gates"):
        assert title in page.shown
    selection = found.layers[1].selection
    assert selection is not None
    assert f"{selection.keys_mean:.1f}" in page.shown
    first, *layers = found.lines()
    assert first.startswith(f"checkpoint: step 1 of {folder.path}, on cpu in fp32; 64 tokens")
    assert len(layers) == 2
    assert f"{selection.overlap[1]:.1%} shared with the query before" in layers[1]


def test_a_model_without_selection_shows_its_gates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = dataclasses.replace(PATTERN, branches=("cmp", "win"))
    found = inspect_run(make_run(tmp_path, model={"nsa": pattern}))
    assert found.json()["layers"][0]["selection"] is None
    assert [*found.lines()][1].startswith("layer 0: gates cmp 0.")
    page = parsed(inspection_page(found), monkeypatch)
    assert len(page.links) == 1
    assert "Selected blocks" not in page.shown


def test_a_bpe_vocabulary_and_the_text_of_its_ranges(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, steps=1)
    data = dataclasses.replace(config.data, tokenizer="bpe", bpe_vocab_size=300)
    model = dataclasses.replace(config.model, vocab_size=300)
    config = dataclasses.replace(config, data=data, model=model)
    make_trainer(config, tmp_path / "run").run()
    text = tmp_path / "text.txt"
    text.write_text("aaa bb ccc \u6f22\u5b57 " * 40, encoding="utf-8")
    found = inspect_run(RunFolder.open(tmp_path / "run"), text=str(text), num_tokens=100)
    assert len(found.tokens) == 100
    content = found.tokenizer.decode(found.tokens).decode(errors="replace")
    assert len(content) > 100 or "\u6f22" in content
    assert "aaa bb ccc" in inspection_page(found)


def test_without_shared_windows_the_longest_document_is_the_text(
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
    found = inspect_run(make_run(tmp_path, data=data))
    assert len(found.tokens) == 64
    with pytest.raises(ValueError, match="--text must be left out for this run"):
        inspect_run(RunFolder.open(tmp_path / "run"), text=str(tmp_path))


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
    assert title.startswith("where the layers look for token 170 of the text (blocks of 16 tokens")
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
    assert bar[0] != " "
    assert bar[-1] != " "


@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_heat_maps_are_drawn_for_each_layer(num_layers: int, tmp_path: Path) -> None:
    layers = layers_of(num_layers, 70)
    figure = heat_maps(layers, 70)
    assert isinstance(figure, Figure)
    maps = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in maps] == [f"layer {i}" for i in range(num_layers)]
    for axes, layer in zip(maps, layers, strict=True):
        assert layer.selection is not None
        shown = np.asarray(axes.images[0].get_array())
        assert np.array_equal(shown, layer.selection.heat_map.numpy())
    path = tmp_path / "maps.png"
    save_png(figure, path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert path.stat().st_size > 5000
    assert [*tmp_path.iterdir()] == [path]
