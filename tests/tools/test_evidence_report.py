"""The report on what models learn: figures of its tables are those of made-up rows."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from nsa.errors import UserError
from nsa.train.evaluation import interval
from nsa.train.load import to_yaml
from nsa.train.measurements import compare
from tests.tools.evidence_rows import (
    SAME,
    change_row,
    keep_panels,
    make_row,
    report,
    table,
    write_arm,
    write_group,
    write_inspected,
    write_json,
)
from tests.train.cases import contents, tiny_config
from tools.accept.programs import ROOT
from tools.evidence import __main__ as command_line
from tools.evidence import equal
from tools.evidence import report as report_module
from tools.evidence.experiments import DENSE, NSA, SHARED, SMALL_DENSE
from tools.evidence.parts import without_minus_zero
from tools.evidence.plots import Line, Panel, draw
from tools.evidence.report import write_report


@pytest.fixture(autouse=True)
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Sequence[Panel]]:
    """Panels of each plot, which are not drawn: that takes a second for a page."""
    return keep_panels(monkeypatch)


@pytest.fixture
def really_drawn(drawn: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots as they are."""
    for module in (equal, report_module):
        monkeypatch.setattr(module, "draw", draw)


def test_differences_and_their_intervals(tmp_path):
    write_group(tmp_path / "rows", "200m")
    text = report(tmp_path / "rows", tmp_path / "out")
    head, _, *lines = table(text, "200M tokens in large steps, 2,048 a sequence", "nsa minus")
    assert head[:5] == ["nsa minus", "seeds", "difference", "over documents", "over seeds"]
    assert head[5:] == ["over both", "files"]
    # Each document differs by 10 bits, or 20, or the small model by 4 and 8: of 400 bytes, and of
    # 200, 400 or 600 when two documents are drawn, with probabilities of 1/4, 1/2 and 1/4.
    error = 0.05 / math.sqrt(2) / math.sqrt(2) * 12.706
    assert [line[:5] for line in lines] == [
        [DENSE, "1", "-0.0500", "-0.1000 to -0.0333 (2)", ""],
        [DENSE, "2", "-0.1000", "-0.2000 to -0.0667 (2)", ""],
        [
            *(DENSE, "1, 2", "-0.0750", "-0.1500 to -0.0500 (2)"),
            f"{-0.075 - error:+.4f} to {-0.075 + error:+.4f}",
        ],
        [SMALL_DENSE, "1", "-0.0300", "-0.0400 to -0.0267 (2)", ""],
    ]
    assert lines[1][6] == "`200m/nsa-2/test.npz`, `200m/dense-2/test.npz`"
    sides = [
        [tmp_path / f"rows/200m/{name}-{seed}/test.npz" for seed in (1, 2)]
        for name in ("nsa", "dense")
    ]
    both = interval(compare(*sides), "both")
    one = "not known: one seed"
    assert both != lines[2][4]
    assert [line[5] for line in lines] == [one, one, both, one]
    assert "Over both: other seeds and other books, the one to judge by" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("-0.0000", "0.0000"),
        ("+0.0000", "0.0000"),
        ("-0.0001", "-0.0001"),
        ("-0.0020 to -0.0000", "-0.0020 to 0.0000"),
        ("2026-01-25", "2026-01-25"),
    ],
)
def test_zero_has_no_sign(text, expected):
    assert without_minus_zero(text) == expected


def test_positions_are_means_over_the_seeds(tmp_path, drawn):
    write_group(tmp_path / "rows", "8k")
    text = report(tmp_path / "rows", tmp_path / "out")
    head, _, *lines = table(text, "100M tokens in large steps, 8,192 a sequence", "from")
    assert head[:3] == ["from", "to", "targets"]
    assert lines == [  # the fourth position is no bin of its own
        ["1", "1", "4", "2.5000", "2.7500", "-0.2500"],
        ["2", "4", "12", "1.3333", "1.3333", "0.0000"],
    ]
    assert "Test by tokens of context, bits per byte, mean over 2 seeds. From" in text
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("learning.md", "8k-loss.png", "8k-positions.png")
    }
    (panel,) = drawn["8k-positions.png"]
    names = [line.label for line in panel.lines]
    assert names == ["seed 1", "seed 2", "mean", "no difference"]
    assert panel.lines[2].points == [(1, -0.25), (2, 0.0)]


