"""When actions are the same, and what teachers' actions say about the student's."""

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.disagreement.actions import (
    MAX_TOOL_SETS,
    Action,
    Agreement,
    Call,
    Exact,
    Judged,
    Normalised,
    SameCalls,
    agreement_of,
    tools_of_schemas,
    write_tagged,
)
from orchestrator.disagreement.verdicts import Preference, Skipped, Verdict, score
from orchestrator.episodes.tool_calls import Tool, parse_bracketed, parse_tagged, tools_of


def did(text: str, *calls: Call) -> Action:
    return Action(text=text, tool_calls=calls)


async def verdict(
    student: str, *teachers: str | None, agreement: Agreement | None = None, at_least: int = 2
) -> Verdict:
    given = {name: None if text is None else did(text) for name, text in zip("abcdef", teachers, strict=False)}
    return await score(given, did(student), agreement or Exact(), at_least=at_least)


# --- verdicts ---


async def test_two_of_three_teachers_agree_and_the_student_did_something_else() -> None:
    found = await verdict("Y", "X", "Z", "X")
    assert found == Preference(chosen=did("X"), rejected=did("Y"), teachers=("a", "c"), num_answers=3)
    assert found.source == "2 of 3 teachers: a, c"


@pytest.mark.parametrize(
    ("student", "teachers", "reason"),
    [
        ("Y", ["X", "Z", "W"], "all_disagree"),
        ("Y", ["X", "Z", "Y"], "all_disagree"),
        ("X", ["X", "X", "Z"], "agrees_with_student"),
        ("Y", ["X", "X", "Z", "Z"], "tie"),
        ("X", ["X", "X", "Z", "Z"], "tie"),
        ("Y", ["X", None, None], "too_few_answers"),
        ("Y", [None, None, None], "too_few_answers"),
        ("Y", ["X", " ", ""], "empty"),
        ("Y", ["", "", ""], "empty"),
    ],
)
async def test_everything_else_is_skipped_for_a_reason(student: str, teachers: list[str | None], reason: str) -> None:
    assert await verdict(student, *teachers) == Skipped(reason=reason)


async def test_a_student_that_says_nothing_did_something_else_too() -> None:
    assert isinstance(await verdict("", "X", "X"), Preference)


async def test_more_teachers_beat_as_many_as_are_needed() -> None:
    found = await verdict("Y", "Z", "X", "Z", "X", "X")
    assert isinstance(found, Preference)
    assert (found.chosen.text, found.teachers) == ("X", ("b", "d", "e"))


async def test_how_many_must_agree_is_a_choice() -> None:
    assert await verdict("Y", "X", "X", "Z", at_least=3) == Skipped(reason="all_disagree")
    assert isinstance(await verdict("Y", "X", at_least=1), Preference)
    assert await verdict("Y", "X", "Z", at_least=1) == Skipped(reason="tie")
    with pytest.raises(ValueError, match="at_least is 0, expected 1 or more"):
        await verdict("Y", "X", at_least=0)


@given(st.lists(st.sampled_from(["X", "Y", "Z", "", None]), max_size=6), st.sampled_from(["X", "Y", ""]))
def test_a_pair_comes_exactly_where_one_action_has_most_and_enough_teachers(
    teachers: list[str | None], student: str
) -> None:
    found = asyncio.run(verdict(student, *teachers))
    counts = sorted(((teachers.count(text), text) for text in ("X", "Y", "Z")), reverse=True)
    (most, text), (second, _), _ = counts
    assert isinstance(found, Preference) == (most >= 2 and most > second and text != student)
    if isinstance(found, Preference):
        assert (found.chosen.text, len(found.teachers), found.num_answers) == (text, most, sum(n for n, _ in counts))


# --- exact and normalised ---


async def test_teachers_whose_answers_differ_by_a_sign_do_not_agree() -> None:
    found = await verdict("7", r"\boxed{-\frac{1}{2}}", r"\boxed{\frac{1}{2}}", agreement=Normalised())
    assert found == Skipped(reason="all_disagree")


