"""Words of ``nsa train``; everything heavy is imported when the command runs."""

from __future__ import annotations

import argparse
import shutil
import signal
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa.errors import UserError, check

if TYPE_CHECKING:
    from nsa.train.config import TrainConfig
    from nsa.train.distributed.processes import Processes
    from nsa.train.run_folder import RunFolder
    from nsa.train.telemetry.progress import RunReport

EXIT_FAILED, EXIT_SIGNAL = 1, 128
PLOT_EVERY_S = 60.0  # at most: drawing takes some tenths of a second from training

TRAIN = """\
Train a language model as CONFIG says: the name of a configuration that `nsa configs` lists, or a YAML file.

Every setting of the file can be given here too and then wins, for example
  nsa train cpu-small --optim.lr 3e-4 --model.nsa.window-size 64
The run leaves a folder with its configuration, environment, metrics, checkpoints, plot, sample and log; no run writes over
another. Ctrl-C or SIGTERM ends it after the step at hand, with a checkpoint; a second one ends it at once. A file named halt in
the run folder and a closed terminal end it with a checkpoint, too. SIGUSR2 asks for a checkpoint, SIGUSR1 for the stacks of
all threads.
  nsa train --resume runs/cpu-small-1
goes on exactly where the newest checkpoint was taken,
  nsa train --resume runs/cpu-small-1 --steps 1000
also makes the run longer or shorter, its learning rate following the schedule of so many steps from there on, and
  nsa train cpu-small --init-from runs/cpu-small-1 --optim.lr 1e-4
begins a new run with the weights and the tokenizer of another. Several processes, one on each GPU or several on the CPU:
  torchrun --standalone --nproc-per-node 2 --max-restarts 3 -m nsa train CONFIG --run-dir runs/a \\
    --world-size 2 --accumulation 1
When one of them dies, torchrun starts them anew and the run resumes.
"""


def add_train(parser: argparse.ArgumentParser) -> None:
    """Words of ``nsa train`` beside the settings of the configuration."""
    parser.usage = (
        "nsa train CONFIG [--SETTING VALUE ...] [--run-dir DIR] [--init-from RUN]\n"
        "       nsa train --resume RUN [--SETTING VALUE ...]"
    )
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="name of a configuration (see nsa configs) or a YAML file")
    parser.add_argument("--run-dir", metavar="DIR", help="folder to make for this run (default runs/<config>-<n>)")
    parser.add_argument("--resume", metavar="RUN", help="folder of a run to continue; then without CONFIG")
    parser.add_argument("--init-from", metavar="RUN", help="folder of another run, whose weights the new run begins with")
    parser.add_argument("--checkpoint", metavar="WHICH", help="of --init-from: last, best or a step (default last)")


def run_train(args: argparse.Namespace, overrides: Mapping[str, str]) -> int:
    """``nsa train``; ``overrides`` are settings given on the command line."""
    from nsa.train.distributed.launch import check_launch, read_launch
    from nsa.train.load import load_config
    from nsa.train.run_folder import RunFolder

    launch = read_launch()
    if args.resume is not None:
        check(args.config is None, "train", "CONFIG", "be left out with --resume, the run has its own", args.config)
        check(args.run_dir is None, "train", "--run-dir", "be left out with --resume", args.run_dir)
        config = RunFolder.open(args.resume).load_config(overrides)
    else:
        check(args.config is not None, "train", "CONFIG", "be given", "none", "For example: nsa train cpu-small")
        hint = "A restart has to find the run that it goes on with."
        check(args.run_dir is not None or not launch.launcher, "train", "--run-dir", "be given with torchrun", "none", hint)
        config = load_config(args.config, overrides)
    check_launch(config, launch)
    from nsa.train.distributed.processes import join
    from nsa.train.execution.precision import choose_device
    from nsa.train.watch.out_of_memory import check_run_fits  # PyTorch from here on: a mistyped word is answered without it

    init_from = _init_from(args)
    device = choose_device(config.device, launch.local_rank)
    check_run_fits("train", config, device)
    with join(launch, device) as processes:
        with processes.main_first():
            folder, is_new = _run_folder(args, config, init_from, is_main=processes.is_main, restart=launch.restart)
        try:
            return _run(config, folder, processes, is_new=is_new, init_from=init_from, overrides=overrides)
        except (UserError, KeyboardInterrupt):
            if is_new and processes.is_main and folder.holds_no_run():
                shutil.rmtree(folder.path)
            raise


