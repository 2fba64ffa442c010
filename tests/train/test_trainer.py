"""The optimizer step and the run around it."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nsa import cli
from nsa.cli import train
from nsa.train import reports
from nsa.train.checkpoint import list_checkpoints, read_meta, step_of
from nsa.train.config import DataConfig, ParallelConfig
from nsa.train.data import TextSource
from nsa.train.execution.compilation import compilations
from nsa.train.generation import Generation
from nsa.train.load import to_yaml
from nsa.train.optim import lr_factor
from nsa.train.run_folder import RunFolder
from nsa.train.runs.check import check_run
from nsa.train.telemetry.metrics import Row
from nsa.train.trainer import Trainer, TrainingStoppedError
from tests.train.cases import (
    all_equal,
    make_trainer,
    new_trainer,
    resumed,
    rows_of,
    tiny_config,
)

# --- one step -------------------------------------------------------------------------------------


def test_micro_batches_equal_one_big_batch(tmp_path):
    """They differ in targets, so that a mean of their means would be another number."""
    whole = new_trainer(tmp_path, "whole", micro_batch=6, accumulation=1)
    parts = new_trainer(tmp_path, "parts", micro_batch=2, accumulation=3)
    (big,) = whole.next_batches()
    small = parts.next_batches()
    assert torch.equal(big.tokens, torch.cat([batch.tokens for batch in small]))
    assert len({batch.num_targets for batch in small}) > 1
    results = whole.train_step([big]), parts.train_step(small)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
    weights = [list(trainer.model.parameters()) for trainer in (whole, parts)]
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


def test_the_last_micro_batch_of_a_step_exchanges_gradients(tmp_path):
    trainer = new_trainer(tmp_path, accumulation=3)
    accumulating = Mock(return_value=nullcontext())
    trainer.strategy.accumulating = accumulating  # type: ignore[method-assign]
    trainer.train_step(trainer.next_batches())
    assert accumulating.call_args_list == [call(last=last) for last in (False, False, True)]


def test_loss_and_gradient_norm_by_hand(tmp_path):
    trainer = new_trainer(tmp_path, accumulation=1)
    parameters, (batch,) = list(trainer.model.parameters()), trainer.next_batches()
    logits = trainer.model(batch.tokens, batch.cu_seqlens, batch.max_seqlen)
    total = nn.functional.cross_entropy(logits, batch.targets, reduction="sum")
    gradients = torch.autograd.grad(total / batch.num_targets, parameters)
    norm = nn.utils.get_total_norm(gradients).item()
    found = trainer.train_step([batch]).tolist()
    assert found == pytest.approx((total.item(), norm, 0), rel=1e-4)
    assert norm > 0.1  # not of zeroed gradients
    assert all(parameter.grad is None for parameter in parameters)


@pytest.mark.parametrize("clip", [0.0, 1e-3])
def test_clipping(tmp_path, clip):
    """AdamW's first moment is a tenth of the gradient that reached it."""
    trainer = new_trainer(tmp_path, optim={"grad_clip": clip})
    _, grad_norm, _ = trainer.train_step(trainer.next_batches()).tolist()
    state = trainer.state.optimizer.state_tensors().items()
    moments = [tensor for name, tensor in state if name.endswith(".exp_avg")]
    assert 10 * nn.utils.get_total_norm(moments) == pytest.approx(clip or grad_norm, rel=1e-3)


def test_master_weights_stay_fp32_under_bf16_compute(tmp_path):
    results = {}
    for dtype, compute in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        trainer = new_trainer(tmp_path, dtype, compute_dtype=dtype)
        seen: list[torch.dtype] = []
        projection = trainer.model.decoder_layers()[0].mlp.up_proj
        projection.register_forward_hook(lambda _m, _i, out, seen=seen: seen.append(out.dtype))
        results[dtype] = trainer.train_step(trainer.next_batches()).tolist()
        assert set(seen) == {compute}
        tensors = [*trainer.model.parameters(), *trainer.state.training_tensors().values()]
        assert {tensor.dtype for tensor in tensors} == {torch.float32}
    assert results["bf16"][:2] == pytest.approx(results["fp32"][:2], rel=0.02)
    assert results["bf16"][0] != results["fp32"][0]


