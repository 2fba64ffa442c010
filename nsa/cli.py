"""The command ``nsa``: train, evaluate, generate, check and report runs, measure, look at the machine.

Everything heavy is imported inside the command that needs it. A mistake of the user ends in one line and exit code 2; a bug
keeps its traceback.
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa import configs
from nsa.bench import command as bench
from nsa.errors import UsageError, UserError, check
from nsa.extras import require
from nsa.parser import Parser, check_options, fail_unknown, with_dashes
from nsa.plan import command as plan
from nsa.train import data_command as data
from nsa.train.profiler import command as profiler

if TYPE_CHECKING:
    from nsa.train.config import TrainConfig
    from nsa.train.parallel import Processes
    from nsa.train.run_folder import RunFolder

EXIT_FAILED, EXIT_USER_ERROR, EXIT_SIGNAL = 1, 2, 128
SIGPIPE = 13  # Windows has no name for it
PLOT_EVERY_S = 60.0  # at most: drawing takes some tenths of a second from training

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
        from nsa.train.out_of_memory import is_out_of_memory, memory_use

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


# --- train ----------------------------------------------------------------------------------------------------------------
_TRAIN = """\
Train a language model as CONFIG says: the name of a configuration that `nsa configs` lists, or a YAML file.

Every setting of the file can be given here too and then wins, for example
  nsa train cpu-small --optim.lr 3e-4 --model.nsa.window-size 64
The run leaves a folder with its configuration, environment, metrics, checkpoints, plot, sample and log; no run writes over
another. Ctrl-C or SIGTERM ends it after the step at hand, with a checkpoint; a second one ends it at once. A file named halt in
the run folder and a closed terminal end it with a checkpoint, too. SIGUSR2 asks for a checkpoint, SIGUSR1 for the stacks of
all threads.
  nsa train --resume runs/cpu-small-1
goes on exactly where the newest checkpoint was taken. Several processes, one on each GPU or several on the CPU:
  torchrun --standalone --nproc-per-node 2 --max-restarts 3 -m nsa train CONFIG --run-dir runs/a \\
    --world-size 2 --accumulation 1
