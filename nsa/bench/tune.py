"""``nsa bench tune``: candidate tiles of every kernel, measured on this GPU, and the table that comes of it."""

from __future__ import annotations

import fnmatch
import math
import multiprocessing
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from nsa.bench.cases import CASES, Case, prepare
from nsa.bench.clock import time_call
from nsa.bench.gate import Gate
from nsa.bench.points import Point, Shape, batch_of, make_tensors
from nsa.bench.providers import PROVIDERS, Work, does_not_fit, own_kernels, refusals
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

# Kernels whose rows lie all over: descriptors cannot load them, and their loops have no masked edges of their own.
GATHERING = ("selected_attention_dkv", "selected_gather_fwd", "selected_gather_dkv")

Measure = Callable[[Tile], Mapping[int, float] | None]
Trials = dict[Tile, Mapping[int, float]]


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
    """A kernel to tune: what it is looked up by, the shortest thing that runs it, and the lengths at which that does."""

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
    check(device.type == "cuda", "nsa bench tune", "this machine", "have a CUDA GPU", "none", "Tiles are measured on the GPU.")
    here = origin(device)
    assert here.gpu is not None
    path = plan.out or TABLES / f"{table_name(here.gpu)}.json"
    end = math.inf if plan.minutes is None else time.monotonic() + 60 * plan.minutes
    points = [
        Point(plan.shape, seq_len, batch_of(plan.shape, seq_len, plan.tokens), "random", plan.dtype, device)
        for seq_len in plan.seqs
    ]
    correct = list[bool]()
    cases = [case for case in CASES.values() if case.name != "attention"]
    with Compilers(points, plan.jobs) as compilers:
        for case, case_end in zip(cases, shares(end, len(cases)), strict=True):
            bench = Bench(case, points)
            tasks = [task for task in bench.tasks() if fnmatch.fnmatch(task.key.kernel, plan.kernel)]
            for task, task_end in zip(tasks, shares(case_end, len(tasks)), strict=True):
                found = _tune(bench, task, compilers, task_end)
                correct.append(found is not None)
                if found is not None:
                    note = {**found[1], "measured": f"{case.name} {task.mode}, {plan.shape.name} shape, by length"}
                    write_tile(path, here, task.key, found[0], note)
    check(bool(correct), "nsa bench tune", "--kernel", "fit a kernel that looks up a tile", repr(plan.kernel))
    return all(correct)


def shares(end: float, number: int) -> Iterator[float]:
    """When each of some things that are done one after the other must end, for all to get the same of the time that is left."""
    for left in range(number, 0, -1):
        now = time.monotonic()
        yield now + max(0.0, end - now) / left


def _tune(bench: Bench, task: Task, compilers: Compilers, end: float) -> tuple[Tile, Mapping[str, Any]] | None:
    """The best tile of one kernel and what the table says of it; None if its results are wrong."""
    where = ", ".join(f"{seq_len:,}" for seq_len in task.seqs)
    print(f"\n{task.key.kernel}, head size {task.key.head_size}, by {bench.case.name} {task.mode} at S {where}", flush=True)
    print(f"  in use: {task.start}", flush=True)
    best, trials = descend(
        task.key, task.start, bench.measure(task), lambda: time.monotonic() < end, partial(compilers.compile, bench.case, task)
    )
    fault = bench.fault(task, best)
    print(f"  chosen: {best}{f', but WRONG: {fault}' if fault else ''}", flush=True)
    return None if fault else (best, {"ms": trials[best], **without_stack(best, trials, bench.stacks(task))})


def without_stack(best: Tile, trials: Trials, stacks: Mapping[Tile, int]) -> dict[str, Any]:
    """What a tile that spills to the stack must show: its bytes a thread, and the best times that need none."""
    if not stacks.get(best):
        return {}
    plain = [times for tile, times in trials.items() if stacks.get(tile) == 0]
    fastest = min(plain, key=lambda times: gain(times, trials[best])) if plain else None
    return {"stack_bytes": stacks[best], "ms_without_stack": fastest}


