"""Result rows as JSON lines, ratios between rows, and targets."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch

from nsa.errors import UserError
from nsa.train import environment

TARGETS = Path(__file__).with_name("targets.json")
# Dense attention of a decode step. With -folded, query heads of a group are rows of one query.
DENSE_DECODE = (
    "dense-cudnn",
    "dense-fa2",
    "dense-cudnn-folded",
    "dense-fa2-folded",
    "dense-efficient-folded",
    "dense-flex",
    "dense-scan",
)
# Ratios to dense use the fastest of these providers; other cases use _DENSE in case `attention`.
_DENSE = ("dense-cudnn",)
_DENSE_OF = {"train": ("dense",), "decode.model": ("dense",), "decode.attention": DENSE_DECODE}
# Units in which higher is better.
_SPEEDS = ("tokens/s", "of one", "times dense")
# Fields of older rows that no table shows.
OLD_FIELDS = {"overlap", "compilations_after_5", "slowest_over_median", "host_ms_p50"}
OLD_FIELDS |= {"first_step_s", "of_copy", "gpu_ms"}
# Settings that affect ratios of training steps.
STEP_SETTINGS = ("micro_batch", "compile", "cuda_graphs", "checkpointing")


@dataclass(frozen=True)
class Row:
    """One implementation at one point in one mode; ``docs/benchmarks.md`` explains every field."""

    run_id: str
    device: str
    gpu: str | None
    driver: str | None
    torch: str | None
    triton: str | None
    commit: str | None
    dirty: bool | None
    date: str
    case: str
    provider: str
    shape: str
    seq_len: int
    batch: int
    dtype: str
    mode: str
    correct: bool | None
    choice: str = "random"
    variant: dict[str, Any] | None = None
    ms_p50: float | None = None
    ms_p20: float | None = None
    ms_p80: float | None = None
    tflops_useful: float | None = None
    tbps_useful: float | None = None
    peak_mib: float | None = None
    errors: dict[str, float] = field(default_factory=dict)
    note: str | None = None
    recall: float | None = None
    timing: str | None = None
    samples: int | None = None
    kernels: list[str] = field(default_factory=list)
    kernel_us: dict[str, float] = field(default_factory=dict)
    stages_ms: dict[str, float] | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    reserved_mib: float | None = None
    loss_nats: float | None = None
    settings: dict[str, Any] | None = None
    changed: dict[str, Any] | None = None
    num_gpus: int = 1
    communication_ms: float | None = None
    exposed_ms: float | None = None
    idle_ms: float | None = None
    launches: int | None = None
    mib_read: float | None = None

    @property
    def is_masked(self) -> bool:
        """Whether attention in a training step stays within documents."""
        return bool((self.settings or {}).get("document_mask"))

    @property
    def kind(self) -> tuple[object, ...]:
        """Key of rows that repeat one measurement; the newest is used."""
        return self.gpu, *_key(self)[1:], self.is_masked, self.num_gpus

    def __post_init__(self) -> None:
        """Assert that a row with a time is correct."""
        timed = [self.ms_p50, self.ms_p20, self.ms_p80, self.tokens_per_s, self.mfu]
        assert self.correct is True or timed == [None] * 5, "a time without a correct result"
        assert self.correct is True or self.note, "a row without a time says why"


def _key(row: Row) -> tuple[object, ...]:
    work = row.case, row.provider, row.shape, row.choice, row.dtype, row.seq_len, row.batch
    return row.run_id, *work, row.mode


def origin(device: torch.device, commit: str | None = None) -> dict[str, Any]:
    """Return the fields that all rows of this process share.

    Args:
        device: the measured device.
        commit: recorded if the checkout has no git.
    """
    code, now, on_gpu = environment.code_version(), datetime.now(UTC), device.type == "cuda"
    return {
        "run_id": f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}",
        "device": device.type,
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "driver": environment.nvidia_driver() if on_gpu else None,
        "torch": environment.version("torch"),
        "triton": environment.version("triton"),
        "commit": code["commit"] or commit,
        "dirty": code["dirty"],
        "date": now.isoformat(timespec="seconds"),
    }


def read_rows(paths: Iterable[Path]) -> list[Row]:
    """Read the rows of several files.

    Raises:
        ValueError: a line is not a row; the message names file, line and error.
    """
    rows = []
    for path in paths:
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, start=1):
            try:
                fields = json.loads(line or "null")
                if fields is not None:
                    rows.append(Row(**{x: fields[x] for x in fields if x not in OLD_FIELDS}))
            except (ValueError, TypeError, AssertionError) as error:
                argument, rule = f"{path}:{number}: the line", "be a row that the benchmark writes"
                raise UserError(argument, rule, error) from error
    return rows


def measured(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that have a time."""
    return [row for row in rows if row.ms_p50 is not None]


