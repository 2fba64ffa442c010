"""`nsa bench attention` over the kernels themselves, in the interpreter: gate and variants; there is nothing to time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nsa.bench import attention, cases, tune
from nsa.bench.attention import Plan, bench_attention
from nsa.bench.clock import Timing
from nsa.bench.points import Point, parse_shape
from nsa.bench.providers import Work
from nsa.bench.rows import read_rows
from nsa.bench.variants import Variant

SMALL = {
    "compress_block_size": 8, "compress_stride": 4, "block_size": 16, "num_selected_blocks": 4, "window_size": 32,
}  # fmt: skip
CASES = ["attention.compress", "attention.compressed", "attention.choice", "attention.window", "attention.combine"]


def test_the_kernels_to_tune_are_those_that_look_tiles_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "time_call", lambda call, *_, **__: (call(), Timing(1.0, 1.0, 1.0, 1, 1, "not timed"))[1])
    points = [Point(parse_shape("3x1x16x16"), 128, 1, "random", torch.float32, torch.device("cpu"))]
    bench = tune.Bench(cases.CASES["attention.window"], points)
    tasks = bench.tasks()
    found = [(task.key.kernel, task.key.head_size, task.key.element_size, task.mode, task.seqs) for task in tasks]
    assert found == [
        ("window_attention_fwd", 16, 4, "fwd", (128,)),
        ("window_attention_dq", 16, 4, "fwd_bwd", (128,)),
        ("window_attention_dkv", 16, 4, "fwd_bwd", (128,)),
    ]
    other = tasks[0].start._replace(rows=16)
    assert bench.measure(tasks[0])(other) == {128: 1.0}
    assert bench.fault(tasks[0], other) is None
    monkeypatch.setattr(Work, "run", lambda self, mode: (torch.zeros(1, 128, 3, 16),))
    assert str(bench.fault(tasks[0], other)).startswith("S 128: attention.window out: error 1 is above")


@pytest.mark.parametrize("case", CASES)
def test_kernels_pass_the_gate_and_a_variant_is_looked_up(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "time_call", lambda *_, **__: Timing(1.0, 1.0, 1.0, 1, 1, "not timed"))
    variants = [Variant("small", config=SMALL), Variant("tiles", config=SMALL, tiles={"*": {"rows": 16}})]
    plan = Plan(
        parse_shape("3x1x16x16"), [128], tokens=128, cases=[case], providers=["small"], variants=variants, dtype=torch.float32,
        out=tmp_path / "rows.jsonl", budget_ms=1,
    )  # fmt: skip
    assert bench_attention(plan, torch.device("cpu"))
    rows = read_rows([tmp_path / "rows.jsonl"])
    assert all(row.correct for row in rows if row.provider == "small")
    tuned = case in ("attention.compressed", "attention.choice", "attention.window")
    assert all(row.correct is (True if tuned else None) for row in rows if row.provider == "tiles")
    assert {row.provider for row in rows} == {"small", "tiles"}
