"""The optimizer step and the run around it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from nsa.train import reports
from nsa.train.config import DataConfig, ParallelConfig
from nsa.train.data import Batch, Sampler, TextSource
from nsa.train.generation import generate
from nsa.train.run_folder import RunFolder
from nsa.train.schedule import lr_factor
from nsa.train.telemetry.metrics import Row, read_metrics
from nsa.train.trainer import Trainer, TrainingStoppedError
from tests.train.cases import make_trainer, reproducible_rows, tiny_config


def weights(trainer: Trainer) -> dict[str, Tensor]:
    named = trainer.model.named_parameters()
    return {name: parameter.detach().clone() for name, parameter in named}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


# --- one step -------------------------------------------------------------------------------------


def test_micro_batches_equal_one_big_batch(tmp_path: Path) -> None:
    """They differ in targets, so that a mean of their means would be another number."""
    whole = make_trainer(tiny_config(tmp_path, micro_batch=6, accumulation=1), tmp_path / "whole")
    parts = make_trainer(tiny_config(tmp_path, micro_batch=2, accumulation=3), tmp_path / "parts")
    (big,) = whole.next_batches()
    small = parts.next_batches()
    assert torch.equal(big.tokens, torch.cat([batch.tokens for batch in small]))
    assert len({batch.num_targets for batch in small}) > 1
    results = whole.train_step([big]), parts.train_step(small)
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)
    for name, weight in weights(whole).items():
        torch.testing.assert_close(weights(parts)[name], weight, rtol=1e-4, atol=1e-5)


def test_loss_and_gradient_norm_by_hand(tmp_path: Path) -> None:
    trainer = make_trainer(tiny_config(tmp_path), tmp_path / "run")
    batches = trainer.next_batches()
    total = torch.zeros(())
    for batch in batches:
        logits = trainer.model(batch.tokens, batch.cu_seqlens, batch.max_seqlen)
        total = total + nn.functional.cross_entropy(logits, batch.targets, reduction="sum")
    gradients = torch.autograd.grad(
        total / sum(batch.num_targets for batch in batches),
        list(trainer.model.parameters()),
    )
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    loss, grad_norm, cancelled = trainer.train_step(batches).tolist()
    assert loss == pytest.approx(total.item(), rel=1e-5)
    # Over all parameters, and not of zeroed gradients.
    assert grad_norm == pytest.approx(norm.item(), rel=1e-4)
    assert grad_norm > 0.1
    assert cancelled == 0
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


@pytest.mark.parametrize("clip", [0.0, 1e-3])
def test_clipping(tmp_path: Path, clip: float) -> None:
    """AdamW does not see the gradient's scale, its first moment does: a tenth of the gradient that
    reached it.
    """
    trainer = make_trainer(tiny_config(tmp_path, optim={"grad_clip": clip}), tmp_path / "run")
    _, grad_norm, _ = trainer.train_step(trainer.next_batches()).tolist()
    state = trainer.state.optimizer.state_tensors().items()
    moments = [tensor for name, tensor in state if name.endswith(".exp_avg")]
    reached = 10 * torch.cat([moment.flatten() for moment in moments]).norm().item()
    assert reached == pytest.approx(clip if clip else grad_norm, rel=1e-3)


def test_schedule_counts_optimizer_steps(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path,
        accumulation=4,
        micro_batch=1,
        steps=6,
        log_every=1,
        optim={"warmup_steps": 3},
    )
    make_trainer(config, tmp_path / "run").run()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["learning_rate"] for row in rows] == pytest.approx(
        [1e-2 * lr_factor(step, 6, 3) for step in range(6)],
    )
    assert [row["tokens"] for row in rows] == [4 * 64 * step for step in range(1, 7)]


def test_master_weights_stay_fp32_under_bf16_compute(tmp_path: Path) -> None:
    results = {}
    for dtype in ("fp32", "bf16"):
        trainer = make_trainer(tiny_config(tmp_path, compute_dtype=dtype), tmp_path / dtype)
        seen: list[torch.dtype] = []
        projection = trainer.model.decoder_layers()[0].mlp.up_proj
        projection.register_forward_hook(lambda _m, _i, out, seen=seen: seen.append(out.dtype))
        results[dtype] = trainer.train_step(trainer.next_batches()).tolist()
        assert set(seen) == {torch.float32 if dtype == "fp32" else torch.bfloat16}
        assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
        assert {tensor.dtype for tensor in trainer.state.training_tensors().values()} == {
            torch.float32,
        }
    assert results["bf16"][:2] == pytest.approx(results["fp32"][:2], rel=0.02)
    assert results["bf16"][0] != results["fp32"][0]


class _NoReading(TorchDispatchMode):
    """Fails where the host would read a value off the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads a value"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_step_reads_nothing_off_the_device(
    tmp_path: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("_sequences", "_checks"):  # as of offsets on a GPU
        monkeypatch.setattr(f"nsa.ops.{module}.reads_contents", lambda index: False)
    config = tiny_config(
        tmp_path,
        model={"attention": "dense"},
        optim={"name": name},
        loss_chunk=32,
    )
    trainer = make_trainer(config, tmp_path / "run")
    batches = trainer.next_batches()
    with pytest.raises(AssertionError, match="reads a value"), _NoReading():
        torch.ones(()).item()
    with _NoReading():
        trainer.train_step(batches)


