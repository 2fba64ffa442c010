"""User errors, and the checks that raise them."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Iterator, Mapping
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
        function: public name that the user called; it is not part of the message.
        argument: name of the argument at fault.
        rule: the rule, as the words after "must".
        value: the given value.
        hint: advice; may be empty.
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
    """A command line that cannot be parsed."""


def fail(function: str, argument: str, rule: str, value: Any, hint: str = "") -> NoReturn:
    """Raise a :class:`UserError`, a ``ValueError`` that names the argument, the rule and the value.

    Args:
        function: public name that the user called, for example ``"window_attention"``.
        argument: name of the argument at fault.
        rule: the rule, as the words after "must".
        value: the given value.
        hint: advice, a sentence; may be empty.

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
    """Raise the error of :func:`fail` if ``condition`` is false."""
    if not condition:
        fail(function, argument, rule, value, hint)


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


def check_output(function: str, argument: str, path: Path | None, *, is_new: bool = False) -> None:
    """Check that a file can be written, and with ``is_new`` does not exist; None is accepted."""
    if path is not None:
        fits = path.parent.is_dir() and not (path.exists() if is_new else path.is_dir())
        rule = f"name a {'new ' * is_new}file in an existing folder"
        check(fits, function, argument, rule, path)


def check_positive(config: Any, *names: str) -> None:
    """Check that fields of a dataclass are above 0."""
    for name in names:
        value = getattr(config, name)
        check(value > 0, type(config).__name__, name, "be positive", value)
    check_at_most(config, MOST, *names)


def check_not_negative(config: Any, *names: str) -> None:
    """Check that fields of a dataclass are 0 or above."""
    for name in names:
        value = getattr(config, name)
        check(value >= 0, type(config).__name__, name, "be at least 0", value)
    check_at_most(config, MOST, *names)


def check_at_most(config: Any, most: int, *names: str) -> None:
    """Check that integer fields of a dataclass are at most ``most``; others are accepted."""
    for name in names:
        value = getattr(config, name)
        fits = not isinstance(value, int) or value <= most
        check(fits, type(config).__name__, name, f"be at most {most:,}", value)


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
        check(fits, type(config).__name__, name, rule, value, hint)


_LIKE = 0.6  # difflib's own limit


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that is most similar to ``word``; None if none is similar.

    The last parts of dotted names are compared word by word, so that a common section does not
    count: ``--lr`` finds ``--optim.lr``, ``--layers`` finds ``--model.num-layers``, and
    ``--batch-size`` does not find ``--model.nsa.block-size``.

    Args:
        word: the given word.
        candidates: names. If they map to descriptions, two or more words of a description also
            find its name, such as ``--learning-rate``.
    """
    words = _last_words(word)
    found = max(sorted(candidates), key=lambda name: _likeness(word, name), default=None)
    if found is not None and _likeness(word, found)[0] >= _LIKE:
        return found
    described = candidates.items() if isinstance(candidates, Mapping) and len(words) > 1 else ()
    return next((name for name, text in described if " ".join(words) in text), None)


def _likeness(word: str, candidate: str) -> tuple[float, float]:
    """Similarity of the last parts of two names, then of the whole names."""
    mine, its = _last_words(word), _last_words(candidate)
    if len(mine) == len(its):
        pairs = [pair for pair in zip(mine, its, strict=True) if pair[0] != pair[1]]
        is_typo = all(abs(len(one) - len(other)) <= 2 for one, other in pairs)  # eps for epochs
        last = min((_ratio(*pair) for pair in pairs), default=1.0) * is_typo
    else:
        last = _ratio("".join(mine), "".join(its))
        is_part = set(mine) < set(its) or set(its) < set(mine)
        last = last if last > 0.8 else _LIKE * is_part
    return last, _ratio(word, candidate)


def _last_words(name: str) -> list[str]:
    return name.split(".")[-1].lstrip("-").replace("_", "-").split("-")


def _ratio(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second).ratio()


def nearest_hint(name: str | None) -> str:
    """The sentence for a result of :func:`nearest`; empty for None."""
    return "" if name is None else f"The nearest is {name}."


def option(name: str) -> str:
    """The option of the command line for an argument or a setting."""
    return f"--{name.replace('_', '-')}"
