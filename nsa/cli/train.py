"""``nsa train`` and ``nsa profile``; heavy imports are inside the functions."""

from __future__ import annotations

import shlex
import shutil
import signal
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from nsa.errors import UserError, check, optional_output

if TYPE_CHECKING:
    from nsa.train.config import TrainConfig
    from nsa.train.distributed.processes import Processes
    from nsa.train.profiler import Plan
    from nsa.train.run_folder import RunFolder
    from nsa.train.telemetry.progress import RunReport
    from nsa.train.trainer import Trainer

EXIT_FAILED, EXIT_SIGNAL = 1, 128
PLOT_EVERY_S = 60.0  # at most: drawing takes some tenths of a second from training
PROFILE_LIMIT_S = 900.0  # for writing a trace


def train(
    config: str | None = None,
    *,
    run_dir: str | None = None,
    resume: str | None = None,
    init_from: str | None = None,
    checkpoint: str | None = None,
    quiet: bool = False,
    **settings: str,
) -> int:
    r"""Train a language model.

    CONFIG is the name of a configuration that `nsa configs` lists, or a YAML file. Options override
    its settings:
      nsa train cpu-small --optim.lr 3e-4 --model.nsa.window-size 64
    The run folder gets the configuration, environment, metrics, checkpoints, plot, sample and log;
    existing runs are never overwritten. Ctrl-C or SIGTERM ends the run after the current step with
    a checkpoint; a second signal ends it at once. A file named halt in the run folder or a closed
    terminal also ends it with a checkpoint. SIGUSR2 writes a checkpoint, SIGUSR1 the stacks of all
    threads.
    Continue exactly from the newest checkpoint:
      nsa train --resume runs/cpu-small-1
    Make the run longer or shorter; the learning rate follows the new schedule from there on:
      nsa train --resume runs/cpu-small-1 --steps 1000
    Start a new run with the weights and the tokenizer of another one:
      nsa train cpu-small --init-from runs/cpu-small-1 --optim.lr 1e-4
    Several processes, one on each GPU or several on the CPU; torchrun restarts them after a crash,
    and the run resumes:
      torchrun --standalone --nproc-per-node 2 --max-restarts 3 -m nsa train CONFIG \
        --run-dir runs/a --world-size 2 --accumulation 1

    Args:
        config: name of a configuration (see nsa configs) or a YAML file
        run_dir: folder to create for this run (default runs/<config>-<n>)
        resume: folder of a run to continue, instead of CONFIG
        init_from: folder of another run, nsa export or nsa convert with the initial weights
        checkpoint: checkpoint of --init-from: last, best or a step (default last)
        quiet: print only warnings, errors and the result; log.txt gets every line
        settings: settings of the configuration
    """
    from nsa.train.load import load_config
    from nsa.train.run_folder import RunFolder

    if resume is not None:
        given = {"CONFIG": config, "--run-dir": run_dir, "--init-from": init_from}
        for name, value in given.items():
            rule = "be left out with --resume"
            check(value is None, name, rule, value, "A run that is resumed has its own.")
        run = RunFolder.open(resume, "--resume").load_config(settings)
    else:
        hint = "For example: nsa train cpu-small"
        check(config is not None, "CONFIG", "be given", "none", hint)
        run = load_config(config, settings)
    alone = checkpoint is not None and init_from is None
    check(not alone, "--checkpoint", "be given with --init-from only", checkpoint)
    if resume is not None:
        return _start(run, resume, resume=True, overrides=settings, quiet=quiet)
    weights = None if init_from is None else _initial_weights(init_from, checkpoint)
    return _start(run, run_dir, str(config), weights=weights, quiet=quiet)


def _initial_weights(init_from: str, checkpoint: str | None) -> Path:
    """An exported folder, or the checkpoint of a run."""
    from nsa.train.checkpoint import find_checkpoint
    from nsa.train.pretrained import is_exported
    from nsa.train.run_folder import RunFolder

    path = Path(init_from)
    if is_exported(path):
        rule = "be left out with an exported folder"
        check(checkpoint is None, "--checkpoint", rule, checkpoint)
        return path
    folder = RunFolder.open(init_from, "--init-from")
    return find_checkpoint(folder.checkpoints, checkpoint or "last")