def test_optimizers_and_chunks_and_attention_all_learn(tmp_path: Path) -> None:
    variants: list[dict[str, Any]] = [
        {},
        {"optim": {"name": "muon"}},
        {"loss_chunk": 17},
        {"model": {"attention": "dense"}},
        {"model": {"tie_head": True, "mlp": "swiglu"}},
    ]
    for index, changes in enumerate(variants):
        config = tiny_config(
            tmp_path,
            steps=30,
            log_every=5,
            eval_every=0,
            checkpoint_every=0,
            **changes,
        )
        make_trainer(config, tmp_path / f"run{index}").run()
        rows = read_metrics(tmp_path / f"run{index}" / "metrics.jsonl")
        assert float(rows[-1]["loss_nats"]) < 0.7 * math.log(256), changes
        assert float(rows[0]["loss_nats"]) > float(rows[-1]["loss_nats"]) + 1, changes


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracer's own backend stands in for a C++ compiler, which takes minutes."""
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


@pytest.mark.parametrize(("attention", "by_layer"), [("nsa", True), ("dense", False)])
@pytest.mark.usefixtures("traced")
def test_compiled_equals_eager(tmp_path: Path, attention: str, by_layer: bool) -> None:
    """Traced whole or layer by layer, forward and backward."""
    results = []
    for compiled in (False, True):
        config = tiny_config(
            tmp_path,
            model={"attention": attention},
            compile=compiled,
            parallel=ParallelConfig(compile_layers=by_layer),
        )
        trainer = make_trainer(config, tmp_path / f"run{compiled}")
        assert isinstance(trainer.loss, nn.Module)
        assert hasattr(trainer.loss, "_orig_mod") is (compiled and not by_layer)
        before = counters["stats"]["unique_graphs"]
        results.append(torch.stack([trainer.train_step(trainer.next_batches()) for _ in range(2)]))
        assert (counters["stats"]["unique_graphs"] > before) is compiled
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("attention", "by_layer"), [("nsa", True), ("dense", False)])
@pytest.mark.usefixtures("traced")
def test_nothing_is_compiled_after_the_first_step(
    tmp_path: Path,
    attention: str,
    by_layer: bool,
) -> None:
    """Whatever documents a batch holds: of one token, of whole windows, dozens a window; with
    evaluations and a sample.
    """
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "long.txt").write_text("the sea and the old stones of it " * 60)
    for index in range(200):
        (folder / f"short{index:03d}.txt").write_text("x" * (index % 5) + f"{index}")
    config = tiny_config(
        tmp_path,
        model={"attention": attention, "num_layers": 2},
        compile=True,
        sample_tokens=3,
        steps=16,
        data=DataConfig(source="folder", path=str(folder)),
        parallel=ParallelConfig(compile_layers=by_layer),
    )
    trainer = make_trainer(config, tmp_path / "run")
    numbers: set[int] = set()
    step, drawn = trainer.train_step, trainer._draw

    def watched(batches: Sequence[Batch], num_targets: int | None = None) -> Tensor:
        assert {batch.num_sequences for batch in batches} == {
            trainer.state.progress.sequence_capacity,
        }
        stance = "default" if trainer.state.progress.step == 0 else "fail_on_recompile"
        with torch.compiler.set_stance(stance):
            return step(batches, num_targets)

    def counted(sampler: Sampler) -> list[Batch]:
        batches = drawn(sampler)
        numbers.update(batch.num_sequences for batch in batches)
        return batches

    trainer.train_step, trainer._draw = watched, counted  # type: ignore[method-assign]
    trainer.run()
    assert len(numbers) >= 3, numbers
    assert max(numbers) <= trainer.state.progress.sequence_capacity


