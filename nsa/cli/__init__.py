"""The command ``nsa``: trains, evaluates and generates, reads runs, measures, checks the machine.

Heavy imports are inside the commands that need them. A mistake of the user ends in one line and
exit code 2; a bug keeps its traceback.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from nsa.cli import bench, commands, data, generation, plan, runs, train
from nsa.cli.commands import Command, Group
from nsa.errors import UsageError, UserError
from nsa.terminal import safe_output

EXIT_USER_ERROR, EXIT_SIGNAL = 2, 128
SIGPIPE = 13  # Windows has no name for it

_BUGS = (None, errno.EBADF, errno.EFAULT, errno.EINVAL)  # other OSErrors the user can act on

COMMANDS = Group(
    "Native Sparse Attention: train a language model, measure it.\nStart with: nsa demo",
    {
        "demo": Command(generation.demo, "demo"),
        "train": Command(train.train, "train"),
        "configs": Command(plan.configs),
        "plan": Command(plan.plan, "train"),
        "eval": Command(runs.evaluate, "train"),
        "compare": Command(runs.compare, "train"),
        "generate": Command(generation.generate, "train"),
        "export": Command(runs.export, "train"),
        "convert": Command(runs.convert, "train"),
        "inspect": Command(runs.inspect, "train"),
        "check": Command(runs.check, "train"),
        "report": Command(runs.report, "train"),
        "track": Command(runs.track, "train"),
        "data": data.COMMANDS,
        "profile": Command(train.profile, "train"),
        "bench": bench.COMMANDS,
        "doctor": Command(plan.doctor),
    },
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: words after ``nsa``; None takes those of this process.

    Returns:
        Exit code: 0 success, 1 failure, 2 mistake of the user or missing part of the machine,
        128 + n ended by signal n.
    """
    with safe_output():
        return _main(list(sys.argv[1:] if argv is None else argv))


def _main(words: list[str]) -> int:
    try:
        try:
            return _run(words)
        finally:
            # At the exit of Python a closed pipe could no longer be handled.
            sys.stdout.flush()
    except (UsageError, UserError) as error:
        return _say(str(error))
    except BrokenPipeError:  # the reader of the output has ended: `| head`
        # Without it Python would complain at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_SIGNAL + SIGPIPE
    except OSError as error:
        if error.errno in _BUGS:
            raise
        return _say(str(error.strerror) + (f": {error.filename}" if error.filename else ""))
    except (RuntimeError, MemoryError) as error:
        from nsa.train.watch.out_of_memory import is_out_of_memory, memory_use

        if not is_out_of_memory(error):
            raise
        return _say(f"{memory_use(error)}. Take fewer or shorter sequences at a time.")
    except KeyboardInterrupt:
        print("nsa: interrupted", file=sys.stderr)
        return EXIT_SIGNAL + signal.SIGINT


def _say(line: str) -> int:
    """Print a mistake as one line that names the command once."""
    print(line if line.startswith(("nsa ", "nsa:")) else f"nsa: {line}", file=sys.stderr)
    return EXIT_USER_ERROR


def parse(words: Sequence[str]) -> tuple[Callable[..., int], dict[str, Any]] | None:
    """Find the function that the words after ``nsa`` run, and its arguments; None after help."""
    return commands.parse(COMMANDS, words)


def _run(words: Sequence[str]) -> int:
    found = parse(words)
    return EXIT_USER_ERROR if found is None else found[0](**found[1])


if __name__ == "__main__":
    sys.exit(main())
