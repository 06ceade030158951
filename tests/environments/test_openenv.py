"""Environments of OpenEnv servers, with the minimal server of `others/`."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from aiohttp import web
from grpo.environments import openenv
from grpo.environments.openenv import OpenEnv, OpenEnvError, SessionLost
from grpo.orchestrator.rollouts.play import play
from grpo.orchestrator.rollouts.state import EpisodeState, StepError

from tests.environments.others.openenv_server import app

EXAMPLE = 3


@asynccontextmanager
async def serving(capacity: int = 100) -> AsyncIterator[str]:
    """Its address."""
    runner = web.AppRunner(app(capacity), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest_asyncio.fixture
async def url() -> AsyncIterator[str]:
    async with serving() as address:
        yield address


def made(url: str, **settings: Any) -> OpenEnv:
    given = {"action_field": "message", "observation_field": "text", **settings}
    return OpenEnv(base_url=url, **given)


async def played(environment: OpenEnv, *answers: str) -> EpisodeState:
    return await play(environment, environment.dataset("train")[EXAMPLE], list(answers))


async def test_an_answer_is_an_action_and_what_the_server_says_to_it_the_next_message(url: str) -> None:
    word = (await played(made(url), "x", "x", "x")).extras["state"]["word"]
    outcome = await played(made(url, prompt="You write words backwards."), half := word[::-1][:2], word[::-1])
    shown = [(message["role"], message["content"]) for message in outcome.trajectory[1].messages]
    assert shown == [
        ("user", f"You write words backwards.\n\nReverse: {word}"),
        ("assistant", half),
        ("user", f"no, reverse: {word}"),
    ]
    total = pytest.approx(1 / 9 + 1.0)  # two of three letters: 0.5 * 2/3 / 3 tries
    assert outcome.metrics == {"total_reward": total, "num_steps": 2.0, "finished": 1.0}
    assert (outcome.reward, outcome.accuracy) == (total, 1.0)


async def test_error_markers_of_an_observation_mark_the_answer(url: str) -> None:
    outcome = await played(made(url), "a", "1 2", "b")
    marked = StepError(error_kind="not_a_word", hint_template_key="words", message="'1 2' is no word")
    assert [reply.error for reply in outcome.trajectory] == [None, marked, None]


async def test_an_answer_that_is_no_action_is_marked_and_told_and_costs_a_turn(url: str) -> None:
    outcome = await played(made(url, max_turns=2, reset={"length": 5}), "x" * 41, "y")
    first, second = outcome.trajectory
    assert first.error is not None
    assert first.error.error_kind == "refused_action"
    assert "at most 40 letters" in second.messages[-1]["content"]
    assert outcome.extras["actions"] == [{"message": "y"}]  # what is needed for a replay
    assert outcome.extras["reset"] == {"seed": 50 + EXAMPLE, "length": 5}
    assert (outcome.extras["state"]["step_count"], len(outcome.extras["state"]["word"])) == (1, 5)


async def test_a_step_that_raises_or_takes_too_long_costs_the_rollout(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OpenEnvError, match="EXECUTION_ERROR"):
        await played(made(url), "raise")
    monkeypatch.setattr(openenv, "STEP_LIMIT_S", 0.2)
    with pytest.raises(TimeoutError, match=r"0\.2"):
        await played(made(url), "hang")


async def test_a_full_server_is_waited_for_and_one_that_stays_away_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(capacity=1) as url:
        environment = made(url)
        outcomes = await asyncio.gather(*(played(environment, "x", "y", "z") for _ in range(3)))
    assert [outcome.turn for outcome in outcomes] == [3, 3, 3]
    monkeypatch.setattr(openenv, "WAIT_S", 0.3)
    with pytest.raises(SessionLost, match=f"{urlsplit(url).port} "):
        await played(environment, "x")


UPPER = """
class Upper:
    def to_text(self, observation):
        return observation["text"].upper()
    def to_action(self, text):
        if not text:
            raise ValueError("say something")
        return {"message": text.lower()}
"""


async def test_a_codec_of_ones_own_stands_between_text_and_environment(url: str, tmp_path: Path) -> None:
    (path := tmp_path / "upper.py").write_text(UPPER)
    environment = made(url, action_field=None, observation_field=None, codec=f"{path}:Upper", max_turns=2)
    outcome = await played(environment, "", "ABC")
    assert outcome.extras["actions"] == [{"message": "abc"}]
    first, second = outcome.trajectory
    assert first.messages[0]["content"].startswith("REVERSE: ")
    assert first.error is not None
    assert first.error.error_kind == "malformed_action"
    assert second.messages[-1]["content"] == "error: say something"