def _start(
    config: TrainConfig,
    run_dir: str | None,
    name: str = "",
    *,
    resume: bool = False,
    weights: Path | None = None,
    overrides: Mapping[str, str] = MappingProxyType({}),
    plan: Plan | None = None,
    quiet: bool = False,
) -> int:
    """Train in a run folder, or profile; return the exit code.

    Args:
        config: the run.
        run_dir: folder of the run, made unless the run is resumed or was restarted.
        name: configuration that names the folder if ``run_dir`` is None.
        resume: whether to continue from the newest checkpoint.
        weights: initial weights.
        overrides: settings that a resumption changes.
        plan: what to profile.
        quiet: whether to print only warnings, errors and the result.
    """
    from nsa.train.distributed.launch import check_launch, read_launch
    from nsa.train.run_folder import RunFolder, next_run_path

    launch = read_launch()
    hint = "A restart must find the run that it continues."
    found = run_dir is not None or not launch.launcher
    check(found, "--run-dir", "be given with torchrun", "none", hint)
    check_launch(config, launch)

    # These import PyTorch; mistakes in the arguments above are reported before that.
    from nsa.train.checkpoint import list_checkpoints
    from nsa.train.distributed.processes import join
    from nsa.train.execution.precision import choose_device
    from nsa.train.watch.out_of_memory import check_run_fits

    path = next_run_path(name) if run_dir is None else run_dir
    device = choose_device(config.device, launch.local_rank)
    check_run_fits(config, device)
    with join(launch, device) as processes:
        with processes.main_first():
            makes = processes.is_main and launch.restart == 0 and not resume
            if makes:
                folder = RunFolder.create(path, config, init_from=weights)
            else:
                folder = RunFolder.open(path)
            # A run that died before its first checkpoint begins again.
            is_new = makes or not (resume or list_checkpoints(folder.checkpoints))
        try:
            initial = weights if is_new else None
            code = _run(config, folder, processes, initial, overrides, is_new, plan, quiet)
        except (UserError, KeyboardInterrupt):
            if is_new and processes.is_main and folder.holds_no_run():
                shutil.rmtree(folder.path)
            raise
        if plan is None:
            return code
        return _print_profile(folder.path / "profile") if processes.is_main else 0


def _run(
    config: TrainConfig,
    folder: RunFolder,
    processes: Processes,
    weights: Path | None,
    overrides: Mapping[str, str],
    is_new: bool,
    plan: Plan | None,
    quiet: bool,
) -> int:
    from nsa.train.telemetry.progress import RunReport
    from nsa.train.trainer import Trainer, TrainingStoppedError
    from nsa.train.watch.out_of_memory import explained, hint_for_run
    from nsa.train.watch.watchdog import Watchdog

    log, steps = folder.log if processes.is_main else None, plan.num_steps if plan else config.steps

    def on_step() -> None:
        report.step(trainer.state.progress.step)
        if recording is not None:
            trainer.beat("profile", PROFILE_LIMIT_S)
            next(recording)

    with (
        folder.in_use() if processes.is_main else nullcontext(),
        RunReport(log, steps, buffered=not is_new, quiet=quiet) as report,
        Watchdog(folder, processes.rank, config.stall_limit_s) as watchdog,
        explained("the run", lambda: hint_for_run(config, folder)),
    ):
        report.line(f"run folder: {folder.path}", event="start")
        trainer = Trainer(
            config,
            folder,
            processes=processes,
            resume=not is_new,
            init_from=weights,
            on_row=_on_row(report, folder),
            on_step=on_step,
            beat=watchdog.beat,
        )
        report.begin()
        done = trainer.state.progress.step
        if not is_new and processes.is_main:
            folder.record_launch(resumed_from_step=done, overrides=overrides)
        recording = None if plan is None else _recording(trainer, plan, folder)
        try:
            result = trainer.run()
        except TrainingStoppedError as error:
            report.line(f"stopped: {error}", event="stop")
            return EXIT_FAILED
        finally:
            if recording is not None:
                recording.close()
            elif processes.is_main:
                _plot(folder)
        if result.finished:
            _report_end(report, folder, result.step, done)
        else:
            report.line(f"continue with: nsa train --resume {shlex.quote(str(folder.path))}")
        return EXIT_SIGNAL + signal.Signals[result.signal] if result.signal else 0


