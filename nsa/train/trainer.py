"""The training loop: optimizer steps, checkpoints, non-finite steps, missing data, requests."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from nsa.errors import UserError, check, check_default
from nsa.lm.model import LanguageModel
from nsa.stages import BACKWARD, DATA, FORWARD, OPTIMIZER, in_stage, stage
from nsa.train.checkpoint import CheckpointWriter, checkpoint_path, list_checkpoints
from nsa.train.config import TrainConfig
from nsa.train.data import Batch, Sampler, collate, open_data
from nsa.train.data.batch import Prefetcher, StarvedError
from nsa.train.distributed.launch import Launch, read_launch
from nsa.train.distributed.processes import Processes
from nsa.train.distributed.strategy import distribute
from nsa.train.execution.activations import checkpoint_activations
from nsa.train.execution.compilation import Startup, compilations, first_capacity
from nsa.train.execution.cuda_graphs import CaptureError, Replay
from nsa.train.execution.kernels_ahead import run_step
from nsa.train.execution.precision import autocast, choose_device
from nsa.train.loss import NextTokenLoss
from nsa.train.optim import INDEX_WEIGHTS, ModelOptimizer, lr_factor, run_now
from nsa.train.pretrained import initial_tokenizer, load_initial
from nsa.train.reports import Beat, Reports, RunContext, RunResult, log_start
from nsa.train.run_folder import RunFolder
from nsa.train.state import (
    TrainState,
    check_same_data,
    resumed_checkpoint,
    seed_everything,
)
from nsa.train.telemetry.metrics import Row
from nsa.train.telemetry.throughput import LateReader
from nsa.train.watch.signals import HALT, Requests
from nsa.train.watch.watchdog import STARTING_LIMIT_S, checkpoint_limit_s

logger = logging.getLogger(__name__)

Drawn = tuple[list[Batch], dict[str, Any]]  # micro-batches, and the position in the data after them


class TrainingStoppedError(RuntimeError):
    """The run cannot continue; the message says why, and names the last checkpoint."""


class Trainer:
    """A training run, or one process's part of it.

    All processes make the same decisions at the same steps; the main one writes.

    Args:
        config: the run.
        run_folder: output folder.
        processes: this process and the other ranks of the run; None for a run of one process.
        resume: continue from the newest checkpoint of ``run_folder`` instead of starting.
        init_from: checkpoint of another run, or a folder of ``nsa export``; the new run starts with
            its weights and tokenizer. None draws the weights.
        on_row: called with each row of metrics after it was written.
        on_step: called after each optimizer step, before the next one begins.
        stops_at_once: whether a signal ends the process at once, without a checkpoint.
        beat: called with a heartbeat (phase, step, longest duration in seconds) whenever
            a phase begins.

    Attributes:
        startup: times of the phases until the end of the first step.

    Raises:
        ValueError: the configuration does not fit the device, the tokenizer or the checkpoint.
    """

    def __init__(
        self,
        config: TrainConfig,
        run_folder: RunFolder,
        *,
        processes: Processes | None = None,
        resume: bool = False,
        init_from: Path | None = None,
        on_row: Callable[[Row], None] | None = None,
        on_step: Callable[[], None] = lambda: None,
        stops_at_once: bool = False,
        beat: Beat = lambda phase, step, limit_s: None,
    ) -> None:
        self.startup = Startup()
        self.startup.begin("device")
        launch = read_launch()
        self.config, self.run_folder, self.processes = config, run_folder, processes or Processes()
        self._beat, self._on_step = beat, on_step
        self.device = self._prepare_device(config, launch)
        seed_everything(config.seed)
        resumed = resumed_checkpoint(config, run_folder, self.device) if resume else None
        # One process of a machine compiles; the others load from Triton's cache what is there.
        if self.device.type == "cuda" and launch.local_rank == 0:
            self._compile_kernels()
        self.startup.begin("model")  # before the data: an error need not wait for them
        self._make_model(init_from)
        self.startup.begin("data")
        self._open_data(resumed, init_from)
        sampler = self.data.sampler(config.seq_len, config.seed)
        self.state = TrainState(self.model, ModelOptimizer(self.model, config.optim), sampler)
        self.loss = self._training_loss()
        self._replay = None
        if config.cuda_graphs:
            self._replay = Replay(self._forward_backward, self.state.optimizer.parameters())
        # Steps whose results are still on the device: step, targets, bytes of text.
        self._results: LateReader[tuple[int, int, int]] = LateReader()
        halt = run_folder.halt if self.processes.is_main else None
        self._requests = Requests(
            halt, launched=launch.launcher, agent=launch.agent, listens=not stops_at_once
        )
        writers = self.processes.for_thread() if self.strategy.in_step else Processes()
        self._checkpoints = CheckpointWriter(
            run_folder.checkpoints, config.keep_checkpoints, writers
        )
        self._is_first_step = True
        if resumed is not None:
            self.startup.begin("checkpoint")
            self._resume(resumed)
        # Last: a run that fails before has changed no file of the metrics.
        parts = (self.device, self.strategy, self.processes, self._requests, self.startup)
        context = RunContext(config, run_folder, *parts, on_row, beat)
        self._reports = Reports(context, self.data, self.state)
        progress, self._stage = self.state.progress, config.at(max(self.state.progress.step - 1, 0))
        self.strategy.loss.ranked = config.ranked(max(progress.step - 1, 0))
        capacity = first_capacity(self._stage, self.data.train)
        progress.sequence_capacity = max(progress.sequence_capacity, capacity)
        log_start(config, self.model, self.device, launch.allocator)
        self.startup.begin("first batch")

    # --- setting up -------------------------------------------------------------------------------
    @staticmethod
    def _prepare_device(config: TrainConfig, launch: Launch) -> torch.device:
        """Choose the device of this process and apply PyTorch's global settings."""
        device = choose_device(config.device, launch.local_rank)
        on_gpu = device.type == "cuda"
        found_none = "No CUDA GPU was found. On a CPU, for example: nsa train cpu-small."
        hint = found_none if config.device == "auto" else ""
        on_gpus = ("allocator", "cuda_graphs", "memory_fraction")
        check_default(config, on_gpu, "device cpu", *on_gpus, hint=hint)
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
        if config.memory_fraction < 1:
            torch.cuda.set_per_process_memory_fraction(config.memory_fraction, device)
        if config.allocator == "expandable_segments":
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        return device

    def _make_model(self, init_from: Path | None) -> None:
        """Make the model and the parallel strategy; load the weights of another run if given."""
        config = self.config
        self.model = LanguageModel(config.model).to(self.device)
        if config.optim.trained == "index":
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(INDEX_WEIGHTS in name)
        checkpoint_activations(self.model, config.checkpointing)
        self.strategy = distribute(
            NextTokenLoss(self.model, config.loss_chunk),
            config.parallel,
            self.processes,
            self.device,
            captured=config.cuda_graphs,
        )
        if init_from is None:
            return
        try:
            load_initial(init_from, self.model)
        except UserError as error:
            raise UserError("--init-from", error.rule, error.value, error.hint) from None
        details = {"event": "start", "step": 0}
        logger.info("the run begins with the weights of %s", init_from, extra=details)

    def _training_loss(self) -> Callable[..., Tensor]:
        if not self.config.compile:
            return self.strategy.training_module(None)
        # Without the assertions that the compiler adds for the results of operators, hundreds a
        # step, which take time on the host; tests check the same properties.
        options = {"size_asserts": False, "alignment_asserts": False}
        compiler = functools.partial(torch.compile, fullgraph=True, options=options)
        return self.strategy.training_module(compiler)

    def _open_data(self, resumed: Path | None, init_from: Path | None) -> None:
        """Open the data; the main process of a new run makes the tokenizer for the others."""
        config, makes_tokenizer = self.config, resumed is None and self.processes.is_main
        tokenizer = None if makes_tokenizer else self.run_folder.tokenizer
        if makes_tokenizer and init_from is not None:
            tokenizer = initial_tokenizer(init_from)
        with self.processes.main_first():
            self.data = open_data(
                config.data,
                seed=config.seed,
                seq_len=config.seq_len,
                run_folder_tokenizer=tokenizer,
            )
            if makes_tokenizer:
                self.data.tokenizer.save(self.run_folder.tokenizer)
        ours, size = config.model.vocab_size, self.data.tokenizer.vocab_size
        rule, hint = f"equal the tokenizer's ({size})", f"Give --model.vocab-size {size}."
        check(ours == size, "model.vocab_size", rule, ours, hint)
        if resumed is not None:
            check_same_data(resumed, self.data.description)

    def _resume(self, checkpoint: Path) -> None:
        self.state.load(checkpoint)
        self._set_lr(self.state.progress.step - 1)  # for a row that this step may still owe
        self._note("resume", f"resumed from {checkpoint}")

    def _note(self, kind: str, text: str, level: int = logging.INFO) -> None:
        """Log an event of the run."""
        logger.log(level, "%s", text, extra={"event": kind, "step": self.state.progress.step})

    # --- one optimizer step -----------------------------------------------------------------------
    def next_batches(self) -> list[Batch]:
        """This process's micro-batches of the next optimizer step, on the host."""
        batches = self._draw(self.state.sampler, self.state.progress.step)
        if self._is_overfull(batches):
            self._raise_capacity(batches)
        return self._padded(batches)

    def _draw(self, sampler: Sampler, step: int) -> list[Batch]:
        config, batches = self.config.at(step), []
        rank, world_size = self.processes.rank, self.processes.world_size
        length, masked = config.seq_len, config.data.document_mask
        sampler.resize(length)
        for _ in range(config.accumulation):
            indices = sampler.next_indices(config.micro_batch, rank=rank, world_size=world_size)
            batches.append(collate(self.data.train, indices, length, document_mask=masked))
        return batches

    def _is_overfull(self, batches: list[Batch]) -> bool:
        """Whether a micro-batch has more sequences than all are padded to."""
        return 0 < self.state.progress.sequence_capacity < _most_sequences(batches)

    def _raise_capacity(self, batches: list[Batch]) -> None:
        """Raise the capacity on all processes together; the next step is captured again."""
        progress, (most,) = self.state.progress, self.processes.largest(_most_sequences(batches))
        before, after = progress.sequence_capacity, 1 << (most - 1).bit_length()
        progress.sequence_capacity = after
        text = f"a micro-batch of {most} sequences exceeds the capacity of {before}, which is now "
        text += f"{after}: the step is captured again"
        self._note("sequence_capacity", text, logging.WARNING)

    def _padded(self, batches: list[Batch]) -> list[Batch]:
        """Pad with empty sequences, because graphs have a fixed number of sequences."""
        capacity = self.state.progress.sequence_capacity
        return [batch.padded(capacity) if capacity else batch for batch in batches]

    def train_step(self, batches: Sequence[Batch], num_targets: int | None = None) -> Tensor:
        """Do one optimizer step over micro-batches without waiting for the device.

        The loss is the mean over all targets of the step, over micro-batches and processes.

        Args:
            batches: this process's micro-batches, on the host.
            num_targets: targets of the step over all processes; None means those of ``batches``.

        Returns:
            fp32 on the device, the same on every process: summed loss in nats, gradient norm before
            clipping, 1 if the update was cancelled because a loss or the norm is not finite, else
            0; then the summed loss of each layer's index, if it is trained.
        """
        if num_targets is None:
            num_targets = sum(batch.num_targets for batch in batches)
        # Gradients are averaged over the processes.
        mean = max(num_targets, 1) / self.processes.world_size
        divisor = torch.full((), mean, device=self.device)
        loss: Tensor | int = 0
        for number, batch in enumerate(batches, start=1):
            with self.strategy.accumulating(last=number == len(batches)):
                if self._replay is not None:
                    loss = loss + self._replay(batch, divisor, number == 1)
                else:
                    loss = loss + self._forward_backward(batch, divisor)
        assert isinstance(loss, Tensor)
        self.processes.sum(loss)
        parameters = self.state.optimizer.parameters()
        gradients = [p.grad for p in parameters if p.grad is not None]
        assert len(gradients) == len(parameters), "a parameter got no gradient"
        self.strategy.exchange(gradients)
        with stage(OPTIMIZER):
            return self._update(loss, gradients)

    def _update(self, loss: Tensor, gradients: list[Tensor]) -> Tensor:
        """Clip, update and drop the gradients; return the result of :meth:`train_step`."""
        config, optimizer = self.config, self.state.optimizer
        grad_norm = self.strategy.norm(gradients)
        cancel = 1.0 - (grad_norm.isfinite() & loss.isfinite().all()).float()
        if config.optim.grad_clip > 0:
            clip_grads_with_norm_(optimizer.parameters(), config.optim.grad_clip, grad_norm)
        self._set_lr(self.state.progress.step)
        optimizer.step(cancel, self._replay.update if self._replay else run_now)
        if self._replay is None:
            optimizer.zero_grad()
        return torch.cat((loss[:1], torch.stack((grad_norm, cancel)), loss[1:]))

    def _forward_backward(self, batch: Batch, divisor: Tensor) -> Tensor:
        """Add the gradient of a micro-batch's summed losses / ``divisor``; return the sums."""
        batch = batch.to(self.device)
        if self.config.compile:
            torch._dynamo.maybe_mark_dynamic(batch.cu_seqlens, 0)
        with stage(FORWARD):
            with autocast(self.device, self.config.compute_dtype):
                sequences = (batch.cu_seqlens, batch.max_seqlen)
                losses = self.loss(batch.tokens, batch.targets, *sequences)
            scaled = (losses[0] + self.config.optim.index_weight * losses[1:].sum()) / divisor
        with stage(BACKWARD):
            scaled.backward()
        return losses.detach()

    def _rehearse(self, batch: Batch) -> None:
        """Run the backward passes that the strategy needs before the first step."""
        for _ in range(self.strategy.rehearsals):
            self.startup.begin("rehearsal")
            self._forward_backward(batch, torch.ones((), device=self.device))
            self.state.optimizer.zero_grad()

    def beat(self, phase: str, limit_s: float) -> None:
        """Send a heartbeat before a phase that may take up to ``limit_s`` seconds."""
        self._beat(phase, self.state.progress.step, limit_s)

    def _set_lr(self, step: int) -> None:
        steps, optim = self.config.steps, self.config.optim
        factor = lr_factor(step, steps, optim.warmup_steps, optim.min_lr_ratio)
        self.state.optimizer.set_lr(factor)

    # --- the run ----------------------------------------------------------------------------------
    def run(self) -> RunResult:
        """Train until all steps are done or the run is asked to stop, then write a checkpoint.

        Raises:
            TrainingStoppedError: the policy for non-finite steps ended the run, no data came, or
                the last checkpoint could not be written.
        """
        progress, steps = self.state.progress, self.config.steps
        begun, stop = time.perf_counter() - progress.seconds, 0
        with self._requests, ExitStack() as open_parts:
            ahead = self._batches_ahead()
            for part in (self._checkpoints, self._reports, ahead):
                open_parts.enter_context(closing(part))
            if self.config.nonfinite == "rollback":
                self._checkpoint()  # something to go back to
            self._reports.report()  # a signal may arrive between a step and its row
            while progress.step < steps and not (stop := self._handle_requests()):
                if not self._timed_step(ahead):
                    continue
                progress.seconds = time.perf_counter() - begun
                self._reports.report()
                if self._reports.due(self.config.checkpoint_every):
                    self._checkpoint()
                self._on_step()
            name = None if stop in (0, HALT) else signal.Signals(stop).name
            self._finish(name)
        return RunResult(progress.step >= steps, name, progress.step, self._reports.last_row)

    def _compile_kernels(self) -> None:
        from nsa.ops._triton.ahead import KernelsAhead

        kernels = KernelsAhead(functools.partial(run_step, self.config.at(0)), self.device)
        compilations.before_kernel = kernels.wait

    def _batches_ahead(self) -> Prefetcher[Drawn]:
        sampler = self.data.sampler(self.config.seq_len, self.config.seed)
        sampler.load_state_dict(self.state.sampler.state_dict())
        steps = itertools.count(self.state.progress.step)
        return Prefetcher(lambda: (self._draw(sampler, next(steps)), sampler.state_dict()))

    def _enter_stage(self) -> None:
        """Prepare the next step if it differs in its sequences or its loss from those before."""
        progress, ranked = self.state.progress, self.config.ranked(self.state.progress.step)
        before, self._stage = self._stage, self.config.at(progress.step)
        if self._stage.seq_len == before.seq_len and ranked == self.strategy.loss.ranked:
            return
        self._is_first_step = True
        progress.sequence_capacity = first_capacity(self._stage, self.data.train)
        if self._replay is not None:
            self._replay.restart()
        if self.config.compile:  # the length is a constant of compiled code
            torch.compiler.reset()
            compilations.listen(self.device)
        if self._stage.seq_len != before.seq_len:
            self._note("stage", f"sequences of {self._stage.seq_len:,} tokens from here on")
        if ranked != self.strategy.loss.ranked:
            self.strategy.loss.ranked = ranked
            self._note("index_loss", f"the loss of the index ranks {ranked} blocks from here on")

    def _handle_requests(self) -> int:
        """Write a checkpoint if any process was asked for one since the last step.

        Returns:
            ``Requests.stop``: the request to stop, 0 for none.
        """
        asked, requests = self._requests.look(), self._requests
        checkpoint, requests.checkpoint = requests.checkpoint, False
        stop, save = self.processes.largest(asked, int(checkpoint))
        if save:
            self._checkpoint()
        return stop

    def _timed_step(self, ahead: Prefetcher[Drawn]) -> bool:
        """Do one step and count it; False if the run was asked to stop before a batch came."""
        progress, window = self.state.progress, self.state.progress.window
        begin = time.perf_counter()
        self._enter_stage()
        taken = self._take(ahead)
        if taken is None:
            return False
        batches, targets, num_bytes = taken
        fetched = time.perf_counter()
        if self._is_first_step:
            self._rehearse(batches[0])
        try:
            with self._reports.observed():
                results = self.train_step(batches, targets)
        except CaptureError as error:
            raise TrainingStoppedError(f"{error} In this run {self._last_checkpoint()}.") from error
        progress.step += 1
        self._results.put((progress.step, targets, num_bytes), results)
        tokens = self.config.global_batch * self.config.seq_len
        progress.tokens += tokens
        # Results of the previous step are read while the device works on this one.
        self._read_results(keep=0 if self._reports.row_due() else 1)
        self._checkpoints.poll()
        self._is_first_step = False
        window.steps += 1
        window.tokens += tokens
        window.seconds += time.perf_counter() - begin
        window.data_seconds += fetched - begin
        return True

    @in_stage(DATA)
    def _take(self, ahead: Prefetcher[Drawn]) -> tuple[list[Batch], int, int] | None:
        """Return this process's micro-batches, and targets and bytes of text of all processes.

        None if some process was asked to stop while it waited for a batch.
        """
        drawn, starved, patience_s = None, "", self._data_patience_s()
        limit_s = STARTING_LIMIT_S if self._is_first_step else self.config.stall_limit_s
        wait_s = max(limit_s, patience_s + 10) if patience_s else 0
        self.beat("data", wait_s)
        try:
            drawn = ahead.get(patience_s, self._requests.look)
        except StarvedError as error:
            starved = f"{error} (data_limit_s)"
        except UserError as error:  # a stream gave up, or the data are damaged
            starved = str(error)
        batches, position = drawn or ([], {})
        # The other processes may still be waiting for their batches.
        self.beat("exchange", wait_s)
        targets, num_bytes, num_without, num_starved, num_larger = self.processes.total(
            sum(batch.num_targets for batch in batches),
            sum(batch.num_bytes for batch in batches),
            int(drawn is None),
            int(bool(starved)),
            int(self._is_overfull(batches)),
        )
        if num_starved:
            self._checkpoint()
            self._wait_for_checkpoint()
            why = starved or "another process got no batch"
            raise TrainingStoppedError(
                f"data starvation after step {self.state.progress.step}: {why}; "
                f"{self._last_checkpoint()}. Find out why no data come, then resume."
            )
        if num_without:
            return None
        if num_larger:
            self._raise_capacity(batches)
        self.beat("step", limit_s)
        self.state.sampler.load_state_dict(position)
        return self._padded(batches), targets, num_bytes

    def _data_patience_s(self) -> float:
        """Longest wait for a batch, seconds; 0 waits without limit.

        A stream retries and gives up by itself, before this limit. A resumed stream first returns
        to its position, at worst through most of a large file.
        """
        config = self.config
        streams = any(part.source == "stream" for part in config.data.parts)
        if not streams or config.data_limit_s == 0:
            return config.data_limit_s
        return STARTING_LIMIT_S if self._is_first_step else config.data.time_limit_s + 10

    def _read_results(self, keep: int) -> None:
        """Count the results of all steps but the newest ``keep``."""
        progress, nonfinite = self.state.progress, []
        for (step, targets, num_bytes), result in self._results.take(keep):
            loss, grad_norm, cancelled, *index = result
            if cancelled:
                nonfinite.append(str(step))
                progress.nonfinite_steps += 1
                progress.nonfinite_streak += 1
            else:
                progress.nonfinite_streak = 0
                progress.window.add(loss, targets, num_bytes, grad_norm, *index)
        if nonfinite:
            self._on_nonfinite(", ".join(nonfinite))

    def _on_nonfinite(self, steps: str) -> None:
        """Apply the policy for ``steps``, whose updates were cancelled on the device."""
        config, streak = self.config, self.state.progress.nonfinite_streak
        what, why = f"loss or gradient not finite in step {steps}", ""
        if config.nonfinite == "stop":
            why = "policy stop"
        elif streak >= config.nonfinite_limit:
            why = f"{streak} in a row, nonfinite_limit {config.nonfinite_limit}"
        if why:
            self._wait_for_checkpoint()
            hint = "A lower optim.lr or a longer optim.warmup_steps may help."
            raise TrainingStoppedError(f"{what} ({why}); {self._last_checkpoint()}. {hint}")
        if config.nonfinite == "skip":
            self._note("nonfinite", f"{what}: update skipped", logging.WARNING)
            return
        self._results.take(keep=0)  # of steps with the discarded weights
        self._wait_for_checkpoint()
        path = checkpoint_path(self.run_folder.checkpoints, self._newest_step())
        self.state.load_training_tensors(path)
        now = f"weights and optimizer state restored from {path.name}, data continue"
        self._note("rollback", f"{what}: {now}", logging.WARNING)

    # --- checkpoints ------------------------------------------------------------------------------
    def _checkpoint(self) -> None:
        """Start writing a checkpoint of this step unless there is one."""
        self._read_results(keep=0)
        step = self.state.progress.step
        if self._newest_step() == step:
            return
        self._wait_for_checkpoint()
        if self.strategy.in_step or self.processes.is_main:
            tensors, meta = self.state.contents()
            meta["config"], meta["data"] = dataclasses.asdict(self.config), self.data.description
            meta["tokenizer"] = self.data.tokenizer.to_json()
            meta["val_bits_per_byte"] = self._reports.validated.get(step)
            self._checkpoints.submit(step, tensors, meta)

    def _wait_for_checkpoint(self) -> None:
        """Wait until no process is writing; all processes call this together."""
        self.beat("checkpoint", checkpoint_limit_s(self.model.num_parameters()["total"]))
        self._checkpoints.wait()
        self.processes.wait_for_all()

    def _newest_step(self) -> int:
        """Step of the newest checkpoint, -1 without one; the same on every process."""
        newest = self._checkpoints.newest_step if self.processes.is_main else None
        return self.processes.largest(-1 if newest is None else newest)[0]

    def _last_checkpoint(self) -> str:
        """Part of a message that names the last checkpoint."""
        found = list_checkpoints(self.run_folder.checkpoints)
        return f"the last checkpoint is {found[-1]}" if found else "there is no checkpoint yet"

    def _finish(self, stop: str | None) -> None:
        """Write the last checkpoint, the sample and the last lines of the log."""
        progress, steps = self.state.progress, self.config.steps
        self._wait_for_checkpoint()  # if it has failed, the next line tries again
        self._checkpoint()
        self._wait_for_checkpoint()
        # The main process writes a sample, however long that takes; it has a watchdog of its own.
        self.beat("end", STARTING_LIMIT_S if self.processes.is_main else 0)
        if progress.step >= steps:
            self._reports.write_sample()
        self.processes.wait_for_all()
        if progress.best_val_step is not None:
            best = f"{progress.best_val_bits_per_byte:.4f} bits per byte"
            self._note("best", f"best validation loss: {best} at step {progress.best_val_step}")
        if progress.step < steps:
            who, done = stop or "the halt file", f"after step {progress.step} of {steps}"
            self._note("stop", f"stopped by {who} {done}; resume to continue")
        if self.processes.is_main:  # also one that nobody has read must not end the resumed run
            with suppress(FileNotFoundError, NotADirectoryError):
                self.run_folder.halt.unlink()
        if self._checkpoints.failure is not None:
            raise TrainingStoppedError(f"{self._checkpoints.failure}; {self._last_checkpoint()}")


def _most_sequences(batches: list[Batch]) -> int:
    return max((batch.num_sequences for batch in batches), default=0)
