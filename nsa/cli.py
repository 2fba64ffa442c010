"""The command ``nsa``: train, evaluate, generate, check and report runs, measure, look at the machine.

Everything heavy is imported inside the command that needs it. A mistake of the user ends in one line and exit code 2; a bug
keeps its traceback.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from nsa.bench import command as bench
from nsa.errors import UserError, check, fail
from nsa.eval import command as evaluation
from nsa.plan import command as plan
from nsa.train import command as train
from nsa.train import data_command as data
from nsa.train.command import EXIT_FAILED, EXIT_SIGNAL
from nsa.train.profiler import command as profiler

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
    except UserError as error:
        return _say(str(error))
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # the reader of our output has left, for example `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain at its exit
            return EXIT_SIGNAL + SIGPIPE
        if error.errno not in _SURROUNDINGS:
            raise
        return _say(f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror))
    except RuntimeError as error:
        from nsa.train.out_of_memory import is_out_of_memory, memory_use

        if not is_out_of_memory(error):
            raise
        return _say(f"{memory_use(error)}. Take fewer or shorter sequences at a time.")
    except KeyboardInterrupt:
        print("nsa: interrupted", file=sys.stderr)
        return EXIT_SIGNAL + signal.SIGINT


def _say(line: str) -> int:
    print(f"nsa: {line}", file=sys.stderr)
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
        UserError: a word is not known or does not fit.
    """
    parser = _parsers(complete=words[0] if words[:1] in (["train"], ["plan"], ["profile"]) else None)
    chosen, rest = parser, words
    while chosen.commands and rest and not rest[0].startswith("-"):
        if rest[0] not in chosen.commands:
            _fail_unknown("command", rest[0], list(chosen.commands))
        chosen, rest = chosen.commands[rest[0]], rest[1:]
    if chosen.commands and not rest:
        chosen.print_help()
        return None
    words = [_with_dashes(word) for word in words]
    _check_options(words, chosen)
    return parser.parse_args(words)


# --- Words ----------------------------------------------------------------------------------------------------------------
def _with_dashes(word: str) -> str:
    """``--model.nsa.window_size=8`` as ``--model.nsa.window-size=8``."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if re.fullmatch(r"--[\w.-]+", name) else word


def _check_options(words: Sequence[str], parser: _Parser) -> None:
    """Refuse an unknown option before argparse takes its value for something else."""
    for word in words:
        if word == "--":
            return
        name = word.partition("=")[0]
        if name.startswith("--") and name not in parser.option_names():
            _fail_unknown("option", name, parser.option_names())


def _fail_unknown(what: str, word: str, known: Sequence[str]) -> NoReturn:
    from nsa.train.load import nearest

    fail("command line", f"the {what}", "be a known one", repr(word), f"The nearest is {nearest(word, known)}.")


class _Parser(argparse.ArgumentParser):
    """Reports a mistake as a :class:`UserError` and does not guess at shortened options."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_HelpFormatter, **kwargs)
        self.register("action", None, _Once)
        self.commands: dict[str, _Parser] = {}

    def add_commands(self, commands: Sequence[tuple[Any, ...]]) -> None:
        """Commands below this one: name, words, what runs or the commands below it, summary, description."""
        made = self.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
        for name, add, run, summary, description in commands:
            self.commands[name] = made.add_parser(name, help=summary, description=description)
            if callable(run):
                self.commands[name].set_defaults(command=run)
                add(self.commands[name])
            else:
                self.commands[name].add_commands(run)

    def option_names(self) -> list[str]:
        return [name for action in self._actions for name in action.option_strings]

    def error(self, message: str) -> NoReturn:
        raise UserError(self.prog, "the words", "fit the usage", message, f"See: {self.prog} --help")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=min(shutil.get_terminal_size().columns, 128))


