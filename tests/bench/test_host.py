"""``nsa bench host``: rows behind a gate, ratios to Llama's layer, targets."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import NSAConfig, cli, extras
from nsa.bench import host
from nsa.bench.host import HostPlan, HostRow, bench_host, host_table, of_llama
from nsa.bench.points import Shape
from nsa.bench.rows import Origin
from nsa.errors import UsageError
from tests.ops.cases import small

CPU = torch.device("cpu")


class Small(Shape):
    """Few heads and a pattern whose gate needs few tokens."""

    def config(self, overrides: dict[str, Any] | None = None) -> NSAConfig:
        return small(value_dim=16)


def plan_of(**changes: Any) -> HostPlan:
    given: dict[str, Any] = {"modes": ("fwd", "fwd_bwd"), "weights": ("bfloat16",), "calls": 2, **changes}
    return HostPlan(Small("small", 4, 2, 16, 16), 24, (8, 20), **given)


def row_of(**values: Any) -> HostRow:
    given: dict[str, Any] = {
        "run_id": "a", "device": "cuda", "gpu": "NVIDIA H200", "driver": None, "torch": None, "triton": None, "commit": None,
        "dirty": None, "date": "", "case": "host.module", "provider": "nsa", "mode": "fwd", "shape": "seed", "width": 768,
        "weights": "bfloat16", "tokens": 2048, "host_ms_p50": 1.0, "host_ms_p20": 0.9, "host_ms_p80": 1.1, "launches": 25,
        "gpu_ms": 0.2, "correct": True, "errors": {}, "note": None,
    }  # fmt: skip
    return HostRow(**{**given, **values})


def test_rows_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "rows.jsonl"
    assert bench_host(plan_of(out=out, weights=host.WEIGHTS), CPU)
    rows = [HostRow(**json.loads(line)) for line in out.read_text().splitlines()]
    found = [(row.case, row.provider, row.weights, row.mode, row.tokens) for row in rows]
    layers = [("host.module", provider, weights) for weights in host.WEIGHTS for provider in host.PROVIDERS]
    kinds = [("host.function", "nsa", "bfloat16"), *layers]
    assert found == [(*kind, mode, tokens) for kind in kinds for mode in ("fwd", "fwd_bwd") for tokens in (8, 20)]
    for row in rows:
        assert row.correct
        assert row.host_ms_p20 is not None
        assert row.host_ms_p80 is not None
        assert row.host_ms_p50 is not None
        assert 0 < row.host_ms_p20 <= row.host_ms_p50 <= row.host_ms_p80
        assert (row.launches, row.gpu_ms) == (None, None)  # no GPU
        inputs = 8 if row.case == "host.function" else 1
        weights = [] if row.case == "host.function" else ["dweights"]
        assert list(row.errors) == ["out", *(f"dinput_{index}" for index in range(inputs)), *weights]
        assert all(0 < error < 0.1 for error in row.errors.values())
    said = capsys.readouterr().out
    assert len(re.findall(r"^host\.module +nsa .* \d+\.\d\d$", said, re.MULTILINE)) == 8  # each with a ratio


@pytest.mark.parametrize("mode", list(host.COMPILED))
def test_compiled_modes_are_compiled(mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    def compiled(subject: Any, **options: Any) -> Any:
        asked.append(options)
        return lambda *inputs: subject(*inputs)

    monkeypatch.setattr(torch, "compile", compiled)
    assert bench_host(plan_of(modes=(mode,), cases=("host.module",)), CPU)
    assert asked == [host.COMPILED[mode]] * 2


@pytest.mark.parametrize("wrong", ["out", "gradient"])
def test_a_wrong_layer_gets_no_figure(wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    forward = host.Layer.forward

    def broken(self: host.Layer, x: Tensor) -> Tensor:
        if next(self.parameters()).dtype == torch.float64:
            return forward(self, x)
        return forward(self, x) * 1.05 if wrong == "out" else forward(self, x.detach() + 0.9 * (x - x.detach()))

    monkeypatch.setattr(host.Layer, "forward", broken)
    monkeypatch.setattr(host, "_times", lambda *given: pytest.fail("something wrong is timed"))
    assert not bench_host(plan_of(providers=("nsa",), cases=("host.module",)), CPU)
    assert capsys.readouterr().out.count("WRONG: ") == 4


def test_only_the_call_is_timed() -> None:
    """And not what the device still has to do, nor what is undone between two calls."""
    times = host._times(lambda: time.sleep(0.002), lambda: time.sleep(0.02), CPU, 3)
    assert 2 <= times["host_ms_p50"] < 15


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda module: None)
    with pytest.raises(UsageError, match=r"nsa bench host: not installed: transformers\. Install with: pip install"):
        bench_host(plan_of(), CPU)
    assert bench_host(plan_of(providers=("nsa",), modes=("fwd",), cases=("host.function",)), CPU)


def test_ratio_and_targets() -> None:
    ours, llama = row_of(host_ms_p50=2.2), row_of(provider="llama", host_ms_p50=1.0, launches=9)
    assert of_llama(ours, [ours, llama]) == 2.2
    assert of_llama(llama, [ours, llama]) is None
    for other in ({"run_id": "b"}, {"mode": "fwd_bwd"}, {"tokens": 256}, {"weights": "float32"}, {"width": 512}):
        assert of_llama(ours, [row_of(provider="llama", **other)]) is None
    line = host_table([ours, llama]).splitlines()[1]
    assert "of llama: must 3 pass, goal 2 FAIL" in line
    assert "launches: must 30 pass, goal 20 FAIL" in line
    assert "must" not in host_table([row_of(gpu="another"), llama])
    assert "of llama: must 2 FAIL, goal 1.5 FAIL" in host_table([
        row_of(mode="fwd_bwd", host_ms_p50=2.2), row_of(mode="fwd_bwd", provider="llama"),
    ])  # fmt: skip


def test_fields_are_explained() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md").read_text()
    lines = [line for line in page.partition("| field of a host row |")[2].partition("\n\n")[0].splitlines() if "`" in line]
    explained = [name for line in lines for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    origin = {field.name for field in dataclasses.fields(Origin)}
    assert sorted(explained) == sorted(field.name for field in dataclasses.fields(HostRow) if field.name not in origin)


@pytest.mark.parametrize(("words", "message"), [
    (["--tokens", "0"], "--tokens must be positive lengths with commas between them, got '0'"),
    (["--calls", "0"], "--calls must be positive, got 0"),
    (["--mode", "eager"], "--mode must be among fwd, fwd_bwd, compiled, reduce_overhead, got 'eager'"),
    (["--weights", "float16"], "--weights must be among bfloat16, float32, got 'float16'"),
])  # fmt: skip
def test_wrong_words(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "host", *words]) == 2
    assert message in capsys.readouterr().err
