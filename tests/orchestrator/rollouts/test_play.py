"""Episodes with answers that were written beforehand, and the examples that the documentation shows."""

import inspect
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from grpo import Environment, EpisodeState, MultiTurnEpisode, Role, RolloutContext, Rubric, ToolEpisode, api
from orchestrator.rollouts.context import CallFailed
from orchestrator.rollouts.episode import Response
from orchestrator.rollouts.play import play
from tests.orchestrator.rollouts.contexts import user


def named_in_the_documentation(documented: Any) -> dict[str, Any]:
    """What the example of a docstring defines."""
    docstring = inspect.getdoc(documented) or ""
    _, _, code = docstring.partition("::\n\n")
    lines = code.splitlines()
    end = next((place for place, line in enumerate(lines) if line and not line.startswith(" ")), len(lines))
    names: dict[str, Any] = {name: getattr(api, name) for name in api.__all__}
    exec(textwrap.dedent("\n".join(lines[:end])), names)
    return names


# --- what the documentation shows ---


async def test_the_example_of_a_single_answer() -> None:
    shout = named_in_the_documentation(Environment)["Shout"]()
    [example] = shout.dataset("eval")
    assert (await play(shout, example, ["MOIN"])).reward == 1
    assert (await play(shout, example, ["moin"])).reward == 0


async def test_the_example_of_a_conversation() -> None:
    guess = named_in_the_documentation(MultiTurnEpisode)["Guess"]()
    example = {"prompt": "Guess.", "number": 7}
    won = await play(guess, example, ["5", "many", "9", "7"])
    assert won.reward == 1
    assert [message["content"] for message in won.messages[2::2]] == [
        "higher",
        "Please answer with a number.",
        "lower",
    ]
    assert [reply.error is not None for reply in won.trajectory] == [False, True, False, False]
    assert (await play(guess, example, ["1", "2", "3", "4", "5"])).reward == 0
    assert (await play(guess, example, ["1", "2", "3", "4", "7"])).reward == 1
    assert guess.dataset("train")[0]["prompt"] == "Guess my number from 1 to 9."


async def test_the_example_of_tools() -> None:
    look_up = named_in_the_documentation(ToolEpisode)["LookUp"]()
    [example] = look_up.dataset("train")
    call = '<tool_call>{{"name": "look_up", "arguments": {{"word": "{}"}}}}</tool_call>'
    outcome = await play(look_up, example, [call.format("apple"), call.format("plum"), "7"])
    assert outcome.reward == 1
    assert [message["content"] for message in outcome.messages if message["role"] == "tool"] == ["3", "4"]
    failed = await play(look_up, example, [call.format("pear"), "7"])
    assert failed.data["tool_errors"] == 1


async def test_the_example_of_sub_episodes() -> None:
    environment = named_in_the_documentation(RolloutContext.spawn)["ProposeAndSolve"]()
    [example] = environment.dataset("train")
    half = await play(environment, example, ["3+4", "7", "8", "7", "9"])
    assert half.rewards == {"proposer": 1.0}
    assert [child.rewards for child in half.children] == [{"solver": reward} for reward in (1, 0, 1, 0)]
    assert half.extras == {"pass_rate": 0.5}
    assert (await play(environment, example, ["what?"])).reward == 0


# --- playing ---


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


async def test_models_beside_the_policy_answer_as_written() -> None:
    outcome = await play(Talk(), {"prompt": "hi", "asks": True}, ["a", "b", "c"], asked=["x", "y", "z"])
    assert [message["content"][-1] for message in outcome.messages[2::2]] == ["x", "y", "z"]
    again = await play(Talk(), {"prompt": "hi", "asks": True}, "abc", asked=lambda model, _: model)
    assert again.messages[-1]["content"].endswith("base")


async def test_an_answer_too_few_is_an_error_that_says_what_is_asked() -> None:
    with pytest.raises(ValueError, match="policy"):
        await play(Talk(), EXAMPLE, ["a"])
    with pytest.raises(ValueError, match="base"):
        await play(Talk(), {"prompt": "hi", "asks": True}, ["a"])


async def test_a_store_that_cannot_do_it_is_a_call_that_failed() -> None:
    class Draws(Talk):
        async def respond(self, state: EpisodeState, ctx: RolloutContext) -> Response:
            await ctx.stores["drawn"].sample()
            return None

    with pytest.raises(CallFailed):
        await play(Draws(), EXAMPLE, ["a"])
