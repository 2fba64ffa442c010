"""The command ``nsa``: trains, evaluates and generates, reads runs, measures, checks the machine.

Everything heavy is imported inside the command that needs it. A mistake of the user ends in one
line and exit code 2; a bug keeps its traceback.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from nsa.cli import (
    bench,
    commands,
    data,
    evaluation,
    export,
    generation,
    inspection,
    installation,
    plan,
    profile,
    runs,
    train,
)
from nsa.cli.commands import Command, Group
from nsa.errors import UsageError, UserError
from nsa.terminal import safe_output

EXIT_USER_ERROR, EXIT_SIGNAL = 2, 128
SIGPIPE = 13  # Windows has no name for it

# Errors of the machine that the user can see to; every other OSError is a bug.
_MACHINE = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
    errno.EFBIG,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOENT,
    errno.EISDIR,
    errno.ELOOP,
    errno.ESTALE,
}

COMMANDS = Group(
    "Native Sparse Attention: train a language model, measure it.\nStart with: nsa train cpu-small",
    {
        "train": Command(train.train, "train"),
        "configs": Command(installation.configs),
        "plan": Command(plan.plan, "train"),
        "eval": Command(evaluation.evaluate, "train"),
        "compare": Command(evaluation.compare, "train"),
        "generate": Command(generation.generate, "train"),
        "export": Command(export.export, "train"),
        "inspect": Command(inspection.inspect, "train"),
        "check": Command(runs.check, "train"),
        "report": Command(runs.report, "train"),
        "track": Command(runs.track, "train"),
        "data": data.COMMANDS,
        "profile": Command(profile.profile, "train"),
        "bench": bench.COMMANDS,
        "doctor": Command(installation.doctor),
    },
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: words after ``nsa``; None takes those of this process.

    Returns:
        Exit code: 0 done, 1 ended without the wanted result, 2 a mistake in what the user gave or a
        machine that lacks something, 128 + n stopped by signal n.
    """
    with safe_output():
        return _main(list(sys.argv[1:] if argv is None else argv))


def _main(words: list[str]) -> int:
    try:
        try:
            return _dispatch(words)
        finally:
            # Not at the exit of Python, where a reader that has left can no longer be handled.
            sys.stdout.flush()
    except (UsageError, UserError) as error:
        return _say(str(error))
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # the reader of our output has left: `| head`
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())  # or Python would complain at its exit
            return EXIT_SIGNAL + SIGPIPE
        if error.errno not in _MACHINE:
            raise
        said = str(error.strerror)
        return _say(f"{said}: {error.filename}" if error.filename else said)
    except (RuntimeError, MemoryError) as error:
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


def parse(words: Sequence[str]) -> tuple[Callable[..., int], dict[str, Any]] | None:
    """See :func:`nsa.cli.commands.parse`."""
    return commands.parse(COMMANDS, words)


def _dispatch(words: Sequence[str]) -> int:
    found = parse(words)
    if found is None:
        return EXIT_USER_ERROR
    run, arguments = found
    return run(**arguments)


if __name__ == "__main__":
    sys.exit(main())
