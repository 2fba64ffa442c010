"""``nsa bench tune``: measures candidate tiles of every kernel on this GPU and writes the table."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from io import StringIO
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

from nsa.bench.cases import CASES, Case, prepare
from nsa.bench.clock import synchronize, time_call
from nsa.bench.gate import Gate
from nsa.bench.implementations import (
    IMPLEMENTATIONS,
    Work,
    does_not_fit,
    own_kernels,
    refusals,
)
from nsa.bench.points import Point, Shape, batch_of, make_tensors
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

# A tile whose kernel needs more stack, bytes a thread, is not taken however fast it is.
MAX_STACK_BYTES = 256

# Kernels whose rows are scattered: descriptors cannot load them, their loops have no masked edges.
GATHERING = ("selected_attention_dkv", "selected_gather_fwd", "selected_gather_dkv")

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
        minutes: stop looking after this time, which the kernels share; None looks at everything.
        jobs: processes that compile candidates ahead.
    """

    shape: Shape
    seqs: Sequence[int]
    tokens: int | None = None
    dtype: torch.dtype = torch.bfloat16
    kernel: str = "*"
    out: Path | None = None
    minutes: float | None = None
    jobs: int = 0


@dataclass(frozen=True)
class Task:
    """A kernel to tune: its key, the first mode that runs it, its tile, and its lengths."""

    key: TileKey
    mode: str
    start: Tile
    seqs: tuple[int, ...]


def bench_tune(plan: TunePlan, device: torch.device) -> bool:
    """Tune, and write the table after each kernel.

    Returns:
        Whether every tile that went into the table passed the correctness gate.

    Raises:
        ValueError: there is no CUDA GPU, or no kernel fits the pattern.
    """
    where, hint = "nsa bench tune", "Tiles are measured on the GPU."
    check(device.type == "cuda", where, "this machine", "have a CUDA GPU", "none", hint)
    here = origin(device)
    assert here.gpu is not None
    path = plan.out or TABLES / f"{table_name(here.gpu)}.json"
    end = math.inf if plan.minutes is None else time.monotonic() + 60 * plan.minutes
    batches = {seq_len: batch_of(plan.shape, seq_len, plan.tokens) for seq_len in plan.seqs}
    points = [Point(plan.shape, *at, "random", plan.dtype, device) for at in batches.items()]
    cases, correct = [case for case in CASES.values() if case.name != "attention"], list[bool]()
    made = None
    if plan.jobs:  # spawned: a process with a CUDA context cannot be forked
        made = ProcessPoolExecutor(
            plan.jobs,
            get_context("spawn"),
            initializer=_begin,
            initargs=(points,),
        )
    with made or nullcontext() as pool:
        for case, case_end in zip(cases, shares(end, len(cases)), strict=True):
            bench = Bench(case, points)
            tasks = [task for task in bench.tasks() if fnmatch(task.key.kernel, plan.kernel)]
            for task, task_end in zip(tasks, shares(case_end, len(tasks)), strict=True):
                found = _tune(bench, task, pool, task_end)
                correct.append(found is not None)
                if found is not None:
                    what = f"{case.name} {task.mode}, {plan.shape.name} shape, by length"
                    write_tile(path, here, task.key, found[0], {**found[1], "measured": what})
    rule = "fit a kernel that looks up a tile"
    check(bool(correct), where, "--kernel", rule, repr(plan.kernel))
    return all(correct)


def shares(end: float, number: int) -> Iterator[float]:
    """When each of ``number`` tasks must end, for all to get the same share of the time left."""
    for left in range(number, 0, -1):
        now = time.monotonic()
        yield now + max(0.0, end - now) / left


def _tune(
    bench: Bench,
    task: Task,
    pool: ProcessPoolExecutor | None,
    end: float,
) -> tuple[Tile, dict[str, Any]] | None:
    """The best tile of one kernel and what the table says of it; None if its results are wrong."""
    where = ", ".join(f"{seq_len:,}" for seq_len in task.seqs)
    how = f"{bench.case.name} {task.mode} at S {where}"
    print(f"\n{task.key.kernel}, head size {task.key.head_size}, by {how}", flush=True)
    print(f"  in use: {task.start}", flush=True)

    def compile_ahead(tiles: Sequence[Tile]) -> bool:
        if pool is None or len(tiles) < 2:
            return False
        list(pool.map(partial(_compile, bench.case.name, task), tiles))
        return True

    def in_time() -> bool:
        return time.monotonic() < end

    best, times = descend(task.key, task.start, bench.measure(task), in_time, compile_ahead)
    fault = bench.fault(task, best)
    print(f"  best: {best}{f', but WRONG: {fault}' if fault else ''}", flush=True)
    stack = bench.stack_bytes.get((task.key, best))
    notes = {"ms": times} | ({"stack_bytes": stack} if stack else {})
    return None if fault else (best, notes)


