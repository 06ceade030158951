"""Where the texts of hints come from."""

import asyncio
import time
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from orchestrator.episodes.records import Message
from orchestrator.hints.sources import (
    MODEL_FAILED,
    MODEL_LATE,
    MODEL_SILENT,
    NO_SIBLING,
    OFF_TEMPLATE,
    SILENT,
    FromEnvironment,
    FromModel,
    FromSiblings,
    FromTemplates,
    HintSource,
    NoHint,
    Site,
    called_tool,
)
from orchestrator.hints.templates import HintTemplates
from tests.orchestrator.hints.played import TINY, Answer, played, site, wrong


async def refused(source: HintSource, at: Site) -> str:
    with pytest.raises(NoHint) as raised:
        await source.text(at)
    return raised.value.reason


# --- templates and environments ---


async def test_a_template_is_filled_with_what_is_known_of_the_error() -> None:
    text = "{env} {role} {turn} {tool} {error_kind} {hint_template_key}: {message} ({answer})"
    source = FromTemplates(HintTemplates({"tools": text}))
    at = site(played("a", [Answer(text="well"), wrong("AD[1]", "no ad", key="tools")]))
    assert await source.text(at) == "shop policy 2 AD unknown_tool tools: no ad (AD[1])"


async def test_what_fills_a_placeholder_is_cut() -> None:
    source = FromTemplates(HintTemplates({"unknown_tool": "{message}{message}"}), max_chars=3)
    assert await source.text(site(played("a", [wrong("x", "abcd")]))) == "abc ...abc ..."


async def test_an_error_that_no_template_is_for_is_off_template() -> None:
    source = FromTemplates(HintTemplates({"words": "x"}))
    assert await refused(source, site(played("a", [wrong("x")]))) == OFF_TEMPLATE


async def test_what_the_environment_said_is_a_hint() -> None:
    at = site(played("a", [wrong("x", " {tests} failed:\n1 != 2 ")]))
    assert (
        await FromEnvironment().text(at) == "The answer that was tried here before went wrong: {tests} failed:\n1 != 2"
    )
    assert (await FromEnvironment(max_chars=4).text(at)).endswith("wrong: {tes ...")
    assert await refused(FromEnvironment(), site(played("a", [wrong("x", " ")]))) == SILENT


@pytest.mark.parametrize(
    ("answer", "message", "tool"),
    [
        ('<tool_call>{"name": "look.up", "arguments": {}}</tool_call>', "Wrong arguments.", "look.up"),
        ("LOOK_UP[x] ADD[1]", "Wrong arguments for add: 2 is missing.", "ADD"),
        ("LOOK_UP[x] ADD[1]", "That failed.", "the tool"),
        ("ADD[1] then ADD[2]", "That failed.", "ADD"),
        ("well", "That failed.", "the tool"),
        ('{"name": "look.up"} {"name": "look-up"}', "There is no look-up... ", "look-up"),
        ('{"name": "' + "x" * 60 + '"}', "That failed.", "the tool"),
    ],
)
def test_the_tool_is_the_one_that_the_error_speaks_of(answer: str, message: str, tool: str) -> None:
    assert called_tool(answer, message) == tool


@pytest.mark.parametrize("line", ["-" * 200_000, "." * 200_000, "-." * 100_000, "a" + "-" * 200_000 + "!"])
def test_a_ruled_line_in_a_message_is_read_in_no_time(line: str) -> None:
    begun_s = time.process_time()
    assert called_tool("ADD[1] SUB[1]", f"add failed:\n{line}\n") == "ADD"
    assert time.process_time() - begun_s < 1.0


# --- siblings ---


async def test_the_best_sibling_s_answer_to_the_same_is_a_hint() -> None:
    at = site(
        played("g/0", [wrong("AD[1]")]),
        played("g/1", [Answer(text="ADD[1]"), Answer(text="1")], reward=0.8),
        played("g/2", [Answer(text="ADD[2]"), Answer(text="2")], reward=1.0),
        played("g/3", [Answer(text="ADD[3]")], reward=0.2),
    )
    source = FromSiblings(min_reward=0.5)
    assert await source.text(at) == "Another attempt, which succeeded, answered here:\nADD[2]"
    assert await refused(FromSiblings(min_reward=1.5), at) == NO_SIBLING


async def test_a_sibling_helps_at_a_later_turn_only_where_all_before_it_is_the_same() -> None:
    first = played("g/0", [Answer(text="a"), wrong("AD[1]")])
    source = FromSiblings(min_reward=0.5)
    same = played("g/1", [Answer(text="a"), Answer(text="ADD[1]")], reward=1.0)
    assert (await source.text(site(first, same))).endswith("ADD[1]")
    others = [
        [Answer(text="b"), Answer(text="ADD[1]")],
        [Answer(text="a", told="stop"), Answer(text="ADD[1]")],
        [Answer(text="a")],
    ]
    for answers in others:
        assert await refused(source, site(first, played("g/1", answers, reward=1.0))) == NO_SIBLING


