"""The training loop: optimizer steps, evaluation, checkpoints, what to do about non-finite steps and signals."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from nsa.errors import check
from nsa.eval.bits_per_byte import evaluate
from nsa.eval.generation import complete
from nsa.lm.flops import flops_per_token
from nsa.lm.model import LanguageModel
from nsa.train.checkpoint import list_checkpoints, read_meta
from nsa.train.config import TrainConfig
from nsa.train.data import Batch, collate, open_data, validation_batches
from nsa.train.late import LateReader
from nsa.train.launch import check_launch, read_launch
from nsa.train.loss import NextTokenLoss
from nsa.train.metrics import MetricsWriter, Row
from nsa.train.optim import ModelOptimizer
from nsa.train.precision import autocast, choose_device, set_tf32
from nsa.train.rng import seed_everything
from nsa.train.run_folder import RunFolder
from nsa.train.schedule import lr_factor
from nsa.train.signals import StopRequest
from nsa.train.state import TrainState, Window
from nsa.train.throughput import memory_row, peak_flops, utilisation_row

logger = logging.getLogger(__name__)

SAMPLE_PROMPT_TOKENS = 64
SAMPLE_TEMPERATURE = 0.8

# Settings that a resumed run may change: none of them alters a single weight. Where the data lie may change, what they are
# may not: their description has hashes or, for a stream, the commit and the files' versions.
RESUME_MAY_CHANGE = frozenset(
    {"log_every", "eval_every", "eval_windows", "checkpoint_every", "keep_checkpoints", "nonfinite_limit", "sample_tokens"}
    | {"data.path", "data.revision", "data.time_limit_s"}
)


class TrainingStoppedError(RuntimeError):
    """The run ended itself because of non-finite steps; the message says what happened and what is left."""


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
        finished: whether all steps were done; otherwise a signal asked it to stop.
        signal: name of that signal.
        step: optimizer steps done.
        row: the last row of metrics; empty if this process wrote none.
    """

    finished: bool
    signal: str | None
    step: int
    row: Row


@dataclass(frozen=True)
class _StepInfo:
    """What the host knows about a step whose figures are still on the device."""

    step: int
    targets: int
    bytes: int


