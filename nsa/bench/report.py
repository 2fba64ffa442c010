"""``nsa bench report``: tables and plots from rows alone."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nsa.bench.rows import Row, measured
from nsa.bench.table import number, run_cells, verdicts
from nsa.bench.targets import DENSE, Figures, figures, is_void, of_dense, outcomes
from nsa.errors import check
from nsa.ops._triton.tuning import table_name

# Lengths from here on are fitted: below, launches and the window dominate.
FIT_FROM = 2048
_COLOURS = ("#4477aa", "#cc3311", "#228833", "#aa3377", "#ccbb44", "#66ccee", "#000000")
_DASHES = {"fwd": "--", "fwd_bwd": "-"}
_MODES = {"fwd": "forward", "fwd_bwd": "forward + backward"}

Series = dict[tuple[str, str], list[tuple[int, float]]]  # provider and mode -> (S, value)


def write_report(rows: Sequence[Row], folder: Path) -> Path:
    """Write ``report.md`` and its plots.

    Of several rows of one kind the newest counts; a ratio is made only of rows of one run.

    Args:
        rows: as ``nsa bench attention`` wrote them.
        folder: made where it is missing.

    Returns:
        Path of the report.

    Raises:
        ValueError: no row holds a figure.
    """
    by = figures(rows)
    newest = newest_rows(rows)
    check(bool(newest), "nsa bench report", "the rows", "hold at least one figure", f"{len(rows)} rows without one")
    folder.mkdir(parents=True, exist_ok=True)
    parts = ["# Measured", _origins(newest)]
    for where in dict.fromkeys(_where(row) for row in newest):
        chosen = [row for row in newest if _where(row) == where]
        shape, choice, dtype, gpu = where
        parts.append(f"## {shape}, choice {choice}, {dtype}, {gpu}")
        for case in dict.fromkeys(row.case for row in chosen):
            here = [row for row in chosen if row.case == case]
            parts.append(f"### {case}")
            if case == "train":
                parts += [_train_table(here, by), *_runs_table(here, by), *_kinds(here)]
            else:
                parts.append(_table(here, by))
            if case in _PLOTS:
                parts += _plots(_PLOTS[case], largest_batches(here), by, folder, table_name("-".join(where)))
            if case == "attention":
                parts += _growth(here, by)
    parts += _missed(newest, by)
    left = dict.fromkeys(
        f"- {row.case}, {row.provider}, {row.shape}, {row.choice}, S {row.seq_len:,}, {row.mode}: {row.note}"
        for row in rows
        if row.ms_p50 is None
    )
    if left:
        parts += ["## Without a figure", "\n".join(left)]
    path = folder / "report.md"
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return path


def _where(row: Row) -> tuple[str, str, str, str]:
    """What one section of the report is about."""
    choice = f"{row.choice}, document masks" if row.is_masked else row.choice
    return row.shape, choice, row.dtype, row.gpu or row.device


def newest_rows(rows: Iterable[Row]) -> list[Row]:
    """The newest row of each kind, in order of length."""
    best: dict[tuple[object, ...], Row] = {}
    for row in sorted(measured(rows), key=lambda row: row.date):
        point = (row.shape, row.choice, row.seq_len, row.batch, row.dtype, row.mode, row.is_masked)
        best[row.gpu, row.case, row.provider, *point] = row
    return sorted(best.values(), key=lambda row: (row.case, row.provider, row.mode, row.seq_len))


def _origins(rows: Sequence[Row]) -> str:
    lines = ["| run | GPU | driver | torch | Triton | commit | date |", "|---|---|---|---|---|---|---|"]
    seen = {row.run_id: row for row in rows}
    for row in sorted(seen.values(), key=lambda row: row.date):
        commit = f"{(row.commit or 'unknown')[:12]}{' with changes' * bool(row.dirty)}"
        lines.append(
            f"| {row.run_id} | {row.gpu or row.device} | {row.driver or ''} | {row.torch} | {row.triton} "
            f"| {commit} | {row.date} |"
        )
    return "\n".join(lines)


def _table(rows: Sequence[Row], by: Figures) -> str:
    approximate = any(row.recall is not None for row in rows)  # how much of the exact choice is found
    head = ["provider", "S", "B", "mode", "ms (p20 to p80)", "useful TFLOP/s", "useful TB/s", "peak MiB", "of dense"]
    varied = any(row.variant for row in rows)
    head += ["recall"] * approximate + ["differs"] * varied + ["target"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in sorted(rows, key=lambda row: (row.seq_len, row.mode, row.ms_p50 or 0)):
        cells = (
            row.provider, f"{row.seq_len:,}", str(row.batch), row.mode, _time(row), number(row.tflops_useful),
            number(row.tbps_useful), number(row.peak_mib, ",.0f"), number(of_dense(row, by)),
            *[number(row.recall, ".3f")] * approximate, *[_differs(row)] * varied, verdicts(row, by),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _differs(row: Row) -> str:
    return ", ".join(f"{name} {value}" for name, value in (row.variant or {}).items())


def _train_table(rows: Sequence[Row], by: Figures) -> str:
    lines = [
        "| provider | S | B | mode | step ms (p20 to p80) | tokens/s | MFU | allocated MiB | reserved MiB | time of dense "
        "| MiB of dense | loss | differs | target |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row.mode, row.seq_len, row.batch, row.provider)):
        time = of_dense(row, by)
        cells = (
            row.provider, f"{row.seq_len:,}", str(row.batch), row.mode, _time(row), number(row.tokens_per_s, ",.0f"),
            number(row.mfu), number(row.peak_mib, ",.0f"), number(row.reserved_mib, ",.0f"),
            number(time) + " void" * (time is not None and is_void(row, by)), number(of_dense(row, by, "peak_mib")),
            number(row.loss_nats, ".3f"), _differs(row), verdicts(row, by),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _runs_table(rows: Sequence[Row], by: Figures) -> list[str]:
    """What a run shows besides its speed; of rows that have it."""
    found = [row for row in rows if row.changed is not None and row.mode == "fwd_bwd"]
    if not found:
        return []
    head = (
        "provider",
        "S",
        "B",
        "time of dense-unmasked",
        "compilations after step 5",
        "slowest step of median",
        "host ms",
        "first step s",
        "changed in the configuration",
    )
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in sorted(found, key=lambda row: (row.seq_len, row.batch, row.provider)):
        changed = ", ".join(f"{name} {value}" for name, value in (row.changed or {}).items())
        cells = (row.provider, f"{row.seq_len:,}", str(row.batch), *run_cells(row, by), changed)
        lines.append(f"| {' | '.join(cells)} |")
    return ["How the runs went:", "\n".join(lines)]


# Kernels of a training step by name, the first that fits. Those of this library are called `.._kernel`, some with a branch.
_KINDS = {
    "selected branch": r"(selected_\w+|list|key|item|key_block|chunk)_kernel",
    "window and compressed branch": r"range_\w+_kernel\w*",
    "scores and choice": r"select_(approximate_)?kernel",
    "other kernels of this library": r"[a-z]\w*_kernel",
    "cuDNN attention": r".*cudnn.*",
    "matrix products": r".*(nvjet|gemm|cutlass|cublas).*",
    "made by the compiler": r"triton_.*",
    "the rest": r".*",
}


def _kinds(rows: Sequence[Row]) -> list[str]:
    """Where the kernels' time of a training step goes."""
    steps = [row for row in rows if row.mode == "fwd_bwd" and row.kernel_us]
    steps.sort(key=lambda row: (row.seq_len, row.batch, row.provider))
    if not steps:
        return []
    lines = [f"| provider | S | B | {' | '.join(_KINDS)} | all |", f"|{'---|' * (4 + len(_KINDS))}"]
    for row in steps:
        times = kernel_kinds(row.kernel_us)
        cells = (f"{time:.1f}" if time else "" for time in (*times.values(), sum(times.values())))
        lines.append(f"| {row.provider} | {row.seq_len:,} | {row.batch} | {' | '.join(cells)} |")
    return ["Kernels of one step under the profiler, ms:", "\n".join(lines)]


