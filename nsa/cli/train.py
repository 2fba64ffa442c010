"""``nsa train``; everything heavy is imported when it runs."""

from __future__ import annotations

import shlex
import shutil
import signal
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa.errors import UserError, check, optional_output

if TYPE_CHECKING:
    from nsa.train.config import TrainConfig
    from nsa.train.distributed.processes import Processes
    from nsa.train.run_folder import RunFolder

EXIT_FAILED, EXIT_SIGNAL = 1, 128
PLOT_EVERY_S = 60.0  # at most: drawing costs training some tenths of a second


def train(
    config: str | None = None,
    *,
    run_dir: str | None = None,
    resume: str | None = None,
    init_from: str | None = None,
    checkpoint: str | None = None,
    **settings: str,
) -> int:
    r"""Train a language model.

    CONFIG is the name of a configuration that `nsa configs` lists, or a YAML file. Every setting of
    the file can be given here too and then wins, for example
      nsa train cpu-small --optim.lr 3e-4 --model.nsa.window-size 64
    The run leaves a folder with its configuration, environment, metrics, checkpoints, plot, sample
    and log; no run writes over another. Ctrl-C or SIGTERM ends it after the step at hand, with a
    checkpoint; a second one ends it at once. A file named halt in the run folder and a closed
    terminal end it with a checkpoint, too. SIGUSR2 asks for a checkpoint, SIGUSR1 for the stacks of
    all threads.
      nsa train --resume runs/cpu-small-1
    goes on exactly where the newest checkpoint was taken,
      nsa train --resume runs/cpu-small-1 --steps 1000
    also makes the run longer or shorter, its learning rate following the schedule of so many steps
    from there on, and
      nsa train cpu-small --init-from runs/cpu-small-1 --optim.lr 1e-4
    begins a new run with the weights and the tokenizer of another. Several processes, one on each
    GPU or several on the CPU:
      torchrun --standalone --nproc-per-node 2 --max-restarts 3 -m nsa train CONFIG \
        --run-dir runs/a --world-size 2 --accumulation 1
    When one of them dies, torchrun starts them anew and the run resumes.

    Args:
        config: name of a configuration (see nsa configs) or a YAML file
        run_dir: folder to make for this run (default runs/<config>-<n>)
        resume: folder of a run to continue; then without CONFIG
        init_from: folder of another run or of nsa export, whose weights the new run begins with
        checkpoint: of --init-from: last, best or a step (default last)
        settings: of the configuration
    """
    from nsa.train.distributed.launch import check_launch, read_launch
    from nsa.train.load import load_config
    from nsa.train.run_folder import RunFolder, next_run_path

    launch = read_launch()
    if resume is not None:
        given = {"CONFIG": config, "--run-dir": run_dir, "--init-from": init_from}
        for name, value in given.items():
            rule = "be left out with --resume"
            check(value is None, "train", name, rule, value, "A run that is resumed has its own.")
        run = RunFolder.open(resume, "--resume").load_config(settings)
    else:
        hint = "For example: nsa train cpu-small"
        check(config is not None, "train", "CONFIG", "be given", "none", hint)
        hint = "A restart has to find the run that it goes on with."
        found = run_dir is not None or not launch.launcher
        check(found, "train", "--run-dir", "be given with torchrun", "none", hint)
        run = load_config(config, settings)
    check_launch(run, launch)
    alone = checkpoint is not None and init_from is None
    check(not alone, "train", "--checkpoint", "be given with --init-from only", checkpoint)

    # PyTorch from here on: a mistyped word is answered without it.
    from nsa.train.checkpoint import list_checkpoints
    from nsa.train.distributed.processes import join
    from nsa.train.execution.precision import choose_device
    from nsa.train.watch.out_of_memory import check_run_fits

    weights = None if init_from is None else _initial_weights(init_from, checkpoint)
    device = choose_device(run.device, launch.local_rank)
    check_run_fits("train", run, device)
    with join(launch, device) as processes:
        with processes.main_first():
            makes = processes.is_main and launch.restart == 0 and resume is None
            if makes:
                path = next_run_path(str(config)) if run_dir is None else run_dir
                folder = RunFolder.create(path, run, init_from=weights)
            else:
                folder = RunFolder.open(resume or str(run_dir))
            # One that died before its first checkpoint begins again.
            is_new = makes or (resume is None and not list_checkpoints(folder.checkpoints))
        try:
            return _run(run, folder, processes, weights if is_new else None, settings, is_new)
        except (UserError, KeyboardInterrupt):
            if is_new and processes.is_main and folder.holds_no_run():
                shutil.rmtree(folder.path)
            raise


