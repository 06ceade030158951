"""What a program is worth by its tests, and whether a critique says plainly what it thinks."""

import ast
import asyncio
import re
from collections.abc import Iterator
from typing import Literal

import msgspec

from orchestrator.envs.critique.problems import Problem
from orchestrator.sandbox import LimitName, Limits, ResultCache, Sandbox

Judgement = Literal["correct", "incorrect"]
Counting = Literal["pass_rate", "all_or_nothing"]

_JUDGEMENT = re.compile(r"overall\s+judge?ment\W{1,20}(correct|incorrect)\b", re.IGNORECASE)
_MOST_CHARACTERS = 20_000
"""Of an answer without a fenced block that is looked at as a program: all rollouts wait while it is parsed."""
_TELLING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.For)


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """How a program fared. Example: ``Verdict(num_passed=2, num_tests=3, limits=("wall",))``"""

    num_passed: int
    num_tests: int
    limits: tuple[LimitName, ...] = ()
    """The limits that runs hit, each once, by name."""

    def reward(self, counting: Counting) -> float:
        """Returns the share of tests passed, or 1 for all and 0 for less."""
        if counting == "all_or_nothing":
            return float(self.num_passed == self.num_tests)
        return self.num_passed / self.num_tests


def judgement_of(critique: str) -> Judgement | None:
    """Returns what a critique says of the program: `Overall judgment: Correct` or `Incorrect`, the last where it says
    so more than once; None where it does not say."""
    found = _JUDGEMENT.findall(critique)
    if not found:
        return None
    return "correct" if found[-1].lower() == "correct" else "incorrect"


def extract_program(answer: str) -> str | None:
    """Returns the program in an answer: its last fenced block of Python, or last block of no named language, or the
    whole answer where it is Python of at most 20,000 characters. None where there is none."""
    blocks = list(_fenced(answer))
    for wanted in (("python", "python3", "py"), ("",)):
        found = [body for language, body in blocks if language in wanted and body.strip()]
        if found:
            return found[-1]
    return answer if not blocks and len(answer) <= _MOST_CHARACTERS and _is_program(answer) else None


def _fenced(answer: str) -> Iterator[tuple[str, str]]:
    """Yields (language, contents) of each block between fences; a fence that is not closed is none."""
    fence, language, body = "", "", list[str]()
    for line in answer.splitlines(keepends=True):
        text = line.strip()
        marks = text[: len(text) - len(text.lstrip("`"))]
        if not fence and len(marks) >= 3:
            fence, language, body = marks, text[len(marks) :].strip().lower(), []
        elif fence and text == marks and len(marks) >= len(fence):
            yield language, "".join(body)
            fence = ""
        elif fence:
            body.append(line)


def _is_program(text: str) -> bool:
    """Returns whether a text is Python and not a word or two that happen to parse."""
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
    verdict = await _run_all(problem, program, sandbox, limits, counting)
    if cache is not None and not {"wall", "killed"}.intersection(verdict.limits):
        cache.put(program, tests, verdict)
    return verdict


async def _run_all(problem: Problem, program: str, sandbox: Sandbox, limits: Limits, counting: Counting) -> Verdict:
    runs = [asyncio.create_task(test.outcome(program, sandbox, limits)) for test in problem.tests]
    num_passed, hit = 0, set[LimitName]()
    try:
        for run in asyncio.as_completed(runs):
            passed, limit = await run
            num_passed += passed
            if limit is not None:
                hit.add(limit)
            if counting == "all_or_nothing" and not passed:
                break
    finally:
        for task in runs:
            task.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
    return Verdict(num_passed=num_passed, num_tests=len(runs), limits=tuple(sorted(hit)))
