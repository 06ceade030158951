"""Conversations: who answers what, and when they end."""

from collections.abc import Mapping
from typing import Any

import pytest
from grpo.orchestrator.rollouts.episode import Response

from grpo import (
    AlternatingRolesEpisode,
    Episode,
    EpisodeState,
    MultiTurnEpisode,
    Role,
    RolloutContext,
    Rubric,
    SingleTurnEpisode,
)
from tests.orchestrator.rollouts.contexts import OpenBackend, assistant, context_on, user


def num_answers(state: EpisodeState) -> float:
    return state.turn


class Echo(MultiTurnEpisode):
    """Says again what was said, or what an example has for the turn."""

    rubric = Rubric([num_answers])

    async def respond(self, state: EpisodeState, ctx: RolloutContext) -> Response:
        responses: Mapping[int, Response] = state.example.get("responses", {})
        return responses.get(state.turn, f"again: {state.last_text}")


async def played(episode: Episode, backend: OpenBackend | None = None, **example: Any) -> EpisodeState:
    ctx = context_on(backend or OpenBackend(), *episode.roles, example={"prompt": "hi", **example})
    return await episode.run(ctx)


async def test_a_conversation_ends_after_its_turns_or_when_the_environment_says_nothing_more() -> None:
    outcome = await played(Echo(max_turns=2))
    answered = [user("hi"), assistant("a0"), user("again: a0"), assistant("a1"), user("again: a1")]
    assert outcome.messages == answered
    assert (outcome.done, outcome.truncated) == (True, False)
    assert (outcome.rewards, outcome.reward, outcome.accuracy) == ({"policy": 2.0}, 2.0, 2.0)
    tool, two = {"role": "tool", "content": "42"}, [user("one"), user("two")]
    outcome = await played(Echo(), responses={1: tool, 2: two, 3: (), 4: None})
    told = [user("hi"), assistant("a0"), tool, assistant("a1"), *two, assistant("a2"), assistant("a3")]
    assert outcome.messages == told


async def test_what_extras_say_is_taken_before_scoring_and_after_it() -> None:
    def judge(state: EpisodeState, extras: Mapping[str, Any]) -> float:
        assert extras == {"verdict": None}
        state.data["verdict"] = "good"
        return 1.0

    class Judged(SingleTurnEpisode):
        rubric = Rubric([judge])

        def extras(self, state: EpisodeState) -> Mapping[str, Any]:
            return {"verdict": state.data.get("verdict")}

    class Wrong(Judged):
        def extras(self, state: EpisodeState) -> Mapping[str, Any]:
            return {"verdict": object()}

    assert (await played(Judged())).extras == {"verdict": "good"}
    with pytest.raises(ValueError, match="extras"):
        await played(Wrong())


# --- two roles ---

AFF, NEG = Role(id="Aff", system_prompt="For."), Role(id="Neg")


class Debate(AlternatingRolesEpisode):
    rubric = Rubric([num_answers])
    roles = (AFF, NEG)


async def test_each_of_two_roles_sees_the_others_answers_as_the_users() -> None:
    backend = OpenBackend()
    outcome = await played(Debate(max_turns=4), backend)
    assert [(call.role, call.conversation, call.messages) for call in backend.calls] == [
        ("Aff", 0, [{"role": "system", "content": "For."}, user("hi")]),
        ("Neg", 1, [user("hi\n\na0")]),
        ("Aff", 0, [user("a1")]),
        ("Neg", 1, [user("a2")]),
    ]
    assert outcome.messages == [
        user("hi"),
        *(assistant(f"a{turn}", name=role) for turn, role in enumerate(("Aff", "Neg", "Aff", "Neg"))),
    ]
    assert outcome.rewards == {"Aff": 4, "Neg": 4}
