"""A curriculum of lengths: sequences of each step, exact resumption across its boundaries."""

from __future__ import annotations

import dataclasses
import functools
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from nsa.plan import KNOWN, expected_speed, make_plan
from nsa.train.checkpoint import list_checkpoints, read_meta
from nsa.train.config import DataConfig, PartConfig, RecallConfig, TrainConfig
from nsa.train.data import ByteTokenizer, TextSource, collate, open_data
from nsa.train.execution.compilation import compilations, first_capacity
from nsa.train.execution.cuda_graphs import Replay
from nsa.train.load import load_config
from nsa.train.optim import lr_factor
from nsa.train.runs.check import check_run
from nsa.train.telemetry.progress import RunReport
from tests.train.cases import (
    new_trainer,
    reproducible_rows,
    resumed,
    rows_of,
    tiny_config,
    write_text,
)
from tests.train.test_resume import signal_in_step

# Sequences of 64, 128 and 256 tokens; steps 4, 5 and 6 are around a boundary.
STAGES: dict[str, Any] = {
    "seq_len": 256,
    "stages": [[5, 64], [4, 128]],
    "micro_batch": 1,
    "accumulation": 2,
    "eval_windows": 2,
    "log_every": 1,
    "checkpoint_every": 0,
}


def test_settings_of_each_stage(tmp_path):
    config = tiny_config(tmp_path, **STAGES)
    found = [config.at(step) for step in range(12)]
    sizes = [(run.seq_len, run.micro_batch, run.global_batch, run.eval_windows) for run in found]
    assert sizes == [(64, 4, 8, 8)] * 5 + [(128, 2, 4, 4)] * 4 + [(256, 1, 2, 2)] * 3
    assert config.at(10**9) == config
    plain = tiny_config(tmp_path)
    assert plain.at(0) is plain
    for stages in ([[0, 64]], [[4, 100]], [[4, 512]], [[4, -64]]):
        with pytest.raises(ValueError, match="stages must have positive steps, and lengths that"):
            tiny_config(tmp_path, **{**STAGES, "stages": stages})
    words = {"stages": "[[5, 64], [4, 128]]", "seq_len": "256"}
    assert load_config(None, words).stages == ((5, 64), (4, 128))


@pytest.mark.parametrize("kind", ["folder", "stream", "mixture"])
def test_runs_resume_exactly_at_and_around_a_boundary(tmp_path, kind):
    path = str(write_text(tmp_path / "kept"))
    data = DataConfig("folder", path)
    if kind == "stream":
        data = DataConfig("stream", path, validation_fraction=0.3)
    if kind == "mixture":
        parts = PartConfig(), PartConfig(2, "stream", path), PartConfig(recall=RecallConfig())
        data = DataConfig("folder", path, mixture=parts)
    stages = [[5, 128]] if kind == "mixture" else STAGES["stages"]
    changes: dict[str, Any] = {**STAGES, "stages": stages, "data": data}
    whole = new_trainer(tmp_path, "whole", **changes)
    whole.run()
    rows = reproducible_rows(tmp_path / "whole")
    assert [row["sequence_tokens"] for row in rows] == [
        whole.config.at(step).seq_len for step in range(12)
    ]
    assert [row["tokens"] for row in rows] == [512 * step for step in range(1, 13)]
    assert check_run(whole.run_folder)[1] == []
    for step in (5, 6) if kind == "folder" else (5,):
        name = f"run-{step}"
        trainer = new_trainer(tmp_path, name, **changes)
        signal_in_step(trainer, step)
        assert trainer.run().step == step
        assert resumed(tmp_path, name, **changes).run().finished
        assert reproducible_rows(tmp_path / name) == rows
        states = [
            read_meta(list_checkpoints(tmp_path / run / "checkpoints")[-1])["sampler"]
            for run in ("whole", name)
        ]
        assert states[0] == states[1]


def test_batches_have_the_length_of_their_stage(tmp_path, monkeypatch):
    """Ahead of the step that is computed, too; the rate follows all steps."""
    trainer = new_trainer(tmp_path, **STAGES)
    lengths, rates, real = [], [], trainer.train_step

    def train_step(batches: Any, targets: int | None = None) -> Any:
        lengths.append([(batch.max_seqlen, batch.tokens.numel()) for batch in batches])
        found = real(batches, targets)
        rates.append(trainer.state.optimizer.learning_rate)
        return found

    monkeypatch.setattr(trainer, "train_step", train_step)
    trainer.run()
    assert lengths == [[(trainer.config.at(step).seq_len, 256)] * 2 for step in range(12)]
    assert rates == pytest.approx([1e-2 * lr_factor(step, 12, 3) for step in range(12)])


def test_evaluations_have_the_sequences_of_the_stage(tmp_path):
    trainer = new_trainer(tmp_path, **{**STAGES, "eval_every": 1})
    asked, real = [], trainer.data.validation.sequence

    def sequence(seq_len: int, index: int) -> Any:
        asked.append(seq_len)
        return real(seq_len, index)

    trainer.data.validation.sequence = sequence  # type: ignore[method-assign]
    trainer.run()
    assert set(asked) == {64, 128, 256}
    assert asked.count(64) == 5 * 8
    assert "sequence_tokens" not in new_trainer(tmp_path, "plain", steps=1).run().row


