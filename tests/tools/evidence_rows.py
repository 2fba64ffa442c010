"""Made-up runs in the layout of ``benchmarks/quality``, and what the report makes of them."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nsa.lm.recorded import save_selections
from nsa.train.evaluation import Measurement
from nsa.train.load import to_yaml
from nsa.train.measurements import save_measurement
from tests.train.cases import tiny_config
from tools.evidence import equal
from tools.evidence import report as report_module
from tools.evidence.experiments import DENSE, NSA, SMALL_DENSE
from tools.evidence.plots import Panel, Plot
from tools.evidence.report import write_report

BYTES = [100.0, 300.0]  # of two documents
SAME = {"split": "test", "text": "shards", "tokenizer": "f", "seq_len": 4, "windows": 9}
WHERE = {"gpu": "NVIDIA H200", "driver": "580.1", "torch": "2.11.0", "triton": "3.6.0"}


def keep_panels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Sequence[Panel]]:
    """Draw nothing; panels of each plot appear in what is returned."""
    found = dict[str, Sequence[Panel]]()

    def keep(name: str, panels: Sequence[Panel]) -> Plot:
        found[name] = panels
        return Plot(name, "a plot", b"")

    for module in (equal, report_module):
        monkeypatch.setattr(module, "draw", keep)
    return found


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def make_row(model: str, seed: int, **changes: Any) -> dict[str, Any]:
    row = {"model": model, "seed": seed, "parameters": 78_601_392, "lr": 5e-4, "seconds": 430.4}
    row |= {"steps": 100, "tokens": 6_553_600, "global_batch": 32, "seq_len": 2048}
    row |= {"val_bits_per_byte": 1.5, "val_windows": 512}
    row |= {"test_bits_per_byte": 1.0, "test_windows": 5244}
    row |= {"tokens_per_s": 500_000.4, "tokens_per_s_total": 480_000.2, **WHERE}
    row |= {"tokens_per_s_processes": 400_000.6, "commit": "0123456789abcdef", **changes}
    return {"date": "2026-11-25T10:00:00+00:00", "failed": [], "left_out": [], **row}


def write_arm(folder: Path, row: dict[str, Any], bits: list[float], first_bits: float) -> None:
    """A run whose test has so many bits in each document, and so many at the first position."""
    write_json(folder / "row.json", row | {"test_bits_per_byte": sum(bits) / sum(BYTES)})
    documents = np.array([[x * math.log(2), n, n] for x, n in zip(bits, BYTES, strict=True)])
    positions = np.array([[x * math.log(2), 4, 4] for x in (first_bits, 6, 6, 4)])
    about = {**SAME, "run": folder.name, "step": 100}
    save_measurement(folder / "test.npz", Measurement(documents, positions), about)
    metrics = [
        {"step": n, "tokens": n * 65_536, "tokens_per_s_total": 1e5, "bits_per_byte": 2.0 - n / 200}
        | {"val_bits_per_byte": 2.1 - n / 200, "gate_cmp_mean_layer_0": 0.25}
        for n in range(10, 101, 10)
    ]
    text = "".join(json.dumps(row) + "\n" for row in metrics)
    (folder / "metrics.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def write_group(rows: Path, group: str) -> None:
    """Two seeds of NSA and dense, one of the small dense model."""
    for name, model, seed, bits, first in (
        ("nsa-1", NSA, 1, [100.0, 450.0], 8.0),
        ("dense-1", DENSE, 1, [110.0, 460.0], 10.0),
        ("nsa-2", NSA, 2, [120.0, 420.0], 12.0),
        ("dense-2", DENSE, 2, [140.0, 440.0], 12.0),
        ("small-dense-1", SMALL_DENSE, 1, [104.0, 458.0], 8.0),
    ):
        write_arm(rows / group / name, make_row(model, seed), bits, first)


def table(text: str, heading: str, first: str) -> list[list[str]]:
    """Cells of the table of a section whose first column has this head."""
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = next(part for part in section.split("\n\n") if part.startswith(f"| {first} |"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found.splitlines()]


def report(rows: Path, out: Path) -> str:
    text = write_report(rows, out).read_text(encoding="utf-8")
    assert "From ." not in text
    plots = {path.name for path in out.glob("*.png")}
    assert {name for name in plots if f"]({name})" in text} == plots
    return text


def change_row(folder: Path, **changes: Any) -> None:
    """Change figures of a row."""
    row = json.loads((folder / "row.json").read_text())
    write_json(folder / "row.json", row | changes)


def write_inspected(folder: Path, num_tokens: int = 80) -> None:
    """Tokens in blocks of 16, of which each query selects 4: 3 of those are forced."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(tiny_config(folder)), encoding="utf-8")
    blocks = torch.full((80, 1, 4), -1, dtype=torch.int32)
    for query in range(64, 80):  # in the last block, with two others to choose from
        free = 1 if query < 70 else 1 + query % 2
        blocks[query, 0] = torch.tensor([0, free, 3, 4])
    save_selections(folder / "selected-96.npz", [blocks[:num_tokens]], 16)
    selected = {"distance_mean": 1234.5, "overlap": [{"lag_tokens": 1, "share": 0.8765}]}
    gates = {"cmp": {"mean": 0.25}, "slc": {"mean": 0.5}, "win": {"mean": 0.75}}
    layer = {"layer": 0, "gates": gates, "selection": selected}
    write_json(folder / "inspect-96.json", {"num_tokens": num_tokens, "layers": [layer]})
