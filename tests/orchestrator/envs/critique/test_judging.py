"""What programs and critiques are worth."""

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

import pytest

from orchestrator.envs.critique.judging import (
    Counting,
    Verdict,
    critique_reward,
    extract_program,
    judge,
    judgement_of,
)
from orchestrator.envs.critique.problems import Problem, problem_from_record
from orchestrator.sandbox import Input, LimitName, Limits, LocalSandbox, Program, Result, ResultCache
from tests.orchestrator.sandbox.conftest import needs_bubblewrap, sandbox

__all__ = ["needs_bubblewrap", "sandbox"]

LIMITS = Limits(wall_s=60.0, cpu_s=30.0)
ADDITION = problem_from_record(
    {"question": "Add.", "inputs": ["1 2", "2 2", "3 3", "4 4"], "outputs": ["3", "4", "6", "8"]}
)
HALF_RIGHT = "a, b = map(int, input().split())\nprint(a * b if a == 2 else 3)"


class FakeSandbox:
    """Prints what `answers` has for an input, and counts the runs."""

    def __init__(self, answers: Mapping[str, str], limit: LimitName | None = None) -> None:
        self.answers, self.limit, self.num_runs = answers, limit, 0

    async def run(
        self,
        program: Program,
        *,
        stdin: Input = b"",
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
    ) -> Result:
        self.num_runs += 1
        await asyncio.sleep(0)
        given = stdin() if callable(stdin) else stdin
        out = self.answers.get(given.decode(), "").encode()
        return Result(
            exit_code=0, signal=None, stdout=out, stderr=b"", stdout_bytes=len(out), stderr_bytes=0, limit=self.limit,
            wall_s=0.0, cpu_s=0.0,
        )  # fmt: skip

    async def close(self) -> None: ...


@pytest.mark.parametrize(
    ("critique", "judgement"),
    [
        ("Fine.\nOverall judgment: Correct", "correct"),
        ("Overall judgement: incorrect.", "incorrect"),
        ("**Overall judgment:** **Incorrect**", "incorrect"),
        ("Overall judgment - Correct", "correct"),
        ("Overall judgment: Correct? No. Overall judgment: Incorrect", "incorrect"),
        ("The program is correct.", None),
        ("Overall judgment: unclear", None),
        ("Overall judgment: correctable", None),
        ("", None),
    ],
)
def test_the_judgement_of_a_critique(critique: str, judgement: str | None) -> None:
    assert judgement_of(critique) == judgement


def test_a_critique_without_a_judgement_earns_nothing() -> None:
    verdict = Verdict(num_passed=3, num_tests=4)
    assert critique_reward("Overall judgment: Incorrect", verdict, "pass_rate") == 0.75
    assert critique_reward("Overall judgment: Incorrect", verdict, "all_or_nothing") == 0.0
    assert critique_reward("It is wrong.", Verdict(num_passed=4, num_tests=4), "pass_rate") == 0.0


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("Here:\n```python\nprint(1)\n```\nDone.", "print(1)\n"),
        ("```python\nprint(1)\n```\nBetter:\n```py\nprint(2)\n```", "print(2)\n"),
        ("```\nprint(1)\n```", "print(1)\n"),
        ("```python\nprint(1)\n```\nOutput:\n```\n1\n```", "print(1)\n"),
        ("```text\nnothing\n```", None),
        ("~~~python\nprint('```')\n~~~", "print('```')\n"),
        ("  ```python\n  print(1)\n  ```", "  print(1)\n"),
        ("print(input())", "print(input())"),
        ("def f():\n    return 1", "def f():\n    return 1"),
        ("Sorry", None),
        ("I cannot do that.", None),
        ("```python\n\n```", None),
        ("", None),
    ],
)
def test_the_program_of_an_answer(answer: str, program: str | None) -> None:
    assert extract_program(answer) == program


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("```python\r\nprint(1)\r\n```\r\n", "print(1)\r\n"),
        ("```python\nprint(1)\n", None),
        ("~~~\nnot closed\n```python\nprint(1)\n```", "print(1)\n"),
        ("````python\n```\nprint(1)\n````", "```\nprint(1)\n"),
        ("```python\nprint(1)\n```python\nprint(2)\n```", "print(1)\n```python\nprint(2)\n"),
        ("x=1\n" * 50_000, None),
    ],
)
def test_the_program_between_unusual_fences(answer: str, program: str | None) -> None:
    assert extract_program(answer) == program


def test_time_to_find_a_program_grows_with_the_answers_length_alone() -> None:
    began = time.process_time()
    for answer in ("```python\n" * 20_000, "`" * 200_000, "```a\n~~~b\n" * 20_000):
        assert extract_program(answer) is None
    assert time.process_time() - began < 10  # pairs of lines would take minutes


async def test_inputs_are_made_for_those_tests_alone_whose_turn_it_is() -> None:
    made: list[bytes] = []

    class Full(FakeSandbox):
        async def run(self, program: Program, *, stdin: Input = b"", **others: Any) -> Result:
            if self.num_runs > 0:
                await asyncio.Event().wait()
            made.append(stdin() if callable(stdin) else b"made before")
            return await super().run(program, stdin=made[-1])

    for record in (UNIT, CALL, {"question": "Q", "inputs": ["1", "2"], "outputs": ["1", "2"]}):
        made.clear()
        judging = asyncio.create_task(judge(problem_from_record(record), "x", Full({}), limits=LIMITS))
        while not made and not judging.done():  # noqa: ASYNC110
            await asyncio.sleep(0)
        judging.cancel()
        assert made
        assert made[0] != b"made before"


