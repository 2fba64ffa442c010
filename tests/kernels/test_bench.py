"""`nsa bench attention` over the kernels themselves, in the interpreter: gate and variants; there is nothing to time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nsa.bench import attention
from nsa.bench.attention import Plan, bench_attention
from nsa.bench.clock import Timing
from nsa.bench.points import parse_shape
from nsa.bench.rows import read_rows
from nsa.bench.variants import Variant

SMALL = {
    "compress_block_size": 8, "compress_stride": 4, "block_size": 16, "num_selected_blocks": 4, "window_size": 32,
}  # fmt: skip
CASES = ["attention.compress", "attention.compressed", "attention.choice", "attention.window", "attention.combine"]


@pytest.mark.parametrize("case", CASES)
def test_kernels_pass_the_gate_and_a_variant_is_looked_up(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "time_call", lambda *_: Timing(1.0, 1.0, 1.0, 1, 1, "not timed"))
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