@pytest.mark.usefixtures("traced")
def test_a_fuller_batch_raises_the_capacity_for_good(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where the data have no index, as a stream; the resumed run begins with what the checkpoint
    says.
    """
    monkeypatch.setattr(TextSource, "most_sequences", lambda *_: None)
    monkeypatch.setattr("nsa.train.sequence_capacity.SHORT_DOCUMENT", 10**6)
    changes: dict[str, Any] = {
        "model": {"attention": "dense"},
        "steps": 3,
        "seq_len": 256,
        "checkpoint_every": 2,
    }
    config = tiny_config(tmp_path, compile=True, **changes)
    with caplog.at_level(logging.WARNING):
        trainer = make_trainer(config, tmp_path / "run")
        assert trainer.state.progress.sequence_capacity == config.micro_batch + 1
        trainer.run()
    grown = trainer.state.progress.sequence_capacity
    assert grown in (4, 8, 16)
    assert f"exceeds the capacity of 3, which is now {grown}" in caplog.text
    resumed = make_trainer(config, tmp_path / "run", resume=True)
    assert resumed.state.progress.sequence_capacity == grown


def test_batches_are_not_padded_where_nothing_is_compiled(tmp_path: Path) -> None:
    trainer = make_trainer(tiny_config(tmp_path), tmp_path / "run")
    assert trainer.state.progress.sequence_capacity == 0
    batches = [batch for _ in range(3) for batch in trainer.next_batches()]
    assert all(int(batch.cu_seqlens.diff().min()) > 0 for batch in batches)


# --- the run --------------------------------------------------------------------------------------


def test_rows_of_a_run(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, steps=11, log_every=2, eval_every=5)
    seen: list[Row] = []
    trainer = make_trainer(config, tmp_path / "run", on_row=seen.append)
    result = trainer.run()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert (result.finished, result.signal, result.step) == (True, None, 11)
    assert [row["step"] for row in rows] == [2, 4, 5, 6, 8, 10, 11]
    assert [row["step"] for row in rows if "val_bits_per_byte" in row] == [5, 10, 11]
    for row, given in zip(rows, seen, strict=True):
        assert {**row, "time_unix_s": 0} == {**given, "time_unix_s": 0}
    assert float(rows[0]["loss_nats"]) == pytest.approx(math.log(256), rel=0.1)
    progress = trainer.state.progress
    validated = [row for row in rows if "val_bits_per_byte" in row]
    validations = {row["step"]: row["val_bits_per_byte"] for row in validated}
    assert progress.best_val_bits_per_byte == min(validations.values())
    assert validations[progress.best_val_step or 0] == progress.best_val_bits_per_byte
    for row in rows:
        assert 0 < float(row["data_time_ms"]) < float(row["step_time_ms"])
        assert float(row["tokens_per_s"]) == pytest.approx(
            256 / float(row["step_time_ms"]) * 1000,
            rel=1e-6,
        )
        assert row["nonfinite_steps"] == 0


def test_a_row_averages_over_the_steps_since_the_row_before(tmp_path: Path) -> None:
    every = make_trainer(
        tiny_config(tmp_path, steps=6, log_every=1, eval_every=0),
        tmp_path / "every",
    )
    third = make_trainer(
        tiny_config(tmp_path, steps=6, log_every=3, eval_every=0),
        tmp_path / "third",
    )
    targets, num_bytes = [], []
    for _ in range(6):
        batches = every.next_batches()
        targets.append(sum(batch.num_targets for batch in batches))
        num_bytes.append(sum(batch.num_bytes for batch in batches))
    every.state.sampler.position = 0
    every.run()
    third.run()
    single, rows = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("every", "third"))
    losses, norms = ([float(row[name]) for row in single] for name in ("loss_nats", "grad_norm"))
    for row, part in zip(rows, (slice(0, 3), slice(3, 6)), strict=True):
        assert row["grad_norm"] == pytest.approx(sum(norms[part]) / 3)
        assert row["grad_norm_max"] == pytest.approx(max(norms[part]))
        nats = sum(loss * count for loss, count in zip(losses[part], targets[part], strict=True))
        assert float(row["loss_nats"]) == pytest.approx(nats / sum(targets[part]), rel=1e-6)
        assert float(row["bits_per_byte"]) == pytest.approx(
            nats / math.log(2) / sum(num_bytes[part]),
            rel=1e-6,
        )


def test_same_seed_same_run(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_trainer(tiny_config(tmp_path, steps=4, seed=seed), tmp_path / name).run()
    assert reproducible_rows(tmp_path / "a") == reproducible_rows(tmp_path / "b")
    assert reproducible_rows(tmp_path / "a") != reproducible_rows(tmp_path / "c")


def test_evaluation_is_on_held_out_text(tmp_path: Path) -> None:
    """A model that has learnt its training text by heart is bad at the held-out text, which is of
    another kind.
    """
    text = tmp_path / "text"
    text.mkdir()
    known = [f"{index} {'abc' * 180}" for index in range(9)]
    first = min(hashlib.sha256(document.encode()).hexdigest() for document in known)
    # Documents are held out in the order of their hashes.
    other = (f"{index} {'zyxw' * 135}" for index in range(999))
    digests = ((hashlib.sha256(text_.encode()).hexdigest(), text_) for text_ in other)
    unknown = next(document for digest, document in digests if digest < first)
    for index, document in enumerate([*known, unknown]):
        (text / f"{index}.txt").write_text(document)
    config = tiny_config(tmp_path / "unused", steps=40, eval_every=0, checkpoint_every=0)
    config = dataclasses.replace(
        config,
        data=DataConfig(source="folder", path=str(text), validation_fraction=0.12),
    )
    trainer = make_trainer(config, tmp_path / "run")
    assert b"zyxw" in bytes(trainer.data.validation.window(64, 0).astype("uint8"))
    row = trainer.run().row
    assert float(row["bits_per_byte"]) < 2
    assert float(row["val_bits_per_byte"]) > 6


def test_sample_continues_held_out_text(tmp_path: Path) -> None:
    trainer = make_trainer(tiny_config(tmp_path, steps=2, sample_tokens=9), tmp_path / "run")
    trainer.run()
    text = (tmp_path / "run" / "sample.txt").read_text(encoding="utf-8")
    window = bytes(trainer.data.validation.window(64, 0)[:64].astype("uint8"))
    prompt = window.replace(b"\0", b"").decode()
    assert prompt in text
    assert "--- continuation" in text


@pytest.mark.parametrize(("limit_s", "drawn"), [(2.5, 3), (0.0, 6), (5.5, 6)])
def test_the_sample_does_not_hold_up_the_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit_s: float,
    drawn: int,
) -> None:
    """A token takes a second here; the file holds the beginning of the whole sample."""
    config = tiny_config(tmp_path, steps=2, sample_tokens=6, sample_limit_s=limit_s)
    trainer = make_trainer(config, tmp_path / "run")
    now, whole = [0.0], list[bytes]()

    def slowly(*args: Any, **given: Any) -> Iterator[list[bytes]]:
        whole.extend(piece for (piece,) in generate(*args, **given))
        for piece in whole:
            now[0] += 1.0
            yield [piece]

    monkeypatch.setattr(reports, "generate", slowly)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    trainer._reports.write_sample()
    text = (tmp_path / "run" / "sample.txt").read_text(encoding="utf-8", errors="replace")
    said = "--- ended after 3 of 6 tokens by sample_limit_s (2.5 s)\n"
    assert text.endswith(said) == (drawn == 3)
    assert ("sample_limit_s" in text) == (drawn == 3)
    continuation = text.partition("temperature 0.8\n")[2].removesuffix(said).removesuffix("\n")
    assert continuation == b"".join(whole[:drawn]).decode(errors="replace")


def test_the_sample_ends_when_somebody_wants_the_end_and_gives_signs_of_life(
    tmp_path: Path,
) -> None:
    """It comes after the last checkpoint, and on a slow machine it takes minutes."""
    config = tiny_config(tmp_path, steps=2, sample_tokens=50)
    beats: list[tuple[str, float]] = []

    def beat(phase: str, step: int, limit_s: float) -> None:
        beats.append((phase, limit_s))
        # Before the prompt and after three tokens.
        if sum(phase == "sample" for phase, _ in beats) == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = Trainer(config, RunFolder.create(tmp_path / "run", config), beat=beat)
    assert trainer.run().finished
    sample = (tmp_path / "run" / "sample.txt").read_text(encoding="utf-8")
    continuation = sample.partition("temperature 0.8\n")[2]
    assert 0 < len(continuation.removesuffix("\n")) <= 3
    assert [phase for phase, _ in beats].count("sample") == 4
    assert all(limit_s > 0 for _, limit_s in beats)


def test_checkpoints_while_running_and_at_the_end(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, steps=10, checkpoint_every=4, keep_checkpoints=2)
    make_trainer(config, tmp_path / "run").run()
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-00000008", "step-00000010"]


# --- not finite -----------------------------------------------------------------------------------


@contextmanager
def poisoned(trainer: Trainer, steps: set[int], where: str) -> Iterator[None]:
    """Plant NaN in the loss, the gradient of one weight, or the weights at the given optimizer
    steps (0-based).
    """
    real: Callable[..., Tensor] = trainer.loss
    weight = trainer.model.norm.weight

    def loss(*args: Any) -> Tensor:
        if trainer.state.progress.step not in steps:
            return real(*args)
        if where == "weights":
            with torch.no_grad():
                weight[3] = math.nan
        value = real(*args)
        if where == "loss":
            return value * math.nan
        return value + (weight[0] * 0 * math.inf if where == "gradient" else 0)

    trainer.loss = loss
    yield
    trainer.loss = real


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_nonfinite_step_changes_nothing(tmp_path: Path, where: str, name: str) -> None:
    trainer = make_trainer(tiny_config(tmp_path, optim={"name": name}), tmp_path / "run")
    trainer.train_step(trainer.next_batches())
    before = {key: tensor.clone() for key, tensor in trainer.state.training_tensors().items()}
    with poisoned(trainer, {0}, where):
        *_, cancelled = trainer.train_step(trainer.next_batches()).tolist()
    assert cancelled == 1
    assert same(before, trainer.state.training_tensors())
    *_, cancelled = trainer.train_step(trainer.next_batches()).tolist()
    assert cancelled == 0
    assert not same(before, trainer.state.training_tensors())


def test_skip_counts_and_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Three in all, but never ``nonfinite_limit`` in a row."""
    config = tiny_config(tmp_path, log_every=1, eval_every=0, nonfinite_limit=3)
    trainer = make_trainer(config, tmp_path / "run")
    with poisoned(trainer, {4, 5, 8}, "loss"):
        result = trainer.run()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert result.finished
    assert [row["nonfinite_steps"] for row in rows] == [0, 0, 0, 0, 1, 2, 2, 2, 3, 3, 3, 3]
    finite = [math.isfinite(float(row["loss_nats"])) for row in rows]
    assert finite == [step not in (4, 5, 8) for step in range(12)]
    assert "not finite in step 5: update left out" in caplog.text


def test_skipped_steps_stay_out_of_the_mean(tmp_path: Path) -> None:
    trainer = make_trainer(tiny_config(tmp_path, log_every=4, eval_every=0), tmp_path / "run")
    with poisoned(trainer, {1, 6, 7}, "gradient"):
        trainer.run()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["nonfinite_steps"] for row in rows] == [1, 3, 3]
    assert all(2 < float(row["loss_nats"]) < 6 for row in rows)
    assert all(math.isfinite(float(row["grad_norm"])) for row in rows)


