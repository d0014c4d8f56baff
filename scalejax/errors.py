"""The exceptions that stand for a user's mistake."""


class UserError(ValueError):
    """A mistake in what the user gave: arguments, files, recipes, a machine that lacks something.

    The message names the argument, the value received, what was wanted and the next step. The command line prints it
    alone, without a traceback, and exits with status 2. Anything else that reaches the command line is a bug.
    """


class UnsupportedError(UserError, NotImplementedError):
    """What was asked for by name does not have the case; something else, which the message names, has it."""
