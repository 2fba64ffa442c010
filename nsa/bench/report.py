"""``nsa bench report``: tables, plots and the regression guard; rows of a running benchmark."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from math import exp, log
from pathlib import Path
from statistics import linear_regression
from typing import Any

import torch

from nsa.bench.rows import (
    STEP_SETTINGS,
    Row,
    RowIndex,
    index_rows,
    is_dense,
    measured,
    newest_rows,
    of_dense,
    of_one_gpu,
    origin,
    outcomes,
    ratio,
)
from nsa.errors import check
from nsa.files import new_file, replace_text
from nsa.ops._triton.tuning import table_name

_KIND = ("case", "provider", "seq_len", "batch", "dtype", "choice", "mode")
_MEASURED = (
    "tokens_per_s",
    "mfu",
    "tflops_useful",
    "tbps_useful",
    "launches",
    "mib_read",
    "peak_mib",
    "reserved_mib",
    "communication_ms",
    "exposed_ms",
    "idle_ms",
    "recall",
    "loss_nats",
)
_DASHES = {"fwd": "--", "fwd_bwd": "-", "step": "-"}
_OF_DENSE = {"time of dense": "ms_p50", "MiB of dense": "peak_mib"}
# Plots over length: field and label, by the name in the file.
_PLOTS = {
    "time": ("ms_p50", "ms"),
    "memory": ("peak_mib", "peak memory (MiB)"),
    "mfu": ("mfu", "model FLOPs utilisation"),
}
_PLOTTED = ("attention", "train", "decode.attention", "decode.model")
_FITTED_FROM = 4096  # tokens; in shorter sequences attention is a small part
_SCALING = (
    f"Growth from {_FITTED_FROM:,} tokens on: exponents of the time of a sequence, and of memory "
    "for a single one, by least squares of logarithms. *Faster from*: length from which dense "
    "attention takes longer, interpolated. *Times dense*: speed-up at the longest length; where "
    "dense attention was not measured, its time for a token is extrapolated as a constant plus a "
    "multiple of the length."
)


class Results:
    """Rows of this process, printed and optionally appended to a JSONL file.

    Args:
        path: file to append to; None keeps the rows in memory.
        device: the measured device.
        commit: recorded if the checkout has no git.
    """

    def __init__(self, path: Path | None, device: torch.device, commit: str | None = None) -> None:
        self.device, self.rows = device, list[Row]()
        self._path, self._origin = path, origin(device, commit)
        here = self._origin
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()  # fails before the measurements, not after them
        changes = " with changes" if here["dirty"] else ""
        run = f"run {here['run_id']} on {here['gpu'] or device}, commit {here['commit']}{changes}"
        print(run, flush=True)

    def add(self, **values: Any) -> None:
        """Store, write and print a row; floats are rounded to six digits."""
        for name, value in values.items():
            if isinstance(value, float):
                values[name] = float(f"{value:.6g}")
        row = Row(**{**self._origin, **values})
        self.rows.append(row)
        name = f"  {row.case:22} {row.provider:14} {row.mode:8} S {row.seq_len:,} x {row.batch}"
        said = f"{_time(row)} ms, error {max(row.errors.values(), default=0.0):.2g}"
        if row.ms_p50 is None:
            said = f"{'WRONG: ' if row.correct is False else ''}{row.note}"
        print(f"{name}: {said}", flush=True)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")

    def finish(self) -> int:
        """Print the table; return the exit code: 1 if a row is wrong."""
        print("\n" + result_table(self.rows), flush=True)
        return int(any(row.correct is False for row in self.rows))


# --- Tables
def result_table(rows: Sequence[Row]) -> str:
    """Table of rows with a time, ratios and targets; then the reasons of rows without a time."""
    by, timed = index_rows(rows), measured(rows)
    lines = [markdown(table([cells(row, by) for row in timed]))] if timed else []
    failed = [f"without a time: {point(row)}: {row.note}" for row in rows if row.note]
    return "\n".join([*lines, *failed])


def point(row: Row) -> str:
    """Case, provider, shape, length and mode of a row."""
    return f"{row.case}, {row.provider}, {row.shape}, {row.choice}, S {row.seq_len:,}, {row.mode}"


def cells(row: Row, by: RowIndex) -> dict[str, str]:
    """Cells of a row by column; empty if a column does not apply.

    Args:
        row: a row with a time.
        by: rows that ratios are computed with.
    """
    several = row.num_gpus > 1
    ratios = {name: of_dense(row, by, field) for name, field in _OF_DENSE.items()}
    for name in ("nsa", "llama"):
        is_other = name != row.provider
        ratios[f"time of {name}"] = ratio(row, by, provider=name) if is_other else None
    ratios["speed of one GPU"] = of_one_gpu(row, by) if several else None
    texts = {name: "" if x is None else format(x, ".3g") for name, x in ratios.items()}
    settings = {"stages": row.stages_ms, "variant": row.variant, "changed": row.changed}
    for name, values in settings.items():
        texts[name] = ", ".join(f"{key} {value}" for key, value in (values or {}).items())
    return {
        **{name: _shown(getattr(row, name)) for name in _KIND},
        "GPUs": str(row.num_gpus) * several,
        "ms (p20 to p80)": _time(row),
        **{name: _shown(getattr(row, name)) for name in _MEASURED},
        **texts,
        "target": "; ".join(text for text, _ in outcomes(row, by)),
    }


def _shown(value: Any) -> str:
    """Text of a field: numbers with four digits, with all digits from 1,000."""
    if value is None or isinstance(value, str):
        return value or ""
    return format(value, ".4g" if abs(value) < 1000 else ",.0f")


def _time(row: Row) -> str:
    spread = "" if row.ms_p20 is None else f" ({row.ms_p20:.4g} to {row.ms_p80:.4g})"
    return f"{row.ms_p50:.4g}{spread}" if row.ms_p50 is not None else ""


def table(rows: Sequence[Mapping[str, str]]) -> list[tuple[str, ...]]:
    """Header and rows, without columns that are empty in every row."""
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    return [tuple(names), *(tuple(row[name] for name in names) for row in rows)]


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table with padded columns; the first line is the header."""
    columns = []
    for head, *rest in zip(*lines, strict=True):
        column = [head, "---", *rest]
        width = max(map(len, column))
        numeric = all(cell[:1] in "+-.0123456789" for cell in rest)
        columns.append([cell.rjust(width) if numeric else cell.ljust(width) for cell in column])
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*columns, strict=True))