class _NoReading(TorchDispatchMode):
    """Fails where the host would read a value off the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads a value"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_step_reads_nothing_off_the_device(tmp_path, name, monkeypatch):
    for module in ("_sequences", "_checks"):  # as of offsets on a GPU
        monkeypatch.setattr(f"nsa.ops.{module}.reads_contents", lambda index: False)
    model = {"attention": "dense"}
    trainer = new_trainer(tmp_path, model=model, optim={"name": name}, loss_chunk=32)
    batches = trainer.next_batches()
    with _NoReading():
        trainer.train_step(batches)
        with pytest.raises(AssertionError, match="reads a value"):
            torch.ones(()).item()


@pytest.mark.parametrize(
    "changes",
    [
        {"optim": {"name": "muon"}, "model": {"attention": "dense"}},
        {"loss_chunk": 17, "model": {"tie_head": True, "mlp": "swiglu"}},
    ],
    ids=str,
)
def test_every_kind_of_model_and_optimizer_learns(tmp_path, changes):
    steps: dict[str, Any] = {"steps": 30, "log_every": 5, "eval_every": 0, "checkpoint_every": 0}
    new_trainer(tmp_path, **steps, **changes).run()
    losses = [row["loss_nats"] for row in rows_of(tmp_path)]
    assert losses[-1] < min(0.7 * math.log(256), losses[0] - 1)


def test_compiled_once_and_equal_to_eager(tmp_path, monkeypatch):
    """Nothing is compiled after the first step, whatever documents a batch contains, with
    evaluations and a sample. Sparse attention takes long to trace, and so do backward passes:
    other tests compile them. No C++ compiler runs, which takes minutes.
    """
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "long.txt").write_text("the sea and the old stones of it " * 60)
    for index in range(200):
        (folder / f"short{index:03d}.txt").write_text("x" * (index % 5) + f"{index}")
    losses, counts, sizes = list[list[float]](), list[set[int]](), set[int]()

    def count(seen):
        seen.add(compilations.now.graphs)

    for compiled, by_layer in ((False, True), (True, True), (True, False)):
        config = tiny_config(
            tmp_path,
            model={"attention": "dense", "num_layers": 2},
            compile=compiled,
            sample_tokens=3,
            steps=8,
            data=DataConfig(source="folder", path=str(folder)),
            parallel=ParallelConfig(compile_layers=by_layer),
        )
        run_folder = RunFolder.create(tmp_path / f"{len(losses)}", config)
        counts.append(set[int]())
        trainer = Trainer(config, run_folder, on_step=functools.partial(count, counts[-1]))
        assert hasattr(trainer.loss, "_orig_mod") is (compiled and not by_layer)
        sizes |= {batch.num_sequences for _ in range(8) for batch in trainer.next_batches()}
        trainer.state.sampler.position = 0
        trainer.run()
        losses.append([row["loss_nats"] for row in rows_of(tmp_path, f"{len(losses)}")])
    assert [len(seen) for seen in counts] == [1, 1, 1]
    assert max(counts[0]) < min(counts[1]) <= max(counts[1]) < min(counts[2])
    assert len(sizes) >= 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0] == pytest.approx(losses[2], rel=1e-3)


def test_a_fuller_batch_raises_the_capacity_for_good(tmp_path, monkeypatch, caplog):
    """A stream has no index of its documents; a resumed run keeps the checkpoint's capacity."""
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    monkeypatch.setattr(TextSource, "most_sequences", lambda *_: None)
    monkeypatch.setattr("nsa.train.execution.compilation.SHORT_DOCUMENT", 10**6)
    config = tiny_config(tmp_path, compile=True, model={"attention": "dense"}, steps=3, seq_len=256)
    trainer = make_trainer(config, tmp_path / "run")
    assert trainer.state.progress.sequence_capacity == config.micro_batch + 1
    trainer.run()
    grown = trainer.state.progress.sequence_capacity
    assert grown in (4, 8, 16)
    assert f"exceeds the capacity of 3, which is now {grown}" in caplog.text
    again = make_trainer(config, tmp_path / "run", resume=True)
    assert again.state.progress.sequence_capacity == grown


# --- the run --------------------------------------------------------------------------------------


