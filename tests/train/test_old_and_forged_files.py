"""Files of a run that an earlier version wrote, or that somebody changed: they are read, or refused
in one line.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nsa import cli
from nsa.errors import UserError
from nsa.train import load
from nsa.train.checkpoint import list_checkpoints
from nsa.train.load import load_config
from nsa.train.runs.report import report_page
from nsa.train.state import Progress
from nsa.train.telemetry.metrics import read_metrics
from tests.train.cases import make_trainer, rewrite_hashes, tiny_config

Meta = dict[str, Any]


def change_meta(run: Path, change: Callable[[Meta], object]) -> Path:
    """Rewrite meta.json of the newest checkpoint, its hash included."""
    path = list_checkpoints(run / "checkpoints")[-1]
    meta = json.loads((path / "meta.json").read_text())
    change(meta)
    (path / "meta.json").write_text(json.dumps(meta))
    rewrite_hashes(path)
    return path


# --- checkpoints ----------------------------------------------------------------------------------


def test_a_checkpoint_from_before_a_setting_existed_counts_as_its_default(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, steps=4, eval_every=0, log_every=3)
    make_trainer(config, tmp_path / "run").run()
    whole = read_metrics(tmp_path / "run" / "metrics.jsonl")

    def older(meta: Meta) -> None:
        del meta["nsa"], meta["config"]["tf32"], meta["config"]["model"]["nsa"]["score_precision"]
        window = meta["progress"]["window"]
        del window["finite_steps"], window["grad_norm_max"]
        window["grad_norm"] = math.nan

    change_meta(tmp_path / "run", older)
    assert make_trainer(config, tmp_path / "run", resume=True).state.progress.step == 4
    changed = dataclasses.replace(config, tf32=True)
    with pytest.raises(
        ValueError,
        match=r"train: tf32 must stay as in the checkpoint \(False\), got True",
    ):
        make_trainer(changed, tmp_path / "run", resume=True)
    assert read_metrics(tmp_path / "run" / "metrics.jsonl") == whole


def test_a_checkpoint_of_another_format_is_refused_with_the_version_that_reads_it(
    tmp_path: Path,
) -> None:
    config = tiny_config(tmp_path, steps=2)
    make_trainer(config, tmp_path / "run").run()
    change_meta(tmp_path / "run", lambda meta: meta.update(format=9, nsa="7.1.0"))
    with pytest.raises(
        ValueError,
        match=r"format 2 or 3, got format 9 of nsa 7\.1\.0 in .* That version of nsa can read it",
    ):
        make_trainer(config, tmp_path / "run", resume=True)
    path = change_meta(tmp_path / "run", lambda meta: meta.update(format=1, nsa="0.0"))
    (path / "SHA256SUMS").unlink()
    with pytest.raises(ValueError, match=r"format 2 or 3, got format 1 of nsa 0\.0 in "):
        make_trainer(config, tmp_path / "run", resume=True)


FORGED: dict[str, Callable[[Meta], object]] = {
    "no-progress": lambda meta: meta.pop("progress"),
    "step-text": lambda meta: meta.update(step="many"),
    "step-missing": lambda meta: meta.pop("step"),
    "config-list": lambda meta: meta.update(config=[]),
    "config-section": lambda meta: meta["config"].update(model=3),
    "figure": lambda meta: meta.update(val_bits_per_byte="low"),
    "counter": lambda meta: meta["progress"].update(tokens="many"),
    "unknown-counter": lambda meta: meta["progress"].update(luck=7),
    "window": lambda meta: meta["progress"].update(window=[]),
    "sampler": lambda meta: meta.update(sampler={"position": 3}),
    "rng": lambda meta: meta["rng"].clear(),
    "rng-version": lambda meta: meta["rng"].update(python_version=[1, 2]),
    "rng-kind": lambda meta: meta["rng"].update(numpy_kind=3),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_meta_ends_in_one_line(
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = tiny_config(tmp_path, steps=2)
    make_trainer(config, tmp_path / "run").run()
    change_meta(tmp_path / "run", FORGED[name])
    assert cli.main(["train", "--resume", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("nsa: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize("text", ["[1, 2]", "{", "null", "[" * 100_000])
def test_a_meta_that_is_no_object_ends_in_one_line(
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_trainer(tiny_config(tmp_path, steps=2), tmp_path / "run").run()
    path = list_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    (path / "meta.json").write_text(text)
    rewrite_hashes(path)
    for words in (["train", "--resume"], ["eval"]):
        assert cli.main([*words, str(tmp_path / "run")]) == 2
        assert "must hold a checkpoint with JSON in meta.json" in capsys.readouterr().err


def test_progress_of_version_0_1_0_is_read() -> None:
    values = dataclasses.asdict(Progress(step=3))
    for name in ("grad_norm_max", "finite_steps"):
        del values["window"][name]
    values["window"]["grad_norm"] = 7.5
    assert Progress.from_json(values).window.grad_norm == 0.0
    with pytest.raises(UserError, match=r"progress\.step must be a number, got 'x'"):
        Progress.from_json({**dataclasses.asdict(Progress()), "step": "x"})


# --- other files ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"launches": []}', '{"launches": 3}', '{"launches": [{}]}', "[" * 100_000],
)
def test_a_broken_environment_ends_in_one_line(
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_trainer(tiny_config(tmp_path, steps=2), tmp_path / "run").run()
    (tmp_path / "run" / "environment.json").write_text(text)
    for words in (["train", "--resume"], ["check"], ["report"]):
        assert cli.main([*words, str(tmp_path / "run")]) == 2
        rule = "environment.json must hold the launches of the run in JSON"
        assert rule in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"kind": "start"}',
        '{"kind": 1, "message": "a", "time_unix_s": 1}',
        "[" * 100_000,
    ],
)
def test_a_broken_event_ends_in_one_line_unless_it_is_the_last(
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = make_trainer(tiny_config(tmp_path, steps=2), tmp_path / "run").run_folder
    good = json.dumps({"kind": "start", "message": "a", "time_unix_s": 1.5, "step": None})
    folder.events.write_text(f"{good}\n{line}\n{good}\n")
    assert cli.main(["report", str(folder.path)]) == 2
    assert "events.jsonl:2: line must be an event in JSON" in capsys.readouterr().err
    folder.events.write_text(f"{good}\n{line}")
    assert "Events" in report_page([folder])


def test_a_run_folder_may_have_any_name(tmp_path: Path) -> None:
    for name in (r"cost$\frac$", "a{b}%s", "<b>&'"):
        words = ["train", str(write_tiny(tmp_path)), "--run-dir", str(tmp_path / name)]
        assert cli.main(words) == 0
        assert (tmp_path / name / "loss.png").stat().st_size > 0
        assert cli.main(["report", str(tmp_path / name), str(tmp_path / name)]) == 0


def write_tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(load.to_yaml(tiny_config(tmp_path, steps=2)))
    return path


# --- YAML -----------------------------------------------------------------------------------------


def refused(tmp_path: Path, text: str) -> str:
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        load_config(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_yaml_that_holds_itself_or_nests_without_end(tmp_path: Path) -> None:
    assert "holds itself" in refused(tmp_path, "data: &a\n  x: *a\n")
    assert "nested too deeply" in refused(tmp_path, "steps: " + "[" * 20_000)
    assert "nested too deeply" in refused(tmp_path, "{a: " * 20_000)
    assert "odd.yaml" in refused(tmp_path, "optim: {betas: &b [*b, 0.9]}")
    more = (f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}\n" for n in range(1, 40))
    laughs = "a0: &a0 {x: 1, y: 2}\n" + "".join(more)
    assert "hold at most 10,000 values, aliases included" in refused(tmp_path, laughs)
    with pytest.raises(UserError, match="betas must be a list"):
        load_config(None, {"optim.betas": "[" * 20_000})


def test_steps_have_an_upper_limit(tmp_path: Path) -> None:
    assert load_config(None, {"steps": "1_000_000_000"}).steps == 10**9
    with pytest.raises(
        UserError,
        match=r"--steps: steps must be at most 1,000,000,000, got 1000000001",
    ):
        load_config(None, {"steps": "1000000001"})


# --- renamed settings -----------------------------------------------------------------------------


def test_a_renamed_setting_is_taken_for_one_release(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    renamed = {"optim.rate": "optim.lr", "windows": "data.pattern"}
    monkeypatch.setattr(load, "RENAMED", renamed)
    monkeypatch.setattr("nsa.train.resumption.RENAMED", renamed)
    path = tmp_path / "old.yaml"
    path.write_text("optim: {rate: 0.25}\nwindows: '*.md'\ndata: {source: folder, path: x}\n")
    config = load_config(path, {"optim.rate": "0.5"})
    assert (config.optim.lr, config.data.pattern) == (0.5, "*.md")
    assert "--optim.rate: the setting optim.rate is called optim.lr now" in caplog.text
    renaming = "old.yaml:2: the setting windows is called data.pattern now;"
    assert f"{renaming} the old name goes with the next release" in caplog.text
    assert load_config(path).optim.lr == 0.25
    run = [
        "train",
        str(write_tiny(tmp_path)),
        "--run-dir",
        str(tmp_path / "named"),
        "--optim.rate",
        "0.125",
    ]
    assert cli.main(run) == 0
    assert load_config(tmp_path / "named" / "config.yaml").optim.lr == 0.125
    assert "not stand beside optim.lr" in refused(tmp_path, "optim: {rate: 0.25, lr: 0.5}")

    config = tiny_config(tmp_path, steps=2)
    make_trainer(config, tmp_path / "run").run()
    change_meta(
        tmp_path / "run",
        lambda meta: meta["config"]["optim"].update(rate=meta["config"]["optim"].pop("lr")),
    )
    assert make_trainer(config, tmp_path / "run", resume=True).state.progress.step == 2
