"""Files of earlier versions, or changed by hand: read, or a clear error."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nsa import cli
from nsa.train import load
from nsa.train.checkpoint import list_checkpoints
from nsa.train.run_folder import RunFolder
from nsa.train.runs.check import check_run
from nsa.train.runs.report import report_page
from nsa.train.telemetry.metrics import ALWAYS
from tests.train.cases import new_trainer, resumed, rewrite_hashes, rows_of, tiny_config

Meta = dict[str, Any]
EVENT = json.dumps({"kind": "start", "message": "a", "time_unix_s": 1.5, "step": None})


def change_meta(run: Path, change: Callable[[Meta], object]) -> None:
    """Rewrite meta.json of the newest checkpoint, its hash included."""
    path = list_checkpoints(run / "checkpoints")[-1]
    meta = json.loads((path / "meta.json").read_text())
    change(meta)
    (path / "meta.json").write_text(json.dumps(meta))
    rewrite_hashes(path)


def write_tiny(tmp_path: Path, **changes: Any) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(load.to_yaml(tiny_config(tmp_path, **changes)))
    return str(path)


def test_a_setting_that_a_checkpoint_lacks_has_its_default(tmp_path):
    new_trainer(tmp_path, steps=4, eval_every=0, log_every=3).run()
    whole = rows_of(tmp_path)

    def older(meta):
        for name in ("nsa", "tokenizer"):
            del meta[name]
        del meta["data"]["files_left_out"]
        meta["data"]["unreadable_left_out"] = 0
        del meta["config"]["tf32"], meta["config"]["model"]["nsa"]["score_precision"]

    change_meta(tmp_path / "run", older)
    assert resumed(tmp_path, steps=4, eval_every=0, log_every=3).state.progress.step == 4
    message = r"tf32 must stay as in the checkpoint \(False\), got True"
    with pytest.raises(ValueError, match=message):
        resumed(tmp_path, steps=4, tf32=True)
    assert rows_of(tmp_path) == whole


def test_another_format_names_the_version_that_reads_it(tmp_path):
    new_trainer(tmp_path, steps=2).run()
    change_meta(tmp_path / "run", partial(dict.update, format=9, nsa="7.1.0"))
    found = r"format 3, got format 9 of nsa 7\.1\.0 in .* That version of nsa can"
    with pytest.raises(ValueError, match=found):
        resumed(tmp_path, steps=2)


def test_records_with_other_content_are_one_line(tmp_path, capsys):
    folder = new_trainer(tmp_path, steps=2).run_folder
    folder.events.write_text(f"{EVENT}\n{EVENT[:9]}")  # the last one may be incomplete
    assert "Events" in report_page([folder])
    for path, text, rule in (
        (folder.environment, '{"launches": [{}]}', "must contain the launches of the run in JSON"),
        (folder.environment, "{", "must contain the launches of the run in JSON"),
        (folder.events, f"{EVENT}\n[]\n{EVENT}\n", "events.jsonl:2: line must be an event in JSON"),
    ):
        before = path.read_text()
        path.write_text(text)
        assert cli.main(["report", str(folder.path)]) == 2
        assert rule in capsys.readouterr().err
        path.write_text(before)


def test_rows_with_odd_values_are_shown(tmp_path):
    """Numbers that are not finite, as text and as JSON's extension, or too large to draw."""
    folder = new_trainer(tmp_path, steps=2).run_folder
    names = [*ALWAYS, "grad_norm", "val_bits_per_byte", "mfu"]
    values = ['"nan"', "NaN", '"inf"', "-Infinity", "1e308", "-1e308", "1e999", "0", "true"]
    lines = [
        json.dumps({"step": step, "tokens": step}).rstrip("}")
        + "".join(f', "{name}": {value}' for name in names if name != "tokens")
        for step, value in enumerate(values, start=1)
    ]
    folder.metrics_jsonl.write_text("".join(f"{line}}}\n" for line in lines))
    assert check_run(folder)[1]
    assert "Loss" in report_page([folder])


def test_a_run_folder_may_have_any_name_in_utf_8(tmp_path, capsys):
    """Safetensors and TensorBoard open no other names: such a run could not be resumed."""
    path, config = tmp_path / "cost$\\frac$ a{b}%s <b>&'", write_tiny(tmp_path, steps=2)
    assert cli.main(["train", config, "--run-dir", str(path)]) == 0
    assert (path / "loss.png").stat().st_size > 0
    assert cli.main(["report", str(path)]) == 0
    other = str(tmp_path / os.fsdecode(b"not UTF-8 \xff"))
    assert cli.main(["train", config, "--run-dir", other]) == 2
    assert "--run-dir must be valid UTF-8" in capsys.readouterr().err


def test_a_checkpoint_alone_is_enough(tmp_path, caplog):
    trainer, alone = new_trainer(tmp_path, steps=2), tmp_path / "alone"
    trainer.run()
    shutil.copytree(trainer.run_folder.checkpoints, alone / "checkpoints")
    assert cli.main(["generate", str(alone), "--prompt", "a", "--max-new-tokens", "2"]) == 0
    assert "tokenizer.json was missing and has been restored" in caplog.text
    assert RunFolder.open(alone).load_config() == trainer.config
    assert cli.main(["train", "--resume", str(alone), "--steps", "4"]) == 0