@pytest.mark.parametrize(("counting", "reward"), [("pass_rate", 0.5), ("all_or_nothing", 0.0)])
async def test_half_of_the_tests_passed(counting: Counting, reward: float) -> None:
    fake = FakeSandbox({"1 2": "3", "2 2": "4.0", "3 3": "9", "4 4": ""})
    verdict = await judge(ADDITION, "x", fake, limits=LIMITS, counting=counting)
    assert verdict.reward(counting) == reward
    if counting == "pass_rate":
        assert verdict == Verdict(num_passed=2, num_tests=4)


async def test_a_program_that_passes_all_is_worth_one_both_ways() -> None:
    fake = FakeSandbox({"1 2": "3", "2 2": "4", "3 3": "6", "4 4": "8"})
    verdict = await judge(ADDITION, "x", fake, limits=LIMITS, counting="all_or_nothing")
    assert verdict == Verdict(num_passed=4, num_tests=4)
    assert verdict.reward("pass_rate") == verdict.reward("all_or_nothing") == 1.0


async def test_no_program_passes_nothing_and_runs_nothing() -> None:
    fake = FakeSandbox({})
    for nothing in (None, " \n", "a\0b"):
        assert await judge(ADDITION, nothing, fake, limits=LIMITS) == Verdict(num_passed=0, num_tests=4)
    assert fake.num_runs == 0


async def test_a_program_that_says_the_same_is_found_in_the_cache() -> None:
    fake, cache = FakeSandbox({"1 2": "3"}), ResultCache(Verdict)
    first = await judge(ADDITION, "print(3)", fake, limits=LIMITS, cache=cache)
    assert await judge(ADDITION, "print( 3 )  # so", fake, limits=LIMITS, cache=cache) == first
    assert (fake.num_runs, cache.num_hits) == (4, 1)
    await judge(ADDITION, "print(3)", fake, limits=LIMITS, counting="all_or_nothing", cache=cache)
    await judge(ADDITION, "print(3)", fake, limits=Limits(), cache=cache)
    assert cache.num_hits == 1


@pytest.mark.parametrize(("limit", "kept"), [("wall", False), ("killed", False), ("memory", True), (None, True)])
async def test_verdicts_that_a_busy_machine_may_have_caused_are_not_kept(limit: LimitName | None, kept: bool) -> None:
    fake, cache = FakeSandbox({}, limit), ResultCache(Verdict)
    verdict = await judge(ADDITION, "x", fake, limits=LIMITS, cache=cache)
    assert verdict.limits == (() if limit is None else (limit,))
    await judge(ADDITION, "x", fake, limits=LIMITS, cache=cache)
    assert fake.num_runs == (4 if kept else 8)


UNIT = {"question": "Write double.", "tests": ["assert double(2) == 4", "assert double(3) == 6"]}
HUMANEVAL = {
    "prompt": "Write double.",
    "entry_point": "double",
    "test": "METADATA = {}\n\ndef check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 6\n",
}
PYTEST = {
    "question": "Write double.",
    "tests": "def test_two():\n    assert double(2) == 4\n    assert double(3) == 6\n",
}
CALL: dict[str, Any] = {
    "question_content": "Write Solution.double.",
    "metadata": json.dumps({"func_name": "double"}),
    "public_test_cases": json.dumps([{"input": "2", "output": "4", "testtype": "functional"}]),
    "private_test_cases": json.dumps([{"input": "3", "output": "6", "testtype": "functional"}]),
}
METHOD = "class Solution:\n    def double(self, x):\n        print('noise')\n        return {}\n"
FUNCTION = "def double(x):\n    print('noise', end='')\n    return {}\n"


@pytest.mark.parametrize(
    ("record", "program", "passed"),
    [
        (UNIT, FUNCTION.format("2 * x"), 2),
        (UNIT, FUNCTION.format("4"), 1),
        (UNIT, FUNCTION.format("exit()"), 0),
        (UNIT, "import os\nos._exit(0)", 0),
        (UNIT, "raise SystemExit", 0),
        (UNIT, "def double(", 0),
        (HUMANEVAL, FUNCTION.format("2 * x"), 1),
        (HUMANEVAL, FUNCTION.format("4"), 0),
        (PYTEST, FUNCTION.format("2 * x"), 1),
        (PYTEST, FUNCTION.format("4"), 0),
        (CALL, METHOD.format("2 * x"), 2),
        (CALL, FUNCTION.format("2 * x"), 2),
        (CALL, METHOD.format("4"), 1),
        (CALL, METHOD.format("object()"), 0),
        (CALL, "print('4')", 0),
    ],
)
async def test_programs_are_judged_in_real_sandboxes(
    sandbox: LocalSandbox, record: dict[str, Any], program: str, passed: int
) -> None:
    problem: Problem = problem_from_record(record)
    expected = Verdict(num_passed=passed, num_tests=len(problem.tests))
    assert await judge(problem, program, sandbox, limits=LIMITS) == expected


async def test_standard_input_is_judged_in_real_sandboxes(sandbox: LocalSandbox) -> None:
    assert await judge(ADDITION, HALF_RIGHT, sandbox, limits=LIMITS) == Verdict(num_passed=2, num_tests=4)