class _Once(argparse.Action):
    """Stores a value and refuses a second one; the action of every argument that names no other."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, name: str | None = None
    ) -> None:
        given = vars(namespace).setdefault("_given", set())
        if self.dest in given:
            parser.error(f"{name} twice")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


def _parsers(*, complete: str | None) -> _Parser:
    """The parser, with those of the commands; that of the command ``complete`` knows the settings of the configuration."""
    parser = _Parser(
        prog="nsa",
        description="Native Sparse Attention: train a language model, measure it, let it write.",
        epilog="`nsa COMMAND --help` explains a command. Start with: nsa train configs/cpu-small.yaml",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and leave")
    parser.add_commands(_COMMANDS)
    if complete is not None:
        _add_settings(parser.commands[complete])
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from nsa.train.environment import version

        print(f"nsa {version('nsa')}")
        parser.exit()


# --- settings of the configuration -----------------------------------------------------------------------------------------
def _add_settings(parser: _Parser) -> None:
    from nsa.train.load import settings

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


def _given_settings(args: argparse.Namespace) -> dict[str, str]:
    """Settings of the configuration that stand on the command line."""
    from nsa.train.load import settings

    given = {setting.name: getattr(args, setting.name) for setting in settings()}
    return {name: value for name, value in given.items() if value is not None}


def _train(args: argparse.Namespace) -> int:
    return train.run_train(args, _given_settings(args))


# --- plan -----------------------------------------------------------------------------------------------------------------
def _plan(args: argparse.Namespace) -> int:
    return plan.run_plan(args, _given_settings(args))


# --- check and report -----------------------------------------------------------------------------------------------------
_CHECK = """\
Recompute step counts, tokens and tokens/s of RUN from its records, and compare metrics.jsonl, metrics.csv and TensorBoard value
by value. Exit code 1, with the first disagreements, if they do not agree.
"""


def _add_check(parser: _Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="run folder, for example runs/cpu-small-1")


def _check(args: argparse.Namespace) -> int:
    from nsa.train.run_check import check_run
    from nsa.train.run_folder import RunFolder

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


def _add_report(parser: _Parser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folders; several are compared")
    parser.add_argument("--output", metavar="FILE", help="page to write (default report.html in the first RUN)")


def _report(args: argparse.Namespace) -> int:
    from nsa.train.run_folder import RunFolder, replace_text
    from nsa.train.run_report import report_page

    folders = [RunFolder.open(run) for run in args.runs]
    target = Path(args.output) if args.output else folders[0].path / "report.html"
    replace_text(target, report_page(folders))
    print(f"report: {target}")
    return 0


_TRACK = """\
Send the rows of RUN to a tracker: trackio, which keeps them on this machine, or Weights & Biases (wandb). The run itself never
waits for a tracker; this command reads its metrics.jsonl, beside it or afterwards, and goes on where it stopped.
"""


def _add_track(parser: _Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="run folder, for example runs/cpu-small-1")
    parser.add_argument("--to", required=True, metavar="NAME", help="trackio or wandb; the package must be installed")
    parser.add_argument("--project", default="nsa", metavar="NAME", help="project of the tracker (default nsa)")
    parser.add_argument("--follow", action="store_true", help="go on with new rows until the run ends")


def _track(args: argparse.Namespace) -> int:
    from nsa.train.run_folder import RunFolder
    from nsa.train.tracking import track

    for line in track(RunFolder.open(args.run), args.to, project=args.project, follow=args.follow):
        print(line, flush=True)
    return 0


# --- doctor ---------------------------------------------------------------------------------------------------------------
_DOCTOR = """\
Look at this machine: versions, GPUs and how they are connected, memory, free disk, which implementation of the attention
operators runs on which device and why, and whether the configurations load. Exit code 1 if something will not work. For one
shape it says which kernels run, with which tiles, and why:
  nsa doctor --shape seed --seq 65536
"""


def _add_doctor(parser: _Parser) -> None:
    parser.add_argument(
        "--configs", metavar="DIR", help="folder of configurations to check (default configs, where there is one)"
    )
    parser.add_argument("--shape", metavar="SHAPE", help="seed, wide, paper or HqxHkvxDxDv: say what runs for it; with --seq")
    parser.add_argument("--seq", type=int, metavar="N", help="tokens of the longest sequence, with --shape")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16", "fp32"), help="with --shape (default bf16)")


def _doctor(args: argparse.Namespace) -> int:
    from nsa.doctor import Question, diagnose

    given = args.shape is not None, args.seq is not None
    check(all(given) or not any(given), "nsa doctor", "--shape and --seq", "be given together", (args.shape, args.seq))
    question = Question.of(args.shape, args.seq, args.dtype) if all(given) else None
    return EXIT_FAILED if diagnose(None if args.configs is None else Path(args.configs), question) else 0


_BENCH_COMMANDS = (
    ("attention", bench.add_attention, bench.run_attention, "measure the attention operators", bench.ATTENTION),
    ("train", bench.add_train, bench.run_train, "measure training steps", bench.TRAIN),
    ("scaling", bench.add_scaling, bench.run_scaling, "measure training on several processes", bench.SCALING),
    ("tune", bench.add_tune, bench.run_tune, "choose the tiles of the kernels for this GPU", bench.TUNE),
    ("guard", bench.add_guard, bench.run_guard, "compare ratios with committed rows", bench.GUARD),
    ("report", bench.add_report, bench.run_report, "make a report from measured rows", bench.REPORT),
)

_DATA_COMMANDS = (
    ("prepare", data.add_prepare, data.run_prepare, "tokenise a data set into shards", data.PREPARE),
    ("verify", data.add_verify, data.run_verify, "compare shards with their SHA-256", data.VERIFY),
    ("bench", data.add_bench, data.run_bench, "measure the loader", data.BENCH),
)

_COMMANDS = (
    ("train", train.add_train, _train, "train a language model", train.TRAIN),
    ("plan", plan.add_plan, _plan, "say what a run will need", plan.PLAN),
    ("eval", evaluation.add_eval, evaluation.run_eval, "measure a trained model on text", evaluation.EVAL),
    (
        "generate",
        evaluation.add_generate,
        evaluation.run_generate,
        "let a trained model continue a prompt",
        evaluation.GENERATE,
    ),
    ("check", _add_check, _check, "check that the records of a run agree", _CHECK),
    ("report", _add_report, _report, "write a page about runs", _REPORT),
    ("track", _add_track, _track, "send the rows of a run to a tracker", _TRACK),
    ("data", None, _DATA_COMMANDS, "prepare text for training", data.DATA),
    ("profile", profiler.add_profile, profiler.run_profile, "record where the time of training goes", profiler.PROFILE),
    ("bench", None, _BENCH_COMMANDS, "measure this library's speed beside others", bench.BENCH),
    ("doctor", _add_doctor, _doctor, "check this machine and installation", _DOCTOR),
)

if __name__ == "__main__":
    sys.exit(main())