def _init_from(args: argparse.Namespace) -> Path | None:
    """The checkpoint of another run that a new one begins with."""
    if args.init_from is None:
        check(args.checkpoint is None, "train", "--checkpoint", "be given with --init-from only", args.checkpoint)
        return None
    from nsa.train.run_folder import RunFolder

    hint = "A run that is resumed has weights of its own."
    check(args.resume is None, "train", "--init-from", "be left out with --resume", args.init_from, hint)
    folder = RunFolder.open(args.init_from)
    from nsa.train.checkpoint import find_checkpoint

    return find_checkpoint("train", folder.checkpoints, args.checkpoint or "last")


def _run_folder(
    args: argparse.Namespace, config: TrainConfig, init_from: Path | None, *, is_main: bool, restart: int
) -> tuple[RunFolder, bool]:
    """The folder of the run, and whether the run begins; one that died before its first checkpoint begins again."""
    from nsa.train.checkpoint import list_checkpoints
    from nsa.train.run_folder import RunFolder, next_run_path

    if args.resume is not None:
        return RunFolder.open(args.resume), False
    if restart == 0 and is_main:
        return RunFolder.create(args.run_dir or next_run_path(args.config), config, init_from=init_from), True
    folder = RunFolder.open(args.run_dir)
    return folder, not list_checkpoints(folder.checkpoints)


def _run(
    config: TrainConfig,
    folder: RunFolder,
    processes: Processes,
    *,
    is_new: bool,
    init_from: Path | None,
    overrides: Mapping[str, str],
) -> int:
    """Train in ``folder``; ``overrides`` are the settings that a resumption changes."""
    from nsa.train.telemetry.progress import RunReport
    from nsa.train.trainer import Trainer, TrainingStoppedError
    from nsa.train.watch.out_of_memory import explained, hint_for_run
    from nsa.train.watch.watchdog import Watchdog

    plotted = time.monotonic()

    def on_row(row: dict[str, Any]) -> None:
        nonlocal plotted
        report.row(row)
        if "val_loss_nats" in row and time.monotonic() - plotted > PLOT_EVERY_S:
            _plot(folder, report)
            plotted = time.monotonic()

    with (
        folder.in_use() if processes.is_main else nullcontext("") as remark,
        RunReport(folder.log if processes.is_main else None, config.steps, held=not is_new) as report,
        Watchdog(folder, processes.rank, config.stall_limit_s) as watchdog,
        explained("train", "the run", lambda: hint_for_run(config, folder)),
    ):
        report.line(f"run folder: {folder.path}", event="start")
        if remark:
            report.line(remark, event="warning")
        trainer = Trainer(
            config, folder, processes=processes, resume=not is_new, init_from=init_from if is_new else None, on_row=on_row,
            on_step=lambda: report.step(trainer.state.progress.step), beat=watchdog.beat,
        )  # fmt: skip
        report.begin()
        if not is_new and processes.is_main:
            folder.record_launch(resumed_from_step=trainer.state.progress.step, overrides=overrides)
        try:
            result = trainer.run()
        except TrainingStoppedError as error:
            report.line(f"stopped: {error}", event="stop")
            return EXIT_FAILED
        finally:
            if processes.is_main:
                _plot(folder, report)
        if not result.finished:
            report.line(f"continue with: nsa train --resume {folder.path}")
            return EXIT_SIGNAL + signal.Signals[result.signal] if result.signal else 0
        report.line(
            f"finished {result.step} steps; next:\n  nsa eval {folder.path}\n  nsa generate {folder.path} --prompt 'Once'",
            event="finish",
        )
    return 0


def _plot(folder: RunFolder, report: RunReport) -> None:
    from nsa.train.runs.plots import plot_losses

    try:
        plot_losses(folder.metrics_jsonl, folder.loss_png, title=folder.path.name)
    except OSError as error:
        report.line(f"loss.png could not be written ({error})")
