"""The command ``nsa``: train, evaluate, generate, check and report runs, measure, look at the machine.

Everything heavy is imported inside the command that needs it. A mistake of the user ends in one line and exit code 2; a bug
keeps its traceback.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nsa import configs
from nsa.cli import bench, data, evaluation, plan, train
from nsa.cli import profile as profiler
from nsa.cli.parser import Parser, check_options, fail_unknown, with_dashes
from nsa.cli.train import EXIT_FAILED, EXIT_SIGNAL
from nsa.errors import UsageError, UserError, check
from nsa.extras import require

EXIT_USER_ERROR = 2
SIGPIPE = 13  # Windows has no name for it

# What the surroundings do not give; every other OSError is a bug until shown otherwise.
_SURROUNDINGS = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: words after ``nsa``; None takes those of this process.

    Returns:
        Exit code: 0 done, 1 ended without the wanted result, 2 a mistake in what the user gave or a machine that lacks
        something, 128 + n stopped by signal n.
    """
    try:
        try:
            return _dispatch(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()  # here and not at the exit of Python, where a reader that has left can no longer be handled
    except (UsageError, UserError) as error:
        return _say(str(error))
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # the reader of our output has left, for example `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain at its exit
            return EXIT_SIGNAL + SIGPIPE
        if error.errno not in _SURROUNDINGS:
            raise
        return _say(f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror))
    except RuntimeError as error:
        from nsa.train.watch.out_of_memory import is_out_of_memory, memory_use

        if not is_out_of_memory(error):
            raise
        return _say(f"{memory_use(error)}. Take fewer or shorter sequences at a time.")
    except KeyboardInterrupt:
        print("nsa: interrupted", file=sys.stderr)
        return EXIT_SIGNAL + signal.SIGINT


def _say(line: str) -> int:
    """One line that names the command once."""
    print(line if line.startswith(("nsa ", "nsa:")) else f"nsa: {line}", file=sys.stderr)
    return EXIT_USER_ERROR


def _dispatch(words: list[str]) -> int:
    args = parse(words)
    if args is None:
        return EXIT_USER_ERROR
    command: Callable[[argparse.Namespace], int] = args.command
    return command(args)


def parse(words: list[str]) -> argparse.Namespace | None:
    """The words of a command line, what runs among them as ``command``; None where a command below is missing, after help.

    Raises:
        UsageError: a word is not known or does not fit, or the command needs packages that are not installed.
    """
    chosen, rest = _parsers(), words
    while chosen.commands and rest and not rest[0].startswith("-"):
        if rest[0] not in chosen.commands:
            fail_unknown(f"{chosen.prog}: unrecognized command: {rest[0]}", rest[0], list(chosen.commands))
        chosen, rest = chosen.commands[rest[0]], rest[1:]
    if chosen.commands and not rest:
        chosen.print_help()
        return None
    if chosen.extra is not None:
        require(chosen.prog, chosen.extra)
    if chosen.takes_settings:
        _add_settings(chosen)
    rest = [with_dashes(word) for word in rest]
    check_options(rest, chosen)
    return chosen.parse_args(rest)


def _parsers() -> Parser:
    """The parser, with those of the commands; without the settings of the configuration."""
    parser = Parser(
        prog="nsa",
        description="Native Sparse Attention: train a language model, measure it, let it write.",
        epilog="`nsa COMMAND --help` explains a command. Start with: nsa train cpu-small",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and leave")
    parser.add_commands(_COMMANDS)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from nsa.train.environment import version

        print(f"nsa {version('nsa')}")
        parser.exit()


# --- settings of the configuration -----------------------------------------------------------------------------------------
def _add_settings(parser: Parser) -> None:
    from nsa.train.load import RENAMED, settings

    sections: dict[str, Any] = {}
    for setting in settings():
        section = setting.name.rpartition(".")[0]
        if section not in sections:
            title = f"settings of {section}" if section else "settings of the run"
            sections[section] = parser.add_argument_group(title)
        described = setting.help.replace("``", "").replace(":class:`RopeScaling`", "the settings inside it").replace("%", "%%")
        sections[section].add_argument(
            f"--{setting.name.replace('_', '-')}", dest=setting.name, metavar="VALUE",
            help=f"{described} Must {setting.rule}. (default {setting.default})",
        )  # fmt: skip
    for name in RENAMED:
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, help=argparse.SUPPRESS)


