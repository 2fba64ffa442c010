"""The report on what models learn: figures of its tables are those of made-up rows."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nsa.errors import UserError
from nsa.lm.recorded import save_selections
from nsa.train.evaluation import Measurement
from nsa.train.load import to_yaml
from nsa.train.measurements import save_measurement
from tests.train.cases import contents, tiny_config
from tools.accept.programs import ROOT
from tools.evidence import __main__ as command_line
from tools.evidence.experiments import DENSE, NSA, SMALL_DENSE
from tools.evidence.report import write_report

BYTES = [100.0, 300.0]  # of two documents
SAME = {"split": "test", "text": "shards", "tokenizer": "f", "seq_len": 4, "windows": 9}
WHERE = {"gpu": "NVIDIA H200", "driver": "580.1", "torch": "2.11.0", "triton": "3.6.0"}


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def make_row(model: str, seed: int, **changes: Any) -> dict[str, Any]:
    row = {"model": model, "seed": seed, "parameters": 78_601_392, "lr": 5e-4, "seconds": 430.4}
    row |= {"steps": 100, "tokens": 6_553_600, "global_batch": 32, "seq_len": 2048}
    row |= {"val_bits_per_byte": 1.5, "test_bits_per_byte": 1.25, "test_windows": 5244}
    row |= {"tokens_per_s": 500_000.4, "tokens_per_s_total": 480_000.2, **WHERE}
    row |= {"tokens_per_s_processes": 400_000.6, "commit": "0123456789abcdef", **changes}
    return {**row, "date": "2026-11-25T10:00:00+00:00", "failed": [], "left_out": []}


def write_arm(folder: Path, row: dict[str, Any], bits: list[float], first_bits: float) -> None:
    """A run whose test has so many bits in each document, and so many at the first position."""
    write_json(folder / "row.json", row)
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
    plots = {path.name for path in out.glob("*.png")}
    assert {name for name in plots if f"]({name})" in text} == plots
    return text


def test_differences_and_their_intervals(tmp_path):
    write_group(tmp_path / "rows", "200m")
    text = report(tmp_path / "rows", tmp_path / "out")
    head, _, *lines = table(text, "200M tokens, 2,048 a sequence", "NSA minus")
    assert head[:5] == ["NSA minus", "seeds", "difference", "over documents", "over seeds"]
    # Each document differs by 10 bits, or 20, or the small model by 4 and 8: of 400 bytes, and of
    # 200, 400 or 600 when two documents are drawn, with probabilities of 1/4, 1/2 and 1/4.
    error = 0.05 / math.sqrt(2) / math.sqrt(2) * 12.706
    assert [line[:5] for line in lines] == [
        [DENSE, "1", "-0.0500", "-0.1000 to -0.0333 (2)", ""],
        [DENSE, "2", "-0.1000", "-0.2000 to -0.0667 (2)", ""],
        [
            *(DENSE, "1, 2", "-0.0750", "-0.1500 to -0.0500 (2)"),
            f"{-0.075 - error:+.4f} to {-0.075 + error:+.4f}",
        ],
        [SMALL_DENSE, "1", "-0.0300", "-0.0400 to -0.0267 (2)", ""],
    ]
    assert lines[1][5] == "`200m/nsa-2/test.npz`, `200m/dense-2/test.npz`"


def test_positions_are_means_over_the_seeds(tmp_path):
    write_group(tmp_path / "rows", "8k")
    text = report(tmp_path / "rows", tmp_path / "out")
    _, _, *lines = table(text, "100M tokens, 8,192 a sequence", "from")
    assert lines == [
        ["1", "1", "2.5000", "2.7500", "-0.2500"],
        ["2", "3", "1.5000", "1.5000", "+0.0000"],
        ["4", "4", "1.0000", "1.0000", "+0.0000"],
    ]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("learning.md", "8k-loss.png", "8k-positions.png")
    }


def test_arms(tmp_path):
    write_group(tmp_path / "rows", "200m")
    text = report(tmp_path / "rows", tmp_path / "out")
    _, _, *lines = table(text, "200M tokens, 2,048 a sequence", "model")
    assert [line[:2] for line in lines] == [
        *([NSA, "1"], [DENSE, "1"], [SMALL_DENSE, "1"], [NSA, "2"], [DENSE, "2"])
    ]
    figures = ["78,601,392", "0.0005", "1.5000", "1.2500", "500,000", "430"]
    assert lines[0][2:] == [*figures, "`200m/nsa-1/row.json`"]
    assert "After 100 steps of 65,536 tokens" in text
    assert (
        "NVIDIA H200, driver 580.1, torch 2.11.0, triton 3.6.0, commit 0123456789ab, 2026-11-25."
        in text
    )


def test_a_seed_without_its_partner_is_in_no_difference(tmp_path):
    write_group(tmp_path, "200m")
    (tmp_path / "200m/dense-1/test.npz").unlink()
    text = report(tmp_path, tmp_path / "out")
    _, _, *lines = table(text, "200M tokens, 2,048 a sequence", "NSA minus")
    assert [line[:3] for line in lines] == [[DENSE, "2", "-0.1000"], [SMALL_DENSE, "1", "-0.0300"]]


def write_long_run(folder: Path) -> None:
    write_arm(folder, make_row(NSA, 1337), BYTES, 8.0)
    legs = [
        {"begin": "2026-11-25T10:00:00Z", "end": "2026-11-25T10:08:40Z", "seconds": 520.4}
        | {"exit_code": 143, "last_step": 26_123},
        {"begin": "2026-11-25T10:08:40Z", "end": "2026-11-25T10:16:40Z", "seconds": 480.0}
        | {"exit_code": 0, "last_step": 50_000},
    ]
    (folder / "legs.jsonl").write_text("".join(json.dumps(leg) + "\n" for leg in legs))
    loss = {"split": "test", "seq_len": 8192, "windows": 1311, "bits_per_byte": 1.23456}
    write_json(folder / "test-8192.json", loss | {"bigram_bits_per_byte": 3.5})
    (folder / "check.txt").write_text("runs/50k: 2 rows\nruns/50k: everything agrees\n")
    (folder / "generated.txt").write_text("It was late. ``` ](gone.md)\n")


def test_the_long_run(tmp_path):
    write_long_run(tmp_path / "50k")
    text = report(tmp_path, tmp_path / "out")
    title = "50,000 steps as shipped"
    assert table(text, title, "begin")[2:] == [
        ["2026-11-25T10:00:00Z", "2026-11-25T10:08:40Z", "520", "143", "26,123"],
        ["2026-11-25T10:08:40Z", "2026-11-25T10:16:40Z", "480", "0", "50,000"],
    ]
    assert table(text, title, "split")[2:] == [
        ["test", "8,192", "1,311", "1.2346", "3.5000", "`50k/test-8192.json`"]
    ]
    assert [line[1] for line in table(text, title, "source")[2:]] == [
        "500,000",
        "480,000",
        "400,001",
    ]
    assert "afterwards: everything agrees. From `50k/legs.jsonl`, `50k/check.txt`." in text
    assert "```text\nIt was late. ''' ](gone.md)\n```" in text
    assert "](50k-loss.png)" in text
    assert "](50k-layers.png)" in text


def write_inspected(folder: Path) -> None:
    """80 tokens in blocks of 16, of which each query selects 4: 3 of those are forced."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(tiny_config(folder)), encoding="utf-8")
    blocks = torch.full((80, 1, 4), -1, dtype=torch.int32)
    for query in range(64, 80):  # in the last block, with two others to choose from
        free = 1 if query < 70 else 1 + query % 2
        blocks[query, 0] = torch.tensor([0, free, 3, 4])
    save_selections(folder / "selected-80.npz", [blocks], 16)
    selected = {"distance_mean": 1234.5, "overlap": [{"lag_tokens": 1, "share": 0.8765}]}
    gates = {"cmp": {"mean": 0.25}, "slc": {"mean": 0.5}, "win": {"mean": 0.75}}
    layer = {"layer": 0, "gates": gates, "selection": selected}
    write_json(folder / "inspect-80.json", {"num_tokens": 80, "layers": [layer]})


