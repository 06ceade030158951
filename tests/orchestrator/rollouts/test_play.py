"""Episodes with answers that were written beforehand."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from grpo import Environment, EpisodeState, MultiTurnEpisode, Role, RolloutContext, Rubric
from orchestrator.rollouts.episode import Response
from orchestrator.rollouts.play import play
from tests.orchestrator.rollouts.contexts import user


class Talk(MultiTurnEpisode, Environment):
    """Draws at random, asks a model, keeps what it drew in a store."""

    rubric = Rubric([lambda state: float(state.turn)])
    roles = (Role(id="policy", system_prompt="Be brief."),)
    stores = {"drawn": 10}  # noqa: RUF012
    max_turns = 3

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        return [{"prompt": "hi"}]

    async def respond(self, state: EpisodeState, ctx: RolloutContext) -> Response:
        drawn = ctx.rng.randrange(1000)
        artifact_id = await ctx.stores["drawn"].add({"drawn": drawn})
        assert await ctx.stores["drawn"].set_weight(artifact_id, 2)
        assert not await ctx.stores["drawn"].set_weight("nobody", 2)
        [(again, data)] = await ctx.stores["drawn"].sample(weighted=True)
        assert (again in (artifact_id,)) == (data == {"drawn": drawn})
        asked = await ctx.ask([user(state.last_text)]) if state.example.get("asks") else ""
        return f"{drawn} {await ctx.stores['drawn'].size()} {asked}".strip()


EXAMPLE = {"prompt": "hi"}


async def test_answers_may_be_a_function_of_what_the_policy_sees() -> None:
    seen: list[tuple[str, int]] = []

    def answer(role: str, messages: list[dict[str, Any]]) -> str:
        seen.append((role, len(messages)))
        return messages[-1]["content"][::-1]

    outcome = await play(Talk(), EXAMPLE, answer)
    assert seen == [("policy", 2), ("policy", 4), ("policy", 6)]
    assert outcome.trajectory[0].text == "ih"


async def test_an_answer_too_few_is_an_error_that_says_what_is_asked() -> None:
    with pytest.raises(ValueError, match="policy"):
        await play(Talk(), EXAMPLE, ["a"])
    with pytest.raises(ValueError, match="base"):
        await play(Talk(), {"prompt": "hi", "asks": True}, ["a"])
