"""``nsa bench guard``: ratios to dense attention against those of committed rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nsa.bench.rows import Row, measured
from nsa.bench.table import align, point, row_cells
from nsa.bench.targets import UNMASKED, Field, figures, is_dense, is_void, of_dense
from nsa.errors import check

# Settings of a training step on which its ratio to the dense model depends.
_SETTINGS = ("micro_batch", "compile", "cuda_graphs", "checkpointing")
_FIELDS: Mapping[str, Field] = {"time": "ms_p50", "memory": "peak_mib"}


def ratios(rows: Sequence[Row]) -> dict[tuple[object, ...], tuple[Row, str, float]]:
    """Row, ``time`` or ``memory``, and the ratio to dense attention in the same run: the newest.

    By what has to be equal in the baseline. Void ratios and those of dense attention are left out.
    """
    by, found = figures(rows), {}
    for row in sorted(measured(rows), key=lambda row: row.date):
        if row.provider == UNMASKED or is_dense(row) or is_void(row, by):
            continue
        settings = row.settings and tuple(row.settings.get(name) for name in _SETTINGS)
        for what, field in _FIELDS.items():
            value = of_dense(row, by, field)
            if value is not None:
                found[what, settings, *row.kind] = row, what, value
    return found


def guard(rows: Sequence[Row], baseline: Iterable[Row], tolerance: float) -> tuple[list[str], bool]:
    """Compare; of several ratios of one kind the newest counts.

    Args:
        rows: new ones.
        baseline: those to compare them with.
        tolerance: share by which a ratio may be above the baseline's.

    Returns:
        Lines for a reader, and whether nothing is worse and no row is wrong.

    Raises:
        ValueError: nothing can be compared: a guard without a baseline says nothing.
    """
    known, new = ratios(list(baseline)), ratios(rows)
    both = [(*found, known[key][2]) for key, found in new.items() if key in known]
    wrong = [row for row in rows if row.correct is False]
    hint = "Measure dense attention in the same run, on a GPU that has committed rows."
    rule, got = "have a ratio with a baseline", f"{len(new)} without one"
    check(bool(both or wrong), "nsa bench guard", "the rows", rule, got, hint)

    names, cells, worse = ("case", "provider", "choice", "mode", "S", "B"), row_cells({}), 0
    lines: list[tuple[str, ...]] = [(*names, "shape", "what", "of dense", "baseline", "change", "")]
    for row, what, ratio, before in both:
        change = ratio / before - 1
        worse += change > tolerance
        shown = f"{ratio:.3f}", f"{before:.3f}", f"{change:+.1%}"
        kind = [cells[name](row) for name in names]
        lines.append((*kind, row.shape, what, *shown, "WORSE" if change > tolerance else "ok"))
    texts = align(lines) + [f"wrong: {point(row)}: {row.note}" for row in wrong]
    texts.append(
        f"{len(both)} ratios compared, {worse} worse by more than {tolerance:.0%}, "
        f"{len(new) - len(both)} without a baseline, {len(wrong)} wrong rows"
    )
    return texts, not worse and not wrong