def test_what_is_selected(tmp_path):
    write_arm(tmp_path / "8k/nsa", make_row(NSA, 1337), BYTES, 8.0)
    write_inspected(tmp_path / "8k/nsa")
    text = report(tmp_path, tmp_path / "out")
    figures = ["0", "0.250", "0.500", "0.750", "1,234", "87.6%"]
    # 65 to 70 keep the free block of the query before, 71 to 79 do not.
    kept = ["75.0%", f"{6 / 15:.1%}"]
    (line,) = table(text, "What is selected", "layer")[2:]
    assert line == [*figures, *kept]
    assert "80 tokens. From `8k/nsa/inspect-80.json`." in text


def test_learning_rates_and_nothing_else(tmp_path):
    rows = [
        {"model": model, "lr": lr, "val_bits_per_byte": bits, "val_windows": 512, "steps": 440}
        | {"tokens": 440 * 65_536, "seed": 1337, "gpu": "NVIDIA H200"}
        for model, lr, bits in (
            *((DENSE, 1e-3, 2.0568), (DENSE, 5e-4, 2.0572)),
            *((NSA, 1e-3, 2.0365), (NSA, 5e-4, 2.0089)),
        )
    ]
    path = tmp_path / "learning-rates.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = report(tmp_path, tmp_path / "out")
    assert table(text, "Learning rates", "learning rate")[2:] == [
        ["0.0005", "**2.0089**", "2.0572"],
        ["0.001", "2.0365", "**2.0568**"],
    ]
    assert text.count("\n## ") == 1


