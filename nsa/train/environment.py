"""Environment of a run: versions, devices, commit and command line."""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nsa.extras import CORE, EXTRAS
from nsa.train.distributed.launch import communication_settings

PACKAGE = Path(__file__).resolve().parents[1]
RECORDED = tuple(dict.fromkeys(("nsa", *CORE, *itertools.chain(*EXTRAS.values()))))
_PROGRAM_TIME_LIMIT_S = 20


def collect() -> dict[str, Any]:
    """Collect what a reader needs to judge or repeat a run.

    Returns:
        Values for JSON: start time in UTC, command line, versions, commit, CPU and GPUs, settings
        of the communication libraries; None for what is absent.
    """
    return {
        "started_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "command_line": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: version(name) for name in RECORDED},
        "code": code_version(),
        "cpu": cpu(),
        "cuda": cuda(),
        "communication": {"nccl": nccl(), "settings": communication_settings()},
    }


def version(package: str) -> str | None:
    """Installed version of a distribution, or of this checkout if nsa is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None if package != "nsa" else str(importlib.import_module("nsa").__version__)


def code_version() -> dict[str, Any]:
    """Commit of the checkout that this package was imported from.

    Returns:
        ``commit`` (None without one), ``dirty`` (whether files of the package differ from the
        commit or are not tracked) and ``note`` (why there is no commit).
    """
    git = ("git", "-C", str(PACKAGE))
    commit = _run(*git, "rev-parse", "HEAD")
    if commit is None or _run(*git, "ls-files", "--error-unmatch", "__init__.py") is None:
        note = "no git, or the package was not imported from a checkout with a commit"
        return {"commit": None, "dirty": None, "note": note}
    status = _run(*git, "status", "--porcelain", "--", ".")
    return {"commit": commit, "dirty": bool(status), "note": None}


def cpu() -> dict[str, Any]:
    """Cores and main memory of the machine, None if unknown."""
    memory = None
    if hasattr(os, "sysconf"):  # not on Windows
        memory = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    return {"cores_count": os.cpu_count(), "memory_gib": memory}


def cuda() -> dict[str, Any] | None:
    """CUDA versions and the GPUs that torch sees; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    gpus = [
        {
            "name": gpu.name,
            "memory_gib": round(gpu.total_memory / 2**30, 1),
            "compute_capability": f"{gpu.major}.{gpu.minor}",
            "multiprocessors_count": gpu.multi_processor_count,
        }
        for gpu in found
    ]
    return {
        "runtime": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": nvidia_driver(),
        "gpus": gpus,
        "topology": nvidia_topology() if len(gpus) > 1 else None,
    }


def nccl() -> str | None:
    """Version of NCCL; None if torch was built without it."""
    import torch

    if not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def nvidia_driver() -> str | None:
    """Version of the NVIDIA driver; None without a driver."""
    answer = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return answer.splitlines()[0] if answer else None


def nvidia_topology() -> str | None:
    """Output of ``nvidia-smi topo -m``: links of GPUs, network cards and CPUs; None without it."""
    answer = _run("nvidia-smi", "topo", "-m")
    # It underlines its header even for a file.
    return None if answer is None else re.sub(r"\x1b\[[0-9;]*m", "", answer)


def pcie_links() -> list[tuple[str, str]] | None:
    """Highest generation and number of lanes of each GPU's PCIe link; None if unknown."""
    query = "--query-gpu=pcie.link.gen.max,pcie.link.width.max"
    answer = _run("nvidia-smi", query, "--format=csv,noheader")
    if answer is None:
        return None
    links = [line.partition(",") for line in answer.splitlines()]
    return [(generation.strip(), width.strip()) for generation, _, width in links]


def _run(*command: str) -> str | None:
    """Output of a program; None if it is missing, fails or does not end."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROGRAM_TIME_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
