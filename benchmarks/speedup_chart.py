"""Draw the README's chart: speed-up over the fastest dense attention by sequence length.

python benchmarks/speedup_chart.py [docs/images/speedup.png]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
ROWS = [ROOT / "benchmarks/results" / f"h200-{name}.jsonl" for name in ("lengths", "seed")]
IMAGE = ROOT / "docs/images/speedup.png"
LABELS = {"fwd": "forward", "fwd_bwd": "forward + backward"}

SpeedUps = dict[str, dict[int, float]]  # by mode and sequence length


def speed_ups(files: Iterable[Path] = ROWS) -> SpeedUps:
    """Time of the fastest dense attention divided by the time of NSA, from the same run."""
    times: dict[tuple[str, str, int], dict[str, float]] = {}
    for line in (line for file in files for line in file.read_text("utf-8").splitlines()):
        row = json.loads(line)
        if row["case"] == "attention" and row["choice"] == "random" and row["ms_p50"] is not None:
            point = (row["run_id"], row["mode"], row["seq_len"])
            times.setdefault(point, {})[row["provider"]] = row["ms_p50"]
    found: SpeedUps = {mode: {} for mode in LABELS}
    for (_, mode, seq_len), by_provider in sorted(times.items()):
        dense = [ms for provider, ms in by_provider.items() if provider.startswith("dense")]
        if dense and "nsa" in by_provider:
            found[mode][seq_len] = min(dense) / by_provider["nsa"]
    return {mode: dict(sorted(points.items())) for mode, points in found.items()}


def draw(points: SpeedUps, path: Path) -> None:
    """Write the chart; its numbers are also in the PNG's description, as JSON."""
    matplotlib.rcParams["font.size"] = 11
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.subplots()
    for mode, color in zip(LABELS, ("#4c78a8", "#e45756"), strict=True):
        by_length = points[mode]
        axes.plot(list(by_length), list(by_length.values()), "o-", color=color, label=LABELS[mode])
        last, value = list(by_length.items())[-1]
        axes.annotate(f" {value:.1f}x", (last, value), color=color, va="center")
    axes.axhline(1, color="black", linewidth=1)
    axes.annotate("dense attention", (128, 1.07), fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    lengths = sorted({length for by_length in points.values() for length in by_length})
    names = [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths]
    axes.set_xticks(lengths, names)
    axes.set_yticks([0.25, 0.5, 1, 2, 4, 8], ["0.25x", "0.5x", "1x", "2x", "4x", "8x"])
    axes.set_xlim(right=lengths[-1] * 2)
    axes.set_xlabel("sequence length, tokens")
    axes.set_ylabel("speed-up")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Description": json.dumps(points)})


if __name__ == "__main__":
    draw(speed_ups(), Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGE)
