"""Where the texts of hints come from."""

import asyncio
import dataclasses
import time
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from orchestrator.endpoints import EndpointError
from orchestrator.hints.sources import (
    NoHint,
    Site,
    Source,
    called_tool,
    from_environment,
    from_model,
    from_siblings,
    from_solution,
    from_templates,
    of_errors,
)
from orchestrator.hints.templates import HintTemplates
from orchestrator.rollouts.records import Message
from tests.orchestrator.hints.played import TINY, Answer, played, site, wrong


async def refused(source: Source, at: Site) -> str:
    with pytest.raises(NoHint) as raised:
        await source(at)
    return raised.value.reason


def templates(max_chars: int = 1000, **texts: str) -> Source:
    return of_errors(from_templates(HintTemplates(texts), max_chars=max_chars))


def siblings(min_reward: float = 0.5, max_chars: int = 4000) -> Source:
    return of_errors(from_siblings(min_reward=min_reward, max_chars=max_chars))


async def test_a_template_is_filled_with_what_is_known_of_the_error() -> None:
    source = templates(tools="{env} {role} {turn} {tool} {error_kind} {hint_template_key}: {message} ({answer})")
    at = site(played("a", [Answer(text="well"), wrong("AD[1]", "no ad", key="tools")]))
    assert await source(at) == "shop policy 2 AD unknown_tool tools: no ad (AD[1])"
    at = site(played("a", [wrong("x", "abcd")]))
    assert await templates(3, unknown_tool="{message}{message}")(at) == "abc ...abc ..."
    assert await refused(templates(words="x"), at) == "off_template"
    assert await refused(templates(unknown_tool="{message}"), site(played("a", [wrong("x", "")]))) == (
        "environment_silent"
    )


async def test_what_the_environment_said_is_a_hint() -> None:
    said, cut = (of_errors(from_environment(max_chars=num)) for num in (1000, 4))
    at = site(played("a", [wrong("x", " {tests} failed:\n1 != 2 ")]))
    assert await said(at) == "The answer that was tried here before went wrong: {tests} failed:\n1 != 2"
    assert (await cut(at)).endswith("wrong: {tes ...")
    assert await refused(said, site(played("a", [wrong("x", " ")]))) == "environment_silent"


@pytest.mark.parametrize(
    ("answer", "message", "tool"),
    [
        ('<tool_call>{"name": "look.up", "arguments": {}}</tool_call>', "Wrong arguments.", "look.up"),
        ("LOOK_UP[x] ADD[1]", "Wrong arguments for add: 2 is missing.", "ADD"),
        ("LOOK_UP[x] ADD[1]", "That failed.", "the tool"),
        ("ADD[1] then ADD[2]", "That failed.", "ADD"),
        ("well", "That failed.", "the tool"),
        ('{"name": "' + "x" * 60 + '"}', "That failed.", "the tool"),
    ],
)
def test_the_tool_is_the_one_that_the_error_speaks_of(answer: str, message: str, tool: str) -> None:
    assert called_tool(answer, message) == tool


@pytest.mark.parametrize("line", ["-" * 200_000, "-." * 100_000])
def test_a_ruled_line_in_a_message_is_read_in_no_time(line: str) -> None:
    begun_s = time.process_time()
    assert called_tool("ADD[1] SUB[1]", f"add failed:\n{line}\n") == "ADD"
    assert time.process_time() - begun_s < 30  # backtracking would take hours


async def test_the_best_sibling_s_answer_to_the_same_is_a_hint() -> None:
    at = site(
        played("g/0", [wrong("AD[1]")]),
        played("g/1", [Answer(text="ADD[1]"), Answer(text="1")], reward=0.8),
        played("g/2", [Answer(text="z")], children=[played("g/2.0", [Answer(text="ADD[2]")], reward=1.0)]),
        played("g/3", [Answer(text="ADD[3]")], reward=0.2),
    )
    assert await siblings()(at) == "Another attempt, which succeeded, answered here:\nADD[2]"
    assert await refused(siblings(min_reward=1.5), at) == "no_sibling"


