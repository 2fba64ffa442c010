"""``nsa bench tune``: measure candidate tiles of every kernel on this GPU, write the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from io import StringIO
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

from nsa.bench.attention import PROVIDERS, Work
from nsa.bench.cases import CASES, Case, Point, make_tensors, prepare
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

# Time of a candidate relative to the best tile that it must reach; smaller gains are noise.
GAIN = 0.985
BUDGET_MS = 60.0
# Kernels with scattered rows: no tensor descriptors, and no masked edges in their loops.
GATHERING = ("selected_attention_dkv", "selected_gather_fwd", "selected_gather_dkv")

Times = Mapping[int, float]  # milliseconds by length


@dataclass
class Task:
    """A kernel to tune by an operator that runs it.

    Attributes:
        key: the kernel.
        mode: the first mode that runs it.
        start: its tile.
        works: the operator at each length that runs the kernel, and its gate.
    """

    key: TileKey
    mode: str
    start: Tile
    works: dict[int, tuple[Work, Gate]] = field(default_factory=dict)

    def with_tile(self, tile: Tile) -> Any:
        """Context manager: use this tile for the kernel."""
        return tiles_chosen_by(lambda key, usual: tile if key == self.key else usual)

    def measure(self, tile: Tile) -> Times | None:
        """Time the operator with a tile for the kernel; None if the tile does not fit."""
        times = {}
        try:
            # Triton prints the code of kernels that need too many registers.
            with self.with_tile(tile), redirect_stdout(StringIO()):
                for seq_len, (work, gate) in self.works.items():
                    call, device = work.run, gate.problem.point.device
                    call()
                    synchronize(device)
                    times[seq_len] = round(time_call(call, device, BUDGET_MS).ms_p50, 5)
        except refusals() as error:
            is_bug = isinstance(error, RuntimeError) and "PassManager" not in str(error)
            if is_bug and not isinstance(error, torch.OutOfMemoryError):
                raise
            return None
        return times

    def fault(self, tile: Tile) -> str | None:
        """Compare results with fp64 at every length; return the error or None."""
        with self.with_tile(tile):
            for seq_len, (work, gate) in self.works.items():
                checked = gate.check(work.run())
                if not checked["correct"]:
                    return f"S {seq_len}: {checked['note']}"
        return None


def bench_tune(
    points: Sequence[Point],
    *,
    kernel: str,
    out: Path | None,
) -> int:
    """Tune, and write the table after each kernel.

    Args:
        points: shape and lengths, which have equal weight.
        kernel: pattern of kernel names.
        out: table to write; None means the package's table for this GPU.

    Returns:
        Exit code: 1 if the best tile of a kernel failed the correctness gate.

    Raises:
        ValueError: there is no CUDA GPU, or no kernel matches the pattern.
    """
    device, hint = points[0].device, "Tiles are measured on the GPU."
    check(device.type == "cuda", "this machine", "have a CUDA GPU", "none", hint)
    here = origin(device)
    path = out or TABLES / f"{table_name(here['gpu'])}.json"
    faults = list[str | None]()
    by_token = [replace(at, config=replace(at.config, scores="token_max")) for at in points]
    measured = [(case, points) for case in CASES.values() if not case.is_whole]
    for case, some in [*measured, (CASES["attention.choice"], by_token)]:
        for task in (task for task in find_tasks(case, some) if fnmatch(task.key.kernel, kernel)):
            lengths = ", ".join(f"{seq_len:,}" for seq_len in task.works)
            what = f"{case.name} {task.mode}, {points[0].shape} shape, by length"
            print(f"\n{task.key}, {what}: {lengths}\n  in use: {task.start}", flush=True)
            tile, times = descend(task.start, changes(task.key), task.measure)
            fault = task.fault(tile)
            print(f"  best: {tile}{f', but WRONG: {fault}' if fault else ''}", flush=True)
            faults.append(fault)
            if fault is None:
                write_tile(path, here, task.key, tile, {"ms": times, "measured": what})
    check(bool(faults), "--kernel", "fit a kernel that looks up a tile", repr(kernel))
    return int(any(faults))


def find_tasks(case: Case, points: Sequence[Point]) -> list[Task]:
    """Return a task for each kernel of an operator that looks up tiles."""
    gates, tasks = [], dict[TileKey, Task]()
    for point in points:
        gates.append(Gate(prepare(case, make_tensors(point), point, "triton")))
    for mode, gate in product(case.modes, gates):
        seq_len, work = gate.problem.point.seq_len, PROVIDERS["nsa"].work(gate.problem, mode)
        seen = dict[TileKey, Tile]()
        with tiles_chosen_by(seen.setdefault):
            work.run()
        for key, tile in seen.items():
            task = tasks.setdefault(key, Task(key, mode, tile))
            if task.mode == mode:
                task.works[seq_len] = work, gate
    return list(tasks.values())


def changes(key: TileKey) -> list[list[dict[str, Any]]]:
    """Groups of changes to a tile: sizes with warps, then one group per option."""
    by_token, gathers = key.kernel == "select_token_max", key.kernel in GATHERING
    selects = by_token or key.kernel == "select_blocks"
    keys_own = "_dkv" in key.kernel  # programs own keys: dK and dV
    all_rows, all_keys = [32, 64, 128], ([8, 16, 32, 64] if selects else [32, 64, 128])
    if by_token:  # a step holds several products of keys, whatever its blocks
        all_rows, all_keys = [64, 128], [16]
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
) -> tuple[Tile, Times]:
    """Coordinate descent over the groups of changes; return the best tile and its times.

    A candidate is accepted only if a second measurement of both tiles confirms the gain.

    Args:
        start: the current tile, which must fit.
        groups: changes to the best tile so far; every candidate of a group is measured.
        measure: returns times by length, or None if a tile does not fit.
    """
    times = measure(start)
    assert times is not None, f"the tile in use does not fit: {start}"
    best, seen = start, {start}
    for group in groups:
        for tile in [best._replace(**change) for change in group]:
            if tile in seen:
                continue
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


def gain(found: Times, before: Times) -> float:
    """Geometric mean over lengths of the ratio of two measurements; below 1 is faster."""
    return geometric_mean(ms / before[seq_len] for seq_len, ms in found.items())


def write_tile(
    path: Path, here: Mapping[str, Any], key: TileKey, tile: Tile, note: Mapping[str, Any]
) -> None:
    """Write one row of a table, which is created if missing; keep the other rows."""
    gpu = here["gpu"]
    table = load_table(path) if path.is_file() else TileTable(gpu, {}, {})
    check(table.gpu == gpu, "--out", f"be a table of {gpu}", table.gpu)
    notes = {**note, "torch": here["torch"], "triton": here["triton"], "date": here["date"][:10]}
    table = TileTable(gpu, {**table.rows, key: tile}, {**table.notes, key: notes})
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, table_text(table))
