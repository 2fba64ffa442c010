"""Write ``requirements/*.lock``: the newest versions within the ranges of ``pyproject.toml``.

``cpu.lock`` and ``gpu.lock`` pin what the library and its extras import, ``dev.lock`` what only the
checks need. The GPU lock holds the versions of torch and Triton that the GPU results of this
project were measured with. CUDA's packages stand in neither file: the CUDA build of torch names
each of them in one version, the CPU build none, so that one file serves both builds. nvidia-ml-py
is none of them: the library itself asks for it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PINNED = {
    "cpu": ("torch==2.13.0", "triton==3.7.1"),
    # The interpreter of Triton 3.6 has no run-time loop bounds from NumPy 2.4 on.
    "gpu": ("torch==2.11.0", "triton==3.6.0", "numpy<2.4"),
}
# Extras that the first two files hold.
LIBRARY = ("train", "data", "bench", "hf")
CUDA = re.compile(r"(cuda|nvidia)-(?!ml-py)")
HEADER = "# Made by `make lock` from pyproject.toml; do not edit.\n"

Pins = dict[str, str]  # normalised name -> version


def normalised(name: str) -> str:
    """The one spelling of a package's name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(project: dict[str, Any], *extras: str) -> list[str]:
    """What the package and some of its extras ask for, without the extras that extras name."""
    asked = [
        *project["dependencies"],
        *(text for extra in extras for text in project["optional-dependencies"][extra]),
    ]
    return list(dict.fromkeys(text for text in asked if not text.startswith("nsa[")))


def report(wanted: Iterable[str], *options: str) -> list[dict[str, Any]]:
    """Metadata of all packages that ``pip install`` would take; nothing is installed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"]
        flags = ["--ignore-installed", "--report", str(path)]
        subprocess.run([*pip, *flags, *options, *wanted], check=True)
        return [entry["metadata"] for entry in json.loads(path.read_text())["install"]]


def needs_of_torch(pin: str) -> list[str]:
    """What torch requires at the version ``pin``, without CUDA's packages and optional extras."""
    (metadata,) = report([pin], "--no-deps")
    requires = metadata.get("requires_dist", [])
    return [text for text in requires if not CUDA.match(text) and "extra ==" not in text]


def resolve(wanted: Iterable[str]) -> Pins:
    """Name and version of everything that is wanted, without local labels such as ``+cpu``."""
    found = report(wanted)
    return {normalised(entry["name"]): entry["version"].partition("+")[0] for entry in found}


def lines(pins: Pins) -> str:
    """A lock file's text. Triton has wheels for Linux alone."""
    marker = {"triton": "; sys_platform == 'linux'"}
    found = sorted(pins.items())
    return HEADER + "".join(f"{name}=={version}{marker.get(name, '')}\n" for name, version in found)


def main() -> None:
    """Resolve and write the three files."""
    if sys.version_info[:2] != (3, 11):
        reason = "so that the versions found fit 3.11 and newer ones"
        sys.exit(f"make lock: run it with Python 3.11, {reason}")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    library = [text for text in requirements(project, *LIBRARY) if not text.startswith("torch>")]
    locked: dict[str, Pins] = {}
    for kind, (torch_pin, *others) in PINNED.items():
        found = resolve([*library, *others, *needs_of_torch(torch_pin)])
        locked[kind] = {**found, "torch": torch_pin.partition("==")[2]}
    cpu = locked["cpu"]
    fixed = [f"{name}=={version}" for name, version in cpu.items() if name != "torch"]
    found = resolve([*fixed, *requirements(project, "dev")])
    locked["dev"] = {name: version for name, version in found.items() if name not in cpu}
    for name, found in locked.items():
        (ROOT / f"requirements/{name}.lock").write_text(lines(found), encoding="utf-8")
        print(f"requirements/{name}.lock: {len(found)} packages")


if __name__ == "__main__":
    main()
