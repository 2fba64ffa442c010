"""Parser of Google-style docstrings: summary, arguments and attributes."""

from __future__ import annotations

import inspect
import re
from typing import Any


def about(documented: Any) -> str:
    """Return the docstring without its sections.

    Args:
        documented: a class, a function or a module.
    """
    text = inspect.getdoc(documented) or ""
    return re.split(r"^(?:Args|Attributes|Returns|Raises):$", text, flags=re.MULTILINE)[0].strip()


def descriptions(documented: Any) -> dict[str, str]:
    """Return the entries of ``Args:`` or ``Attributes:`` by name, each on one line.

    Args:
        documented: a class or a function with a docstring in Google style.
    """
    text = inspect.getdoc(documented) or ""
    listed = re.split(r"^(?:Args|Attributes):\n", text, flags=re.MULTILINE)[-1]
    section = listed.split("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, flags=re.MULTILINE)
    return {name: re.sub(r"\s+", " ", described) for name, described in entries}