def test_rows_of_a_run(tmp_path):
    seen: list[Row] = []
    config = tiny_config(tmp_path, steps=11, log_every=2, eval_every=5, keep_checkpoints=2)
    trainer = make_trainer(config, tmp_path / "run", on_row=seen.append)
    assert trainer.state.progress.sequence_capacity == 0  # nothing is compiled, so no padding
    result, rows = trainer.run(), rows_of(tmp_path)
    assert (result.finished, result.signal, result.step) == (True, None, 11)
    assert [row["step"] for row in rows] == [2, 4, 5, 6, 8, 10, 11]
    assert [row | {"time_unix_s": 0} for row in rows] == [row | {"time_unix_s": 0} for row in seen]
    assert rows[0]["loss_nats"] == pytest.approx(math.log(256), rel=0.1)
    losses = {row["val_bits_per_byte"]: row["step"] for row in rows if "val_loss_nats" in row}
    assert [*losses.values()] == [5, 10, 11]
    progress = trainer.state.progress
    best = (progress.best_val_bits_per_byte, progress.best_val_step)
    assert best == min(losses.items())
    assert {row["nonfinite_steps"] for row in rows} == {0}
    assert check_run(trainer.run_folder)[1] == []
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-00000008", "step-00000011"]


def test_schedule_counts_optimizer_steps(tmp_path):
    new_trainer(tmp_path, accumulation=4, micro_batch=1, steps=6, log_every=1).run()
    rows = rows_of(tmp_path)
    rates = [1e-2 * lr_factor(step, 6, 3) for step in range(6)]
    assert [row["learning_rate"] for row in rows] == pytest.approx(rates)
    assert [row["tokens"] for row in rows] == [4 * 64 * step for step in range(1, 7)]


def test_a_row_averages_over_the_steps_since_the_row_before(tmp_path):
    changes: dict[str, Any] = {"steps": 6, "eval_every": 0, "model": {"attention": "dense"}}
    single, triple = (new_trainer(tmp_path, f"{n}", log_every=n, **changes) for n in (1, 3))
    steps = [single.next_batches() for _ in range(6)]
    targets, num_bytes = (
        [sum(getattr(batch, name) for batch in batches) for batches in steps]
        for name in ("num_targets", "num_bytes")
    )
    single.state.sampler.position = 0
    single.run()
    triple.run()
    rows = rows_of(tmp_path, "1")
    nats = [row["loss_nats"] * count for row, count in zip(rows, targets, strict=True)]
    for row, part in zip(rows_of(tmp_path, "3"), (slice(0, 3), slice(3, 6)), strict=True):
        norms, total = [step["grad_norm"] for step in rows[part]], sum(nats[part])
        found = [row[name] for name in ("grad_norm", "grad_norm_max", "loss_nats", "bits_per_byte")]
        bits = total / math.log(2) / sum(num_bytes[part])
        wanted = [sum(norms) / 3, max(norms), total / sum(targets[part]), bits]
        assert found == pytest.approx(wanted, rel=1e-6)


def test_evaluation_is_on_validation_text(tmp_path):
    """A model that knows its training text by heart is bad at validation text of another kind."""
    text = tmp_path / "documents"
    text.mkdir()
    known = [f"{index} {'abc' * 180}" for index in range(9)]

    def digest(document):
        return hashlib.sha256(document.encode()).hexdigest()

    # Documents become validation text in the order of their hashes.
    others, first = (f"{i} {'zyxw' * 135}" for i in range(999)), min(map(digest, known))
    unknown = next(document for document in others if digest(document) < first)
    for index, document in enumerate([*known, unknown]):
        (text / f"{index}.txt").write_text(document)
    data = DataConfig(source="folder", path=str(text), validation_fraction=0.12)
    trainer = new_trainer(tmp_path, data=data, steps=40, eval_every=0, checkpoint_every=0)
    assert b"zyxw" in bytes(trainer.data.validation.sequence(64, 0).astype("uint8"))
    row = trainer.run().row
    assert float(row["bits_per_byte"]) < 2
    assert float(row["val_bits_per_byte"]) > 6


@pytest.mark.parametrize(("limit_s", "drawn"), [(2.5, 3), (0.0, 6)])
def test_the_sample_does_not_hold_up_the_end(tmp_path, monkeypatch, limit_s, drawn):
    """A token takes a second here; the file contains the beginning of the whole sample."""
    trainer = new_trainer(tmp_path, steps=2, sample_tokens=6, sample_limit_s=limit_s)
    now, whole = [0.0], list[bytes]()

    def slowly(*args, **given):
        for (piece,) in Generation(*args, **given):
            whole.append(piece)
            now[0] += 1.0
            yield [piece]

    monkeypatch.setattr(reports, "Generation", slowly)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    trainer._reports.write_sample()
    text = (tmp_path / "run" / "sample.txt").read_text(encoding="utf-8", errors="replace")
    prompt = bytes(trainer.data.validation.sequence(64, 0)[:64].astype("uint8")).replace(b"\0", b"")
    ended = "--- ended after 3 of 6 tokens by sample_limit_s (2.5 s)\n" if drawn == 3 else ""
    continuation = b"".join(whole[:drawn]).decode(errors="replace")
    assert text == (
        f"--- prompt, validation text\n{prompt.decode()}\n"
        f"--- continuation, temperature 0.8\n{continuation}\n{ended}"
    )


