"""``nsa bench decode``: rows, the gate, points."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nsa import NSAConfig, cli
from nsa.bench import clock, decode
from nsa.bench.attention import parse_variant
from nsa.bench.cases import Point
from nsa.bench.clock import Subject, Timing, verdict
from nsa.bench.decode import CASES, POINTS, bench_decode
from nsa.bench.report import Results
from nsa.bench.rows import DENSE_DECODE, index_rows, of_dense, targets
from nsa.bench.train import model_of
from nsa.lm.config import LMConfig
from nsa.lm.decoder import Decoder
from nsa.lm.model import LanguageModel
from nsa.train.config import TrainConfig
from tests.ops.cases import small

CPU = torch.device("cpu")
ATTENTION, MODEL = CASES
HEADS = small(value_dim=16)
PATTERN = NSAConfig(4, 2, 16, 16, 8, 4, 16, num_selected_blocks=4, window_size=32)
TINY = TrainConfig(model=LMConfig(50, 32, 3, "nsa", PATTERN, mlp_hidden_size=64))


@pytest.fixture
def bench(monkeypatch):
    """Runs the benchmark: exit code and rows."""
    monkeypatch.setattr(clock, "BUDGET_MS", 1.0)
    decode.check_decoder.cache_clear()

    def run(**given):
        results = Results(None, CPU)
        usual: dict[str, Any] = {"points": ((200, 1), (140, 2))}
        bench_decode(results, "small", HEADS, TINY, "tiny", **{**usual, **given})
        return results.finish(), results.rows

    yield run
    decode.check_decoder.cache_clear()


def test_rows_of_a_run(bench):
    code, rows = bench()
    assert code == 0
    points = [(200, 1), (140, 2)]
    assert [(row.case, row.provider, row.seq_len, row.batch) for row in rows] == [
        *((ATTENTION, "reference", *point) for point in points),
        *((MODEL, each, *point) for point in points for each in ("nsa", "dense")),
    ]
    for row in rows:
        assert 0 < (row.ms_p20 or 0) <= (row.ms_p50 or 0) <= (row.ms_p80 or 0)
        assert row.tokens_per_s <= 1000 * row.batch / row.ms_p20
        assert row.errors.keys() == {"out" if row.case == ATTENTION else "logits"}
        assert all(0 < error < 0.02 for error in row.errors.values())
        assert (row.shape, row.choice) in (("small", "random"), ("tiny", "model"))
        assert (row.mode, row.dtype) == ("step", "bfloat16")
        assert (row.launches, row.mib_read, row.kernels) == (None, None, [])  # of a GPU


def test_variants_of_the_pattern(bench):
    """In both cases; of attention by the kernels, which need a GPU."""
    variants = [parse_variant("index:scores=index,branches=[slc,win],index_dim=16")]
    given: dict[str, Any] = {"providers": ["reference"], "changed": {"seed": 1}}
    code, rows = bench(points=((140, 2),), variants=variants, **given)
    assert code == 0
    assert [(row.case, row.provider) for row in rows] == [
        *((ATTENTION, "reference"), (ATTENTION, "index"), (MODEL, "index"))
    ]
    assert [row.variant for row in rows] == [None, *[dict(variants[0].variant)] * 2]
    assert [row.changed for row in rows] == [None, None, {"seed": 1}]
    assert rows[1].note == "not run: it needs a CUDA GPU"
    assert (rows[2].correct, rows[2].tokens_per_s > 0) == (True, True)
    plain = bench(cases=[MODEL], providers=["nsa"], points=((140, 2),))[1]
    assert rows[2].errors != plain[0].errors


def test_the_fastest_dense_attention_counts(bench, monkeypatch):
    """Providers take these ms and read 3 MB."""
    times = {name: 0.01 + 0.001 * i for i, name in enumerate(DENSE_DECODE[::-1])}
    times["nsa"] = 0.002

    def step(provider, point):
        ms = times[provider]
        work = {"tokens": point.batch, "read": 3_000_000}
        timing = Timing(ms, ms, ms, 1, "faked")
        return Subject(int, lambda: verdict(True), work=lambda: work, time=lambda: timing)

    monkeypatch.setattr(decode, "attention_step", step)
    code, rows = bench(cases=[ATTENTION], providers=["nsa", *DENSE_DECODE])
    assert code == 0
    ours, *dense = rows[:8]
    by = index_rows(rows)
    assert of_dense(ours, by) == pytest.approx(0.2)
    assert [of_dense(row, by) for row in dense if row.provider == DENSE_DECODE[-1]] == [1.0]
    assert (ours.tokens_per_s, ours.mib_read) == (500_000, 2.86102)
    assert ours.tbps_useful == 1.5


@pytest.mark.parametrize("provider", ["dense-fa2", "dense-fa2-folded"])
def test_dense_attention_passes_the_gate(provider, monkeypatch):
    monkeypatch.setattr(decode, "kernels_run_on_cpu", lambda: True)
    point = Point("small", HEADS, 300, 3, "random", torch.bfloat16, CPU)
    subject = decode.attention_step(provider, point)
    checked = subject.check()
    assert checked["correct"]
    assert 0 < checked["errors"]["out"] < 4e-3
    # B, Hkv, S, D and Dv, bytes
    assert subject.work() == {"tokens": 3, "read": 3 * 2 * 300 * (16 + 16) * 2}
    assert subject.fault(["flash_fwd_kernel"]) is None
    assert subject.fault([]) == "no kernel with flash_fwd in its name ran, or too few"
    static = decode._static

    def wrong(*given):
        call, *others = static(*given)
        return lambda: call() * 1.05, *others

    monkeypatch.setattr(decode, "_static", wrong)
    assert not decode.attention_step(provider, point).check()["correct"]


def test_a_wrong_step_gets_no_time(bench, monkeypatch, capsys):
    cached = decode._cached

    def rolled(point, *given):
        call, *others = cached(point, *given)
        return (lambda: call().roll(1, 0)) if point.batch > 1 else call, *others

    monkeypatch.setattr(decode, "_cached", rolled)
    step = Decoder.step
    monkeypatch.setattr(Decoder, "step", lambda self, tokens: -step(self, tokens))
    code, rows = bench()
    assert code == 1
    assert [row.ms_p50 is None for row in rows] == [False, *[True] * 5]
    said = capsys.readouterr().out
    assert said.count("WRONG: out: error") == 1
    assert said.count("WRONG: logits: error") == 4


def test_what_cannot_run_here_says_why(bench):
    names = ["nsa", "dense-cudnn", "dense-flex"]
    code, rows = bench(cases=[ATTENTION], providers=names)
    assert (code, {row.note for row in rows}) == (0, {"not run: it needs a CUDA GPU"})


def test_the_points_are_those_of_the_targets():
    wheres = [target["where"] for target in targets()["targets"]]
    found = {
        (where["case"], where["seq_len"], where["batch"])
        for where in wheres
        if where["case"] in CASES and where["provider"] == "nsa"
    }
    assert found == {(case, *point) for case in CASES for point in POINTS[case]}


# --- The command
@pytest.mark.parametrize(
    "words",
    [
        "",
        *(
            f"--points {x}"
            for x in ("12x", "2048,0x1", "2048,", "100", "200 --variant dense:window_size=256")
        ),
    ],
)
def test_points_that_are_none(words, monkeypatch):
    """Without points the machine must have a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "decode", *words.split()]) == 2


