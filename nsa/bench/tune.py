"""``nsa bench tune``: candidate tiles of every kernel, measured on this GPU, and the table that comes of it."""

from __future__ import annotations

import fnmatch
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nsa.bench.cases import CASES, MODES, Case, prepare
from nsa.bench.clock import time_call
from nsa.bench.gate import Gate
from nsa.bench.points import Point, Shape, batch_of, make_tensors
from nsa.bench.providers import PROVIDERS, Work
from nsa.bench.rows import Origin, origin
from nsa.errors import check
from nsa.ops._triton.tuning import (
    TABLES,
    Tile,
    TileKey,
    TileTable,
    load_table,
    table_name,
    table_text,
    tiles_chosen_by,
)

# A candidate must be faster by this factor: less is noise, and a table should not change for it.
GAIN = 0.985
BUDGET_MS = 60.0

Measure = Callable[[Tile], Mapping[int, float] | None]


@dataclass(frozen=True)
class TunePlan:
    """What ``nsa bench tune`` is asked to do.

    Attributes:
        shape: heads; its head size is the one tuned for.
        seqs: lengths that count alike.
        tokens: tokens of all sequences together; None takes those of the shape.
        dtype: of the inputs.
        kernel: pattern of kernel names.
        out: table to write; None takes that of this GPU inside the package.
        minutes: stop looking after this time; None looks at everything.
    """

    shape: Shape
    seqs: Sequence[int]
    tokens: int | None = None
    dtype: torch.dtype = torch.bfloat16
    kernel: str = "*"
    out: Path | None = None
    minutes: float | None = None


@dataclass(frozen=True)
class Task:
    """A kernel to tune: what it is looked up by, and the shortest thing that runs it."""

    key: TileKey
    case: Case
    mode: str
    start: Tile


def bench_tune(plan: TunePlan, device: torch.device) -> bool:
    """Tune, and write the table after each kernel.

    Returns:
        Whether every tile that went into the table passed the correctness gate.

    Raises:
        ValueError: there is no CUDA GPU, or no kernel fits the pattern.
    """
    check(device.type == "cuda", "nsa bench tune", "this machine", "have a CUDA GPU", "none", "Tiles are measured on the GPU.")
    here = origin(device)
    assert here.gpu is not None
    path = plan.out or TABLES / f"{table_name(here.gpu)}.json"
    end = math.inf if plan.minutes is None else time.monotonic() + 60 * plan.minutes
    points = [
        Point(plan.shape, seq_len, batch_of(plan.shape, seq_len, plan.tokens), "random", plan.dtype, device)
        for seq_len in plan.seqs
    ]
    found, correct = 0, True
    for case in CASES.values():
        if case.name == "attention":
            continue
        bench = Bench(case, points)
        for task in bench.tasks():
            if not fnmatch.fnmatch(task.key.kernel, plan.kernel):
                continue
            found += 1
            print(f"\n{task.key.kernel}, head size {task.key.head_size}, by {case.name} {task.mode}: {task.start}", flush=True)
            best, times = descend(task.key, task.start, bench.measure(task), lambda: time.monotonic() < end)
            fault = bench.fault(task, best)
            print(f"  chosen: {best}{f', but WRONG: {fault}' if fault else ''}", flush=True)
            correct &= fault is None
            if fault is None:
                note = {"ms": times, "measured": f"{case.name} {task.mode}, {plan.shape.name} shape, by length"}
                write_tile(path, here, task.key, best, note)
    check(found > 0, "nsa bench tune", "--kernel", "fit a kernel that looks up a tile", repr(plan.kernel))
    return correct


class Bench:
    """One operator at several lengths, ready to run with other tiles."""

    def __init__(self, case: Case, points: Sequence[Point]) -> None:
        self.case = case
        self.works: dict[int, Work] = {}
        self.gates: dict[int, Gate] = {}
        for point in points:
            config = point.shape.config()
            tensors = prepare(case, make_tensors(point, config), point, config, "triton")
            self.works[point.seq_len] = PROVIDERS["nsa"].work(case, tensors, point, config)
            self.gates[point.seq_len] = Gate(case, tensors, point, config)
        self.device = points[0].device

    def tasks(self) -> list[Task]:
        """The kernels that look tiles up, each with the first mode that runs it."""
        tasks: dict[TileKey, Task] = {}
        for mode in (mode for mode in MODES if mode in self.case.modes):

            def note(key: TileKey, tile: Tile, mode: str = mode) -> Tile:
                tasks.setdefault(key, Task(key, self.case, mode, tile))
                return tile

            with tiles_chosen_by(note):
                next(iter(self.works.values())).run(mode)
        return list(tasks.values())

    def measure(self, task: Task) -> Measure:
        """Milliseconds of the operator by length, with another tile for one kernel; None where the tile does not fit."""

        def times(tile: Tile) -> dict[int, float] | None:
            with tiles_chosen_by(lambda key, usual: tile if key == task.key else usual):
                try:
                    return {
                        seq_len: round(time_call(lambda: work.run(task.mode), self.device, BUDGET_MS).p50, 5)  # noqa: B023
                        for seq_len, work in self.works.items()
                    }
                except _unfit_errors() as error:
                    if not _does_not_fit(error):
                        raise
                    return None

        return times

    def fault(self, task: Task, tile: Tile) -> str | None:
        """Why the results with a tile are wrong, against fp64 at every length; None if they are right."""
        with tiles_chosen_by(lambda key, usual: tile if key == task.key else usual):
            for seq_len, work in self.works.items():
                results = work.run(task.mode)
                names = [*self.case.outputs, *(f"d{name}" for name in work.leaves)]
                verdict = self.gates[seq_len].check(dict(zip(names, results, strict=False)))
                if not verdict.correct:
                    return f"S {seq_len}: {verdict.note}"
        return None


