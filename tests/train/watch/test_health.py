"""What a person who watched the rows would notice: said once when it begins, and again when it comes back."""

from __future__ import annotations

from nsa.train.telemetry.metrics import Row
from nsa.train.watch.health import Health


def row(step: int, **changes: float) -> Row:
    return {
        "step": step,
        "tokens_per_s": 1000.0,
        "data_time_ms": 1.0,
        "step_time_ms": 10.0,
        **changes,
    }


def gates(step: int, cmp: float, slc: float, win: float, entropy: float) -> Row:
    names = {
        "gate_cmp_mean": cmp,
        "gate_slc_mean": slc,
        "gate_win_mean": win,
        "gate_entropy": entropy,
    }
    return row(step, **names, **{f"{name}_layer_3": value for name, value in names.items()})


def kinds(health: Health, *rows: Row) -> list[list[str]]:
    return [[kind for kind, _ in health.look(each)] for each in rows]


def test_speed_that_falls_is_said_once_each_time() -> None:
    usual, slow = [row(step) for step in range(1, 7)], row(7, tokens_per_s=150.0)
    health = Health(warmup_steps=0)
    assert kinds(health, *usual, slow, slow, row(9), slow) == [[]] * 6 + [
        ["throughput"],
        [],
        [],
        ["throughput"],
    ]
    assert Health(0).look(slow) == []  # nothing to compare with
    fallen = Health(0)
    kinds(fallen, *usual)
    assert fallen.look(slow) == [("throughput", "throughput fell to 150 tokens/s, usual are 1,000")]
    # a quarter is not yet a fifth
    assert kinds(fallen, row(8), row(9, tokens_per_s=250.0)) == [[], []]


def test_waiting_for_data() -> None:
    waiting = row(1, data_time_ms=6.0)
    # the first step always waits
    assert kinds(Health(0), waiting, waiting, waiting) == [[], ["data"], []]
    assert Health(0).look(row(1)) == []
    health = Health(0)
    health.look(row(1))
    assert health.look(waiting) == [("data", "the device waits for data: 6 of 10 ms a step")]


def test_gates_that_collapse() -> None:
    sound, dead, alike = (
        gates(11, 0.5, 0.4, 0.6, 0.98),
        gates(12, 0.5, 0.004, 0.6, 0.7),
        gates(13, 0.5, 0.5, 0.5, 0.99999),
    )
    assert Health(warmup_steps=10).look(sound) == []
    assert Health(10).look(dead) == [
        ("gates", "gate collapse in layer 3: branch slc is dead (mean 0.0040)")
    ]
    assert Health(10).look(alike) == [
        ("gates", "gate collapse in layer 3: all branches weigh alike (entropy 1.0000)")
    ]
    assert Health(10).look(gates(10, 0.5, 0.5, 0.5, 1.0)) == []  # all start alike
    # A row without an evaluation says nothing about gates: the collapse is not over.
    assert kinds(Health(10), dead, row(13), dead, sound, dead) == [["gates"], [], [], [], ["gates"]]


def test_an_idle_gpu() -> None:
    usual, idle = (
        row(1, gpu_utilisation_percent=97.0, gpu_step_time_ms=9.5),
        row(2, gpu_utilisation_percent=40.0),
    )
    health = Health(0)
    assert kinds(health, usual, usual, idle, idle) == [[], [], ["gpu"], []]
    late = row(3, gpu_utilisation_percent=60.0, gpu_step_time_ms=4.0)
    assert Health(0).look(late) == []  # the first step always waits
    health = Health(0)
    health.look(usual)
    assert health.look(late) == [("gpu", "the GPU is idle: its part of a step takes 4 of 10 ms")]
    # the cause is known
    assert kinds(health, row(4, data_time_ms=6.0, gpu_step_time_ms=4.0)) == [["data"]]
