"""``nsa bench decode``: rows, the gate, the fastest dense attention, targets and the report."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import NSAConfig, cli
from nsa.bench import decode, decode_attention
from nsa.bench.clock import Timing
from nsa.bench.decode import CASES, DecodePlan, bench_decode
from nsa.bench.decode_attention import Attention
from nsa.bench.decode_generate import GENERATORS
from nsa.bench.guard import guard
from nsa.bench.points import Point, Shape
from nsa.bench.report import write_report
from nsa.bench.rows import Row, read_rows
from nsa.bench.targets import DENSE_DECODE, figures, is_void, of_dense, outcomes, targets
from nsa.errors import UserError
from nsa.lm.decoder import Decoder
from tests.bench.rows import H200, make_row
from tests.ops.cases import small

CPU = torch.device("cpu")
TINY = """
model: {vocab_size: 50, width: 32, num_layers: 3, mlp_hidden_size: 64, nsa: {num_heads: 4, \
num_kv_heads: 2, head_dim: 16, value_dim: 16, compress_block_size: 8, compress_stride: 4, \
block_size: 16, num_selected_blocks: 4, window_size: 32}}
"""


class Small(Shape):
    """Few heads and a pattern that is sparse at few tokens."""

    def config(self, overrides: dict[str, Any] | None = None) -> NSAConfig:
        return small(value_dim=16)


SHAPE = Small("small", 4, 2, 16, 16)
POINT = Point(SHAPE, 300, 3, "random", torch.bfloat16, CPU)


@pytest.fixture
def plan(tmp_path: Path) -> DecodePlan:
    config = tmp_path / "tiny.yaml"
    config.write_text(TINY)
    given: dict[str, Any] = {"points": ((200, 1), (140, 2)), "prefills": (130,), "steps": 3}
    return DecodePlan(SHAPE, config, "tiny", **given, out=tmp_path / "rows.jsonl", budget_ms=1)


def test_rows_of_a_run(plan: DecodePlan) -> None:
    assert bench_decode(plan, CPU)
    assert plan.out is not None
    rows = read_rows([plan.out])
    attention, model = CASES
    steps = [(200, 1, "step"), (140, 2, "step")]
    assert [(row.case, row.provider, row.seq_len, row.batch, row.mode) for row in rows] == [
        *((attention, "reference", *point) for point in steps),
        *(
            (model, name, *point)
            for point in [*steps, (130, 1, "prefill")]
            for name in ("nsa", "dense")
        ),
    ]
    for row in rows:
        assert row.ms_p20
        assert row.ms_p50
        assert row.ms_p80
        assert row.tokens_per_s
        assert 0 < row.ms_p20 <= row.ms_p50 <= row.ms_p80
        taken = row.seq_len if row.mode == "prefill" else row.batch
        slowest = 1000 * taken / row.ms_p80
        assert row.case == model or slowest <= row.tokens_per_s <= 1000 * taken / row.ms_p20
        names = {"out"} if row.case == attention else {"logits"}
        assert row.errors.keys() == names
        assert all(0 < error < 0.02 for error in row.errors.values())
        assert (row.shape, row.choice) in (("small", "random"), ("tiny", "model"))
        assert (row.launches, row.mib_read, row.kernels) == (None, None, [])  # of a GPU


def fake(monkeypatch: pytest.MonkeyPatch, times: dict[str, float]) -> None:
    """Providers of attention that give ones in these ms, and read 3 MB; a copy moves 4 TB/s."""

    def prepare(provider: str, point: Point) -> Attention:
        def call() -> Tensor:
            now.append(times[provider])
            return torch.ones(point.batch, 4, 16, dtype=point.dtype)

        return Attention(call, lambda b, dtype: torch.ones(1, 4, 16, dtype=dtype), (), 3_000_000)

    def time_call(call: Any, *_: Any, **__: Any) -> Timing:
        call()
        return Timing(now[-1], now[-1], now[-1], 1, "faked")

    now = list[float]()
    monkeypatch.setattr(decode, "prepare_attention", prepare)
    monkeypatch.setattr(decode, "time_call", time_call)
    monkeypatch.setattr(decode, "copy_tbps", lambda device: 4.0)


def test_the_fastest_dense_attention_is_the_rival(
    plan: DecodePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {name: 0.01 + 0.001 * i for i, name in enumerate(DENSE_DECODE[::-1])}
    fake(monkeypatch, {**times, "nsa": 0.002})
    providers = ["nsa", *DENSE_DECODE]
    chosen = dataclasses.replace(plan, cases=CASES[:1], providers=providers)
    assert bench_decode(chosen, CPU)
    assert plan.out is not None
    kept = read_rows([plan.out])
    by = figures(kept)
    ours, *dense = kept[:8]
    assert of_dense(ours, by) == pytest.approx(0.2)
    assert [of_dense(row, by) for row in dense if row.provider == DENSE_DECODE[-1]] == [1.0]
    assert ours.tokens_per_s == 500_000
    assert ours.tbps_useful == pytest.approx(1.5)
    assert ours.of_copy == pytest.approx(0.375)
    assert ours.mib_read == pytest.approx(2.86102)
    assert ours.settings == {"copy_tbps": 4.0}


@pytest.mark.parametrize("provider", ["dense-fa2", "dense-fa2-folded"])
def test_dense_attention_passes_the_gate(provider: str) -> None:
    step, errors = decode_attention._static(POINT, SHAPE.config(), provider), dict[str, float]()
    step.compare(errors)
    assert 0 < errors["out"] < 4e-3
    assert step.bytes_read == 3 * 2 * 300 * (16 + 16) * 2  # B, Hkv, S, D and Dv, bytes
    wrong = dataclasses.replace(step, call=lambda: step.call() * 1.05)
    with pytest.raises(AssertionError, match="out: error"):
        wrong.compare(errors)


def test_a_wrong_step_gets_no_figure(
    plan: DecodePlan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare = decode_attention.prepare_attention

    def broken(provider: str, point: Point) -> Attention:
        step = prepare(provider, point)
        rolled = lambda: step.call().roll(1, 0)  # noqa: E731
        return dataclasses.replace(step, call=rolled if point.batch > 1 else step.call)

    monkeypatch.setattr(decode, "prepare_attention", broken)
    monkeypatch.setattr(
        Decoder, "step", lambda self, tokens, kept=Decoder.step: -kept(self, tokens)
    )
    monkeypatch.setattr(decode, "prepare_step", lambda *_: pytest.fail("something wrong is timed"))
    assert not bench_decode(dataclasses.replace(plan, prefills=None), CPU)
    said = capsys.readouterr().out
    assert said.count("WRONG: out: error") == 1
    assert said.count("WRONG: logits: error") == 4


def test_what_cannot_run_here_says_why(
    plan: DecodePlan, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["nsa", "dense-cudnn", "dense-flex"]
    assert bench_decode(dataclasses.replace(plan, cases=CASES[:1], providers=names), CPU)
    assert capsys.readouterr().out.count("step     not run: it needs a CUDA GPU") == 6


@pytest.mark.parametrize("name", GENERATORS)
def test_transformers_generates_with_a_static_cache(
    name: str,
    plan: DecodePlan,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chosen = dataclasses.replace(plan, cases=CASES[1:], providers=["dense", name])
    assert bench_decode(chosen, CPU)
    assert plan.out is not None
    alone, several = (row for row in read_rows([plan.out]) if row.provider == name)
    assert alone.samples == plan.steps
    assert alone.errors["logits"] < 1e-2
    assert alone.tokens_per_s == pytest.approx(1000 / (alone.ms_p50 or 0), rel=1e-4)
    assert several.note == "not run: measured with one sequence of at most 65,536 tokens"
    monkeypatch.setattr(decode, "missing", lambda extra: ["transformers"])
    assert bench_decode(dataclasses.replace(chosen, providers=[name]), CPU)
    assert "not run: transformers is not installed: pip install" in capsys.readouterr().out


def test_a_wrong_generate_gets_no_figure(
    plan: DecodePlan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        Decoder, "step", lambda self, tokens, kept=Decoder.step: -kept(self, tokens)
    )
    chosen = dataclasses.replace(plan, cases=CASES[1:], providers=["hf"], points=((140, 1),))
    assert not bench_decode(chosen, CPU)
    assert "WRONG: logits: error 2" in capsys.readouterr().out


def test_kernels_that_did_not_run_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "profiled", lambda call, device: None)
    monkeypatch.setattr(decode, "gpu_events", lambda trace: [1, 2, 3])
    monkeypatch.setattr(decode, "kernel_sums", lambda trace: {"decode_scan_kernel": 1.0})
    cuda = torch.device("cuda")
    seen = {"launches": 3, "kernels": ["decode_scan_kernel"]}
    seen["kernel_us"] = {"decode_scan_kernel": 1.0}
    assert decode._seen(lambda: None, ("decode_scan",), cuda) == seen
    wrong = {"correct": False, "note": "no kernel with decode_merge in its name ran"}
    assert decode._seen(lambda: None, ("decode_merge",), cuda) == {**seen, **wrong}


# --- Targets and report
def step(provider: str, ms: float, **values: Any) -> Row:
    given = {"case": "decode.attention", "shape": "wide", "seq_len": 65_536, "batch": 32}
    return make_row(
        **{**given, "mode": "step", "provider": provider, "ms_p50": ms, **H200, **values}
    )


def test_targets() -> None:
    found = {
        (t.where["case"], t.where["seq_len"], t.where["batch"])
        for t in targets()[1]
        if t.where.get("case") in CASES and t.where["provider"] == "nsa"
    }
    wanted = {(CASES[0], *point) for point in decode.ATTENTION_POINTS}
    assert found == wanted | {(CASES[1], *point) for point in decode.MODEL_POINTS}
    ours, slow, fast = (
        step("nsa", 1.0),
        step("dense-fa2", 9.0, of_copy=0.7),
        step("dense-scan", 7.0),
    )
    for share, void in ((0.76, False), (0.74, True)):
        fastest = dataclasses.replace(fast, of_copy=share)
        by = figures([ours, slow, fastest])
        assert [str(each) for each in outcomes(ours, by)] == [
            "7 times dense: target 6.5 pass, stretch 9 FAIL"
        ]
        (copied,) = outcomes(fastest, by)
        assert copied.passed is not void
        assert not outcomes(slow, by)  # of the fastest alone
        assert is_void(ours, by) is void


def test_report(tmp_path: Path) -> None:
    rows = [step("nsa", 1.0, launches=4, mib_read=352.0), step("dense-flex", 7.0, of_copy=0.8)]
    model = {"case": "decode.model", "shape": "seed", "choice": "model", "seq_len": 65_536}
    for mode, batch, ms in (("step", 1, 0.5), ("step", 64, 2.0), ("prefill", 1, 60.0)):
        point = {**model, "mode": mode, "batch": batch}
        rows += [step("nsa", ms, **point), step("dense", 6 * ms, **point)]
    text = write_report(rows, tmp_path).read_text()
    assert "7 times dense: target 6.5 pass, stretch 9 FAIL" in text
    assert "0.8 of copy bandwidth: target 0.75 pass" in text
    assert "0.5: target 0.75 pass, stretch 0.4 FAIL" in text
    assert "6 times dense: target 5 pass, stretch 7 FAIL" in text
    assert "6 times dense: target 2.7 pass, stretch 3.5 pass" in text
    assert "| launches | MiB read | of copy bandwidth |" in text
    kinds = ("decode-model-ratio", "decode-model-time", "decode-ratio", "decode-time")
    assert sorted(path.name.partition("-bfloat16")[0] for path in tmp_path.glob("*.png")) == [
        *(f"{kind}-seed-model" for kind in kinds[:2]),
        *(f"{kind}-wide-random" for kind in kinds[2:]),
    ]


def test_ratios_to_the_fastest_dense_attention_are_guarded() -> None:
    before = [step("nsa", 1.0), step("dense-fa2", 8.0), step("dense-scan", 7.0)]
    lines, passed = guard([step("nsa", 1.2), *before[1:]], before, 0.05)
    assert not passed
    assert lines[-1].startswith("2 ratios compared, 1 worse")  # of time and of memory


# --- The command
@pytest.mark.parametrize("points", ["", "12x", "x3", "2048,0x1", "2048x0", "2048 x 1"])
def test_points_that_are_none(points: str) -> None:
    assert cli.main(["bench", "decode", "--points", points]) == 2


def test_points(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[DecodePlan]()

    def noted(plan: DecodePlan, device: torch.device) -> bool:
        asked.append(plan)
        return True

    monkeypatch.setattr(decode, "bench_decode", noted)
    assert cli.main(["bench", "decode", "--points", "2048,65536x32", "--prefill", "256"]) == 0
    assert asked[0].points == [(2048, 1), (65_536, 32)]
    assert (asked[0].name, asked[0].prefills, asked[0].cases) == ("seed", [256], [*CASES])


def test_what_a_cpu_or_a_short_context_cannot_do_is_refused(plan: DecodePlan) -> None:
    with pytest.raises(UserError, match="this machine must have a CUDA GPU, got none"):
        bench_decode(dataclasses.replace(plan, points=None), CPU)
    with pytest.raises(UserError, match="tokens of context must be at least 128, got 100"):
        bench_decode(dataclasses.replace(plan, points=((100, 1),)), CPU)
