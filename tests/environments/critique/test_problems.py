"""Problem records of four styles, and how outputs are compared."""

import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest
from grpo.environments.critique.problems import load_problems, problem_from_record
from grpo.environments.critique.testing import Test as ProblemTest
from grpo.environments.critique.testing import same_output
from grpo.transport.errors import UserError


def test_standard_input_records() -> None:
    given = {"inputs": ["1 2\n", ["3 4", "5"]], "outputs": ["3\n", ["7", "5"]]}
    tests = (ProblemTest(stdin="1 2\n", accepted=("3\n",)), ProblemTest(stdin="3 4\n5", accepted=("7\n5",)))
    assert problem_from_record({"question": "Add.", **given}).tests == tests
    assert problem_from_record({"question": "Add.", "input_output": json.dumps(given)}).tests == tests
    contest = {"public_tests": {"input": ["1 2\n"], "output": ["3\n"]}, "private_tests": {"input": [], "output": []}}
    contest["generated_tests"] = {"input": ["3 4\n5"], "output": ["7\n5"]}
    assert problem_from_record({"description": "Add.", **contest}).tests == tests


def test_records_with_a_functions_name_call_it_and_outputs_that_are_all_lists_of_one_may_be_wrapped() -> None:
    calls = {"question": "Q", "fn_name": "f", "inputs": [[1], [2]]}
    first, second = problem_from_record({**calls, "outputs": [[3], [[4]]]}).tests
    assert first == ProblemTest(job={"function": "f", "arguments": [1]}, accepted=([3], 3))
    assert second.accepted == ([[4]], [4])
    [_, other] = problem_from_record({**calls, "outputs": [[2, 4], [2]]}).tests
    assert other.accepted == ([2],)


CASES = [
    {"input": "1 2", "output": "3", "testtype": "stdin"},
    {"input": '[1, 2]\n"x"', "output": "[3]", "testtype": "functional"},
]
METADATA = json.dumps({"func_name": "add"})


def packed(cases: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


def test_livecodebench_records_with_public_and_private_tests() -> None:
    problem = problem_from_record(
        {
            "question_id": "abc_1",
            "question_content": "Add.",
            "starter_code": "class Solution:",
            "public_test_cases": json.dumps(CASES[:1]),
            "private_test_cases": packed(CASES[1:]),
            "metadata": METADATA,
        }
    )
    call = ProblemTest(job={"function": "add", "arguments": [[1, 2], "x"]}, accepted=([3],))
    assert problem.tests == (ProblemTest(stdin="1 2", accepted=("3",)), call)
    assert (problem.name, problem.question) == ("abc_1", "Add.\n\nclass Solution:")


class Explodes:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('unpickled')",)


def test_packed_tests_are_read_without_running_what_they_hold() -> None:
    hostile = base64.b64encode(zlib.compress(pickle.dumps(Explodes()))).decode()
    with pytest.raises(ValueError):  # noqa: PT011
        problem_from_record({"question": "Q", "private_test_cases": hostile})


@pytest.mark.parametrize(
    "record",
    [
        {"question": "Q"},
        {"question": "Q", "tests": [1]},
        # would pass every program
        {"question": "Q", "tests": ["import f\nX = 1\n'text'"]},
        {"question": "Q", "inputs": ["1"], "outputs": []},
        {"question": "Q", "inputs": ["1"], "outputs": ["1"], "fn_name": "f"},
    ],
)
def test_records_that_cannot_be_judged_are_refused(record: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        problem_from_record(record)


RECORD = {"question": "Double n.", "inputs": ["2"], "outputs": ["4"], "program": "print(int(input()) * 2)"}


@pytest.mark.parametrize(
    "line", ["{", json.dumps({**RECORD, "program": None}), json.dumps({"question": "Q", "private_test_cases": "%%%"})]
)
def test_what_is_wrong_with_a_file_is_said_with_its_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "problems.jsonl").write_text(f"{json.dumps(RECORD)}\n\n")
    assert [problem.program for problem in load_problems(str(tmp_path / "problems.jsonl"))] == [RECORD["program"]]
    (tmp_path / "problems.jsonl").write_text(f"{json.dumps(RECORD)}\n{line}\n")
    with pytest.raises(UserError, match=r"problems\.jsonl:2"):
        load_problems(str(tmp_path / "problems.jsonl"))


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [("  3  \n4\n\n", "3\n4", True), ("1.50 2", "1.5 2.0", True), ("3 4", "3\n4", False), ("yes", "YES", False)],
)
def test_outputs_are_compared_by_lines_and_numbers(printed: str, expected: str, same: bool) -> None:
    assert same_output(printed, expected) is same
