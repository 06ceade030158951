"""What programs and critiques are worth."""

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

import pytest

from orchestrator.envs.critique.judging import Counting, Verdict, extract_program, judge, judgement_of
from orchestrator.envs.critique.problems import problem_from_record
from orchestrator.sandbox import Input, LimitName, Limits, LocalSandbox, Result, ResultCache
from tests.orchestrator.sandbox.conftest import needs_bubblewrap, sandbox

__all__ = ["needs_bubblewrap", "sandbox"]

LIMITS = Limits(wall_s=60.0, cpu_s=30.0)
ADDITION = problem_from_record(
    {"question": "Add.", "inputs": ["1 2", "2 2", "3 3", "4 4"], "outputs": ["3", "4", "6", "8"]}
)


class FakeSandbox:
    """Prints what `answers` has for an input, and counts the runs."""

    def __init__(self, answers: Mapping[str, str], limit: LimitName | None = None) -> None:
        self.answers, self.limit, self.num_runs = answers, limit, 0

    async def run(self, program: str, *, stdin: Input = b"", limits: Limits | None = None) -> Result:
        self.num_runs += 1
        await asyncio.sleep(0)
        given = stdin() if callable(stdin) else stdin
        out = self.answers.get(given.decode(), "").encode()
        return Result(exit_code=0, stdout=out, stderr=b"", limit=self.limit, wall_s=0.0)

    async def close(self) -> None: ...


@pytest.mark.parametrize(
    ("critique", "judgement"),
    [
        ("Fine.\nOverall judgment: Correct", "correct"),
        ("**Overall judgement:** **incorrect**.", "incorrect"),
        ("Overall judgment: Correct? No. Overall judgment: Incorrect", "incorrect"),
        ("The program is correct.", None),
        ("Overall judgment: correctable", None),
    ],
)
def test_the_judgement_of_a_critique(critique: str, judgement: str | None) -> None:
    assert judgement_of(critique) == judgement


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("Here:\n```python\nprint(1)\n```\nDone.", "print(1)\n"),
        ("```python\nprint(1)\n```\nBetter:\n```py\nprint(2)\n```", "print(2)\n"),
        ("```python\nprint(1)\n```\nOutput:\n```\n1\n```", "print(1)\n"),
        ("```text\nnothing\n```", None),
        ("```python\r\nprint(1)\r\n```\r\n", "print(1)\r\n"),
        ("````python\n```\nprint(1)\n````", "```\nprint(1)\n"),
        ("```python\nprint(1)\n", None),
        ("```python\n\n```", None),
        ("print(input())", "print(input())"),
        ("Sorry", None),
        ("x=1\n" * 50_000, None),
    ],
)
def test_the_program_of_an_answer(answer: str, program: str | None) -> None:
    assert extract_program(answer) == program


def test_time_to_find_a_program_grows_with_the_answers_length_alone() -> None:
    began = time.process_time()
    for answer in ("```python\n" * 20_000, "`" * 200_000, "```a\n````b\n" * 20_000):
        assert extract_program(answer) is None
    assert time.process_time() - began < 10  # pairs of lines would take minutes


@pytest.mark.parametrize(("counting", "reward"), [("pass_rate", 0.5), ("all_or_nothing", 0.0)])
async def test_half_of_the_tests_passed(counting: Counting, reward: float) -> None:
    fake = FakeSandbox({"1 2": "3", "2 2": "4.0", "3 3": "9", "4 4": ""})
    assert (await judge(ADDITION, "x", fake, limits=LIMITS, counting=counting)).reward(counting) == reward


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


@pytest.mark.parametrize(("limit", "kept"), [("wall", False), ("killed", False), ("memory", True)])
async def test_verdicts_that_a_busy_machine_may_have_caused_are_not_kept(limit: LimitName, kept: bool) -> None:
    fake, cache = FakeSandbox({}, limit), ResultCache(Verdict)
    verdict = await judge(ADDITION, "x", fake, limits=LIMITS, cache=cache)
    assert verdict.limits == (limit,)
    await judge(ADDITION, "x", fake, limits=LIMITS, cache=cache)
    assert fake.num_runs == (4 if kept else 8)


# --- in sandboxes ---

