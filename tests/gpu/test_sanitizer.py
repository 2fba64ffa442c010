"""Every kernel under compute-sanitizer, where the tool is on the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT_S = 420
RACE = "Race reported"
CUBLAS = "nvjet_"  # its products, in whose loads and barriers racecheck sees races


def tool() -> str:
    path = os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/cuda/bin"))
    found = shutil.which("compute-sanitizer", path=path)
    if found is None:
        pytest.skip("compute-sanitizer is not on this machine")
    return found


def sanitize(kind: str, program: list[str]) -> subprocess.CompletedProcess[str]:
    # Without the caching allocator every tensor has borders of its own.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(ROOT)}
    options = f"--tool {kind} --error-exitcode 9 --print-limit 1000".split()
    command = [tool(), *options, sys.executable, *program]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"compute-sanitizer {kind} did not end within {TIME_LIMIT_S} s")
    if "ERROR SUMMARY" not in done.stdout and "RACECHECK SUMMARY" not in done.stdout:
        pytest.skip(f"compute-sanitizer does not work here: {(done.stdout + done.stderr)[-300:]}")
    return done


BROKEN = """
import torch, triton, triton.language as tl
@triton.jit
def kernel(x):
    tl.store(x + tl.arange(0, 128), 1.0)
x = torch.zeros(100, device="cuda")
kernel[(1,)](x)
torch.cuda.synchronize()
"""


def test_the_tool_sees_a_store_out_of_bounds(tmp_path):
    program = tmp_path / "broken.py"
    program.write_text(BROKEN)
    assert sanitize("memcheck", [str(program)]).returncode != 0


@pytest.mark.parametrize("kind", ["memcheck", "racecheck"])
def test_kernels(kind):
    done = sanitize(kind, ["-m", "tests.gpu.small_step"])
    races = [line for line in done.stdout.splitlines() if RACE in line]
    known = kind == "racecheck" and bool(races) and all(CUBLAS in line for line in races)
    assert done.returncode == 0 or known, done.stdout[-6000:] + done.stderr[-2000:]
    assert "all ran" in done.stdout
