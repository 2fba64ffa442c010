"""``nsa bench guard``: ratios to dense attention against those of committed rows from the same kind of GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from nsa.bench.rows import Row
from nsa.bench.table import align
from nsa.bench.targets import DENSE, UNMASKED, figures, is_void, of_dense
from nsa.errors import check

Key = tuple[object, ...]
# Settings of a training step on which its ratio to the dense twin depends.
_SETTINGS = ("micro_batch", "compile", "cuda_graphs", "checkpointing")
_FIELDS: tuple[tuple[str, Literal["ms_p50", "peak_mib"]], ...] = (("time", "ms_p50"), ("memory", "peak_mib"))
_HEADER = ("case", "provider", "shape", "choice", "mode", "S", "B", "what", "of dense", "baseline", "change", "")


@dataclass(frozen=True)
class Ratio:
    """One figure divided by dense attention's in the same run.

    Attributes:
        row: whose it is.
        what: ``time`` or ``memory``.
        value: the ratio; smaller is better.
    """

    row: Row
    what: str
    value: float

    @property
    def key(self) -> Key:
        """What has to be equal in the baseline."""
        row = self.row
        settings = None if row.settings is None else tuple(row.settings.get(name) for name in _SETTINGS)  # of attention none
        return (
            self.what, row.gpu, row.case, row.provider, row.shape, row.choice, row.seq_len, row.batch, row.dtype, row.mode,
            settings, row.is_masked,
        )  # fmt: skip


def ratios(rows: Sequence[Row]) -> Iterator[Ratio]:
    """Ratios of all rows but the dense ones themselves, oldest first; void ones are left out."""
    by = figures(rows)
    for row in sorted(rows, key=lambda row: row.date):
        if row.provider in ("dense", UNMASKED, DENSE) or row.ms_p50 is None or is_void(row, by):
            continue
        for what, field in _FIELDS:
            value = of_dense(row, by, field)
            if value is not None:
                yield Ratio(row, what, value)


def guard(rows: Sequence[Row], baseline: Iterable[Row], tolerance: float) -> tuple[list[str], bool]:
    """Compare; of several ratios of one kind the newest counts.

    Args:
        rows: new ones.
        baseline: those to hold them against.
        tolerance: share by which a ratio may be above the baseline's.

    Returns:
        Lines for a reader, and whether nothing is worse and no row is wrong.

    Raises:
        ValueError: nothing can be compared: a guard without a baseline says nothing.
    """
    known = {found.key: found for found in ratios(list(baseline))}
    new = {found.key: found for found in ratios(rows)}
    both = [(found, known[key]) for key, found in new.items() if key in known]
    hint = "Measure dense attention in the same run, on a GPU that has committed rows."
    wrong = [row for row in rows if row.correct is False]
    check(bool(both or wrong), "nsa bench guard", "the rows", "have a ratio with a baseline", f"{len(new)} without one", hint)
    lines, worse = [_HEADER], 0
    for found, before in both:
        change = found.value / before.value - 1
        worse += change > tolerance
        row = found.row
        lines.append((
            row.case, row.provider, row.shape, row.choice, row.mode, f"{row.seq_len:,}", str(row.batch), found.what,
            f"{found.value:.3f}", f"{before.value:.3f}", f"{change:+.1%}", "WORSE" if change > tolerance else "ok",
        ))  # fmt: skip
    texts = align(lines, words=(0, 1, 2, 3, 4, 7))
    texts += [f"wrong: {row.case} {row.provider} {row.mode} S {row.seq_len:,}: {row.note}" for row in wrong]
    texts.append(
        f"{len(both)} ratios compared, {worse} worse by more than {tolerance:.0%}, {len(new) - len(both)} without a baseline, "
        f"{len(wrong)} wrong rows"
    )
    return texts, not worse and not wrong
