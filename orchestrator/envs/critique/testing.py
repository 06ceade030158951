"""Tests that a program passes or fails in a sandbox. What is expected of standard output or of a call is compared
outside and never enters the sandbox."""

import json
import secrets
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from orchestrator.sandbox import LimitName, Limits, Sandbox

_HARNESS = Path(__file__).with_name("harness.py").read_text()

Outcome = tuple[bool, LimitName | None]
"""(whether it passed, the limit that it hit)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTest:
    """Python code that raises unless the program is right."""

    setup: str
    code: str
    entry_point: str = ""
    """A function of the program that may be called like one of Python's own."""

    async def outcome(self, program: str, sandbox: Sandbox, limits: Limits) -> Outcome:
        """Runs it. Raises SandboxError."""
        job = {"setup": self.setup, "code": self.code, "entry_point": self.entry_point}
        told, limit = await _behind_the_mark(program, job, sandbox, limits)
        return told is not None, limit


@dataclass(frozen=True, slots=True, kw_only=True)
class InputTest:
    """What the program must print for one standard input."""

    stdin: str
    expected: str

    async def outcome(self, program: str, sandbox: Sandbox, limits: Limits) -> Outcome:
        """Runs it. Raises SandboxError."""
        result = await sandbox.run(program, stdin=self.stdin.encode, limits=limits)
        printed = result.stdout.decode(errors="replace")
        return result.succeeded and same_output(printed, self.expected), result.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTest:
    """What a function, or a method of the class `Solution`, must return."""

    function: str
    arguments: tuple[Any, ...]
    expected: Any
    wrapped: bool = False
    """Whether `expected` is a list of one, which may stand around what is returned."""

    async def outcome(self, program: str, sandbox: Sandbox, limits: Limits) -> Outcome:
        """Runs it. Raises SandboxError."""
        job = {"function": self.function, "arguments": self.arguments}
        told, limit = await _behind_the_mark(program, job, sandbox, limits)
        return told is not None and self.is_right(json.loads(told)), limit

    def is_right(self, value: Any) -> bool:
        return same_value(value, self.expected) or (self.wrapped and same_value(value, self.expected[0]))


Test = UnitTest | InputTest | CallTest


async def _behind_the_mark(
    program: str, job: dict[str, Any], sandbox: Sandbox, limits: Limits
) -> tuple[str | None, LimitName | None]:
    """Returns what the test's process has printed at its end; None where it has not come there."""
    mark = secrets.token_hex(16)
    given = {"mark": mark, "program": program, **job}
    result = await sandbox.run(_HARNESS, stdin=lambda: json.dumps(given).encode(), limits=limits)
    last = (result.stdout.splitlines() or [b""])[-1].decode(errors="replace")
    found, _, told = last.partition(" ")
    return (told if result.succeeded and found == mark else None), result.limit


def same_output(printed: str, expected: str) -> bool:
    """Returns whether two outputs agree line by line, but for space at the ends of lines and of the whole, and for how
    numbers are written (`1.50` and `1.5`)."""
    ours, theirs = ([line.split() for line in text.strip().splitlines()] for text in (printed, expected))
    return len(ours) == len(theirs) and all(
        len(one) == len(other) and all(map(_same_word, one, other)) for one, other in zip(ours, theirs, strict=True)
    )


def _same_word(one: str, other: str) -> bool:
    if one == other:
        return True
    try:
        first, second = Decimal(one), Decimal(other)
    except InvalidOperation:
        return False
    return first.is_finite() and first == second


def same_value(one: Any, other: Any) -> bool:
    """Returns whether two JSON values are equal; true and 1 are not."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_value, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_value(one[key], other[key]) for key in one)
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
