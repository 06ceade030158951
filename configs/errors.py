"""The error for settings that cannot be honoured."""

import reprlib
import sys
from dataclasses import dataclass
from typing import NoReturn

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120
_SHORT.maxlevel = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One setting that cannot be honoured.

    Example: ``Problem(origin="orch.yaml", key="sampling.max_token", value=64,
    message="unknown key; did you mean sampling.max_tokens?")``
    """

    origin: str
    """Where the value came from: a file, ``command line``, an environment variable, or a default."""
    key: str
    """Dotted path of the key."""
    value: object
    """The value as it was received."""
    message: str
    """The expected value, and how to mend it."""

    @property
    def ineffective(self) -> bool:
        """True where the value is right, and another setting leaves it without effect."""
        return self.message.startswith("has no effect")

    def __str__(self) -> str:
        return f"{self.origin}: {_cut(self.key, 120)} = {_SHORT.repr(self.value)}: {_cut(self.message, 900)}"


def _cut(text: str, length: int) -> str:
    """The same, or its beginning and its end."""
    return text if len(text) <= length else f"{text[: length // 2]}…{text[-length // 2 :]}"


class SettingsError(ValueError):
    """Settings that cannot be honoured; lists every problem found, not only the first."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))


def exit_with_problems(error: SettingsError) -> NoReturn:
    """Prints every problem on standard error and exits with status 2."""
    print("\n".join(f"error: {problem}" for problem in error.problems), file=sys.stderr)
    raise SystemExit(2)