async def test_what_is_the_same_normalised_need_not_be_the_same_exactly() -> None:
    one, other = did("Yes, it is."), did("yes it  is")
    assert await Normalised().same(one, other)
    assert not await Exact().same(one, other)
    assert not await Normalised().same(did("3"), did("-3"))
    assert not Normalised().usable(did("!"))
    assert Exact().usable(did("!"))


def test_calls_are_written_behind_the_text_and_read_again() -> None:
    call = Call(name="look_up", arguments={"word": "Käse"})
    assert write_tagged(did("Hm.", call)) == (
        'Hm.\n<tool_call>\n{"name": "look_up", "arguments": {"word": "Käse"}}\n</tool_call>'
    )
    [read] = parse_tagged(write_tagged(did("", call)), tools_of_schemas(SCHEMAS)).calls
    assert (read.name, read.arguments) == ("look_up", {"word": "Käse"})  # type: ignore[union-attr]


# --- calls ---


def look_up(word: str) -> int:
    """Value of a word."""
    return len(word)


def add(a: int, b: int = 2) -> int:
    """Adds."""
    return a + b


TOOLS = tools_of([look_up, add])
SCHEMAS = [tool.schema for tool in TOOLS.values()]


def tagged(arguments: str, name: str = "add") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


@pytest.mark.parametrize("tools", [TOOLS, tools_of_schemas(SCHEMAS)], ids=["functions", "schemas"])
@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (did(tagged('{"a": 1}')), did("Let me see. " + tagged('{"b": 2, "a": 1}')), True),
        (did(tagged('{"a": 1}')), did("", Call(name="add", arguments={"a": 1})), True),
        (did(tagged('{"a": 1}')), did(tagged('{"a": 2}')), False),
        (did(tagged('{"a": 1}')), did(tagged('{"a": 1, "b": 3}')), False),
        (did(tagged('{"word": "a"}', "look_up")), did(tagged('{"a": 1}')), False),
        (did(tagged('{"a": 1}') + tagged('{"a": 5}')), did(tagged('{"a": 5}') + tagged('{"a": 1}')), False),
        (did(tagged('{"a": "1"}')), did(tagged('{"a": "1"}')), False),
        (did(tagged('{"a": 1')), did(tagged('{"a": 1')), False),
        (did("The answer is 3."), did("the answer is 3"), True),
        (did("The answer is 3."), did(tagged('{"a": 1}')), False),
    ],
)
async def test_calls_are_the_same_by_names_and_arguments(
    tools: dict[str, Tool], one: Action, other: Action, same: bool
) -> None:
    assert await SameCalls(tools).same(one, other) == same
    assert await SameCalls(tools).same(other, one) == same


@pytest.mark.parametrize(
    "action",
    [
        did(tagged('{"a": 1}', "subtract")),
        did(tagged("{}")),
        did("", Call(name="subtract", arguments={})),
        did("", Call(name="add", arguments={"a": 1, "c": 1})),
        did(" "),
    ],
)
async def test_a_call_that_cannot_be_made_is_nothing_to_prefer(action: Action) -> None:
    assert not SameCalls(TOOLS).usable(action)
    assert not await SameCalls(TOOLS).same(action, did(tagged('{"a": 1}')))


def scale(x: float, by: float = 1, of: list[float] = []) -> float:  # noqa: B006 (a schema has it)
    """Scales."""
    return x * by


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ('{"x": 2}', '{"x": 2, "by": 1}', True),
        ('{"x": 2}', '{"x": 2.0, "by": 1.0, "of": []}', True),
        ('{"x": 2, "of": [1, 2]}', '{"x": 2, "of": [1.0, 2]}', True),
        ('{"x": 2}', '{"x": 2, "by": 1.5}', False),
    ],
)
async def test_numbers_are_the_same_by_value_as_a_default_too(one: str, other: str, same: bool) -> None:
    agreement = agreement_of("tool_calls")([tools_of([scale])["scale"].schema], "0/0")
    assert await agreement.same(did(tagged(one, "scale")), did(tagged(other, "scale"))) == same


