"""A run that is made longer, and one that begins with the weights of another."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from nsa.train.checkpoint import find_checkpoint, list_checkpoints, load_tensors
from nsa.train.config import DataConfig
from nsa.train.run_folder import RunFolder
from nsa.train.runs.check import check_run
from nsa.train.schedule import lr_factor
from nsa.train.state import weights
from nsa.train.telemetry.metrics import read_metrics
from nsa.train.trainer import Trainer
from tests.train.cases import make_trainer, reproducible_rows, tiny_config, write_text

# --- longer ---------------------------------------------------------------------------------------


def test_extended_run_goes_on_with_its_weights_and_data_and_the_longer_schedule(
    tmp_path: Path,
) -> None:
    config = tiny_config(tmp_path, steps=6)
    make_trainer(config, tmp_path / "run").run()
    first = reproducible_rows(tmp_path / "run")
    longer = dataclasses.replace(config, steps=12)
    trainer = make_trainer(longer, tmp_path / "run", resume=True)
    trainer.run_folder.record_launch(resumed_from_step=6, overrides={"steps": "12"})
    assert trainer.state.sampler.position == 6 * config.global_batch
    result = trainer.run()
    assert (result.finished, result.step) == (True, 12)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert reproducible_rows(tmp_path / "run")[: len(first)] == first
    assert [row["step"] for row in rows] == [2, 4, 5, 6, 8, 10, 12]
    assert float(rows[-2]["learning_rate"]) == pytest.approx(1e-2 * lr_factor(9, 12, 3, 0.0))
    disagreements = check_run(RunFolder.open(tmp_path / "run"))[1]
    assert disagreements == [], "a row of the former last step is allowed"


def test_steps_that_are_done_cannot_be_taken_back(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, steps=6)
    make_trainer(config, tmp_path / "run").run()
    shorter = dataclasses.replace(config, steps=5)
    with pytest.raises(ValueError, match=r"train: steps must be at least those done \(6\), got 5"):
        make_trainer(shorter, tmp_path / "run", resume=True)


def test_an_extension_holds_until_the_next_one(tmp_path: Path) -> None:
    folder = make_trainer(tiny_config(tmp_path, steps=6), tmp_path / "run").run_folder
    assert folder.load_config().steps == 6
    folder.record_launch(resumed_from_step=6, overrides={"steps": "12"})
    folder.record_launch(resumed_from_step=8, overrides={"log_every": "1"})
    assert (folder.load_config().steps, folder.load_config().log_every) == (12, 2)
    assert folder.load_config({"steps": "20"}).steps == 20
    assert folder.former_ends() == {6, 12}


# --- weights of another run -----------------------------------------------------------------------


def begin(config_path: Path, source: Path, **changes: object) -> Trainer:
    config = tiny_config(config_path, **changes)
    path = find_checkpoint("test", RunFolder.open(source).checkpoints, "last")
    return Trainer(
        config,
        RunFolder.create(config_path / "new", config, init_from=path),
        init_from=path,
    )


def test_a_run_begins_with_the_weights_and_the_tokenizer_of_another(tmp_path: Path) -> None:
    text = str(write_text(tmp_path / "text"))
    bpe = {"tokenizer": "bpe", "bpe_vocab_size": 300}
    data = DataConfig(source="folder", path=text, **bpe)  # type: ignore[arg-type]
    source = make_trainer(
        tiny_config(tmp_path, steps=2, data=data, model={"vocab_size": 300}),
        tmp_path / "source",
    )
    source.run()
    other = tmp_path / "other"
    other.mkdir()
    for number in range(12):
        (other / f"{number}.txt").write_text(
            f"{number} quite another text, of other words in another order; " * 12,
        )
    elsewhere = DataConfig(source="folder", path=str(other), **bpe)  # type: ignore[arg-type]
    changes = {
        "data": elsewhere,
        "model": {"vocab_size": 300},
        "optim": {"lr": 1e-3},
        "seed": 3,
        "steps": 2,
    }
    trainer = begin(tmp_path, tmp_path / "source", **changes)
    kept = {name: torch.zeros_like(weight) for name, weight in weights(trainer.model).items()}
    load_tensors(list_checkpoints(tmp_path / "source" / "checkpoints")[-1], kept)
    assert all(torch.equal(kept[name], weight) for name, weight in weights(trainer.model).items())
    assert trainer.data.tokenizer.fingerprint == source.data.tokenizer.fingerprint
    assert trainer.state.progress.step == trainer.state.sampler.position == 0
    result = trainer.run()
    assert math.isfinite(float(result.row["loss_nats"]))
    (launch,) = json.loads((tmp_path / "new" / "environment.json").read_text())["launches"]
    assert launch["init_from"].endswith("source/checkpoints/step-00000002")


def test_settings_without_weights_may_differ_and_sizes_may_not(tmp_path: Path) -> None:
    make_trainer(tiny_config(tmp_path, steps=2), tmp_path / "source").run()
    pattern = dataclasses.replace(
        tiny_config(tmp_path).model.nsa,
        window_size=16,
        num_selected_blocks=3,
    )
    begin(tmp_path, tmp_path / "source", steps=1, model={"nsa": pattern}).run()
    (tmp_path / "again").mkdir()
    with pytest.raises(
        ValueError,
        match=r"train: --init-from must hold model\.\S+ as \(48, .* It is .*source",
    ):
        begin(tmp_path / "again", tmp_path / "source", model={"mlp_hidden_size": 48})