# --- The report
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
    by, newest = index_rows(rows), newest_rows(rows)
    rule, got = "contain at least one time", f"{len(rows)} rows without one"
    check(bool(newest), "the rows", rule, got)
    folder.mkdir(parents=True, exist_ok=True)
    parts = ["# Measured", _origins(newest)]
    for where in dict.fromkeys(map(_section, newest)):
        section = [row for row in newest if _section(row) == where]
        shape, choice, dtype, gpu = where
        parts.append(f"## {shape}, choice {choice}, {dtype}, {gpu}")
        for case in dict.fromkeys(row.case for row in section):
            here = [row for row in section if row.case == case]
            parts += [f"### {case}", _table(here, by)]
            grown = scaling(of_one_batch(here)) if case in _PLOTTED else []
            parts += [_SCALING, markdown(table(grown))] if grown else []
            parts += _plots(case, of_one_batch(here), folder, table_name("-".join(where)))
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


def _table(rows: Sequence[Row], by: RowIndex) -> str:
    hidden = ("case", "choice", "dtype")
    ordered = sorted(rows, key=lambda row: (row.seq_len, row.batch, row.mode, row.ms_p50))
    return markdown(table([{**cells(row, by), **dict.fromkeys(hidden, "")} for row in ordered]))


def of_one_batch(rows: Sequence[Row]) -> list[Row]:
    """Rows with most sequences at each length; for decode steps of models, one sequence."""
    if all(row.case == "decode.model" for row in rows):
        return [row for row in rows if (row.mode, row.batch) == ("step", 1)]
    most = {row.seq_len: row.batch for row in sorted(rows, key=lambda row: row.batch)}
    return [row for row in rows if row.batch == most[row.seq_len]]


def _plots(case: str, rows: Sequence[Row], folder: Path, name: str) -> list[str]:
    from matplotlib.figure import Figure

    parts = []
    for kind, (field, label) in _PLOTS.items() if case in _PLOTTED else ():
        lines = series(rows, field)
        if not lines:
            continue
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        providers = list(dict.fromkeys(provider for provider, _ in lines))
        for (provider, mode), points in lines.items():
            style: dict[str, Any] = {"color": f"C{providers.index(provider)}", "marker": "."}
            style["linestyle"] = _DASHES.get(mode, ":")
            axes.plot(*zip(*points, strict=True), label=f"{provider}, {mode}", **style)
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


