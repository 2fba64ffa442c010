"""The report is made from rows alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nsa import cli
from nsa.bench.report import newest_rows, of_one_batch, series, write_report
from nsa.bench.rows import Row
from nsa.errors import UserError
from tests.bench.rows import H200, WRONG, make_row, training, write_rows

NAME = "bfloat16-nvidia-h200"


def rows() -> list[Row]:
    """Dense attention grows with S, this library does not and is twice as slow at 2,048."""
    made = []
    for seq_len, dense, ours in ((2048, 1.0, 2.0), (8192, 4.0, 2.0), (65_536, 32.0, 2.0)):
        for mode, factor in (("fwd", 1.0), ("fwd_bwd", 3.0)):
            point = {"seq_len": seq_len, "batch": 65_536 // seq_len, "mode": mode, **H200}
            times = {"ms_p50": factor * dense, "peak_mib": 100.0}
            made.append(make_row(**point, provider="dense-cudnn", **times))
            made.append(make_row(**point, ms_p50=factor * ours, peak_mib=300.0))
    window = {"case": "attention.window", **H200}
    return [*made, make_row(**window, ms_p50=0.5), make_row(**window, mode="fwd_bwd", **WRONG)]


def report(made: list[Row], folder: Path) -> tuple[str, list[str]]:
    """Text and plots of a report."""
    text, files = write_report(made, folder).read_text(), sorted(folder.glob("*.png"))
    assert all(f"]({file.name})" in text for file in files)
    assert all(file.read_bytes()[:4] == b"\x89PNG" for file in files)
    return text, [file.name for file in files]


def test_report(tmp_path: Path) -> None:
    text, plots = report(rows(), tmp_path / "new")
    assert "## seed, choice random, bfloat16, NVIDIA H200" in text
    row = "| nsa | 65,536 | 1 | fwd | 2 (0.9 to 1.1) | 100 | 300 | 0.0625 | 3 |  |"
    assert f"{row} 0.0625 of dense-cudnn: target 0.32 pass, stretch 0.22 pass |" in text
    window = "attention.window, nsa, seed, random, S 2,048"
    assert f"- missed: {window}, fwd: 0.5: target 0.36 FAIL, stretch 0.28 FAIL" in text
    assert f"- {window}, fwd_bwd: dq is wrong" in text
    assert "| run | NVIDIA H200 | 2.11.0 | abc | 2026-01-02T03:04:05+00:00 |" in text
    assert plots == [f"{kind}-seed-random-{NAME}.png" for kind in ("memory", "ratio", "time")]


def test_what_approximate_patterns_find(tmp_path: Path) -> None:
    selection = {"case": "attention.choice", **H200}
    variant = {"coarse_block_size": 256}
    coarse = make_row(**selection, provider="coarse", recall=0.73, variant=variant)
    text, _ = report([make_row(**selection, recall=1.0), coarse], tmp_path)
    assert "| time of nsa | recall | differs |" in text
    assert "| 1 | 0.730 | coarse_block_size 256 |" in text


def test_report_of_training(tmp_path: Path) -> None:
    made = []
    for seq_len, dense, ours in ((2048, 100.0, 150.0), (65_536, 700.0, 200.0)):
        point = {"seq_len": seq_len, "batch": 65_536 // seq_len, "mfu": 0.4, **H200}
        for name, ms in (("dense", dense), ("nsa", ours)):
            made.append(training(name, ms, **point, peak_mib=3 * ms, loss_nats=2.5))
    made.append(training("slow", 400.0, **point, variant={"optim.lr": 0.1}, changed={"seed": 1}))
    text, plots = report(made, tmp_path)
    cells = "436,907 | 0.4 | 100 | 450 | 1.5 void | 1.5 |  | 2.500 |  |  |"
    speed = "436,907 tokens/s: target 430,000 pass, stretch 550,000 FAIL"
    targets = f"{speed}; 1.5 MiB of dense: target 1.5 pass |"
    assert f"| nsa | 2,048 | 32 | fwd_bwd | 150 (0.9 to 1.1) | {cells} {targets}" in text
    assert "| 0.571 | 0.0305 | 2 |  | optim.lr 0.1 | seed 1 |  |" in text
    kinds = ("memory", "mfu", "ratio", "speed")
    assert plots == [f"train-{kind}-seed-model-{NAME}.png" for kind in kinds]


def test_runs_within_documents_have_a_section_and_say_how_they_went(tmp_path: Path) -> None:
    masked = {"settings": {"document_mask": True}, "changed": {"micro_batch": 32}}
    went = {"slowest_over_median": 1.5, "compilations_after_5": 2, "host_ms_p50": 9.0}
    ours = training("nsa", 160.0, **H200, **masked, **went, first_step_s=30.0)
    unmasked = training("dense-unmasked", 80.0, **H200)
    text, plots = report([training("nsa", 150.0, **H200), ours, unmasked], tmp_path)
    documents = text.index("## seed, choice model, document masks, bf")
    assert text.index("## seed, choice model, bf") < documents
    assert "| 2 | 2 | 1.50 | 9.0 | 30.0 | micro_batch 32 |" in text[documents:]
    names = [f"train-speed-seed-model-{part}{NAME}.png" for part in ("", "document-masks-")]
    assert set(names) < set(plots)


def test_a_plot_over_length_shows_one_batch_in_order_of_length() -> None:
    points = ((65_536, 1), (2048, 32), (2048, 4))
    made = [make_row(seq_len=seq_len, batch=batch, ms_p50=seq_len) for seq_len, batch in points]
    shown = of_one_batch(made)
    assert [(row.seq_len, row.batch) for row in shown] == [(65_536, 1), (2048, 32)]
    found = series(shown, {}, lambda row, by: row.ms_p50)
    assert found == {("nsa", "fwd"): [(2048, 2048), (65_536, 65_536)]}


def test_report_from_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = {"a.jsonl": rows()[:6], "b.jsonl": rows()[6:]}
    files = [str(write_rows(tmp_path / name, some)) for name, some in parts.items()]
    words = ["bench", "report", *files, "--out", str(tmp_path / "out")]
    assert cli.main(words) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out' / 'report.md'}\n"


def test_without_a_figure_there_is_no_report(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must hold at least one figure"):
        write_report([rows()[-1]], tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_newest_row_of_a_kind_counts() -> None:
    old, new = make_row(), make_row(ms_p50=2.0, date="2026-02-01T00:00:00+00:00")
    wrong = make_row(**WRONG, date="2026-03-01T00:00:00+00:00")
    for order in ([old, new, wrong], [wrong, new, old]):
        assert newest_rows(order) == [new]
    others = [make_row(mode="fwd_bwd"), make_row(batch=1), make_row(gpu="other")]
    assert len(newest_rows([old, *others])) == 4


def test_rows_of_different_runs_are_not_divided(tmp_path: Path) -> None:
    text, _ = report([replace(row, run_id=row.provider) for row in rows()], tmp_path)
    assert "of dense-cudnn: target" not in text
