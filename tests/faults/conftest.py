"""Counts of provoked faults: one line for each kind at the end of the tests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import pytest

Count = Callable[..., None]


@pytest.fixture
def count(record_property: Callable[[str, object], None]) -> Count:
    """Call it with a kind, how many there were, how many went well, and remarks with numbers that are summed up."""

    def record(kind: str, number: int, well: int, **remarks: int) -> None:
        record_property("fault", [kind, number, well, remarks])

    return record


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    remarks: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties:
            if name == "fault" and report.when == "call":
                kind, number, well, more = value
                totals[kind][0] += number
                totals[kind][1] += well
                for remark, amount in more.items():
                    remarks[kind][remark] += amount
    if totals:
        terminalreporter.section("provoked faults")
    for kind, (number, well) in sorted(totals.items()):
        more = "".join(f", {remark.replace('_', ' ')} {amount}" for remark, amount in remarks[kind].items())
        terminalreporter.line(f"{kind}: {well} of {number}{more}")
