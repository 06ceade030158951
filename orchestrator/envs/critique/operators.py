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
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from orchestrator.envs.critique.judging import judgement_of

OPERATORS = "+-*"
_QUESTIONS = {"+": "Add {k} to n.", "-": "Take {k} from n.", "*": "Times n by {k}."}
_STYLES = ("stdin", "unit", "livecodebench")
_PROGRAMS = {
    "stdin": "print(int(input()){operator}{k})",
    "unit": "def f(n): return n{operator}{k}",
    "livecodebench": "def g(n): return n{operator}{k}",
}
_INPUTS = (5, 7)
"""At which sum, difference and product with 1 to 9 are all different."""
_USE = re.compile(r"\buse[ \t]+`?([-+*])", re.IGNORECASE)
_OPERATOR = re.compile(r"(?<=[\w)])[-+*](?=\w)")


def records(split: Literal["train", "eval"], seed: int = 0) -> list[dict[str, Any]]:
    """All problems of a split in an order of their own, a third of them with a right program. One in eight is kept for
    evaluation. The styles take turns: standard input, unit tests, LiveCodeBench."""
    every = itertools.product(_STYLES, OPERATORS, range(1, 10), OPERATORS)
    made = [_record(style, right, k, written) for style, right, k, written in every]
    chosen = [one for one in made if split_of(one) == split]
    random.Random(seed).shuffle(chosen)
    return chosen


def split_of(record: Mapping[str, Any]) -> Literal["train", "eval"]:
    """`eval` for one in eight, by the question and the program."""
    digest = hashlib.sha256(f"{record['question']}\n{record['program']}".encode()).digest()
    return "eval" if digest[0] % 8 == 0 else "train"


def right_critique(question: str, program: str) -> str:
    """What should be said of a program of these problems."""
    right = next(operator for operator, text in _QUESTIONS.items() if text[:2] == question[:2])
    written = _OPERATOR.findall(program)[-1]
    return "Overall judgment: Correct" if written == right else f"Use {right}. Overall judgment: Incorrect"


def revise_by_rule(program: str, critique: str) -> str:
    """The program as a critique wants it: as it was, unless it is judged incorrect and an operator is named (`use +`),
    which then takes the place of the program's last one. A program without an operator stays as it was."""
    named = _USE.findall(critique)
    places = list(_OPERATOR.finditer(program))
    if judgement_of(critique) != "incorrect" or not named or not places:
        return program
    start, end = places[-1].span()
    return f"{program[:start]}{named[-1]}{program[end:]}"


def _record(style: str, right: str, k: int, written: str) -> dict[str, Any]:
    answers = [_value(n, right, k) for n in _INPUTS]
    return {
        "question": _QUESTIONS[right].format(k=k),
        "program": _PROGRAMS[style].format(operator=written, k=k),
        **_tests(style, answers),
    }


def _tests(style: str, answers: Sequence[int]) -> dict[str, Any]:
    pairs = list(zip(_INPUTS, answers, strict=True))
    if style == "stdin":
        return {"inputs": [f"{n}\n" for n, _ in pairs], "outputs": [f"{answer}\n" for _, answer in pairs]}
    if style == "unit":
        return {"tests": [f"assert f({n}) == {answer}" for n, answer in pairs]}
    shown, hidden = ([{"input": str(n), "output": str(answer), "testtype": "functional"}] for n, answer in pairs)
    return {
        "public_test_cases": json.dumps(shown),
        "private_test_cases": json.dumps(hidden),
        "metadata": json.dumps({"func_name": "g"}),
    }


def _value(n: int, operator: str, k: int) -> int:
    return {"+": n + k, "-": n - k, "*": n * k}[operator]