def _recording(trainer: Trainer, plan: Plan, folder: RunFolder) -> Generator[None]:
    from nsa.train.profiler import record

    target = folder.path / "profile"
    target.mkdir(exist_ok=True)
    recording = record(trainer, plan, target)
    next(recording)
    return recording


def _on_row(report: RunReport, folder: RunFolder) -> Callable[[dict[str, Any]], None]:
    """Function that reports a row and sometimes draws the plot."""
    plotted = time.monotonic()

    def on_row(row: dict[str, Any]) -> None:
        nonlocal plotted
        report.row(row)
        if "val_loss_nats" in row and time.monotonic() - plotted > PLOT_EVERY_S:
            _plot(folder)
            plotted = time.monotonic()

    return on_row


def _report_end(report: RunReport, folder: RunFolder, step: int, before: int) -> None:
    """Report result and advice of a finished run, which had done ``before`` steps at its launch."""
    path, text = shlex.quote(str(folder.path)), f"finished {step} steps"
    more = f"nsa eval {path}\n  nsa generate {path} --prompt 'Once'"
    if step == before:
        text = f"all {step} steps were done before, none was added"
        more = f"nsa train --resume {path} --steps {2 * step}\n  {more}"
    report.line(text, event="finish")
    report.line(f"next:\n  {more}")


def _plot(folder: RunFolder) -> None:
    with optional_output(folder.loss_png.name):
        from nsa.train.runs.report import plot_losses

        plot_losses(folder.metrics_jsonl, folder.loss_png, title=folder.path.name)


def profile(
    config: str,
    *,
    run_dir: str | None = None,
    wait: int = 10,
    warmup: int = 10,
    active: int = 50,
    nvtx: bool = False,
    memory: bool = False,
    **settings: str,
) -> int:
    """Measure the time of training steps by stage.

    Train as `nsa train` does, with the same CONFIG and settings, for a few steps:
      nsa profile 78m --micro-batch 32 --accumulation 1 --global-batch 32 --compile true
    After --wait and --warmup steps, --active steps are recorded, then the run ends. The folder
    profile in the run folder gets trace.json.gz (for ui.perfetto.dev), stages.txt and stages.json
    (time by stage, which adds up to the step) and kernels.txt; docs/training.md explains them.
    With torchrun rank 0 is recorded.

    Args:
        config: name of a configuration (see nsa configs) or a YAML file
        run_dir: folder to create for the run (default runs/<config>-profile-<n>)
        wait: steps before the profiler starts
        warmup: steps under the profiler that are not recorded
        active: steps that are recorded
        nvtx: also mark the stages for nsys and ncu, and start and stop their recording
        memory: also record a snapshot of the GPU's memory, and the memory of each module
        settings: settings of the configuration
    """
    from nsa.train.load import load_config

    run, _name = load_config(config, settings), "nsa profile"
    for word, steps in {"--wait": wait, "--warmup": warmup, "--active": active}.items():
        check(steps > 0, word, "be positive", steps)
    from nsa.train.execution.precision import choose_device
    from nsa.train.profiler import Plan

    plan = Plan(wait, warmup, active, nvtx, memory)
    on_gpu, needed = choose_device(run.device).type == "cuda", plan.num_steps
    check(run.steps >= needed, "--steps", f"be at least {needed} for this profile", run.steps)
    check(on_gpu or not nvtx, "--nvtx", "be left out on a CPU", True)
    return _start(run, run_dir, f"{config.removesuffix('.yaml')}-profile.yaml", plan=plan)


def _print_profile(folder: Path) -> int:
    for file, lines in {"stages.txt": None, "kernels.txt": 16}.items():
        if (table := folder / file).exists():
            print("\n".join(table.read_text().splitlines()[:lines]) + "\n")
    files = sorted(folder.iterdir())
    print("\n".join(map(str, files)))
    return 0 if files else EXIT_FAILED
