"""Episodes in which the policy calls tools."""

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from grpo import ContextFull, EpisodeState, Rubric, Tool, ToolEpisode, ToolFailed, parse_bracketed
from tests.orchestrator.rollouts.contexts import OpenBackend, context_on

WORDS = {"apple": 3, "plum": 4}
released = threading.Event()


def look_up(word: str) -> int:
    """The number of a word.

    Args:
        word: what to look up
    """
    if word not in WORDS:
        raise ToolFailed(f"There is no {word}.", error_kind="unknown_word", hint_template_key="words")
    return WORDS[word]


async def add(a: int, b: int) -> Mapping[str, int]:
    """A sum."""
    await asyncio.sleep(0)
    return {"sum": a + b}


def divide(a: int, b: int) -> float:
    """A quotient."""
    return a / b


def hang() -> None:
    """Takes until it is released."""
    released.wait(30)


async def sleep() -> None:
    """Takes for ever."""
    await asyncio.sleep(3600)


def greedy() -> None:
    """Takes all memory."""
    raise MemoryError


def full() -> None:
    """A model that is asked has no room."""
    raise ContextFull("no room")


TOOLS = [look_up, add, divide, hang, sleep, greedy, full]


async def played(*answers: str, tools: Any = TOOLS, **options: Any) -> tuple[EpisodeState, OpenBackend]:
    episode = ToolEpisode(tools, parser=parse_bracketed, rubric=Rubric([lambda: 0.0]), **options)
    backend = OpenBackend(*answers)
    return await episode.run(context_on(backend)), backend


def results(outcome: EpisodeState) -> list[str]:
    return [message["content"] for message in outcome.messages if message["role"] == "tool"]


async def test_the_policy_sees_results_until_it_answers_without_a_call() -> None:
    _, backend = await played("LOOK_UP[apple] LOOK_UP[plum]", "7", result_role="user")
    assert backend.calls[1].messages == [{"role": "user", "content": "3\n4"}]
    outcome, backend = await played("LOOK_UP[apple] and LOOK_UP[plum]", "ADD[3, 4]", "7", "never")
    assert results(outcome) == ["3", "4", '{"sum": 7}']
    assert len(backend.calls) == 3
    assert outcome.data == {"num_tool_calls": 3, "tool_errors": 0}
    assert outcome.last_text == "7"
    assert all(reply.error is None for reply in outcome.trajectory)


async def test_a_call_that_is_only_thought_of_is_none() -> None:
    outcome, _ = await played("<think>LOOK_UP[apple]?</think> LOOK_UP[plum]", "<think>LOOK_UP[apple]", "never")
    assert (results(outcome), outcome.turn) == (["4"], 2)


@pytest.mark.parametrize(
    ("call", "kind", "told"),
    [
        ("LOOK_UP[pear]", "unknown_word", "pear"),
        ("DIVIDE[1, 0]", "tool_error", "ZeroDivisionError"),
        ("ADD[1]", "wrong_arguments", "add"),
        ("MULTIPLY[1]", "unknown_tool", "look_up"),
        ("SLEEP[]", "tool_timeout", "1.5"),
        ("HANG[]", "tool_timeout", "1.5"),
    ],
)
async def test_a_call_that_fails_is_told_to_the_policy_and_marked(call: str, kind: str, told: str) -> None:
    released.clear()
    outcome, _ = await played(f"LOOK_UP[apple] {call} DIVIDE[1, 0]", "I give up", timeout_s=1.5)
    released.set()
    [_, result, _] = results(outcome)
    assert told in result
    assert outcome.data == {"num_tool_calls": 3, "tool_errors": 2}
    error = outcome.trajectory[0].error
    assert error is not None
    assert (error.error_kind, error.hint_template_key) == (kind, "words" if kind == "unknown_word" else kind)
    assert error.message == result  # of the first that failed
    assert outcome.trajectory[1].error is None


@pytest.mark.parametrize(("call", "error"), [("GREEDY[]", MemoryError), ("FULL[]", ContextFull)])
async def test_what_is_no_failure_of_a_tool_is_not_told_to_the_policy(call: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        await played(call, "so")


async def test_calls_of_one_answer_are_made_at_the_same_time() -> None:
    barrier = threading.Barrier(3, timeout=60)

    def meet() -> str:
        """Waits for the others."""
        barrier.wait()
        return "done"

    outcome, _ = await played("MEET[] MEET[] MEET[]", "so", tools=[meet])
    assert results(outcome) == ["done"] * 3


class Source:
    """Tools that each rollout asks for anew."""

    def __init__(self, name: str) -> None:
        self.name, self.num_opened = name, 0

    async def open(self) -> Mapping[str, Tool]:
        self.num_opened += 1
        schema = {"properties": {"text": {"type": "string"}}}
        return {self.name: Tool.of_schema(self.name, self.shout, parameters=schema, description="Shouts.")}

    async def shout(self, text: str) -> str:
        return f"{text.upper()} {self.num_opened}"


async def test_tools_of_a_source_stand_beside_those_of_the_episode() -> None:
    source = Source("shout")
    for number in (1, 2):
        outcome, backend = await played("LOOK_UP[apple] SHOUT[no]", "so", sources=[source])
        assert results(outcome) == ["3", f"NO {number}"]
        assert [tool["function"]["name"] for tool in backend.calls[0].tools][-1] == "shout"
    with pytest.raises(ValueError, match="look_up"):
        await played("so", sources=[Source("look_up")])
    with pytest.raises(ValueError, match="shout"):
        await played("so", sources=[source, Source("shout")])
