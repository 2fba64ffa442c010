"""``nsa bench report``: tables and plots made from rows alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from nsa.bench.rows import Row, measured
from nsa.bench.table import Cells, field, markdown, point, row_cells, table
from nsa.bench.targets import DENSE, Figures, figures, of_dense, outcomes
from nsa.errors import check
from nsa.files import new_file, replace_text
from nsa.ops._triton.tuning import table_name

_COLOURS = ("#4477aa", "#cc3311", "#228833", "#aa3377", "#ccbb44", "#66ccee", "#000000")
_DASHES = {"fwd": "--", "fwd_bwd": "-", "step": "-"}
_MODES = {"fwd": "forward", "fwd_bwd": "forward + backward", "step": "step"}

Value = Callable[[Row, Figures], float | None]
Points = list[tuple[int, float]]  # S and value, in order of S


def write_report(rows: Sequence[Row], folder: Path) -> Path:
    """Write ``report.md`` and its plots.

    Of several rows of one kind the newest counts; a ratio is made of rows of one run only.

    Args:
        rows: as ``nsa bench attention`` and ``nsa bench train`` wrote them.
        folder: made where it is missing.

    Returns:
        Path of the report.

    Raises:
        ValueError: no row has a time.
    """
    by, newest = figures(rows), newest_rows(rows)
    got = f"{len(rows)} rows without one"
    check(bool(newest), "nsa bench report", "the rows", "hold at least one figure", got)
    folder.mkdir(parents=True, exist_ok=True)
    parts = ["# Measured", _origins(newest)]
    for where in dict.fromkeys(map(_where, newest)):
        section = [row for row in newest if _where(row) == where]
        shape, choice, dtype, gpu = where
        parts.append(f"## {shape}, choice {choice}, {dtype}, {gpu}")
        for case in dict.fromkeys(row.case for row in section):
            here = [row for row in section if row.case == case]
            parts += [f"### {case}", _table(here, by)]
            parts += _plots(case, of_one_batch(here), by, folder, table_name("-".join(where)))
    parts += _targets(newest, by)
    failed = dict.fromkeys(f"- {point(row)}: {row.note}" for row in rows if row.ms_p50 is None)
    if failed:
        parts += ["## Without a figure", "\n".join(failed)]
    path = folder / "report.md"
    replace_text(path, "\n\n".join(parts) + "\n")
    return path


def _where(row: Row) -> tuple[str, str, str, str]:
    """What one section of the report is about."""
    choice = f"{row.choice}, document masks" if row.is_masked else row.choice
    return row.shape, choice, row.dtype, row.gpu or row.device


def newest_rows(rows: Iterable[Row]) -> list[Row]:
    """The newest row of each kind, in order of length."""
    best = {row.kind: row for row in sorted(measured(rows), key=lambda row: row.date)}
    return sorted(best.values(), key=lambda row: (row.case, row.provider, row.mode, row.seq_len))


def _origins(rows: Sequence[Row]) -> str:
    runs = {row.run_id: row for row in sorted(rows, key=lambda row: row.date)}
    cells: Cells[Row] = {
        "run": field("run_id"),
        "GPU": lambda row: row.gpu or row.device,
        "driver": field("driver"),
        "torch": field("torch"),
        "Triton": field("triton"),
        "commit": lambda row: (row.commit or "unknown")[:12] + " with changes" * bool(row.dirty),
        "date": field("date"),
    }
    return markdown(table(cells, list(runs.values())))


def _table(rows: Sequence[Row], by: Figures) -> str:
    cells = row_cells(by)
    del cells["case"], cells["choice"]
    ordered = sorted(rows, key=lambda row: (row.seq_len, row.batch, row.mode, row.ms_p50))
    return markdown(table(cells, ordered))


def of_one_batch(rows: Sequence[Row]) -> list[Row]:
    """Of each length the rows with most sequences: a plot over length shows one batch.

    Of models that generate it shows steps of one sequence.
    """
    if all(row.case == "decode.model" for row in rows):
        return [row for row in rows if (row.mode, row.batch) == ("step", 1)]
    most = {row.seq_len: row.batch for row in sorted(rows, key=lambda row: row.batch)}
    return [row for row in rows if row.batch == most[row.seq_len]]


# Plots over length of a case: name of the file, value, label.
_PLOTS: Mapping[str, Sequence[tuple[str, Value, str]]] = {
    "attention": (
        ("time", lambda row, by: row.ms_p50, "ms"),
        ("ratio", of_dense, f"time divided by {DENSE}"),
        ("memory", lambda row, by: row.peak_mib, "peak memory above inputs (MiB)"),
    ),
    "train": (
        ("train-speed", lambda row, by: row.tokens_per_s, "tokens/s"),
        ("train-ratio", of_dense, "time divided by the dense model's"),
        ("train-memory", lambda row, by: row.peak_mib, "peak memory (MiB)"),
        ("train-mfu", lambda row, by: row.mfu, "model FLOPs utilisation"),
    ),
    "decode.attention": (
        ("decode-time", lambda row, by: row.ms_p50, "ms a step"),
        ("decode-ratio", of_dense, "time divided by the fastest dense attention's"),
    ),
    "decode.model": (
        ("decode-model-time", lambda row, by: row.ms_p50, "ms a token"),
        ("decode-model-ratio", of_dense, "time divided by the dense model's"),
    ),
}


def _plots(case: str, rows: Sequence[Row], by: Figures, folder: Path, name: str) -> list[str]:
    parts = []
    for kind, value, label in _PLOTS.get(case, ()):
        lines = series(rows, by, value)
        if not lines:
            continue
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        providers = list(dict.fromkeys(provider for provider, _ in lines))
        for (provider, mode), points in lines.items():
            colour = _COLOURS[providers.index(provider) % len(_COLOURS)]
            style: dict[str, Any] = {"color": colour, "linestyle": _DASHES[mode], "marker": "."}
            axes.plot(*zip(*points, strict=True), label=f"{provider}, {_MODES[mode]}", **style)
        if value is of_dense:
            axes.axhline(1.0, color="#888888", linewidth=0.8)
        lengths = sorted({seq_len for points in lines.values() for seq_len, _ in points})
        axes.set(xlabel="length S (tokens)", ylabel=label, yscale="log")
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{seq_len:,}" for seq_len in lengths], rotation=45)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        file = folder / f"{kind}-{name}.png"
        with new_file(file) as temporary:
            figure.savefig(temporary, dpi=120, format="png")
        parts.append(f"![{label} over length]({file.name})")
    return parts


def series(rows: Iterable[Row], by: Figures, value: Value) -> dict[tuple[str, str], Points]:
    """Values over length, by provider and mode."""
    found: dict[tuple[str, str], Points] = {}
    for row in sorted(rows, key=lambda row: (row.provider, row.mode, row.seq_len)):
        number = value(row, by)
        if number is not None:
            found.setdefault((row.provider, row.mode), []).append((row.seq_len, number))
    return found


def _targets(rows: Sequence[Row], by: Figures) -> list[str]:
    found = [(row, outcome) for row in rows for outcome in outcomes(row, by)]
    missed = [f"- missed: {point(row)}: {outcome}" for row, outcome in found if not outcome.passed]
    reached = f"{len(found) - len(missed)} of {len(found)} targets are reached."
    return ["## Targets", "\n".join([reached, *missed])] if found else []
