"""Rows made by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nsa.bench.rows import Row

WRONG = {"correct": False, "ms_p50": None, "ms_p20": None, "ms_p80": None, "note": "dq is wrong"}
H200 = {"gpu": "NVIDIA H200"}
SOUND: dict[str, Any] = {
    "run_id": "run",
    "device": "cuda",
    "gpu": "NVIDIA Test",
    "driver": None,
    "torch": "2.11.0",
    "triton": None,
    "commit": "abc",
    "dirty": False,
    "date": "2026-01-02T03:04:05+00:00",
    "case": "attention",
    "provider": "nsa",
    "shape": "seed",
    "seq_len": 2048,
    "batch": 32,
    "dtype": "bfloat16",
    "mode": "fwd",
    "ms_p50": 1.0,
    "ms_p20": 0.9,
    "ms_p80": 1.1,
    "tflops_useful": 100.0,
    "peak_mib": 64.0,
    "correct": True,
    "errors": {"out": 0.001},
    "timing": "cuda graph",
}


def make_row(**values: Any) -> Row:
    """A correct row with these differences."""
    return Row(**{**SOUND, **values})


def training(provider: str, ms: float, **values: Any) -> Row:
    """A row of a training step of 65,536 tokens."""
    step = {"case": "train", "choice": "model", "mode": "fwd_bwd", "provider": provider}
    return make_row(**{**step, "ms_p50": ms, "tokens_per_s": 65_536_000 / ms, **values})


def write_rows(path: Path, rows: Iterable[Row]) -> Path:
    """Write a file of rows; its folder is created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows), encoding="utf-8")
    return path
