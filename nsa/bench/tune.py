"""``nsa bench tune``: measure candidate tiles of every kernel on this GPU, write the table."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
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

from nsa.bench.attention import PROVIDERS, own_kernels
from nsa.bench.cases import CASES, Case, Point, Shape, batch_of, make_tensors, prepare
from nsa.bench.clock import refusals, synchronize, time_call
from nsa.bench.gate import Gate
from nsa.bench.rows import origin
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

WHERE = "nsa bench tune"
# Time of a candidate relative to the best tile that it must reach; smaller gains are noise.
GAIN = 0.985
BUDGET_MS = 60.0
MAX_STACK_BYTES = 256  # per thread; kernels that need more are rejected
JOBS = max(1, min(8, (os.cpu_count() or 1) // 2))  # processes that compile candidates in advance
# Kernels with scattered rows: no tensor descriptors, and no masked edges in their loops.
GATHERING = ("selected_attention_dkv", "selected_gather_fwd", "selected_gather_dkv")

Times = Mapping[int, float]  # milliseconds by length


@dataclass(frozen=True)
class Task:
    """A kernel to tune: its key, the first mode that runs it, its tile, and its lengths."""

    key: TileKey
    mode: str
    start: Tile
    seqs: tuple[int, ...]

    def with_tile(self, tile: Tile) -> Any:
        """Context manager: use this tile for the kernel."""
        return tiles_chosen_by(lambda key, usual: tile if key == self.key else usual)


def bench_tune(
    shape: Shape,
    seqs: Sequence[int],
    device: torch.device,
    *,
    tokens: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    kernel: str = "*",
    out: Path | None = None,
    minutes: float | None = None,
) -> bool:
    """Tune, and write the table after each kernel.

    Args:
        shape: heads; tiles are tuned for its head size.
        seqs: lengths S, with equal weight.
        device: the GPU.
        tokens: total tokens of all sequences; None means the shape's.
        dtype: dtype of the inputs.
        kernel: pattern of kernel names.
        out: table to write; None means the package's table for this GPU.
        minutes: total time limit of all kernels; None means no limit.

    Returns:
        Whether every tile in the table passed the correctness gate.

    Raises:
        ValueError: there is no CUDA GPU, or no kernel matches the pattern.
    """
    hint = "Tiles are measured on the GPU."
    check(device.type == "cuda", WHERE, "this machine", "have a CUDA GPU", "none", hint)
    here = origin(device)
    path = out or TABLES / f"{table_name(here['gpu'])}.json"
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    sizes = {seq_len: batch_of(shape, seq_len, tokens) for seq_len in seqs}
    points = tuple(Point(shape, *size, "random", dtype, device) for size in sizes.items())
    cases, correct = [case for case in CASES.values() if case.name != "attention"], list[bool]()
    # Spawned: a process with a CUDA context cannot be forked.
    with ProcessPoolExecutor(JOBS, get_context("spawn")) as pool:
        for case, case_end in zip(cases, shares(end, len(cases)), strict=True):
            bench = Bench(case, points)
            tasks = [task for task in bench.tasks() if fnmatch(task.key.kernel, kernel)]
            for task, task_end in zip(tasks, shares(case_end, len(tasks)), strict=True):
                tile, notes, fault = tune_kernel(bench, task, task_end, pool)
                correct.append(fault is None)
                if fault is None:
                    what = f"{case.name} {task.mode}, {shape.name} shape, by length"
                    write_tile(path, here, task.key, tile, {**notes, "measured": what})
    check(bool(correct), WHERE, "--kernel", "fit a kernel that looks up a tile", repr(kernel))
    return all(correct)


def shares(end: float, number: int) -> Iterator[float]:
    """End times of ``number`` tasks that share the remaining time equally."""
    for left in range(number, 0, -1):
        now = time.monotonic()
        yield now + max(0.0, end - now) / left


def tune_kernel(
    bench: Bench, task: Task, end: float, pool: ProcessPoolExecutor | None = None
) -> tuple[Tile, dict[str, Any], str | None]:
    """Return the best tile of a kernel, its notes for the table, and an error or None."""
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
    """Stack bytes per thread of all loaded kernels of this library, by hash."""
    return {
        kernel.hash: 4 * kernel.n_spills
        for function in own_kernels().values()
        for cache in getattr(function, "device_caches", {}).values()
        for kernel in cache[0].values()
        if getattr(kernel, "module", None) is not None
    }


class Bench:
    """One operator at several lengths, prepared to run with different tiles."""

    def __init__(self, case: Case, points: tuple[Point, ...]) -> None:
        self.case, self.points, self.device = case, points, points[0].device
        for kernel in own_kernels().values():
            # Clear the caches, so that all kernels in them are of this operator.
            for found in ("device_caches", "_compiled"):
                getattr(kernel, found, {}).clear()
        self.gates, self.works = dict[int, Gate](), dict[int, Any]()
        self.stack_bytes: dict[tuple[TileKey, Tile], int] = {}
        for point in points:
            config = point.shape.config()
            problem = prepare(case, make_tensors(point, config), point, config, "triton")
            self.gates[point.seq_len] = Gate(problem)
            self.works[point.seq_len] = PROVIDERS["nsa"].work(problem)

    def tasks(self) -> list[Task]:
        """Return a task for each kernel that looks up tiles."""
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
        """Run the operator once at each length; return whether the tile fits."""
        try:
            # Triton prints the code of kernels that need too many registers.
            with redirect_stdout(StringIO()):
                for seq_len in seqs:
                    self.works[seq_len].run(task.mode)
            synchronize(self.device)
        except refusals() as error:
            fits = isinstance(error, RuntimeError) and "PassManager" not in str(error)
            if fits and not isinstance(error, torch.OutOfMemoryError):
                raise
            return False
        return True

    def measure(self, task: Task, tile: Tile) -> Times | None:
        """Time the operator with a tile for one kernel; None if the tile does not fit."""
        before = compiled_kernels()
        with task.with_tile(tile):
            if not self.run(task, task.seqs):
                return None
            # Kernels compiled at the first measurement of a tile use that tile.
            now = compiled_kernels()
            fresh = [now[kernel] for kernel in now.keys() - before]
            stack = self.stack_bytes.setdefault((task.key, tile), max(fresh, default=0))
            if stack > MAX_STACK_BYTES:
                return None
            calls = {seq_len: partial(self.works[seq_len].run, task.mode) for seq_len in task.seqs}
            timings = {s: time_call(call, self.device, BUDGET_MS) for s, call in calls.items()}
        return {seq_len: round(timing.p50, 5) for seq_len, timing in timings.items()}

    def fault(self, task: Task, tile: Tile) -> str | None:
        """Compare results with fp64 at every length; return the error or None."""
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
    """Compile a candidate into Triton's disk cache before it is measured."""
    with task.with_tile(tile):
        _bench(case, points).run(task, task.seqs[:1])