class Bench:
    """One operator at several lengths, ready to run with other tiles."""

    def __init__(self, case: Case, points: Sequence[Point]) -> None:
        self.case = case
        self.works: dict[int, Work] = {}
        self.gates: dict[int, Gate] = {}
        for kernel in own_kernels().values():
            getattr(kernel, "device_caches", {}).clear()  # what is compiled from now on is of this operator
        for point in points:
            config = point.shape.config()
            tensors = prepare(case, make_tensors(point, config), point, config, "triton")
            self.works[point.seq_len] = PROVIDERS["nsa"].work(case, tensors, point, config)
            self.gates[point.seq_len] = Gate(case, tensors, point, config)
        self.device = points[0].device
        self._of_tile: dict[tuple[TileKey, Tile], set[Compiled]] = {}
        self._at_first: set[Compiled] = set()

    def tasks(self) -> list[Task]:
        """The kernels that look tiles up, each with the first mode that runs it; a long sequence may run others."""
        tasks: dict[TileKey, Task] = {}
        for mode in self.case.modes:
            for seq_len, work in self.works.items():

                def note(key: TileKey, tile: Tile, mode: str = mode, seq_len: int = seq_len) -> Tile:
                    task = tasks.setdefault(key, Task(key, mode, tile, ()))
                    if task.mode == mode and seq_len not in task.seqs:
                        tasks[key] = replace(task, seqs=(*task.seqs, seq_len))
                    return tile

                with tiles_chosen_by(note):
                    work.run(mode)
        self._at_first = compiled_kernels()
        return list(tasks.values())

    def measure(self, task: Task) -> Measure:
        """Milliseconds of the operator by length, with another tile for one kernel; None where the tile does not fit."""

        def times(tile: Tile) -> dict[int, float] | None:
            before = compiled_kernels()
            with tiles_chosen_by(lambda key, usual: tile if key == task.key else usual):
                try:
                    with without_dumps():
                        for seq_len in task.seqs:
                            self.works[seq_len].run(task.mode)
                    fresh = compiled_kernels() - before
                    self._of_tile.setdefault((task.key, tile), set()).update(fresh)
                    if max((kernel.stack_bytes for kernel in fresh), default=0) > MAX_STACK_BYTES:
                        return None
                    return {
                        seq_len: round(time_call(partial(self.works[seq_len].run, task.mode), self.device, BUDGET_MS).p50, 5)
                        for seq_len in task.seqs
                    }
                except refusals() as error:
                    if not _too_large(error):
                        raise
                    return None

        return times

    def stacks(self, task: Task) -> dict[Tile, int]:
        """Bytes of stack a thread of the kernels of each measured tile.

        Those of a tile are the ones compiled when it was first measured; those of the tile in use, which was compiled before,
        the first ones of the same names. A tile for which nothing was compiled runs the kernels of another one: left out.
        """
        tiles = {tile: kernels for (key, tile), kernels in self._of_tile.items() if key == task.key}
        names = {kernel.name for kernels in tiles.values() for kernel in kernels}
        tiles[task.start] = {kernel for kernel in self._at_first if kernel.name in names} | tiles.get(task.start, set())
        return {tile: max(kernel.stack_bytes for kernel in kernels) for tile, kernels in tiles.items() if kernels}

    def fault(self, task: Task, tile: Tile) -> str | None:
        """Why the results with a tile are wrong, against fp64 at every length; None if they are right."""
        with tiles_chosen_by(lambda key, usual: tile if key == task.key else usual):
            for seq_len in task.seqs:
                work = self.works[seq_len]
                results = work.run(task.mode)
                names = [*self.case.outputs, *(f"d{name}" for name in work.leaves)]
                verdict = self.gates[seq_len].check(dict(zip(names, results, strict=False)))
                if not verdict.correct:
                    return f"S {seq_len}: {verdict.note}"
        return None


@dataclass(frozen=True)
class Compiled:
    """A kernel that was compiled in this process."""

    name: str
    hash: str
    stack_bytes: int


def compiled_kernels() -> set[Compiled]:
    """All kernels of this library that this process has loaded."""
    return {
        Compiled(name, kernel.hash, 4 * kernel.n_spills)
        for name, function in own_kernels().items()
        for cache in getattr(function, "device_caches", {}).values()
        for kernel in cache[0].values()
        if getattr(kernel, "module", None) is not None
    }


class Compilers:
    """Processes that run candidates once, side by side, ahead of their measurement: Triton keeps on disk what it compiled.

    Args:
        points: as for :class:`Bench`.
        count: processes; 0 compiles nothing ahead.
    """

    def __init__(self, points: Sequence[Point], count: int) -> None:
        self.pool = None
        if count:
            context = multiprocessing.get_context("spawn")  # a process with a CUDA context cannot be forked
            self.pool = ProcessPoolExecutor(count, context, initializer=_begin, initargs=(points,))

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)

    def compile(self, case: Case, task: Task, tiles: Sequence[Tile]) -> bool:
        """Compile the kernel of a task with each tile and wait for all; whether that was done."""
        if self.pool is None or len(tiles) < 2:
            return False
        for _ in self.pool.map(partial(_compile, case.name, task), tiles):
            pass
        return True


_points: list[Point] = []  # of a process of `Compilers`
_benches: dict[str, Bench] = {}


