"""Problem records of three styles, and the programs that test them."""

import base64
import json
import pickle
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from orchestrator.envs.critique.problems import (
    CallTest,
    InputTest,
    Test,
    UnitTest,
    UnknownRecord,
    problem_from_record,
    same_output,
    same_value,
)
from orchestrator.sandbox import Result


def ended(stdout: str, exit_code: int = 0) -> Result:
    out = stdout.encode()
    return Result(
        exit_code=exit_code, signal=None, stdout=out, stderr=b"", stdout_bytes=len(out), stderr_bytes=0,
        limit=None, wall_s=0.1, cpu_s=0.1,
    )  # fmt: skip


def test_unit_test_records() -> None:
    problem = problem_from_record(
        {
            "task_id": 11,
            "text": "Write double.",
            "code": "def double(x): ...",
            "test_imports": ["import math", "import re"],
            "test_list": ["assert double(1) == 2", "assert double(2) == 4"],
        }
    )
    assert (problem.name, problem.question, problem.program) == ("11", "Write double.", "def double(x): ...")
    setup = "import math\nimport re"
    assert problem.tests == (
        UnitTest(setup=setup, code="assert double(1) == 2"),
        UnitTest(setup=setup, code="assert double(2) == 4"),
    )


def test_standard_input_records() -> None:
    given = {"inputs": ["1 2\n", ["3 4", "5"]], "outputs": ["3\n", ["7", "5"]]}
    tests = (InputTest(stdin="1 2\n", expected="3\n"), InputTest(stdin="3 4\n5", expected="7\n5"))
    assert problem_from_record({"question": "Add.", **given}).tests == tests
    assert problem_from_record({"question": "Add.", "input_output": json.dumps(given)}).tests == tests


def test_records_with_a_functions_name_call_it() -> None:
    record = {"question": "Add.", "inputs": [[1, 2]], "outputs": [[3]], "fn_name": "add"}
    expected = CallTest(function="add", arguments=(1, 2), expected=[3], wrapped=True)
    assert problem_from_record(record).tests == (expected,)


def returned(test: Test, value: Any) -> bool:
    """Whether a program that returns this passes."""
    trial = test.trial("")
    return test.passed(trial, ended(f"{trial.mark} {json.dumps(value)}\n"))


def test_outputs_that_are_all_lists_of_one_may_be_wrapped_or_not() -> None:
    calls = {"question": "Q", "fn_name": "f", "inputs": [[1], [2]]}
    first, second = problem_from_record({**calls, "outputs": [[3], [[4]]]}).tests
    assert [returned(first, value) for value in (3, [3], [[3]], 4)] == [True, True, False, False]
    assert [returned(second, value) for value in ([4], [[4]], 4)] == [True, True, False]
    first, second = problem_from_record({**calls, "outputs": [[2, 4], [2]]}).tests
    assert [returned(first, value) for value in ([2, 4], 2)] == [True, False]
    assert [returned(second, value) for value in ([2], 2)] == [True, False]


CASES = [
    {"input": "1 2", "output": "3", "testtype": "stdin"},
    {"input": '[1, 2]\n"x"', "output": "[3]", "testtype": "functional"},
]
METADATA = json.dumps({"func_name": "add"})


