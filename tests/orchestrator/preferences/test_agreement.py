"""When two actions are the same, and what teachers prefer."""

from itertools import pairwise
from typing import Any

import pytest

from orchestrator.endpoints import EndpointError
from orchestrator.preferences.agreement import (
    Action,
    Agreement,
    AgreementName,
    Call,
    Preference,
    Skipped,
    preferred,
    words,
)


@pytest.mark.parametrize(
    "same",
    [
        ("x = 5", "x=5", "X=5."),
        ("1,000", "1000", "**1,000**", "1,000!"),
        ("5 %", "5%"),
        ("5 - 3", "5-3", "5 − 3"),
        ("-3", "- 3", "−3", "*-3*"),
        ("The answer is north.", "the ANSWER is: *north*", '  the answer\nis "north"!'),
        ("well-known", "well known", "`well-known`"),
        ("it's", "it’s"),
        ("2 * 3", "2*3"),
        ("LOOKUP[cat]", "lookup[ cat ]"),
        ("(1, 2)", "(1,2)", "(1 2)"),
    ],
)
def test_white_space_case_and_marks_of_prose_make_no_difference(same: tuple[str, ...]) -> None:
    for one, other in pairwise(same):
        assert words(one) == words(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("-3", "3"),
        ("5 - 3", "5 + 3"),
        ("3.5", "35"),
        (".5", "5"),
        ("1,000", "1 000"),
        ("1,00", "100"),
        ("12", "1, 2"),
        ("10²", "102"),
        ("x != y", "x = y"),
        ("2*3", "2**3"),
        ("2 * 3", "2 3"),
        ("(1 + 2) * 3", "1 + 2 * 3"),
        ("50%", "50"),
        ("x-y", "x y"),
        ("$5", "5"),
        ("north", "south"),
    ],
)
def test_signs_numbers_and_operators_do(one: str, other: str) -> None:
    assert words(one) != words(other)


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number", "default": 1}},
            "required": ["a"],
        },
    },
}


def call(arguments: str, before: str = "") -> Action:
    return Action(text=f'{before}<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>')


@pytest.mark.parametrize(
    ("name", "one", "other", "is_same"),
    [
        ("exact", Action(text="a"), Action(text="a"), True),
        ("exact", Action(text="a"), Action(text="a."), False),
        ("normalised", Action(text="a"), Action(text="A."), True),
        ("normalised", Action(text="?!"), Action(text="?!"), False),  # says nothing
        ("tool_calls", call('{"a": 2}'), call('{"b": 1, "a": 2.0}', "So:"), True),
        ("tool_calls", call('{"a": 2}'), Action(text="", tool_calls=(Call(name="add", arguments={"a": 2}),)), True),
        ("tool_calls", call('{"a": 2}'), call('{"a": 3}'), False),
        ("tool_calls", call('{"b": 2}'), call('{"b": 2}'), False),  # cannot be made
        ("tool_calls", call('{"a": 2, "c": 2}'), call('{"a": 2, "c": 2}'), False),
        ("tool_calls", call("{"), call("{"), False),
        ("tool_calls", Action(text="Done."), Action(text="done"), True),
    ],
)
async def test_actions_are_the_same(name: AgreementName, one: Action, other: Action, is_same: bool) -> None:
    assert await Agreement(name=name).same(one, other, [ADD]) == is_same


async def decided(student: str, at_least: int = 2, judge: Any = None, **teachers: str | None) -> str:
    """The chosen text with its source, or the reason for none."""
    answers = {name: None if text is None else Action(text=text) for name, text in teachers.items()}
    agreement = Agreement(name="normalised" if judge is None else "judge", judge=judge)
    found = await preferred(answers, Action(text=student), agreement, None, at_least=at_least)
    return f"{found.chosen.text} ({found.source})" if isinstance(found, Preference) else found.reason


async def test_most_teachers_decide_against_the_student() -> None:
    assert await decided("Y", a="X.", b="Z", c="x") == "X. (2 of 3 teachers: a, c)"
    assert await decided("Y", a="X", b=None, c="x") == "X (2 of 2 teachers: a, c)"
    assert await decided("", a="X", b="X") == "X (2 of 2 teachers: a, b)"
    assert await decided("Y", at_least=1, a="X") == "X (1 of 1 teachers: a)"
    assert await decided("x!", a="X", b="X", c="Z") == "agrees_with_student"
    assert await decided("Y", a="X", b="Z", c="W") == "all_disagree"
    assert await decided("Y", a="X", b="X", c="Z", d="Z") == "tie"
    assert await decided("Y", a="X", b=None, c=None) == "too_few_answers"
    assert await decided("Y", a="X", b="...", c="") == "empty"


async def test_a_judge_decides_what_letters_do_not() -> None:
    async def first_letter(one: str, other: str) -> bool:
        return one[0] == other[0]

    async def fails(one: str, other: str) -> bool:
        raise EndpointError("timeout", "no answer")

    assert await decided("Y", judge=first_letter, a="Xa", b="Xb") == "Xa (2 of 2 teachers: a, b)"
    assert await decided("Xc", judge=first_letter, a="Xa", b="Xb") == "agrees_with_student"
    assert await decided("Y", judge=fails, a="Xa", b="Xb") == "judge_failed"
    assert await decided("X", judge=fails, a="X", b="X") == "agrees_with_student"


def test_the_agreement_judge_alone_takes_a_judge() -> None:
    with pytest.raises(ValueError, match="judge"):
        Agreement(name="judge")


async def test_what_is_skipped_says_why_the_judge_failed() -> None:
    async def fails(one: str, other: str) -> bool:
        raise EndpointError("timeout", "no answer from the judge")

    found = await preferred(
        {"a": Action(text="x"), "b": Action(text="y")},
        Action(text="z"),
        Agreement(name="judge", judge=fails),
        None,
        at_least=2,
    )
    assert found == Skipped(reason="judge_failed", message="no answer from the judge")
