"""What programs are worth in real sandboxes, by tests of all styles, and what they cannot do to their tests."""

import json
from typing import Any

import pytest
from grpo.environments.critique.problems import problem_from_record
from grpo.environments.critique.testing import run_tests
from grpo.environments.sandbox.local import LocalSandbox
from grpo.environments.sandbox.records import Limits

LIMITS = Limits(wall_s=60.0, cpu_s=30.0)
ADDITION = {"question": "Add.", "inputs": ["1 2", "2 2", "3 3", "4 4"], "outputs": ["3", "4", "6", "8"]}
UNIT = {"question": "Write double.", "tests": ["assert double(2) == 4", "assert double(3) == 6"]}
FUNCTIONS = {
    "question": "Write double.",
    "tests": ["def test_two(n=2):\n    assert double(n) == 4\n", "def test_three():\n    assert double(3) == 6"],
}
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
        (ADDITION, "a, b = map(int, input().split())\nprint(a * b if a == 2 else 3)", 0.5),
        (UNIT, FUNCTION.format("2 * x"), 1.0),
        (UNIT, FUNCTION.format("exit()"), 0.0),
        (UNIT, "import os\nos._exit(0)", 0.0),
        (FUNCTIONS, FUNCTION.format("2 * x"), 1.0),
        (HUMANEVAL, FUNCTION.format("2 * x"), 1.0),
        (CALL, FUNCTION.format("2 * x"), 1.0),
        (CALL, METHOD.format("4"), 0.5),
    ],
)
async def test_programs_are_judged(sandbox: LocalSandbox, record: dict[str, Any], program: str, passed: float) -> None:
    tests = problem_from_record(record).tests
    assert await run_tests(tests, program, sandbox, LIMITS) == (passed, set())
    assert (await run_tests(tests, program, sandbox, LIMITS, all_or_nothing=True))[0] == float(passed == 1.0)


@pytest.mark.parametrize(
    ("test", "program"),
    [
        ("assert f(2.5) == (True, None, 'ä', b'\\xff', 1j, {1: [2]}, {3}, frozenset({4}))",
         "def f(x):\n return True, None, 'ä', b'\\xff', 1j, {1: [2]}, {3}, frozenset({4})"),
        ("assert list(f(3)) == [0, 1, 2] and sorted(g([2, 1])) == [1, 2]",
         "def f(n):\n yield from range(n)\ndef g(x): return map(int, x)"),
        ("a, b = [2, 1], {}\nf(a, b)\nassert (a, b) == ([1, 2], {3: 4})", "def f(a, b):\n a.sort()\n b[3] = 4"),
        ("try:\n f(0)\nexcept ZeroDivisionError:\n pass\nelse:\n raise AssertionError", "def f(n): return 1 / n"),
        ("assert total([Pair(1, b=2), Pair(3, 4)]) == 10 and Pair(5, 6).a == 5 and LEAST == 7",
         "LEAST = 7\nclass Pair:\n def __init__(self, a, b): self.a, self.b = a, b\n"
         "def total(ps): return sum(p.a + p.b for p in ps)"),
        ("assert math.isclose(f(2), 2 ** 0.5) and f(float('inf')) == math.inf", "import math\nf = math.sqrt"),
    ],
)  # fmt: skip
async def test_what_tests_and_programs_may_exchange(sandbox: LocalSandbox, test: str, program: str) -> None:
    problem = problem_from_record({"question": "Q", "tests": [test]})
    assert (await run_tests(problem.tests, program, sandbox, LIMITS))[0] == 1.0


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
        "builtins_of_its_own": """
import json, os
own = [["tuple", [name, ["object", 0]]] for name in ("abs", "__import__")]
names = {"__builtins__": ["dict", own], "f": ["object", 0]}
pipes = [fd for fd in range(3, 64) if os.path.exists(f"/proc/self/fd/{fd}")]
reply = json.dumps([None, ["dict", [["tuple", [name, value]] for name, value in names.items()]], None])
while True:
    for fd in pipes:
        try:
            os.write(fd, reply.encode() + b"\\n")
        except OSError:
            requests = fd
    os.read(requests, 1 << 16)
    reply = json.dumps([None, 0, ["list", []]])
""",
        "own_math": "class math:\n isclose = staticmethod(lambda a, b: True)\ndef f(n): return 5",
        "modules": "import math\nmath.isclose = lambda a, b: True\ndef f(n): return 5",
    }.items(),
    ids=lambda item: item[0],
)
async def test_a_program_cannot_pass_without_the_right_values(sandbox: LocalSandbox, program: tuple[str, str]) -> None:
    tests = ["assert f(2) == 4", "assert abs(f(2) - 4) < 1e-6", "assert math.isclose(f(2), 4)", "assert not f(2) != 4"]
    problem = problem_from_record({"question": "Q", "tests": tests})
    share, limits = await run_tests(problem.tests, program[1], sandbox, Limits(wall_s=30.0))
    assert (share, "wall" in limits) == (0.0, False)
