"""`nsa bench` over the kernels themselves, in the interpreter: gate and variants, no times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nsa import NSAConfig
from nsa.bench import clock, decode, tune
from nsa.bench.attention import PROVIDERS, Work, bench_attention
from nsa.bench.cases import CASES, Point, make_tensors, parse_shape, prepare
from nsa.bench.clock import Timing, UnsupportedError
from nsa.bench.report import Results
from nsa.ops._triton.tuning import TileKey, tiles_chosen_by

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"compress_block_size": 8, "compress_stride": 4, "block_size": 16}
SMALL |= {"num_selected_blocks": 4, "window_size": 32}
POINT = Point("3x1x16x16", parse_shape("3x1x16x16"), 128, 1, "random", torch.float32, CPU)
NOT_TIMED = Timing(1.0, 1.0, 1.0, 1, "not timed")


def test_the_kernels_to_tune_are_those_that_look_tiles_up(monkeypatch):
    monkeypatch.setattr(tune, "time_call", lambda call, *_, **__: (call(), NOT_TIMED)[1])
    tasks = tune.find_tasks(CASES["attention.window"], [POINT])
    assert [(task.key, task.mode, list(task.works)) for task in tasks] == [
        (TileKey(f"window_attention_{name}", 16, 4), mode, [128])
        for name, mode in (("fwd", "fwd"), ("dq", "fwd_bwd"), ("dkv", "fwd_bwd"))
    ]
    by_token = replace(POINT, config=replace(POINT.config, scores="token_max"))
    (task,) = tune.find_tasks(CASES["attention.choice"], [by_token])
    assert (task.key, task.mode) == (TileKey("select_token_max", 16, 4), "fwd")
    other = tasks[0].start._replace(rows=16)
    assert tasks[0].measure(other) == {128: 1.0}
    assert tasks[0].fault(other) is None
    monkeypatch.setattr(Work, "run", lambda self: {"out": torch.zeros(1, 128, 3, 16)})
    why = "S 128: attention.window out: error 1 is above"
    assert str(tasks[0].fault(other)).startswith(why)


@pytest.mark.parametrize(
    ("error", "fits"),
    [
        (torch.OutOfMemoryError("no"), False),
        (RuntimeError("PassManager::run failed"), False),
        (RuntimeError("a bug"), None),
    ],
)
def test_a_tile_that_does_not_fit_is_left_out(monkeypatch, error, fits):
    def fail(self):
        raise error

    (task, *_) = tune.find_tasks(CASES["attention.window"], [POINT])
    monkeypatch.setattr(Work, "run", fail)
    if fits is None:
        with pytest.raises(RuntimeError, match="a bug"):
            task.measure(task.start)
    else:
        assert task.measure(task.start) is None


def test_other_tiles_are_looked_up_though_launches_are_replayed():
    point, case = replace(POINT, config=replace(POINT.config, **SMALL)), CASES["attention.window"]
    problem = prepare(case, make_tensors(point), point, "triton")
    work, seen = PROVIDERS["nsa"].work(problem, "fwd_bwd"), set[str]()
    for _ in range(4):
        work.run()

    def choose(key, tile):
        seen.add(key.kernel)
        return tile._replace(rows=16)

    with tiles_chosen_by(choose):
        work.run()
    assert seen == {f"window_attention_{name}" for name in ("fwd", "dq", "dkv")}


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((f"attention.{name}", {}) for name in ("compressed", "choice", "window")),
        *(
            (name, {"scores": scores})
            for name in ("attention", "attention.choice")
            for scores in ("token_max", "index")
        ),
        ("attention", {"scores": "token_max", "branches": ("slc", "win"), "share_kv": True}),
        (
            "attention.with_index_loss",
            {"scores": "index", "num_selected_blocks": 5, "index_dim": 32},
        ),
    ],
)
def test_kernels_pass_the_gate(name, changes, monkeypatch):
    monkeypatch.setattr(clock, "time_call", lambda *_, **__: NOT_TIMED)
    variant = {**SMALL, **changes}
    results, small = Results(None, CPU), replace(PROVIDERS["nsa"], name="small", variant=variant)
    bench_attention(results, [replace(POINT, seq_len=80)], [small], [name])
    assert results.rows
    assert all(row.correct and row.variant == variant for row in results.rows)


@pytest.mark.parametrize(
    ("provider", "changes", "keys", "values"),
    [
        # 200 index keys of twice the size for both KV heads together
        (
            "nsa",
            {
                "scores": "index",
                "index_dim": 32,
                "index_keys": "shared",
                "branches": ("slc", "win"),
            },
            200 + 56 + 32,
            56 + 32,
        ),
        # of l, d = 8, 4: 49 compressed keys; the last block has 8 of its 16 tokens; the window
        ("nsa", {}, 49 + (3 * 16 + 8) + 32, 49 + (3 * 16 + 8) + 32),
        ("nsa", {"scores": "token_max", "branches": ("slc", "win")}, 200 + 56 + 32, 56 + 32),
        ("dense-scan", {}, 200, 200),
    ],
    ids=str,
)
def test_a_decode_step_passes_the_gate_and_its_reads_are_counted(provider, changes, keys, values):
    config = NSAConfig(4, 2, 16, 16, **SMALL, **changes)
    point = Point("small", config, 200, 2, "random", torch.float32, CPU)
    step = decode.attention_step(provider, point)
    for _ in range(2):
        checked = step.check()
        assert checked["correct"]
        assert 0 < checked["errors"]["out"] < 1e-6
    # B, Hkv, keys and values of 16 elements, bytes
    assert step.work() == {"tokens": 2, "read": 2 * 2 * (keys + values) * 16 * 4}


def test_steps_in_two_stages_have_no_decode_kernels_to_measure():
    changes: Any = {"coarse_block_size": 32, "num_coarse_blocks": 4}
    config = NSAConfig(4, 2, 16, 16, **SMALL, **changes)
    point = Point("small", config, 200, 2, "random", torch.float32, CPU)
    with pytest.raises(UnsupportedError, match="operators of the forward pass"):
        decode.attention_step("nsa", point)
