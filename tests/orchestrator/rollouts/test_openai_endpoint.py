"""Agents of any framework as environments: the endpoint of a rollout, asked by OpenAI's own client and by agents."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import openai
import pytest
from grpo.orchestrator.rollouts.clock import OwnTimeout, waiting
from grpo.orchestrator.rollouts.openai_endpoint import Endpoint, endpoint_of
from grpo.orchestrator.rollouts.play import ScriptedBackend
from grpo.orchestrator.workers.protocol import Call

from grpo import (
    CallFailed,
    ContextFull,
    Environment,
    Episode,
    EpisodeState,
    Role,
    RolloutContext,
    Rubric,
    play,
    shared_endpoint,
)
from tests.orchestrator.rollouts.contexts import OpenBackend, context_on

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
TOOLS: Any = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}]
HELLO: Any = [{"role": "user", "content": "hello"}]
Answers = Sequence[str] | Callable[[str, list[dict[str, Any]]], str]


class Desk:
    """A rollout's endpoint and a client of it."""

    def __init__(self, endpoint: Endpoint, backend: Any) -> None:
        self.endpoint, self.state, self.backend = endpoint, endpoint.ctx.state, backend
        self.client = self.client_of(endpoint.api_key)

    def client_of(self, key: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.endpoint.base_url, api_key=key, max_retries=0)

    async def ask(self, messages: Any = HELLO, **settings: Any) -> Any:
        return await self.client.chat.completions.create(model="policy", messages=messages, **settings)


class Watched(ScriptedBackend):
    """Keeps the calls."""

    def __init__(self, answers: Answers) -> None:
        super().__init__({}, answers, answers)
        self.calls: list[Any] = []

    async def __call__(self, call: Call) -> Any:
        self.calls.append(call)
        return await super().__call__(call)


@asynccontextmanager
async def desk_of(answers: Answers) -> AsyncIterator[Desk]:
    backend = Watched(answers)
    ctx = RolloutContext(backend, state=EpisodeState(example={}), roles=[Role(id="p")])
    async with endpoint_of(ctx) as endpoint:
        desk = Desk(endpoint, backend)
        async with desk.client:
            yield desk


async def test_an_answer_is_one_of_the_trajectory() -> None:
    async with desk_of(["hi"]) as desk:
        made = await desk.ask(temperature=0.5, max_tokens=9)
    [choice], [reply], [call] = made.choices, desk.state.trajectory, desk.backend.calls
    assert (choice.message.content, choice.finish_reason, reply.text) == ("hi", "stop", "hi")
    assert made.usage.completion_tokens == reply.num_tokens
    assert (call.temperature, call.max_tokens) == (0.5, 9)


async def test_calls_are_parsed_and_come_back_as_they_were_sampled() -> None:
    written = f"So:  {CALL}  and {CALL}"
    async with desk_of([written, "3"]) as desk:
        message = (await desk.ask(tools=TOOLS)).choices[0].message
        assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"a": 1, "b": [2]}] * 2
        assert message.tool_calls[0].id != message.tool_calls[1].id
        results = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in message.tool_calls]
        await desk.ask([*HELLO, message.model_dump(exclude_none=True), *results], tools=TOOLS)
    assert [call.conversation for call in desk.backend.calls] == [0, 0]
    assert [message["content"] for message in desk.backend.calls[1].messages] == ["3", "3"]


async def test_a_call_that_is_only_thought_of_is_none() -> None:
    async with desk_of([f"<think>{CALL}?</think>\n\nSo: {CALL}"]) as desk:
        message = (await desk.ask(tools=TOOLS)).choices[0].message
    assert (message.content, len(message.tool_calls)) == (f"<think>{CALL}?</think>\n\nSo:", 1)


async def test_a_stream_has_the_same_answer() -> None:
    strict: Any = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    async with desk_of([f"So: {CALL}"]) as desk:
        asked: Any = {"model": "policy", "messages": HELLO, "tools": strict, "logprobs": True}
        async with desk.client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
            made = await stream.get_final_completion()
    [call] = made.choices[0].message.tool_calls
    assert (made.choices[0].message.content, made.choices[0].finish_reason) == ("So:", "tool_calls")
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": [2]})
    assert made.usage.completion_tokens == len(made.choices[0].logprobs.content) == len(f"So: {CALL}")


@pytest.mark.parametrize(("error", "code"), [(ContextFull, "context_length_exceeded"), (CallFailed, "not_answered")])
async def test_a_call_that_comes_to_nothing_is_told_and_kept(error: type[Exception], code: str) -> None:
    def fails(role: str, messages: list[dict[str, Any]]) -> str:
        raise error("no room")

    async with desk_of(fails) as desk:
        with pytest.raises(openai.BadRequestError) as caught:
            await desk.ask()
    assert caught.value.code == code
    assert desk.endpoint.full == (error is ContextFull)
    assert isinstance(desk.endpoint.failure, CallFailed) == (error is CallFailed)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "tools": TOOLS}, "tool_choice"),
        ({"extra_body": {"typical_p": 0.5}}, "typical_p"),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, "chat_template_kwargs of the run"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]}, "text"),
    ],
)
async def test_what_cannot_be_served_is_refused(settings: dict[str, Any], told: str) -> None:
    async with desk_of(["hi"]) as desk:
        with pytest.raises(openai.BadRequestError, match=told):
            await desk.ask(**{"messages": HELLO, **settings})
    assert desk.state.trajectory == []