UNIT = {"question": "Write double.", "tests": ["assert double(2) == 4", "assert double(3) == 6"]}
HUMANEVAL = {
    "prompt": "Write double.",
    "entry_point": "double",
    "test": "METADATA = {}\n\ndef check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 6\n",
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
        (UNIT, "def double(", 0),
        (HUMANEVAL, FUNCTION.format("2 * x"), 1),
        (HUMANEVAL, FUNCTION.format("4"), 0),
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
    problem = problem_from_record(record)
    expected = Verdict(num_passed=passed, num_tests=len(problem.tests))
    assert await judge(problem, program, sandbox, limits=LIMITS) == expected


async def test_standard_input_is_judged_in_real_sandboxes(sandbox: LocalSandbox) -> None:
    half_right = "a, b = map(int, input().split())\nprint(a * b if a == 2 else 3)"
    assert await judge(ADDITION, half_right, sandbox, limits=LIMITS) == Verdict(num_passed=2, num_tests=4)


@pytest.mark.parametrize(
    ("test", "program"),
    [
        ("assert f(2.5) == (True, None, 'ä', b'\\xff', 1j, {1: [2]}, {3}, frozenset({4}))",
         "def f(x):\n return True, None, 'ä', b'\\xff', 1j, {1: [2]}, {3}, frozenset({4})"),
        ("assert f('aab') == {'a': 2, 'b': 1}", "from collections import Counter\ndef f(x): return Counter(x)"),
        ("assert list(f(3)) == [0, 1, 2] and sorted(g([2, 1])) == [1, 2]",
         "def f(n):\n yield from range(n)\ndef g(x): return map(int, x)"),
        ("a, b = [2, 1], {}\nf(a, b)\nassert (a, b) == ([1, 2], {3: 4})", "def f(a, b):\n a.sort()\n b[3] = 4"),
        ("try:\n f(0)\nexcept ZeroDivisionError:\n pass\nelse:\n raise AssertionError", "def f(n): return 1 / n"),
        ("assert total([Pair(1, b=2), Pair(3, 4)]) == 10 and Pair(5, 6).a == 5 and LEAST == 7",
         "LEAST = 7\nclass Pair:\n def __init__(self, a, b): self.a, self.b = a, b\n"
         "def total(ps): return sum(p.a + p.b for p in ps)"),
        ("assert math.isclose(f(2), 2 ** 0.5) and f(float('inf')) == math.inf", "import math\nf = math.sqrt"),
        ("assert f(10 ** 5000) == 10 ** 5000 + 1", "def f(n): return n + 1"),
    ],
)  # fmt: skip
async def test_what_tests_and_programs_may_exchange(sandbox: LocalSandbox, test: str, program: str) -> None:
    problem = problem_from_record({"question": "Q", "tests": [test]})
    assert (await judge(problem, program, sandbox, limits=LIMITS)).num_passed == 1


@pytest.mark.parametrize(
    "program",
    {
        "equals_everything": "class E:\n def __eq__(self, other): return True\n __ne__ = None\ndef f(n): return E()",
        "lists_that_equal": "class E(list):\n def __eq__(self, other): return True\ndef f(n): return E()",
        "a_number_of_its_own": "class E(int):\n def __eq__(self, other): return True\ndef f(n): return E(5)",
        "own_abs": "def abs(x): return 0\ndef f(n): return 5",
        "frames": """
import os, sys
frame = sys._getframe()
while frame:
    for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
        text = value.get("mark") if isinstance(value, dict) else value
        if isinstance(text, str) and len(text) == 32:
            os.write(1, f"\\n{text}\\n".encode())
            os._exit(0)
    frame = frame.f_back
""",
        "files": """
import os, re
for pid in {p for p in os.listdir("/proc") if p.isdigit()} - {str(os.getpid())}:
    for name in ["environ", "cmdline", "mem", *(f"fd/{n}" for n in range(20))]:
        try:
            if re.search(rb'"mark": "[0-9a-f]{32}', os.read(os.open(f"/proc/{pid}/{name}", os.O_NONBLOCK), 1 << 20)):
                os.kill(-1, 19)
        except OSError:
            pass
def f(n): return 5
""",
        "memory_of_the_test": """
import os
for line in open(f"/proc/{os.getppid()}/maps"):
    os.kill(os.getppid(), 19)
""",
        "kills_the_test": "import os\nos.kill(os.getppid(), 9)",
        "modules": "import math\nmath.isclose = lambda a, b: True\ndef f(n): return 5",
    }.items(),
    ids=lambda item: item[0],
)
async def test_a_program_cannot_pass_without_the_right_values(sandbox: LocalSandbox, program: tuple[str, str]) -> None:
    tests = ["assert f(2) == 4", "assert abs(f(2) - 4) < 1e-6", "assert math.isclose(f(2), 4)", "assert not f(2) != 4"]
    problem = problem_from_record({"question": "Q", "tests": tests})
    verdict = await judge(problem, program[1], sandbox, limits=Limits(wall_s=30.0))
    assert (verdict.num_passed, "wall" in verdict.limits) == (0, False)
