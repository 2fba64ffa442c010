"""Finished runs as they lie under ``benchmarks/quality``, and how they get there."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nsa.errors import check
from nsa.lm.recorded import load_selections
from nsa.train.load import load_config
from tools.accept.programs import say
from tools.evidence.experiments import NSA
from tools.evidence.rows import ROW
from tools.evidence.training import read_lines

Figures = dict[str, Any]


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
    def machine(self) -> str:
        """What it ran on."""
        row, names = self.row, ("driver", "torch", "triton")
        versions = [f"{name} {row[name]}" for name in names if row.get(name)]
        return ", ".join([row["gpu"], *versions, f"commit {row['commit'][:12]}", row["date"][:10]])

    def code(self, *files: str | Path) -> str:
        """Names of files, in Markdown; those without a path are its own."""
        paths = [file if isinstance(file, Path) else self.folder / file for file in files]
        return ", ".join(f"`{path.relative_to(self.rows).as_posix()}`" for path in paths)

    def metrics(self) -> list[Figures]:
        """Rows of metrics, oldest first; none without the file."""
        if self.metrics_file.suffix != ".gz":
            return read_lines(self.metrics_file)
        content = self.metrics_file.read_bytes() if self.metrics_file.exists() else b""
        return [json.loads(line) for line in gzip.decompress(content).splitlines()]

    def read(self, name: str) -> Figures:
        """A file of JSON."""
        return dict(json.loads((self.folder / name).read_text(encoding="utf-8")))

    def text(self, name: str) -> str:
        """A file of text; empty without it."""
        path = self.folder / name
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def inspected(self) -> list[int]:
        """Lengths of the texts that it was inspected with, in tokens."""
        found = self.folder.glob("inspect-*.json")
        return sorted(int(path.stem.partition("-")[2]) for path in found)

    def chosen(self, num_tokens: int) -> list[tuple[float, float]]:
        """What each layer selected where it had a choice: behind the first n blocks of a text.

        Args:
            num_tokens: of the text.

        Returns:
            Of each layer the share of forced blocks among those selected, and the share of the
            others that the query before had selected too. Nothing without the recorded file.
        """
        path, found = self.folder / f"selected-{num_tokens}.npz", []
        if not path.exists():
            return []
        layers, size = load_selections(path)
        pattern = load_config(self.folder / "config.yaml").model.nsa
        first = pattern.num_selected_blocks * size
        for layer in layers:
            blocks = layer.numpy()[first:]
            own = np.arange(first, first + len(blocks))[:, None, None] // size
            is_local = blocks > own - pattern.num_local_blocks
            is_forced = is_local | (blocks < pattern.num_init_blocks)
            is_kept = (blocks[1:, :, :, None] == blocks[:-1, :, None, :]).any(-1)
            found.append((float(is_forced.mean()), float(is_kept[~is_forced[1:]].mean())))
        return found


def arms_of(rows: Path, group: str) -> list[Arm]:
    """Runs of an experiment: a folder for each, or lines of a file as older ones have it.

    Args:
        rows: ``benchmarks/quality``.
        group: name of the experiment.
    """
    found, older = list[Arm](), rows / f"{group}.jsonl"
    for row in read_lines(older):
        name = row["model"].partition("-")[0]
        files = (rows / group / f"{name}-{what}" for what in ("metrics.jsonl", "test.npz"))
        found.append(Arm(rows, row, older, *files))
    for path in sorted((rows / group).glob(f"**/{ROW}")):
        files = (path.with_name(name) for name in ("metrics.jsonl.gz", "test.npz"))
        found.append(Arm(rows, json.loads(path.read_text(encoding="utf-8")), path, *files))
    return sorted(found, key=lambda arm: (arm.row["seed"], arm.row["model"] != NSA))


def take_folders(out: Path, rows: Path) -> None:
    """Copy the folders of finished experiments: ``200m-nsa-1337`` to ``200m/nsa-1337``.

    Args:
        out: folder of ``python -m tools.evidence run``.
        rows: ``benchmarks/quality``; folders of the same name there are replaced.
    """
    finished = sorted(path.parent for path in out.glob(f"*/{ROW}"))
    check(bool(finished), "take", "OUT", "hold a finished experiment", out)
    for folder in finished:
        target = rows / folder.name.replace("-", "/", 1)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder, target)
        row = json.loads((target / ROW).read_text(encoding="utf-8"))
        say("; ".join([str(target), *row["failed"], *(f"without {x}" for x in row["left_out"])]))
