"""`nsa bench` over the kernels themselves, in the interpreter: gate and variants, no times."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from nsa.bench import attention, cases, clock, decode, tune
from nsa.bench.attention import PROVIDERS, Work, bench_attention
from nsa.bench.cases import Point, Shape, parse_shape
from nsa.bench.clock import Timing
from nsa.bench.rows import read_rows
from nsa.config import NSAConfig
from nsa.lm.baseline import parameters_by_part
from nsa.lm.config import LMConfig
from nsa.ops._triton.tuning import TileKey

SMALL = {"compress_block_size": 8, "compress_stride": 4, "block_size": 16}
SMALL |= {"num_selected_blocks": 4, "window_size": 32}
NOT_TIMED = Timing(1.0, 1.0, 1.0, 1.0, 1, "not timed")
OPERATORS = ("compress", "compressed", "choice", "window", "combine")
CASES = [f"attention.{name}" for name in OPERATORS]


def test_the_kernels_to_tune_are_those_that_look_tiles_up(monkeypatch):
    monkeypatch.setattr(tune, "time_call", lambda call, *_, **__: (call(), NOT_TIMED)[1])
    shape, cpu = parse_shape("3x1x16x16"), torch.device("cpu")
    points = (Point(shape, 128, 1, "random", torch.float32, cpu),)
    bench = tune.Bench(cases.CASES["attention.window"], points)
    tasks = bench.tasks()
    assert [(task.key, task.mode, task.seqs) for task in tasks] == [
        (TileKey(f"window_attention_{name}", 16, 4), mode, (128,))
        for name, mode in (("fwd", "fwd"), ("dq", "fwd_bwd"), ("dkv", "fwd_bwd"))
    ]
    other = tasks[0].start._replace(rows=16)
    assert bench.measure(tasks[0], other) == {128: 1.0}
    assert bench.fault(tasks[0], other) is None
    monkeypatch.setattr(Work, "run", lambda self, mode: (torch.zeros(1, 128, 3, 16),))
    assert str(bench.fault(tasks[0], other)).startswith(
        "S 128: attention.window out: error 1 is above",
    )


@pytest.mark.parametrize("case", CASES)
def test_kernels_pass_the_gate(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "time_call", lambda *_, **__: NOT_TIMED)
    small = replace(PROVIDERS["nsa"], name="small", variant=SMALL)
    monkeypatch.setattr(attention, "parse_variant", lambda text: small)
    out, cpu = tmp_path / "rows.jsonl", torch.device("cpu")
    given: dict[str, Any] = {"tokens": 128, "dtype": torch.float32, "providers": []}
    shape = parse_shape("3x1x16x16")
    assert bench_attention(shape, [128], cpu, cases=[case], variants=["small"], out=out, **given)
    rows = read_rows([out])
    assert rows
    assert all(row.correct and row.variant == SMALL for row in rows)


@pytest.mark.parametrize("provider", ["nsa", "dense-scan"])
def test_a_decode_step_passes_the_gate_and_its_reads_are_counted(provider):
    class Small(Shape):
        def config(self, overrides: dict[str, Any] | None = None) -> NSAConfig:
            return super().config({**SMALL, **(overrides or {})})

    cpu = torch.device("cpu")
    point = Point(Small("small", 4, 2, 16, 16), 200, 2, "random", torch.float32, cpu)
    step = decode.attention_step(provider, point)
    for _ in range(2):
        verdict = step.check()
        assert verdict.correct
        assert 0 < verdict.errors["out"] < 1e-6
    # of l, d = 8, 4: 49 compressed keys; the last block has 8 of its 16 tokens; the window
    keys = 49 + (3 * 16 + 8) + 32 if provider == "nsa" else 200
    # B, Hkv, keys, with values, bytes
    assert step.work() == {"tokens": 2, "read": 2 * 2 * keys * 2 * 16 * 4}


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_bytes_of_a_models_step(attention):
    heads: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "value_dim": 16}
    pattern = NSAConfig(**{**heads, **SMALL})
    config = LMConfig(50, 32, 2, attention, pattern, mlp_hidden_size=64)
    with ExitStack() as stack:
        for place in ("nsa.cache.cache", "nsa.ops.linear", "nsa.ops.projection"):
            stack.enter_context(mock.patch(f"{place}.choose_backend", return_value="triton"))
        stack.enter_context(mock.patch.object(decode, "DTYPE", torch.float32))
        step = decode.model_step(config, 200, 1, 1, torch.device("cpu"))
        step.call()
        found = step.work()["read"]
    # Of 201 tokens 49 compressed keys, the last block with 9 of its 16 tokens, the window; a dense
    # model's are those of the step before.
    keys = 49 + (3 * 16 + 9) + 32 if attention == "nsa" else 200
    parts = parameters_by_part(config)
    weights = parts["total"] - parts["embedding"]
    assert found == 4 * (2 * 2 * keys * 2 * 16 + weights)  # layers, Hkv, keys, with values
