"""The page about runs: well-formed, whole in itself, and with what was recorded."""

from __future__ import annotations

import base64
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from nsa import cli
from nsa.train.run_folder import RunFolder
from nsa.train.runs.report import report_page
from nsa.train.telemetry.metrics import read_metrics
from tests.train.cases import make_trainer, tiny_config
from tests.train.runs.cases import stop_after_step_6

VOID = {"meta", "br", "img", "link"}
SVG = "data:image/svg+xml;base64,"


class Page(HTMLParser):
    """Checks that every tag is closed in order, and collects what the page shows and refers to."""

    def __init__(self, *runs: RunFolder) -> None:
        super().__init__()
        self.text, self.shown = report_page(runs), ""
        self.open: list[str] = []
        self.ids: list[str | None] = []
        self.links: list[str] = []
        self.feed(self.text)
        self.close()
        assert self.open == []
        self.figures = [base64.b64decode(link.removeprefix(SVG)) for link in self.links]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value for name, value in attrs if name == "id"]
        links = ("src", "href", "xlink:href")
        self.links += [value or "" for name, value in attrs if name in links]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.shown += data


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[RunFolder]:
    """Two runs, one of which was stopped, resumed and has a name that means something in HTML."""
    folder = tmp_path_factory.mktemp("runs")
    made = []
    dense = {"model": {"attention": "dense"}, "optim": {"lr": 0.02}}
    for name, changes in (("a <b> & c", {}), ("dense", dense)):
        config = tiny_config(folder, steps=12, log_every=2, eval_every=4, **changes)

        make_trainer(config, folder / name, on_row=stop_after_step_6).run()
        trainer = make_trainer(config, folder / name, resume=True)
        trainer.run_folder.record_launch(resumed_from_step=6)
        trainer.run()
        event = {"time_unix_s": 1e9, "kind": "resume", "step": 6, "message": "resumed <here>"}
        (folder / name / "events.jsonl").write_text(json.dumps(event) + '\n{"torn')
        made.append(RunFolder.open(folder / name))
    return made


@pytest.fixture(scope="module")
def page(folders: list[RunFolder]) -> Page:
    """Of both."""
    return Page(*folders)


def test_page_of_two_runs(page: Page) -> None:
    # Loss, optimisation, throughput, gates and selection of the one that has some.
    assert len(page.figures) == 5
    assert all(ElementTree.fromstring(figure).tag.endswith("svg") for figure in page.figures)
    assert len(page.ids) == len(set(page.ids))
    assert not re.search(r"(?:src|href)=\"(?!data:)|@import|url\(", page.text)
    names = ("a <b> & c", "dense", "model.attention", "optim.lr", "versions.torch")
    for part in (*names, "12 of 12", "agree", "resumed <here>", "Nothing was recorded: no GPU."):
        assert part in page.shown, part
    assert "fixed gates, or telemetry" not in page.shown
    assert "no selected branch" not in page.shown


def test_page_of_one_run_shows_what_differs_from_the_defaults(folders: list[RunFolder]) -> None:
    shown = Page(folders[0]).shown
    assert "model.width" in shown
    assert "default" in shown
    assert "optim.betas" not in shown


def test_runs_with_steps_of_different_sizes_are_compared_over_tokens(
    folders: list[RunFolder], page: Page, tmp_path: Path
) -> None:
    config = tiny_config(tmp_path, steps=6, micro_batch=4)
    make_trainer(config, tmp_path / "larger").run()
    assert b"<!-- optimizer steps -->" in page.figures[0]
    larger = RunFolder.open(tmp_path / "larger")
    assert b"<!-- tokens -->" in Page(folders[0], larger).figures[0]


def test_use_of_a_gpu_and_records_that_disagree_are_shown(
    folders: list[RunFolder], tmp_path: Path
) -> None:
    folder = RunFolder(shutil.copytree(folders[1].path, tmp_path / "gpu"))
    more = {"mfu": 0.3, "memory_reserved_mib": 9.0}
    rows = [{**row, **more} for row in read_metrics(folder.metrics_jsonl)]
    folder.metrics_jsonl.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder.metrics_csv.write_text("")
    shown = Page(folder).shown
    assert "no GPU" not in shown
    assert re.search(r"\d+ disagree: metrics.csv: 0 rows, metrics.jsonl has 6", shown)


def test_run_without_rows_has_a_page(tmp_path: Path) -> None:
    make_trainer(tiny_config(tmp_path), tmp_path / "run")
    shown = Page(RunFolder.open(tmp_path / "run")).shown
    assert "0 of 12" in shown
    assert "Nothing was recorded." in shown


def test_command(
    folders: list[RunFolder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    words = ["report", *(str(folder.path) for folder in folders), "--output", str(page)]
    assert cli.main(words) == 0
    assert capsys.readouterr().out == f"report: {page}\n"
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