def series(rows: Iterable[Row], field: str) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Points of S and a field, sorted by S, by provider and mode."""
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in sorted(rows, key=lambda row: (row.provider, row.mode, row.seq_len)):
        y = getattr(row, field)
        if y is not None:
            found.setdefault((row.provider, row.mode), []).append((row.seq_len, y))
    return found


# --- Growth with the length
Points = dict[int, float]  # by length, tokens


def scaling(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Exponents of time and memory, and where a provider is faster than dense attention.

    Args:
        rows: rows of one case with a time, one batch for each length.
    """
    single = [replace(row, ms_p50=(row.ms_p50 or 0.0) / row.batch) for row in rows]
    memory = series([row for row in rows if row.batch == 1], "peak_mib")
    dense = sorted(filter(is_dense, single), key=lambda row: row.ms_p50 or 0.0, reverse=True)
    found = []
    for (provider, mode), points in series(single, "ms_p50").items():
        own = dict(points)
        fastest = {row.seq_len: row.ms_p50 or 0.0 for row in dense if row.mode == mode}
        others = {} if own.items() <= fastest.items() else fastest  # it is the dense attention
        cells = {
            "provider": provider,
            "mode": mode,
            "time": exponent(own),
            "memory": exponent(dict(memory.get((provider, mode), ()))),
            "faster from": crossover(own, others),
            "times dense": speedup(own, others, mode),
        }
        found += [cells] if cells["time"] else []
    return found


def exponent(points: Points) -> str:
    """Slope of the logarithms by least squares, empty with fewer than three lengths."""
    pairs = [(log(length), log(y)) for length, y in points.items() if length >= _FITTED_FROM]
    return f"{linear_regression(*zip(*pairs, strict=True)).slope:.2f}" if len(pairs) > 2 else ""


def crossover(own: Points, dense: Points) -> str:
    """Length from which ``own`` is below ``dense``, interpolated in logarithms."""
    logs = [(log(length), log(own[length] / dense[length])) for length in own if length in dense]
    slower = [k for k, (_, y) in enumerate(logs) if y > 0]
    if not logs:
        return ""
    if not slower or slower[-1] == len(logs) - 1:
        return f"{'more than' if slower else 'at most'} {exp(logs[-bool(slower)][0]):,.0f}"
    (x, y), (end, below) = logs[slower[-1] : slower[-1] + 2]
    return f"{exp(x + (end - x) * y / (y - below)):,.0f}"


def speedup(own: Points, dense: Points, mode: str) -> str:
    """Time of dense attention over ``own`` at its longest length, extrapolated if not measured.

    Steps of decoding are not extrapolated.
    """
    longest = max(own)
    fitted = {length: ms / length for length, ms in dense.items() if length >= _FITTED_FROM}
    if longest in dense:
        return f"{dense[longest] / own[longest]:.3g} at {longest:,}"
    if len(fitted) < 3 or mode == "step":
        return ""
    slope, constant = linear_regression([*fitted], [*fitted.values()])
    ms = longest * (constant + slope * longest)
    return f"{ms / own[longest]:.3g} at {longest:,} (extrapolated)"


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
    wrong = [row for row in rows if row.correct is False]
    hint = "Measure dense attention in the same run, on a GPU that has baseline rows."
    rule, got = "have a ratio with a baseline", f"{len(new)} without one"
    both = [key for key in new if key in known]
    check(bool(both or wrong), "the rows", rule, got, hint)
    worse = 0
    lines: list[tuple[str, ...]] = [("row", "ratio", "of dense", "baseline", "change", "")]
    for key in both:
        (row, value), (_, before) = new[key], known[key]
        change = value / before - 1
        worse += change > tolerance
        shown = f"{value:.3f}", f"{before:.3f}", f"{change:+.1%}"
        verdict = "WORSE" if change > tolerance else "ok"
        lines.append((f"{point(row)}, B {row.batch}", str(key[0]), *shown, verdict))
    texts = [markdown(lines)] + [f"wrong: {point(row)}: {row.note}" for row in wrong]
    texts.append(
        f"{len(both)} ratios compared, {worse} worse by more than {tolerance:.0%}, "
        f"{len(new) - len(both)} without a baseline, {len(wrong)} wrong rows"
    )
    return texts, not worse and not wrong


def _ratios(rows: Sequence[Row]) -> dict[tuple[object, ...], tuple[Row, float]]:
    """Newest ratio to dense of each kind, without dense rows."""
    by, found = index_rows(rows), {}
    for row in sorted(measured(rows), key=lambda row: row.date):
        if is_dense(row):
            continue
        settings = row.settings and tuple(row.settings.get(name) for name in STEP_SETTINGS)
        for what, name in (("time", "ms_p50"), ("memory", "peak_mib")):
            value = of_dense(row, by, name)
            if value is not None:
                found[what, settings, *row.kind] = row, value
    return found
