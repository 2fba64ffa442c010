"""Text on a terminal: control characters are escaped."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from io import TextIOWrapper
from typing import Any, TextIO, cast

# Control characters except newline and tab, and those that change the direction of text.
_CONTROLS = {*range(0x20), *range(0x7F, 0xA0)} - {*map(ord, "\n\t")}
_DIRECTIONS = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}
_SHOWN = {code: f"\\x{code:02x}" for code in _CONTROLS}
_SHOWN |= {code: f"\\u{code:04x}" for code in _DIRECTIONS}


def visible(text: str) -> str:
    r"""Escape the control characters of a text, for example as ``\x1b`` or ``\u202e``.

    Args:
        text: any text.
    """
    return text.translate(_SHOWN)


class Terminal:
    """A terminal that writes text after :func:`visible`.

    Attributes:
        raw: the stream itself, for code that moves the cursor.
    """

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)

    def write(self, text: str) -> int:
        """Write the text and return its length."""
        self.raw.write(visible(text))
        return len(text)


@contextmanager
def safe_output() -> Iterator[None]:
    """Context manager in which any text can be printed to standard output and error.

    On a terminal control characters are escaped, and so are characters that the encoding lacks.
    Streams that were closed before the start are replaced by the null device.
    """
    with ExitStack() as stack:
        if sys.stdin is None:
            sys.stdin = stack.enter_context(open(os.devnull, encoding="utf-8"))
        for redirect, stream in ((redirect_stdout, sys.stdout), (redirect_stderr, sys.stderr)):
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
            if stream is None:
                nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
                stack.enter_context(redirect(nowhere))
            elif stream.isatty():
                stack.enter_context(redirect(cast(TextIO, Terminal(stream))))
        yield