def _given_settings(args: argparse.Namespace) -> dict[str, str]:
    """Settings of the configuration that stand on the command line."""
    from nsa.train.load import RENAMED, settings

    given = {name: getattr(args, name) for name in (*(setting.name for setting in settings()), *RENAMED)}
    return {name: value for name, value in given.items() if value is not None}


# --- train ----------------------------------------------------------------------------------------------------------------
def _add_train(parser: Parser) -> None:
    parser.takes_settings = True
    train.add_train(parser)


def _train(args: argparse.Namespace) -> int:
    return train.run_train(args, _given_settings(args))


# --- plan -----------------------------------------------------------------------------------------------------------------
def _add_plan(parser: Parser) -> None:
    parser.takes_settings = True
    plan.add_plan(parser)


def _plan(args: argparse.Namespace) -> int:
    return plan.run_plan(args, _given_settings(args))


# --- check and report -----------------------------------------------------------------------------------------------------
_CHECK = """\
Recompute step counts, tokens and tokens/s of RUN from its records, and compare metrics.jsonl, metrics.csv and TensorBoard value
by value. Exit code 1, with the first disagreements, if they do not agree.
"""


def _add_check(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="run folder, for example runs/cpu-small-1")


def _check(args: argparse.Namespace) -> int:
    from nsa.train.run_folder import RunFolder
    from nsa.train.runs.check import check_run

    folder = RunFolder.open(args.run)
    summary, found = check_run(folder)
    for line in summary:
        print(f"{folder.path}: {line}")
    for line in found:
        print(f"  {line}")
    print(f"{folder.path}: " + (f"{len(found)} records disagree" if found else "everything agrees"))
    return EXIT_FAILED if found else 0


_REPORT = """\
Write one HTML page about one RUN or several: curves, gates, events, environment, differences of the configurations. It
holds all that it shows and needs no network.
"""


