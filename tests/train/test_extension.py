"""A run that is made longer, and one that begins with the weights of another."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.train.checkpoint import find_checkpoint, list_checkpoints, load_tensors
from nsa.train.config import DataConfig
from nsa.train.optim import lr_factor
from nsa.train.run_folder import RunFolder
from nsa.train.runs.check import check_run
from nsa.train.state import weights
from nsa.train.trainer import Trainer
from tests.train.cases import (
    PATTERN,
    all_equal,
    new_trainer,
    reproducible_rows,
    resumed,
    rows_of,
    tiny_config,
    write_text,
)

# --- longer ---------------------------------------------------------------------------------------


def test_extended_run_goes_on_with_its_weights_and_data_and_the_longer_schedule(
    tmp_path,
):
    new_trainer(tmp_path, steps=6).run()
    first = reproducible_rows(tmp_path / "run")
    trainer, folder = resumed(tmp_path, steps=12), RunFolder.open(tmp_path / "run")
    folder.record_launch(resumed_from_step=6, overrides={"steps": "12"})
    assert trainer.state.sampler.position == 6 * trainer.config.global_batch
    result, rows = trainer.run(), rows_of(tmp_path)
    assert (result.finished, result.step) == (True, 12)
    assert reproducible_rows(tmp_path / "run")[: len(first)] == first
    assert [row["step"] for row in rows] == [2, 4, 5, 6, 8, 10, 12]
    assert rows[-2]["learning_rate"] == pytest.approx(1e-2 * lr_factor(9, 12, 3, 0.0))
    assert check_run(folder)[1] == [], "a row of the former last step is allowed"
    folder.record_launch(resumed_from_step=8, overrides={"log_every": "1"})
    assert (folder.load_config().steps, folder.load_config().log_every) == (12, 2)
    assert folder.load_config({"steps": "20"}).steps == 20
    assert folder.former_ends() == {6, 12}


# --- weights of another run -----------------------------------------------------------------------


def begin_from(source: Path, path: Path, **changes: Any) -> Trainer:
    """A new run with the weights of ``source``."""
    config = tiny_config(path, **changes)
    checkpoint = find_checkpoint(RunFolder.open(source).checkpoints, "last")
    folder = RunFolder.create(path / "new", config, init_from=checkpoint)
    return Trainer(config, folder, init_from=checkpoint)


def test_a_run_begins_with_the_weights_and_the_tokenizer_of_another(tmp_path):
    write_text(tmp_path / "text")
    (tmp_path / "other").mkdir()
    for number in range(12):
        text = f"{number} quite another text, of other words in another order; "
        (tmp_path / "other" / f"{number}.txt").write_text(text * 12)
    changes: dict[str, Any] = {"steps": 2, "model": {"vocab_size": 300}}
    here, elsewhere = (
        DataConfig("folder", str(tmp_path / name), tokenizer="bpe", bpe_vocab_size=300)
        for name in ("text", "other")
    )
    source = new_trainer(tmp_path, "source", data=here, **changes)
    source.run()
    path = tmp_path / "source"
    trainer = begin_from(path, tmp_path, data=elsewhere, optim={"lr": 1e-3}, seed=3, **changes)
    ours = weights(trainer.model)
    kept = {name: torch.zeros_like(weight) for name, weight in ours.items()}
    load_tensors(list_checkpoints(path / "checkpoints")[-1], kept)
    assert all_equal(kept.values(), ours.values())
    assert trainer.data.tokenizer.fingerprint == source.data.tokenizer.fingerprint
    assert trainer.state.progress.step == trainer.state.sampler.position == 0
    assert math.isfinite(float(trainer.run().row["loss_nats"]))
    (launch,) = json.loads((tmp_path / "new" / "environment.json").read_text())["launches"]
    assert launch["init_from"].endswith("source/checkpoints/step-00000002")


def test_weights_of_other_heads_or_frequencies(tmp_path, caplog):
    """Heads that do not show in shapes are refused; frequencies may change, with a warning."""

    def heads(number: int, size: int, **others: Any) -> Any:
        sizes: dict[str, Any] = {
            "num_heads": number,
            "num_kv_heads": number,
            "head_dim": size,
            "value_dim": size,
        }
        return {"nsa": dataclasses.replace(PATTERN, **sizes, **others)}

    new_trainer(tmp_path, "source", steps=1, model=heads(2, 16)).run()
    with pytest.raises(ValueError, match=r"--init-from must have nsa.num_heads 1, as the run"):
        begin_from(tmp_path / "source", tmp_path, model=heads(1, 32))
    begin_from(tmp_path / "source", tmp_path / "again", model=heads(2, 16, rope_theta=5e5))
    assert f"--init-from has rope_theta {PATTERN.rope_theta}, this run 500000.0" in caplog.text


def test_an_index_that_the_weights_lack_is_new(tmp_path, caplog):
    """A run with it, whose index gets no gradient, goes on and begins others in turn."""
    new_trainer(tmp_path, "source", steps=2).run()
    index: dict[str, Any] = {"nsa": dataclasses.replace(PATTERN, scores="index", index_dim=16)}
    changes: dict[str, Any] = {"model": index, "optim": {"weight_decay": 0.0}, "steps": 4}
    with caplog.at_level("INFO", logger="nsa"):
        trainer = begin_from(tmp_path / "source", tmp_path, **changes)
    assert "2 weights of an index are not in" in caplog.text
    names = [f"layers.0.attention.{name}_idx_proj.weight" for name in "qk"]
    new = [trainer.model.get_parameter(name) for name in names]
    before = [weight.detach().clone() for weight in new]
    assert math.isfinite(float(trainer.run().row["loss_nats"]))
    assert all_equal(new, before)
    caplog.clear()
    with caplog.at_level("INFO", logger="nsa"):
        again = begin_from(tmp_path / "new", tmp_path / "again", **changes)
    assert all_equal(weights(again.model).values(), weights(trainer.model).values())
    assert "of an index" not in caplog.text


def test_settings_without_weights_may_differ_and_sizes_may_not(tmp_path):
    new_trainer(tmp_path, "source", steps=2).run()
    pattern = dataclasses.replace(PATTERN, window_size=16, num_selected_blocks=3)
    begin_from(tmp_path / "source", tmp_path, steps=1, model={"nsa": pattern}).run()
    message = r"--init-from must contain model\.\S+ as \(48, .* It is .*source"
    with pytest.raises(ValueError, match=message):
        begin_from(tmp_path / "source", tmp_path / "again", model={"mlp_hidden_size": 48})