When one of them dies, torchrun starts them anew and the run resumes.
"""


def _add_train(parser: Parser) -> None:
    parser.takes_settings = True
    parser.usage = "nsa train CONFIG [--SETTING VALUE ...] [--run-dir DIR]\n       nsa train --resume RUN [--SETTING VALUE ...]"
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="name of a configuration (see nsa configs) or a YAML file")
    parser.add_argument("--run-dir", metavar="DIR", help="folder to make for this run (default runs/<config>-<n>)")
    parser.add_argument("--resume", metavar="RUN", help="folder of a run to continue; then without CONFIG")


def _add_settings(parser: Parser) -> None:
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
    from nsa.train.launch import check_launch, read_launch
    from nsa.train.load import load_config
    from nsa.train.parallel import join
    from nsa.train.precision import choose_device
    from nsa.train.run_folder import RunFolder

    overrides = _given_settings(args)
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
    with join(launch, choose_device(config.device, launch.local_rank)) as processes:
        with processes.main_first():
            folder, is_new = _run_folder(args, config, is_main=processes.is_main, restart=launch.restart)
        try:
            return _run(config, folder, processes, is_new=is_new, overrides=overrides)
        except (UserError, KeyboardInterrupt):
            if is_new and processes.is_main and folder.holds_no_run():
                shutil.rmtree(folder.path)
            raise


def _run_folder(args: argparse.Namespace, config: TrainConfig, *, is_main: bool, restart: int) -> tuple[RunFolder, bool]:
    """The folder of the run, and whether the run begins; one that died before its first checkpoint begins again."""
    from nsa.train.checkpoint import list_checkpoints
    from nsa.train.run_folder import RunFolder, next_run_path

    if args.resume is not None:
        return RunFolder.open(args.resume), False
    if restart == 0 and is_main:
        return RunFolder.create(args.run_dir or next_run_path(args.config), config), True
    folder = RunFolder.open(args.run_dir)
    return folder, not list_checkpoints(folder.checkpoints)


def _run(config: TrainConfig, folder: RunFolder, processes: Processes, *, is_new: bool, overrides: dict[str, str]) -> int:
    """Train in ``folder``; ``overrides`` are the settings that a resumption changes."""
    from nsa.train.out_of_memory import explained, hint_for_run
    from nsa.train.plots import plot_losses
    from nsa.train.progress import RunReport
    from nsa.train.trainer import Trainer, TrainingStoppedError
    from nsa.train.watchdog import Watchdog

    def plot() -> None:
        try:
            if processes.is_main:
                plot_losses(folder.metrics_jsonl, folder.loss_png, title=folder.path.name)
        except OSError as error:
            report.line(f"loss.png could not be written ({error})")

    plotted = time.monotonic()

    def on_row(row: dict[str, Any]) -> None:
        nonlocal plotted
        report.row(row)
        if "val_loss_nats" in row and time.monotonic() - plotted > PLOT_EVERY_S:
            plot()
            plotted = time.monotonic()

    with (
        folder.in_use() if processes.is_main else nullcontext("") as remark,
        RunReport(folder.log if processes.is_main else None, config.steps) as report,
        Watchdog(folder, processes.rank, config.stall_limit_s) as watchdog,
        explained("train", "the run", lambda: hint_for_run(config, folder)),
    ):
        report.line(f"run folder: {folder.path}", event="start")
        if remark:
            report.line(remark, event="warning")
        trainer = Trainer(config, folder, processes=processes, resume=not is_new, on_row=on_row, beat=watchdog.beat)
        if not is_new and processes.is_main:
            folder.record_launch(resumed_from_step=trainer.state.progress.step, overrides=overrides)
        try:
            result = trainer.run()
        except TrainingStoppedError as error:
            report.line(f"stopped: {error}", event="stop")
            return EXIT_FAILED
        finally:
            plot()
        if not result.finished:
            report.line(f"continue with: nsa train --resume {folder.path}")
            return EXIT_SIGNAL + signal.Signals[result.signal] if result.signal else 0
        report.line(
            f"finished {result.step} steps; next:\n  nsa eval {folder.path}\n  nsa generate {folder.path} --prompt 'Once'",
            event="finish",
        )
    return 0


# --- plan -----------------------------------------------------------------------------------------------------------------
def _add_plan(parser: Parser) -> None:
    parser.takes_settings = True
    plan.add_plan(parser)


def _plan(args: argparse.Namespace) -> int:
    return plan.run_plan(args, _given_settings(args))


# --- eval -----------------------------------------------------------------------------------------------------------------
_EVAL = """\
Measure the newest checkpoint of RUN on its held-out text, in bits per byte, beside a smoothed bigram model of the training
text on exactly the same held-out text. A synthetic task has the lowest possible loss beside it instead.
"""


def _add_run(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="run folder, for example runs/cpu-small-1")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), help="where to compute (default auto)")


def _add_eval(parser: Parser) -> None:
    _add_run(parser)
    parser.add_argument("--windows", type=int, metavar="N", help="held-out windows to measure (default all)")
    parser.add_argument(
        "--micro-batch",
        type=int,
        metavar="N",
        help="windows computed at a time (default the run's)",
    )


def _eval(args: argparse.Namespace) -> int:
    from nsa.eval.report import evaluate_run
    from nsa.train.out_of_memory import explained
    from nsa.train.run_folder import RunFolder

    folder = RunFolder.open(args.run)
    given = {"num_windows": args.windows, "micro_batch": args.micro_batch}
    windows = args.micro_batch or folder.load_config().micro_batch
    fewer = f"--micro-batch {windows // 2} or " if windows > 1 else ""
    with explained("eval", "the evaluation", lambda: f"Give {fewer}--device cpu."):
        for line in evaluate_run(folder, device=args.device or "auto", **given):
            print(line, flush=True)
    return 0


# --- generate -------------------------------------------------------------------------------------------------------------
_GENERATE = """\
Continue prompts with the newest checkpoint of RUN. The text is printed as it is drawn; of several prompts the first one is,
and the others follow when it has ended. The same seed gives the same text on the same machine.
"""


def _add_generate(parser: Parser) -> None:
    _add_run(parser)
    parser.add_argument(
        "--prompt", action="append", required=True, metavar="TEXT", help="text to continue; may be given several times"
    )
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="tokens to draw at most (default 256)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="X",
        help="below 1 bolder guesses are rarer, 0 takes the likeliest (default 0.8)",
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="draw among the K likeliest tokens (default 0: all)")
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw among the likeliest tokens that reach probability P (default 1)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="prompt i draws with seed N + i (default 0)")


def _generate(args: argparse.Namespace) -> int:
    from nsa.eval.generation import generate
    from nsa.train.data import load_tokenizer
    from nsa.train.inference import load_model
    from nsa.train.out_of_memory import explained
    from nsa.train.precision import choose_device
    from nsa.train.run_folder import RunFolder

    folder = RunFolder.open(args.run)
    config = folder.load_config()
    hint = "Give fewer prompts, fewer --max-new-tokens or --device cpu."
    with explained("generate", "the text", lambda: hint):
        model, _ = load_model(config.model, folder, choose_device(args.device or "auto"))
        steps = generate(
            model, load_tokenizer(folder.tokenizer), args.prompt,
            max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_k=args.top_k,
            top_p=args.top_p, seed=args.seed, compute_dtype=config.compute_dtype,
        )  # fmt: skip
        _print_texts(args.prompt, steps)
    return 0


def _print_texts(prompts: Sequence[str], steps: Any) -> None:
    """Print the first continuation as it comes, then the others."""
    import codecs

    decoders = [codecs.getincrementaldecoder("utf-8")(errors="replace") for _ in prompts]
    waiting = [""] * len(prompts)

    def show(text: str) -> None:
        print(text, end="", flush=True)

    for index, prompt in enumerate(prompts):
        if len(prompts) > 1:
            show(f"--- prompt {index + 1}\n")
        show(prompt + waiting[index])
        for pieces in steps if index == 0 else ():
            texts = [decoder.decode(piece) for decoder, piece in zip(decoders, pieces, strict=True)]
            show(texts[0])
            waiting = [before + text for before, text in zip(waiting, texts, strict=True)]
        show(decoders[index].decode(b"", final=True) + "\n")


# --- check and report -----------------------------------------------------------------------------------------------------
_CHECK = """\
Recompute step counts, tokens and tokens/s of RUN from its records, and compare metrics.jsonl, metrics.csv and TensorBoard value
by value. Exit code 1, with the first disagreements, if they do not agree.
"""


def _add_check(parser: Parser) -> None:
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


def _add_report(parser: Parser) -> None:
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


def _add_track(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="run folder, for example runs/cpu-small-1")
    parser.add_argument("--to", required=True, metavar="NAME", help="trackio or wandb; the package must be installed")
    parser.add_argument("--project", default="nsa", metavar="NAME", help="project of the tracker (default nsa)")
    parser.add_argument("--follow", action="store_true", help="go on with new rows until the run has done all its steps")


def _track(args: argparse.Namespace) -> int:
    from nsa.train.run_folder import RunFolder
    from nsa.train.tracking import track

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
    from nsa.doctor import Question, diagnose

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
    ("train", "train", _add_train, _train, "train a language model", _TRAIN),
    ("configs", None, _add_configs, _configs, "list the configurations that come with the package", _CONFIGS),
    ("plan", "train", _add_plan, _plan, "say what a run will need", plan.PLAN),
    ("eval", "train", _add_eval, _eval, "measure a trained model on held-out text", _EVAL),
    ("generate", "train", _add_generate, _generate, "let a trained model continue a prompt", _GENERATE),
    ("check", "train", _add_check, _check, "check that the records of a run agree", _CHECK),
    ("report", "train", _add_report, _report, "write a page about runs", _REPORT),
    ("track", "train", _add_track, _track, "send the rows of a run to a tracker", _TRACK),
    ("data", None, None, _DATA_COMMANDS, "prepare text for training", data.DATA),
    ("profile", "train", _add_profile, profiler.run_profile, "record where the time of training goes", profiler.PROFILE),
    ("bench", None, None, _BENCH_COMMANDS, "measure this library's speed beside others", bench.BENCH),
    ("doctor", None, _add_doctor, _doctor, "check this machine and installation", _DOCTOR),
)

if __name__ == "__main__":
    sys.exit(main())
