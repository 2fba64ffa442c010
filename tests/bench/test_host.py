"""``nsa bench host``: rows that passed the gate."""

from __future__ import annotations

import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import NSAConfig, extras
from nsa.bench import host
from nsa.bench.cases import Shape
from nsa.bench.host import bench_host
from nsa.bench.rows import read_rows
from nsa.errors import UsageError
from nsa.module import NativeSparseAttention
from tests.ops.cases import small

CPU = torch.device("cpu")


class Small(Shape):
    """Few heads and a pattern whose gate needs few tokens."""

    def config(self, overrides: dict[str, Any] | None = None) -> NSAConfig:
        return small(value_dim=16)


def bench(**changes: Any) -> bool:
    given: dict[str, Any] = {"modes": ("fwd", "fwd_bwd"), "weights": ("bfloat16",), "calls": 2}
    return bench_host(Small("small", 4, 2, 16, 16), 24, (8, 20), CPU, **{**given, **changes})


def test_rows_of_a_run(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "rows.jsonl"
    assert bench(out=out, weights=host.WEIGHTS)
    rows = read_rows([out])
    found = [(row.case, row.dtype, row.provider, row.mode, row.seq_len) for row in rows]
    layers = list(product(["host.module"], host.WEIGHTS, host.PROVIDERS))
    kinds = [("host.function", "bfloat16", "nsa"), *layers]
    each = list(product(("fwd", "fwd_bwd"), (8, 20)))
    assert found == [(*kind, *point) for kind in kinds for point in each]
    for row in rows:
        assert row.correct
        assert 0 < (row.ms_p20 or 0) <= (row.ms_p50 or 0) <= (row.ms_p80 or 0)
        assert (row.settings, row.timing, row.launches) == ({"width": 24}, "host", None)
        layer = row.case == "host.module"
        inputs = [f"dinput_{index}" for index in range(1 if layer else 8)]
        assert list(row.errors) == ["out", *inputs, *["dweights"] * layer]
        assert all(0 < error < 0.1 for error in row.errors.values())


def test_compiled_modes_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def compiled(subject: Any, **options: Any) -> Any:
        asked.append(options)
        return lambda *inputs: subject(*inputs)

    monkeypatch.setattr(torch, "compile", compiled)
    assert bench(modes=("fwd", *host.COMPILED), cases=("host.module",))
    assert asked == [{}, {"mode": "reduce-overhead"}] * 2


@pytest.mark.parametrize("scale", [1.05, 1.0])
def test_a_wrong_layer_gets_no_time(
    scale: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong output, or a wrong gradient alone."""
    forward = NativeSparseAttention.forward

    def broken(self: Any, x: Tensor) -> Tensor:
        if x.dtype != torch.float64:
            x = x.detach() + 0.9 * (x - x.detach())
        return forward(self, x) * (1.0 if x.dtype == torch.float64 else scale)

    monkeypatch.setattr(NativeSparseAttention, "forward", broken)
    monkeypatch.setattr(host, "host_times", lambda *given: pytest.fail("something wrong is timed"))
    assert not bench(providers=("nsa",), cases=("host.module",))
    assert capsys.readouterr().out.count("WRONG: ") == 4


def test_only_the_call_is_timed() -> None:
    """And not what the device still has to do, nor what is undone between two calls."""
    timing = host.host_times(lambda: time.sleep(0.002), lambda: time.sleep(0.02), CPU, 3)
    assert 2 <= timing.p50 < 15


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda module: None)
    why = r"nsa bench host: not installed: transformers\. Install with: pip install"
    with pytest.raises(UsageError, match=why):
        bench()
    assert bench(providers=("nsa",), modes=("fwd",), cases=("host.function",))