def compiled_kernels() -> dict[str, int]:
    """Bytes of stack a thread of all kernels of this library that this process has loaded."""
    return {
        kernel.hash: 4 * kernel.n_spills
        for function in own_kernels().values()
        for cache in getattr(function, "device_caches", {}).values()
        for kernel in cache[0].values()
        if getattr(kernel, "module", None) is not None
    }


class Bench:
    """One operator at several lengths, ready to run with other tiles."""

    def __init__(self, case: Case, points: Sequence[Point]) -> None:
        self.case = case
        self.works: dict[int, Work] = {}
        self.gates: dict[int, Gate] = {}
        for kernel in own_kernels().values():
            # What is compiled from now on is of this operator.
            for found in ("device_caches", "_compiled"):
                getattr(kernel, found, {}).clear()
        for point in points:
            config = point.shape.config()
            problem = prepare(case, make_tensors(point, config), point, config, "triton")
            self.works[point.seq_len] = IMPLEMENTATIONS["nsa"].work(problem)
            self.gates[point.seq_len] = Gate(problem)
        self.device = points[0].device
        self.stack_bytes: dict[tuple[TileKey, Tile], int] = {}

    def tasks(self) -> list[Task]:
        """The kernels that look up tiles, each with the first mode that runs it and its lengths."""
        tasks: dict[TileKey, Task] = {}
        for mode, (seq_len, work) in product(self.case.modes, self.works.items()):

            def note(key: TileKey, tile: Tile, mode: str = mode, seq_len: int = seq_len) -> Tile:
                task = tasks.setdefault(key, Task(key, mode, tile, ()))
                if task.mode == mode and seq_len not in task.seqs:
                    tasks[key] = replace(task, seqs=(*task.seqs, seq_len))
                return tile

            with tiles_chosen_by(note):
                work.run(mode)
        return list(tasks.values())

    def run(self, task: Task, seqs: Sequence[int]) -> bool:
        """Run the operator once at each length; whether the tile that is chosen now fits."""
        try:
            # Of a kernel that needs too many registers Triton prints the code; the error says it.
            with redirect_stdout(StringIO()):
                for seq_len in seqs:
                    self.works[seq_len].run(task.mode)
            synchronize(self.device)
        except refusals() as error:
            if not (does_not_fit(error) or isinstance(error, torch.OutOfMemoryError)):
                raise
            return False
        return True

    def measure(self, task: Task) -> Measure:
        """Milliseconds by length with another tile for one kernel; None where it does not fit."""

        def times(tile: Tile) -> dict[int, float] | None:
            before = compiled_kernels()
            with chosen(task, tile):
                if not self.run(task, task.seqs):
                    return None
                # What is compiled at its first measurement is of this tile.
                now = compiled_kernels()
                fresh = [now[kernel] for kernel in now.keys() - before]
                stack = self.stack_bytes.setdefault((task.key, tile), max(fresh, default=0))
                if stack > MAX_STACK_BYTES:
                    return None
                return {seq_len: self._ms(task, seq_len) for seq_len in task.seqs}

        return times

    def _ms(self, task: Task, seq_len: int) -> float:
        call = partial(self.works[seq_len].run, task.mode)
        return round(time_call(call, self.device, BUDGET_MS).p50, 5)

    def fault(self, task: Task, tile: Tile) -> str | None:
        """Why the results with a tile are wrong, against fp64 at every length; None if right."""
        with chosen(task, tile):
            for seq_len in task.seqs:
                work, gate = self.works[seq_len], self.gates[seq_len]
                verdict = gate.check(gate.problem.named(work.run(task.mode), work.leaves))
                if not verdict.correct:
                    return f"S {seq_len}: {verdict.note}"
        return None


