"""``nsa bench host``: rows that passed the gate."""

from __future__ import annotations

import time
from itertools import product
from typing import Any

import pytest
import torch

from nsa import extras
from nsa.bench import host
from nsa.bench.host import bench_host
from nsa.bench.report import Results
from nsa.bench.rows import Row
from nsa.errors import UsageError
from nsa.module import NativeSparseAttention
from tests.ops.cases import small

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_calls(monkeypatch):
    monkeypatch.setattr(host, "CALLS", 3)


def bench(**changes: Any) -> tuple[int, list[Row]]:
    results = Results(None, CPU)
    given: dict[str, Any] = {"modes": ("fwd", "fwd_bwd"), **changes}
    bench_host(results, "small", small(value_dim=16), (8, 20), **given)
    return results.finish(), results.rows


def test_rows_of_a_run():
    code, rows = bench()
    assert code == 0
    found = [(row.provider, row.mode, row.seq_len) for row in rows]
    assert found == list(product(host.PROVIDERS, ("fwd", "fwd_bwd"), (8, 20)))
    for row in rows:
        assert row.correct
        assert 0 < (row.ms_p20 or 0) <= (row.ms_p50 or 0) <= (row.ms_p80 or 0)
        assert (row.settings, row.timing, row.launches) == ({"width": 64}, "host", None)
        assert (row.case, row.shape, row.dtype) == ("host.module", "small", "bfloat16")
        assert list(row.errors) == ["out", "dinput_0", "dweights"]
        assert all(0 < error < 0.1 for error in row.errors.values())


def test_adapters_on_all_projections():
    code, rows = bench(lora=2, modes=("fwd_bwd",))
    assert code == 0
    assert all(row.correct and row.settings == {"width": 64, "lora": 2} for row in rows)


def test_compiled_modes_are_compiled(monkeypatch):
    asked = list[Any]()

    def compiled(subject):
        asked.append(subject)
        return lambda *inputs: subject(*inputs)

    monkeypatch.setattr(torch, "compile", compiled)
    assert bench(modes=("fwd", "compiled"))[0] == 0
    assert len(asked) == len(host.PROVIDERS)


@pytest.mark.parametrize("scale", [1.05, 1.0])
def test_a_wrong_layer_gets_no_time(scale, monkeypatch):
    """A wrong output, or a wrong gradient alone."""
    forward = NativeSparseAttention.forward

    def broken(self, x):
        if x.dtype != torch.float64:
            x = x.detach() + 0.9 * (x - x.detach())
        return forward(self, x) * (1.0 if x.dtype == torch.float64 else scale)

    monkeypatch.setattr(NativeSparseAttention, "forward", broken)
    code, rows = bench(providers=("nsa",))
    assert code == 1
    assert [(row.correct, row.ms_p50) for row in rows] == [(False, None)] * 4


def test_only_the_call_is_timed():
    """Device work and the reset between two calls are not timed."""
    timing = host.host_times(lambda: time.sleep(0.002), lambda: time.sleep(0.02), CPU)
    assert 2 <= timing.ms_p50 < 15


def test_without_transformers(monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda module: None)
    why = r"nsa bench host: not installed: transformers\. Install with: pip install"
    with pytest.raises(UsageError, match=why):
        bench()
    assert bench(providers=("nsa",), modes=("fwd",))[0] == 0
