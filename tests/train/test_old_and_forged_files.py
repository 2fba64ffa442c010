"""Files of a run from an earlier version, or changed by hand: read, or refused in one line."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nsa import cli
from nsa.errors import UserError
from nsa.train import load
from nsa.train.checkpoint import list_checkpoints
from nsa.train.load import load_config
from nsa.train.runs.check import check_run
from nsa.train.runs.report import report_page
from nsa.train.telemetry.metrics import ALWAYS
from tests.train.cases import new_trainer, resumed, rewrite_hashes, rows_of, tiny_config

Meta = dict[str, Any]
NESTED = "[" * 100_000
EVENT = json.dumps({"kind": "start", "message": "a", "time_unix_s": 1.5, "step": None})


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
    new_trainer(tmp_path, steps=4, eval_every=0, log_every=3).run()
    whole = rows_of(tmp_path)

    def older(meta: Meta) -> None:
        del (
            meta["nsa"],
            meta["tokenizer"],
            meta["metrics"],
            meta["config"]["tf32"],
            meta["config"]["model"]["nsa"]["score_precision"],
        )
        window = meta["progress"]["window"]
        del window["finite_steps"], window["grad_norm_max"]
        window["grad_norm"] = math.nan

    change_meta(tmp_path / "run", older)
    trainer = resumed(tmp_path, steps=4, eval_every=0, log_every=3)
    assert (trainer.state.progress.step, trainer.state.progress.window.grad_norm) == (4, 0.0)
    message = r"tf32 must stay as in the checkpoint \(False\), got True"
    with pytest.raises(ValueError, match=message):
        resumed(tmp_path, steps=4, tf32=True)
    assert rows_of(tmp_path) == whole


def test_a_checkpoint_of_another_format_is_refused_with_the_version_that_reads_it(
    tmp_path: Path,
) -> None:
    new_trainer(tmp_path, steps=2).run()
    for number, version in ((9, "7.1.0"), (1, "0.0")):
        path = change_meta(tmp_path / "run", partial(dict.update, format=number, nsa=version))
        if number == 1:
            (path / "SHA256SUMS").unlink()
        found = (
            rf"format 2 or 3, got format {number} of nsa {version} in .* That version of nsa can"
        )
        with pytest.raises(ValueError, match=found):
            resumed(tmp_path, steps=2)


FORGED: dict[str, Callable[[Meta], object]] = {
    "no-progress": lambda meta: meta.pop("progress"),
    "step-text": lambda meta: meta.update(step="many"),
    "step-missing": lambda meta: meta.pop("step"),
    "config-list": lambda meta: meta.update(config=[]),
    "config-section": lambda meta: meta["config"].update(model=3),
    "figure": lambda meta: meta.update(val_bits_per_byte="low"),
    "no-number": lambda meta: meta["progress"].update(step="x"),
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
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new_trainer(tmp_path, steps=2).run()
    change_meta(tmp_path / "run", FORGED[name])
    assert cli.main(["train", "--resume", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("nsa: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("file", "texts", "commands", "rule"),
    [
        (
            "checkpoints/step-00000002/meta.json",
            ["[1, 2]", "{", "null", NESTED],
            [["train", "--resume"], ["eval"]],
            "must hold a checkpoint with JSON in meta.json",
        ),
        (
            "environment.json",
            ["{", "[]", '{"launches": []}', '{"launches": 3}', '{"launches": [{}]}', NESTED],
            [["train", "--resume"], ["check"], ["report"]],
            "environment.json must hold the launches of the run in JSON",
        ),
        (
            "events.jsonl",
            [
                f"{EVENT}\n{line}\n{EVENT}\n"
                for line in (
                    "{",
                    "[]",
                    "\x00\x85",
                    '{"kind": "start"}',
                    EVENT.replace('"a"', "1"),
                    EVENT.replace("1.5", "1e300"),
                    EVENT.replace("1.5", "NaN"),
                    EVENT.replace('"step": null', '"step": [1]'),
                    EVENT.replace('"step": null', '"step": 1' + "0" * 400),
                    NESTED,
                )
            ],
            [["report"]],
            "events.jsonl:2: line must be an event in JSON",
        ),
    ],
)
def test_a_file_that_is_no_such_record_ends_in_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    file: str,
    texts: list[str],
    commands: list[list[str]],
    rule: str,
) -> None:
    run = tmp_path / "run"
    new_trainer(tmp_path, steps=2).run()
    for text in texts:
        (run / file).write_text(text)
        if file.endswith("meta.json"):
            rewrite_hashes(run / "checkpoints" / "step-00000002")
        for words in commands:
            assert cli.main([*words, str(run)]) == 2
            assert rule in capsys.readouterr().err


# --- other files ----------------------------------------------------------------------------------


def test_the_last_event_may_be_half_written(tmp_path: Path) -> None:
    folder = new_trainer(tmp_path, steps=2).run_folder
    folder.events.write_text(f"{EVENT}\n{EVENT[:9]}")
    assert "Events" in report_page([folder])


def test_rows_and_events_with_odd_values_are_shown(tmp_path: Path) -> None:
    """Numbers that are not finite, as text and as JSON's extension, or too large to draw."""
    folder = new_trainer(tmp_path, steps=2).run_folder
    names = [*ALWAYS, "grad_norm", "val_bits_per_byte", "mfu"]
    values = ['"nan"', "NaN", '"inf"', "-Infinity", "1e308", "-1e308", "1e999", "0", "true"]
    lines = [
        json.dumps({"step": step, "tokens": step}).rstrip("}")
        + "".join(f', "{name}": {value}' for name in names if name != "tokens")
        for step, value in enumerate(values, start=1)
    ]
    for end in range(1, len(lines) + 1):
        folder.metrics_jsonl.write_text("".join(f"{line}}}\n" for line in lines[:end]))
        assert check_run(folder)[1]
    folder.events.write_bytes(EVENT.replace('"a"', r'"\ud800 \u0000"').encode() + b"\n\xff\xfe")
    assert "Loss" in report_page([folder])


