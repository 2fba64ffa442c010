"""``nsa bench decode``: rows, the gate, points."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa import NSAConfig, cli
from nsa.bench import clock, decode
from nsa.bench.cases import Point, Shape
from nsa.bench.clock import Subject, Timing, Verdict
from nsa.bench.decode import CASES, GENERATORS, bench_decode
from nsa.bench.rows import DENSE_DECODE, Row, figures, of_dense, read_rows, targets
from nsa.errors import UserError
from nsa.lm.decoder import Decoder
from tests.ops.cases import small

CPU = torch.device("cpu")
ATTENTION, MODEL = CASES
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


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the benchmark: exit code and rows."""
    config, out = tmp_path / "tiny.yaml", tmp_path / "rows.jsonl"
    config.write_text(TINY)
    monkeypatch.setattr(clock, "BUDGET_MS", 1.0)
    decode.check_decoder.cache_clear()

    def run(**given: Any) -> tuple[bool, list[Row]]:
        usual: dict[str, Any] = {"points": ((200, 1), (140, 2)), "prefills": (130,), "steps": 3}
        passed = bench_decode(SHAPE, config, "tiny", CPU, **{**usual, **given}, out=out)
        return passed, read_rows([out])

    yield run
    decode.check_decoder.cache_clear()


def test_rows_of_a_run(bench: Any) -> None:
    passed, rows = bench()
    assert passed
    steps = [(200, 1, "step"), (140, 2, "step")]
    assert [(row.case, row.provider, row.seq_len, row.batch, row.mode) for row in rows] == [
        *((ATTENTION, "reference", *point) for point in steps),
        *((MODEL, each, *at) for at in [*steps, (130, 1, "prefill")] for each in ("nsa", "dense")),
    ]
    for row in rows:
        assert 0 < (row.ms_p20 or 0) <= (row.ms_p50 or 0) <= (row.ms_p80 or 0)
        taken = row.seq_len if row.mode == "prefill" else row.batch
        assert row.tokens_per_s <= 1000 * taken / row.ms_p20
        assert row.errors.keys() == {"out" if row.case == ATTENTION else "logits"}
        assert all(0 < error < 0.02 for error in row.errors.values())
        assert (row.shape, row.choice) in (("small", "random"), ("tiny", "model"))
        assert (row.launches, row.mib_read, row.kernels) == (None, None, [])  # of a GPU


