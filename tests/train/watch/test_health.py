"""Warnings about a run: given once when a condition begins, and again when it comes back."""

from __future__ import annotations

from nsa.train.telemetry.metrics import Row
from nsa.train.watch.health import Health


def row(step: int, **changes: float) -> Row:
    usual = {"tokens_per_s": 1000.0, "data_time_ms": 1.0, "step_time_ms": 10.0}
    return {"step": step, **usual, **changes}


def gates(step: int, cmp: float, slc: float, win: float, collapsed: float) -> Row:
    names = {"gate_cmp_mean": cmp, "gate_slc_mean": slc, "gate_win_mean": win}
    names |= {"gate_entropy": 0.7, "gate_collapsed": collapsed}
    return row(step, **names, **{f"{name}_layer_3": value for name, value in names.items()})


def kinds(health: Health, *rows: Row) -> list[str]:
    return [" ".join(kind for kind, _ in health.look(each)) for each in rows]


def test_speed_that_falls_is_said_once_each_time() -> None:
    usual, slow = [row(step) for step in range(1, 7)], row(7, tokens_per_s=150.0)
    health = Health(warmup_steps=0)
    expected = [""] * 6 + ["throughput", "", "", "throughput"]
    assert kinds(health, *usual, slow, slow, row(9), slow) == expected
    assert Health(0).look(slow) == []  # nothing to compare with
    fallen = Health(0)
    kinds(fallen, *usual)
    assert fallen.look(slow) == [
        ("throughput", "throughput fell to 150 tokens/s, median so far: 1,000")
    ]
    # a quarter is not yet a fifth
    assert kinds(fallen, row(8), row(9, tokens_per_s=250.0)) == ["", ""]


def test_waiting_for_data() -> None:
    waiting, health = row(1, data_time_ms=6.0), Health(0)
    assert health.look(waiting) == []  # the first step always waits
    assert health.look(waiting) == [("data", "the device waits for data: 6 of 10 ms per step")]
    assert health.look(waiting) == []


def test_gates_that_collapse() -> None:
    sound, dead = gates(11, 0.5, 0.4, 0.6, 0.0), gates(12, 0.5, 0.004, 0.6, 1.0)
    assert Health(warmup_steps=10).look(sound) == []
    means = "means cmp 0.5000, slc 0.0040, win 0.6000, entropy 0.7000"
    assert Health(10).look(dead) == [("gates", f"gate collapse in layer 3: {means}")]
    assert Health(10).look(gates(10, 0.5, 0.5, 0.5, 1.0)) == []  # all gates start equal
    # A row without gates does not end the collapse.
    rows = (dead, row(13), dead, sound, dead)
    assert kinds(Health(10), *rows) == ["gates", "", "", "", "gates"]


def test_an_idle_gpu() -> None:
    usual = row(1, gpu_utilisation_percent=97.0, gpu_step_time_ms=9.5)
    idle = row(2, gpu_utilisation_percent=40.0)
    late = row(3, gpu_utilisation_percent=60.0, gpu_step_time_ms=4.0)
    assert kinds(Health(0), usual, usual, idle, idle) == ["", "", "gpu", ""]
    assert kinds(Health(0), late) == [""]  # the first step always waits
    health = Health(0)
    health.look(usual)
    text = "the GPU is idle: busy 60% of the time, kernels of a step take 4 of 10 ms"
    assert health.look(late) == [("gpu", text)]
    # the cause is known
    assert kinds(health, row(4, data_time_ms=6.0, gpu_step_time_ms=4.0)) == ["data"]
