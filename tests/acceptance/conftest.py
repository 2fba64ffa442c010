"""Options, rows and the final table of the acceptance run; see CONTRIBUTING.md."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nsa.train.environment import code_version
from tests.acceptance.cases import Case, Setting
from tests.acceptance.programs import last_lines, say
from tests.acceptance.rows import QUICK, Row, append_row, table

ASK = "import torch; n = torch.cuda.device_count(); "
ASK += "print(torch.cuda.get_device_name(0) if n else 'cpu', n, sep=chr(10))"
ROWS = pytest.StashKey[list[Row]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("acceptance", "acceptance run")
    group.addoption("--quick", action="store_true", help="60 steps of the main configurations")
    group.addoption("--leg", type=int, help="number of one leg of the full run")
    group.addoption("--out", type=Path, default=Path("runs/acceptance"), help="rows, runs, logs")
    group.addoption("--shards", type=Path, help="folder of prepared data (default: made here)")
    group.addoption("--commit", help="commit to record if the checkout has no git")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    quick, leg = config.getoption("--quick", False), config.getoption("--leg", None)

    def is_left_out(item: pytest.Item) -> bool:
        case = getattr(getattr(item, "callspec", None), "params", {}).get("case")
        return isinstance(case, Case) and (quick > case.quick or leg not in (None, case.leg))

    config.hook.pytest_deselected(items=[item for item in items if is_left_out(item)])
    items[:] = [item for item in items if not is_left_out(item)]


@pytest.fixture(scope="session")
def machine(request: pytest.FixtureRequest) -> tuple[str, int, str]:
    """Name of the GPU (``cpu`` without one), number of GPUs, and commit."""
    # Programs run in sessions of their own: without this, SIGTERM would leave them behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    code = code_version()
    commit = code["commit"] or request.config.getoption("--commit")
    assert commit, f"--commit must be given: {code['note']}"
    # Another process asks, so that this one needs no GPU memory.
    said = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    gpu, number = said.stdout.splitlines()[-2:]
    return gpu, int(number), commit + "+changes" * bool(code["dirty"])


@pytest.fixture
def setting(request: pytest.FixtureRequest, case: Case, machine: tuple[str, int, str]) -> Setting:
    """The case on this machine; skipped if it needs more GPUs."""
    gpu, number, commit = machine
    if case.num_gpus > number:
        pytest.skip(f"needs {case.num_gpus} GPUs, found {number}")
    option = request.config.getoption
    leg, shards = QUICK if option("--quick") else str(case.leg), option("--shards")
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
