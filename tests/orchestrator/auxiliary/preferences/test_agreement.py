"""When two actions are the same, and what teachers prefer."""

from itertools import pairwise
from typing import Any

import pytest
from grpo.orchestrator.auxiliary.preferences.agreement import Action, Preference, consensus, preferred, words
from grpo.orchestrator.endpoints import EndpointError


@pytest.mark.parametrize(
    "same",
    [
        ("x = 5", "x=5", "X=5."),
        ("1,000", "1000", "**1,000**", "1,000!"),
        ("5 %", "5%"),
        ("5 - 3", "5-3", "5 − 3"),
        ("-3", "- 3", "−3", "*-3*"),
        ("The answer is north.", "the ANSWER is: *north*", '  the answer\nis "north"!'),
    ],
)
def test_white_space_case_and_marks_of_prose_make_no_difference(same: tuple[str, ...]) -> None:
    for one, other in pairwise(same):
        assert words(one) == words(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("-3", "3"),
        ("3.5", "35"),
        ("5 - 3", "5 + 3"),
        ("1,000", "1 000"),
        ("2 * 3", "2 3"),
        ("(1 + 2) * 3", "1 + 2 * 3"),
    ],
)
def test_signs_numbers_and_operators_do(one: str, other: str) -> None:
    assert words(one) != words(other)


def call(arguments: str, before: str = "") -> str:
    return f'{before}<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'


def test_calls_are_compared_whatever_the_order_of_their_arguments() -> None:
    one = call('{"a": 2, "b": "x"}')
    assert words(one) == words(call('{"b":"x","a":2}'))
    assert words(one) != words(call('{"a": 3, "b": "x"}'))
    assert words(one) == words(Action(text="", tool_calls=(("add", {"b": "x", "a": 2}),)).written())
    assert words(call("{")) == words(call(" {"))


async def decided(student: str, num_agreeing: int = 2, judge: Any = None, **teachers: str | None) -> str:
    """The chosen text with its source, or the reason for none."""
    answers = {name: None if text is None else Action(text=text) for name, text in teachers.items()}
    found = await preferred(answers, Action(text=student), num_agreeing=num_agreeing, judge=judge)
    return f"{found.chosen.text} ({found.source})" if isinstance(found, Preference) else found.reason


async def test_most_teachers_decide_against_the_student() -> None:
    found = await preferred(
        {"a": Action(text="X"), "b": Action(text="x"), "c": Action(text="Y")}, Action(text="y."), num_agreeing=2
    )
    assert isinstance(found, Preference)
    assert found.score_gap == pytest.approx(2 / 3 - 1 / 3)  # the shares of the teachers
    assert await decided("Y", a="X.", b="Z", c="x") == "X. (2 of 3 teachers: a, c)"
    assert await decided("Y", a="X", b=None, c="x") == "X (2 of 2 teachers: a, c)"
    assert await decided("", a="X", b="X") == "X (2 of 2 teachers: a, b)"
    assert await decided("x!", a="X", b="X", c="Z") == "agrees_with_student"
    assert await decided("Y", a="X", b="Z", c="W") == "all_disagree"
    assert await decided("Y", a="X", b="X", c="Z", d="Z") == "tie"
    assert await decided("Y", a="X", b=None, c=None) == "too_few_answers"
    assert await decided("Y", a="X", b="...", c="") == "empty"


async def test_one_teacher_who_differs_suffices_where_one_must_agree() -> None:
    assert await decided("Y", num_agreeing=1, a="Y", b="y", c="X") == "X (1 of 3 teachers: c)"
    assert await decided("Y", num_agreeing=1, a="Z", b="X", c="x") == "X (2 of 3 teachers: b, c)"
    assert await decided("Y", num_agreeing=1, a="Z", b="X") == "Z (1 of 2 teachers: a)"
    assert await decided("Y", num_agreeing=1, a="y") == "agrees_with_student"


async def test_a_judge_decides_what_words_do_not() -> None:
    async def first_letter(one: str, other: str) -> bool:
        return one[0] == other[0]

    async def fails(one: str, other: str) -> bool:
        raise EndpointError("timeout", "no answer")

    assert await decided("Y", judge=first_letter, a="Xa", b="Xb") == "Xa (2 of 2 teachers: a, b)"
    assert await decided("Xc", judge=first_letter, a="Xa", b="Xb") == "agrees_with_student"
    assert await decided("Y", judge=fails, a="Xa", b="Xb") == "judge_failed"
    assert await decided("X", judge=fails, a="X", b="X") == "agrees_with_student"


@pytest.mark.parametrize(
    ("answers", "expected"), [(["x", "X."], 1), (["y", "y"], -1), (["y", "z"], -0.5), (["x", "y"], 0)]
)
def test_consensus_is_one_minus_one_or_between(answers: list[str], expected: float) -> None:
    said = {str(number): Action(text=text) for number, text in enumerate(answers)}
    assert consensus(said, Action(text="x")) == expected
