"""Chat completions for other people's programs, asked for by OpenAI's own client."""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import openai
import pytest

from orchestrator.envs._chat_endpoint import KEY_HEADER, SEAT_HEADER, ChatEndpoint, Seat
from orchestrator.rollouts.context import ContextFull, RolloutContext, Shared
from orchestrator.rollouts.replay import ScriptedBackend
from orchestrator.rollouts.roles import Role
from orchestrator.rollouts.state import EpisodeState

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
TOOLS: Any = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}]
HELLO: Any = [{"role": "user", "content": "hello"}]


class Desk:
    """An endpoint with one seat, and a client that sits there."""

    def __init__(self, endpoint: ChatEndpoint, seat: Seat) -> None:
        self.endpoint, self.seat, self.state = endpoint, seat, seat.state
        self.client = self.client_of()

    def client_of(self, *, key: str | None = None, seat: str = "one") -> openai.AsyncOpenAI:
        headers = {KEY_HEADER: self.endpoint.key if key is None else key, SEAT_HEADER: seat}
        base_url = self.endpoint.base_url
        return openai.AsyncOpenAI(base_url=base_url, api_key="none", default_headers=headers, max_retries=0)

    async def ask(self, messages: Any = HELLO, **settings: Any) -> Any:
        return await self.client.chat.completions.create(model="policy", messages=messages, **settings)


Answers = Sequence[str] | Callable[[str, list[dict[str, Any]]], str]


@pytest.fixture
async def seated() -> AsyncIterator[Callable[..., Any]]:
    desks: list[Desk] = []

    async def make(answers: Answers, *, trained: bool = True) -> Desk:
        state = EpisodeState(example={})
        backend = ScriptedBackend({}, answers, None if trained else answers)
        ctx = RolloutContext(Shared(backend=backend, split="train"), state=state, roles=[Role(id="policy")])
        endpoint = ChatEndpoint()
        await endpoint.start()
        desks.append(Desk(endpoint, Seat(role="policy", trained=trained, ctx=ctx, state=state)))
        endpoint.take("one", desks[-1].seat)
        return desks[-1]

    yield make
    for desk in desks:
        await desk.client.close()
        await desk.endpoint.close()


async def test_an_answer_is_one_of_the_trajectory(seated: Any) -> None:
    desk = await seated(["hi"])
    made = await desk.ask()
    assert (made.choices[0].message.content, made.choices[0].finish_reason) == ("hi", "stop")
    assert made.usage.completion_tokens == desk.state.trajectory[0].num_tokens
    assert [reply.text for reply in desk.state.trajectory] == ["hi"]


async def test_calls_are_parsed_and_come_back_as_they_were_sampled(seated: Any) -> None:
    written = f"So:  {CALL}  and {CALL}"
    desk = await seated([written, "3"])
    message = (await desk.ask(tools=TOOLS)).choices[0].message
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"a": 1, "b": [2]}] * 2
    assert message.tool_calls[0].id != message.tool_calls[1].id
    results = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in message.tool_calls]
    await desk.ask([*HELLO, message.model_dump(exclude_none=True), *results], tools=TOOLS)
    assert desk.state.trajectory[1].messages[1] == {"role": "assistant", "content": written}
    assert [m["content"] for m in desk.state.trajectory[1].messages[2:]] == ["3", "3"]


async def test_a_stream_has_the_same_answer(seated: Any) -> None:
    desk = await seated([f"So: {CALL}"])
    strict: Any = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    async with desk.client.chat.completions.stream(model="policy", messages=HELLO, tools=strict) as stream:
        made = await stream.get_final_completion()
    [call] = made.choices[0].message.tool_calls
    assert (made.choices[0].message.content, made.choices[0].finish_reason) == ("So:", "tool_calls")
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": [2]})


