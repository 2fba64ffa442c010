"""Finished runs as they lie under ``benchmarks/quality``, and how they get there."""

from __future__ import annotations

import gzip
import json
import math
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

from nsa.errors import check, fail
from nsa.train.measurements import load_measurement
from tools.accept.programs import say
from tools.evidence.experiments import CONFIGS, EXPERIMENTS
from tools.evidence.parts import Figures
from tools.evidence.rows import LIMIT_MIB, ROW
from tools.evidence.training import read_lines

# Raised for files that are damaged, or not those that a run leaves.
BROKEN = (ValueError, LookupError, TypeError, OSError, EOFError, zlib.error)
REQUIRED = {
    *("model", "seed", "lr", "steps", "tokens", "seq_len", "global_batch"),
    *("parameters", "gpu", "commit", "date"),
}
TOLERANCE = 1e-9  # relative, between figures that are the same


@dataclass(frozen=True)
class Arm:
    """A finished run.

    Attributes:
        rows: ``benchmarks/quality``, by which its files are named.
        row: its row.
        row_file: where that is.
        metrics_file: rows of metrics, plain or compressed.
        test_file: sums of the test text, ``nsa eval --save``.
    """

    rows: Path
    row: Figures
    row_file: Path
    metrics_file: Path
    test_file: Path

    @property
    def folder(self) -> Path:
        """Where its files lie."""
        return self.metrics_file.parent

    @property
    def figures(self) -> Figures:
        """Its row with a short commit, the day, and the name of its file."""
        commit, plus, changes = self.row["commit"].partition("+")
        return self.row | {
            "commit": f"{commit[:12]}{plus}{changes}",
            "day": self.row["date"][:10],
            "file": self.code(self.row_file),
        }

    def code(self, *files: str | Path) -> str:
        """Names of those files that there are, in Markdown; those without a path are its own."""
        paths = [file if isinstance(file, Path) else self.folder / file for file in files]
        found = [path.relative_to(self.rows).as_posix() for path in paths if path.exists()]
        return ", ".join(f"`{name}`" for name in found)

    def metrics(self) -> list[Figures]:
        """Rows of metrics, oldest first; none without the file."""
        if self.metrics_file.suffix != ".gz":
            return read_lines(self.metrics_file)
        content = self.metrics_file.read_bytes() if self.metrics_file.exists() else b""
        return [json.loads(line) for line in gzip.decompress(content).splitlines()]

    def read(self, name: str) -> Figures:
        """A file of JSON."""
        return read_json(self.folder / name)

    def text(self, name: str) -> str:
        """A file of text; empty without it."""
        path = self.folder / name
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def check(self) -> None:
        """Read what figures are made from, and compare those that are there twice.

        Raises:
            ValueError: they differ, or another of ``BROKEN``: a file is damaged.
        """
        missing = REQUIRED - {*self.row}
        check(not missing, "report", ROW, f"have {', '.join(sorted(missing))}", "none")
        known, model = ", ".join(CONFIGS), self.row["model"]
        check(model in CONFIGS, "report", ROW, f"have a model of {known}", model)
        self.metrics()
        read_lines(self.folder / "legs.jsonl")
        names = {"test": "test_bits_per_byte", "validation": "val_bits_per_byte"}
        stems = {path.stem for path in self.folder.glob("test-*.json")} | {*names}
        for stem in sorted(stems):
            found = self._bits_per_byte(stem, names.get(stem, ""))
            first = next(iter(found.values()), 0.0)
            agree = all(math.isclose(x, first, rel_tol=TOLERANCE) for x in found.values())
            check(agree, "report", " and ".join(found), "agree on bits per byte", found)

    def _bits_per_byte(self, stem: str, name: str) -> dict[str, float]:
        """The same loss from the saved sums, from what ``nsa eval`` printed, and from the row."""
        sums = self.test_file if stem == "test" else self.folder / f"{stem}.npz"
        printed, found = self.folder / f"{stem}.json", dict[str, float]()
        if sums.exists():
            measurement, _ = load_measurement("report", sums.name, sums)
            found[sums.name] = measurement.figures()["bits_per_byte"]
        if printed.exists():
            found[printed.name] = read_json(printed)["bits_per_byte"]
        if found and self.row.get(name) is not None:
            found[self.row_file.name] = self.row[name]
        return found