def test_older_rows_of_a_file(tmp_path):
    write_group(tmp_path / "rows", "200m")
    for name in ("nsa", "dense"):
        folder = tmp_path / "rows/90m"
        folder.mkdir(exist_ok=True)
        (tmp_path / f"rows/200m/{name}-1/test.npz").rename(folder / f"{name}-test.npz")
    lines = [make_row(model, 1) for model in (DENSE, NSA)]
    (tmp_path / "rows/90m.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = report(tmp_path / "rows", tmp_path / "out")
    title = "90M tokens, 2,048 a sequence"
    (line,) = table(text, title, "NSA minus")[2:]
    assert line[2] == "-0.0500"
    assert line[-1] == "`90m/nsa-test.npz`, `90m/dense-test.npz`"
    assert [line[-1] for line in table(text, title, "model")[2:]] == ["`90m.jsonl`"] * 2


def test_the_same_rows_give_the_same_bytes(tmp_path):
    write_group(tmp_path / "rows", "200m")
    write_long_run(tmp_path / "rows/50k")
    write_inspected(tmp_path / "rows/50k")
    for name in ("one", "two"):
        report(tmp_path / "rows", tmp_path / name)
    found = contents(tmp_path / "one")
    assert len(found) == 5
    assert found == contents(tmp_path / "two")


def test_nothing_to_report(tmp_path):
    with pytest.raises(UserError, match="--rows must hold rows of an experiment"):
        write_report(tmp_path, tmp_path / "out")


def test_take(tmp_path, capsys):
    out, rows = tmp_path / "out", tmp_path / "rows"
    for name in ("50k", "200m-nsa-1337", "200m-small-dense-1337", "8k-dense"):
        write_json(out / name / "row.json", make_row(NSA, 1337, experiment=name))
    (out / "8k-nsa").mkdir()
    failing = make_row(NSA, 1, experiment="8k") | {"failed": ["profile"], "left_out": ["trace"]}
    write_json(out / "8k-dense/row.json", failing)
    write_json(rows / "200m/nsa-1337/old.json", {})
    write_json(rows / "90m/kept.json", {})
    assert command_line.main(["take", str(out), "--rows", str(rows)]) == 0
    assert {*contents(rows)} == {
        *("50k/row.json", "200m/nsa-1337/row.json", "200m/small-dense-1337/row.json"),
        *("8k/dense/row.json", "90m/kept.json"),
    }
    assert json.loads((rows / "50k/row.json").read_text())["experiment"] == "50k"
    assert "8k/dense; profile; without trace\n" in capsys.readouterr().out


def test_the_committed_page_is_that_of_the_committed_rows(tmp_path):
    page = write_report(ROOT / "benchmarks/quality", tmp_path)
    assert page.read_bytes() == (ROOT / "docs/results/learning.md").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {
        path.name for path in (ROOT / "docs/results").iterdir()
    }
