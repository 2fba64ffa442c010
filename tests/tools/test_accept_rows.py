"""Rows of the acceptance run: merging, comparison, tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsa.errors import UserError
from tests.tools.accept_cases import some_row
from tools.accept.rows import committed_loss, gpu_stem, merge, read_rows, write_rows
from tools.accept.table import page, terminal_table

ROOT = Path(__file__).resolve().parents[2]


def test_the_newest_row_of_a_case_wins(tmp_path: Path) -> None:
    later = "2026-11-22T11:00:00+00:00"
    write_rows(tmp_path / "a/leg-1.jsonl", [some_row(), some_row(config="1b", leg="4")])
    write_rows(tmp_path / "b/leg-1.jsonl", [some_row(date=later, loss_last=1.9)])
    write_rows(tmp_path / "b/quick.jsonl", [some_row(leg="quick")])
    target = tmp_path / "h200.jsonl"
    write_rows(target, [some_row(date="2026-11-21T10:00:00+00:00", loss_last=3.0)])
    merge([tmp_path / "b", tmp_path / "a"], target, allow_mixed=False)
    found = [(row.config, row.leg, row.loss_last) for row in read_rows(target)]
    assert found == [("78m", "quick", 2.0), ("78m", "1", 1.9), ("1b", "4", 2.0)]
    merge([tmp_path / "a"], target, allow_mixed=False)
    older = [row.loss_last for row in read_rows(target)]
    assert older == [2.0, 1.9, 2.0]  # they change nothing


def test_rows_of_several_commits_are_refused_unless_allowed(tmp_path: Path) -> None:
    target, source = tmp_path / "h200.jsonl", tmp_path / "leg-4.jsonl"
    write_rows(target, [some_row()])
    write_rows(source, [some_row(config="1b", commit="decade")])
    with pytest.raises(UserError, match="c0ffee: 78m; decade: 1b"):
        merge([source], target, allow_mixed=False)
    assert len(read_rows(target)) == 1
    assert len(merge([source], target, allow_mixed=True)) == 2
    write_rows(source, [some_row(commit="decade", date="2026-11-23T10:00:00+00:00")])
    write_rows(target, [some_row()])
    assert [row.commit for row in merge([source], target, allow_mixed=False)] == ["decade"]


def test_rows_of_another_gpu_are_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "leg-1.jsonl", [some_row(gpu="NVIDIA H100 80GB HBM3")])
    with pytest.raises(UserError, match=r"h100\.jsonl for NVIDIA H100"):
        merge([tmp_path], tmp_path / "h200.jsonl", allow_mixed=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="hold files with rows"):
        merge([tmp_path / "empty"], tmp_path / "h200.jsonl", allow_mixed=True)


@pytest.mark.parametrize(
    ("gpu", "stem"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA L40S", "l40s"),
        ("cpu", "cpu"),
    ],
)
def test_files_are_named_after_the_gpu(gpu: str, stem: str) -> None:
    assert gpu_stem(gpu) == stem


def test_a_line_that_is_no_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "h200.jsonl"
    for text in ("{", '{"config": "seed"}', "[]"):
        path.write_text(text + "\n")
        with pytest.raises(UserError, match=r"h200\.jsonl:1"):
            read_rows(path)


def test_losses_are_compared_with_the_same_case_steps_and_gpu() -> None:
    row = some_row()
    assert committed_loss(row, [some_row(loss_last=2.5)]) == 2.5
    for now, before in (("78m", "seed"), ("117m: eval", "seed-gpt2: eval")):
        older = some_row(loss_last=2.5, config=before)
        assert committed_loss(some_row(config=now), [older]) == 2.5
    others = (
        {"leg": "quick"},
        {"note": "added: --steps 60"},
        {"note": "as it ships"},
        {"gpu": "NVIDIA H100 PCIe"},
        {"config": "seed-gpt2"},
    )
    for changes in others:
        assert committed_loss(row, [some_row(loss_last=2.5, **changes)]) is None


def test_tables_show_every_row_and_what_failed(tmp_path: Path) -> None:
    failed = some_row(config="foreign model", passed=False, mfu=None, note="failed: x|y")
    rows = [some_row(), failed]
    text = terminal_table(rows)
    assert "1 of 2 cases passed" in text
    assert "409,600" in text
    write_rows(tmp_path / "h200.jsonl", [*rows, some_row(leg="quick")])
    markdown = page([tmp_path / "h200.jsonl"])
    assert "### Full run, h200: 1 of 2 cases passed" in markdown
    assert "### Quick run, h200: 1 of 1 cases passed" in markdown
    assert "| foreign model | NO |" in markdown
    assert "failed: x/y |" in markdown


def test_the_committed_page_is_made_of_the_committed_rows() -> None:
    folder = ROOT / "benchmarks/acceptance"
    files, path = list(folder.glob("*.jsonl")), folder / "README.md"
    committed = path.read_text(encoding="utf-8") if path.exists() else ""
    assert committed == (page(files) if files else ""), "python -m tools.accept page"