def _unfit_errors() -> tuple[type[Exception], ...]:
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    return OutOfResources, PTXASError, CompilationError, RuntimeError


def _does_not_fit(error: Exception) -> bool:
    """Whether an error is about this tile; a fault of the device or a bug is not."""
    return not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError) or "PassManager" in str(error)


def candidates(key: TileKey, tile: Tile) -> Generator[list[Tile], Tile, None]:
    """Groups of tiles to try, each from the best one so far, which is sent back: sizes with warps, then option by option.

    Yields:
        Tiles other than the best one.
    """
    choice = key.kernel == "select_blocks"
    all_rows, all_keys = (32, 64, 128), ((8, 16, 32, 64) if choice else (32, 64, 128))
    sizes = [
        (rows, keys, warps) for rows in all_rows for keys in all_keys for warps in (4, 8) if rows >= 16 * warps or warps == 4
    ]
    groups: list[Callable[[Tile], list[Tile]]] = [
        lambda best: [replace(best, rows=rows, keys=keys, warps=warps) for rows, keys, warps in sizes],
        lambda best: [replace(best, stages=stages) for stages in (1, 2, 3, 4)],
        lambda best: [replace(best, tma=not best.tma)],
        lambda best: [replace(best, keys_as_rows=not best.keys_as_rows), replace(best, keep_queries=not best.keep_queries)],
        lambda best: [replace(best, edge_stages=stages) for stages in (1, 2, 3)],
        lambda best: [replace(best, max_registers=most) for most in (None, 96, 128, 168)],
        lambda best: [replace(best, stages=stages) for stages in (1, 2, 3, 4)],
    ]
    best = tile
    for group in groups:
        best = yield [other for other in group(best) if other != best]


def descend(
    key: TileKey, start: Tile, measure: Measure, go_on: Callable[[], bool] = lambda: True
) -> tuple[Tile, Mapping[int, float]]:
    """The best tile that a walk over the groups of candidates finds.

    Args:
        key: the kernel.
        start: the tile it has now, which must fit.
        measure: milliseconds by length; None where a tile does not fit. The lengths count alike: the mean of the logarithms.
        go_on: whether there is time left.

    Returns:
        The tile and its times. A candidate is taken only if a second measurement beside the best one says the same.
    """
    times = measure(start)
    assert times is not None, f"the tile in use does not fit: {start}"
    best, seen = start, {start}
    walk = candidates(key, start)
    group: list[Tile] | None = next(walk)
    while group is not None:
        for tile in group:
            if tile in seen or not go_on():
                continue
            seen.add(tile)
            found = measure(tile)
            print(f"  {_said(found)}  {tile}", flush=True)
            if found is None or gain(found, times) > GAIN:
                continue
            again, before = measure(tile), measure(best)
            if again is not None and before is not None and gain(again, before) <= GAIN:
                best, times = tile, again
        try:
            group = walk.send(best)
        except StopIteration:
            group = None
    return best, times


def gain(found: Mapping[int, float], before: Mapping[int, float]) -> float:
    """Geometric mean over the lengths of the ratio of two measurements; below 1 is faster."""
    return math.exp(sum(math.log(found[seq_len] / before[seq_len]) for seq_len in found) / len(found))


def _said(times: Mapping[int, float] | None) -> str:
    return "does not fit" if times is None else "  ".join(f"{ms:.4f}" for ms in times.values()) + " ms"


def write_tile(path: Path, here: Origin, key: TileKey, tile: Tile, note: Mapping[str, Any]) -> None:
    """Put one row into a table, which is made where it is missing; the others stay as they are."""
    assert here.gpu is not None
    table = load_table(path) if path.is_file() else TileTable(here.gpu, {}, {})
    check(table.gpu == here.gpu, "nsa bench tune", "--out", f"be a table of {here.gpu}", table.gpu)
    notes = {**note, "torch": here.torch, "triton": here.triton, "date": here.date[:10]}
    table = TileTable(table.gpu, {**table.rows, key: tile}, {**table.notes, key: notes})
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(table_text(table), encoding="utf-8")
    temporary.replace(path)
