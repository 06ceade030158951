"""Environments of OpenEnv servers, with the minimal server of `others/`."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from grpo.environments import openenv
from grpo.environments.openenv import OpenEnv, OpenEnvError, SessionLost
from grpo.orchestrator.rollouts.play import play
from grpo.orchestrator.rollouts.state import EpisodeState

from tests.environments.others.openenv_server import app

EXAMPLE = 3


class Running:
    """A server on a port that stays its own."""

    def __init__(self, port: int = 0, capacity: int = 100) -> None:
        self.port, self.capacity = port, capacity
        self.runner: web.AppRunner | None = None

    async def start(self) -> None:
        self.runner = web.AppRunner(app(self.capacity), shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self.runner.addresses[0][1]

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    running = Running()
    await running.start()
    yield running
    await running.stop()


def made(url: str, **settings: Any) -> OpenEnv:
    given = {"action_field": "message", "observation_field": "text", **settings}
    return OpenEnv(base_url=url, **given)


async def played(environment: OpenEnv, *answers: str) -> EpisodeState:
    return await play(environment, environment.dataset("train")[EXAMPLE], list(answers))


async def word_of(server: Running) -> str:
    outcome = await played(made(server.url), "x", "x", "x")
    word: str = outcome.extras["state"]["word"]
    return word


async def test_an_answer_is_an_action_and_what_the_server_says_to_it_the_next_message(server: Running) -> None:
    word = await word_of(server)
    outcome = await played(made(server.url, prompt="You write words backwards."), half := word[::-1][:2], word[::-1])
    shown = [(message["role"], message["content"]) for message in outcome.trajectory[1].messages]
    assert shown == [
        ("user", f"You write words backwards.\n\nReverse: {word}"),
        ("assistant", half),
        ("user", f"no, reverse: {word}"),
    ]
    total = pytest.approx(1 / 9 + 1.0)  # two of three letters: 0.5 * 2/3 / 3 tries
    assert outcome.metrics == {"total_reward": total, "num_steps": 2.0, "finished": 1.0}
    assert (outcome.reward, outcome.accuracy) == (total, 1.0)


async def test_error_markers_of_an_observation_mark_the_answer(server: Running) -> None:
    outcome = await played(made(server.url), "a", "1 2", "b")
    errors = [reply.error for reply in outcome.trajectory]
    assert [error is None for error in errors] == [True, False, True]
    assert errors[1] is not None
    assert (errors[1].error_kind, errors[1].hint_template_key) == ("not_a_word", "words")
    assert errors[1].message == "'1 2' is no word"


async def test_an_answer_that_is_no_action_is_marked_and_told_and_costs_a_turn(server: Running) -> None:
    outcome = await played(made(server.url, max_turns=2, reset={"length": 5}), "x" * 41, "y")
    first, second = outcome.trajectory
    assert first.error is not None
    assert first.error.error_kind == "refused_action"
    assert "at most 40 letters" in second.messages[-1]["content"]
    assert outcome.extras["actions"] == [{"message": "y"}]  # what is needed for a replay
    assert outcome.extras["reset"] == {"seed": 50 + EXAMPLE, "length": 5}
    assert (outcome.extras["state"]["step_count"], len(outcome.extras["state"]["word"])) == (1, 5)


async def test_a_step_that_raises_or_takes_too_long_costs_the_rollout(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OpenEnvError, match="EXECUTION_ERROR"):
        await played(made(server.url), "raise")
    monkeypatch.setattr(openenv, "STEP_LIMIT_S", 0.2)
    with pytest.raises(TimeoutError, match=r"0\.2"):
        await played(made(server.url), "hang")


async def test_a_full_server_is_waited_for_and_one_that_stays_away_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Running(capacity=1)
    await server.start()
    environment = made(server.url)
    outcomes = await asyncio.gather(*(played(environment, "x", "y", "z") for _ in range(3)))
    assert [outcome.turn for outcome in outcomes] == [3, 3, 3]
    await server.stop()
    monkeypatch.setattr(openenv, "WAIT_S", 0.3)
    with pytest.raises(SessionLost, match=f":{server.port} "):
        await played(environment, "x")


async def test_a_codec_of_ones_own_stands_between_text_and_environment(server: Running, tmp_path: Path) -> None:
    path = tmp_path / "upper.py"
    path.write_text(
        "class Upper:\n"
        "    def to_text(self, observation):\n"
        "        return observation['text'].upper()\n"
        "    def to_action(self, text):\n"
        "        if not text:\n"
        "            raise ValueError('say something')\n"
        "        return {'message': text.lower()}\n"
    )
    environment = made(server.url, action_field=None, observation_field=None, codec=f"{path}:Upper", max_turns=2)
    outcome = await played(environment, "", "ABC")
    assert outcome.extras["actions"] == [{"message": "abc"}]
    first, second = outcome.trajectory
    assert first.messages[0]["content"].startswith("REVERSE: ")
    assert first.error is not None
    assert first.error.error_kind == "malformed_action"
    assert second.messages[-1]["content"] == "error: say something"
