"""The cases of the acceptance run, in legs that an H200 finishes in less than nine minutes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nsa.errors import check
from tools.accept.case import Case
from tools.accept.commands import command, program
from tools.accept.resume import killed_and_resumed, resumed_on_two
from tools.accept.rows import QUICK
from tools.accept.training import make_train, train

PLAN_S = 8.0  # of `nsa plan`, before each case that trains a configuration
TRAINING = (train, make_train)


@dataclass(frozen=True)
class Leg:
    """Cases of a run of this tool: first those that are timed, then all others side by side.

    Attributes:
        name: its number, or ``quick``.
        cases: in order; a case that works on the run of another one comes after it.
    """

    name: str
    cases: tuple[Case, ...]

    def timed(self, num_gpus: int) -> list[Case]:
        """Trainings that need the GPU for themselves; without one, the CPU."""
        trainings = [case for case in self.cases if case.do in TRAINING]
        return [case for case in trainings if case.num_gpus or not num_gpus]

    def lanes(self, num_gpus: int) -> list[list[Case]]:
        """The others; those of a list run one after the other."""
        timed, found = self.timed(num_gpus), dict[str, list[Case]]()
        for case in self.cases:
            if case not in timed:
                found.setdefault(case.lane or case.name, []).append(case)
        return [*found.values()]

    @property
    def expected_s(self) -> float:
        """How long it takes on an H200, seconds, plans included."""
        timed = sum(case.expected_s + PLAN_S for case in self.timed(1))
        lanes = (sum(case.expected_s for case in lane) for lane in self.lanes(1))
        return timed + max(lanes, default=0.0)


def _train(config: str, expected_s: float, num_gpus: int = 1) -> Case:
    return Case(config, config, train, expected_s, num_gpus)


_MAKE_TRAIN = Case("make train", "gpu-small", make_train, 50)
_GENERATE = "generate {run} --prompt 'def ' --max-new-tokens 64"
_WEIGHTS = "{run}/../exported/model.safetensors"
# What is done with the trained run of 78m: what follows `nsa`, and what it must leave.
_DONE_WITH_78M = tuple(
    Case(f"78m: {name}", "78m", do, expected_s, lane="78m")
    for name, do, expected_s in (
        ("eval", command("eval {run}", says=r"loss: .+"), 20),
        ("generate", command(_GENERATE, says=r"\ndef \s*\S.*"), 20),
        ("report", command("report {run}", "{run}/report.html"), 8),
        ("check", command("check {run}", says="everything agrees"), 8),
        ("export", command("export {run} {run}/../exported", _WEIGHTS), 15),
        ("loaded", program("exported", "{run}", "{folder}/exported"), 30),
    )
)
_PROFILE = Case(
    "78m: profile",
    "78m",
    command(
        "profile 78m --run-dir {folder}/run",
        *(
            "{folder}/run/profile/" + name
            for name in ("stages.json", "kernels.txt", "trace.json.gz")
        ),
    ),
    60,
)
_RESUME = Case("78m: killed and resumed", "78m", killed_and_resumed, 100)
_RESUME_ON_TWO = Case("78m: resumed on two GPUs", "78m", resumed_on_two, 110, num_gpus=2)
_FOREIGN = Case("foreign model", "", program("foreign_model"), 110)

QUICK_LEG = Leg(
    QUICK,
    (
        _MAKE_TRAIN,
        _train("78m", 40),
        *_DONE_WITH_78M,
        _train("78m-shared", 40),
        _train("117m", 40),
        _RESUME,
        _FOREIGN,
    ),
)
LEGS = (
    Leg(
        "1",
        (
            _MAKE_TRAIN,
            _train("78m", 50),
            *_DONE_WITH_78M,
            _PROFILE,
            _train("78m-dense", 50),
            _train("117m", 50),
            _train("117m-dense", 50),
            _train("cpu-small", 60, num_gpus=0),
            _train("cpu-small-dense", 35, num_gpus=0),
        ),
    ),
    Leg(
        "2",
        (
            _train("gpu-small", 45),
            _train("gpu-small-dense", 40),
            _train("78m-shared", 50),
            _train("78m-shared-dense", 50),
            _train("117m-fineweb", 90),
            _train("117m-fineweb-dense", 60),
            _RESUME,
            _FOREIGN,
        ),
    ),
    Leg("3", (_train("1b", 300, num_gpus=2),)),
    Leg("4", (_train("1b-dense", 280, num_gpus=2),)),
    Leg("5", (_RESUME_ON_TWO,)),
)


def chosen_legs(*, quick: bool, leg: str | None, only: Sequence[str]) -> list[Leg]:
    """The legs to run, with the chosen cases.

    Args:
        quick: the quick run instead of the full one.
        leg: number of one leg; None for all of them.
        only: names of cases; empty for all.

    Raises:
        UserError: there is no such leg or case.
    """
    legs = [QUICK_LEG] if quick else list(LEGS)
    if leg is not None:
        names = ", ".join(one.name for one in legs)
        legs = [one for one in legs if one.name == leg]
        check(bool(legs), "accept", "--leg", f"be one of {names}", leg)
    known = [case.name for one in legs for case in one.cases]
    for name in only:
        check(name in known, "accept", "--only", f"name cases: {', '.join(known)}", name)
    chosen = (
        replace(one, cases=tuple(case for case in one.cases if case.name in only or not only))
        for one in legs
    )
    return [one for one in chosen if one.cases]