def test_points(monkeypatch):
    asked = dict[str, Any]()

    def noted(results, *names, **given):
        asked.update(given, names=(names[0], names[3]), scores=names[2].model.nsa.scores)

    monkeypatch.setattr(decode, "bench_decode", noted)
    words = "--points 2048,65536x32 --model.nsa.scores token_max --variant a:window_size=256"
    assert cli.main(["bench", "decode", *words.split()]) == 0
    assert asked["points"] == [(2048, 1), (65_536, 32)]
    assert asked["scores"] == asked["changed"]["model.nsa.scores"] == "token_max"
    assert [(one.name, one.variant) for one in asked["variants"]] == [("a", {"window_size": 256})]
    assert (asked["names"], asked["cases"]) == (("wide", "seed"), [*CASES])


def test_generate_of_transformers(bench, monkeypatch):
    """A model of this library and a Llama of as many parameters; steps that are wrong."""
    monkeypatch.setattr(decode, "MAX_SAMPLES", 12)
    given: dict[str, Any] = {"cases": [MODEL], "providers": ["hf", "transformers"]}
    code, rows = bench(**given)
    assert code == 0
    assert [(row.provider, row.batch) for row in rows] == [
        *(("hf", 1), ("transformers", 1), ("hf", 2), ("transformers", 2))
    ]
    for row in rows:
        assert row.timing == "generate, static cache"
        assert row.samples == 12
        assert row.tokens_per_s == pytest.approx(1000 * row.batch / row.ms_p50, rel=1e-4)
    sizes = [
        sum(x.numel() for name, x in model.named_parameters() if "norm" not in name)
        for model in (
            decode.new_generator("transformers", TINY, 99),
            LanguageModel(model_of(TINY, "dense").model),
        )
    ]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)
    step = Decoder.step
    monkeypatch.setattr(Decoder, "step", lambda self, tokens: -step(self, tokens))
    code, rows = bench(**given)
    assert (code, [row.correct for row in rows]) == (1, [False, True, False, True])
    monkeypatch.setattr(decode, "missing", lambda extra: ["transformers"])
    _, rows = bench(**given)
    assert {str(row.note)[:38] for row in rows} == {"not run: transformers is not installed"}
    monkeypatch.undo()
    _, (row,) = bench(**{**given, "providers": ["hf"], "points": ((70_000, 1),)})
    assert row.note == "not run: measured with at most 65,536 tokens of prompts"