def test_the_end_is_told_from_the_pace_of_the_last_rows(tmp_path):
    """The first step compiles; from step 500 on steps take 2 s instead of 1 s."""
    trainer, seconds = new_trainer(tmp_path, steps=1000), 100.0
    for step in range(10, 600, 10):
        seconds += 10 if step <= 500 else 20
        trainer.state.progress.step, trainer.state.progress.seconds = step, seconds
        eta_s = trainer._reports._eta_s()
        if step == 10:
            assert eta_s == 99 * 110
        elif step <= 500:
            assert eta_s == 1000 - step
    assert eta_s == pytest.approx(2 * (1000 - step), rel=0.06)


def test_a_checkpoint_has_the_loss_of_its_own_step_alone(tmp_path):
    trainer = new_trainer(tmp_path, steps=10, keep_checkpoints=9)
    trainer.run()
    paths = list_checkpoints(trainer.run_folder.checkpoints)
    losses = {step_of(path): read_meta(path)["val_bits_per_byte"] for path in paths}
    assert losses == {4: None, 8: None, 10: rows_of(tmp_path)[-1]["val_bits_per_byte"]}


def test_no_picture_and_no_sample_ends_a_run(tmp_path, monkeypatch):
    fail = Mock(side_effect=RuntimeError("Failed to process string with tex"))
    monkeypatch.setattr(train, "PLOT_EVERY_S", -1.0)
    monkeypatch.setattr("nsa.train.runs.report.plot_losses", fail)
    monkeypatch.setattr(reports, "Generation", fail)
    path = tmp_path / "tiny.yaml"
    path.write_text(to_yaml(tiny_config(tmp_path, steps=2, eval_every=1, sample_tokens=2)))
    assert cli.main(["train", str(path), "--run-dir", str(tmp_path / "run")]) == 0
    events = (tmp_path / "run/events.jsonl").read_text().splitlines()
    said = [event["message"] for event in map(json.loads, events) if event["kind"] == "warning"]
    names = ["loss.png", "loss.png", "sample.txt", "loss.png"]
    why = "left out (RuntimeError: Failed to process string with tex)"
    assert said == [f"{name}: {why}" for name in names]


def test_the_sample_stops_on_request_and_sends_heartbeats(tmp_path):
    """It comes after the last checkpoint, and on a slow machine it takes minutes."""
    config = tiny_config(tmp_path, steps=2, sample_tokens=50)
    limits: list[float] = []

    def beat(phase, step, limit_s):
        limits.extend([limit_s] * (phase == "sample"))
        if len(limits) == 4:  # before the prompt, and after each of three tokens
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = Trainer(config, RunFolder.create(tmp_path / "run", config), beat=beat)
    assert trainer.run().finished
    sample = (tmp_path / "run" / "sample.txt").read_text(encoding="utf-8")
    continuation = sample.partition("temperature 0.8\n")[2]
    assert 0 < len(continuation.removesuffix("\n")) <= 3
    assert len(limits) == 4
    assert min(limits) > 0


def test_each_phase_has_the_time_that_it_may_take(tmp_path, monkeypatch):
    """A step has less than a checkpoint, an evaluation as much for each batch, and who may wait for
    data without limit may do so while another process waits.
    """
    beats: list[tuple[str, float]] = []
    settings = {"eval_windows": 6, "checkpoint_every": 2, "data_limit_s": 0.0}
    config = tiny_config(tmp_path, steps=3, **settings)
    folder = RunFolder.create(tmp_path / "run", config)
    trainer = Trainer(config, folder, beat=lambda phase, _, limit_s: beats.append((phase, limit_s)))
    writer = trainer._checkpoints
    waiting, real = set[str](), writer.wait

    def wait():
        waiting.add(beats[-1][0])
        real()

    monkeypatch.setattr(writer, "poll", lambda: None)
    monkeypatch.setattr(writer, "wait", wait)
    trainer.run()
    assert waiting == {"checkpoint", "end"}
    assert [phase for phase, _ in beats].count("evaluation") == 6 / config.micro_batch
    limits = {phase: {limit_s for name, limit_s in beats if name == phase} for phase, _ in beats}
    assert limits["data"] == limits["exchange"] == {0}
    assert min(limits["checkpoint"]) >= 600