@pytest.mark.parametrize("log_every", [1, 5])
def test_too_many_in_a_row_end_the_run(tmp_path: Path, log_every: int) -> None:
    config = tiny_config(tmp_path, steps=40, log_every=log_every, eval_every=0, nonfinite_limit=3)
    trainer = make_trainer(config, tmp_path / "run")
    message = r"3 in a row, nonfinite_limit 3\); the last checkpoint is .*step-00000004"
    with (
        poisoned(trainer, set(range(5, 99)), "weights"),
        pytest.raises(TrainingStoppedError, match=message),
    ):
        trainer.run()
    assert trainer.state.progress.step <= 9


def test_stop_ends_the_run_at_the_first(tmp_path: Path) -> None:
    trainer = make_trainer(tiny_config(tmp_path, nonfinite="stop"), tmp_path / "run")
    message = r"not finite in step 6 \(policy stop\); the last checkpoint is .*step-00000004"
    with poisoned(trainer, {5}, "loss"), pytest.raises(TrainingStoppedError, match=message):
        trainer.run()
    assert trainer.state.progress.step in (6, 7)
    # The resumed run meets that step again; another policy takes it beyond.
    resumed = make_trainer(tiny_config(tmp_path, nonfinite="skip"), tmp_path / "run", resume=True)
    with poisoned(resumed, {5}, "loss"):
        assert resumed.run().row["nonfinite_steps"] == 1


