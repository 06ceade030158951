import asyncio
import json
import time
from typing import Any

import pytest
from aiohttp import web
from grpo.configs.auxiliary import ApiSettings
from grpo.orchestrator.endpoints import MAX_ECHO, ApiModel, EndpointError
from grpo.orchestrator.rollouts.messages import ModelResponse
from grpo.transport.ports import free_port

from tests.orchestrator.chat_server import FakeChatServer, Say, completion, cut, dripping, says, status, text

QUESTION = [{"role": "user", "content": "What?"}]
KEY = "sk-secret-0815"


def endpoint_of(base_url: str | None, own: Any = (), **settings: Any) -> ApiModel:
    known = {"name": "m", "base_url": base_url, "model": "m", "timeout_s": 60.0, "retries": 0}
    return ApiModel(ApiSettings(**(known | settings)), own_servers=lambda: own)


async def asked(base_url: str | None, own: Any = (), options: Any = None, **settings: Any) -> ModelResponse:
    endpoint = endpoint_of(base_url, own, **settings)
    try:
        return await endpoint.ask(QUESTION, **(options or {}))
    finally:
        await endpoint.close()


async def failure(base_url: str | None, **settings: Any) -> EndpointError:
    with pytest.raises(EndpointError) as raised:
        await asked(base_url, **settings)
    return raised.value


async def test_it_asks_and_reads_the_answer(chats: FakeChatServer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "cat"}'}}
    chats.says["m"].append(says(lambda: completion("Yes.", tool_calls=[call], finish_reason="tool_calls")))
    answer = await asked(chats.base_url, options={"temperature": 0.0, "max_tokens": None, "top_k": 3})
    assert answer == ModelResponse(text="Yes.", tool_calls=(("look_up", '{"word": "cat"}'),))
    assert chats.requests[0][1] == {"model": "m", "messages": QUESTION, "temperature": 0.0, "top_k": 3}


@pytest.mark.parametrize(
    ("say", "reason"),
    [
        (dripping, "timeout"),
        (cut, "unreachable"),
        (status(429), "error"),
        (status(302, Location="/v1/chat/completions"), "nonsense"),
        (status(307, Location="/v1/chat/completions"), "nonsense"),
        (status(401), "refused"),
        (text("[" * 100_000), "nonsense"),
        (text('{"choices": [{"message": {"content": "\\ud800"}}]}'), "nonsense"),
        (says(lambda: completion("x", finish_reason="length")), "withheld"),
        (says(lambda: completion(None, refusal="no")), "withheld"),
    ],
)
async def test_what_is_no_answer_has_its_reason(chats: FakeChatServer, say: Say, reason: str) -> None:
    chats.says["m"].append(say)
    began_s = time.monotonic()
    settings = {"timeout_s": 0.5} if say is dripping else {}
    assert (await failure(chats.base_url, **settings)).reason == reason
    assert time.monotonic() - began_s < 30
    assert len(chats.requests) == 1  # redirects are not followed


async def test_nobody_there_is_unreachable() -> None:
    for base_url in (f"http://127.0.0.1:{free_port()}/v1", None):
        assert (await failure(base_url)).reason == "unreachable"


async def test_requests_keep_to_the_rate_and_to_the_number_at_a_time(chats: FakeChatServer) -> None:
    running, three = [0], asyncio.Barrier(3)

    async def counted(request: web.Request) -> web.StreamResponse:
        running.append(running[-1] + 1)
        await three.wait()
        running.append(running[-1] - 1)
        return completion("X")

    chats.says["m"] += [counted] * 15
    settings = ApiSettings(name="m", base_url=chats.base_url, model="m", requests_per_s=10)
    endpoint, began_s = ApiModel(settings, num_parallel=3), time.monotonic()
    await asyncio.gather(*(endpoint.ask(QUESTION) for _ in range(15)))
    assert time.monotonic() - began_s > 0.3  # 10 at once, 5 more in half a second
    assert max(running) == 3
    await endpoint.close()


async def test_the_key_goes_out_and_into_no_message(chats: FakeChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", f"{KEY}\n")  # as a mounted secret ends
    echo = "bad key " + "x" * (MAX_ECHO - len("bad key ") - 6) + KEY  # of which 6 characters would be shown
    told = json.dumps({"error": {"message": f"bad key {KEY}"}})
    for say in (status(401, told), status(401, echo), text(f"bad key {KEY}")):
        chats.says["m"].append(say)
        error = await failure(chats.base_url, api_key_var="SOME_KEY")
        assert KEY[:6] not in str(error)
        assert error.__cause__ is None
    assert chats.requests[0][0]["Authorization"] == f"Bearer {KEY}"


async def test_what_this_machine_has_for_others_stays(chats: FakeChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", f"http://127.0.0.1:{free_port()}")
    for name, value in (("API_KEY", KEY), ("ORG_ID", KEY), ("CUSTOM_HEADERS", f"X-Other: {KEY}")):
        monkeypatch.setenv(f"OPENAI_{name}", value)
    await asked(chats.base_url)
    assert KEY not in str(chats.requests[0][0])


async def test_what_may_pass_is_tried_again_at_the_server_whose_turn_it_is(chats: FakeChatServer) -> None:
    chats.says["m"] += [status(503, Retry_After="0.01"), status(429, Retry_After="0.6")]  # else 0.5 s at most
    began_s = time.monotonic()
    assert (await asked(None, [chats.base_url.removesuffix("/v1")], retries=2)).text == "X"
    assert time.monotonic() - began_s > 0.6
    assert len(chats.requests) == 3


async def test_a_server_that_has_just_failed_is_left_out(chats: FakeChatServer) -> None:
    own = [f"http://127.0.0.1:{free_port()}", chats.base_url.removesuffix("/v1")]
    endpoint = endpoint_of(None, own, retries=1)
    for _ in range(4):
        await endpoint.ask(QUESTION)
    assert endpoint.num_requests == 5
    await endpoint.close()


@pytest.mark.parametrize(
    "base_url", ["api.example.com/v1", "http://", "http://me:secret@example.com/v1", "http://example.com/v1?key=secret"]
)
async def test_addresses_and_keys_are_checked(base_url: str) -> None:
    with pytest.raises(ValueError, match="base_url") as raised:
        endpoint_of(base_url)
    assert "secret" not in str(raised.value)
    with pytest.raises(ValueError, match="NO_SUCH_KEY"):
        endpoint_of("http://example.com/v1", api_key_var="NO_SUCH_KEY")