def changes(key: TileKey) -> list[list[dict[str, Any]]]:
    """Groups of changes to a tile: sizes with warps, then one group per option."""
    selects, gathers = key.kernel == "select_blocks", key.kernel in GATHERING
    keys_own = "_dkv" in key.kernel  # programs own keys: dK and dV
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
    """Coordinate descent over the groups of changes; return the best tile and its times.

    A candidate is accepted only if a second measurement of both tiles confirms the gain.

    Args:
        start: the current tile, which must fit.
        groups: changes to the best tile so far; every candidate of a group is measured.
        measure: returns times by length, or None if a tile does not fit.
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
    """Geometric mean over lengths of the ratio of two measurements; below 1 is faster."""
    return geometric_mean(ms / before[seq_len] for seq_len, ms in found.items())


def write_tile(
    path: Path, here: Mapping[str, Any], key: TileKey, tile: Tile, note: Mapping[str, Any]
) -> None:
    """Write one row of a table, which is created if missing; keep the other rows."""
    gpu = here["gpu"]
    table = load_table(path) if path.is_file() else TileTable(gpu, {}, {})
    check(table.gpu == gpu, WHERE, "--out", f"be a table of {gpu}", table.gpu)
    notes = {**note, "torch": here["torch"], "triton": here["triton"], "date": here["date"][:10]}
    table = TileTable(gpu, {**table.rows, key: tile}, {**table.notes, key: notes})
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, table_text(table))
