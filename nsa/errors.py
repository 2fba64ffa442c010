"""User errors, and the checks that raise them."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

logger = logging.getLogger(__name__)

# Errors of an optional output, for example a picture or a sample: of the disk, memory, the device,
# and of a library that is broken or was replaced during the run.
OUTPUT_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)

MOST = 2**63 - 1  # 64 bits


class UserError(ValueError):
    """A mistake of the user; the message is enough to correct it.

    Commands print it as one line. Other exceptions are bugs and keep their traceback.

    Attributes:
        argument: name of the argument at fault.
        rule: the rule, as the words after "must".
        value: the given value.
        hint: advice; may be empty.
    """

    def __init__(self, argument: str, rule: str, value: Any, hint: str = "") -> None:
        super().__init__(f"{argument} must {rule}, got {value}. {hint}".rstrip())
        self.argument, self.rule, self.value, self.hint = argument, rule, value, hint

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.argument, self.rule, self.value, self.hint)


class UsageError(ValueError):
    """A command line that cannot be parsed."""


def fail(argument: str, rule: str, value: Any, hint: str = "") -> NoReturn:
    """Raise a :class:`UserError`, a ``ValueError`` that names the argument, the rule and the value.

    Args:
        argument: name of the argument at fault.
        rule: the rule, as the words after "must".
        value: the given value.
        hint: advice, a sentence; may be empty.

    Raises:
        UserError: always, as ``<argument> must <rule>, got <value>. <hint>``.
    """
    raise UserError(argument, rule, value, hint)


def check(condition: bool, argument: str, rule: str, value: Any, hint: str = "") -> None:
    """Raise the error of :func:`fail` if ``condition`` is false."""
    if not condition:
        fail(argument, rule, value, hint)


@contextmanager
def optional_output(name: str) -> Iterator[None]:
    """Context manager: turn an error of an optional output into a warning.

    Args:
        name: the output.
    """
    try:
        yield
    except OUTPUT_ERRORS as error:
        logger.warning("%s: left out (%s: %s)", name, type(error).__name__, error)


def check_output(argument: str, path: Path | None, *, is_new: bool = False) -> None:
    """Check that a file can be written, and with ``is_new`` does not exist; None is accepted."""
    if path is not None:
        fits = path.parent.is_dir() and not (path.exists() if is_new else path.is_dir())
        rule = f"name a {'new ' * is_new}file in an existing folder"
        check(fits, argument, rule, path)


def check_positive(config: Any, *names: str) -> None:
    """Check that fields of a dataclass are above 0."""
    for name in names:
        value = getattr(config, name)
        check(value > 0, name, "be positive", value)
    check_at_most(config, MOST, *names)


def check_not_negative(config: Any, *names: str) -> None:
    """Check that fields of a dataclass are 0 or above."""
    for name in names:
        value = getattr(config, name)
        check(value >= 0, name, "be at least 0", value)
    check_at_most(config, MOST, *names)


def check_at_most(config: Any, most: int, *names: str) -> None:
    """Check that integer fields of a dataclass are at most ``most``; others are accepted."""
    for name in names:
        value = getattr(config, name)
        fits = not isinstance(value, int) or value <= most
        check(fits, name, f"be at most {most:,}", value)


def check_default(config: Any, needed: bool, where: str, *names: str, hint: str = "") -> None:
    """Check that fields of a dataclass have their defaults unless they are needed.

    Args:
        config: the dataclass.
        needed: whether they may differ.
        where: setting that does not need them, for example ``policy full``.
        names: the fields.
        hint: see :func:`fail`.
    """
    for name in names:
        value, default = getattr(config, name), type(config).__dataclass_fields__[name].default
        fits = needed or value == default
        rule = f"be left at {default} with {where}"
        check(fits, name, rule, value, hint)


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate whose last part is most similar to that of ``word``, if one is.

    Args:
        word: the given word.
        candidates: names; parts are separated by dots: ``--lr`` finds ``--optim.lr``.
    """
    ends = {_last_part(name): name for name in candidates}
    found = difflib.get_close_matches(_last_part(word), ends, n=1, cutoff=0.7)
    return ends[found[0]] if found else None


def _last_part(name: str) -> str:
    return name.rpartition(".")[2].lstrip("-").replace("_", "-")


def nearest_hint(name: str | None) -> str:
    """The sentence for a result of :func:`nearest`; empty for None."""
    return "" if name is None else f"The nearest is {name}."


def option(name: str) -> str:
    """The option of the command line for an argument or a setting."""
    return f"--{name.replace('_', '-')}"
