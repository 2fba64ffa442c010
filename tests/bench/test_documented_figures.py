"""Figures of the README and of the report on training speed are those of committed rows."""

from __future__ import annotations

import json
import re
from pathlib import Path

from nsa.bench.rows import read_rows, targets

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"


def table(page: str, heading: str) -> list[list[str]]:
    """Cells of the tables in a section, a list for each line that begins with a number."""
    text = (ROOT / page).read_text(encoding="utf-8")
    (found,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    lines = re.findall(r"^\| \d.*", found, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def number(cell: str) -> float:
    """The number that a cell begins with."""
    return float(cell.split()[0].replace(",", ""))


def test_speeds_of_training_are_those_of_rows() -> None:
    rows = read_rows([RESULTS / "h200-train.jsonl"])
    known = {round(row.tokens_per_s) for row in rows if row.tokens_per_s is not None}
    bounds = [target[name] for target in targets()["targets"] for name in ("target", "stretch")]
    known |= {round(bound) for bound in bounds if bound is not None}
    rows_of_page = table("docs/reports/throughput.md", "Speed and targets")
    cells = [cell for row in rows_of_page for cell in row]
    shown = {int(number(cell)) for cell in cells[1:] if re.match(r"\d{2,3},\d{3}\b", cell)}
    shown -= {65_536}  # a length
    assert len(shown) >= 14
    assert shown <= known


def test_steps_of_several_gpus_are_those_of_rows() -> None:
    lines = (ROOT / "benchmarks/scaling/h200.jsonl").read_text(encoding="utf-8").splitlines()
    known = {(row["processes"], f"{row['step_ms']:.1f}") for row in map(json.loads, lines)}
    shown = {(int(row[0]), row[3]) for row in table("docs/reports/throughput.md", "Several GPUs")}
    assert len(shown) >= 4
    assert shown <= known


def test_times_of_the_readme_are_those_of_rows() -> None:
    files = [RESULTS / f"h200-{name}.jsonl" for name in ("seed", "lengths")]
    known: dict[tuple[int, str, str], float] = {
        (row.seq_len, row.mode, row.provider): row.ms_p50
        for row in read_rows(files)
        if row.case == "attention" and row.choice == "random" and row.ms_p50 is not None
    }
    shown = table("README.md", "Speed")
    assert len(shown) >= 6
    for length, *cells in shown:
        seq_len = int(number(length))
        for mode, ms, ratio in (("fwd", *cells[:2]), ("fwd_bwd", *cells[2:])):
            measured = known[seq_len, mode, "nsa"]
            assert number(ms) == float(f"{measured:.3g}")
            if ratio:
                assert number(ratio) == round(measured / known[seq_len, mode, "dense-cudnn"], 2)
