"""Cases that run one command and look at what it prints and writes."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tools.accept.case import NSA, PYTHON, Result, Setting
from tools.accept.programs import last_lines


def command(text: str, *files: str, says: str = "") -> Callable[[Setting], Result]:
    """A case that runs a command as a user does.

    Args:
        text: what follows ``nsa``; ``{run}`` is the run that the case works on, ``{folder}`` the
            folder of the case.
        files: what it must write.
        says: pattern of what it must print; what is found goes into the note.
    """

    def run(setting: Setting) -> Result:
        places = {"run": setting.trained, "folder": setting.folder}
        words = [word.format(**places) for word in shlex.split(text)]
        faults = list(filter(None, [setting.run([*NSA, *words])]))
        found = re.search(says, setting.log.read_text(encoding="utf-8", errors="replace"))
        paths = [Path(file.format(**places)) for file in files]
        faults += [] if found else [f"it did not print {says!r}"]
        faults += [f"it did not write {path}" for path in paths if not path.is_file()]
        results = [path.name for path in paths] + [found[0].strip() if found else ""]
        return Result(remarks=[f"nsa {words[0]}", *filter(None, results)], faults=faults)

    return run


def program(name: str, *words: str) -> Callable[[Setting], Result]:
    """A case that runs a module of :mod:`tools.accept`, which prints the result.

    Args:
        name: of the module.
        words: its arguments; ``{run}`` is the run that the case works on, ``{folder}`` the folder
            that the cases of that run share.
    """

    def run(setting: Setting) -> Result:
        places = {"run": setting.trained, "folder": setting.trained.parent}
        given = [word.format(**places) for word in words]
        fault = setting.run([PYTHON, "-m", f"tools.accept.{name}", *given])
        found = [line for line in last_lines(setting.log, 50) if line.startswith("{")]
        if not found:
            return Result(faults=[fault or "it printed no result"])
        result = Result(**json.loads(found[-1]))
        return replace(result, faults=result.faults or [fault] * bool(fault))

    return run
