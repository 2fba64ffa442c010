"""Reports of a run: evaluations, rows of metrics, warnings, and the sample at the end."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from nsa.errors import optional_output
from nsa.files import replace_text
from nsa.lm.flops import flops_per_token
from nsa.lm.model import LanguageModel
from nsa.train.config import TrainConfig
from nsa.train.data import Batch, DataBundle, validation_batches
from nsa.train.distributed.processes import Processes, gather
from nsa.train.distributed.strategy import Replicated
from nsa.train.evaluation import SelectionRecall, evaluate
from nsa.train.execution.compilation import Compiled, Startup, compilations
from nsa.train.generation import Generation, Sampling
from nsa.train.run_folder import RunFolder
from nsa.train.state import TrainState, Window
from nsa.train.telemetry.layer_statistics import LayerStatistics
from nsa.train.telemetry.metrics import RANK_METRICS, MetricsWriter, Row
from nsa.train.telemetry.throughput import (
    STARTING_STEPS,
    DeviceClock,
    memory_row,
    peak_flops,
    utilisation_row,
)
from nsa.train.watch.health import Health
from nsa.train.watch.signals import Requests

logger = logging.getLogger(__name__)

SAMPLE_PROMPT_TOKENS = 64
SAMPLE_TEMPERATURE = 0.8
_RECENT_ROWS = 10  # whose pace tells when the run will end

Beat = Callable[[str, int, float], None]  # phase, step, longest duration in seconds


@dataclass(frozen=True)
class RunContext:
    """Parts of a trainer that its reports use.

    Attributes:
        config: the run.
        run_folder: output folder.
        device: device of this process.
        strategy: DDP or FSDP2.
        processes: this process and the other ranks of the run.
        requests: requests to stop by signals and the halt file.
        startup: the clock of the start.
        on_row: called with each row of metrics after it was written.
        beat: called with a heartbeat at the start of each phase.
    """

    config: TrainConfig
    run_folder: RunFolder
    device: torch.device
    strategy: Replicated
    processes: Processes
    requests: Requests
    startup: Startup
    on_row: Callable[[Row], None] | None
    beat: Beat


@dataclass(frozen=True)
class RunResult:
    """End of a run.

    Attributes:
        finished: whether all steps are done; otherwise the run was asked to stop.
        signal: name of the signal that asked it to stop; None for the halt file.
        step: optimizer steps done.
        row: the last row of metrics; empty if this process wrote none.
    """

    finished: bool
    signal: str | None
    step: int
    row: Row


class Reports:
    """Evaluates and writes the rows of metrics of a run.

    All processes call it at the same steps, since they share evaluations; the main one writes. A
    resumed run repeats some steps: their earlier rows are set aside.

    Args:
        run: the run.
        data: training and validation data.
        state: progress of the run.

    Attributes:
        last_row: the newest row; empty before the first of this process.
        validated: bits per byte of this process's newest evaluation by its step.
    """

    def __init__(self, run: RunContext, data: DataBundle, state: TrainState) -> None:
        self._run, self._config, self._data, self._state = run, run.config, data, state
        self.last_row: Row = {}
        self.validated: dict[int, float] = {}
        self._peak_flops = peak_flops(run.device, run.config.compute_dtype)
        self._health = Health(run.config.optim.warmup_steps)
        self._clock = DeviceClock(run.device)
        self._layers = LayerStatistics(state.model) if run.config.telemetry else None
        # Steps of this process, and those with sequences of the latest length.
        self._steps_done = self._steps_alike = self._seq_len = 0
        # Step and time of the last rows, or of the start of this process before its first one.
        self._recent = deque([(state.progress.step, state.progress.seconds)], _RECENT_ROWS)
        self._starts_recent = True
        self._has_evaluated = self._has_told_start = False
        compilations.listen(run.device)
        if self._peak_flops is None:
            logger.info("mfu: left out, the peak rate of this device and dtype is not known")
        self._metrics = MetricsWriter(run.run_folder) if run.processes.is_main else None
        if self._metrics is not None:
            self._metrics.rewind(state.progress.reported_step)

    def close(self) -> None:
        """Write the rows that a full disk may have delayed."""
        if self._metrics is not None:
            self._metrics.close()

    def due(self, every: int, ahead: int = 0) -> bool:
        """Whether the last step is done, or a multiple of ``every`` steps; see ``ahead`` below.

        Args:
            every: steps; 0 means only the last step.
            ahead: ask for the step so many after the one just done.
        """
        step = self._state.progress.step + ahead
        return step == self._config.steps or (every > 0 and step > 0 and step % every == 0)

    def row_due(self, ahead: int = 0) -> bool:
        """Whether the step just done, or the one ``ahead`` steps later, has a row."""
        return self.due(self._config.log_every, ahead) or self._evaluation_due(ahead)

    def _evaluation_due(self, ahead: int = 0) -> bool:
        return self._config.eval_windows > 0 and self.due(self._config.eval_every, ahead)

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Context of a step: measure its time and, if it has a row, statistics of the layers."""
        has_row, before = self.row_due(ahead=1), compilations.now
        layers = self._layers if has_row else None
        if self._steps_done == 0:
            self._run.startup.begin("first step")
        if (seq_len := self._config.at(self._state.progress.step).seq_len) != self._seq_len:
            self._seq_len, self._steps_alike, self._has_evaluated = seq_len, 0, False
        if layers is not None:
            layers.start()
        pause_follows = has_row or self.due(self._config.checkpoint_every, ahead=1)
        with self._clock.step(pause_follows=pause_follows):
            yield
        if layers is not None:
            layers.stop(self._run.processes.sum, self._run.processes.most)
        self._steps_done += 1
        self._steps_alike += 1
        if self._steps_done == 1:
            self._run.startup.end_step(self._run.device)
        elif self._steps_alike > STARTING_STEPS:
            self._warn_of_compilation(before, f"step {self._state.progress.step + 1}")

    def _warn_of_compilation(self, before: Compiled, where: str) -> None:
        """Warn of a compilation or capture after the start, when a run should only train."""
        if done := compilations.now.since(before):
            text = f"{where}, after the first {STARTING_STEPS} steps of this process: {done}"
            self._warn("compilation", text)

    def _warn(self, kind: str, text: str) -> None:
        details = {"event": kind, "step": self._state.progress.step}
        logger.warning("%s", text, extra=details)

    def report(self) -> None:
        """Evaluate and write a row of metrics if they are due and not done for this step.

        A request to stop ends an evaluation; the resumed run then repeats it, so that its rows are
        those of an uninterrupted run. The evaluation after the last step is not ended: a run whose
        steps are done counts as finished.
        """
        progress = self._state.progress
        if not self.row_due() or progress.reported_step == progress.step:
            return
        if self._layers is not None:
            progress.window.layers |= self._layers.row()
        busy = utilisation_row(self._run.device)  # before an evaluation: of the training steps
        validation: Row = {}
        if self._evaluation_due():
            try:
                validation = self._evaluate()
            except _InterruptedError:
                return
        row = {**self._training_row(), **busy, **validation}
        if self._run.processes.world_size > 1:
            row |= self._of_every_rank(row)
        progress.window, progress.reported_step = Window(), progress.step
        if self._metrics is None:
            return
        self.last_row = row
        self._metrics.write(row)
        if self._run.on_row is not None:
            self._run.on_row(row)
        for kind, text in self._health.look(row):
            self._warn(kind, f"step {progress.step}: {text}")

    def _training_row(self) -> Row:
        progress, window = self._state.progress, self._state.progress.window
        tokens_per_s = window.tokens / window.seconds
        row: Row = {
            "step": progress.step,
            "tokens": progress.tokens,
            "loss_nats": window.loss_nats,
            "bits_per_byte": window.bits_per_byte,
            "learning_rate": self._state.optimizer.learning_rate,
            "grad_norm": window.grad_norm_mean,
            "grad_norm_max": window.grad_norm_max if window.finite_steps else math.nan,
            "nonfinite_steps": progress.nonfinite_steps,
            "step_time_ms": 1000 * window.seconds / window.steps,
            "data_time_ms": 1000 * window.data_seconds / window.steps,
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_total": progress.tokens / progress.seconds,
            "eta_s": self._eta_s(),
            "compilations": compilations.now.compilations,
            **memory_row(self._run.device),
            **self._clock.row(),
        }
        row |= window.index_row(self._run.config.model.index_layers) | window.layers
        if not self._has_told_start and self._run.startup.first_step_s is not None:
            row["first_step_s"] = self._run.startup.first_step_s
            self._has_told_start = True
        if self._run.device.type == "cuda":
            row["kernel_compilations"] = compilations.now.kernels
        if self._data.description["synthetic"]:
            row["data_synthetic"] = True
        config = self._stage
        if self._config.stages:
            row["sequence_tokens"] = config.seq_len
        if self._peak_flops is not None:
            peak = self._peak_flops * self._run.processes.world_size
            flops = flops_per_token(config.model, config.seq_len)
            row["mfu"] = tokens_per_s * flops / peak
        return row

    @property
    def _stage(self) -> TrainConfig:
        """The run with the sequences of the step just done."""
        return self._config.at(max(self._state.progress.step - 1, 0))

    def _eta_s(self) -> float:
        """Seconds until the end at the pace of the last rows, pauses included."""
        progress = self._state.progress
        step, seconds = self._recent[0]
        if self._starts_recent:  # the first row of a process has waited for the compiler
            self._recent.clear()
            self._starts_recent = False
        self._recent.append((progress.step, progress.seconds))
        steps = progress.step - step
        pace = (progress.seconds - seconds) / steps if steps else progress.seconds / progress.step
        return (self._config.steps - progress.step) * pace

    def _of_every_rank(self, row: Row) -> Row:
        """Values of each process for the metrics in which processes may differ."""
        mine = [float(row.get(name, math.nan)) for name in RANK_METRICS]
        return {
            f"{name}_rank_{rank}": value
            for rank, values in enumerate(self._run.processes.all_of(mine))
            for name, value in zip(RANK_METRICS, values, strict=True)
            if not math.isnan(value)
        }

    def _evaluate(self) -> Row:
        config, progress = self._stage, self._state.progress
        batches = validation_batches(
            self._data.validation,
            config.seq_len,
            config.micro_batch,
            config.eval_windows,
            document_mask=config.data.document_mask,
        )
        strategy, before = self._run.strategy, compilations.now
        recall, share = SelectionRecall(self._state.model), self._share(batches)
        try:
            result = evaluate(
                strategy.loss,
                share if self._layers is None else recall.observed(share),
                compute_dtype=config.compute_dtype,
                sum_processes=self._run.processes.sum,
            )
        finally:
            strategy.reshard()
        if self._has_evaluated:
            self._warn_of_compilation(before, f"evaluation after step {progress.step}")
        self._has_evaluated = True
        figure = result["bits_per_byte"]
        self.validated = {progress.step: figure}
        if progress.best_val_bits_per_byte is None or figure < progress.best_val_bits_per_byte:
            progress.best_val_bits_per_byte, progress.best_val_step = figure, progress.step
        recalls = recall.row(self._run.processes.sum)
        return {"val_loss_nats": result["loss_nats"], "val_bits_per_byte": figure, **recalls}

    def _share(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield this process's part of the batches; all processes call this together.

        With FSDP2 all processes take part in every forward pass: one that has no batch in the last
        round takes part with a batch without targets.
        """
        run, turn, batch = self._run, -1, None
        may_be_ended = self._state.progress.step < self._config.steps
        for number, batch in enumerate(batches):
            turn = number % run.processes.world_size
            if turn == 0:
                limit_s = self._slow_step_s if number == 0 else self._config.stall_limit_s
                run.beat("evaluation", self._state.progress.step, limit_s)
                if may_be_ended and run.processes.largest(run.requests.stop)[0]:
                    raise _InterruptedError
            if turn == run.processes.rank:
                yield batch
        if run.strategy.in_step and batch is not None and turn < run.processes.rank:
            yield batch.without_targets()

    def write_sample(self) -> None:
        """Write a continuation of the validation text; all processes call this.

        An error, for example with a model that has diverged, is a warning.
        """
        config, path = self._config, self._run.run_folder.sample
        if config.sample_tokens == 0:
            return
        model = self._whole_model()
        if model is None or not self._run.processes.is_main:
            return
        size = min(SAMPLE_PROMPT_TOKENS, config.seq_len)
        prompt = self._data.validation.sequence(config.seq_len, 0)[:size].tolist()
        self._stops_in_sample()
        with optional_output(path.name):
            replace_text(path, self._sample(model, prompt))

    def _sample(self, model: LanguageModel, prompt: list[int]) -> str:
        config, tokenizer = self._config, self._data.tokenizer
        begin, limit_s, text = time.monotonic(), config.sample_limit_s, b""
        pieces = Generation(
            model,
            tokenizer,
            [prompt],
            max_new_tokens=config.sample_tokens,
            sampling=Sampling(temperature=SAMPLE_TEMPERATURE),
            seed=config.seed,
            compute_dtype=config.compute_dtype,
        )
        note = ""
        for count, (piece,) in enumerate(pieces, start=1):
            text += piece
            is_over = 0 < limit_s < time.monotonic() - begin
            if is_over and count < config.sample_tokens:
                tokens = f"{count} of {config.sample_tokens} tokens"
                note = f"--- ended after {tokens} by sample_limit_s ({limit_s:g} s)\n"
            if self._stops_in_sample() or note:
                break
        return (
            f"--- prompt, validation text\n{tokenizer.decode(prompt).decode(errors='replace')}\n"
            f"--- continuation, temperature {SAMPLE_TEMPERATURE}\n"
            f"{text.decode(errors='replace')}\n{note}"
        )

    def _stops_in_sample(self) -> bool:
        """Send a heartbeat between two tokens; returns whether the run was asked to stop."""
        run = self._run
        run.beat("sample", self._state.progress.step, self._slow_step_s)
        return run.requests.look() != 0

    @property
    def _slow_step_s(self) -> float:
        """Longest silence of code that runs for the first time and may compile, seconds."""
        return max(self._config.stall_limit_s, 300.0)

    def _whole_model(self) -> LanguageModel | None:
        """Return a model that the main process can run alone; all processes must call this.

        None if the main process has no memory for it.
        """
        model, run = self._state.model, self._run
        if not run.strategy.in_step:
            return model
        whole = None
        with (
            optional_output("the whole model, for a sample"),
            run.device if run.processes.is_main else torch.device("meta"),
        ):
            whole = LanguageModel(model.config)
        if run.processes.largest(int(whole is None))[0] or whole is None:
            return None
        for name, weight in model.named_parameters():  # one at a time, to save memory
            whole.get_parameter(name).detach().copy_(gather(weight))
        return whole


class _InterruptedError(Exception):
    """The run was asked to stop during an evaluation."""


def log_start(
    config: TrainConfig, model: LanguageModel, device: torch.device, allocator: str
) -> None:
    """Log the model's size, the batch and the device.

    Args:
        config: the run.
        model: the model.
        device: of this process.
        allocator: settings of PyTorch's allocator in the environment.
    """
    logger.info("model: %s", model.parameter_summary())
    tokens = config.global_batch * config.seq_len
    logger.info(
        f"batch: micro_batch {config.micro_batch} x accumulation {config.accumulation} x "
        f"world_size {config.world_size} = global_batch {config.global_batch} sequences of "
        f"{config.seq_len} tokens = {tokens:,} tokens an optimizer step"
    )
    for end, stage in config.by_stage[:-1]:
        logger.info("to step %s: sequences of %s tokens", f"{end:,}", f"{stage.seq_len:,}")
    settings = f"{config.allocator} {allocator}".rstrip()
    logger.info(
        f"device: {device.type}, compute {config.compute_dtype} over fp32 master weights, tf32 "
        f"{config.tf32}, compile {config.compile}, cuda_graphs {config.cuda_graphs}, allocator "
        f"settings {settings}"
    )
