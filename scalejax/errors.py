"""The exceptions that stand for a user's mistake, and the checks that many places make."""

import numbers
from collections.abc import Collection


class UserError(ValueError):
    """A mistake in what the user gave: arguments, files, recipes, a machine that lacks something.

    The message names the argument, the value received, what was wanted and the next step. The command line prints it
    alone, without a traceback, and exits with status 2. Anything else that reaches the command line is a bug.
    """


class UnsupportedError(UserError, NotImplementedError):
    """What was asked for by name does not have the case; something else, which the message names, has it."""


class TemporaryFailure(Exception):
    """A run that ended before its end, by no mistake: the same command goes on.

    Because it was asked to end, or because another process of it is gone or never came. The command line prints the
    message alone and exits with status 75 (EX_TEMPFAIL).
    """


def check_at_least(name: str, value: float, least: float) -> None:
    """Refuses a number below `least`, and NaN."""
    if not value >= least:
        raise UserError(f"{name} must be at least {least}; got {value}.")


def check_whole(name: str, value: object, least: int, most: int | None = None) -> int:
    """The value as int; refuses what is no whole number, of NumPy or Python, and those beyond `least` and `most`."""
    if not isinstance(value, bool) and isinstance(value, numbers.Integral):
        number = int(value)
        if number >= least and (most is None or number <= most):
            return number
    wanted = f"of at least {least}" if most is None else f"from {least} to {most}"
    raise UserError(f"{name} must be a whole number {wanted}; got {value!r}.")


def check_one_of(name: str, value: object, choices: Collection[object]) -> None:
    """Refuses a value that is none of `choices`."""
    if value not in choices:
        raise UserError(f"{name} must be one of {', '.join(map(str, choices))}; got {value!r}.")


def check_several(name: str, value: object, element: str) -> None:
    """Refuses what is neither a tuple nor a list, as `(x)` with a forgotten comma; `element` stands for x."""
    if not isinstance(value, tuple | list):
        raise UserError(f"{name} must be a tuple, ({element},) with the comma; got {value!r}.")