def test_rollback_takes_back_weights_and_moments(tmp_path: Path) -> None:
    """Skipping cannot help when the weights themselves are lost."""
    trainer = make_trainer(
        tiny_config(tmp_path, nonfinite="rollback", log_every=1, eval_every=0),
        tmp_path / "run",
    )
    loaded: list[bool] = []
    real = trainer.state.load_training_tensors

    def load(path: Path) -> None:
        real(path)
        tensors = trainer.state.training_tensors().values()
        finite = all(tensor.isfinite().all() for tensor in tensors)
        loaded.append(finite and path.name == "step-00000004")

    trainer.state.load_training_tensors = load  # type: ignore[method-assign]
    with poisoned(trainer, {6}, "weights"):
        result = trainer.run()
    assert loaded == [True]
    assert result.finished
    assert result.row["nonfinite_steps"] == 1
    assert math.isfinite(float(result.row["loss_nats"]))
    assert trainer.state.sampler.position == 12 * 4  # the batch that failed is not met again


def test_rollback_has_something_to_go_back_to_from_the_start(tmp_path: Path) -> None:
    trainer = make_trainer(
        tiny_config(tmp_path, nonfinite="rollback", checkpoint_every=0),
        tmp_path / "run",
    )
    with poisoned(trainer, {0}, "weights"):
        assert trainer.run().finished