@dataclass(frozen=True)
class Group:
    """Runs of an experiment.

    Attributes:
        rows: ``benchmarks/quality``.
        name: of the experiment.
        arms: runs whose files can be read.
        broken: the others, and why, a sentence each.
    """

    rows: Path
    name: str
    arms: list[Arm]
    broken: list[str]

    def notes(self) -> list[str]:
        """What is missing: broken folders, failed commands, large files, trainings not done."""
        lines = [*self.broken]
        for arm in self.arms:
            failed, large = (arm.row.get(name) or [] for name in ("failed", "left_out"))
            where = arm.code(arm.row_file)
            lines += [f"Failed, from {where}: {'; '.join(failed)}."] * bool(failed)
            about = f"Left out, above {LIMIT_MIB} MiB, from {where}"
            lines += [f"{about}: {', '.join(f'`{name}`' for name in large)}."] * bool(large)
        planned = [folder_of(one.name) for one in EXPERIMENTS if one.group == self.name]
        missing = [f"`{place}`" for place in planned if not (self.rows / place / ROW).exists()]
        return lines + [f"Not done: {', '.join(missing)}."] * bool(missing and self)

    def __bool__(self) -> bool:
        return bool(self.arms or self.broken)


def read_group(rows: Path, name: str) -> Group:
    """Runs of an experiment: a folder for each, or lines of a file as older ones have it.

    Args:
        rows: ``benchmarks/quality``.
        name: of the experiment.
    """
    arms, broken = list[Arm](), list[str]()
    older, folder = rows / f"{name}.jsonl", rows / name

    def take_in(source: Path, row: Figures, metrics: Path, test: Path) -> None:
        arm = Arm(rows, row, source, metrics, test)
        arm.check()
        arms.append(arm)

    def note(path: Path, error: BaseException) -> None:
        broken.append(broken_line(rows, path, error))

    try:
        for row in read_lines(older):
            kind = row["model"].partition("-")[0]
            take_in(older, row, folder / f"{kind}-metrics.jsonl", folder / f"{kind}-test.npz")
    except BROKEN as error:
        note(older, error)
    for path in sorted(folder.glob(f"**/{ROW}")):
        files = (path.with_name(file) for file in ("metrics.jsonl.gz", "test.npz"))
        try:
            take_in(path, read_json(path), *files)
        except BROKEN as error:
            note(path.parent, error)
    arms.sort(key=lambda arm: (arm.row["seed"], [*CONFIGS].index(arm.row["model"])))
    return Group(rows, name, arms, broken)


def read_json(path: Path) -> Figures:
    """A file of JSON.

    Raises:
        UserError: it holds something else.
    """
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        fail("report", path.name, "hold an object of JSON", error)


def broken_line(rows: Path, path: Path, error: BaseException) -> str:
    """A sentence on what is left out of the page and why; it names no place of the machine."""
    reason = " ".join(str(error).replace(f"{rows}/", "").split())
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return f"Left out, broken: `{path.relative_to(rows).as_posix()}`: {kind}{reason.rstrip('.')}."


def folder_of(name: str) -> str:
    """Where an experiment of this name lies: ``200m-nsa-1337`` in ``200m/nsa-1337``."""
    return name.replace("-", "/", 1)


def take_folders(out: Path, rows: Path) -> None:
    """Copy the folders of finished experiments: ``200m-nsa-1337`` to ``200m/nsa-1337``.

    Args:
        out: folder of ``python -m tools.evidence run``.
        rows: ``benchmarks/quality``; folders of the same name there are replaced.
    """
    finished = sorted(path.parent for path in out.glob(f"*/{ROW}"))
    check(bool(finished), "take", "OUT", "hold a finished experiment", out)
    for folder in finished:
        target = rows / folder_of(folder.name)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder, target)
        row = json.loads((target / ROW).read_text(encoding="utf-8"))
        say("; ".join([str(target), *row["failed"], *(f"without {x}" for x in row["left_out"])]))
