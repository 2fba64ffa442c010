"""Environments and lock files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAKES = "-m venv --clear"
LIBRARY = ("train", "data", "bench", "hf")  # extras in cpu.lock and gpu.lock


def make(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Result of make, without the variables of a make around this test."""
    left_out = ("MAKE", "PYTHON")
    own = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    command = ["/usr/bin/make", "-C", str(ROOT), *arguments]
    return subprocess.run(command, env={**own, **env}, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("target", ["train", "test"])
def test_environment_is_made_once(target, tmp_path):
    assert MAKES in make("-n", target, f"VENV={tmp_path}").stdout
    (tmp_path / "installed-cpu").touch()
    assert MAKES not in make("-n", target, f"VENV={tmp_path}").stdout
    old = (ROOT / "requirements/cpu.lock").stat().st_mtime - 1
    os.utime(tmp_path / "installed-cpu", (old, old))  # the lock file is newer than the environment
    assert MAKES in make("-n", target, f"VENV={tmp_path}").stdout


@pytest.mark.parametrize("target", ["train", "test", "pytest", "lint", "accept", "device-wheels"])
def test_a_given_python_makes_no_environment(target, tmp_path):
    plan = make("-n", target, f"VENV={tmp_path}", "PYTHON=some-python").stdout
    assert MAKES not in plan
    assert f"{tmp_path}/bin" not in plan
    assert "some-python" in plan


def test_the_first_python_that_fits_makes_the_environment(tmp_path):
    programs = {"python3": "exit 1", "python3.13": 'echo "$0" "$@"; test "$1" = -c || exit 9'}
    for name, script in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    words = f"VENV={tmp_path}/venv", "KIND=cpu", f"{tmp_path}/venv/installed-cpu"
    done = make(*words, PATH=str(tmp_path))
    assert f"python3.13 -m venv --clear {tmp_path}/venv\n" in done.stdout
    done = make(*words, "PYTHONS=python3", PATH=str(tmp_path))
    assert "make: Python 3.11 or newer with its venv module must be installed" in done.stderr


def pins(name: str) -> dict[str, str]:
    """Packages of a lock file; each line pins one version."""
    found = {}
    for line in (ROOT / f"requirements/{name}.lock").read_text().splitlines():
        if not line.startswith("#"):
            match = re.fullmatch(r"([a-z0-9-]+)==([\w.]+)(; sys_platform == 'linux')?", line)
            assert match, line
            found[match[1]] = match[2]
    return found


def test_locks_have_what_the_project_requires():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def required(*extras):
        optional = project["optional-dependencies"]
        texts = [*project["dependencies"], *(text for extra in extras for text in optional[extra])]
        names = {re.split(r"[=<>;]", text)[0] for text in texts if not text.startswith("nsa[")}
        return {re.sub(r"[-_.]+", "-", name).lower() for name in names}

    library, dev = required(*LIBRARY), required("dev")
    assert library >= {"datasets", "torch"}
    assert "pytest" in dev
    for kind in ("cpu", "gpu"):
        assert library <= pins(kind).keys()
        assert not [name for name in pins(kind) if re.match("(cuda|nvidia)-(?!ml-py)", name)]
        fixed = (ROOT / f"requirements/{kind}.in").read_text()
        for name, version in re.findall(r"^(\w+)==(.+)$", fixed, re.MULTILINE):
            assert pins(kind)[name] == version
    assert dev <= pins("dev").keys() | pins("cpu").keys()
    assert not pins("dev").keys() & pins("cpu").keys()
    extras = "".join(f" --extra {name}" for name in LIBRARY)
    assert extras in make("-n", "lock").stdout


def test_device_wheels_are_locked():
    lines = (ROOT / "tools/device_wheels.txt").read_text().splitlines()
    names = {line for line in lines if not line.startswith("#")}
    assert names <= pins("gpu").keys() | pins("dev").keys()


def test_an_old_python_is_refused(tmp_path):
    old = tmp_path / "python3.9"
    old.write_text(
        f"#!/bin/sh\n{sys.executable} -c 'import sys; sys.version_info = (3, 9); '\"$2\"\n"
    )
    old.chmod(0o755)
    done = make("check-python", f"PYTHON={old}")
    assert "make: PYTHON must be Python 3.11 or newer." in done.stderr
    assert make("check-python", f"PYTHON={sys.executable}").returncode == 0
