"""``nsa bench report``: tables and plots from rows, and the regression guard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nsa.bench.rows import (
    STEP_SETTINGS,
    UNMASKED,
    Figures,
    Row,
    figures,
    is_dense,
    is_void,
    measured,
    newest_rows,
    of_dense,
    outcomes,
)
from nsa.bench.table import align, markdown, point, row_cells, table
from nsa.errors import check
from nsa.files import new_file, replace_text
from nsa.ops._triton.tuning import table_name

_DASHES = {"fwd": "--", "fwd_bwd": "-", "step": "-"}
Value = Callable[[Row, Figures], float | None]
# Plots over length: file name, value, label.
_PLOTS: Mapping[str, tuple[Value, str]] = {
    "time": (lambda row, by: row.ms_p50, "ms"),
    "ratio": (of_dense, "time divided by dense"),
    "memory": (lambda row, by: row.peak_mib, "peak memory (MiB)"),
    "mfu": (lambda row, by: row.mfu, "model FLOPs utilisation"),
}
_PLOTTED = ("attention", "train", "decode.attention", "decode.model")


def write_report(rows: Sequence[Row], folder: Path) -> Path:
    """Write ``report.md`` and its plots.

    The newest row of each kind is used; ratios are computed within one run.

    Args:
        rows: rows of any benchmark.
        folder: created if it does not exist.

    Returns:
        Path of the report.

    Raises:
        ValueError: no row has a time.
    """
    by, newest = figures(rows), newest_rows(rows)
    rule, got = "contain at least one time", f"{len(rows)} rows without one"
    check(bool(newest), "nsa bench report", "the rows", rule, got)
    folder.mkdir(parents=True, exist_ok=True)
    parts = ["# Measured", _origins(newest)]
    for where in dict.fromkeys(map(_section, newest)):
        section = [row for row in newest if _section(row) == where]
        shape, choice, dtype, gpu = where
        parts.append(f"## {shape}, choice {choice}, {dtype}, {gpu}")
        for case in dict.fromkeys(row.case for row in section):
            here = [row for row in section if row.case == case]
            parts += [f"### {case}", _table(here, by)]
            parts += _plots(case, of_one_batch(here), by, folder, table_name("-".join(where)))
    found = [(row, outcome) for row in newest for outcome in outcomes(row, by)]
    if found:
        missed = [f"- missed: {point(row)}: {text}" for row, (text, ok) in found if not ok]
        reached = f"{len(found) - len(missed)} of {len(found)} targets are reached."
        parts += ["## Targets", "\n".join([reached, *missed])]
    failed = dict.fromkeys(f"- {point(row)}: {row.note}" for row in rows if row.ms_p50 is None)
    if failed:
        parts += ["## Without a time", "\n".join(failed)]
    path = folder / "report.md"
    replace_text(path, "\n\n".join(parts) + "\n")
    return path


def _section(row: Row) -> tuple[str, str, str, str]:
    choice = f"{row.choice}, document masks" if row.is_masked else row.choice
    return row.shape, choice, row.dtype, row.gpu or row.device


def _origins(rows: Sequence[Row]) -> str:
    runs = {row.run_id: row for row in sorted(rows, key=lambda row: row.date)}
    lines = [("run", "GPU", "driver", "torch", "Triton", "commit", "date")]
    for row in runs.values():
        commit = (row.commit or "unknown")[:12] + " with changes" * bool(row.dirty)
        versions = (row.driver or "", row.torch or "", row.triton or "")
        lines.append((row.run_id, row.gpu or row.device, *versions, commit, row.date))
    return markdown(lines)


def _table(rows: Sequence[Row], by: Figures) -> str:
    hidden = ("case", "choice", "dtype")
    cells = {name: cell for name, cell in row_cells(by).items() if name not in hidden}
    ordered = sorted(rows, key=lambda row: (row.seq_len, row.batch, row.mode, row.ms_p50))
    return markdown(table(cells, ordered))


def of_one_batch(rows: Sequence[Row]) -> list[Row]:
    """Rows with most sequences at each length; for decode steps of models, one sequence."""
    if all(row.case == "decode.model" for row in rows):
        return [row for row in rows if (row.mode, row.batch) == ("step", 1)]
    most = {row.seq_len: row.batch for row in sorted(rows, key=lambda row: row.batch)}
    return [row for row in rows if row.batch == most[row.seq_len]]


def _plots(case: str, rows: Sequence[Row], by: Figures, folder: Path, name: str) -> list[str]:
    from matplotlib.figure import Figure

    parts = []
    for kind, (value, label) in _PLOTS.items() if case in _PLOTTED else ():
        lines = series(rows, by, value)
        if not lines:
            continue
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        providers = list(dict.fromkeys(provider for provider, _ in lines))
        for (provider, mode), points in lines.items():
            style: dict[str, Any] = {"color": f"C{providers.index(provider)}", "marker": "."}
            style["linestyle"] = _DASHES.get(mode, ":")
            axes.plot(*zip(*points, strict=True), label=f"{provider}, {mode}", **style)
        if value is of_dense:
            axes.axhline(1.0, color="#888888", linewidth=0.8)
        lengths = sorted({seq_len for points in lines.values() for seq_len, _ in points})
        axes.set(xlabel="length S (tokens)", ylabel=label, yscale="log")
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{seq_len:,}" for seq_len in lengths], rotation=45)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        file = folder / f"{case}-{kind}-{name}.png"
        with new_file(file) as temporary:
            figure.savefig(temporary, dpi=120, format="png")
        parts.append(f"![{label} over length]({file.name})")
    return parts


def series(
    rows: Iterable[Row], by: Figures, value: Value
) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Points ``(S, value)`` sorted by S, by provider and mode."""
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in sorted(rows, key=lambda row: (row.provider, row.mode, row.seq_len)):
        y = value(row, by)
        if y is not None:
            found.setdefault((row.provider, row.mode), []).append((row.seq_len, y))
    return found