def _initial_weights(init_from: str, checkpoint: str | None) -> Path:
    """An exported folder, or the checkpoint of a run."""
    from nsa.train.checkpoint import find_checkpoint
    from nsa.train.pretrained import is_exported
    from nsa.train.run_folder import RunFolder

    path = Path(init_from)
    if is_exported(path):
        rule = "be left out with an exported folder"
        check(checkpoint is None, "train", "--checkpoint", rule, checkpoint)
        return path
    folder = RunFolder.open(init_from, "--init-from")
    return find_checkpoint("train", folder.checkpoints, checkpoint or "last")


def _run(
    config: TrainConfig,
    folder: RunFolder,
    processes: Processes,
    init_from: Path | None,
    overrides: Mapping[str, str],
    is_new: bool,
) -> int:
    """Train in ``folder``; ``overrides`` are the settings that a resumption changes."""
    from nsa.train.telemetry.progress import RunReport
    from nsa.train.trainer import Trainer, TrainingStoppedError
    from nsa.train.watch.out_of_memory import explained, hint_for_run
    from nsa.train.watch.watchdog import Watchdog

    plotted, log = time.monotonic(), folder.log if processes.is_main else None

    def on_row(row: dict[str, Any]) -> None:
        nonlocal plotted
        report.row(row)
        if "val_loss_nats" in row and time.monotonic() - plotted > PLOT_EVERY_S:
            _plot(folder)
            plotted = time.monotonic()

    with (
        folder.in_use() if processes.is_main else nullcontext("") as remark,
        RunReport(log, config.steps, held=not is_new) as report,
        Watchdog(folder, processes.rank, config.stall_limit_s) as watchdog,
        explained("train", "the run", lambda: hint_for_run(config, folder)),
    ):
        report.line(f"run folder: {folder.path}", event="start")
        if remark:
            report.line(remark, event="warning")
        trainer = Trainer(
            config,
            folder,
            processes=processes,
            resume=not is_new,
            init_from=init_from,
            on_row=on_row,
            on_step=lambda: report.step(trainer.state.progress.step),
            beat=watchdog.beat,
        )
        report.begin()
        done = trainer.state.progress.step
        if not is_new and processes.is_main:
            folder.record_launch(resumed_from_step=done, overrides=overrides)
        try:
            result = trainer.run()
        except TrainingStoppedError as error:
            report.line(f"stopped: {error}", event="stop")
            return EXIT_FAILED
        finally:
            if processes.is_main:
                _plot(folder)
        if not result.finished:
            report.line(f"continue with: nsa train --resume {shlex.quote(str(folder.path))}")
            return EXIT_SIGNAL + signal.Signals[result.signal] if result.signal else 0
        report.line(_summary(folder, result.step, done), event="finish")
    return 0


def _summary(folder: RunFolder, step: int, before: int) -> str:
    """The last lines of a run that has all its steps, ``before`` of them from earlier launches."""
    path, text = shlex.quote(str(folder.path)), f"finished {step} steps; next:"
    more = f"nsa eval {path}\n  nsa generate {path} --prompt 'Once'"
    if step == before:
        text = f"all {step} steps were done before, none was added; next:"
        more = f"nsa train --resume {path} --steps {2 * step}\n  {more}"
    return f"{text}\n  {more}"


def _plot(folder: RunFolder) -> None:
    with optional_output(folder.loss_png.name):
        from nsa.train.runs.page import plot_losses

        plot_losses(folder.metrics_jsonl, folder.loss_png, title=folder.path.name)
