"""The ctx: which conversation a list of messages continues, and sub-episodes."""

import asyncio
import math
from typing import Any

import pytest
from grpo.orchestrator.rollouts.context import ContextFull, RolloutContext
from grpo.orchestrator.rollouts.episode import Episode, SingleTurnEpisode
from grpo.orchestrator.rollouts.rubric import Rubric
from grpo.orchestrator.rollouts.state import EpisodeState

from tests.orchestrator.rollouts.contexts import OpenBackend, assistant, context_on, user

AGAIN = [user("q0"), assistant("a0"), user("q1")]


def told(backend: OpenBackend) -> list[tuple[int, list[Any]]]:
    """Conversation and new messages of each call."""
    return [(call.conversation, call.messages) for call in backend.calls]


async def begun() -> tuple[RolloutContext, OpenBackend]:
    """After the answer "a0" to "q0"."""
    ctx = context_on(backend := OpenBackend())
    await ctx.sample("policy", [user("q0")])
    return ctx, backend


# --- conversations ---


async def test_a_list_that_goes_on_from_an_answer_sends_what_is_new() -> None:
    ctx, backend = await begun()
    await ctx.sample("policy", [user("q0"), assistant("a0", tool_calls=[{"name": "add"}]), user("q1")])
    await ctx.sample("policy", [*AGAIN, assistant("a1"), user("q2"), user("q3")])
    assert told(backend) == [(0, [user("q0")]), (0, [user("q1")]), (0, [user("q2"), user("q3")])]


@pytest.mark.parametrize(
    "messages", [[user("q0"), assistant("a1"), user("q1")], [user("Q0"), assistant("a0"), user("q1")], [user("q0")]]
)
async def test_any_other_list_begins_a_conversation(messages: list[Any]) -> None:
    ctx, backend = await begun()
    await ctx.sample("policy", messages)
    assert told(backend) == [(0, [user("q0")]), (1, messages)]


async def test_of_calls_at_the_same_time_one_goes_on_and_the_others_begin() -> None:
    ctx, backend = await begun()
    backend.open.clear()
    calls = [asyncio.create_task(ctx.sample("policy", AGAIN)) for _ in range(3)]
    await asyncio.sleep(0)
    backend.open.set()
    replies = await asyncio.gather(*calls)
    assert told(backend)[1:] == [(0, [user("q1")]), (1, AGAIN), (2, AGAIN)]
    await ctx.sample("policy", [*AGAIN, replies[2].message, user("q2")])
    assert told(backend)[-1] == (2, [user("q2")])


async def test_a_conversation_whose_call_failed_goes_on_no_more() -> None:
    ctx, backend = await begun()
    backend.error = ContextFull("full")
    with pytest.raises(ContextFull):
        await ctx.sample("policy", AGAIN)
    await ctx.sample("policy", AGAIN)
    assert told(backend)[1:] == [(0, [user("q1")]), (1, AGAIN)]
    assert [reply.text for reply in ctx.state.trajectory] == ["a0", "a2"]


# --- what cannot be asked ---


@pytest.mark.parametrize("messages", [[], "hi", [{"role": "user"}], [{**user("hi"), "time": math.nan}]])
async def test_messages_that_nobody_can_be_shown_are_errors(messages: Any) -> None:
    backend = OpenBackend()
    with pytest.raises(ValueError, match="message"):
        await context_on(backend).sample("policy", messages)
    assert backend.calls == []


# --- sub-episodes ---


class Below(Episode):
    """Draws, asks, and spawns itself as often as the example says."""

    rubric = Rubric([lambda: 1.0])

    async def rollout(self, ctx: RolloutContext, state: EpisodeState) -> None:
        state.data["drawn"] = ctx.rng.random()
        await ctx.sample("policy", [user("q")])
        if depth := state.example["depth"]:
            await ctx.spawn("below", [{"depth": depth - 1}] * 2)


async def test_sub_episodes_run_at_the_same_time_in_conversations_of_their_own() -> None:
    backend = OpenBackend()
    ctx = context_on(backend, episodes={"below": Below()})
    await ctx.sample("policy", [user("q")])
    backend.open.clear()
    spawning = asyncio.create_task(ctx.spawn("below", [{"depth": 0}, {"depth": 0}, {"depth": 0}]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [call.conversation for call in backend.calls] == [0, 1, 2, 3]
    backend.open.set()
    outcomes = await spawning
    assert ctx.state.children == outcomes
    assert [outcome.reward for outcome in outcomes] == [1, 1, 1]
    assert len({outcome.data["drawn"] for outcome in outcomes}) == 3
    assert len(ctx.state.trajectory) == 1


@pytest.mark.parametrize("examples", ["long " * 600_000, None, [5], {"prompt": "x"}, [{"prompt": "x"}] * 5000])
async def test_what_cannot_be_spawned_is_an_error_at_once(examples: Any) -> None:
    episode = SingleTurnEpisode(rubric=Rubric([lambda: 1.0]))
    with pytest.raises(ValueError, match="spawned"):
        await context_on(OpenBackend(), episodes={"below": episode}).spawn("below", examples)


async def test_an_episode_that_spawns_itself_without_end_is_an_error() -> None:
    ctx = context_on(OpenBackend(), episodes={"below": Below()})
    [outcome] = await ctx.spawn("below", [{"depth": 3}])
    assert outcome.children[0].children[1].children[0].children == []
    with pytest.raises(ValueError, match="generations"):
        await ctx.spawn("below", [{"depth": 9}])
