"""Cases that use a trained run as a user does: evaluate, generate, report, check; and a profile."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.accept.case import Case, Finding
from tools.accept.setting import NSA, Setting

PROMPT = "def "
NEW_TOKENS = 64
QUICK_WINDOWS = 64

# What a command must leave: given its log and folder, a remark, or nothing where it is missing.
Result = Callable[[str, Path], str]


def evaluate(case: Case, setting: Setting) -> Finding:
    """``nsa eval``."""
    windows = ["--windows", str(QUICK_WINDOWS)] if setting.is_quick else []
    return _on_run(case, setting, ["eval"], windows, lambda text, run: _found(r"loss: .+", text))


def generate(case: Case, setting: Setting) -> Finding:
    """``nsa generate``."""

    def written(text: str, run: Path) -> str:
        _, _, continued = text.partition(f"\n{PROMPT}")
        return f"{len(continued)} characters" if continued.strip() else ""

    words = ["--prompt", PROMPT, "--max-new-tokens", str(NEW_TOKENS)]
    return _on_run(case, setting, ["generate"], words, written)


def report(case: Case, setting: Setting) -> Finding:
    """``nsa report``."""

    def written(text: str, run: Path) -> str:
        page = run / "report.html"
        size = page.stat().st_size if page.exists() else 0
        return f"{size:,} bytes" if size else ""

    return _on_run(case, setting, ["report"], [], written)


def check_run(case: Case, setting: Setting) -> Finding:
    """``nsa check``."""

    def agrees(text: str, run: Path) -> str:
        return _found("everything agrees", text)

    return _on_run(case, setting, ["check"], [], agrees)


def profile(case: Case, setting: Setting) -> Finding:
    """``nsa profile``."""
    folder = setting.empty_folder(case.name)
    words = ["profile", case.config, "--run-dir", str(folder / "run")]

    def written(text: str, run: Path) -> str:
        names = ("stages.json", "kernels.txt", "trace.json.gz")
        return ", ".join(names) if all((run / "profile" / name).exists() for name in names) else ""

    return _done(case, setting, words, folder / "run", written)


def _on_run(
    case: Case,
    setting: Setting,
    command: Sequence[str],
    more: Sequence[str],
    result: Result,
) -> Finding:
    """A command on the run of another case."""
    folder, run = setting.empty_folder(case.name), setting.folder(case.of) / "run"
    if not (run / "checkpoints").is_dir():
        return Finding(folder / "log.txt", faults=(f"no run of case {case.of} in {run}",))
    return _done(case, setting, [*command, str(run), *more], run, result)


def _done(case: Case, setting: Setting, words: Sequence[str], run: Path, result: Result) -> Finding:
    log = setting.folder(case.name) / "log.txt"
    ended = setting.run([*NSA, *words], log, case.limit_s)
    remark = result(log.read_text(encoding="utf-8", errors="replace"), run)
    fault = ended.fault or ("" if remark else "it did not leave what it should")
    remarks = tuple(filter(None, (f"nsa {words[0]}", remark)))
    return Finding(log, remarks=remarks, faults=(fault,) if fault else ())


def _found(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found[0] if found else ""