def _begin(points: Sequence[Point]) -> None:
    torch.cuda.set_device(points[0].device)
    _points.extend(points)


def _compile(case: str, task: Task, tile: Tile) -> None:
    if case not in _benches:
        _benches.clear()  # one at a time: their tensors are large
        _benches[case] = Bench(CASES[case], _points)
    bench = _benches[case]
    with tiles_chosen_by(lambda key, usual: tile if key == task.key else usual):
        try:
            with without_dumps():
                bench.works[task.seqs[0]].run(task.mode)
            torch.cuda.synchronize()
        except refusals() as error:
            if not _too_large(error):
                raise


def without_dumps() -> AbstractContextManager[object]:
    """Within, Triton does not print the code of a kernel that needs more registers than it may have; the error says it."""
    return redirect_stdout(StringIO())


def _too_large(error: Exception) -> bool:
    return does_not_fit(error) or isinstance(error, torch.OutOfMemoryError)


def candidates(key: TileKey, tile: Tile) -> Generator[list[Tile], Tile, None]:
    """Groups of tiles to try, each from the best one so far, which is sent back: sizes with warps, then option by option.

    Yields:
        Tiles other than the best one.
    """
    choice, gathers = key.kernel == "select_blocks", key.kernel in GATHERING
    keys_own = "_dkv" in key.kernel  # a program owns keys: dK and dV
    flags = ["tma"] * (not choice and not gathers) + ["keys_as_rows"] * keys_own + ["keep_queries"] * choice
    all_rows, all_keys = (32, 64, 128), ((8, 16, 32, 64) if choice else (32, 64, 128))
    sizes = [
        (rows, keys, warps)
        for rows in all_rows
        for keys in all_keys
        for warps in (4, 8)
        if (rows >= 16 * warps or warps == 4 or key.head_size > 128) and (choice or fits_registers(key, rows, keys, warps))
    ]
    groups: list[Callable[[Tile], list[Tile]]] = [
        lambda best: [best._replace(rows=rows, keys=keys, warps=warps) for rows, keys, warps in sizes],
        lambda best: [best._replace(stages=stages) for stages in (1, 2, 3, 4)],
        *(lambda best, flag=flag: [best._replace(**{flag: not getattr(best, flag)})] for flag in flags),
        lambda best: [best._replace(edge_stages=stages) for stages in (1, 2, 3) if keys_own and not gathers],
        lambda best: [best._replace(max_registers=most) for most in (None, 96, 128, 168, 200)],
        lambda best: [best._replace(stages=stages) for stages in (1, 2, 3, 4)],
    ]
    best = tile
    for group in groups:
        best = yield [other for other in group(best) if other != best]


def fits_registers(key: TileKey, rows: int, keys: int, warps: int) -> bool:
    """Whether sums and score tiles (fp32) of a kernel of attention leave a thread any registers at all."""
    size = 1 << (key.head_size - 1).bit_length()
    if "_dkv" in key.kernel:
        numbers = keys * 2 * size + 2 * rows * keys
    else:
        numbers = rows * size + (2 if "_dq" in key.kernel else 1) * rows * keys
    return numbers < 255 * 32 * warps


def descend(
    key: TileKey, start: Tile, measure: Measure, go_on: Callable[[], bool] = lambda: True,
    make_ready: Callable[[Sequence[Tile]], bool] = lambda _: False,
) -> tuple[Tile, Trials]:  # fmt: skip
    """The best tile that a walk over the groups of candidates finds.

    Args:
        key: the kernel.
        start: the tile it has now, which must fit.
        measure: milliseconds by length; None where a tile does not fit. The lengths count alike: the mean of the logarithms.
        go_on: whether there is time left.
        make_ready: told which tiles will be measured next; whether they take no long time any more, so that all are measured.

    Returns:
        The tile, and the times of all that fit. A candidate is taken only if a second measurement beside the best one says
        the same.
    """
    first = measure(start)
    assert first is not None, f"the tile in use does not fit: {start}"
    best, trials, seen = start, {start: first}, {start}
    walk = candidates(key, start)
    group: list[Tile] | None = next(walk)
    while group is not None:
        fresh = [tile for tile in group if tile not in seen and go_on()]
        ready = make_ready(fresh)
        for tile in fresh:
            if not ready and not go_on():
                break
            seen.add(tile)
            found = measure(tile)
            print(f"  {_said(found)}  {tile}", flush=True)
            if found is None:
                continue
            trials[tile] = found
            if gain(found, trials[best]) > GAIN:
                continue
            again, before = measure(tile), measure(best)
            if again is not None and before is not None and gain(again, before) <= GAIN:
                best, trials[tile] = tile, again
        try:
            group = walk.send(best)
        except StopIteration:
            group = None
    return best, trials


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