async def test_a_sibling_helps_at_a_later_turn_only_where_all_before_it_is_the_same() -> None:
    first = played("g/0", [Answer(text="a"), wrong("AD[1]")])
    same = played("g/1", [Answer(text="a"), Answer(text="ADD[1]")], reward=1.0)
    assert (await siblings()(site(first, same))).endswith("ADD[1]")
    for answers in ([Answer(text="b"), Answer(text="ADD[1]")], [Answer(text="a", told="stop"), Answer(text="ADD[1]")]):
        assert await refused(siblings(), site(first, played("g/1", answers, reward=1.0))) == "no_sibling"


@pytest.mark.parametrize(
    "answer",
    [
        Answer(text="AD[1]"),
        wrong("ADD[1]"),
        Answer(text="ADD[1]", whole=False),
        Answer(text=" "),
        Answer(text="A" * 21),
    ],
)
async def test_an_answer_that_shows_nothing_better_is_no_hint(answer: Answer) -> None:
    at = site(played("g/0", [wrong("AD[1]")]), played("g/1", [answer], reward=1.0))
    assert await refused(siblings(max_chars=20), at) == "no_sibling"


async def test_another_conversation_of_the_same_rollout_is_no_sibling() -> None:
    one, other = played("g/0", [wrong("AD[1]")], reward=1.0), played("g/0", [Answer(text="ADD[1]")])
    second = replace(other.rows[0], steps=(1,))
    both = replace(one, steps=one.steps + other.steps, rows=(one.rows[0], second))
    assert await refused(siblings(), site(both)) == "no_sibling"
    elsewhere = replace(both, id="g/1")
    assert (await siblings()(site(both, elsewhere))).endswith("ADD[1]")


# --- models ---


class Writer:
    """Writes what it is told to."""

    def __init__(self, text: str | EndpointError) -> None:
        self.text = text
        self.asked: list[Sequence[Message]] = []
        self.now = self.most = 0

    async def __call__(self, messages: Sequence[Message]) -> str:
        self.asked.append(messages)
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        if isinstance(self.text, EndpointError):
            raise self.text
        return self.text


async def test_a_model_is_shown_what_the_policy_was_and_writes_a_hint() -> None:
    writer = Writer(" Mind x. ")
    at = site(played("a", [Answer(text="hm", told="what?"), wrong("AD[1]", "no {ad}")]))
    assert await from_model(writer, TINY.renderer)(at) == "Mind x."
    [[message]] = writer.asked
    assert message["role"] == "user"
    shown = "user\nq< |im_end|>\n< |im_start|>assistant\nhm< |im_end|>\n< |im_start|>user\nwhat?< |im_end|>\n\n"
    assert shown in message["content"]
    assert "What it answered:\nAD[1]\n\nWhat was wrong with it (unknown_tool): no {ad}\n" in message["content"]
    assert "<|im_" not in message["content"]


async def test_a_model_is_shown_the_newest_of_a_long_conversation_and_its_hint_is_cut() -> None:
    writer = Writer("h" * 30)
    at = site(played("a", [Answer(text="old", told="new"), wrong("x")]))
    assert await from_model(writer, TINY.renderer, max_chars=10, max_context_chars=15)(at) == "h" * 10 + " ..."
    content = writer.asked[0][0]["content"]
    assert "new" in content
    assert "old" not in content


@pytest.mark.parametrize(
    ("text", "reason"), [(EndpointError("timeout", "late"), "model_failed"), (" \n", "model_silent")]
)
async def test_a_model_that_gives_none_costs_its_hint_alone(text: str | EndpointError, reason: str) -> None:
    assert await refused(from_model(Writer(text), TINY.renderer), site(played("a", [wrong("x")]))) == reason


async def test_a_model_is_asked_so_many_times_at_once() -> None:
    writer = Writer("x")
    source, at = from_model(writer, TINY.renderer, max_concurrent=2), site(played("a", [wrong("x")]))
    await asyncio.gather(*(source(at) for _ in range(6)))
    assert writer.most == 2


# --- solutions ---


async def test_the_solution_of_the_example_is_a_hint_whatever_was_marked() -> None:
    at = site(played("a", [wrong("x")]))
    assert await refused(from_solution, at) == "no_solution"
    solved = replace(at.rollout, task=replace(at.rollout.task, solution=" 42\n"))
    assert await from_solution(dataclasses.replace(at, rollout=solved, error=None)) == "The solution is:\n42"
    assert await refused(siblings(), dataclasses.replace(at, error=None)) == "not_marked"
    assert await refused(from_model(Writer("x"), TINY.renderer), dataclasses.replace(at, error=None)) == "not_marked"
