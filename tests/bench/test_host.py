"""``nsa bench host``: rows that passed the gate, ratios to Llama's layer, targets."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import NSAConfig, extras
from nsa.bench import host
from nsa.bench.host import HostPlan, HostRow, bench_host, host_table, of_llama
from nsa.bench.points import Shape
from nsa.bench.rows import Origin
from nsa.errors import UsageError
from nsa.module import NativeSparseAttention
from tests.ops.cases import small

CPU = torch.device("cpu")


class Small(Shape):
    """Few heads and a pattern whose gate needs few tokens."""

    def config(self, overrides: dict[str, Any] | None = None) -> NSAConfig:
        return small(value_dim=16)


def plan_of(**changes: Any) -> HostPlan:
    given: dict[str, Any] = {"modes": ("fwd", "fwd_bwd"), "weights": ("bfloat16",), "calls": 2}
    return HostPlan(Small("small", 4, 2, 16, 16), 24, (8, 20), **{**given, **changes})


def row_of(**values: Any) -> HostRow:
    given: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(HostRow))
    given |= {"run_id": "a", "gpu": "NVIDIA H200", "case": "host.module", "provider": "nsa"}
    given |= {"mode": "fwd", "shape": "seed", "width": 768, "weights": "bfloat16", "tokens": 2048}
    given |= {"host_ms_p50": 2.2, "launches": 25, "correct": True}
    return HostRow(**{**given, **values})


def test_rows_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "rows.jsonl"
    assert bench_host(plan_of(out=out, weights=host.WEIGHTS), CPU)
    rows = [HostRow(**json.loads(line)) for line in out.read_text().splitlines()]
    found = [(row.case, row.weights, row.provider, row.mode, row.tokens) for row in rows]
    layers = list(product(["host.module"], host.WEIGHTS, host.PROVIDERS))
    kinds = [("host.function", "bfloat16", "nsa"), *layers]
    each = list(product(("fwd", "fwd_bwd"), (8, 20)))
    assert found == [(*kind, *point) for kind in kinds for point in each]
    for row in rows:
        assert row.correct
        times = [row.host_ms_p20 or 0, row.host_ms_p50 or 0, row.host_ms_p80 or 0]
        assert times[0] > 0
        assert times == sorted(times)
        assert (row.launches, row.gpu_ms) == (None, None)  # no GPU
        layer = row.case == "host.module"
        inputs = [f"dinput_{index}" for index in range(1 if layer else 8)]
        assert list(row.errors) == ["out", *inputs, *["dweights"] * layer]
        assert all(0 < error < 0.1 for error in row.errors.values())
    ratios = re.findall(r"^host\.module +nsa .* \d+\.\d\d$", capsys.readouterr().out, re.MULTILINE)
    assert len(ratios) == 8


def test_compiled_modes_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def compiled(subject: Any, **options: Any) -> Any:
        asked.append(options)
        return lambda *inputs: subject(*inputs)

    monkeypatch.setattr(torch, "compile", compiled)
    assert bench_host(plan_of(modes=("fwd", *host.COMPILED), cases=("host.module",)), CPU)
    assert asked == [{}, {"mode": "reduce-overhead"}] * 2


@pytest.mark.parametrize("scale", [1.05, 1.0])
def test_a_wrong_layer_gets_no_figure(
    scale: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong output, or a wrong gradient alone."""
    forward = NativeSparseAttention.forward

    def broken(self: Any, x: Tensor) -> Tensor:
        if x.dtype != torch.float64:
            x = x.detach() + 0.9 * (x - x.detach())
        return forward(self, x) * (1.0 if x.dtype == torch.float64 else scale)

    monkeypatch.setattr(NativeSparseAttention, "forward", broken)
    monkeypatch.setattr(host, "_times", lambda *given: pytest.fail("something wrong is timed"))
    assert not bench_host(plan_of(providers=("nsa",), cases=("host.module",)), CPU)
    assert capsys.readouterr().out.count("WRONG: ") == 4


def test_only_the_call_is_timed() -> None:
    """And not what the device still has to do, nor what is undone between two calls."""
    times = host._times(lambda: time.sleep(0.002), lambda: time.sleep(0.02), CPU, 3)
    assert 2 <= times["host_ms_p50"] < 15


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda module: None)
    why = r"nsa bench host: not installed: transformers\. Install with: pip install"
    with pytest.raises(UsageError, match=why):
        bench_host(plan_of(), CPU)
    assert bench_host(plan_of(providers=("nsa",), modes=("fwd",), cases=("host.function",)), CPU)


def test_ratio_and_targets() -> None:
    ours, llama = row_of(), row_of(provider="llama", host_ms_p50=1.0)
    assert of_llama(ours, [ours, llama]) == 2.2
    assert of_llama(llama, [ours, llama]) is None
    others = ({"run_id": "b"}, {"mode": "fwd_bwd"}, {"tokens": 256}, {"weights": "x"}, {"width": 5})
    for other in others:
        assert of_llama(ours, [dataclasses.replace(llama, **other)]) is None
    line = host_table([ours, llama]).splitlines()[1]
    assert "2.2 of llama: target 3 pass, stretch 2 FAIL" in line
    assert "25 launches: target 30 pass, stretch 20 FAIL" in line
    assert "target" not in host_table([row_of(gpu="another"), llama])


def test_fields_are_explained() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md").read_text()
    table = page.partition("| field of a host row |")[2].partition("\n\n")[0]
    explained = re.findall(r"`(\w+)`", "".join(re.findall(r"^\|[^|]*", table, re.MULTILINE)))
    names, origin = (set(kind.__dataclass_fields__) for kind in (HostRow, Origin))
    assert sorted(explained) == sorted(names - origin)