def _add_report(parser: Parser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folders; several are compared")
    parser.add_argument("--output", metavar="FILE", help="page to write (default report.html in the first RUN)")


def _report(args: argparse.Namespace) -> int:
    from nsa.train.run_folder import RunFolder, replace_text
    from nsa.train.runs.report import report_page

    folders = [RunFolder.open(run) for run in args.runs]
    target = Path(args.output) if args.output else folders[0].path / "report.html"
    replace_text(target, report_page(folders))
    print(f"report: {target}")
    return 0


_TRACK = """\
Send the rows of RUN to a tracker: trackio, which keeps them on this machine, or Weights & Biases (wandb). The run itself never
waits for a tracker; this command reads its metrics.jsonl, beside it or afterwards, and goes on where it stopped.
"""


def _add_track(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="run folder, for example runs/cpu-small-1")
    parser.add_argument("--to", required=True, metavar="NAME", help="trackio or wandb; the package must be installed")
    parser.add_argument("--project", default="nsa", metavar="NAME", help="project of the tracker (default nsa)")
    parser.add_argument("--follow", action="store_true", help="go on with new rows until the run ends")


def _track(args: argparse.Namespace) -> int:
    from nsa.train.run_folder import RunFolder
    from nsa.train.runs.tracking import track

    for line in track(RunFolder.open(args.run), args.to, project=args.project, follow=args.follow):
        print(line, flush=True)
    return 0


# --- configs ---------------------------------------------------------------------------------------------------------------
_CONFIGS = """\
List the configurations that come with the package. Commands take them by name, and the YAML files that they are as a start for
others: --folder prints where they are.
"""


def _add_configs(parser: Parser) -> None:
    parser.add_argument("--folder", action="store_true", help="print the folder of their files alone")


def _configs(args: argparse.Namespace) -> int:
    if args.folder:
        print(configs.FOLDER)
        return 0
    width = max(map(len, configs.names()))
    for name in configs.names():
        print(f"{name:{width}}  {configs.summary(name)}")
    return 0


# --- profile --------------------------------------------------------------------------------------------------------------
def _add_profile(parser: Parser) -> None:
    parser.takes_settings = True
    profiler.add_profile(parser)


def _profile(args: argparse.Namespace) -> int:
    return profiler.run_profile(args, _given_settings(args))


# --- doctor ---------------------------------------------------------------------------------------------------------------
_DOCTOR = """\
Look at this machine: versions, GPUs and how they are connected, memory, free disk, which implementation of the attention
operators runs on which device and why, and whether the configurations load. Exit code 1 if something will not work. For one
shape it says which kernels run, with which tiles, and why:
  nsa doctor --shape seed --seq 65536
"""


def _add_doctor(parser: Parser) -> None:
    parser.add_argument("--configs", metavar="DIR", help="folder of configurations to check (default those of the package)")
    parser.add_argument("--shape", metavar="SHAPE", help="seed, wide, paper or HqxHkvxDxDv: say what runs for it; with --seq")
    parser.add_argument("--seq", type=int, metavar="N", help="tokens of the longest sequence, with --shape")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16", "fp32"), help="with --shape (default bf16)")


def _doctor(args: argparse.Namespace) -> int:
    from nsa.cli.doctor import Question, diagnose

    given = args.shape is not None, args.seq is not None
    check(all(given) or not any(given), "nsa doctor", "--shape and --seq", "be given together", (args.shape, args.seq))
    question = Question.of(args.shape, args.seq, args.dtype) if all(given) else None
    return EXIT_FAILED if diagnose(None if args.configs is None else Path(args.configs), question) else 0


_BENCH_COMMANDS = (
    ("attention", "bench", bench.add_attention, bench.run_attention, "measure the attention operators", bench.ATTENTION),
    ("train", "train", bench.add_train, bench.run_train, "measure training steps", bench.TRAIN),
    ("scaling", "train", bench.add_scaling, bench.run_scaling, "measure training on several processes", bench.SCALING),
    ("host", "bench", bench.add_host, bench.run_host, "measure what a layer costs the CPU", bench.HOST),
    ("tune", "bench", bench.add_tune, bench.run_tune, "choose the tiles of the kernels for this GPU", bench.TUNE),
    ("guard", "bench", bench.add_guard, bench.run_guard, "compare ratios with committed rows", bench.GUARD),
    ("report", "bench", bench.add_report, bench.run_report, "make a report from measured rows", bench.REPORT),
)

_DATA_COMMANDS = (
    ("prepare", "data", data.add_prepare, data.run_prepare, "tokenise a data set into shards", data.PREPARE),
    ("verify", "train", data.add_verify, data.run_verify, "compare shards with their SHA-256", data.VERIFY),
    ("bench", "train", data.add_bench, data.run_bench, "measure the loader", data.BENCH),
)

_COMMANDS = (
    ("train", "train", _add_train, _train, "train a language model", train.TRAIN),
    ("configs", None, _add_configs, _configs, "list the configurations that come with the package", _CONFIGS),
    ("plan", "train", _add_plan, _plan, "say what a run will need", plan.PLAN),
    ("eval", "train", evaluation.add_eval, evaluation.run_eval, "measure a trained model on text", evaluation.EVAL),
    (
        "generate",
        "train",
        evaluation.add_generate,
        evaluation.run_generate,
        "let a trained model continue a prompt",
        evaluation.GENERATE,
    ),
    ("check", "train", _add_check, _check, "check that the records of a run agree", _CHECK),
    ("report", "train", _add_report, _report, "write a page about runs", _REPORT),
    ("track", "train", _add_track, _track, "send the rows of a run to a tracker", _TRACK),
    ("data", None, None, _DATA_COMMANDS, "prepare text for training", data.DATA),
    ("profile", "train", _add_profile, _profile, "record where the time of training goes", profiler.PROFILE),
    ("bench", None, None, _BENCH_COMMANDS, "measure this library's speed beside others", bench.BENCH),
    ("doctor", None, _add_doctor, _doctor, "check this machine and installation", _DOCTOR),
)

if __name__ == "__main__":
    sys.exit(main())
