"""Words of ``nsa profile``; everything heavy is imported when it runs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING

from nsa.errors import check

if TYPE_CHECKING:
    from nsa.train.profiler.session import Session

EXIT_FAILED = 1

PROFILE = """\
Train as CONFIG says for a few steps and record where their time goes. CONFIG and its settings are those of `nsa train`, and so
is the training, for example
  nsa profile seed --micro-batch 32 --accumulation 1 --global-batch 32 --compile true
After --wait and --warmup steps, --active steps are recorded, then the run ends. Its folder has, under profile/, trace.json.gz
(for ui.perfetto.dev), stages.txt and stages.json (time per stage, which adds up to the step) and kernels.txt; what they mean is
in docs/profiling.md. With torchrun rank 0 is recorded.
"""


def add_profile(parser: argparse.ArgumentParser) -> None:
    """Words of ``nsa profile``, without the settings."""
    parser.usage = "nsa profile CONFIG [--wait N] [--warmup N] [--active N] [--nvtx] [--memory] [--SETTING VALUE ...]"
    add = parser.add_argument
    add("config", metavar="CONFIG", help="name of a configuration (see nsa configs) or a YAML file")
    add("--run-dir", metavar="DIR", help="folder of the run; it must not exist (default runs/<config>-profile-<n>)")
    add("--wait", type=int, default=10, metavar="N", help="steps before the profiler starts (default 10)")
    add("--warmup", type=int, default=10, metavar="N", help="steps under the profiler that are not recorded (default 10)")
    add("--active", type=int, default=50, metavar="N", help="steps that are recorded (default 50)")
    add("--nvtx", action="store_true", help="mark the stages for nsys and ncu, too, and start and stop their recording")
    add("--memory", action="store_true", help="also a snapshot of the GPU's memory, and the memory of each module")


def run_profile(args: argparse.Namespace, overrides: Mapping[str, str]) -> int:
    """``nsa profile``; ``overrides`` are settings given on the command line."""
    from nsa.train.distributed.launch import check_launch, read_launch
    from nsa.train.load import load_config

    config = load_config(args.config, overrides)
    from nsa.train.distributed.processes import join
    from nsa.train.execution.precision import choose_device
    from nsa.train.profiler.session import EndOfProfileError, Plan, Session
    from nsa.train.run_folder import RunFolder, next_run_path
    from nsa.train.telemetry.progress import RunReport
    from nsa.train.trainer import Trainer, TrainingStoppedError
    from nsa.train.watch.out_of_memory import check_run_fits, explained, hint_for_run
    from nsa.train.watch.watchdog import Watchdog

    plan = Plan(args.wait, args.warmup, args.active, args.nvtx, args.memory)
    name, launch = "nsa profile", read_launch()
    check_launch(config, launch)
    needed = plan.num_steps(config.cuda_graphs)
    check(config.steps >= needed, name, "--steps", f"be at least {needed} for this profile", config.steps)
    device = choose_device(config.device, launch.local_rank)
    check(device.type == "cuda" or not plan.nvtx, name, "--nvtx", "be left out on a CPU", True)
    check(args.run_dir is not None or not launch.launcher, name, "--run-dir", "be given with torchrun", "none")
    check_run_fits(name, config, device)
    with join(launch, device) as processes:
        with processes.main_first():
            path = args.run_dir or next_run_path(f"{args.config.removesuffix('.yaml')}-profile.yaml")
            folder = RunFolder.create(path, config) if processes.is_main else RunFolder.open(path)
        session = Session(plan, folder.path / "profile")
        session.folder.mkdir(exist_ok=True)
        with (
            RunReport(folder.log if processes.is_main else None, needed) as report,
            Watchdog(folder, processes.rank, config.stall_limit_s) as watchdog,
            closing(session),
            explained(name, "the run", lambda: hint_for_run(config, folder)),
        ):
            trainer = Trainer(
                config, folder, processes=processes, on_row=report.row, on_step=session.on_step, beat=watchdog.beat
            )
            session.attach(trainer)
            try:
                trainer.run()
            except TrainingStoppedError as error:
                report.line(f"stopped: {error}", event="stop")
            except EndOfProfileError:
                report.line("recorded; reading the trace")
        if not processes.is_main:
            return 0
        return _show(session) if session.trace.exists() else EXIT_FAILED


def _show(session: Session) -> int:
    table = session.write()
    if table is None:
        print("no kernel is in the trace: another tool, such as nsys, reads the GPU's records of this process")
    else:
        print(table.text())
        print(table.kernels_text(15))
    print("\n".join(str(path) for path in sorted(session.folder.iterdir())))
    return 0