def newest_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the newest row of each kind that has a time, in order of length."""
    best = {row.kind: row for row in sorted(measured(rows), key=lambda row: row.date)}
    return sorted(best.values(), key=lambda row: (row.case, row.provider, row.mode, row.seq_len))


# --- Ratios between rows
RowIndex = Mapping[tuple[object, ...], Row]


def index_rows(rows: Iterable[Row]) -> RowIndex:
    """Index rows with a time for ratios: by run and work, and steps on one GPU by settings."""
    found: dict[tuple[object, ...], Row] = {}
    for row in measured(rows):
        found[_key(row)] = row
        if row.case == "train" and row.num_gpus == 1:
            found[_step_key(row)] = row
    return found


def _step_key(row: Row) -> tuple[object, ...]:
    settings = row.settings or {}
    names = ("attention", "parameters", *STEP_SETTINGS[1:])
    step = tuple(settings.get(name) for name in names)
    work = row.shape, row.seq_len, row.batch, row.mode, row.dtype, row.is_masked
    return "one GPU", row.gpu, row.commit, *work, *step


def ratio(row: Row, by: RowIndex, name: str = "ms_p50", **names: str) -> float | None:
    """Divide time or memory by that of a row of the same run with other field values."""
    return _quotient(row, by.get(_key(replace(row, **names))), name)  # type: ignore[arg-type]


def _quotient(row: Row, below: Row | None, name: str) -> float | None:
    value, divisor = getattr(row, name), below and getattr(below, name)
    return value / divisor if value is not None and divisor else None


def is_dense(row: Row) -> bool:
    """Whether the row is a baseline of ratios."""
    return row.provider in _DENSE_OF.get(row.case, _DENSE)


def fastest_dense(row: Row, by: RowIndex) -> Row | None:
    """Return the fastest dense attention, or the dense model, in the same run."""
    case = row.case if row.case in _DENSE_OF else "attention"
    names = _DENSE_OF.get(row.case, _DENSE)
    found = [by.get(_key(replace(row, case=case, provider=name))) for name in names]
    return min(filter(None, found), key=lambda each: each.ms_p50 or 0, default=None)


def of_dense(row: Row, by: RowIndex, name: str = "ms_p50") -> float | None:
    """Divide time or memory by that of dense attention in the same run; None without it."""
    return _quotient(row, fastest_dense(row, by), name)


def of_one_gpu(row: Row, by: RowIndex) -> float | None:
    """Divide the speed by that on one GPU with the same commit, work and settings."""
    return _quotient(row, by.get(_step_key(row)), "tokens_per_s") if row.case == "train" else None


# --- Targets
@cache
def targets() -> dict[str, Any]:
    """Read ``targets.json``: the GPU that the targets are for, and the targets."""
    content: dict[str, Any] = json.loads(TARGETS.read_text(encoding="utf-8"))
    return content


def outcomes(row: Row, by: RowIndex) -> list[tuple[str, bool]]:
    """Compare a row with its targets: measured value with verdict, and whether it passes.

    Units: ``ms``; ``of dense-cudnn``, time relative to dense attention; ``of random``, relative to
    random selection; ``MiB of dense``, peak memory relative to the dense model; ``of llama``,
    relative to Llama's layer; ``of one``, speed relative to one GPU; ``times dense``, the fastest
    dense time divided by the row's.
    """
    if row.ms_p50 is None or row.gpu != targets()["gpu"]:
        return []
    of = of_dense(row, by)
    values = {
        "ms": row.ms_p50,
        "tokens/s": row.tokens_per_s,
        "launches": row.launches,
        "of random": ratio(row, by, choice="random"),
        "of dense-cudnn": of,
        "times dense": of and 1 / of,
        "MiB of dense": of_dense(row, by, "peak_mib"),
        "of llama": ratio(row, by, provider="llama"),
        "of one": of_one_gpu(row, by),
    }
    found = []
    for target in targets()["targets"]:
        unit, bound = target["unit"], target["target"]
        fits = all(getattr(row, name) == wanted for name, wanted in target["where"].items())
        if fits and (value := values[unit]) is not None:
            passes = value >= bound if unit in _SPEEDS else value <= bound
            form, exact = (",.0f", ",.0f") if unit == "tokens/s" else (".3g", "g")
            measured = f"{value:{form}}{'' if unit == 'ms' else f' {unit}'}"
            text = f"{measured}: target {bound:{exact}} {'pass' if passes else 'FAIL'}"
            found.append((text, passes))
    return found