async def test_without_tools_what_looks_like_a_call_is_text(seated: Any) -> None:
    desk = await seated([CALL])
    message = (await desk.ask()).choices[0].message
    assert (message.content, message.tool_calls) == (CALL, None)


async def test_a_malformed_call_is_text_and_marks_the_answer(seated: Any) -> None:
    desk = await seated(["<tool_call>{"])
    message = (await desk.ask(tools=TOOLS)).choices[0].message
    assert (message.content, message.tool_calls) == ("<tool_call>{", None)
    assert desk.state.trajectory[0].error.error_kind == "unclosed_call"


async def test_answers_of_others_in_the_prompt_are_written_as_the_policy_writes_them(seated: Any) -> None:
    desk = await seated(["ok"])
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": [2]}'}}
    shown = [*HELLO, {"role": "assistant", "content": "So:", "tool_calls": [call]}]
    parts = [{"type": "text", "text": "go "}, {"type": "text", "text": "on"}]
    await desk.ask([*shown, {"role": "user", "content": parts}], tools=TOOLS)
    assert [m["content"] for m in desk.state.trajectory[0].messages] == ["hello", f"So:\n{CALL}", "go on"]


async def test_what_is_not_trained_is_asked_for_and_leaves_no_answer(seated: Any) -> None:
    desk = await seated(["fine"], trained=False)
    assert (await desk.ask()).choices[0].message.content == "fine"
    assert desk.state.trajectory == []
    with pytest.raises(openai.BadRequestError):
        await desk.ask(tools=TOOLS)


async def test_a_full_context_has_the_code_that_clients_know(seated: Any) -> None:
    def full(role: str, messages: list[dict[str, Any]]) -> str:
        raise ContextFull("no room")

    desk = await seated(full)
    with pytest.raises(openai.BadRequestError) as caught:
        await desk.ask()
    assert caught.value.code == "context_length_exceeded"
    assert desk.seat.full


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"n": 2}, "n = 2"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "tools": TOOLS}, "tool_choice"),
        ({"top_p": 0.3}, "top_p"),
        ({"extra_body": {"top_k": 20}}, "top_k"),
        ({"extra_body": {"typical_p": 0.5}}, "typical_p"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]}, "text"),
    ],
)
async def test_what_cannot_be_served_is_refused(seated: Any, settings: dict[str, Any], told: str) -> None:
    desk = await seated(["hi"])
    with pytest.raises(openai.BadRequestError, match=told):
        await desk.ask(**{"messages": HELLO, **settings})
    assert desk.state.trajectory == []


async def test_settings_that_change_nothing_are_served(seated: Any) -> None:
    desk = await seated(["hi"])
    for_the_server = {"top_k": -1, "min_p": 0, "repetition_penalty": 1, "ignore_eos": False, "bad_words": []}
    for_openai: dict[str, Any] = {"response_format": {"type": "text"}, "parallel_tool_calls": True, "logprobs": False}
    for_nobody = {"seed": 1, "user": "me", "store": False, "metadata": {"a": "b"}, "max_tokens": 9, "temperature": 0.5}
    made = await desk.ask(top_p=1.0, frequency_penalty=0, extra_body=for_the_server, **for_openai, **for_nobody)
    assert made.choices[0].message.content == "hi"


async def test_top_k_may_be_off_in_either_way(seated: Any) -> None:
    desk = await seated(["hi"])
    assert (await desk.ask(extra_body={"top_k": 0})).choices[0].message.content == "hi"


async def test_only_who_has_the_key_and_a_seat_is_answered(seated: Any) -> None:
    desk = await seated(["hi"])
    async with desk.client_of(key="wrong") as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.chat.completions.create(model="policy", messages=HELLO)
    async with desk.client_of(seat="two") as late:
        with pytest.raises(openai.BadRequestError):
            await late.chat.completions.create(model="policy", messages=HELLO)
    desk.endpoint.leave("one")
    with pytest.raises(openai.BadRequestError):
        await desk.ask()
