"""Figures of the README and of the report on training speed are those of committed rows."""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks import speedup_chart
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


def test_speeds_of_training_are_those_of_rows():
    rows = read_rows([RESULTS / "h200-train.jsonl"])
    known = {round(row.tokens_per_s) for row in rows if row.tokens_per_s is not None}
    known |= {round(target["target"]) for target in targets()["targets"]}
    rows_of_page = table("docs/reports/throughput.md", "Speed and targets")
    cells = [cell for row in rows_of_page for cell in row]
    shown = {int(number(cell)) for cell in cells[1:] if re.match(r"\d{2,3},\d{3}\b", cell)}
    shown -= {65_536}  # a length
    assert len(shown) >= 12
    assert shown <= known


def test_steps_of_several_gpus_are_those_of_rows():
    lines = (ROOT / "benchmarks/scaling/h200.jsonl").read_text(encoding="utf-8").splitlines()
    known = {(row["processes"], f"{row['step_ms']:.1f}") for row in map(json.loads, lines)}
    shown = {(int(row[0]), row[3]) for row in table("docs/reports/throughput.md", "Several GPUs")}
    assert len(shown) >= 4
    assert shown <= known


def test_times_of_the_readme_are_those_of_rows():
    known: dict[tuple[int, str], float] = {
        (row.seq_len, row.mode): row.ms_p50
        for row in read_rows(speedup_chart.ROWS)
        if (row.case, row.choice, row.provider) == ("attention", "random", "nsa") and row.ms_p50
    }
    speed_ups = speedup_chart.speed_ups()
    shown = table("README.md", "Speed")
    assert len(shown) >= 6
    for length, *cells in shown:
        seq_len = int(number(length))
        for mode, ms, speed_up in (("fwd", *cells[:2]), ("fwd_bwd", *cells[2:])):
            assert number(ms) == float(f"{known[seq_len, mode]:.3g}")
            by_length = speed_ups[mode]
            assert speed_up == (f"{by_length[seq_len]:.2f}x" if seq_len in by_length else "")


def learned(experiment: str, model: str) -> str:
    """Mean bits per byte of the test text over the seeds of a model, as pages write it."""
    files = sorted((ROOT / "benchmarks/quality" / experiment).glob(f"{model}-*/row.json"))
    rows = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return f"{sum(row['test_bits_per_byte'] for row in rows) / len(rows):.3f}"


def test_facts_of_the_first_screen_are_those_of_rows():
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    shared, dense = learned("muon", "shared"), learned("muon", "dense")
    assert f"`78m-shared` has {shared} bits per byte of unseen books, dense {dense} " in page
    rows = read_rows([RESULTS / "h200-decode.jsonl"])
    ms = {
        (row.batch, row.provider): row.ms_p50
        for row in rows
        if (row.case, row.mode, row.seq_len) == ("decode.model", "step", 65_536) and row.ms_p50
    }
    many, dense_many = ms[64, "nsa"], ms[64, "dense"]
    speed_up = f"takes {many:.2f} ms, dense {dense_many:.2f} ms: {dense_many / many:.1f}x"
    assert f"{speed_up}. With one sequence: {ms[1, 'dense'] / ms[1, 'nsa']:.1f}x." in page
    chart = speedup_chart.speed_ups()["fwd_bwd"]
    assert f"{chart[8_192]:.2f}x as fast at 8,192 tokens and {chart[65_536]:.1f}x at 65,536" in page


def test_table_of_models_is_that_of_rows():
    page = (ROOT / "docs/use.md").read_text(encoding="utf-8")
    for name, model in (("`78m-shared`", "shared"), ("`78m`", "nsa"), ("dense, equal", "dense")):
        (line,) = re.findall(rf"^\| {name}.*", page, re.MULTILINE)
        cells = line.split(" | ")
        assert [cells[1], cells[3]] == [learned("muon", model), learned("2k", model)]
