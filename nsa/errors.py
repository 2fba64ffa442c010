"""The one form of error message that the public boundary uses."""

from __future__ import annotations

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