def kernel_kinds(kernel_us: Mapping[str, float]) -> dict[str, float]:
    """Milliseconds of kernels by kind."""
    found = dict.fromkeys(_KINDS, 0.0)
    for name, time in kernel_us.items():
        found[next(kind for kind, pattern in _KINDS.items() if re.fullmatch(pattern, name, re.IGNORECASE))] += time / 1000
    return found


def largest_batches(rows: Sequence[Row]) -> list[Row]:
    """Of each length the rows with most sequences: a plot over length shows one batch."""
    most = {row.seq_len: 0 for row in rows}
    for row in rows:
        most[row.seq_len] = max(most[row.seq_len], row.batch)
    return [row for row in rows if row.batch == most[row.seq_len]]


def _time(row: Row) -> str:
    return f"{row.ms_p50:.4g} ({row.ms_p20:.4g} to {row.ms_p80:.4g})"


# Plots over length of a case: name of the file, value, label, and where a line is drawn.
_PLOTS: dict[str, tuple[tuple[str, Callable[[Row, Figures], float | None], str, float | None], ...]] = {
    "attention": (
        ("time", lambda row, by: row.ms_p50, "ms", None),
        ("ratio", of_dense, f"time divided by {DENSE}", 1.0),
        ("memory", lambda row, by: row.peak_mib, "peak memory above inputs (MiB)", None),
    ),
    "train": (
        ("train-speed", lambda row, by: row.tokens_per_s, "tokens/s", None),
        ("train-ratio", of_dense, "time divided by the dense twin's", 1.0),
        ("train-memory", lambda row, by: row.peak_mib, "peak memory (MiB)", None),
        ("train-mfu", lambda row, by: row.mfu, "model FLOPs utilisation", None),
    ),
}


