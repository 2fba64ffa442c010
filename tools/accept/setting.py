"""Where and how a leg runs: the machine, its folder, its time, and what its cases share."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nsa.errors import check
from nsa.train.environment import code_version
from tools.accept.programs import Ended, Program, run_program
from tools.accept.rows import QUICK

PYTHON = sys.executable
NSA = (PYTHON, "-m", "nsa")
TORCHRUN = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")

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
    """This machine; a process of its own asks for the GPUs, so that this one takes no memory there.

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


@dataclass
class Setting:
    """What the cases of a leg share.

    Attributes:
        out: folder of the legs.
        machine: what is measured.
        leg: number of the leg, or ``quick``.
        deadline: when the leg's time is used up, by ``time.monotonic``.
        shards: prepared data for configurations that train on shards; None to make them here.
        plans: peak memory by configuration, MiB; None where ``nsa plan`` failed.
        say: told what happens, line by line.
    """

    out: Path
    machine: Machine
    leg: str
    deadline: float
    shards: Path | None = None
    plans: dict[str, float | None] = field(default_factory=dict)
    say: Callable[[str], None] = print

    @property
    def is_quick(self) -> bool:
        """Whether this is the quick run."""
        return self.leg == QUICK

    @property
    def cases(self) -> Path:
        """Folder of the cases; those of a quick run lie apart."""
        return self.out / ("quick" if self.is_quick else "full")

    def folder(self, name: str) -> Path:
        """Folder of a case."""
        return self.cases / name.replace(": ", "-").replace(" ", "-")

    def empty_folder(self, name: str) -> Path:
        """The same, without what an earlier run of the case has left there."""
        folder = self.folder(name)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    @property
    def env(self) -> dict[str, str]:
        """Compile caches that all cases share."""
        return caches(self.out / "caches")

    def seconds_left(self, limit_s: float) -> float:
        """A limit, or what is left of the leg where that is less."""
        return max(min(limit_s, self.deadline - time.monotonic()), 0.0)

    def start(self, words: Sequence[str], log: Path) -> Program:
        """Start a program."""
        return Program(words, log, self.env)

    def run(
        self,
        words: Sequence[str],
        log: Path,
        limit_s: float,
        env: Mapping[str, str] | None = None,
    ) -> Ended:
        """Run a program to its end, its limit or the end of the leg's time."""
        env = self.env if env is None else env
        return run_program(words, log, self.seconds_left(limit_s), env=env, say=self.say)


def caches(folder: Path) -> dict[str, str]:
    """Environment under which Triton and PyTorch keep what they compile in a folder."""
    return {
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
