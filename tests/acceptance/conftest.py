"""Options, rows and the final table of the acceptance run; see CONTRIBUTING.md."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.train.environment import code_version
from tests.acceptance.cases import Setting
from tests.acceptance.programs import last_lines, say
from tests.acceptance.rows import QUICK, Row, append_row, table

ROWS = pytest.StashKey[list[Row]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("acceptance", "acceptance run")
    group.addoption("--out", type=Path, default=Path("runs/acceptance"), help="rows, runs, logs")
    group.addoption("--shards", type=Path, help="folder of prepared data (default: made here)")
    group.addoption("--commit", help="commit to record if the checkout has no git")


@pytest.fixture(scope="session")
def commit(request):
    """Commit of the code, with ``+changes`` if files of the package differ from it."""
    # Programs run in their own sessions: without this handler they would survive SIGTERM.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    code = code_version()
    found = code["commit"] or request.config.getoption("--commit")
    assert found, f"--commit must be given: {code['note']}"
    return f"{found}{'+changes' * bool(code['dirty'])}"


@pytest.fixture
def setting(request, case, commit):
    """Setting of the case on this machine; skipped if the case needs more GPUs."""
    number, option = torch.cuda.device_count(), request.config.getoption
    if case.num_gpus > number:
        pytest.skip(f"needs {case.num_gpus} GPUs, found {number}")
    gpu = torch.cuda.get_device_name(0) if number else "cpu"
    leg, shards = QUICK if QUICK in option("-m") else str(case.leg), option("--shards")
    out = option("--out").absolute()
    return Setting(case, out, leg, gpu, number, commit, shards and shards.absolute())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    setting = getattr(item, "funcargs", {}).get("setting")
    if call.when == "call" and isinstance(setting, Setting):
        row = setting.row(str(call.excinfo.value) if call.excinfo else "", call.duration)
        kind = QUICK if setting.leg == QUICK else f"leg-{setting.leg}"
        append_row(setting.out / f"{kind}.jsonl", row)
        item.config.stash.setdefault(ROWS, []).append(row)
        verdict = "passed" if row["passed"] else "FAILED"
        say(f"    {verdict} in {call.duration:.0f} s: {row['note']}")
        for line in () if row["passed"] else last_lines(setting.log, 15):
            say(f"    | {line}")
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if rows := terminalreporter.config.stash.get(ROWS, []):
        terminalreporter.section("acceptance")
        terminalreporter.line(table(rows))