# --- Guard
def guard(rows: Sequence[Row], baseline: Iterable[Row], tolerance: float) -> tuple[list[str], bool]:
    """Compare time and memory relative to dense attention with baseline rows.

    Args:
        rows: new rows.
        baseline: rows to compare with; the newest of each kind is used.
        tolerance: fraction by which a ratio may exceed the baseline's.

    Returns:
        Lines to print, and whether no ratio is worse and no row is wrong.

    Raises:
        ValueError: there are no common ratios.
    """
    known, new = _ratios(list(baseline)), _ratios(rows)
    both = [(*found, known[key][2]) for key, found in new.items() if key in known]
    wrong = [row for row in rows if row.correct is False]
    hint = "Measure dense attention in the same run, on a GPU that has baseline rows."
    rule, got = "have a ratio with a baseline", f"{len(new)} without one"
    check(bool(both or wrong), "nsa bench report", "the rows", rule, got, hint)
    worse = 0
    lines: list[tuple[str, ...]] = [("row", "ratio", "of dense", "baseline", "change", "")]
    for row, what, value, before in both:
        change = value / before - 1
        worse += change > tolerance
        shown = f"{value:.3f}", f"{before:.3f}", f"{change:+.1%}"
        verdict = "WORSE" if change > tolerance else "ok"
        lines.append((f"{point(row)}, B {row.batch}", what, *shown, verdict))
    texts = align(lines) + [f"wrong: {point(row)}: {row.note}" for row in wrong]
    texts.append(
        f"{len(both)} ratios compared, {worse} worse by more than {tolerance:.0%}, "
        f"{len(new) - len(both)} without a baseline, {len(wrong)} wrong rows"
    )
    return texts, not worse and not wrong


def _ratios(rows: Sequence[Row]) -> dict[tuple[object, ...], tuple[Row, str, float]]:
    """Newest ratio to dense of each kind, without void ratios and dense rows."""
    by, found = figures(rows), {}
    for row in sorted(measured(rows), key=lambda row: row.date):
        if row.provider == UNMASKED or is_dense(row) or is_void(row, by):
            continue
        settings = row.settings and tuple(row.settings.get(name) for name in STEP_SETTINGS)
        for what, name in (("time", "ms_p50"), ("memory", "peak_mib")):
            value = of_dense(row, by, name)
            if value is not None:
                found[what, settings, *row.kind] = row, what, value
    return found