def chosen(task: Task, tile: Tile) -> AbstractContextManager[None]:
    """Within, the kernel of a task has this tile."""
    return tiles_chosen_by(lambda key, usual: tile if key == task.key else usual)


_points: list[Point] = []  # of a process that compiles ahead
_benches: dict[str, Bench] = {}


def _begin(points: Sequence[Point]) -> None:
    torch.cuda.set_device(points[0].device)
    _points.extend(points)


def _compile(case: str, task: Task, tile: Tile) -> None:
    """Run a candidate once ahead of its measurement: Triton keeps on disk what it compiled."""
    if case not in _benches:
        _benches.clear()  # one at a time: their tensors are large
        _benches[case] = Bench(CASES[case], _points)
    with chosen(task, tile):
        _benches[case].run(task, task.seqs[:1])


def changes(key: TileKey) -> list[list[dict[str, Any]]]:
    """Groups of changes to the best tile so far: sizes with warps, then option by option."""
    selects, gathers = key.kernel == "select_blocks", key.kernel in GATHERING
    keys_own = "_dkv" in key.kernel  # a program owns keys: dK and dV
    all_rows, all_keys = (32, 64, 128), ((8, 16, 32, 64) if selects else (32, 64, 128))
    sizes = [
        {"rows": rows, "keys": keys, "warps": warps}
        for rows, keys, warps in product(all_rows, all_keys, (4, 8))
        if rows >= 16 * warps or warps == 4 or key.head_size > 128
        if selects or fits_registers(key, rows, keys, warps)
    ]
    stages = ("stages", (1, 2, 3, 4))
    options: list[tuple[str, Sequence[Any]]] = [stages]
    options += [("tma", (False, True))] * (not selects and not gathers)
    options += [("keys_as_rows", (False, True))] * keys_own
    options += [("keep_queries", (False, True))] * selects
    options += [("edge_stages", (1, 2, 3))] * (keys_own and not gathers)
    options += [("max_registers", (None, 96, 128, 168, 200)), stages]
    return [sizes, *([{name: value} for value in values] for name, values in options)]


def fits_registers(key: TileKey, rows: int, keys: int, warps: int) -> bool:
    """Whether sums and score tiles (fp32) of an attention kernel leave a thread any registers."""
    size = 1 << (key.head_size - 1).bit_length()
    if "_dkv" in key.kernel:
        numbers = keys * 2 * size + 2 * rows * keys
    else:
        numbers = rows * size + (2 if "_dq" in key.kernel else 1) * rows * keys
    return numbers < 255 * 32 * warps


def descend(
    key: TileKey,
    start: Tile,
    measure: Measure,
    go_on: Callable[[], bool] = lambda: True,
    make_ready: Callable[[Sequence[Tile]], bool] = lambda _: False,
) -> tuple[Tile, Mapping[int, float]]:
    """The best tile that a walk over the groups of changes finds, and its times.

    A candidate is taken only if a second measurement beside the best one says the same.

    Args:
        key: the kernel.
        start: the tile it has now, which must fit.
        measure: milliseconds by length; None where a tile does not fit. The lengths count alike:
            the mean of the logarithms.
        go_on: whether there is time left.
        make_ready: told which tiles will be measured next; whether measuring them takes no long
            time any more, so that all are measured.
    """
    times = measure(start)
    assert times is not None, f"the tile in use does not fit: {start}"
    best, seen = start, {start}
    for group in changes(key):
        tiles = [best._replace(**change) for change in group]
        fresh = [tile for tile in tiles if tile not in seen and go_on()]
        ready = make_ready(fresh)
        for tile in fresh:
            if not ready and not go_on():
                break
            seen.add(tile)
            found = measure(tile)
            shown = ["does not fit"] if found is None else [f"{ms:.4f} ms" for ms in found.values()]
            print(f"  {'  '.join(shown)}  {tile}", flush=True)
            if found is None or gain(found, times) > GAIN:
                continue
            again, before = measure(tile), measure(best)
            if again is not None and before is not None and gain(again, before) <= GAIN:
                best, times = tile, again
    return best, times


def gain(found: Mapping[int, float], before: Mapping[int, float]) -> float:
    """Geometric mean over the lengths of the ratio of two measurements; below 1 is faster."""
    return geometric_mean(ms / before[seq_len] for seq_len, ms in found.items())


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