def test_one_seed_has_no_mean(tmp_path, drawn):
    write_group(tmp_path, "8k")
    (tmp_path / "8k/nsa-2/test.npz").unlink()
    text = report(tmp_path, tmp_path / "out")
    assert "Test by tokens of context, bits per byte. From" in text
    (panel,) = drawn["8k-positions.png"]
    assert [line.label for line in panel.lines] == ["seed 1", "no difference"]


def test_repetitions_are_means_over_the_seeds(tmp_path):
    write_group(tmp_path, "2k")
    for name, again, first in (("nsa-1", 0.5, 1.5), ("dense-1", 0.25, 1.75), ("nsa-2", 0.75, 2.0)):
        rows = [
            {"distance": 128 * n, "bits_per_byte": n * again, "first_bits_per_byte": first + n / 16}
            for n in (0, 8)
        ]
        write_json(tmp_path / "2k" / name / "repeats.json", {"repeats": rows})
    text = report(tmp_path, tmp_path / "out")
    cells = table(text, "200M tokens, 2,048 a sequence", "model | seeds | 0 back")
    assert cells[0][2:] == ["0 back", "1,024 back"]
    assert cells[2:] == [  # means over the seeds at that distance: 1.75 and 2.25 at first for NSA
        [NSA, "2", "0.0000 (-1.7500)", "5.0000 (+2.7500)"],
        [DENSE, "1", "0.0000 (-1.7500)", "2.0000 (-0.2500)"],
    ]
    assert "`2k/nsa-1/repeats.json`, `2k/dense-1/repeats.json`, `2k/nsa-2/repeats.json`." in text
    for name in ("nsa-1", "nsa-2", "dense-1"):
        (tmp_path / f"2k/{name}/repeats.json").unlink()
    assert "| 0 back |" not in report(tmp_path, tmp_path / "out")


