"""A case of the acceptance run, where it runs, and what comes of it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa.errors import check, option
from nsa.train.config import TrainConfig
from nsa.train.environment import code_version
from tools.accept import programs
from tools.accept.rows import QUICK

PYTHON = sys.executable
NSA = (PYTHON, "-m", "nsa")
# How much longer than expected a case may take, and how long in any case: GPUs and machines differ.
PATIENCE = 3.0
LEAST_LIMIT_S = 90.0

_ASK = """
import json, torch
count = torch.cuda.device_count()
print(json.dumps([torch.cuda.get_device_name(0) if count else "cpu", count]))
"""


@dataclass(frozen=True)
class Machine:
    """What is measured, and on what.

    Attributes:
        gpu: name of the first GPU; ``cpu`` without one.
        num_gpus: how many there are.
        commit: of the checkout, with ``+changes`` where files of the package differ from it.
    """

    gpu: str
    num_gpus: int
    commit: str


def look_at_machine(commit: str | None) -> Machine:
    """This machine; another process asks for the GPUs, so that this one takes no memory there.

    Args:
        commit: to record where the checkout has no git.

    Raises:
        UserError: the commit is given although git knows it, or neither knows it.
    """
    code = code_version()
    known = code["commit"]
    rule = "be left out where git knows it" if known else f"be given ({code['note']})"
    check((commit is None) == bool(known), "accept", "--commit", rule, commit)
    ask = [PYTHON, "-c", _ASK]
    done = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=120)
    gpu, count = json.loads(done.stdout.splitlines()[-1])
    return Machine(gpu, count, f"{known or commit}{'+changes' * bool(code['dirty'])}")


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        name: the field ``config`` of its row. ``78m: eval`` works on the run of the case ``78m``.
        config: name of a configuration of the package, or a file of one.
        do: runs it.
        expected_s: how long it takes on an H200, seconds.
        num_gpus: GPUs that it needs.
        lane: cases that are not timed run side by side, but those of one lane one after the other.
    """

    name: str
    config: str
    do: Callable[[Setting], Result]
    expected_s: float
    num_gpus: int = 1
    lane: str = ""

    @property
    def limit_s(self) -> float:
        """Longest duration, seconds."""
        return max(PATIENCE * self.expected_s, LEAST_LIMIT_S)


@dataclass(frozen=True)
class Result:
    """What came of a case.

    Attributes:
        figures: fields of its row, by name.
        remarks: what was changed, and what else there is to know.
        faults: why it failed; none for a success.
    """

    figures: Mapping[str, Any] = field(default_factory=dict)
    remarks: Sequence[str] = ()
    faults: Sequence[str] = ()


@dataclass(frozen=True)
class Setting:
    """Where and how a case runs.

    Attributes:
        case: what is run.
        machine: what is measured.
        leg: number of the leg, or ``quick``.
        out: folder of all legs.
        deadline: when the leg's time is used up, by ``time.monotonic``.
        shards: prepared data for configurations that train on shards; None to make them here.
    """

    case: Case
    machine: Machine
    leg: str
    out: Path
    deadline: float
    shards: Path | None = None

    @property
    def is_quick(self) -> bool:
        """Whether this is the quick run."""
        return self.leg == QUICK

    @property
    def folder(self) -> Path:
        """Folder of the case."""
        return self._folder(self.case.name)

    @property
    def trained(self) -> Path:
        """Run folder of the case that this one works on."""
        return self._folder(self.case.name.partition(":")[0]) / "run"

    @property
    def log(self) -> Path:
        """Output of the case."""
        return self.folder / "log.txt"

    @property
    def seconds_left(self) -> float:
        """Limit of the case, or what is left of the leg's time where that is less."""
        return max(min(self.case.limit_s, self.deadline - time.monotonic()), 0.0)

    def start(
        self,
        words: Sequence[str],
        log: Path | None = None,
    ) -> AbstractContextManager[subprocess.Popen[bytes]]:
        """Start a program, see :func:`tools.accept.programs.start`."""
        return programs.start(words, log or self.log, caches(self.out / "caches"))

    def run(
        self,
        words: Sequence[str],
        log: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> str:
        """Run a program; what went wrong, see :func:`tools.accept.programs.wait`."""
        env = caches(self.out / "caches") if env is None else env
        return programs.run(words, log or self.log, self.seconds_left, env)

    def _folder(self, name: str) -> Path:
        """Folder of a case; those of a quick run lie apart."""
        kind = "quick" if self.is_quick else "full"
        return self.out / kind / name.replace(": ", "-").replace(" ", "-")


def caches(folder: Path) -> dict[str, str]:
    """Environment under which Triton and PyTorch keep what they compile in a folder."""
    return {
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }


def changes(config: TrainConfig, **wanted: int) -> list[str]:
    """Command line that gives settings the values that are wanted, where they have others."""
    differing = {name: value for name, value in wanted.items() if getattr(config, name) != value}
    return [word for name, value in differing.items() for word in (option(name), str(value))]


def train_words(processes: int) -> list[str]:
    """``nsa train``, with torchrun for several processes."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [PYTHON, *(torchrun if processes > 1 else []), *NSA[1:], "train"]