def test_a_halt_file_during_the_last_checkpoint_does_not_end_the_resumed_run(tmp_path, monkeypatch):
    trainer = new_trainer(tmp_path, steps=2)
    submit = trainer._checkpoints.submit

    def halted(*args):
        trainer.run_folder.halt.touch()
        submit(*args)

    monkeypatch.setattr(trainer._checkpoints, "submit", halted)
    assert trainer.run().finished
    assert resumed(tmp_path, steps=4).run().finished


# --- not finite -----------------------------------------------------------------------------------


@contextmanager
def poisoned(trainer: Trainer, steps: set[int], where: str) -> Iterator[None]:
    """NaN in the loss, in the gradient of a weight, or in a weight, at these steps (0-based)."""
    real, weight = trainer.loss, trainer.model.norm.weight

    def loss(*args: Any) -> Tensor:
        if trainer.state.progress.step not in steps:
            return real(*args)
        if where == "weights":
            with torch.no_grad():
                weight[3] = math.nan
        value = real(*args) * (math.nan if where == "loss" else 1)
        return value + (weight[0] * 0 * math.inf if where == "gradient" else 0)

    trainer.loss = loss
    yield
    trainer.loss = real


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_nonfinite_step_changes_nothing(tmp_path, where, name):
    trainer = new_trainer(tmp_path, optim={"name": name})
    trainer.train_step(trainer.next_batches())
    live = trainer.state.training_tensors().values()
    before = [tensor.clone() for tensor in live]
    with poisoned(trainer, {0}, where):
        assert trainer.train_step(trainer.next_batches())[2] == 1
    assert all_equal(before, live)
    assert trainer.train_step(trainer.next_batches())[2] == 0
    assert not all_equal(before, live)


def test_skipped_steps_are_counted_and_stay_out_of_the_mean(tmp_path, caplog):
    """Three in all, but never ``nonfinite_limit`` in a row."""
    for every, where in ((1, "loss"), (4, "gradient")):
        trainer = new_trainer(tmp_path, where, log_every=every, eval_every=0, nonfinite_limit=3)
        with poisoned(trainer, {4, 5, 8}, where):
            assert trainer.run().finished
    rows = rows_of(tmp_path, "loss")
    assert [row["nonfinite_steps"] for row in rows] == [0, 0, 0, 0, 1, 2, 2, 2, 3, 3, 3, 3]
    finite = [math.isfinite(row["loss_nats"]) for row in rows]
    assert finite == [step not in (4, 5, 8) for step in range(12)]
    assert "not finite in step 5: update skipped" in caplog.text
    rows = rows_of(tmp_path, "gradient")
    assert [row["nonfinite_steps"] for row in rows] == [0, 2, 3]
    assert all(2 < row["loss_nats"] < 6 and math.isfinite(row["grad_norm"]) for row in rows)


def test_stop_ends_the_run_at_the_first(tmp_path):
    trainer = new_trainer(tmp_path, nonfinite="stop")
    message = r"not finite in step 6 \(policy stop\); the last checkpoint is .*step-00000004"
    with poisoned(trainer, {5}, "loss"), pytest.raises(TrainingStoppedError, match=message):
        trainer.run()
    assert trainer.state.progress.step in (6, 7)
    # The resumed run meets that step again; another policy takes it beyond.
    again = resumed(tmp_path, nonfinite="skip")
    with poisoned(again, {5}, "loss"):
        assert again.run().row["nonfinite_steps"] == 1


@pytest.mark.parametrize(("step", "every", "newest"), [(6, 4, 4), (0, 0, 0)])
def test_rollback_takes_back_weights_and_moments(tmp_path, monkeypatch, step, every, newest):
    """Skipping cannot help when the weights are lost; there is a checkpoint from the start."""
    trainer = new_trainer(
        tmp_path, nonfinite="rollback", log_every=1, eval_every=0, checkpoint_every=every
    )
    load = Mock(side_effect=trainer.state.load_training_tensors)
    monkeypatch.setattr(trainer.state, "load_training_tensors", load)
    with poisoned(trainer, {step}, "weights"):
        result = trainer.run()
    assert [call.args[0].name for call in load.call_args_list] == [f"step-{newest:08d}"]
    assert result.finished
    assert result.row["nonfinite_steps"] == 1
    assert all(t.isfinite().all() for t in trainer.state.training_tensors().values())
    assert trainer.state.sampler.position == 12 * 4  # the batch that failed is not met again
