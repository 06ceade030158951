"""Tests that a program passes or fails in a sandbox. What is expected of standard output or of a call is compared
outside and never enters the sandbox."""

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from orchestrator.sandbox import LimitName, Limits, Sandbox

_HARNESS = Path(__file__).with_name("harness.py").read_text()


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """What the program must print for a standard input, or one job for the harness: a function with arguments that
    must return something, or code that raises unless the program is right.

    Example: ``Test(job={"function": "double", "arguments": [2]}, accepted=(4,))``
    """

    stdin: str = ""
    job: Mapping[str, Any] | None = None
    """As `harness.py` has it; None: the program itself runs, with `stdin`."""
    accepted: tuple[Any, ...] = ()
    """The outputs, or the returned values, of which one is enough. None for code that raises."""

    async def outcome(self, program: str, sandbox: Sandbox, limits: Limits) -> tuple[bool, LimitName | None]:
        """Returns whether the program passes, and the limit that it hit. Raises SandboxError."""
        if self.job is None:
            result = await sandbox.run(program, stdin=self.stdin.encode(), limits=limits)
            printed = result.stdout.decode(errors="replace")
            return result.succeeded and any(same_output(printed, one) for one in self.accepted), result.limit
        mark = secrets.token_hex(16)
        given = json.dumps({**self.job, "mark": mark, "program": program})
        result = await sandbox.run(_HARNESS, stdin=given.encode(), limits=limits)
        last = (result.stdout.splitlines() or [b""])[-1].decode(errors="replace")
        found, _, told = last.partition(" ")
        if not result.succeeded or found != mark:
            return False, result.limit
        return not told or any(same_value(json.loads(told), one) for one in self.accepted), None


async def run_tests(
    tests: Sequence[Test], program: str, sandbox: Sandbox, limits: Limits, *, all_or_nothing: bool = False
) -> tuple[float, set[LimitName]]:
    """Returns the share of tests that the program passes, each in a sandbox of its own, and the limits that it hit.
    With `all_or_nothing` it is 1 or 0, and the first failure ends the rest. Raises SandboxError."""
    runs = [asyncio.create_task(test.outcome(program, sandbox, limits)) for test in tests]
    num_passed, hit = 0, set[LimitName]()
    try:
        for run in asyncio.as_completed(runs):
            passed, limit = await run
            num_passed += passed
            hit |= set() if limit is None else {limit}
            if all_or_nothing and not passed:
                return 0.0, hit
        return num_passed / len(tests), hit
    finally:
        for task in runs:
            task.cancel()
        await asyncio.gather(*runs, return_exceptions=True)


def same_output(printed: str, expected: str) -> bool:
    """Returns whether two outputs agree line by line, but for space at the ends of lines and of the whole, and for how
    numbers are written (`1.50` and `1.5`)."""
    ours, theirs = ([line.split() for line in text.strip().splitlines()] for text in (printed, expected))
    return len(ours) == len(theirs) and all(
        len(one) == len(other) and all(map(_same_word, one, other)) for one, other in zip(ours, theirs, strict=True)
    )


def _same_word(one: str, other: str) -> bool:
    try:
        return one == other or (Decimal(one).is_finite() and Decimal(one) == Decimal(other))
    except InvalidOperation:
        return False


def same_value(one: Any, other: Any) -> bool:
    """Returns whether two JSON values are equal; true and 1 are not."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_value, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_value(one[key], other[key]) for key in one)
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
