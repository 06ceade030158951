"""Problem records of three styles, and how outputs are compared."""

import base64
import json
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.envs.critique.problems import UnknownRecord, load_problems, problem_from_record
from orchestrator.envs.critique.testing import CallTest, InputTest, UnitTest, same_output, same_value


def test_unit_test_records() -> None:
    problem = problem_from_record(
        {
            "task_id": 11,
            "text": "Write double.",
            "code": "def double(x): ...",
            "test_imports": ["import math", "import re"],
            "test_setup_code": "",
            "test_list": ["assert double(1) == 2", "assert double(2) == 4"],
        }
    )
    assert (problem.name, problem.question, problem.program) == ("11", "Write double.", "def double(x): ...")
    assert problem.tests == tuple(
        UnitTest(setup="import math\nimport re", code=f"assert double({n}) == {2 * n}") for n in (1, 2)
    )


@pytest.mark.parametrize("written", [json.dumps, repr])
def test_unit_tests_that_are_a_list_in_a_text_are_a_list(written: Callable[[Any], str]) -> None:
    pieces = ["assert f(1) == 2", 'assert f("a") == "b"']
    given = {"question": "Q", "tests": written(pieces), "test_imports": written(["import math"])}
    assert problem_from_record(given).tests == tuple(UnitTest(setup="import math", code=piece) for piece in pieces)


def test_standard_input_records() -> None:
    given = {"inputs": ["1 2\n", ["3 4", "5"]], "outputs": ["3\n", ["7", "5"]]}
    tests = (InputTest(stdin="1 2\n", expected="3\n"), InputTest(stdin="3 4\n5", expected="7\n5"))
    assert problem_from_record({"question": "Add.", **given}).tests == tests
    assert problem_from_record({"question": "Add.", "input_output": json.dumps(given)}).tests == tests


def test_records_with_a_functions_name_call_it_and_outputs_that_are_all_lists_of_one_may_be_wrapped() -> None:
    calls = {"question": "Q", "fn_name": "f", "inputs": [[1], [2]]}
    first, second = problem_from_record({**calls, "outputs": [[3], [[4]]]}).tests
    assert first == CallTest(function="f", arguments=(1,), expected=[3], wrapped=True)
    assert isinstance(first, CallTest)
    assert isinstance(second, CallTest)
    assert [first.is_right(value) for value in (3, [3], [[3]], 4)] == [True, True, False, False]
    assert [second.is_right(value) for value in ([4], [[4]], 4)] == [True, True, False]
    [_, other] = problem_from_record({**calls, "outputs": [[2, 4], [2]]}).tests
    assert isinstance(other, CallTest)
    assert [other.is_right(value) for value in ([2], 2)] == [True, False]


CASES = [
    {"input": "1 2", "output": "3", "testtype": "stdin"},
    {"input": '[1, 2]\n"x"', "output": "[3]", "testtype": "functional"},
]
METADATA = json.dumps({"func_name": "add"})


def packed(cases: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


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
    call = CallTest(function="add", arguments=([1, 2], "x"), expected=[3])
    assert problem.tests == (InputTest(stdin="1 2", expected="3"), call)
    assert (problem.name, problem.starter_code) == ("abc_1", "class Solution:")


class Explodes:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('unpickled')",)


def test_packed_tests_are_read_without_running_what_they_hold() -> None:
    hostile = base64.b64encode(zlib.compress(pickle.dumps(Explodes()))).decode()
    with pytest.raises(ValueError):  # noqa: PT011
        problem_from_record({"question": "Q", "private_test_cases": hostile})


@pytest.mark.parametrize(
    ("piece", "calls"),
    [
        ("def test_a():\n    assert f(1)", "\ntest_a()"),
        ("def test_a(n=1):\n    assert f(n)\n\ndef test_b():\n    assert f(2)", "\ntest_a()\ntest_b()"),
        ("def check(candidate):\n    assert candidate(1)", "\ncheck(f)"),
        ("def check(candidate):\n    assert candidate(1)\ncheck(f)", ""),
        ("def test_a(n):\n    assert f(n)\nfor n in range(3):\n    test_a(n)\nassert True", ""),
        ("for n in range(3):\n    assert f(n)", ""),
    ],
)
def test_functions_that_test_are_called(piece: str, calls: str) -> None:
    [test] = problem_from_record({"question": "Q", "tests": [piece], "entry_point": "f"}).tests
    assert isinstance(test, UnitTest)
    assert test.code == piece + calls


@pytest.mark.parametrize(
    "record",
    [
        {"question": "Q"},
        {"question": "Q", "tests": []},
        {"tests": ["assert True"], "answer": 1},
        {"question": "Q", "tests": [1]},
        {"question": "Q", "tests": ["assert True"], "setup": 1},
        {"question": "Q", "tests": ["assert f(1"]},
        # would pass every program
        {"question": "Q", "tests": ["import f\nX = 1\n'text'"]},
        {"question": "Q", "tests": ["f(1) == 2"]},
        {"question": "Q", "tests": ["class T:\n    def test_a(self): assert f(1)"]},
        # cannot be called
        {"question": "Q", "tests": ["def test_a(x): assert f(x)"]},
        {"question": "Q", "tests": ["def check(c): assert c(1)"]},
        *(
            {"question": "Q", "tests": [f"{check}: assert f(1)"], "entry_point": "f"}
            for check in ("async def check(c)", "@cache\ndef check(c)", "def check(c, n)")
        ),
        {"question": "Q", "inputs": ["1"], "outputs": []},
        {"question": "Q", "inputs": ["1"], "outputs": ["1"], "fn_name": "f"},
        {"question": "Q", "public_test_cases": json.dumps(CASES)},
    ],
)
def test_records_that_cannot_be_judged_are_refused(record: dict[str, Any]) -> None:
    with pytest.raises(UnknownRecord):
        problem_from_record(record)


RECORD = {"question": "Double n.", "inputs": ["2"], "outputs": ["4"], "program": "print(int(input()) * 2)"}


def test_a_file_has_one_problem_a_line_in_any_style(tmp_path: Path) -> None:
    unit = {"text": "Double n.", "test_list": ["assert f(2) == 4"], "code": "def f(n): return n"}
    (tmp_path / "problems.jsonl").write_text(f"{json.dumps(RECORD)}\n\n{json.dumps(unit)}\n")
    first, second = load_problems(tmp_path / "problems.jsonl")
    assert (first.program, second.program) == ("print(int(input()) * 2)", "def f(n): return n")


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"question": "Double n."}',
        json.dumps({**RECORD, "program": None}),
        json.dumps({"question": "Q", "input_output": "{"}),
        json.dumps({"question": "Q", "private_test_cases": "%%%"}),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "problems.jsonl").write_text(f"{json.dumps(RECORD)}\n{line}\n")
    with pytest.raises(UnknownRecord, match=r"problems\.jsonl"):
        load_problems(tmp_path / "problems.jsonl")
    (tmp_path / "problems.jsonl").write_text("\n")
    with pytest.raises(UnknownRecord):
        load_problems(tmp_path / "problems.jsonl")


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("  3  \n4\n\n", "3\n4", True),
        ("1.50 2", "1.5 2.0", True),
        ("3 4", "3\n4", False),
        ("yes", "YES", False),
        ("nan", "NaN", False),
        ("", "3", False),
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
        ({"a": True}, {"a": 1}, False),
    ],
)
def test_values_are_compared_as_json(one: Any, other: Any, same: bool) -> None:
    assert same_value(one, other) is same