def test_differences_by_step(tmp_path, drawn):
    write_group(tmp_path, "8k")
    for name, bits in (("dense-1", 0.25), ("dense-2", 0.75)):
        rows = [
            {"step": step, "tokens": step * 10, "tokens_per_s_total": 1.0}
            | {"val_bits_per_byte": 2.1 - step / 200 + bits * step}
            for step in (50, 80, 100)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        path = tmp_path / f"8k/{name}/metrics.jsonl.gz"
        path.write_bytes(gzip.compress(text.encode()))
    text = report(tmp_path, tmp_path / "out")
    assert table(text, "100M tokens in large steps, 8,192 a sequence", "step")[2:] == [
        ["50", "1.8500", "26.8500", "-25.0000"],
        ["80", "1.7000", "41.7000", "-40.0000"],
        ["100", "1.6000", "51.6000", "-50.0000"],
    ]
    assert "during training on 512 windows, bits per byte, mean over 2 seeds. From" in text
    tokens, seconds, apart = drawn["8k-loss.png"]
    assert [line.label for line in apart.lines] == [
        *(f"{model}, seed 1" for model in (DENSE, SMALL_DENSE)),
        f"{DENSE}, seed 2",
    ]
    assert apart.lines[0].points == [(10 * x, pytest.approx(-0.25 * x)) for x in (50, 80, 100)]
    # NSA has rows every 10 steps: from step 50 on is the second half.
    assert [len(line.points) for line in tokens.lines] == [6, 3, 6, 6, 3]
    assert [len(line.points) for line in seconds.lines] == [6, 3, 6, 6, 3]


def test_windows_of_evaluations_during_training_are_those_of_the_configuration(tmp_path):
    write_group(tmp_path, "2k")
    config = tiny_config(tmp_path, eval_windows=1024)
    (tmp_path / "2k/nsa-2/config.yaml").write_text(to_yaml(config), encoding="utf-8")
    text = report(tmp_path, tmp_path / "out")
    assert "during training on 512 or 1,024 windows, bits per byte, mean over 2 seeds." in text


def test_the_shared_model_is_the_one_compared(tmp_path, drawn):
    write_group(tmp_path, "2k")
    for name in ("nsa-2", "dense-2"):
        (tmp_path / "2k" / name).rename(tmp_path / "2k" / f"{name}-old")
    (tmp_path / "2k/nsa-2-old").rename(tmp_path / "2k/shared-1")
    (tmp_path / "2k/dense-2-old/row.json").unlink()
    change_row(tmp_path / "2k/shared-1", model=SHARED, seed=1)
    text = report(tmp_path, tmp_path / "out")
    title = "200M tokens, 2,048 a sequence"
    assert [line[:2] for line in table(text, title, "model")[2:]] == [
        *([SHARED, "1"], [NSA, "1"], [DENSE, "1"], [SMALL_DENSE, "1"])
    ]
    found = table(text, title, f"{SHARED} minus")[2:]
    assert [line[0] for line in found] == [NSA, DENSE, SMALL_DENSE]
    assert found[0][5] == "`2k/shared-1/test.npz`, `2k/nsa-1/test.npz`"
    for head in ("step", "from"):
        assert SHARED in table(text, title, head)[0]
    assert drawn["2k-positions.png"][0].y == f"{SHARED} minus dense, bits per byte"
    *_, apart = drawn["2k-loss.png"]
    assert [line.label for line in apart.lines] == [
        f"{model}, seed 1" for model in (NSA, DENSE, SMALL_DENSE)
    ]


def test_arms(tmp_path):
    write_group(tmp_path / "rows", "200m")
    text = report(tmp_path / "rows", tmp_path / "out")
    _, _, *lines = table(text, "200M tokens in large steps, 2,048 a sequence", "model")
    assert [line[:2] for line in lines] == [
        *([NSA, "1"], [DENSE, "1"], [SMALL_DENSE, "1"], [NSA, "2"], [DENSE, "2"])
    ]
    figures = ["78,601,392", "0.0005", "1.5000", "1.3750", "500,000", "430"]
    assert lines[0][2:] == [*figures, "`200m/nsa-1/row.json`"]
    assert "After 100 steps of 65,536 tokens" in text
    assert (
        "All runs: validation windows 512, test windows 5,244, GPU NVIDIA H200, driver 580.1, "
        "torch 2.11.0, triton 3.6.0, commit 0123456789ab, date 2026-11-25." in text
    )
    assert "tokens/s: median of the rows of metrics, steps alone; s: all training proc" in text
    assert "NSA and dense run with document masks; without them, dense is faster" in text
    assert "Limits: one corpus, public-domain books in English" in text


def test_a_loss_that_jumped_shows_in_its_gradient(tmp_path):
    """Norms of the warm-up do not count; runs without norms have an empty cell."""
    write_group(tmp_path / "rows", "200m")
    folder = tmp_path / "rows" / "200m" / "dense-2"
    change_row(folder, warmup_steps=30)
    norms = {20: 400.0, 30: 300.0, 40: 0.5, 50: 149.05, 60: 7.3}
    rows = [{"step": step, "tokens": step, "grad_norm_max": x} for step, x in norms.items()]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    text = report(tmp_path / "rows", tmp_path / "out")
    head, _, *lines = table(text, "200M tokens in large steps, 2,048 a sequence", "model")
    cells = [line[head.index("largest gradient")] for line in lines]
    assert cells == ["", "", "", "", "149.1 (50)"]


def test_machines_that_differ_are_columns(tmp_path):
    write_group(tmp_path, "200m")
    path = tmp_path / "200m/nsa-2/row.json"
    row = json.loads(path.read_text())
    row |= {"gpu": "NVIDIA H100", "commit": "89abcdef0123456+changes", "test_windows": None}
    write_json(path, row)
    text = report(tmp_path, tmp_path / "out")
    head, _, *lines = table(text, "200M tokens in large steps, 2,048 a sequence", "model")
    assert head[-3:] == ["GPU", "commit", "file"]
    assert [line[-3:-1] for line in lines[2:4]] == [
        ["NVIDIA H200", "0123456789ab"],
        ["NVIDIA H100", "89abcdef0123+changes"],
    ]
    assert "validation windows 512, test windows 5,244, driver 580.1, torch" in text


# ---------------------------------------------------------------- what failed, is missing or broken
def test_a_failed_evaluation_is_shown(tmp_path):
    write_group(tmp_path, "200m")
    nothing = dict.fromkeys(("parameters", "test_bits_per_byte", "test_windows"))
    fault = "nsa eval for test.json: exit code 1"
    large = ["kernels.txt", "trace.json.gz"]
    change_row(tmp_path / "200m/nsa-1", **nothing, failed=[fault], left_out=large)
    (tmp_path / "200m/nsa-1/test.npz").unlink()
    text = report(tmp_path, tmp_path / "out")
    lines = table(text, "200M tokens in large steps, 2,048 a sequence", "model")[2:]
    assert lines[0][:6] == [NSA, "1", "", "0.0005", "1.5000", ""]
    assert f"Failed, from `200m/nsa-1/row.json`: {fault}." in text
    left_out = "Left out, above 8 MiB, from `200m/nsa-1/row.json`: `kernels.txt`, `trace.json.gz`."
    assert left_out in text


def test_planned_runs_and_pairs_that_are_missing(tmp_path):
    write_group(tmp_path, "muon")
    for old, new in (("nsa-1", "nsa-1337"), ("dense-1", "dense-1337")):
        (tmp_path / "muon" / old).rename(tmp_path / "muon" / new)
        change_row(tmp_path / "muon" / new, seed=1337)
    text = report(tmp_path, tmp_path / "out")
    missing = ["shared-1337", "small-dense-1337"]
    missing += [
        f"{name}-{seed}" for seed in (1338, 1339) for name in ("shared", "dense", "small-dense")
    ]
    names = ", ".join(f"`muon/{name}`" for name in missing)
    assert f"Not done: {names}." in text
    models = (SHARED, DENSE, SMALL_DENSE)
    pairs = [f"{model} with seed {seed}" for seed in (1338, 1339) for model in models]
    pairs = [f"{model} with seed 1337" for model in (SHARED, SMALL_DENSE)] + pairs
    missing_pairs = ", ".join(pairs)
    assert f"Pairs not compared: nsa and {missing_pairs}." in text


def break_json(folder: Path) -> None:
    (folder / "row.json").write_text('{"broken": ')


def break_metrics(folder: Path) -> None:
    path = folder / "metrics.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-20])


def break_sums(folder: Path) -> None:
    (folder / "test.npz").write_bytes(b"PK")


def change_loss(folder: Path) -> None:
    change_row(folder, test_bits_per_byte=1.375 * (1 + 1e-8))


def change_printed(folder: Path) -> None:
    write_json(folder / "test.json", {"bits_per_byte": 1.375 * (1 - 1e-8)})


def forget_the_seed(folder: Path) -> None:
    row = json.loads((folder / "row.json").read_text())
    write_json(folder / "row.json", {name: x for name, x in row.items() if name != "seed"})


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (break_json, "row.json must hold an object of JSON, got Expecting value"),
        (break_metrics, "EOFError"),
        (break_sums, "test.npz must be a file of nsa eval --save"),
        (change_loss, "test.npz and row.json must agree on bits per byte, got {'test.npz': 1.375,"),
        (change_printed, "test.npz and test.json and row.json must agree on bits per byte"),
        (forget_the_seed, "row.json must have seed, got none"),
    ],
)
def test_a_broken_folder_is_named_and_left_out(tmp_path, damage, reason, capsys):
    write_group(tmp_path, "200m")
    damage(tmp_path / "200m/nsa-1")
    text = report(tmp_path, tmp_path / "out")
    found = next(line for line in text.splitlines() if line.startswith("Left out, broken: "))
    assert found.startswith("Left out, broken: `200m/nsa-1`: ")
    assert reason in found
    assert found in capsys.readouterr().out
    assert str(tmp_path) not in text
    lines = table(text, "200M tokens in large steps, 2,048 a sequence", "model")[2:]
    assert [line[:2] for line in lines] == [
        *([DENSE, "1"], [SMALL_DENSE, "1"], [NSA, "2"], [DENSE, "2"])
    ]