def test_agreements_are_kept_for_so_many_sets_of_tools_alone() -> None:
    def schemas(number: int) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": f"tool_{number}"}}]

    of = agreement_of("tool_calls")
    first = of(schemas(0), "0/0")
    assert of(schemas(0), "1/0") is first
    freed = weakref.ref(first)
    del first
    for number in range(1, MAX_TOOL_SETS + 1):
        of(schemas(number), "2/0")
    gc.collect()
    assert freed() is None


async def test_plain_calls_are_compared_by_their_parser() -> None:
    agreement = agreement_of("tool_calls", parse=parse_bracketed)(SCHEMAS, "0/0")
    assert await agreement.same(did("ADD[1]"), did("I add: add[1, 2]"))
    assert await agreement.same(did("ADD[1]"), did("", Call(name="add", arguments={"a": 1})))
    assert not await agreement.same(did("ADD[1]"), did("ADD[2]"))


def test_a_tool_known_by_its_schema_cannot_be_called_and_must_be_one() -> None:
    with pytest.raises(RuntimeError, match="known by its schema alone"):
        tools_of_schemas(SCHEMAS)["add"].function(a=1)
    with pytest.raises(ValueError, match=r"a tool is \{'name': 'add'\}.*expected"):
        tools_of_schemas([{"name": "add"}])


# --- judges ---


def judge_by(same: Callable[[str, str], bool]) -> Callable[[Action, Action], Awaitable[bool]]:
    async def judge(one: Action, other: Action) -> bool:
        return same(one.text, other.text)

    return judge


async def test_a_judge_decides_what_is_the_same() -> None:
    asked: list[tuple[str, str]] = []

    def same_length(one: str, other: str) -> bool:
        asked.append((one, other))
        return len(one) == len(other)

    found = await verdict("four", "no", "ok", "yes", agreement=Judged(judge_by(same_length)))
    assert isinstance(found, Preference)
    assert found.teachers == ("a", "b")
    assert asked == [("no", "ok"), ("no", "yes"), ("no", "four")]


async def test_a_judge_that_fails_or_never_answers_skips_the_turn() -> None:
    def fails(one: str, other: str) -> bool:
        raise ConnectionError("nobody there")

    async def sleeps(one: Action, other: Action) -> bool:
        await asyncio.sleep(60)
        return True

    assert await verdict("Y", "X", "Z", agreement=Judged(judge_by(fails))) == Skipped(
        reason="judge_failed", message="the judge raised ConnectionError: nobody there"
    )
    late = await verdict("Y", "X", "Z", agreement=Judged(sleeps, timeout_s=0.01))
    assert late == Skipped(reason="judge_failed", message="the judge did not answer within 0.01 s")
    assert isinstance(await verdict("Y", "Y", "Y", agreement=Judged(judge_by(fails))), Skipped)


async def test_agreements_have_names() -> None:
    judged: list[str] = []

    async def judge(one: Action, other: Action, /, *, trace: str) -> bool:
        judged.append(trace)
        return True

    assert isinstance(agreement_of("exact")(None, "0/0"), Exact)
    assert isinstance(agreement_of("normalised")(None, "0/0"), Normalised)
    judging = agreement_of("judge", judge=judge)(None, "0/1")
    assert isinstance(judging, Judged)
    assert await judging.same(Action(text="X"), Action(text="Y"))
    assert judged == ["0/1"]
    with pytest.raises(
        ValueError, match="there is no agreement 'fuzzy'; there are exact, normalised, tool_calls, judge"
    ):
        agreement_of("fuzzy")
    with pytest.raises(ValueError, match="agreement is 'judge' with judge None"):
        agreement_of("judge")
    with pytest.raises(ValueError, match="agreement is 'exact' with judge <function"):
        agreement_of("exact", judge=judge)
