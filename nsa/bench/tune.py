"""``nsa bench tune``: measures candidate tiles of every kernel on this GPU and writes the table."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import lru_cache, partial
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
from nsa.bench.implementations import IMPLEMENTATIONS, does_not_fit, own_kernels, refusals
from nsa.bench.points import Point, Shape, batch_of, make_tensors
from nsa.bench.rows import Origin, origin
from nsa.errors import check
from nsa.files import replace_text
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

Times = Mapping[int, float]  # milliseconds by length


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
        jobs: processes that compile candidates in advance.
    """

    shape: Shape
    seqs: Sequence[int]
    tokens: int | None
    dtype: torch.dtype
    kernel: str
    out: Path | None
    minutes: float | None
    jobs: int


@dataclass(frozen=True)
class Task:
    """A kernel to tune: its key, the first mode that runs it, its tile, and its lengths."""

    key: TileKey
    mode: str
    start: Tile
    seqs: tuple[int, ...]

    def with_tile(self, tile: Tile) -> AbstractContextManager[None]:
        """Within, the kernel has this tile."""
        return tiles_chosen_by(lambda key, usual: tile if key == self.key else usual)


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
    at = [Point(plan.shape, *size, "random", plan.dtype, device) for size in batches.items()]
    cases, correct = [case for case in CASES.values() if case.name != "attention"], list[bool]()
    # Spawned: a process with a CUDA context cannot be forked.
    made = ProcessPoolExecutor(plan.jobs, get_context("spawn")) if plan.jobs else nullcontext()
    with made as pool:
        for case, case_end in zip(cases, shares(end, len(cases)), strict=True):
            bench = Bench(case, tuple(at))
            tasks = [task for task in bench.tasks() if fnmatch(task.key.kernel, plan.kernel)]
            for task, task_end in zip(tasks, shares(case_end, len(tasks)), strict=True):
                tile, notes, fault = _tune(bench, task, pool, task_end)
                correct.append(fault is None)
                if fault is None:
                    what = f"{case.name} {task.mode}, {plan.shape.name} shape, by length"
                    write_tile(path, here, task.key, tile, {**notes, "measured": what})
    rule = "fit a kernel that looks up a tile"
    check(bool(correct), where, "--kernel", rule, repr(plan.kernel))
    return all(correct)


def shares(end: float, number: int) -> Iterator[float]:
    """When each of ``number`` tasks must end, for all to get the same share of the time left."""
    for left in range(number, 0, -1):
        now = time.monotonic()
        yield now + max(0.0, end - now) / left


def _tune(
    bench: Bench, task: Task, pool: ProcessPoolExecutor | None, end: float
) -> tuple[Tile, dict[str, Any], str | None]:
    """The best tile of one kernel, what the table says of it, and why its results are wrong."""
    where = ", ".join(f"{seq_len:,}" for seq_len in task.seqs)
    how = f"{bench.case.name} {task.mode} at S {where}"
    print(f"\n{task.key.kernel}, head size {task.key.head_size}, by {how}", flush=True)
    print(f"  in use: {task.start}", flush=True)

    def candidates() -> Iterator[list[dict[str, Any]]]:
        for group in changes(task.key):
            if time.monotonic() >= end:
                return
            yield group

    def compile_in_advance(tiles: Sequence[Tile]) -> None:
        if pool is not None:
            list(pool.map(partial(_compile, bench.case.name, bench.points, task), tiles))

    measure = partial(bench.measure, task)
    tile, times = descend(task.start, candidates(), measure, compile_in_advance)
    fault = bench.fault(task, tile)
    print(f"  best: {tile}{f', but WRONG: {fault}' if fault else ''}", flush=True)
    stack = bench.stack_bytes.get((task.key, tile))
    return tile, {"ms": times} | ({"stack_bytes": stack} if stack else {}), fault


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

    def __init__(self, case: Case, points: tuple[Point, ...]) -> None:
        self.case, self.points, self.device = case, points, points[0].device
        for kernel in own_kernels().values():
            # What is compiled from now on is of this operator.
            for found in ("device_caches", "_compiled"):
                getattr(kernel, found, {}).clear()
        configs = [point.shape.config() for point in points]
        problems = [
            prepare(case, make_tensors(point, config), point, config, "triton")
            for point, config in zip(points, configs, strict=True)
        ]
        self.gates = {problem.point.seq_len: Gate(problem) for problem in problems}
        ours = IMPLEMENTATIONS["nsa"]
        self.works = {problem.point.seq_len: ours.work(problem) for problem in problems}
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

    def measure(self, task: Task, tile: Tile) -> Times | None:
        """Times with another tile for one kernel; None where it does not fit."""
        before = compiled_kernels()
        with task.with_tile(tile):
            if not self.run(task, task.seqs):
                return None
            # What is compiled at its first measurement is of this tile.
            now = compiled_kernels()
            fresh = [now[kernel] for kernel in now.keys() - before]
            stack = self.stack_bytes.setdefault((task.key, tile), max(fresh, default=0))
            if stack > MAX_STACK_BYTES:
                return None
            calls = {seq_len: partial(self.works[seq_len].run, task.mode) for seq_len in task.seqs}
            timings = {s: time_call(call, self.device, BUDGET_MS) for s, call in calls.items()}
        return {seq_len: round(timing.p50, 5) for seq_len, timing in timings.items()}

    def fault(self, task: Task, tile: Tile) -> str | None:
        """Why the results with a tile are wrong, against fp64 at every length; None if right."""
        with task.with_tile(tile):
            for seq_len in task.seqs:
                work, gate = self.works[seq_len], self.gates[seq_len]
                verdict = gate.check(gate.problem.named(work.run(task.mode), work.leaves))
                if not verdict.correct:
                    return f"S {seq_len}: {verdict.note}"
        return None


