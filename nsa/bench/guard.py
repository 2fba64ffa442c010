"""``nsa bench guard``: ratios to dense attention beside those of committed rows of the same GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nsa.bench.rows import Row
from nsa.bench.table import align, point, row_cells
from nsa.bench.targets import DENSE, UNMASKED, Field, figures, is_void, of_dense
from nsa.errors import check

# Settings of a training step on which its ratio to the dense model depends.
_SETTINGS = ("micro_batch", "compile", "cuda_graphs", "checkpointing")
_FIELDS: Mapping[str, Field] = {"time": "ms_p50", "memory": "peak_mib"}


@dataclass(frozen=True)
class Ratio:
    """One figure divided by dense attention's in the same run; smaller is better.

    Attributes:
        row: whose it is.
        what: ``time`` or ``memory``.
        value: the ratio.
    """

    row: Row
    what: str
    value: float

    @property
    def key(self) -> tuple[object, ...]:
        """What has to be equal in the baseline; of attention there are no settings."""
        row = self.row
        names = ("gpu", "case", "provider", "shape", "choice", "seq_len", "batch", "dtype", "mode")
        settings = row.settings and tuple(row.settings.get(name) for name in _SETTINGS)
        return self.what, *(getattr(row, name) for name in names), settings, row.is_masked


def ratios(rows: Sequence[Row]) -> Iterator[Ratio]:
    """Ratios of all rows but those of dense attention, oldest first; void ones are left out."""
    by = figures(rows)
    for row in sorted(rows, key=lambda row: row.date):
        if row.provider in ("dense", UNMASKED, DENSE) or row.ms_p50 is None or is_void(row, by):
            continue
        for what, field in _FIELDS.items():
            value = of_dense(row, by, field)
            if value is not None:
                yield Ratio(row, what, value)


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
    known = {found.key: found.value for found in ratios(list(baseline))}
    new = {found.key: found for found in ratios(rows)}
    both = [found for key, found in new.items() if key in known]
    wrong = [row for row in rows if row.correct is False]
    hint = "Measure dense attention in the same run, on a GPU that has committed rows."
    rule, got = "have a ratio with a baseline", f"{len(new)} without one"
    check(bool(both or wrong), "nsa bench guard", "the rows", rule, got, hint)

    names, cells, worse = ("case", "provider", "choice", "mode", "S", "B"), row_cells({}), 0
    lines: list[tuple[str, ...]] = [(*names, "shape", "what", "of dense", "baseline", "change", "")]
    for found in both:
        row, before = found.row, known[found.key]
        change = found.value / before - 1
        worse += change > tolerance
        verdict = "WORSE" if change > tolerance else "ok"
        shown = f"{found.value:.3f}", f"{before:.3f}", f"{change:+.1%}"
        kind = [cells[name](row) for name in names]
        lines.append((*kind, row.shape, found.what, *shown, verdict))
    texts = align(lines) + [f"wrong: {point(row)}: {row.note}" for row in wrong]
    texts.append(
        f"{len(both)} ratios compared, {worse} worse by more than {tolerance:.0%}, "
        f"{len(new) - len(both)} without a baseline, {len(wrong)} wrong rows"
    )
    return texts, not worse and not wrong