def test_losses_that_agree_are_taken(tmp_path):
    write_group(tmp_path, "200m")
    change_row(tmp_path / "200m/nsa-1", test_bits_per_byte=1.375 * (1 + 1e-10))
    assert "Left out" not in report(tmp_path, tmp_path / "out")


def test_measurements_of_other_windows_are_not_compared(tmp_path):
    write_group(tmp_path, "200m")
    path = tmp_path / "200m/dense-1/test.npz"
    arrays = dict(np.load(path))
    arrays["about"] = np.array(json.dumps({**SAME, "run": "x", "step": 1, "windows": 8}))
    np.savez(path, **arrays)
    text = report(tmp_path, tmp_path / "out")
    assert f"Not compared, {DENSE}, seeds 1: 200m/" in text
    lines = table(text, "200M tokens in large steps, 2,048 a sequence", "nsa minus")[2:]
    assert [line[:2] for line in lines] == [[DENSE, "2"], [SMALL_DENSE, "1"]]


def test_nothing_is_written_before_everything_is_made(tmp_path, monkeypatch):
    write_group(tmp_path, "200m")

    def fails(_: object) -> list[str]:
        raise RuntimeError

    monkeypatch.setattr(report_module, "selection", fails)
    with pytest.raises(RuntimeError):
        report(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_that_do_not_exist_are_not_named(tmp_path):
    write_group(tmp_path, "200m")
    write_long_run(tmp_path / "50k")
    for path in (tmp_path / "200m/dense-1", tmp_path / "50k"):
        (path / "metrics.jsonl.gz").unlink()
    (tmp_path / "50k/legs.jsonl").unlink()
    text = report(tmp_path, tmp_path / "out")
    for name in ("200m/dense-1/metrics.jsonl.gz", "50k/metrics.jsonl.gz", "50k/legs.jsonl"):
        assert f"`{name}`" not in text
    assert "`200m/dense-2/metrics.jsonl.gz`" in text
    assert "How its processes ended is not recorded. `nsa check`" in text
    assert "| begin |" not in text


def test_a_seed_without_its_partner_is_in_no_difference(tmp_path):
    write_group(tmp_path, "200m")
    (tmp_path / "200m/dense-1/test.npz").unlink()
    text = report(tmp_path, tmp_path / "out")
    _, _, *lines = table(text, "200M tokens in large steps, 2,048 a sequence", "nsa minus")
    assert [line[:3] for line in lines] == [[DENSE, "2", "-0.1000"], [SMALL_DENSE, "1", "-0.0300"]]


# ------------------------------------------------------------------------------------ 50,000 steps
def write_long_run(folder: Path) -> None:
    """Losses of two lengths; that of 8,192 has sums of its own."""
    write_arm(folder, make_row(NSA, 1337), [150.0, 350.0], 8.0)
    legs = [
        {"begin": "2026-11-25T10:00:00Z", "end": "2026-11-25T10:08:40Z", "seconds": 520.4}
        | {"exit_code": 143, "last_step": 26_123},
        {"begin": "2026-11-25T10:08:40Z", "end": "2026-11-25T10:16:40Z", "seconds": 480.0}
        | {"exit_code": 0, "last_step": 50_000},
    ]
    (folder / "legs.jsonl").write_text("".join(json.dumps(leg) + "\n" for leg in legs))
    for name, split, seq_len, bits in (
        ("test-8192", "test", 8192, 1.25),
        ("test", "test", 2048, 1.25),
        ("validation", "validation", 2048, 1.5),
    ):
        loss = {"split": split, "seq_len": seq_len, "windows": 1311, "bits_per_byte": bits}
        write_json(folder / f"{name}.json", loss | {"bigram_bits_per_byte": 3.5})
    (folder / "test-8192.npz").write_bytes((folder / "test.npz").read_bytes())
    (folder / "check.txt").write_text("runs/50k: 2 rows\nruns/50k: everything agrees\n")
    (folder / "generated.txt").write_text("It was late. ``` ](gone.md)\n")


def test_the_long_run(tmp_path):
    write_long_run(tmp_path / "50k")
    text = report(tmp_path, tmp_path / "out")
    title = "50,000 steps of `78m`"
    assert table(text, title, "begin")[2:] == [
        ["2026-11-25T10:00:00Z", "2026-11-25T10:08:40Z", "520", "143", "26,123"],
        ["2026-11-25T10:08:40Z", "2026-11-25T10:16:40Z", "480", "0", "50,000"],
    ]
    # Two documents, of 1.5 and 1.1667 bits per byte: a draw has one of them alone, or both.
    over = "1.1667 to 1.5000 (2)"
    assert [line[:6] for line in table(text, title, "split")[2:]] == [
        ["test", "2,048", "1,311", "1.2500", over, "3.5000"],
        ["validation", "2,048", "1,311", "1.5000", "", "3.5000"],
        ["test", "8,192", "1,311", "1.2500", over, "3.5000"],
    ]
    assert text.index("| split |") < text.index("| source |") < text.index("| begin |")
    assert [line[1] for line in table(text, title, "source")[2:]] == [
        "500,000",
        "480,000",
        "400,001",
    ]
    assert (
        "Trained by 2 processes, from the second on by `nsa train --resume`; ended: 1 with exit "
        "code 143 (SIGTERM), 1 with exit code 0 (the end). `nsa check` afterwards: everything "
        "agrees. From `50k/legs.jsonl`, `50k/check.txt`." in text
    )
    assert "```text\nIt was late. ''' ](gone.md)\n```" in text
    assert "](50k-loss.png)" in text
    assert "](50k-layers.png)" in text
    assert "78,601,392 parameters: 100 steps" in text


def test_a_run_of_one_process_was_not_stopped(tmp_path):
    write_long_run(tmp_path / "50k")
    path = tmp_path / "50k/legs.jsonl"
    path.write_text(path.read_text().splitlines()[1])
    text = report(tmp_path, tmp_path / "out")
    assert "Trained by one process; ended: 1 with exit code 0 (the end)." in text
    assert "SIGTERM" not in text
    assert "--resume" not in text


def test_a_failed_check_is_no_missing_one(tmp_path):
    folder = tmp_path / "50k"
    write_long_run(folder)
    (folder / "check.txt").rename(folder / "failed-check.txt")
    (folder / "failed-check.txt").write_text("runs/50k: 2 rows\nruns/50k: 3 rows differ\n")
    change_row(folder, failed=["nsa check for check.txt: exit code 1"], parameters=None)
    text = report(tmp_path, tmp_path / "out")
    assert (
        "`nsa check` afterwards: failed, exit code 1; 3 rows differ. From `50k/failed-check.txt`."
        in text
    )
    (folder / "failed-check.txt").unlink()
    text = report(tmp_path, tmp_path / "out")
    assert "`nsa check` afterwards: failed, exit code 1. From `50k/legs.jsonl`." in text
    change_row(folder, failed=[])
    assert "`nsa check` afterwards: not run." in report(tmp_path, tmp_path / "out")


def test_older_rows_of_a_file(tmp_path):
    write_group(tmp_path / "rows", "200m")
    for name in ("nsa", "dense"):
        folder = tmp_path / "rows/90m"
        folder.mkdir(exist_ok=True)
        (tmp_path / f"rows/200m/{name}-1/test.npz").rename(folder / f"{name}-test.npz")
    lines = [
        make_row(model, 1, test_bits_per_byte=bits)
        for model, bits in ((DENSE, 1.425), (NSA, 1.375))
    ]
    (tmp_path / "rows/90m.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = report(tmp_path / "rows", tmp_path / "out")
    title = "90M tokens in large steps, 2,048 a sequence"
    (line,) = table(text, title, "nsa minus")[2:]
    assert line[2] == "-0.0500"
    assert line[-1] == "`90m/nsa-test.npz`, `90m/dense-test.npz`"
    assert [line[-1] for line in table(text, title, "model")[2:]] == ["`90m.jsonl`"] * 2


def test_all_panels_are_named():
    panels = [Panel("x", "y", [Line("a", [(0, 0)], {})]), Panel("z", "w", [])]
    assert str(draw("plot.png", panels)) == "![y over x; w over z](plot.png)"


@pytest.mark.usefixtures("really_drawn")
def test_the_same_rows_give_the_same_bytes(tmp_path):
    write_group(tmp_path / "rows", "200m")
    write_long_run(tmp_path / "rows/50k")
    write_inspected(tmp_path / "rows/50k")
    for name in ("one", "two"):
        report(tmp_path / "rows", tmp_path / name)
    found = contents(tmp_path / "one")
    assert len(found) == 5
    assert found == contents(tmp_path / "two")


def test_nothing_to_report(tmp_path):
    with pytest.raises(UserError, match="--rows must hold rows of an experiment"):
        write_report(tmp_path, tmp_path / "out")


def test_take(tmp_path, capsys):
    out, rows = tmp_path / "out", tmp_path / "rows"
    for name in ("50k", "200m-nsa-1337", "200m-small-dense-1337", "8k-dense"):
        write_json(out / name / "row.json", make_row(NSA, 1337, experiment=name))
    (out / "8k-nsa").mkdir()
    failing = make_row(NSA, 1, experiment="8k") | {"failed": ["profile"], "left_out": ["trace"]}
    write_json(out / "8k-dense/row.json", failing)
    write_json(rows / "200m/nsa-1337/old.json", {})
    write_json(rows / "90m/kept.json", {})
    assert command_line.main(["take", str(out), "--rows", str(rows)]) == 0
    assert {*contents(rows)} == {
        *("50k/row.json", "200m/nsa-1337/row.json", "200m/small-dense-1337/row.json"),
        *("8k/dense/row.json", "90m/kept.json"),
    }
    assert json.loads((rows / "50k/row.json").read_text())["experiment"] == "50k"
    assert "8k/dense; profile; without trace\n" in capsys.readouterr().out


@pytest.mark.usefixtures("really_drawn")
def test_the_committed_page_is_that_of_the_committed_rows(tmp_path):
    page = write_report(ROOT / "benchmarks/quality", tmp_path)
    assert page.read_bytes() == (ROOT / "docs/results/learning.md").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {
        path.name for path in (ROOT / "docs/results").iterdir()
    }