def test_the_fastest_dense_attention_counts(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Providers take these ms and read 3 MB; a copy moves 4 TB/s."""
    times = {name: 0.01 + 0.001 * i for i, name in enumerate(DENSE_DECODE[::-1])}
    times["nsa"] = 0.002

    def step(provider: str, point: Point) -> Subject:
        ms = times[provider]
        work = {"tokens": point.batch, "read": 3_000_000}
        timing = Timing(ms, ms, ms, ms, 1, "faked")
        return Subject(int, lambda: Verdict(True, {}), work=lambda: work, time=lambda: timing)

    monkeypatch.setattr(decode, "attention_step", step)
    monkeypatch.setattr(clock, "copy_tbps", lambda device: 4.0)
    passed, rows = bench(cases=[ATTENTION], providers=["nsa", *DENSE_DECODE])
    assert passed
    ours, *dense = rows[:8]
    by = figures(rows)
    assert of_dense(ours, by) == pytest.approx(0.2)
    assert [of_dense(row, by) for row in dense if row.provider == DENSE_DECODE[-1]] == [1.0]
    assert (ours.tokens_per_s, ours.mib_read) == (500_000, 2.86102)
    assert (ours.tbps_useful, ours.of_copy) == (1.5, 0.375)
    assert ours.settings == {"copy_tbps": 4.0}


@pytest.mark.parametrize("provider", ["dense-fa2", "dense-fa2-folded"])
def test_dense_attention_passes_the_gate(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "kernels_run_on_cpu", lambda: True)
    point = Point(SHAPE, 300, 3, "random", torch.bfloat16, CPU)
    subject = decode.attention_step(provider, point)
    verdict = subject.check()
    assert verdict.correct
    assert 0 < verdict.errors["out"] < 4e-3
    # B, Hkv, S, D and Dv, bytes
    assert subject.work() == {"tokens": 3, "read": 3 * 2 * 300 * (16 + 16) * 2}
    assert subject.fault(["flash_fwd_kernel"]) is None
    assert subject.fault([]) == "no kernel with flash_fwd in its name ran, or too few"
    static = decode._static

    def wrong(*given: Any) -> Any:
        call, *others = static(*given)
        return lambda: call() * 1.05, *others

    monkeypatch.setattr(decode, "_static", wrong)
    assert not decode.attention_step(provider, point).check().correct


def negated(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Decoder.step
    monkeypatch.setattr(Decoder, "step", lambda self, tokens: -step(self, tokens))


def test_a_wrong_step_gets_no_time(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cached = decode._cached

    def rolled(point: Point, *given: Any) -> Any:
        call, *others = cached(point, *given)
        return (lambda: call().roll(1, 0)) if point.batch > 1 else call, *others

    monkeypatch.setattr(decode, "_cached", rolled)
    negated(monkeypatch)
    monkeypatch.setattr(decode, "_timed", lambda *_: pytest.fail("something wrong is timed"))
    assert not bench(prefills=None)[0]
    said = capsys.readouterr().out
    assert said.count("WRONG: out: error") == 1
    assert said.count("WRONG: logits: error") == 4


def test_what_cannot_run_here_says_why(bench: Any) -> None:
    names = ["nsa", "dense-cudnn", "dense-flex"]
    passed, rows = bench(cases=[ATTENTION], providers=names)
    assert (passed, {row.note for row in rows}) == (True, {"not run: it needs a CUDA GPU"})


@pytest.mark.parametrize("name", GENERATORS)
def test_transformers_generates_with_a_static_cache(
    name: str, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = partial(bench, cases=[MODEL], providers=["dense", name])
    passed, rows = run()
    alone, several = (row for row in rows if row.provider == name)
    assert (passed, alone.samples) == (True, 3)
    assert alone.errors["logits"] < 1e-2
    assert several.note == "not run: measured with one sequence of at most 65,536 tokens"
    monkeypatch.setattr(decode, "missing", lambda extra: ["transformers"])
    passed, rows = run(providers=[name])
    assert passed
    assert str(rows[-1].note).startswith("not run: transformers is not installed: pip install")


def test_a_wrong_generate_gets_no_time(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    negated(monkeypatch)
    passed, (row,) = bench(cases=[MODEL], providers=["hf"], points=((140, 1),), prefills=())
    assert not passed
    assert str(row.note).startswith("logits: error 2")


def test_the_points_are_those_of_the_targets() -> None:
    wheres = [target["where"] for target in targets()["targets"]]
    found = {
        (where["case"], where["seq_len"], where["batch"])
        for where in wheres
        if where["case"] in CASES and where["provider"] == "nsa"
    }
    wanted = {(ATTENTION, *point) for point in decode.ATTENTION_POINTS}
    assert found == wanted | {(MODEL, *point) for point in decode.MODEL_POINTS}


# --- The command
@pytest.mark.parametrize("points", ["", "12x", "x3", "2048,0x1", "2048x0", "2048 x 1"])
def test_points_that_are_none(points: str) -> None:
    assert cli.main(["bench", "decode", "--points", points]) == 2


def test_points(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = dict[str, Any]()

    def noted(shape: Shape, config: Path, name: str, device: torch.device, **given: Any) -> bool:
        asked.update(given, name=name)
        return True

    monkeypatch.setattr(decode, "bench_decode", noted)
    assert cli.main(["bench", "decode", "--points", "2048,65536x32", "--prefill", "256"]) == 0
    assert asked["points"] == [(2048, 1), (65_536, 32)]
    assert (asked["name"], asked["prefills"], asked["cases"]) == ("seed", [256], [*CASES])


def test_what_a_cpu_or_a_short_context_cannot_do_is_refused(bench: Any) -> None:
    with pytest.raises(UserError, match="this machine must have a CUDA GPU, got none"):
        bench(points=None)
    with pytest.raises(UserError, match="tokens of context must be at least 128, got 100"):
        bench(points=((100, 1),))
