"""The state in which teachers are asked is the one in which the policy acted: as it saw it, or as the environment tells
all of it."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio

from orchestrator.disagreement.cache import state_key
from orchestrator.disagreement.turns import TraceTurn, turns_of
from orchestrator.envs.zorplex.environment import Zorplex
from orchestrator.episodes.records import EpisodeResult
from orchestrator.episodes.replay import replay
from tests.orchestrator.envs.test_openenv import Running, made, played
from tests.orchestrator.test_hosted import World

BOARDS = '''
from grpo import Environment, MultiTurnEpisode, Rubric

class Walk(MultiTurnEpisode, Environment):
    """From 0 to 2 by steps of 1, right or left."""
    rubric = Rubric([lambda completion: 0.0])
    max_turns = 4
    def dataset(self, split):
        return [{"prompt": "left or right?"}]
    async def respond(self, state, ctx):
        place = state.data.get("place", 0) + (1 if state.last_text == "right" else -1)
        state.data["place"] = place
        return f"You went {state.last_text}."

class Board(Walk):
    """The same, and where it is tells all."""
    def observe(self, state):
        return [{"role": "user", "content": f"left or right from {state.data.get('place', 0)}?"}]

class Torn(Walk):
    def observe(self, state):
        return [{"role": "user"}]
'''


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    (tmp_path / "envs.py").write_text(BOARDS)
    yield world
    if world.host is not None:
        await world.host.close()


async def turns(world: World, name: str, *answers: str) -> list[TraceTurn]:
    given = iter(answers)
    await world.start(name)
    [result] = await world.group(lambda prompt: next(given), 1)
    assert isinstance(result, EpisodeResult)
    return turns_of(result.rollout)


async def test_teachers_are_shown_the_conversation_where_nothing_else_tells_the_state(world: World) -> None:
    found = await turns(world, "Walk", "right", "left", "left", "right")
    assert [len(turn.messages) for turn in found] == [1, 3, 5, 7]
    assert [message["content"] for message in found[1].messages] == ["left or right?", "right", "You went right."]


async def test_teachers_are_shown_the_state_where_the_environment_tells_it(world: World) -> None:
    found = await turns(world, "Board", "right", "left", "left", "right")
    asked = [[message["content"] for message in turn.messages] for turn in found]
    assert asked == [[f"left or right from {place}?"] for place in (0, 1, 0, -1)]
    keys = [state_key(turn.messages) for turn in found]
    assert keys[0] == keys[2], "the same place is the same state, whatever led to it"
    shown = bytes(token for token in found[2].prompt_ids if token < 256).decode()
    assert "You went left." in shown, "the pair's prompt is what the policy saw"


async def test_a_state_that_nobody_can_be_shown_costs_the_rollout(world: World) -> None:
    await world.start("Torn")
    [result] = await world.group(lambda prompt: "right", 1)
    assert not isinstance(result, EpisodeResult)
    assert "message 0 is {'role': 'user'}, expected a dict with role and content" in result.failure.message


async def test_an_openenv_observation_can_be_the_whole_state() -> None:
    server = Running()
    await server.start()
    try:
        settings = {"prompt": "You write words backwards.", "observes_state": True}
        outcome = await played(made(server.url, **settings), "zzz", "two words", "yyy")
        trajectory = outcome.state.trajectory
        assert trajectory[0].observed == trajectory[0].messages
        word = outcome.extras["state"]["word"]
        for reply in trajectory[1:]:
            assert reply.observed == (
                {"role": "user", "content": f"You write words backwards.\n\nno, reverse: {word}"},
            )
        plain = await played(made(server.url), "zzz", "yyy", "xxx")
        assert [reply.observed for reply in plain.state.trajectory] == [None] * 3
    finally:
        await server.stop()


async def test_a_replay_comes_to_the_states_that_teachers_are_shown(tmp_path: Path) -> None:
    """The environment does the same again; what teachers are shown was kept as the policy saw it."""
    world = World(tmp_path)
    settings: dict[str, Any] = {"difficulty": "medium", "max_value": 9, "system_prompt": "Look up."}
    (tmp_path / "envs.py").write_text("from orchestrator.envs.zorplex.environment import Zorplex")
    environment = Zorplex(**settings)
    example = environment.dataset("train")[0]
    words = [part.split(")")[0] for part in example["prompt"].split("zorplex(")[1:]]
    answers = [*(f"LOOKUP[{word}]" for word in words), f"[ANSWER] {example['answer']}"]
    try:
        await world.start("Zorplex", **settings)
        given = iter(answers)
        [result] = await world.group(lambda prompt: next(given), 1)
        assert isinstance(result, EpisodeResult)
        shown = [turn.messages for turn in turns_of(result.rollout)]
        assert [await replay(environment, example, answers[:num]) for num in range(len(answers))] == shown
    finally:
        await environment.pool.close()
        if world.host is not None:
            await world.host.close()
