"""The exceptions that stand for a user's mistake."""


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
