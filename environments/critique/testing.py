"""Programs that are tested in a sandbox. What is expected of standard output or of a call is compared outside and never
enters the sandbox."""

import asyncio
import contextlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Literal

from grpo.environments.sandbox.bubblewrap import find_bubblewrap
from grpo.environments.sandbox.local import LocalSandbox
from grpo.environments.sandbox.normalise import key_of
from grpo.environments.sandbox.records import LimitName, Limits, Sandbox
from grpo.environments.sandbox.remote import RemoteSandbox

from grpo import waiting

_HARNESS = Path(__file__).with_name("harness.py").read_text()
MOST_KEPT = 10_000
"""Rewards of programs that are kept in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """One test: what the program must print for a standard input, or one job for the harness: a function with arguments
    that must return something, or code that raises unless the program is right.

    Example: ``Test(job={"function": "double", "arguments": [2]}, accepted=(4,))``
    """

    stdin: str = ""
    job: Mapping[str, Any] | None = None
    """The job that `harness.py` reads; None: the program itself runs, with `stdin`."""
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


class ProgramScorer:
    """Finds out what programs are worth by their tests. Programs that say the same are run once, and their reward is
    kept."""

    def __init__(
        self,
        *,
        counting: Literal["pass_rate", "all_or_nothing"] = "pass_rate",
        sandbox: Literal["local"] | Mapping[str, Any] = "local",
        parallel: int | None = None,
        limits: Mapping[str, Any] | None = None,
    ) -> None:
        """`sandbox`: `local`, or `{url: http://HOST:PORT}` of a SandboxFusion service, with `parallel` programs at once
        (null: its default). `limits`: fields of `grpo.Limits`."""
        if counting not in ("pass_rate", "all_or_nothing"):
            raise ValueError(f"counting is {counting!r}, expected pass_rate or all_or_nothing")
        self._all_or_nothing, self._limits = counting == "all_or_nothing", Limits(**(limits or {}))
        self.sandbox = make_sandbox(sandbox, parallel)
        self._rewards: dict[bytes, asyncio.Task[float]] = {}
        """Rewards that are known, and rewards that are being found out."""

    async def score(self, program: str | None, tests: Sequence[Test], *, digest: str, names: frozenset[str]) -> float:
        """Returns the share of tests that the program passes, or 1 for all and 0 for less; 0 where there is no program.
        `digest` tells the tests from others, and `names` are those that they may use. Raises SandboxError."""
        if program is None or "\0" in program:
            return 0.0
        key = key_of(program, digest, keep=names)
        with waiting() if key in self._rewards else contextlib.nullcontext():
            if key not in self._rewards:
                self._rewards[key] = asyncio.create_task(self._run(key, program, tests))
            return await asyncio.shield(self._rewards[key])

    async def _run(self, key: bytes, program: str, tests: Sequence[Test]) -> float:
        """Returns the reward, which is kept unless a busy machine may have caused it."""
        keep = False
        try:
            reward, limits = await run_tests(
                tests, program, self.sandbox, self._limits, all_or_nothing=self._all_or_nothing
            )
            keep = not limits & {"wall", "killed"} and len(self._rewards) < MOST_KEPT
            return reward
        finally:
            if not keep:
                del self._rewards[key]


def make_sandbox(where: Literal["local"] | Mapping[str, Any], parallel: int | None) -> Sandbox:
    """Raises ValueError for what is no sandbox, and SandboxMissing without bubblewrap, which a whole run would find
    missing one rollout at a time."""
    if where == "local":
        find_bubblewrap()
        return LocalSandbox(parallel=parallel)
    if isinstance(where, Mapping) and set(where) == {"url"}:
        return RemoteSandbox(where["url"], parallel=parallel or 32)
    raise ValueError(f"sandbox is {where!r}: expected local, or {{url: http://HOST:PORT}} of a service")


def extract_program(answer: str) -> str | None:
    """Returns the program in an answer: its last fenced block of Python, or last block of no named language. None where
    there is none."""
    _, *parts = re.split(r"^[ \t]*`{3,}[ \t]*(\w*).*\n?", answer, flags=re.MULTILINE)
    blocks = [(parts[at].lower(), parts[at + 1]) for at in range(0, len(parts) - 2, 4)]
    for languages in (("python", "python3", "py"), ("",)):
        if found := [body for language, body in blocks if language in languages and body.strip()]:
            return found[-1]
    return None


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