@lru_cache(maxsize=1)  # their tensors are large
def _bench(case: str, points: tuple[Point, ...]) -> Bench:
    torch.cuda.set_device(points[0].device)
    return Bench(CASES[case], points)


def _compile(case: str, points: tuple[Point, ...], task: Task, tile: Tile) -> None:
    """Run a candidate before it is measured: Triton keeps on disk what it compiled."""
    with task.with_tile(tile):
        _bench(case, points).run(task, task.seqs[:1])


def changes(key: TileKey) -> list[list[dict[str, Any]]]:
    """Groups of changes to the best tile so far: sizes with warps, then option by option."""
    selects, gathers = key.kernel == "select_blocks", key.kernel in GATHERING
    keys_own = "_dkv" in key.kernel  # a program owns keys: dK and dV
    all_rows, all_keys = (32, 64, 128), ((8, 16, 32, 64) if selects else (32, 64, 128))
    sizes = [
        {"rows": rows, "keys": keys, "warps": warps}
        for rows, keys, warps in product(all_rows, all_keys, (4, 8))
        if rows >= 16 * warps or warps == 4 or key.head_size > 128
    ]
    stages = ("stages", (1, 2, 3, 4))
    options: list[tuple[str, Sequence[Any]]] = [stages]
    options += [("tma", (False, True))] * (not selects and not gathers)
    options += [("keys_as_rows", (False, True))] * keys_own
    options += [("keep_queries", (False, True))] * selects
    options += [("edge_stages", (1, 2, 3))] * (keys_own and not gathers)
    options += [("max_registers", (None, 96, 128, 168, 200)), stages]
    return [sizes, *([{name: value} for value in values] for name, values in options)]


def descend(
    start: Tile,
    groups: Iterable[list[dict[str, Any]]],
    measure: Callable[[Tile], Times | None],
    prepare: Callable[[Sequence[Tile]], None] = lambda _: None,
) -> tuple[Tile, Times]:
    """The best tile that a walk over the groups of changes finds, and its times.

    A candidate is taken only if a second measurement of it and of the best one says the same.

    Args:
        start: the tile in use, which must fit.
        groups: changes to the best tile so far; what comes of one group is measured whole.
        measure: None where a tile does not fit. The lengths count alike: the mean of the
            logarithms.
        prepare: called with the tiles that will be measured next.
    """
    times = measure(start)
    assert times is not None, f"the tile in use does not fit: {start}"
    best, seen = start, {start}
    for group in groups:
        tiles = [best._replace(**change) for change in group]
        fresh = [tile for tile in tiles if tile not in seen]
        seen.update(fresh)
        prepare(fresh)
        for tile in fresh:
            found = measure(tile)
            shown = ["does not fit"] if found is None else [f"{ms:.4f} ms" for ms in found.values()]
            print(f"  {'  '.join(shown)}  {tile}", flush=True)
            if found is None or gain(found, times) > GAIN:
                continue
            again, before = measure(tile), measure(best)
            if again is not None and before is not None and gain(again, before) <= GAIN:
                best, times = tile, again
    return best, times


def gain(found: Times, before: Times) -> float:
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
    replace_text(path, table_text(table))
