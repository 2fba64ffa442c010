"""Run folders: what is in them, that nothing is overwritten, and how they are found again."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys

import pytest

from nsa.errors import UserError
from nsa.train import environment, run_folder
from nsa.train.config import OptimConfig, TrainConfig
from nsa.train.run_folder import RunFolder, next_run_path
from tests.train.cases import contents

CONFIG = TrainConfig(steps=7, optim=OptimConfig(lr=0.5))


def test_a_new_folder_contains_the_configuration_and_the_environment(tmp_path):
    folder = RunFolder.create(tmp_path / "runs" / "a-1", CONFIG)
    assert folder.load_config() == RunFolder.open(folder.path).load_config() == CONFIG
    assert folder.load_config({"steps": "9"}).steps == 9
    assert folder.checkpoints.is_dir()
    folder.record_launch(resumed_from_step=3, overrides={"log_every": "1"})
    first, second = json.loads(folder.environment.read_text())["launches"]
    assert (first["resumed_from_step"], first["overrides"]) == (None, {})
    assert (second["resumed_from_step"], second["overrides"]) == (3, {"log_every": "1"})
    assert first["command_line"] == sys.argv
    assert first["python"] == "{}.{}.{}".format(*sys.version_info)
    assert first["versions"].keys() >= {"nsa", "torch", "triton"}
    assert set(first["code"]) == {"commit", "dirty", "note"}
    assert first["cpu"]["cores_count"] > 0


def test_an_existing_folder_is_refused_and_left_alone(tmp_path):
    folder = RunFolder.create(tmp_path / "a-1", CONFIG)
    folder.log.write_text("said")
    before = contents(folder.path)
    with pytest.raises(UserError, match=r"must not exist yet.*--resume .*a-1"):
        RunFolder.create(folder.path, TrainConfig())
    assert contents(folder.path) == before
    (tmp_path / "a-2").write_text("a file in the way")
    with pytest.raises(UserError, match=r"must not exist yet.*another --run-dir\.?$"):
        RunFolder.create(tmp_path / "a-2", CONFIG)
    with pytest.raises(UserError, match=r"--run-dir must lie in a folder, got .*a-2/b"):
        RunFolder.create(tmp_path / "a-2/b", CONFIG)
    with pytest.raises(UserError, match="--run-dir must name a folder, got ''"):
        RunFolder.create("", CONFIG)


def test_a_folder_that_could_not_be_written_is_gone(tmp_path, monkeypatch):
    def full(path, text):
        path.write_text(text[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_folder, "replace_text", full)
    with pytest.raises(OSError, match="No space left"):
        RunFolder.create(tmp_path / "runs/a", CONFIG)
    assert not (tmp_path / "runs/a").exists()


def test_a_missing_run_names_the_nearest(tmp_path):
    RunFolder.create(tmp_path / "cpu-small-1", CONFIG)
    (tmp_path / "cpu-small-9").mkdir()
    for missing in ("cpu-small-9", "cpusmall-1"):
        with pytest.raises(UserError, match=r"nearest run is .*cpu-small-1\."):
            RunFolder.open(tmp_path / missing)
    with pytest.raises(UserError, match="nsa train CONFIG"):
        RunFolder.open(tmp_path / "empty" / "x")


def test_automatic_names_count_up_and_never_meet_an_existing_folder(tmp_path):
    assert next_run_path("configs/seed.yaml", tmp_path) == tmp_path / "seed-1"
    for name in ("seed-1", "seed-10", "seed-dense-30", "seed-x", "seed-2-old"):
        (tmp_path / name).mkdir()
    assert next_run_path("elsewhere/seed.yaml", tmp_path) == tmp_path / "seed-11"
    assert next_run_path("seed-dense.yaml", tmp_path) == tmp_path / "seed-dense-31"


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_the_package_and_changes_are_flagged(tmp_path, monkeypatch):
    package = tmp_path / "nsa"
    package.mkdir()
    source = package / "__init__.py"
    source.write_text("")
    monkeypatch.setattr(environment, "PACKAGE", package)

    who = ("-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false")

    def git(*words):
        return subprocess.check_output(["git", "-C", tmp_path, *who, *words], text=True).strip()

    git("init", "-q")
    (tmp_path / "other").write_text("")
    git("add", "other")
    git("commit", "-q", "-m", "a repository around a package that is not part of it")
    assert environment.code_version()["commit"] is None
    git("add", ".")
    git("commit", "-q", "-m", "the package")
    clean = {"commit": git("rev-parse", "HEAD"), "dirty": False, "note": None}
    assert environment.code_version() == clean
    (tmp_path / "other").write_text("outside the package")
    assert environment.code_version() == clean
    source.write_text("changed")
    assert environment.code_version()["dirty"] is True


def test_the_topology_is_plain_text(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '\\033[4mGPU0\\tGPU1\\033[0m\\nGPU0 X NV18\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert environment.nvidia_topology() == "GPU0\tGPU1\nGPU0 X NV18"
    program.write_text("#!/bin/sh\nexit 9\n")
    assert environment.nvidia_topology() is None
