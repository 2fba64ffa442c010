"""Figures of the report on training speed are those of committed rows."""

from __future__ import annotations

import json
import re
from pathlib import Path

from nsa.bench.rows import read_rows
from nsa.bench.targets import targets

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/reports/throughput.md").read_text(encoding="utf-8")


def section(heading: str) -> str:
    """Tables of a section of the report."""
    (found,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE)
    return "\n".join(line for line in found.splitlines() if line.startswith("|"))


def test_speeds_are_those_of_rows() -> None:
    rows = read_rows([ROOT / "benchmarks/results/h200-train.jsonl"])
    known = {round(row.tokens_per_s) for row in rows if row.tokens_per_s is not None}
    both = [bound for target in targets()[1] for bound in (target.target, target.stretch)]
    bounds = {round(bound) for bound in both if bound}
    table = section("Against what was set out to reach")
    shown = {int(figure.replace(",", "")) for figure in re.findall(r"\d{2,3},\d{3}", table)}
    shown -= {65_536, 24_604, 25_038, 20_378, 20_837}  # a length, and the plan's figures
    assert len(shown & known) >= 8
    assert shown <= known | bounds


def test_steps_of_several_gpus_are_those_of_rows() -> None:
    lines = (ROOT / "benchmarks/scaling/h200.jsonl").read_text(encoding="utf-8").splitlines()
    known = {(row["processes"], f"{row['step_ms']:.1f}") for row in map(json.loads, lines)}
    lines = section("Several GPUs").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    shown = {(int(row[0].split(",")[0]), row[4]) for row in cells if row[0][0].isdigit()}
    assert len(shown) >= 13
    assert shown <= known
