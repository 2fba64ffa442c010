"""The one form of error message that the public boundary uses."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, NoReturn


class UserError(ValueError):
    """A mistake in what the user gave; the message alone is enough to correct it.

    Commands print it as one line. Every other exception is a bug and keeps its traceback.

    Attributes:
        function: public name that the user called.
        argument: name of the argument at fault.
        rule: what must hold, written so that it follows "must".
        value: what was given.
        hint: what to do about it; may be empty.
    """

    def __init__(self, function: str, argument: str, rule: str, value: Any, hint: str = "") -> None:
        super().__init__(f"{function}: {argument} must {rule}, got {value}. {hint}".rstrip())
        self.function, self.argument, self.rule, self.value, self.hint = function, argument, rule, value, hint

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.function, self.argument, self.rule, self.value, self.hint)


class UsageError(ValueError):
    """A command line that cannot be run as it is; one line in the words that command lines are spoken of."""


def fail(function: str, argument: str, rule: str, value: Any, hint: str = "") -> NoReturn:
    """Raise a :class:`UserError`, which is a ``ValueError``, that names the argument, the rule and the value.

    Args:
        function: public name that the user called, for example ``"window_attention"``.
        argument: name of the argument at fault.
        rule: what must hold, written so that it follows "must".
        value: what was given.
        hint: what to do about it, a sentence; may be empty.

    Raises:
        UserError: always, as ``<function>: <argument> must <rule>, got <value>. <hint>``.
    """
    raise UserError(function, argument, rule, value, hint)


def check(condition: bool, function: str, argument: str, rule: str, value: Any, hint: str = "") -> None:
    """Raise as :func:`fail` does unless ``condition`` holds."""
    if not condition:
        fail(function, argument, rule, value, hint)


LIKE = 0.6  # as difflib's own


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that ``word`` most likely stands for; None where none is like it.

    A dotted name is compared as a whole and by its last part, so that ``--lr`` finds ``--optim.lr``.
    """

    def likeness(candidate: str) -> tuple[float, float]:
        whole = difflib.SequenceMatcher(None, word, candidate).ratio()
        last = difflib.SequenceMatcher(None, word.split(".")[-1].lstrip("-"), candidate.split(".")[-1].lstrip("-")).ratio()
        return max(whole, last), whole

    found = max(sorted(candidates), key=likeness)
    return found if likeness(found)[0] >= LIKE else None