async def test_only_who_has_the_key_of_a_running_rollout_is_answered() -> None:
    async with desk_of(["ho"]) as other:
        async with desk_of(["hi"]) as desk:
            async with desk.client_of(other.endpoint.api_key) as stranger:
                with pytest.raises(openai.AuthenticationError):
                    await stranger.chat.completions.create(model="policy", messages=HELLO)
            late = desk.client_of(desk.endpoint.api_key)
        async with late:
            with pytest.raises(openai.AuthenticationError):
                await late.chat.completions.create(model="policy", messages=HELLO)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({"stream": True, "stream_options": 5}, {}),
        ({"n": "x"}, {}),
        ({"temperature": 1000}, {}),
        ({"temperature": "hot"}, {}),
        ({"max_tokens": -1}, {}),
        ({"max_tokens": 10**30}, {}),
        ({"model": "\ud800"}, {"Authorization": "Bearer \udcff\udcfe"}),
        ({}, {"Content-Type": "application/json; charset=nonsense"}),
    ],
)
async def test_nothing_that_an_agent_asks_is_an_error_of_the_server(
    body: dict[str, Any], headers: dict[str, str]
) -> None:
    async with desk_of(["hi"]) as desk:
        url = urlsplit(desk.endpoint.base_url)
        data = json.dumps({"messages": HELLO} | body).encode()
        lines = {"Authorization": f"Bearer {desk.endpoint.api_key}", "Content-Type": "application/json"} | headers
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        head = [f"POST {url.path}/chat/completions HTTP/1.1", "Host: a", f"Content-Length: {len(data)}"]
        head += ["Connection: close", *(f"{name}: {value}" for name, value in lines.items())]
        writer.write("\r\n".join([*head, "", ""]).encode(errors="surrogateescape") + data)
        assert (await reader.readline()).split()[1] in (b"400", b"401")
        writer.close()


async def test_waiting_for_an_answer_is_no_time_of_the_environments() -> None:
    class Slow(OpenBackend):
        async def __call__(self, call: Call) -> Any:
            with waiting(restart=True):
                await asyncio.sleep(1.2)
            return await super().__call__(call)

    body = {"messages": HELLO}
    async with aiohttp.ClientSession() as client, OwnTimeout(2.0), endpoint_of(context_on(Slow())) as endpoint:
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        for _ in range(2):
            answer = await client.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers)
            assert (await answer.json())["choices"][0]["finish_reason"] == "stop"


# --- agents ---


async def test_an_agent_of_the_openai_agents_sdk_is_an_environment() -> None:
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    agents.set_tracing_disabled(True)

    @agents.function_tool  # type: ignore[untyped-decorator]
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    class Sums(Episode, Environment):
        rubric = Rubric([lambda completion, example: float(completion == example["answer"])])

        def dataset(self, split: str) -> Any:
            return []

        async def rollout(self, ctx: RolloutContext, state: EpisodeState) -> None:
            async with endpoint_of(ctx) as endpoint, Desk(endpoint, None).client as client:
                model = agents.OpenAIChatCompletionsModel("policy", client)
                agent = agents.Agent(name="adder", instructions="Add.", model=model, tools=[add])
                result = await agents.Runner.run(agent, state.example["prompt"])
                state.data["final"] = result.final_output

    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    outcome = await play(Sums(), {"prompt": "What is 2 + 3?", "answer": "5"}, [call, "5"])
    assert (outcome.reward, outcome.data["final"], outcome.turn) == (1.0, "5", 2)
    assert [message["role"] for message in outcome.trajectory[1].messages] == ["system", "user", "assistant", "tool"]
    assert outcome.trajectory[1].messages[-1]["content"] == "5"


async def test_one_address_serves_every_rollout_whose_speaker_is_named() -> None:
    async with desk_of(["of one"]) as one, desk_of(["of the other"]) as other, shared_endpoint() as (url, headers):
        one.endpoint.speakers["ann"] = other.endpoint.speakers["bob"] = "p"

        async def ask(speaker: str, **given: str) -> Any:
            about = {**given, "X-Session-ID": speaker}
            async with openai.AsyncOpenAI(base_url=url, api_key="none", default_headers=about, max_retries=0) as client:
                return await client.chat.completions.create(model="policy", messages=HELLO)

        assert (await ask("bob", **headers)).choices[0].message.content == "of the other"
        assert (await ask("ann", **headers)).choices[0].message.content == "of one"
        for speaker, given in (("nobody", headers), ("ann", {})):
            with pytest.raises(openai.AuthenticationError):
                await ask(speaker, **given)
