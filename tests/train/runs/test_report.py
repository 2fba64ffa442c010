"""The page about runs: well-formed, whole in itself, and with what was recorded."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from nsa import cli
from nsa.train.run_folder import RunFolder
from nsa.train.runs.report import report_page
from nsa.train.telemetry.metrics import Row, read_metrics
from tests.train.cases import make_trainer, tiny_config

VOID = {"meta", "br", "img", "link"}


class Page(HTMLParser):
    """Checks that every tag is closed in order, and collects what the page shows and refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        links = ("src", "href", "xlink:href")
        self.links += [value or "" for name, value in attrs if name in links]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[RunFolder]:
    """Two runs, one of which was stopped, resumed and has a name that means something in HTML."""
    folder = tmp_path_factory.mktemp("runs")
    made = []
    for name, changes in (
        ("a <b> & c", {}),
        ("dense", {"model": {"attention": "dense"}, "optim": {"lr": 0.02}}),
    ):
        config = tiny_config(folder, steps=12, log_every=2, eval_every=4, **changes)

        def stop(row: Row) -> None:
            if row["step"] == 6:
                os.kill(os.getpid(), signal.SIGTERM)

        make_trainer(config, folder / name, on_row=stop).run()
        trainer = make_trainer(config, folder / name, resume=True)
        trainer.run_folder.record_launch(resumed_from_step=6)
        trainer.run()
        event = {"time_unix_s": 1e9, "kind": "resume", "step": 6, "message": "resumed <here>"}
        (folder / name / "events.jsonl").write_text(json.dumps(event) + '\n{"torn')
        made.append(RunFolder.open(folder / name))
    return made


def test_page_of_two_runs(folders: list[RunFolder]) -> None:
    text = report_page(folders)
    page = Page(text)
    prefix = "data:image/svg+xml;base64,"
    images = [base64.b64decode(link.removeprefix(prefix)) for link in page.links]
    # Loss, optimisation, throughput, gates and selection of the one that has some.
    assert len(images) == 5
    assert all(ElementTree.fromstring(image).tag.endswith("svg") for image in images)
    assert len(page.ids) == len(set(page.ids))
    assert not re.search(r"(?:src|href)=\"(?!data:)|@import|url\(", text)
    shown = "".join(page.words)
    for part in (
        "a <b> & c",
        "dense",
        "12 of 12",
        "agree",
        "resumed <here>",
        "model.attention",
        "optim.lr",
        "versions.torch",
    ):
        assert part in shown, part
    assert "fixed gates, or telemetry" not in shown
    assert "no selected branch" not in shown


def test_page_of_one_run_shows_what_differs_from_the_defaults(folders: list[RunFolder]) -> None:
    shown = "".join(Page(report_page(folders[:1])).words)
    assert "model.width" in shown
    assert "default" in shown
    assert "optim.betas" not in shown


def test_runs_with_steps_of_different_sizes_lie_over_tokens(
    folders: list[RunFolder],
    tmp_path: Path,
) -> None:
    config = tiny_config(tmp_path, steps=6, micro_batch=4)
    make_trainer(config, tmp_path / "larger").run()

    def loss_curve(*runs: RunFolder) -> bytes:
        link = Page(report_page(runs)).links[0]
        return base64.b64decode(link.removeprefix("data:image/svg+xml;base64,"))

    assert b"<!-- optimizer steps -->" in loss_curve(*folders)
    assert b"<!-- tokens -->" in loss_curve(folders[0], RunFolder.open(tmp_path / "larger"))


def test_use_of_a_gpu_is_shown(folders: list[RunFolder], tmp_path: Path) -> None:
    path = shutil.copytree(folders[1].path, tmp_path / "gpu")
    assert "Nothing was recorded: no GPU." in report_page(folders)
    more = {"mfu": 0.3, "memory_reserved_mib": 9.0}
    rows = [{**row, **more} for row in read_metrics(path / "metrics.jsonl")]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "no GPU" not in report_page([RunFolder.open(path)])


def test_records_that_disagree_are_said(folders: list[RunFolder], tmp_path: Path) -> None:
    config = tiny_config(tmp_path, steps=4)
    make_trainer(config, tmp_path / "run").run()
    folder = RunFolder.open(tmp_path / "run")
    folder.metrics_csv.write_text("")
    assert "1 disagree: metrics.csv: 0 rows, metrics.jsonl has 2" in report_page([folder])


def test_run_without_rows_has_a_page(tmp_path: Path) -> None:
    make_trainer(tiny_config(tmp_path), tmp_path / "run")
    shown = "".join(Page(report_page([RunFolder.open(tmp_path / "run")])).words)
    assert "0 of 12" in shown
    assert "Nothing was recorded." in shown


def test_command(
    folders: list[RunFolder],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        cli.main(
            [
                "report",
                *(str(folder.path) for folder in folders),
                "--output",
                str(tmp_path / "page.html"),
            ],
        )
        == 0
    )
    assert capsys.readouterr().out == f"report: {tmp_path / 'page.html'}\n"
    Page((tmp_path / "page.html").read_text(encoding="utf-8"))
