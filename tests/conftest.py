"""For every test: one thread, the same random examples; at the end counts of provoked faults."""

from __future__ import annotations

import gc
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from multiprocessing import forkserver

import hypothesis
import pytest
import torch

# Two test processes share the machine; the programs that tests start inherit the setting.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

# The same examples in every run: a failing test keeps failing until it is repaired. Deadlines
# measure the machine, not the code.
hypothesis.settings.register_profile(
    "nsa", derandomize=True, database=None, deadline=None, max_examples=50
)
hypothesis.settings.load_profile("nsa")

# Processes are forked from one that has imported what they need: a start takes a tenth of a second
# instead of four. All tests of a process share it, whichever starts it, so none may give it a list
# of its own.
forkserver.set_forkserver_preload(["tests.faults.preload"])
forkserver.set_forkserver_preload = lambda modules_names: None

# What imports make is not garbage: no search for garbage goes through it, now or later.
gc.disable()

Count = Callable[..., None]


@pytest.fixture(autouse=True)
def forget_plans() -> None:
    """A test may change what launchers' plans are made of, such as sizes of tiles."""
    plan = sys.modules.get("nsa.ops._plan")
    for plans in [] if plan is None else plan.PLANS:
        plans.clear()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture
def count(record_property: Callable[[str, object], None]) -> Count:
    """Call it with a kind of fault, how many there were, how many went well, and more numbers."""

    def record(kind: str, number: int, well: int, **remarks: int) -> None:
        record_property("fault", [kind, number, well, remarks])

    return record


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    remarks: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        if report.when != "call":
            continue
        found = [value for name, value in report.user_properties if name == "fault"]
        path, _, name = report.nodeid.partition("::")
        if not found and path.startswith("tests/faults"):  # a test that provokes a single one
            kind = name.partition("[")[0].removeprefix("test_").replace("_", " ")
            found = [[kind, 1, int(report.passed), {}]]
        for kind, number, well, more in found:
            totals[kind][0] += number
            totals[kind][1] += well
            for remark, amount in more.items():
                remarks[kind][remark] += amount
    if totals:
        terminalreporter.section("provoked faults")
    for kind, (number, well) in sorted(totals.items()):
        more = "".join(
            f", {remark.replace('_', ' ')} {amount}" for remark, amount in remarks[kind].items()
        )
        terminalreporter.line(f"{kind}: {well} of {number}{more}")
