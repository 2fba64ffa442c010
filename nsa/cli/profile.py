"""``nsa profile``; everything heavy is imported when it runs."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from nsa.errors import check

if TYPE_CHECKING:
    from nsa.train.config import TrainConfig
    from nsa.train.distributed.processes import Processes
    from nsa.train.profiler.session import Session
    from nsa.train.run_folder import RunFolder

EXIT_FAILED = 1


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
    """Record where the time of training goes.

    Train as CONFIG says for a few steps and record where their time goes. CONFIG and its settings
    are those of `nsa train`, and so is the training, for example
      nsa profile 78m --micro-batch 32 --accumulation 1 --global-batch 32 --compile true
    After --wait and --warmup steps, --active steps are recorded, then the run ends. Its folder has,
    under profile/, trace.json.gz (for ui.perfetto.dev), stages.txt and stages.json (time per stage,
    which adds up to the step) and kernels.txt; what they mean is in docs/profiling.md. With
    torchrun rank 0 is recorded.

    Args:
        config: name of a configuration (see nsa configs) or a YAML file
        run_dir: folder of the run; it must not exist (default runs/<config>-profile-<n>)
        wait: steps before the profiler starts
        warmup: steps under the profiler that are not recorded
        active: steps that are recorded
        nvtx: mark the stages for nsys and ncu, too, and start and stop their recording
        memory: also a snapshot of the GPU's memory, and the memory of each module
        settings: of the configuration
    """
    from nsa.train.distributed.launch import check_launch, read_launch
    from nsa.train.load import load_config

    run = load_config(config, settings)
    from nsa.train.distributed.processes import join
    from nsa.train.execution.precision import choose_device
    from nsa.train.profiler.session import Plan, Session
    from nsa.train.run_folder import RunFolder, next_run_path
    from nsa.train.watch.out_of_memory import check_run_fits

    plan = Plan(wait, warmup, active, nvtx, memory)
    name, launch = "nsa profile", read_launch()
    check_launch(run, launch)
    needed = plan.num_steps(run.cuda_graphs)
    check(run.steps >= needed, name, "--steps", f"be at least {needed} for this profile", run.steps)
    device = choose_device(run.device, launch.local_rank)
    check(device.type == "cuda" or not plan.nvtx, name, "--nvtx", "be left out on a CPU", True)
    is_found = run_dir is not None or not launch.launcher
    check(is_found, name, "--run-dir", "be given with torchrun", "none")
    check_run_fits(name, run, device)
    with join(launch, device) as processes:
        with processes.main_first():
            name = f"{config.removesuffix('.yaml')}-profile.yaml"
            path = next_run_path(name) if run_dir is None else run_dir
            folder = RunFolder.create(path, run) if processes.is_main else RunFolder.open(path)
        session = Session(plan, folder.path / "profile")
        session.folder.mkdir(exist_ok=True)
        _record(run, folder, processes, session, needed)
        if not processes.is_main:
            return 0
        return _show(session) if session.trace.exists() else EXIT_FAILED


def _record(
    config: TrainConfig,
    folder: RunFolder,
    processes: Processes,
    session: Session,
    num_steps: int,
) -> None:
    from nsa.train.profiler.session import EndOfProfileError
    from nsa.train.telemetry.progress import RunReport
    from nsa.train.trainer import Trainer, TrainingStoppedError
    from nsa.train.watch.out_of_memory import explained, hint_for_run
    from nsa.train.watch.watchdog import Watchdog

    with (
        RunReport(folder.log if processes.is_main else None, num_steps) as report,
        Watchdog(folder, processes.rank, config.stall_limit_s) as watchdog,
        closing(session),
        explained("nsa profile", "the run", lambda: hint_for_run(config, folder)),
    ):
        trainer = Trainer(
            config,
            folder,
            processes=processes,
            on_row=report.row,
            on_step=session.on_step,
            beat=watchdog.beat,
        )
        session.attach(trainer)
        try:
            trainer.run()
        except TrainingStoppedError as error:
            report.line(f"stopped: {error}", event="stop")
        except EndOfProfileError:
            report.line("recorded; reading the trace")


def _show(session: Session) -> int:
    table = session.write()
    if table is None:
        reads = "another tool, such as nsys, reads the GPU's records of this process"
        print(f"no kernel is in the trace: {reads}")
    else:
        print(table.text())
        print(table.kernels_text(15))
    print("\n".join(str(path) for path in sorted(session.folder.iterdir())))
    return 0
