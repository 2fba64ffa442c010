"""What kernels need inside an operator: the formulas against what was measured on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nsa.bench.points import parse_shape
from nsa.bench.report import newest_rows
from nsa.bench.rows import Row, read_rows
from nsa.plan.scratch import _Attention, _dense_backward

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
MIB = 2**20


def whole_attention(row: Row) -> float:
    """Peak memory of a row of whole attention, MiB, above its inputs: results, saved tensors, gradients and scratch."""
    pattern, tokens = parse_shape(row.shape).config(), row.batch * row.seq_len
    call = _Attention(pattern, tokens, row.batch, row.seq_len, row.seq_len, 2, False, "auto")
    out, statistics, backward = call.queries(pattern.value_dim), call.statistics(), row.mode == "fwd_bwd"
    dq = call.queries(pattern.head_dim)
    if row.provider == "dense-cudnn":
        q = torch.empty(row.batch, pattern.num_heads, row.seq_len, pattern.head_dim, dtype=torch.bfloat16, device="meta")
        k = q[:, : pattern.num_kv_heads]
        return (out + statistics + backward * (dq + call.keys() + _dense_backward(q, k, k[..., : pattern.value_dim]))) / MIB
    kept = 4 * out + 3 * statistics + 4 * call.entries * (1 if call.tiled else 2) + call.keys() // pattern.compress_stride
    if not backward:
        return (kept + call.forward()) / MIB
    gates = tokens * pattern.num_heads * 3 * 2
    # The gradient of the keys before compression comes last, when scratch is gone.
    return (
        kept + dq + gates + 2 * call.keys() + max(call.keys() // pattern.compress_stride + call.backward(), call.keys())
    ) / MIB


def test_the_formulas_agree_with_what_was_measured() -> None:
    newest = newest_rows(read_rows(sorted(RESULTS.glob("h200-*.jsonl"))))  # the formulas are those of the present kernels
    rows = [row for row in newest if row.case == "attention" and row.peak_mib]
    rows = [row for row in rows if row.provider in ("nsa", "dense-cudnn") and row.seq_len <= 2**20]
    assert len(rows) >= 50
    for row in rows:
        assert whole_attention(row) == pytest.approx(row.peak_mib, rel=0.04), (row.shape, row.provider, row.mode, row.seq_len)