class Trainer:
    """A training run on one device.

    Args:
        config: the run.
        run_folder: where everything is written.
        resume: continue from the newest checkpoint of ``run_folder`` instead of starting.
        on_row: called with each row of metrics after it was written.

    Raises:
        ValueError: the configuration does not fit the launch, the device, the tokenizer or the checkpoint.
    """

    def __init__(
        self,
        config: TrainConfig,
        run_folder: RunFolder,
        *,
        resume: bool = False,
        on_row: Callable[[Row], None] | None = None,
    ) -> None:
        launch = read_launch()
        check_launch(config, launch)
        self.config, self.run_folder = config, run_folder
        self.on_row = on_row
        self.device = choose_device(config.device)
        set_tf32(config.tf32)
        seed_everything(config.seed)
        self.data = open_data(
            config.data,
            seed=config.seed,
            seq_len=config.seq_len,
            run_folder_tokenizer=run_folder.tokenizer if resume else None,
        )
        if not resume:
            self.data.tokenizer.save(run_folder.tokenizer)
        check(
            config.model.vocab_size == self.data.tokenizer.vocab_size,
            "train", "model.vocab_size", f"equal the tokenizer's ({self.data.tokenizer.vocab_size})", config.model.vocab_size,
        )  # fmt: skip
        self.model = LanguageModel(config.model).to(self.device)
        sampler = self.data.sampler(config.seq_len, config.seed)
        self.state = TrainState(self.model, ModelOptimizer(self.model, config.optim), sampler)
        self.loss: Callable[..., Tensor] = NextTokenLoss(self.model, config.loss_chunk)
        if config.compile:
            self.loss = torch.compile(self.loss)
        self._results: LateReader[_StepInfo] = LateReader()
        self.last_row: Row = {}
        self._flops_per_token = flops_per_token(self.model, config.seq_len)
        self._peak_flops = peak_flops(self.device, config.compute_dtype)
        self._metrics = MetricsWriter(run_folder)
        if resume:
            self._resume()
        self._describe(launch.allocator)

    # --- setting up -------------------------------------------------------------------------------------------------------
    def _describe(self, allocator: str) -> None:
        config = self.config
        windows = f"{config.micro_batch} windows x {config.accumulation} micro-batches x {config.world_size} process"
        logger.info("model: %s", self.model.parameter_summary())
        logger.info(
            "batch: %s = %d windows of %d tokens = %s tokens an optimizer step",
            windows, config.global_batch, config.seq_len, f"{config.global_batch * config.seq_len:,}",
        )  # fmt: skip
        logger.info(
            "device: %s, compute %s over fp32 master weights, TF32 %s, compile %s, allocator settings %s",
            self.device.type, config.compute_dtype, "on" if config.tf32 else "off", "on" if config.compile else "off",
            allocator or "default",
        )  # fmt: skip
        if self._peak_flops is None:
            logger.info("mfu: left out, the peak rate of this device and dtype is not known")

    def _description(self) -> dict[str, Any]:
        """What a checkpoint says about the run that it belongs to."""
        config = dataclasses.asdict(self.config)
        digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
        return {"config": config, "config_sha256": digest, "data": self.data.description}

    def _resume(self) -> None:
        found = list_checkpoints(self.run_folder.checkpoints)
        hint = "It stopped before its first one; start it anew."
        check(bool(found), "train", "--resume", "name a run with a checkpoint", self.run_folder.path, hint)
        saved = read_meta(found[-1])
        ours = json.loads(json.dumps(self._description()))
        for part, hint in (("config", "Only a new run can change it."), ("data", "The text has changed since.")):
            before, now = (dict(_flat(description[part])) for description in (saved, ours))
            for name in sorted(before.keys() | now.keys()):
                same = before.get(name) == now.get(name) or (part == "config" and name in RESUME_MAY_CHANGE)
                check(same, "train", name, f"stay as in the checkpoint ({before.get(name)})", now.get(name), hint)
        self.state.load(found[-1])
        self._metrics.rewind(self.state.progress.reported_step)
        self._set_lr(self.state.progress.step - 1)  # for a row that this step may still owe
        logger.info("resumed from %s", found[-1])

    # --- one optimizer step -----------------------------------------------------------------------------------------------
    def next_batches(self) -> list[Batch]:
        """The micro-batches of one optimizer step, on the host; advances the place in the data."""
        config = self.config
        windows = [self.state.sampler.next_windows(config.micro_batch) for _ in range(config.accumulation)]
        return [
            collate(self.data.train, indices, config.seq_len, document_mask=config.data.document_mask) for indices in windows
        ]

    def train_step(self, batches: Sequence[Batch]) -> Tensor:
        """One optimizer step over micro-batches; nothing in it waits for the device.

        The loss is the mean over all targets of the step, however they are spread over the micro-batches.

        Args:
            batches: micro-batches, on the host.

        Returns:
            On the device, fp32 ``[3]``: summed loss in nats, gradient norm before clipping, and whether the update was
            cancelled because one of the two is not finite, 1 or 0.
        """
        config, optimizer = self.config, self.state.optimizer
        num_targets = max(sum(batch.num_targets for batch in batches), 1)
        loss = torch.zeros((), device=self.device)
        for batch in batches:
            batch = batch.to(self.device)
            with autocast(self.device, config.compute_dtype):
                loss_sum = self.loss(batch.tokens, batch.targets, batch.cu_seqlens, batch.max_seqlen)
            (loss_sum / num_targets).backward()
            loss += loss_sum.detach()
        parameters = optimizer.parameters()
        grad_norm = get_total_norm(_gradients(parameters))
        cancel = 1.0 - (grad_norm.isfinite() & loss.isfinite()).float()
        if config.optim.grad_clip > 0:
            clip_grads_with_norm_(parameters, config.optim.grad_clip, grad_norm)
        self._set_lr(self.state.progress.step)
        optimizer.step(cancel)
        optimizer.zero_grad()
        return torch.stack((loss, grad_norm, cancel))

    def _set_lr(self, step: int) -> None:
        optim = self.config.optim
        self.state.optimizer.set_lr(lr_factor(step, self.config.steps, optim.warmup_steps, optim.min_lr_ratio))

    # --- the run ----------------------------------------------------------------------------------------------------------
    def run(self) -> RunResult:
        """Train until all steps are done or a signal asks to stop; either way a checkpoint is left.

        Raises:
            TrainingStoppedError: the policy for non-finite steps ended the run.
        """
        progress, steps = self.state.progress, self.config.steps
        begun = time.perf_counter() - progress.seconds
        if self.config.nonfinite == "rollback":
            self._checkpoint()  # something to go back to
        with closing(self._metrics), StopRequest() as stop:
            self._report(stop)  # a signal may have come between a step and its row
            while progress.step < steps and not stop:
                self._timed_step()
                progress.seconds = time.perf_counter() - begun
                self._report(stop)
                if self._due(self.config.checkpoint_every):
                    self._checkpoint()
            self._checkpoint()
            finished = progress.step >= steps
            if finished:
                self._write_sample()
        name = None if stop.received is None else stop.received.name
        if progress.best_val_step is not None:
            best = progress.best_val_bits_per_byte
            logger.info("best held-out figure: %.4f bits per byte at step %d", best, progress.best_val_step)
        if not finished:
            logger.info("stopped by %s after step %d of %d; resume to go on", name, progress.step, steps)
        return RunResult(finished, name, progress.step, self.last_row)

    def _timed_step(self) -> None:
        progress, window = self.state.progress, self.state.progress.window
        begin = time.perf_counter()
        batches = self.next_batches()
        fetched = time.perf_counter()
        targets, num_bytes = sum(batch.num_targets for batch in batches), sum(batch.num_bytes for batch in batches)
        self._results.put(_StepInfo(progress.step, targets, num_bytes), self.train_step(batches))
        progress.step += 1
        tokens = sum(batch.tokens.shape[0] for batch in batches)
        progress.tokens += tokens
        window.tokens += tokens
        window.steps += 1
        # The figures of the step before are read while the device works on this one.
        self._read_results(keep=0 if self._row_due() else 1)
        window.seconds += time.perf_counter() - begin
        window.data_seconds += fetched - begin

    def _read_results(self, keep: int) -> None:
        """Take in the figures of all steps but the newest ``keep``."""
        progress, window = self.state.progress, self.state.progress.window
        nonfinite = []
        for info, (loss, grad_norm, cancelled) in self._results.take(keep):
            if cancelled:
                nonfinite.append(info.step)
                progress.nonfinite_steps += 1
                progress.nonfinite_streak += 1
                continue
            progress.nonfinite_streak = 0
            window.loss += loss
            window.targets += info.targets
            window.bytes += info.bytes
            window.grad_norm = grad_norm
        if nonfinite:
            self._on_nonfinite(nonfinite)

    def _on_nonfinite(self, steps: list[int]) -> None:
        """Follow the policy; the updates of these steps have been cancelled on the device already."""
        config, streak = self.config, self.state.progress.nonfinite_streak
        what = f"loss or gradient not finite in step {', '.join(str(step + 1) for step in steps)}"
        found = list_checkpoints(self.run_folder.checkpoints)
        if config.nonfinite == "stop" or streak >= config.nonfinite_limit:
            why = (
                "policy stop" if config.nonfinite == "stop" else f"{streak} in a row, nonfinite_limit {config.nonfinite_limit}"
            )
            last = f"the last checkpoint is {found[-1]}" if found else "there is no checkpoint yet"
            raise TrainingStoppedError(f"{what} ({why}); {last}. A lower optim.lr or a longer optim.warmup_steps may help.")
        if config.nonfinite == "rollback":
            self._results.take(keep=0)  # of steps made with the weights that are given up
            self.state.load_training_tensors(found[-1])
            logger.warning("%s: weights and optimizer state are those of %s again, data go on", what, found[-1].name)
        else:
            logger.warning("%s: update left out", what)

    def _due(self, every: int) -> bool:
        step = self.state.progress.step
        return step == self.config.steps or (every > 0 and step > 0 and step % every == 0)

    def _evaluation_due(self) -> bool:
        return self.config.eval_windows > 0 and self._due(self.config.eval_every)

    def _row_due(self) -> bool:
        return self._due(self.config.log_every) or self._evaluation_due()

    # --- reports ----------------------------------------------------------------------------------------------------------
    def _report(self, stop: StopRequest) -> None:
        """Evaluate and write a row of metrics, where either is due and not done for this step.

        A signal ends an evaluation; the resumed run then does it in full, so that its rows are those of an undisturbed run.
        """
        progress = self.state.progress
        if not self._row_due() or progress.reported_step == progress.step:
            return
        validation: Row = {}
        if self._evaluation_due():
            try:
                validation = self._evaluate(stop)
            except _InterruptedError:
                return
        self.last_row = {**self._training_row(), **validation}
        progress.window, progress.reported_step = Window(), progress.step
        self._metrics.write(self.last_row)
        if self.on_row is not None:
            self.on_row(self.last_row)

    def _training_row(self) -> Row:
        progress, window = self.state.progress, self.state.progress.window
        tokens_per_s = window.tokens / window.seconds
        row: Row = {
            "step": progress.step,
            "tokens": progress.tokens,
            "loss_nats": window.loss_nats,
            "bits_per_byte": window.bits_per_byte,
            "learning_rate": self.state.optimizer.learning_rate,
            "grad_norm": window.grad_norm,
            "nonfinite_steps": progress.nonfinite_steps,
            "step_time_ms": 1000 * window.seconds / window.steps,
            "data_time_ms": 1000 * window.data_seconds / window.steps,
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_total": progress.tokens / progress.seconds,
            "eta_s": (self.config.steps - progress.step) * progress.seconds / progress.step,
            **memory_row(self.device),
            **utilisation_row(self.device),
        }
        if self.data.description["synthetic"]:
            row["data_synthetic"] = True
        if self._peak_flops is not None:
            row["mfu"] = tokens_per_s * self._flops_per_token / self._peak_flops
        return row

    def _evaluate(self, stop: StopRequest) -> Row:
        config, progress = self.config, self.state.progress
        batches = validation_batches(
            self.data.validation,
            config.seq_len,
            config.micro_batch,
            config.eval_windows,
            document_mask=config.data.document_mask,
        )
        result = evaluate(self.model, _until(stop, batches), compute_dtype=config.compute_dtype, loss_chunk=config.loss_chunk)
        if progress.best_val_bits_per_byte is None or result["bits_per_byte"] < progress.best_val_bits_per_byte:
            progress.best_val_bits_per_byte, progress.best_val_step = result["bits_per_byte"], progress.step
        return {"val_loss_nats": result["loss_nats"], "val_bits_per_byte": result["bits_per_byte"]}

    def _checkpoint(self) -> None:
        """Leave a checkpoint of this step, if there is none."""
        self._read_results(keep=0)
        folder, step = self.run_folder.checkpoints, self.state.progress.step
        newest = list_checkpoints(folder)[-1:]
        if newest and read_meta(newest[0])["step"] == step:
            return
        path = self.state.save(folder, self._description(), keep=self.config.keep_checkpoints)
        logger.info("checkpoint %s", path)

    def _write_sample(self) -> None:
        """Continue the beginning of the held-out text."""
        config, tokenizer = self.config, self.data.tokenizer
        if config.sample_tokens == 0:
            return
        prompt = self.data.validation.window(config.seq_len, 0)[: min(SAMPLE_PROMPT_TOKENS, config.seq_len)].tolist()
        (text,) = complete(
            self.model, tokenizer, [prompt], max_new_tokens=config.sample_tokens, temperature=SAMPLE_TEMPERATURE,
            seed=config.seed, compute_dtype=config.compute_dtype,
        )  # fmt: skip
        parts = (
            f"--- prompt, held-out text\n{_shown(tokenizer.decode(prompt))}",
            f"--- continuation, temperature {SAMPLE_TEMPERATURE}\n{_shown(text)}",
        )
        self.run_folder.sample.write_text("\n".join(parts) + "\n", encoding="utf-8")


class _InterruptedError(Exception):
    """A signal came during an evaluation."""


def _until(stop: StopRequest, batches: Iterator[Batch]) -> Iterator[Batch]:
    for batch in batches:
        if stop:
            raise _InterruptedError
        yield batch


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of nested dictionaries."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    gradients = [parameter.grad for parameter in parameters]
    assert all(gradient is not None for gradient in gradients), "a trainable parameter got no gradient"
    return cast(list[Tensor], gradients)


def _shown(text: bytes) -> str:
    return text.decode("utf-8", errors="replace")
