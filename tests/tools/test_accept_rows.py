"""Rows of the acceptance run: merging, comparison, tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nsa.errors import UserError
from tests.tools.accept_rows import PASSED
from tools.accept.rows import (
    Row,
    append_row,
    committed_row,
    gpu_stem,
    merge_rows,
    page,
    read_rows,
    terminal_table,
)

ROOT = Path(__file__).resolve().parents[2]


def write(path: Path, *rows: Row) -> Path:
    path.unlink(missing_ok=True)
    for row in rows:
        append_row(path, row)
    return path


def test_the_newest_row_of_a_case_wins(tmp_path):
    newer = replace(PASSED, date="2026-11-22T11:00:00+00:00", loss_last=1.9)
    write(tmp_path / "a/leg-1.jsonl", PASSED, replace(PASSED, config="1b", leg="4"))
    write(tmp_path / "b/leg-1.jsonl", newer)
    write(tmp_path / "b/quick.jsonl", replace(PASSED, leg="quick"))
    older = replace(PASSED, date="2026-11-21T10:00:00+00:00", loss_last=3.0)
    target = write(tmp_path / "h200.jsonl", older)
    for folders in (["b", "a"], ["a"]):  # the second time nothing changes
        merge_rows([tmp_path / name for name in folders], target, allow_mixed=False)
        found = [(row.config, row.leg, row.loss_last) for row in read_rows(target)]
        assert found == [("78m", "quick", 2.0), ("78m", "1", 1.9), ("1b", "4", 2.0)]


def test_rows_of_several_commits_are_refused_unless_allowed(tmp_path):
    target, other = write(tmp_path / "h200.jsonl", PASSED), replace(PASSED, commit="decade")
    source = write(tmp_path / "leg-4.jsonl", replace(other, config="1b"))
    with pytest.raises(UserError, match="c0ffee: 78m; decade: 1b"):
        merge_rows([source], target, allow_mixed=False)
    assert len(read_rows(target)) == 1
    assert len(merge_rows([source], target, allow_mixed=True)) == 2
    write(source, replace(other, date="2026-11-23T10:00:00+00:00"))
    write(target, PASSED)
    assert [row.commit for row in merge_rows([source], target, allow_mixed=False)] == ["decade"]


def test_rows_of_another_gpu_are_refused(tmp_path):
    write(tmp_path / "leg-1.jsonl", replace(PASSED, gpu="NVIDIA H100 80GB HBM3"))
    with pytest.raises(UserError, match=r"h100\.jsonl for NVIDIA H100"):
        merge_rows([tmp_path], tmp_path / "h200.jsonl", allow_mixed=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="hold files with rows"):
        merge_rows([tmp_path / "empty"], tmp_path / "h200.jsonl", allow_mixed=True)


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
def test_files_are_named_after_the_gpu(gpu, stem):
    assert gpu_stem(gpu) == stem


@pytest.mark.parametrize("text", ["{", '{"config": "seed"}', "[]"])
def test_a_line_that_is_no_row_is_named(tmp_path, text):
    path = tmp_path / "h200.jsonl"
    path.write_text(text + "\n")
    with pytest.raises(UserError, match=r"h200\.jsonl:1"):
        read_rows(path)


def test_losses_are_compared_with_the_same_case_steps_and_gpu(tmp_path):
    def found(row: Row, committed: Row) -> bool:
        write(tmp_path / "h200.jsonl", committed)
        return committed_row(row, tmp_path) == committed

    assert found(PASSED, PASSED)
    for now, before in (("78m", "seed"), ("117m: eval", "seed-gpt2: eval")):
        assert found(replace(PASSED, config=now), replace(PASSED, config=before))
    others: Iterable[dict[str, Any]] = (
        {"leg": "quick"},
        {"note": "added: --steps 60"},
        {"note": "as it ships"},
        {"gpu": "NVIDIA H100 PCIe"},
        {"config": "seed-gpt2"},
    )
    for changes in others:
        assert not found(PASSED, replace(PASSED, **changes))
    assert committed_row(PASSED, tmp_path / "none") is None


def test_tables_show_every_row_and_what_failed(tmp_path):
    failed = replace(PASSED, config="foreign model", passed=False, mfu=None, note="failed: x|y")
    text = terminal_table([PASSED, failed])
    assert "1 of 2 cases passed" in text
    assert "409,600" in text
    rows = PASSED, failed, replace(PASSED, leg="quick")
    markdown = page([write(tmp_path / "h200.jsonl", *rows)])
    assert "### Full run, h200: 1 of 2 cases passed" in markdown
    assert "### Quick run, h200: 1 of 1 cases passed" in markdown
    assert "| foreign model | NO |" in markdown
    assert "failed: x/y |" in markdown


def test_the_committed_page_is_made_of_the_committed_rows():
    folder = ROOT / "benchmarks/acceptance"
    committed = (folder / "README.md").read_text(encoding="utf-8")
    assert committed == page(folder.glob("*.jsonl")), "python -m tools.accept page"
