"""Models beside the policy."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest
from aiohttp import web
from grpo.orchestrator.rollouts.clock import OwnTimeout
from grpo.orchestrator.rollouts.play import play

from grpo import CallFailed, Environment, EpisodeState, OpenAIClient, Rubric, SingleTurnEpisode, client_of
from tests.orchestrator.chat_server import FakeChatServer, completion, status
from tests.orchestrator.rollouts.contexts import user

# --- OpenAI's protocol ---


async def test_a_server_is_asked_as_openai_writes_it(chats: FakeChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    client = client_of({"base_url": f"{chats.base_url}/", "model": "judge", "api_key_var": "JUDGE_KEY"})
    assert await client.complete([user("hi")], temperature=0.5, max_tokens=7) == "X"
    await client.complete([user("hi")])
    (headers, body), (_, default) = chats.requests
    assert headers["Authorization"] == "Bearer secret"
    assert body == {"model": "judge", "messages": [user("hi")], "temperature": 0.5, "max_tokens": 7}
    assert default == {"model": "judge", "messages": [user("hi")], "temperature": 0.0}
    chats.says["judge"].append(status(401, "who are you, secret?"))
    with pytest.raises(CallFailed) as failed:
        await client.complete([user("hi")])
    assert "secret" not in str(failed.value)
    await client.close()


async def test_the_answer_is_not_waited_for_on_the_environments_time(
    chats: FakeChatServer, advance: Callable[[float], Awaitable[None]]
) -> None:
    async def late(request: web.Request) -> web.StreamResponse:
        await advance(100)
        return completion("late")

    chats.says["judge"] = [late] * 3
    async with OpenAIClient(chats.base_url, "judge", num_parallel=1, timeout_s=1e6) as client, OwnTimeout(50.0):
        assert await asyncio.gather(*(client.complete([user("hi")]) for _ in range(3))) == ["late"] * 3


# --- others ---


class Judged(SingleTurnEpisode, Environment):
    """A judge's verdict is the reward."""

    def __init__(self, judge: Mapping[str, Any] | str) -> None:
        self._judge = client_of(judge)
        self.rubric = Rubric([self.verdict])

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        return [{"prompt": "hi"}]

    async def verdict(self, state: EpisodeState) -> float:
        return float(await self._judge.complete([user(state.last_text)]) == "good")


async def test_arguments_name_a_judge_which_finds_the_context_of_its_rollout() -> None:
    async def rewards(judge: Mapping[str, Any] | str) -> list[float]:
        def asked(model: str, messages: list[dict[str, Any]]) -> str:
            return "good" if messages == [user("yes")] and model == judge else "bad"

        environment = Judged(judge)
        outcomes = [await play(environment, {"prompt": "hi"}, [text], asked=asked) for text in ("yes", "no")]
        return [outcome.reward for outcome in outcomes]

    assert await rewards("base") == [1, 0]
    assert await rewards("policy") == [1, 0]
    assert await rewards({"mock": ["bad", "good"]}) == [0, 1]
    with pytest.raises(CallFailed):  # outside of a rollout
        await client_of("base").complete([user("hi")])
