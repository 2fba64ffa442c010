"""A row of the acceptance run to compare with."""

from __future__ import annotations

from tools.accept.rows import Row

PASSED = Row(
    config="78m",
    tokens_per_s=409_600.0,
    mfu=0.25,
    compilations_after_5=0,
    slowest_over_median=1.3,
    host_ms=3.0,
    peak_mib=3000.0,
    plan_mib=2900.0,
    loss_first=4.8,
    loss_last=2.0,
    passed=True,
    gpu="NVIDIA H200",
    commit="c0ffee",
    date="2026-11-22T10:00:00+00:00",
    note="added: --steps 300",
    seconds=40.0,
    leg="1",
)
