"""The one form of error message that the public boundary uses."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

logger = logging.getLogger(__name__)

# Errors of an output that a run does without, a picture or a sample for example: of the disk, of
# memory, of the device, and of a library that is broken or was exchanged while the run went on.
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


class UserError(ValueError):
    """A mistake in what the user gave; the message alone is enough to correct it.

    Commands print it as one line. Every other exception is a bug and keeps its traceback.

    Attributes:
        function: public name that the user called; it is not part of the message.
        argument: name of the argument at fault.
        rule: what must hold, written so that it follows "must".
        value: what was given.
        hint: what to do about it; may be empty.
    """

    def __init__(self, function: str, argument: str, rule: str, value: Any, hint: str = "") -> None:
        super().__init__(f"{argument} must {rule}, got {value}. {hint}".rstrip())
        self.function, self.argument, self.rule, self.value, self.hint = (
            function,
            argument,
            rule,
            value,
            hint,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.function, self.argument, self.rule, self.value, self.hint)


class UsageError(ValueError):
    """A command line that cannot be run as it is, in the usual words for command lines."""


def fail(function: str, argument: str, rule: str, value: Any, hint: str = "") -> NoReturn:
    """Raise a :class:`UserError`, a ``ValueError`` that names the argument, the rule and the value.

    Args:
        function: public name that the user called, for example ``"window_attention"``.
        argument: name of the argument at fault.
        rule: what must hold, written so that it follows "must".
        value: what was given.
        hint: what to do about it, a sentence; may be empty.

    Raises:
        UserError: always, as ``<argument> must <rule>, got <value>. <hint>``.
    """
    raise UserError(function, argument, rule, value, hint)


def check(
    condition: bool,
    function: str,
    argument: str,
    rule: str,
    value: Any,
    hint: str = "",
) -> None:
    """Raise as :func:`fail` does unless ``condition`` holds."""
    if not condition:
        fail(function, argument, rule, value, hint)


@contextmanager
def optional_output(name: str) -> Iterator[None]:
    """Context manager: turn an error in an output that a run does without into a warning.

    Args:
        name: the output.
    """
    try:
        yield
    except OUTPUT_ERRORS as error:
        logger.warning("%s: left out (%s: %s)", name, type(error).__name__, error)


def check_output(function: str, argument: str, path: Path | None, *, is_new: bool = False) -> None:
    """Refuse a file to be written that could not be, or that must be new; None is accepted."""
    if path is not None:
        fits = path.parent.is_dir() and not (path.exists() if is_new else path.is_dir())
        rule = f"name a {'new ' * is_new}file in an existing folder"
        check(fits, function, argument, rule, path)


def check_positive(config: Any, *names: str) -> None:
    """Check that fields of a dataclass are above 0; the message names the field."""
    for name in names:
        value = getattr(config, name)
        check(value > 0, type(config).__name__, name, "be positive", value)


def check_not_negative(config: Any, *names: str) -> None:
    """Check that fields of a dataclass are 0 or above, as :func:`check_positive`."""
    for name in names:
        value = getattr(config, name)
        check(value >= 0, type(config).__name__, name, "be at least 0", value)


def check_default(config: Any, needed: bool, where: str, *names: str, hint: str = "") -> None:
    """Check that fields of a dataclass have their defaults where nothing needs them.

    Args:
        config: the dataclass.
        needed: whether they may differ.
        where: what does not need them, for example ``policy full``.
        names: the fields.
        hint: see :func:`fail`.
    """
    for name in names:
        value, default = getattr(config, name), type(config).__dataclass_fields__[name].default
        fits = needed or value == default
        rule = f"be left at {default} with {where}"
        check(fits, type(config).__name__, name, rule, value, hint)


LIKE = 0.6  # as difflib's own


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that ``word`` most likely stands for; None where none is like it.

    A dotted name is compared as a whole and by its last part, so that ``--lr`` finds
    ``--optim.lr``.
    """

    def ratio(first: str, second: str) -> float:
        return difflib.SequenceMatcher(None, first, second).ratio()

    def likeness(candidate: str) -> tuple[float, float]:
        last, of_candidate = (name.split(".")[-1].lstrip("-") for name in (word, candidate))
        whole = ratio(word, candidate)
        return max(whole, ratio(last, of_candidate)), whole

    found = max(sorted(candidates), key=likeness, default=None)
    return found if found is not None and likeness(found)[0] >= LIKE else None


def nearest_hint(name: str | None) -> str:
    """The sentence for what :func:`nearest` found; empty where that is nothing."""
    return "" if name is None else f"The nearest is {name}."


def option(name: str) -> str:
    """The option of the command line for an argument or a setting."""
    return f"--{name.replace('_', '-')}"
