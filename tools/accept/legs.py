"""The cases of the acceptance run, in legs that an H200 finishes in less than nine minutes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nsa.errors import check
from tools.accept.case import Case, Finding, Kind
from tools.accept.commands import check_run, evaluate, generate, profile, report
from tools.accept.foreign import foreign_model
from tools.accept.resume import killed_and_resumed, resumed_on_two
from tools.accept.rows import QUICK
from tools.accept.setting import Setting
from tools.accept.training import make_train, train

KINDS: dict[Kind, Callable[[Case, Setting], Finding]] = {
    "make train": make_train,
    "train": train,
    "eval": evaluate,
    "generate": generate,
    "report": report,
    "check": check_run,
    "profile": profile,
    "resume": killed_and_resumed,
    "resume on two": resumed_on_two,
    "foreign model": foreign_model,
}


@dataclass(frozen=True)
class Leg:
    """Cases that run one after the other.

    Attributes:
        name: its number, or ``quick``.
        cases: in order; a case that works on the run of another one comes behind it.
    """

    name: str
    cases: tuple[Case, ...]

    @property
    def expected_s(self) -> float:
        """How long it takes on an H200, seconds, plans included."""
        plans = sum(case.trains_configuration for case in self.cases)
        return sum(case.expected_s for case in self.cases) + 8.0 * plans


def _make_train(num_gpus: int, config: str) -> Case:
    return Case("make train", "make train", config, 75, num_gpus=num_gpus)


def _train(
    config: str,
    expected_s: float,
    *,
    num_gpus: int = 1,
    steps_on_two: int | None = None,
) -> Case:
    return Case(config, "train", config, expected_s, num_gpus, steps_on_two=steps_on_two)


def _run_of_78m(name: str, kind: Kind, expected_s: float) -> Case:
    return Case(f"78m: {name}", kind, "78m", expected_s, of="78m")


_EVAL, _GENERATE = _run_of_78m("eval", "eval", 30), _run_of_78m("generate", "generate", 25)
_REPORT, _CHECK = _run_of_78m("report", "report", 8), _run_of_78m("check", "check", 8)
_PROFILE = _run_of_78m("profile", "profile", 60)
_RESUME = _run_of_78m("killed and resumed", "resume", 130)
_RESUME_ON_TWO = Case("78m: resumed on two GPUs", "resume on two", "78m", 110, num_gpus=2)
_FOREIGN = Case("foreign model", "foreign model", "", 110)

QUICK_LEG = Leg(
    QUICK,
    (
        _make_train(1, "gpu-small"),
        _train("78m", 50),
        _EVAL,
        _GENERATE,
        _REPORT,
        _CHECK,
        _train("117m", 50),
        _RESUME,
        _FOREIGN,
    ),
)
LEGS = (
    Leg(
        "1",
        (
            _make_train(1, "gpu-small"),
            _train("78m", 65),
            _EVAL,
            _GENERATE,
            _REPORT,
            _CHECK,
            _PROFILE,
            _train("cpu-small", 60, num_gpus=0),
            _train("cpu-small-dense", 35, num_gpus=0),
        ),
    ),
    Leg(
        "2",
        (
            _train("78m-dense", 50),
            _train("117m", 65),
            _train("117m-dense", 60),
            _train("gpu-small", 45),
            _train("gpu-small-dense", 40),
            _RESUME,
        ),
    ),
    Leg(
        "3",
        (
            _train("117m-fineweb", 90),
            _train("117m-fineweb-dense", 60),
            _FOREIGN,
        ),
    ),
    Leg("4", (_train("1b", 300, num_gpus=2, steps_on_two=100),)),
    Leg("5", (_train("1b-dense", 280, num_gpus=2, steps_on_two=100),)),
    Leg("6", (_RESUME_ON_TWO,)),
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
        names = [one.name for one in legs]
        check(leg in names, "accept", "--leg", f"be one of {', '.join(names)}", leg)
        legs = [one for one in legs if one.name == leg]
    known = [case.name for one in legs for case in one.cases]
    for name in only:
        check(name in known, "accept", "--only", f"name cases: {', '.join(known)}", name)
    found = []
    for one in legs:
        cases = tuple(case for case in one.cases if case.name in only or not only)
        if cases:
            found.append(Leg(one.name, cases))
    return found
