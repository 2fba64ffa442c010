"""Write the page of measured conversions.

python -m benchmarks.conversion.table  # rows in h100.jsonl, page in h100.md
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import torch

from benchmarks.conversion.measure import interval
from benchmarks.conversion.models import DENSE, Row
from tools.evidence_report import lines_of, read_lines

HERE = Path(__file__).parent
COPIED_NATS = 1.0  # gain of the dense model in cells of the table
QUALITY = """Made by `python -m benchmarks.conversion.table`; fields in the [README](README.md).

Means over the texts. Loss: nats beyond the first 1,536 tokens minus `dense`, and of the text
with the largest difference. Copied: gain of repeated passages minus the gain of `dense`, with
its 95% interval, over texts and distances at which `dense` gains at least 1 nat. Mass:
attention outside the forced blocks that is kept, as a fraction of the most that as many blocks
could keep. Needles: made-up words found in all texts. Answer: leading tokens of 48 that equal
those of `dense`, by prompt."""
TIMES = "Median ms, the speed over `dense graph` in parentheses, and peak memory in MiB."


def quality(rows: list[Row], name: str) -> Iterator[Row]:
    """Records of a model, one for each length."""
    own = [row for row in rows if row["name"] == name]
    for length in sorted({row["length"] for row in own if row["case"] in ("loss", "needle")}):
        cases = {
            case: [row for row in own if row["case"] == case and row.get("length") == length]
            for case in ("loss", "copy", "mass", "needle")
        }
        record: Row = {"model": name, "tokens": f"{length:,}"}
        if loss := [row["difference"] for row in cases["loss"]]:
            record["loss"] = f"{fmean(loss):+.4f}"
            record["largest"] = f"{max(loss):+.4f}"
            copies = [x["difference"] for x in cases["copy"] if x["dense_gain"] >= COPIED_NATS]
            found = interval(torch.tensor(copies))
            record["copied"] = "{difference:+.3f} ({low:+.3f} to {high:+.3f})".format(**found)
        if cases["mass"]:
            record["mass"] = f"{fmean(row['recall'] for row in cases['mass']):.3f}"
        if all_depths := [row for row in cases["needle"] if row["depth"] is None]:
            found = sum(row["exact_match"] * row["cases"] for row in all_depths)
            record["needles"] = f"{found:.0f} of {sum(row['cases'] for row in all_depths)}"
            answers = [str(row["equal"]) for row in own if row["case"] == "answer"]
            record["answer"] = ", ".join(answers)
        yield record


def times(rows: list[Row]) -> Iterator[Row]:
    """Records of times, one for each model and length."""
    timed = [row for row in rows if row["case"] in ("prefill", "decode")]
    keys = {(x["case"], x["batch"]): None for x in timed}
    for name, length in dict.fromkeys((x["name"], x["length"]) for x in timed):
        record: Row = {"model": name, "tokens": f"{length:,}"}
        for case, batch in keys:
            same = [
                x for x in timed if (x["case"], x["batch"], x["length"]) == (case, batch, length)
            ]
            found = [x for x in same if x["name"] == name]
            if not found:
                continue
            dense = [x["ms"] for x in same if x["name"] == DENSE[1]]
            ratio = f" ({dense[0] / found[0]['ms']:.2f})" if dense else ""
            title = f"{case}, batch {batch}"
            record[title] = f"{found[0]['ms']:.4g}{ratio}"
            record[f"{title}, MiB"] = f"{found[0]['peak_mib']:,.0f}"
        yield record


def page(rows: list[Row]) -> str:
    """Page of the rows, in Markdown."""
    first = rows[0]
    commits = ", ".join(
        dict.fromkeys(f"{row['commit'][:10]} of {row['date'][:10]}" for row in rows)
    )
    origin = f"{first['model']} on {first['gpu']}, commits {commits}."
    names = dict.fromkeys(row["name"] for row in rows)
    cells = [record for name in names for record in quality(rows, name)]
    parts = [f"# Conversion of {first['model']}", QUALITY, origin, lines_of(cells), TIMES]
    return "\n\n".join([*parts, lines_of([*times(rows)])]) + "\n"


if __name__ == "__main__":
    (HERE / "h100.md").write_text(page(read_lines(HERE / "h100.jsonl")), encoding="utf-8")
