"""Set-up on a machine that is not as it should be: one line says what is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tools import lock, setup_env
from tools.setup_env import SetupError

ROOT = Path(__file__).resolve().parents[2]


def interpreter(folder: Path, name: str, version: str, *, status: int) -> Path:
    """A program that answers ``--version`` and every check of the version with ``status``."""
    path = folder / name
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "Python {version}" && exit 0\nexit {status}\n'
    )
    path.chmod(0o755)
    return path


def find_python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The script with only ``folder`` on its path."""
    command = ["/bin/sh", str(ROOT / "tools/find_python.sh"), *arguments]
    return subprocess.run(
        command, env={"PATH": str(folder)}, capture_output=True, text=True, check=False
    )


def test_a_fitting_python_is_found_behind_one_that_does_not_fit(tmp_path: Path) -> None:
    interpreter(tmp_path, "python3", "3.9.18", status=1)
    interpreter(tmp_path, "python3.11", "3.11.7", status=0)
    done = find_python(tmp_path)
    assert (done.returncode, done.stdout) == (0, "python3.11\n")


def test_no_fitting_python_is_one_line(tmp_path: Path) -> None:
    interpreter(tmp_path, "python3", "3.9.18", status=1)
    done = find_python(tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "must be installed" in done.stderr
    assert "got python3 (Python 3.9.18)." in done.stderr


@pytest.mark.parametrize(
    ("name", "got"), [("python3.9", "Python 3.9.18"), ("absent", "does not start")]
)
def test_the_python_given_is_checked(tmp_path: Path, name: str, got: str) -> None:
    interpreter(tmp_path, "python3.9", "3.9.18", status=1)
    done = find_python(tmp_path, name)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"make: PYTHON must be Python 3.11 or newer, got {name} ({got}).\n"


def test_this_python_fits() -> None:
    done = find_python(Path("/usr/bin"), sys.executable)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{sys.executable}\n", "")


def test_unreachable_index_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_FIND_LINKS": "",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_RETRIES": "1",
    }.items():
        monkeypatch.setenv(name, value)
    log = tmp_path / "install.log"
    nowhere = [
        "--index-url",
        "http://127.0.0.1:9/simple",
        "--target",
        str(tmp_path / "packages"),
        "nsa-absent",
    ]
    with pytest.raises(
        SetupError, match="a package index must be reachable, got no connection"
    ) as caught:
        setup_env.pip_install(Path(sys.executable), log, nowhere)
    assert "\n" not in str(caught.value)
    assert "127.0.0.1" in log.read_text()


@pytest.mark.parametrize(
    ("output", "line"),
    [
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
            "free disk space must",
        ),
        (
            "WARNING: Retrying after connection broken by 'NewConnectionError(...)'",
            "a package index must be reachable",
        ),
        (
            "Temporary failure in name resolution\nERROR: No matching distribution found",
            "a package index must be reachable",
        ),
        (
            "ERROR: Could not find a version for the requirement a==1 (from versions: none)",
            "got none that has a==1.",
        ),
        (
            "Collecting x\nERROR: Cannot install a and b\nERROR: Resolution",
            "got: ERROR: Cannot install a and b",
        ),
    ],
)
def test_diagnosis_of_pip(output: str, line: str) -> None:
    assert line in setup_env.diagnose(output)
    assert "\n" not in setup_env.diagnose(output)


def test_full_disk_is_one_line(tmp_path: Path) -> None:
    setup_env.check_disk(tmp_path, 0.0)
    with pytest.raises(
        SetupError,
        match=r"free disk space must suffice for the packages: 1000000000\.0 GB at .*, got .* GB\.$",
    ):
        setup_env.check_disk(tmp_path, 1e9)


def test_missing_packages_are_named(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_locks_hold_what_the_project_requires() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    library, dev = (
        {
            lock.normalised(re.split(r"[=<>;]", text)[0])
            for text in lock.requirements(project, *extras)
        }
        for extras in (lock.LIBRARY, ("dev",))
    )
    assert "datasets" in library
    assert "torch" in library
    assert "pytest" in dev
    for kind in ("cpu", "gpu"):
        assert library <= pins(kind).keys()
        assert not [name for name in pins(kind) if lock.CUDA.match(name)]
    assert dev <= pins("dev").keys() | pins("cpu").keys()
    assert not pins("dev").keys() & pins("cpu").keys()


def test_device_wheels_are_locked() -> None:
    lines = (ROOT / "tools/device_wheels.txt").read_text().splitlines()
    names = {line for line in lines if not line.startswith("#")}
    assert names <= pins("gpu").keys() | pins("dev").keys()


def planned(*arguments: str) -> str:
    """What make would do, without doing it."""
    command = ["make", "--dry-run", "-C", str(ROOT), *arguments]
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MAKE") and name != "PYTHON"
    }
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("target", ["train", "test"])
def test_environment_is_made_once(target: str, tmp_path: Path) -> None:
    assert "setup_env.py --make" in planned(target, f"VENV={tmp_path}")
    (tmp_path / "installed-cpu").touch()
    assert "setup_env.py --make" not in planned(target, f"VENV={tmp_path}")
    old = (ROOT / "requirements/cpu.lock").stat().st_mtime - 1
    # a lock file that is newer than the environment
    os.utime(tmp_path / "installed-cpu", (old, old))
    assert "setup_env.py --make" in planned(target, f"VENV={tmp_path}")


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    "target",
    ["train", "test", "pytest", "lint", "format", "test-mutants", "wheel", "device-wheels"],
)
def test_a_given_python_makes_no_environment(target: str, tmp_path: Path) -> None:
    plan = planned(target, f"VENV={tmp_path}", "PYTHON=some-python")
    assert "setup_env.py --make" not in plan
    assert f"{tmp_path}/bin" not in plan
    assert "some-python" in plan