@pytest.mark.parametrize(
    "answer",
    [
        Answer(text="AD[1]"),
        wrong("ADD[1]"),
        Answer(text="ADD[1]", whole=False),
        Answer(text="  "),
        Answer(text="A" * 21),
    ],
)
async def test_an_answer_that_shows_nothing_better_is_no_hint(answer: Answer) -> None:
    at = site(played("g/0", [wrong("AD[1]")]), played("g/1", [answer], reward=1.0))
    assert await refused(FromSiblings(min_reward=0.5, max_chars=20), at) == NO_SIBLING


async def test_another_conversation_of_the_same_rollout_is_no_sibling() -> None:
    one, other = played("g/0", [wrong("AD[1]")], reward=1.0), played("g/0", [Answer(text="ADD[1]")])
    second = replace(other.rows[0], steps=(1,))
    both = replace(one, steps=one.steps + other.steps, rows=(one.rows[0], second))
    assert await refused(FromSiblings(min_reward=0.5), site(both)) == NO_SIBLING
    elsewhere = replace(both, id="g/1")
    assert (await FromSiblings(min_reward=0.5).text(site(both, elsewhere))).endswith("ADD[1]")


async def test_a_rollout_is_no_sibling_of_itself_and_those_that_siblings_spawned_are() -> None:
    spawned = played("g/1.0", [Answer(text="ADD[1]")], reward=1.0)
    first = played("g/0", [wrong("AD[1]")], reward=1.0)
    other = played("g/1", [Answer(text="z")], children=[spawned])
    assert (await FromSiblings(min_reward=0.5).text(site(first, other))).endswith("ADD[1]")
    assert await refused(FromSiblings(min_reward=0.5), site(first)) == NO_SIBLING


# --- models ---


class Teacher:
    """Writes what it is told to."""

    def __init__(self, text: object = " Mind x. ", *, error: Exception | None = None, hangs: bool = False) -> None:
        self.text, self.error, self.hangs = text, error, hangs
        self.asked: list[Sequence[Message]] = []
        self.now = self.most = 0

    async def __call__(self, messages: Sequence[Message], /) -> str:
        self.asked.append(messages)
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(60 if self.hangs else 0)
        self.now -= 1
        if self.error is not None:
            raise self.error
        return self.text  # type: ignore[return-value]


async def test_a_model_is_shown_what_the_policy_was_and_writes_a_hint() -> None:
    teacher = Teacher()
    at = site(played("a", [Answer(text="hm", told="what?"), wrong("AD[1]", "no {ad}")]))
    assert await FromModel(teacher, TINY.renderer).text(at) == "Mind x."
    [[message]] = teacher.asked
    content = message["content"]
    assert message["role"] == "user"
    assert (
        "user\nq< |im_end|>\n< |im_start|>assistant\nhm< |im_end|>\n< |im_start|>user\nwhat?< |im_end|>\n\n" in content
    )
    assert "What it answered:\nAD[1]\n\nWhat was wrong with it (unknown_tool): no {ad}\n" in content
    assert "<|im_" not in content


async def test_a_model_is_shown_the_newest_of_a_long_conversation_and_its_hint_is_cut() -> None:
    teacher = Teacher("h" * 30)
    at = site(played("a", [Answer(text="old", told="new"), wrong("x")]))
    source = FromModel(teacher, TINY.renderer, max_chars=10, max_context_chars=15)
    assert await source.text(at) == "h" * 10 + " ..."
    content = teacher.asked[0][0]["content"]
    assert "new" in content
    assert "old" not in content


@pytest.mark.parametrize(
    ("teacher", "reason"),
    [
        (Teacher(error=OSError("down")), MODEL_FAILED),
        (Teacher(error=TimeoutError("theirs")), MODEL_FAILED),
        (Teacher(hangs=True), MODEL_LATE),
        (Teacher(" \n"), MODEL_SILENT),
        (Teacher(None), MODEL_SILENT),
    ],
)
async def test_a_model_that_gives_none_costs_its_hint_alone(teacher: Teacher, reason: str) -> None:
    source = FromModel(teacher, TINY.renderer, timeout_s=0.05)
    assert await refused(source, site(played("a", [wrong("x")]))) == reason


async def test_a_model_is_asked_so_many_times_at_once() -> None:
    teacher = Teacher()
    source, at = FromModel(teacher, TINY.renderer, max_concurrent=2), site(played("a", [wrong("x")]))
    assert await asyncio.gather(*(source.text(at) for _ in range(6))) == ["Mind x."] * 6
    assert teacher.most == 2
