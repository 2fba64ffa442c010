"""``nsa doctor``: it says what there is, and a problem changes its exit code."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from nsa import cli, doctor
from nsa.train import environment

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def test_a_sound_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--configs", str(CONFIGS)]) == 0
    said = capsys.readouterr().out
    for part in (
        "python 3.",
        "torch 2.",
        "CPU cores",
        "GiB free",
        "cpu: eager PyTorch",
        "seed-gpt2-dense.yaml: loads",
        "no problem",
    ):
        assert part in said
    assert "PROBLEM" not in said


def test_problems_are_shown_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.yaml").write_text("steps: x\n")
    (tmp_path / "good.yaml").write_text("steps: 1\n")
    monkeypatch.setattr(environment, "RECORDED", ("torch", "no-such-distribution"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**29))
    assert cli.main(["doctor", "--configs", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "PROBLEM: no-such-distribution is not installed" in said
    assert "PROBLEM: 0.5 GiB free" in said
    assert f"PROBLEM: {tmp_path / 'bad.yaml'}:1: steps must be an integer, got 'x'." in said
    assert f"  {tmp_path / 'good.yaml'}: loads" in said
    assert "3 problems found" in said
    assert "PROBLEM: no folder" in "\n".join(f"PROBLEM: {line}" for line in doctor._configs(tmp_path / "nowhere"))


def test_a_driver_without_a_cuda_build_of_torch_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "cuda", lambda: None)
    monkeypatch.setattr(environment, "nvidia_driver", lambda: "580.1")
    (line,) = doctor._gpus()
    assert isinstance(line, doctor.Problem)
    assert "580.1" in line
    monkeypatch.setattr(environment, "nvidia_driver", lambda: None)
    (line,) = doctor._gpus()
    assert not isinstance(line, doctor.Problem)