def _plots(
    wanted: Sequence[tuple[str, Callable[[Row, Figures], float | None], str, float | None]], rows: Sequence[Row], by: Figures,
    folder: Path, name: str,
) -> list[str]:  # fmt: skip
    parts = []
    for kind, value, label, line_at in wanted:
        values = series(rows, functools.partial(_with, value, by))
        if values:
            file = folder / f"{kind}-{name}.png"
            _plot(values, label, line_at).savefig(file, dpi=120)
            parts.append(f"![{label} over length]({file.name})")
    return parts


def _with(value: Callable[[Row, Figures], float | None], by: Figures, row: Row) -> float | None:
    return value(row, by)


def _growth(rows: Sequence[Row], by: Figures) -> list[str]:
    """Fitted exponents and crossover of whole attention."""
    ratios = series(rows, lambda row: of_dense(row, by))
    token_us = series(rows, lambda row: None if row.ms_p50 is None else 1000 * row.ms_p50 / (row.batch * row.seq_len))
    parts = []
    exponents = [
        f"| {provider} | {_MODES[mode]} | {exponent:.2f} |"
        for (provider, mode), points in token_us.items()
        if (exponent := fitted_exponent(points)) is not None
    ]
    if exponents:
        head = f"Time a token grows as S to the power of (least squares from S = {FIT_FROM:,} on; dense attention: 1):"
        parts += [head, "\n".join(["| provider | mode | exponent |", "|---|---|---|", *exponents])]
    for (provider, mode), points in ratios.items():
        found = crossover(points)
        if found is not None and provider != DENSE:
            parts.append(f"{provider} becomes faster than {DENSE} at S = {found:,.0f}, {_MODES[mode]}.")
    return parts


def series(rows: Iterable[Row], value: Callable[[Row], float | None]) -> Series:
    """Values over length, by provider and mode, in order of length."""
    found: Series = {}
    for row in sorted(rows, key=lambda row: (row.provider, row.mode, row.seq_len)):
        number = value(row)
        if number is not None:
            found.setdefault((row.provider, row.mode), []).append((row.seq_len, number))
    return found


def fitted_exponent(points: Sequence[tuple[int, float]]) -> float | None:
    """Least-squares slope of log value over log length from ``FIT_FROM`` on; None with fewer than two lengths."""
    logs = [(math.log(seq_len), math.log(value)) for seq_len, value in points if seq_len >= FIT_FROM and value > 0]
    if len(logs) < 2:
        return None
    mean_x, mean_y = (sum(column) / len(logs) for column in zip(*logs, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _ in logs)


def crossover(ratios: Sequence[tuple[int, float]]) -> float | None:
    """Length at which a ratio falls through 1, between two measured ones on logarithmic scales; None where it does not."""
    for (shorter, above), (longer, below) in itertools.pairwise(ratios):
        if above > 1 >= below:
            part = math.log(above) / (math.log(above) - math.log(below))
            return float(shorter * (longer / shorter) ** part)
    return None


def _missed(rows: Sequence[Row], by: Figures) -> list[str]:
    found = [(row, reached) for row in rows for reached in outcomes(row, by)]
    if not found:
        return []
    passed = sum(reached.passed for _, reached in found)
    lines = [f"{passed} of {len(found)} musts are reached."]
    lines += [
        f"- missed: {row.case}, {row.provider}, {row.shape}, {row.choice}, S {row.seq_len:,}, {row.mode}: {reached}"
        for row, reached in found
        if not reached.passed
    ]
    return ["## Targets", "\n".join(lines)]


def _plot(values: Series, label: str, line_at: float | None) -> Figure:
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    providers = list(dict.fromkeys(provider for provider, _ in values))
    for (provider, mode), points in values.items():
        lengths, numbers = zip(*points, strict=True)
        colour = _COLOURS[providers.index(provider) % len(_COLOURS)]
        axes.plot(
            lengths, numbers, _DASHES[mode], color=colour, marker="o", markersize=3, label=f"{provider}, {_MODES[mode]}"
        )  # fmt: skip
    if line_at is not None:
        axes.axhline(line_at, color="#888888", linewidth=0.8)
    _scales(axes, [seq_len for points in values.values() for seq_len, _ in points])
    axes.set_xlabel("length S (tokens)")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def _scales(axes: Axes, lengths: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted(set(lengths)), [f"{seq_len:,}" for seq_len in sorted(set(lengths))], rotation=45)
