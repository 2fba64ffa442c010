"""Set-up on a machine that lacks something: one line says what."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tools import lock, setup_env
from tools.setup_env import SetupError

ROOT = Path(__file__).resolve().parents[2]


def find_python(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Status and output of the script with only ``folder`` on its path."""
    command = ["/bin/sh", str(ROOT / "tools/find_python.sh"), *arguments]
    path = {"PATH": str(folder)}
    done = subprocess.run(command, env=path, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def old_python(tmp_path: Path) -> Callable[..., Path]:
    """Makes programs that answer ``--version`` and fail or pass every check of the version."""

    def make(name: str = "python3", version: str = "3.9.18", status: int = 1) -> Path:
        path = tmp_path / name
        answer = f'[ "$1" = --version ] && echo "Python {version}" && exit 0'
        path.write_text(f"#!/bin/sh\n{answer}\nexit {status}\n")
        path.chmod(0o755)
        return tmp_path

    return make


def test_a_fitting_python_is_found_after_one_that_does_not_fit(old_python):
    old_python()
    folder = old_python("python3.11", "3.11.7", status=0)
    assert find_python(folder) == (0, "python3.11\n", "")
    assert find_python(Path("/usr/bin"), sys.executable) == (0, f"{sys.executable}\n", "")


def test_no_fitting_python_is_one_line(old_python):
    status, out, err = find_python(old_python())
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "must be installed" in err
    assert "got python3 (Python 3.9.18)." in err


@pytest.mark.parametrize(
    ("name", "got"), [("python3", "Python 3.9.18"), ("absent", "does not start")]
)
def test_the_python_given_is_checked(old_python, name, got):
    error = f"make: PYTHON must be Python 3.11 or newer, got {name} ({got}).\n"
    assert find_python(old_python(), name) == (1, "", error)


def test_unreachable_index_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_RETRIES", "1")
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.setenv(name, "")
    log, packages = tmp_path / "install.log", str(tmp_path / "packages")
    nowhere = ["--index-url", "http://127.0.0.1:9/simple", "--target", packages, "nsa-absent"]
    rule = "a package index must be reachable, got no connection"
    with pytest.raises(SetupError, match=rule) as caught:
        setup_env.pip_install(Path(sys.executable), log, *nowhere)
    assert "\n" not in str(caught.value)
    assert "127.0.0.1" in log.read_text()


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("ERROR: OSError: [Errno 28] No space left on device", "free disk space must"),
        ("WARNING: Retrying after 'NewConnectionError(...)'", "a package index must be reachable"),
        ("Temporary failure in name resolution\nERROR: x", "a package index must be reachable"),
        (
            "ERROR: Could not find a version for the requirement a==1 (from versions: none)",
            "got none that has a==1.",
        ),
        ("Collecting x\nERROR: Cannot install a\nERROR: y", "got: ERROR: Cannot install a"),
    ],
)
def test_diagnosis_of_pip(output, line):
    assert line in setup_env.diagnose(output)
    assert "\n" not in setup_env.diagnose(output)


def test_full_disk_is_one_line(tmp_path):
    setup_env.check_disk(tmp_path, 0.0)
    rule = r"free disk space must suffice for the packages: 1000000000\.0 GB at .*, got .* GB\.$"
    with pytest.raises(SetupError, match=rule):
        setup_env.check_disk(tmp_path, 1e9)


def test_missing_packages_are_named(capsys):
    setup_env.check_modules(["torch", "yaml"])
    with pytest.raises(SetupError, match="without absent_a, absent_b"):
        setup_env.check_modules(["torch", "absent_a", "absent_b"])
    assert setup_env.main(["--check", "train"]) == 0
    assert capsys.readouterr().err == ""


def pins(name: str) -> lock.Pins:
    """A lock file's packages; each line pins one version."""
    found = {}
    for line in (ROOT / f"requirements/{name}.lock").read_text().splitlines():
        if not line.startswith("#"):
            match = re.fullmatch(r"([a-z0-9-]+)==([\w.]+)(; sys_platform == 'linux')?", line)
            assert match, line
            found[match[1]] = match[2]
    return found


def test_locks_hold_what_the_project_requires():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def required(*extras: str) -> set[str]:
        texts = lock.requirements(project, *extras)
        return {lock.normalised(re.split(r"[=<>;]", text)[0]) for text in texts}

    library, dev = required(*lock.LIBRARY), required("dev")
    assert library >= {"datasets", "torch"}
    assert "pytest" in dev
    for kind in ("cpu", "gpu"):
        assert library <= pins(kind).keys()
        assert not [name for name in pins(kind) if lock.CUDA.match(name)]
    assert dev <= pins("dev").keys() | pins("cpu").keys()
    assert not pins("dev").keys() & pins("cpu").keys()


def test_device_wheels_are_locked():
    lines = (ROOT / "tools/device_wheels.txt").read_text().splitlines()
    names = {line for line in lines if not line.startswith("#")}
    assert names <= pins("gpu").keys() | pins("dev").keys()


def planned(*arguments: str) -> str:
    """What make would do, without doing it."""
    command = ["make", "--dry-run", "-C", str(ROOT), *arguments]
    left_out = ("MAKE", "PYTHON")
    env = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


MAKES = "setup_env.py --make"


@pytest.mark.parametrize("target", ["train", "test"])
def test_environment_is_made_once(target, tmp_path):
    assert MAKES in planned(target, f"VENV={tmp_path}")
    (tmp_path / "installed-cpu").touch()
    assert MAKES not in planned(target, f"VENV={tmp_path}")
    old = (ROOT / "requirements/cpu.lock").stat().st_mtime - 1
    os.utime(tmp_path / "installed-cpu", (old, old))  # the lock file is newer than the environment
    assert MAKES in planned(target, f"VENV={tmp_path}")


@pytest.mark.parametrize(
    "target",
    ["train", "test", "pytest", "lint", "format", "test-mutants", "wheel", "device-wheels"],
)
def test_a_given_python_makes_no_environment(target, tmp_path):
    plan = planned(target, f"VENV={tmp_path}", "PYTHON=some-python")
    assert MAKES not in plan
    assert f"{tmp_path}/bin" not in plan
    assert "some-python" in plan
