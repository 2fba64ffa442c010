"""Pages and plots of runs: well-formed, in one file, with what was recorded."""

from __future__ import annotations

import base64
import json
import re
import shutil
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.image import imread

from nsa import cli
from nsa.train.run_folder import RunFolder
from nsa.train.runs.report import Curve, curves_figure, loss_plot, plot_losses, report_page
from nsa.train.telemetry.metrics import Row, read_metrics
from tests.train.cases import new_trainer, tiny_config
from tests.train.runs.cases import resumed_run

SVG = "data:image/svg+xml;base64,"


class Page(HTMLParser):
    """Checks that every tag is closed in order, and collects text and links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.shown = text, ""
        self.open, self.links = list[str](), list[str]()
        self.feed(text)
        self.close()
        assert self.open == []
        self.figures = [base64.b64decode(link.removeprefix(SVG)) for link in self.links]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.shown += data


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two runs that were resumed; the name of one has a meaning in HTML."""
    folder, made = tmp_path_factory.mktemp("runs"), []
    dense = {"model": {"attention": "dense"}, "optim": {"lr": 0.02}}
    for name, changes in (("a <b> & c", {}), ("dense", dense)):
        config = tiny_config(
            folder, steps=12, log_every=2, eval_every=4, sample_tokens=3, **changes
        )
        made.append(resumed_run(folder / name, config))
        event = {"time_unix_s": 1e9, "kind": "resume", "step": 6, "message": "resumed <here>"}
        made[-1].events.write_text(json.dumps(event) + '\n{"torn')
    return made


def test_page_of_two_runs(folders, tmp_path):
    target = tmp_path / "page.html"
    words = ["report", *(str(folder.path) for folder in folders), "--output", str(target)]
    assert cli.main(words) == 0
    page = Page(target.read_text(encoding="utf-8"))
    # loss, optimisation, throughput, and gates and selection of the sparse run
    assert len(page.figures) == 5
    assert all(ElementTree.fromstring(figure).tag.endswith("svg") for figure in page.figures)
    assert not re.search(r"(?:src|href)=\"(?!data:)|@import|url\(", page.text)
    assert '<meta name="viewport" content="width=device-width' in page.text
    names = ("a <b> & c", "dense", "model.attention", "optim.lr", "versions.torch")
    shown = ("12 of 12", "agree", "resumed <here>", "Nothing was recorded: no GPU.")
    for part in (*names, *shown, folders[0].sample.read_text()):
        assert part in page.shown, part
    assert b"<!-- optimizer steps -->" in page.figures[0]


def test_other_runs(folders, tmp_path):
    """One run, a GPU, steps of different sizes, a run without rows, records that disagree."""
    shown = Page(report_page(folders[:1])).shown
    assert "model.width" in shown, "differences from the defaults"
    assert "optim.betas" not in shown
    folder = RunFolder(shutil.copytree(folders[1].path, tmp_path / "gpu"))
    rows = [{**row, "mfu": 0.3} for row in read_metrics(folder.metrics_jsonl)]
    folder.metrics_jsonl.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder.metrics_csv.write_text("")
    larger = new_trainer(tmp_path, "larger", steps=6, micro_batch=4).run_folder
    page = Page(report_page([folder, larger]))
    assert b"<!-- tokens -->" in page.figures[0]
    assert "no GPU" not in page.shown
    assert re.search(r"\d+ disagree: metrics.csv: no column bits_per_byte", page.shown)
    assert "0 of 6" in page.shown


# --- plots ----------------------------------------------------------------------------------------
VALIDATED = {"val_loss_nats": 4.5, "val_bits_per_byte": 6.5}
ROWS: list[Row] = [
    {"step": 10, "loss_nats": 5.0, "bits_per_byte": 7.0},
    {"step": 20, "loss_nats": 4.0, "bits_per_byte": 6.0, **VALIDATED},
    {"step": 30, "loss_nats": 3.0, "bits_per_byte": 5.0},
]


def legend(axes: Axes) -> list[str]:
    found = axes.get_legend()
    assert found is not None
    return [text.get_text() for text in found.get_texts()]


def test_lines_and_dots_are_the_rows():
    curves = [Curve("a", "red", ROWS), Curve("b", "blue", ROWS, 100)]
    (axes,) = curves_figure(curves, [loss_plot(curves)], "tokens").axes
    assert [np.asarray(line.get_xydata()).tolist() for line in axes.lines] == [
        [[10, 7], [20, 6], [30, 5]],
        [[20, 6.5]],
        [[1000, 7], [2000, 6], [3000, 5]],
        [[2000, 6.5]],
    ]
    assert (axes.get_xlabel(), axes.get_title()) == ("tokens", "bits per byte of text")
    assert legend(axes) == ["a", "b"]
    (axes,) = curves_figure(curves[:1], [loss_plot(curves)]).axes
    assert legend(axes) == ["bits_per_byte", "val_bits_per_byte"]
    without_text = Curve("a", "red", [{"step": 1, "loss_nats": 5.0}])
    assert loss_plot([without_text]).title == "nats per token"


def test_png_with_values_that_are_not_finite(tmp_path):
    metrics, target = tmp_path / "metrics.jsonl", tmp_path / "loss.png"
    assert plot_losses(metrics, target) is False
    rows = [*ROWS, {"step": 40, "loss_nats": "nan", "bits_per_byte": "inf"}]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert plot_losses(metrics, target, title="run") is True
    height, width = imread(target).shape[:2]
    assert (width > 1000, height > 400) == (True, True)
