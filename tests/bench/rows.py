"""Rows made by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from nsa.bench.rows import Row

WRONG = {"correct": False, "ms_p50": None, "ms_p20": None, "ms_p80": None, "note": "dq is wrong"}
H200 = {"gpu": "NVIDIA H200"}


def make_row(**values: Any) -> Row:
    """A sound row, with these differences."""
    sound: dict[str, Any] = dict.fromkeys(field.name for field in fields(Row))
    sound |= {"run_id": "run", "device": "cuda", "gpu": "NVIDIA Test", "torch": "2.11.0"}
    sound |= {"commit": "abc", "dirty": False, "date": "2026-01-02T03:04:05+00:00"}
    sound |= {"case": "attention", "provider": "nsa", "shape": "seed", "choice": "random"}
    sound |= {"seq_len": 2048, "batch": 32, "dtype": "bfloat16", "mode": "fwd"}
    sound |= {"ms_p50": 1.0, "ms_p20": 0.9, "ms_p80": 1.1, "tflops_useful": 100.0}
    sound |= {"peak_mib": 64.0, "correct": True, "errors": {"out": 0.001}, "timing": "cuda graph"}
    sound |= {"samples": 50, "kernels": ["a_kernel"], "kernel_us": {"a_kernel": 10.0}}
    return Row(**{**sound, **values})


def training(provider: str, ms: float, **values: Any) -> Row:
    """A row of a training step of 65,536 tokens."""
    step = {"case": "train", "choice": "model", "mode": "fwd_bwd", "provider": provider}
    return make_row(**{**step, "ms_p50": ms, "tokens_per_s": 65_536_000 / ms, **values})


def write_rows(path: Path, rows: Iterable[Row]) -> Path:
    """A file of rows; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows), encoding="utf-8")
    return path
