"""Models beside the policy."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from grpo import (
    CallFailed,
    Environment,
    EpisodeState,
    MockClient,
    OpenAIClient,
    OwnClient,
    Rubric,
    SingleTurnEpisode,
    client_of,
)
from orchestrator.rollouts.clock import OwnTimeout
from orchestrator.rollouts.play import play
from orchestrator.workers.protocol import Ask
from tests.orchestrator.rollouts.contexts import OpenBackend, context_on, user


class FakeServer:
    """Speaks chat completions; says what it is given to say, in turn."""

    def __init__(self) -> None:
        self.says: list[web.Response | float] = []
        """Responses, or seconds that it takes."""
        self.requests: list[tuple[Mapping[str, str], Any]] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append((dict(request.headers), await request.json()))
        say = self.says.pop(0) if self.says else said("fine")
        if isinstance(say, float):
            await asyncio.sleep(say)
            return said("late")
        return say


def said(content: Any) -> web.Response:
    return web.json_response({"choices": [{"message": {"role": "assistant", "content": content}}]})


@pytest_asyncio.fixture
async def server() -> AsyncIterator[tuple[FakeServer, str]]:
    fake, app = FakeServer(), web.Application()
    app.router.add_post("/v1/chat/completions", fake.answer)
    async with TestServer(app) as running:
        yield fake, f"http://127.0.0.1:{running.port}/v1"


# --- OpenAI's protocol ---


async def test_a_server_is_asked_as_openai_writes_it(
    server: tuple[FakeServer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, address = server
    monkeypatch.setenv("JUDGE_KEY", "secret")
    async with OpenAIClient(f"{address}/", "judge", api_key_var="JUDGE_KEY") as client:
        assert await client.complete([user("hi")], temperature=0.5, max_tokens=7) == "fine"
        await client.complete([user("hi")])
    (headers, body), (_, default) = fake.requests
    assert headers["Authorization"] == "Bearer secret"
    assert body == {"model": "judge", "messages": [user("hi")], "temperature": 0.5, "max_tokens": 7}
    assert default == {"model": "judge", "messages": [user("hi")], "temperature": 0.0}


async def test_what_may_pass_is_tried_again(server: tuple[FakeServer, str]) -> None:
    fake, address = server
    fake.says = [web.Response(status=503, headers={"Retry-After-Ms": "1"}), said("at last")]
    async with OpenAIClient(address, "judge") as client:
        assert await client.complete([user("hi")]) == "at last"
    assert len(fake.requests) == 2


@pytest.mark.parametrize(
    "say",
    [
        web.Response(status=401, text="who are you, secret?"),
        web.Response(status=307, headers={"Location": "http://127.0.0.1:9/elsewhere"}),
        web.Response(text="[" * 100_000),
        web.Response(text="x" * (5 << 20)),
        web.json_response({"choices": [{"message": {"role": "assistant", "content": "\ud83d"}}]}),
    ],
    ids=["refused", "redirect", "nested", "endless", "half a character"],
)
async def test_a_hostile_answer_is_an_error_of_the_rollout_and_names_no_key(
    server: tuple[FakeServer, str], monkeypatch: pytest.MonkeyPatch, say: web.Response
) -> None:
    fake, address = server
    fake.says = [say] * 2
    monkeypatch.setenv("JUDGE_KEY", "secret")
    async with OpenAIClient(address, "judge", api_key_var="JUDGE_KEY", retries=0) as client:
        with pytest.raises(CallFailed) as failed:
            await client.complete([user("hi")])
    assert "secret" not in str(failed.value)
    assert len(fake.requests) == 1


async def test_the_answer_is_not_waited_for_on_the_environments_time(server: tuple[FakeServer, str]) -> None:
    fake, address = server
    fake.says = [0.4] * 3
    async with OpenAIClient(address, "judge", num_parallel=1) as client, OwnTimeout(0.3):
        assert await asyncio.gather(*(client.complete([user("hi")]) for _ in range(3))) == ["late"] * 3


def test_what_cannot_be_a_client_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ValueError, match="base_url"):
        OpenAIClient("localhost:80", "judge")
    with pytest.raises(ValueError, match="JUDGE_KEY"):
        OpenAIClient("http://localhost", "judge", api_key_var="JUDGE_KEY")
    with pytest.raises(ValueError, match="timeout_s"):
        OpenAIClient("http://localhost", "judge", timeout_s=0)
    with pytest.raises(ValueError, match="yes"):
        MockClient("yes")
    with pytest.raises(ValueError, match="gpt"):
        OwnClient(model="gpt")  # type: ignore[arg-type]


# --- others ---


async def test_our_own_model_answers_in_the_rollout() -> None:
    backend = OpenBackend()
    assert await OwnClient(context_on(backend), "policy").complete([user("hi")], max_tokens=3) == "asked"
    assert backend.asked == [Ask(call=0, model="policy", messages=[user("hi")], temperature=0.0, max_tokens=3)]


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


async def test_our_own_model_needs_a_rollout() -> None:
    with pytest.raises(CallFailed):
        await client_of("base").complete([user("hi")])


@pytest.mark.parametrize(
    "args",
    ["gpt", {}, {"model": "judge"}, {"mock": ["a"], "model": "judge"}, {"base_url": "http://a", "model": "b", "c": 1}],
)
def test_arguments_that_name_nobody_are_an_error(args: Any) -> None:
    with pytest.raises(ValueError, match="model"):
        client_of(args)
