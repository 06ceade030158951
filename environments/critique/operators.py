"""Small problems that come with the product: one-line programs with the right operator or a wrong one, and a rule that
revises them as a critique says.

A model too small to write programs can learn to criticise these, and what it is worth is still found by running the
revision in the sandbox.
"""

import hashlib
import itertools
import json
import random
import re
from typing import Any

OPERATORS = "+-*"
_QUESTIONS = {"+": "Add {k} to n.", "-": "Take {k} from n.", "*": "Times n by {k}."}
_PROGRAMS = {
    "stdin": "print(int(input()){operator}{k})",
    "unit": "def f(n): return n{operator}{k}",
    "livecodebench": "def g(n): return n{operator}{k}",
}
_INPUTS = (5, 7)
"""Inputs at which sum, difference and product with 1 to 9 are all different."""
_JUDGEMENT = re.compile(r"overall\s+judge?ment\W{1,20}(correct|incorrect)\b", re.IGNORECASE)
_USE = re.compile(r"\buse[ \t]+`?([-+*])", re.IGNORECASE)
_OPERATOR = re.compile(r"(?<=[\w)])[-+*](?=\w)")


def records(split: str, seed: int = 0) -> list[dict[str, Any]]:
    """Returns all problems of a split in an order of their own, a third of them with a right program. One in eight is
    kept for evaluation, by its question and program. The styles take turns: standard input, unit tests,
    LiveCodeBench."""
    every = itertools.product(_PROGRAMS, OPERATORS, range(1, 10), OPERATORS)
    made = [_record(style, right, k, written) for style, right, k, written in every]
    chosen = [one for one in made if (_digest(one)[0] % 8 == 0) == (split == "eval")]
    random.Random(seed).shuffle(chosen)
    return chosen


def judgement_of(critique: str) -> str | None:
    """Returns what a critique says of the program, `correct` or `incorrect`: `Overall judgment: Correct`, the last
    where it says so more than once; None where it does not say."""
    found = _JUDGEMENT.findall(critique)
    return str(found[-1]).lower() if found else None


def right_critique(question: str, program: str) -> str:
    """Returns the right critique of a program of these problems."""
    right = next(operator for operator, text in _QUESTIONS.items() if text[:2] == question[:2])
    written = _OPERATOR.findall(program)[-1]
    return "Overall judgment: Correct" if written == right else f"Use {right}. Overall judgment: Incorrect"


def revise_by_rule(program: str, critique: str) -> str:
    """Returns the program as a critique wants it: as it was, unless it is judged incorrect and an operator is named
    (`use +`), which then takes the place of the program's last one. A program without an operator stays as it was."""
    named, places = _USE.findall(critique), list(_OPERATOR.finditer(program))
    if judgement_of(critique) != "incorrect" or not named or not places:
        return program
    start, end = places[-1].span()
    return f"{program[:start]}{named[-1]}{program[end:]}"


def _record(style: str, right: str, k: int, written: str) -> dict[str, Any]:
    answers = {n: {"+": n + k, "-": n - k, "*": n * k}[right] for n in _INPUTS}
    if style == "stdin":
        tests: dict[str, Any] = {"inputs": [f"{n}\n" for n in answers], "outputs": [f"{n}\n" for n in answers.values()]}
    elif style == "unit":
        tests = {"tests": [f"assert f({n}) == {answer}" for n, answer in answers.items()]}
    else:
        cases = [{"input": str(n), "output": str(answer), "testtype": "functional"} for n, answer in answers.items()]
        tests = {"public_test_cases": json.dumps(cases), "metadata": json.dumps({"func_name": "g"})}
    program = _PROGRAMS[style].format(operator=written, k=k)
    return {"question": _QUESTIONS[right].format(k=k), "program": program, **tests}


def _digest(record: dict[str, Any]) -> bytes:
    return hashlib.sha256(f"{record['question']}\n{record['program']}".encode()).digest()