def test_a_run_folder_may_have_any_name_in_utf_8(tmp_path: Path, capsys: Any) -> None:
    """Safetensors and TensorBoard open no other, so that such a run could not be resumed."""
    path = tmp_path / "cost$\\frac$ a{b}%s <b>&'"
    assert cli.main(["train", str(write_tiny(tmp_path)), "--run-dir", str(path)]) == 0
    assert (path / "loss.png").stat().st_size > 0
    assert cli.main(["report", str(path), str(path)]) == 0
    other = str(tmp_path / os.fsdecode(b"not UTF-8 \xff"))
    assert cli.main(["train", str(write_tiny(tmp_path)), "--run-dir", other]) == 2
    assert "--run-dir must be valid UTF-8" in capsys.readouterr().err


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
    assert "nested too deeply" in refused(tmp_path, "steps: " + "[" * 2_000)
    assert "nested too deeply" in refused(tmp_path, "{a: " * 2_000)
    assert "odd.yaml" in refused(tmp_path, "optim: {betas: &b [*b, 0.9]}")
    more = (f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}\n" for n in range(1, 40))
    laughs = "a0: &a0 {x: 1, y: 2}\n" + "".join(more)
    assert "hold at most 10,000 values, aliases included" in refused(tmp_path, laughs)
    with pytest.raises(UserError, match="betas must be a list"):
        load_config(None, {"optim.betas": "[" * 2_000})


def test_steps_have_an_upper_limit(tmp_path: Path) -> None:
    assert load_config(None, {"steps": "1_000_000_000"}).steps == 10**9
    with pytest.raises(UserError, match="--steps: steps must be at most 1,000,000,000, got 10"):
        load_config(None, {"steps": "1000000001"})


# --- renamed settings -----------------------------------------------------------------------------


def test_a_renamed_setting_is_taken_for_one_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
    assert "not be given together with optim.lr" in refused(
        tmp_path, "optim: {rate: 0.25, lr: 0.5}"
    )
    run = tmp_path / "run"
    words = ["train", str(write_tiny(tmp_path)), "--run-dir", str(run), "--optim.rate", "0.125"]
    assert cli.main(words) == 0
    assert load_config(run / "config.yaml").optim.lr == 0.125

    def older(meta: Meta) -> None:
        meta["config"]["optim"]["rate"] = meta["config"]["optim"].pop("lr")

    change_meta(run, older)
    assert resumed(tmp_path, steps=2, optim={"lr": 0.125}).state.progress.step == 2
