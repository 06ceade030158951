"""What a command ends with that a person can mend."""


class CommandError(ValueError):
    """The message says what was found, and how to mend it."""

    exit_code = 1


class NoRun(CommandError):
    """A folder that holds no run."""

    exit_code = 2