def test_samplers_go_on_behind_the_tokens_that_were_drawn():
    """With the part of an epoch that is left; a stream's tokens come once each."""
    text = np.arange(1, 4097) % 251 + 1
    source = TextSource([text.astype(np.uint8)], 0, ByteTokenizer().token_bytes)
    sampler = source.sampler(64, 3)
    sampler.next_indices(24)
    sampler.resize(256)
    assert (sampler.position, sampler.num_sequences) == (6, 15)
    fresh = source.sampler(256, 3)
    assert fresh.next_indices(15)[6:] == sampler.next_indices(9)


def test_a_stream_reads_on(tmp_path):
    path = write_text(tmp_path)
    config = DataConfig("stream", str(path), validation_fraction=0.3)
    first, second = (open_data(config, seed=1, seq_len=256) for _ in range(2))

    def tokens(data: Any, sampler: Any, number: int) -> list[int]:
        indices = sampler.next_indices(number)
        batch = collate(data.train, indices, sampler.seq_len, document_mask=False)
        return batch.tokens.tolist()

    sampler = first.sampler(64, 1)
    found = tokens(first, sampler, 8)
    sampler.resize(256)
    found += tokens(first, sampler, 2)
    assert found == tokens(second, second.sampler(64, 1), 16)


# --- compiled code and graphs ---------------------------------------------------------------------
def test_compiled_code_is_of_the_length(tmp_path, monkeypatch):
    """Losses are those of the same run without the compiler, and no compilation is late."""
    made = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", made)
    changes: dict[str, Any] = {**STAGES, "stages": [[7, 64], [3, 128]], "steps": 14}
    changes |= {"model": {"attention": "dense"}, "eval_every": 0}
    torch.compiler.reset()
    trainer = new_trainer(tmp_path, "compiled", compile=True, **changes)
    capacities, real = [], trainer.train_step

    def train_step(batches: Any, targets: int | None = None) -> Any:
        capacities.append({batch.num_sequences for batch in batches})
        return real(batches, targets)

    monkeypatch.setattr(trainer, "train_step", train_step)
    with RunReport(trainer.run_folder.log, trainer.config.steps):
        trainer.run()
    torch.compiler.reset()
    new_trainer(tmp_path, "plain", **changes).run()
    losses = [[row["loss_nats"] for row in rows_of(tmp_path, run)] for run in ("compiled", "plain")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    counts = [row["compilations"] for row in rows_of(tmp_path, "compiled")]
    assert [step for step in range(1, 14) if counts[step] > counts[step - 1]] == [7, 10]
    events = trainer.run_folder.events.read_text()
    assert events.count('"kind": "stage"') == 2
    assert '"kind": "compilation"' not in events
    assert '"kind": "throughput"' not in events
    wanted = [first_capacity(trainer.config.at(step), trainer.data.train) for step in range(14)]
    assert capacities == [{number} for number in wanted]
    assert len({*wanted}) == 3


def test_graphs_are_captured_again(tmp_path, monkeypatch):
    """The first step of a length runs without; the graph itself is a stand-in."""
    for name in ("CUDAGraph", "Stream"):
        monkeypatch.setattr(torch.cuda, name, Mock)
    monkeypatch.setattr(torch.cuda, "graph", lambda *args, **kwargs: nullcontext())
    data = dataclasses.replace(tiny_config(tmp_path).data, document_mask=False)
    trainer = new_trainer(tmp_path, **STAGES, data=data)
    replay = Replay(trainer._forward_backward, trainer.state.optimizer.parameters())
    divisor, update, before = torch.ones(()), Mock(), compilations.now.captures
    for step, number in ((0, 0), (1, 3), (4, 3), (5, 3), (6, 6), (9, 6), (10, 9)):
        trainer.state.progress.step = step
        for is_first, batch in zip((True, False), trainer.next_batches(), strict=True):
            loss = replay(batch, divisor, is_first)
            assert loss.isfinite()
        replay.update(update, torch.zeros(()))
        assert compilations.now.captures - before == number, step


# --- the plan -------------------------------------------------------------------------------------
def test_the_plan_is_of_the_longest_sequences_and_its_time_of_all():
    words = {"seq_len": "65536", "micro_batch": "1", "accumulation": "1", "global_batch": "1"}
    whole = load_config("78m", {**words, "steps": "10"})
    staged = load_config("78m", {**words, "steps": "10", "stages": "[[6, 2048], [100, 8192]]"})
    gpu = KNOWN["h200"]
    plans = [make_plan(config, gpu) for config in (whole, staged)]
    assert plans[0].footprint == plans[1].footprint
    assert plans[0].tokens == plans[1].tokens

    def seconds(run: TrainConfig) -> float:
        found = expected_speed(run, 0, make_plan(run, gpu).flops_per_token, gpu, (), None)
        assert found is not None
        return 65_536 / found[0]

    parts = [(6, staged.at(0)), (4, staged.at(6))]
    assert plans[1].tokens_per_s is not None
    time = plans[1].tokens / plans[1].tokens_per_s
    assert time == pytest.approx(sum(steps * seconds(run) for steps, run in parts))
