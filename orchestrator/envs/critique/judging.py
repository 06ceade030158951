"""What a program is worth by its tests, and whether a critique says plainly what it thinks."""

import ast
import asyncio
import re
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Literal

import msgspec

from orchestrator.envs.critique.problems import Problem, Test
from orchestrator.sandbox import LimitName, Limits, ResultCache, Sandbox

Judgement = Literal["correct", "incorrect"]
Counting = Literal["pass_rate", "all_or_nothing"]

_JUDGEMENT = re.compile(r"overall\s+judge?ment\W{1,20}(correct|incorrect)\b", re.IGNORECASE)
_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([\w+-]*)")
_MOST_CHARACTERS = 20_000
"""Of an answer without a fenced block that is looked at as a program: all rollouts wait while it is parsed."""
_PYTHON = {"python", "python3", "py"}
_TELLING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.For)


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """How a program fared.

    Example::

        Verdict(num_passed=2, num_tests=3, limits=("wall",), complete=True)
    """

    num_passed: int
    num_tests: int
    limits: tuple[LimitName, ...] = ()
    """The limits that runs hit, each once, by name."""
    complete: bool = True
    """Whether all tests were run: all or nothing is decided by the first failure."""

    def reward(self, counting: Counting) -> float:
        """The share of tests passed, or 1 for all and 0 for less."""
        if counting == "all_or_nothing":
            return float(self.num_passed == self.num_tests)
        return self.num_passed / self.num_tests


def judgement_of(critique: str) -> Judgement | None:
    """What a critique says of the program: `Overall judgment: Correct` or `Incorrect`, the last where it says so more
    than once; None where it does not say."""
    found = _JUDGEMENT.findall(critique)
    if not found:
        return None
    return "correct" if found[-1].lower() == "correct" else "incorrect"


def critique_reward(critique: str, verdict: Verdict, counting: Counting) -> float:
    """What the revision that followed a critique earns it; 0 without an explicit judgement."""
    return 0.0 if judgement_of(critique) is None else verdict.reward(counting)


def extract_program(answer: str) -> str | None:
    """The program in an answer: its last fenced block of Python, or last block of no named language, or the whole
    answer where it is Python of at most 20,000 characters. None where there is none."""
    blocks = list(_fenced(answer))
    for wanted in (_PYTHON, {""}):
        found = [str(body) for language, body in blocks if language in wanted and body.strip()]
        if found:
            return found[-1]
    if len(answer) > _MOST_CHARACTERS:
        return None
    return answer if not blocks and _is_program(answer) else None


def _fenced(answer: str) -> Iterator[tuple[str, str]]:
    """(language, contents) of each block between fences; a fence that is not closed is none."""
    lines, place = answer.split("\n"), 0
    longest = {mark: _longest_from(lines, mark) for mark in "`~"}
    while place < len(lines):
        fence = _FENCE.match(lines[place])
        place += 1
        if fence is None or longest[fence[1][0]][place] < len(fence[1]):
            continue
        begin = place
        while _closing(lines[place], fence[1][0]) < len(fence[1]):
            place += 1
        yield fence[2].lower(), "".join(f"{line}\n" for line in lines[begin:place])
        place += 1


def _longest_from(lines: Sequence[str], mark: str) -> list[int]:
    """For each place, the longest fence that a line from there on closes; 0 at the end."""
    lengths = [_closing(line, mark) for line in lines]
    return [*accumulate(reversed(lengths), max, initial=0)][::-1]


def _closing(line: str, mark: str) -> int:
    """How long a fence the line closes; 0 where it closes none."""
    text = line.strip(" \t\r")
    return 0 if text.strip("`~") else len(text) - len(text.lstrip(mark))


def _is_program(text: str) -> bool:
    """Whether a text is Python and not a word or two that happen to parse."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    calls = [node for node in tree.body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    return bool(calls) or any(isinstance(node, _TELLING) for node in tree.body)


async def judge(
    problem: Problem,
    program: str | None,
    sandbox: Sandbox,
    *,
    limits: Limits,
    counting: Counting = "pass_rate",
    cache: ResultCache[Verdict] | None = None,
) -> Verdict:
    """Runs the program against the problem's tests, each in a sandbox of its own, or finds the verdict in the cache.

    No program passes nothing. Counted as all or nothing, the first failure ends the rest. A verdict that a busy machine
    may have caused (`wall`, `killed`) is not kept. Raises `SandboxError` where the sandbox failed.
    """
    if program is None or not program.strip() or "\0" in program:
        return Verdict(num_passed=0, num_tests=len(problem.tests))
    tests = f"{problem.digest} {limits} {counting}"
    known = None if cache is None else cache.get(program, tests)
    if known is not None:
        return known
    verdict = await _run_all(problem.tests, program, sandbox, limits, counting)
    if cache is not None and not {"wall", "killed"}.intersection(verdict.limits):
        cache.put(program, tests, verdict)
    return verdict


async def _run_all(
    tests: tuple[Test, ...], program: str, sandbox: Sandbox, limits: Limits, counting: Counting
) -> Verdict:
    runs = [asyncio.create_task(_run_one(test, program, sandbox, limits)) for test in tests]
    num_passed, num_ended, hit = 0, 0, set[LimitName]()
    try:
        for run in asyncio.as_completed(runs):
            passed, limit = await run
            num_passed, num_ended = num_passed + passed, num_ended + 1
            if limit is not None:
                hit.add(limit)
            if counting == "all_or_nothing" and not passed:
                break
    finally:
        for task in runs:
            task.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
    return Verdict(
        num_passed=num_passed, num_tests=len(tests), limits=tuple(sorted(hit)), complete=num_ended == len(tests)
    )


async def _run_one(test: Test, program: str, sandbox: Sandbox, limits: Limits) -> tuple[bool, LimitName | None]:
    trial = test.trial(program)
    result = await sandbox.run(trial.program, stdin=trial.stdin, limits=limits)
    return test.passed(trial, result), result.limit
