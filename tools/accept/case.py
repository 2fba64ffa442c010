"""A case of the acceptance run, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tools.accept.figures import Figures

Kind = Literal[
    "make train",
    "train",
    "eval",
    "generate",
    "report",
    "check",
    "profile",
    "resume",
    "resume on two",
    "foreign model",
]
# How much longer than expected a case may take, and how long in any case: GPUs and machines differ.
PATIENCE = 3.0
LEAST_LIMIT_S = 90.0


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        name: in the table, the field ``config`` of its row.
        kind: what is done.
        config: name of a configuration of the package, or a file of one.
        expected_s: how long it takes on an H200, seconds.
        num_gpus: GPUs that it needs.
        of: case whose run it works on.
        steps_on_two: optimizer steps where there are two GPUs, if the usual number does not fit
            into a leg there.
    """

    name: str
    kind: Kind
    config: str
    expected_s: float
    num_gpus: int = 1
    of: str = ""
    steps_on_two: int | None = None

    @property
    def limit_s(self) -> float:
        """Longest duration, seconds."""
        return max(PATIENCE * self.expected_s, LEAST_LIMIT_S)

    @property
    def trains_configuration(self) -> bool:
        """Whether it trains a configuration as it ships, which has a plan."""
        return self.kind in ("make train", "train")


@dataclass(frozen=True)
class Finding:
    """What a case found.

    Attributes:
        log: file with the output.
        figures: of its run.
        plan_mib: planned peak memory beside it.
        remarks: what was changed, and what else there is to know.
        faults: why it failed; none for a success.
    """

    log: Path
    figures: Figures = field(default_factory=Figures)
    plan_mib: float | None = None
    remarks: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