def packed(cases: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


@pytest.mark.parametrize("written", [json.dumps, repr])
def test_unit_tests_that_are_a_list_in_a_text_are_a_list(written: Callable[[Any], str]) -> None:
    pieces = ["assert f(1) == 2", 'assert f("a") == "b"']
    given = {"question": "Q", "tests": written(pieces), "test_imports": written(["import math"])}
    expected = tuple(UnitTest(setup="import math", code=piece) for piece in pieces)
    assert problem_from_record(given).tests == expected


def test_imports_and_setup_of_unit_tests_are_joined() -> None:
    given = {"question": "Q", "tests": ["assert f(1) == 2"], "test_imports": ["import math"]}
    for setup, expected in (("", "import math"), ("x = 1", "import math\nx = 1"), (None, "import math")):
        [test] = problem_from_record({**given, "test_setup_code": setup}).tests
        assert isinstance(test, UnitTest)
        assert test.setup == expected


@pytest.mark.parametrize(
    ("piece", "calls"),
    [
        ("def test_a():\n    assert f(1)", "\ntest_a()"),
        ("def test_a(n=1):\n    assert f(n)\n\ndef test_b():\n    assert f(2)", "\ntest_a()\ntest_b()"),
        ("def test_a():\n    assert f(1)\ntest_a()", ""),
        ("def check(candidate):\n    assert candidate(1)", "\ncheck(f)"),
        ("def check(candidate):\n    assert candidate(1)\ncheck(f)", ""),
        ("def check(candidate):\n    check = candidate(1)\n    assert check", "\ncheck(f)"),
        ("def test_a(n=3):\n    assert test_a(n - 1) if n else f(1)", "\ntest_a()"),
        ("def test_a():\n    assert f(1)\nALL = [test_a]", "\ntest_a()"),
        ("def test_a():\n    assert f(1)\ndef test_all():\n    test_a()", "\ntest_all()"),
        ("def test_a(n):\n    assert f(n)\nfor n in range(3):\n    test_a(n)", ""),
        ("def test_a(n):\n    assert f(n)\nany(map(test_a, [1, 2]))", ""),
        ("for n in range(3):\n    assert f(n)", ""),
        ("check_all()", ""),
        ("f(1) == 2 or fail()", ""),
    ],
)
def test_functions_that_test_are_called(piece: str, calls: str) -> None:
    [test] = problem_from_record({"question": "Q", "tests": [piece], "entry_point": "f"}).tests
    assert isinstance(test, UnitTest)
    assert test.code == piece + calls


@pytest.mark.parametrize("private", [json.dumps(CASES[1:]), packed(CASES[1:])])
def test_livecodebench_records_with_public_and_private_tests(private: str) -> None:
    problem = problem_from_record(
        {
            "question_id": "abc_1",
            "question_content": "Add.",
            "starter_code": "class Solution:",
            "public_test_cases": json.dumps(CASES[:1]),
            "private_test_cases": private,
            "metadata": METADATA,
        }
    )
    public = InputTest(stdin="1 2", expected="3", public=True)
    assert problem.tests == (public, CallTest(function="add", arguments=([1, 2], "x"), expected=[3]))
    assert problem.public_tests == (public,)
    assert (problem.name, problem.starter_code) == ("abc_1", "class Solution:")


class Explodes:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('unpickled')",)


def test_packed_tests_are_read_without_running_what_they_hold() -> None:
    hostile = base64.b64encode(zlib.compress(pickle.dumps(Explodes()))).decode()
    with pytest.raises(UnknownRecord, match="neither JSON nor packed JSON"):
        problem_from_record({"question": "Q", "private_test_cases": hostile})


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "Q"}, r"a problem needs its tests: .* got the keys \['question'\]"),
        ({"question": "Q", "tests": []}, "has no tests"),
        ({"tests": ["assert True"], "answer": 1}, r"has no question: .* got the keys \['answer', 'tests'\]"),
        ({"question": "Q", "tests": [1]}, "list of pieces of Python"),
        ({"question": "Q", "tests": "[1]"}, "list of pieces of Python"),
        ({"question": "Q", "tests": ["assert True"], "setup": 1}, "'setup' is 1: expected Python"),
        (
            {"question": "Q", "tests": ["assert f(1"]},
            r"the unit test 'assert f\(1' is no Python: '\(' was never closed",
        ),
        ({"question": "Q", "tests": ["import f\nX = 1\n'text'"]}, "would pass every program"),
        ({"question": "Q", "tests": ["f(1) == 2"]}, "would pass every program"),
        ({"question": "Q", "tests": ["f(1) == 2 and not f(2)"]}, "would pass every program"),
        ({"question": "Q", "tests": ["result = f(1)\nresult == 2"]}, "would pass every program"),
        ({"question": "Q", "tests": ["class T:\n    def test_a(self): assert f(1)"]}, "would pass every program"),
        ({"question": "Q", "tests": ["def test_a(x): assert f(x)"]}, "defines test_a, which cannot be called here"),
        ({"question": "Q", "tests": ["def check(c): assert c(1)"]}, "expected the function .* 'entry_point', got None"),
        ({"question": "Q", "tests": ["def check(c): assert c(1)"], "entry_point": "f()"}, r"got 'f\(\)'"),
        *(
            ({"question": "Q", "tests": [f"{check}: assert f(1)"], "entry_point": "f"}, "of one argument")
            for check in ("async def check(c)", "@cache\ndef check(c)", "def check()", "def check(c, n)")
        ),
        ({"question": "Q", "inputs": ["1"], "outputs": []}, "same length"),
        ({"question": "Q", "inputs": ["1"], "outputs": ["1"], "fn_name": "f"}, "list of its arguments"),
        ({"question": "Q", "input_output": "{"}, "'input_output' is not JSON"),
        ({"question": "Q", "public_test_cases": "[{}]"}, "texts input and output"),
        ({"question": "Q", "public_test_cases": json.dumps(CASES)}, "func_name None"),
        ({"question": "Q", "private_test_cases": "%%%"}, "neither JSON nor packed JSON"),
    ],
)
def test_records_that_cannot_be_judged_are_refused_with_their_reason(record: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownRecord, match=message):
        problem_from_record(record)


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("3\n", "3", True),
        ("  3  \n4\n\n", "3\n4", True),
        ("1.50 2", "1.5 2.0", True),
        ("3 4", "3\n4", False),
        ("yes", "YES", False),
        ("nan", "nan", True),
        ("nan", "NaN", False),
        ("", "3", False),
        ("1e1", "10", True),
        ("0.1", "0.10000001", False),
    ],
)
def test_outputs_are_compared_by_lines_and_numbers(printed: str, expected: str, same: bool) -> None:
    assert same_output(printed, expected) is same


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (1, 1.0, True),
        (True, 1, False),
        ([1, [2]], [1, [2]], True),
        ([1], [1, 2], False),
        ({"a": [1]}, {"a": [1]}, True),
        ({"a": True}, {"a": 1}, False),
        ("1", 1, False),
        (None, None, True),
    ],
)
def test_values_are_compared_as_json(one: Any, other: Any, same: bool) -> None:
    assert same_value(one, other) is same


def test_a_program_that_ends_early_has_not_passed_a_unit_test() -> None:
    test = UnitTest(setup="", code="assert False")
    trial = test.trial("raise SystemExit(0)")
    assert not test.passed(trial, ended(""))
    assert not test.passed(trial, ended("0123456789abcdef\n"))
    assert not test.passed(trial, ended(f"{trial.mark}\n", exit_code=1))
    assert not test.passed(trial, ended(f"{trial.mark}\nmore\n"))
    assert test.passed(trial, ended(f"noise\n{trial.mark}\n"))
    assert test.trial("").mark != trial.mark


def test_a_call_passes_by_its_value_and_mark() -> None:
    test = CallTest(function="f", arguments=(), expected=[1, 2])
    trial = test.trial("")
    assert test.passed(trial, ended(f"noise\n{trial.mark} [1, 2]\n"))
    assert not test.passed(trial, ended(f"{trial.mark} [2, 1]\n"))
    assert not test.passed(trial, ended("[1, 2]\n"))
    assert not test.passed(trial, ended(f"{trial.mark} [1, 2\n"))
    assert b"[1, 2]" not in trial.stdin()
    assert "[1, 2]" not in trial.program
