"""Rows made by hand."""

from __future__ import annotations

from typing import Any

from nsa.bench.rows import Row


def make_row(**values: Any) -> Row:
    """A sound row, with these differences."""
    sound: dict[str, Any] = {
        "run_id": "run", "case": "attention", "provider": "nsa", "variant": None, "shape": "seed", "choice": "random",
        "seq_len": 2048, "batch": 32, "dtype": "bfloat16", "mode": "fwd", "ms_p50": 1.0, "ms_p20": 0.9, "ms_p80": 1.1,
        "tflops_useful": 100.0, "tbps_useful": None, "peak_mib": 64.0, "correct": True, "errors": {"out": 0.001}, "note": None,
        "overlap": None, "recall": None, "timing": "cuda graph", "samples": 50, "kernels": ["a_kernel"],
        "kernel_us": {"a_kernel": 10.0}, "device": "cuda", "gpu": "NVIDIA Test", "driver": "1", "torch": "2.11.0",
        "triton": "3.6.0", "commit": "abc", "dirty": False, "date": "2026-01-02T03:04:05+00:00",
    }  # fmt: skip
    return Row(**{**sound, **values})
