"""Requests that follow the newest version: over fakes of the table, of the engine, and of vLLM."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from infer.following import Serving, continued_seed, follow
from infer.versions import NotLive
from infer.vllm_api import Adapter, Engine, EngineError, SamplingRequest
from transport.http import Choice


def part(*token_ids: int, ends: Literal["stop", "length", "superseded"]) -> Choice:
    stop = token_ids[-1] if ends == "stop" else None
    return Choice(
        token_ids=list(token_ids), logprobs=[-i / 10 for i in token_ids], finish_reason=ends, stop_reason=stop
    )


def wanted(**changes: Any) -> SamplingRequest:
    values = {"n": 1, "max_tokens": 8, "min_tokens": 0, "temperature": 0.7, "seed": None, "stop_token_ids": [9]}
    return SamplingRequest(**{"prompt_token_ids": [1, 2], "cache_salt": "s", **values, **changes})


@dataclass
class FakeTable:
    """Serves these versions one after the other."""

    versions: list[int]
    asked: list[tuple[int, bool]] = field(default_factory=list)
    adapters: list[str | None] = field(default_factory=list)
    num_in_use: int = 0

    @contextlib.asynccontextmanager
    async def following(self, version: int, *, noisy: bool, adapter: str | None) -> AsyncIterator[Serving]:
        self.asked.append((version, noisy))
        self.adapters.append(adapter)
        if not self.versions:
            raise NotLive("no version is live")
        newest = self.versions.pop(0)
        self.num_in_use += 1
        try:
            adapter = Adapter(name=f"policy-v{newest}", key=newest, path="/")
            yield Serving(version=newest, adapter=adapter, superseded=asyncio.Event())
        finally:
            self.num_in_use -= 1


@dataclass
class FakeSampler:
    """Answers with these parts, a list for each call."""

    parts: list[list[Choice]]
    requests: list[tuple[SamplingRequest, str]] = field(default_factory=list)

    async def generate_until(
        self, requests: Sequence[SamplingRequest], adapter: Adapter | None, superseded: asyncio.Event
    ) -> list[Choice]:
        assert adapter is not None
        self.requests += [(request, adapter.name) for request in requests]
        return self.parts.pop(0)


async def test_an_answer_goes_on_with_what_is_left_under_each_newer_version() -> None:
    table = FakeTable([3, 4, 6])
    parts = [[part(5, 6, ends="superseded")], [part(7, ends="superseded")], [part(8, 9, ends="stop")]]
    engine = FakeSampler(parts)
    [answer] = await follow(engine, table, wanted(min_tokens=3), version=2, noisy=True)
    assert (answer.token_ids, answer.logprobs) == ([5, 6, 7, 8, 9], [-0.5, -0.6, -0.7, -0.8, -0.9])
    assert answer.versions == ((3, 2), (4, 1), (6, 2))
    assert (answer.finish_reason, answer.stop_reason) == ("stop", 9)
    assert table.asked == [(2, True), (3, True), (4, True)]
    assert table.num_in_use == 0
    asked = [(r.prompt_token_ids, r.max_tokens, r.min_tokens, adapter) for r, adapter in engine.requests]
    assert asked == [
        ([1, 2], 8, 3, "policy-v3"),
        ([1, 2, 5, 6], 6, 1, "policy-v4"),
        ([1, 2, 5, 6, 7], 5, 0, "policy-v6"),
    ]
    assert {(r.n, r.temperature, r.cache_salt, r.seed) for r, _ in engine.requests} == {(1, 0.7, "s", None)}
    assert all(r.stop_token_ids == [9] for r, _ in engine.requests)


async def test_only_answers_that_are_not_through_go_on_and_each_has_its_own_seed() -> None:
    first = [part(5, 9, ends="stop"), part(6, ends="superseded"), part(ends="superseded")]
    engine = FakeSampler([first, [part(7, ends="length"), part(8, ends="length")]])
    answers = await follow(engine, FakeTable([1, 2]), wanted(n=3, seed=40), version=1, noisy=False)
    assert [answer.token_ids for answer in answers] == [[5, 9], [6, 7], [8]]
    assert [answer.versions for answer in answers] == [((1, 2),), ((1, 1), (2, 1)), ((2, 1),)]
    assert [answer.finish_reason for answer in answers] == ["stop", "length", "length"]
    seeds = [request.seed for request, _ in engine.requests]
    # the third has no tokens yet, so nothing of its seed has been used
    assert seeds == [40, 41, 42, continued_seed(41, 2), 42]
    assert continued_seed(41, 2) not in (continued_seed(41, 3), continued_seed(40, 2))


async def test_a_request_whose_next_version_is_not_there_fails() -> None:
    table = FakeTable([3])
    with pytest.raises(NotLive):
        await follow(FakeSampler([[part(5, ends="superseded")]]), table, wanted(), version=3, noisy=False)


# The engine's side, over a fake of vLLM's client.


@dataclass
class FakeClient:
    """vLLM's client: requests sample until they are aborted, or end by themselves at once."""

    ends_at_once: Callable[[str], bool] = lambda name: False
    registers: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once requests are in the engine; aborts before that are lost."""
    ends_with: str = "abort"
    fails: bool = False
    errored: bool = False
    requests: dict[str, asyncio.Future[str]] = field(default_factory=dict)
    prompts: list[dict[str, Any]] = field(default_factory=list)
    num_aborts: int = 0
    num_cancelled: int = 0

    @property
    def model_config(self) -> Any:
        return SimpleNamespace(max_model_len=64, dtype="torch.float32", get_vocab_size=lambda: 10)

    async def generate(
        self, prompt: dict[str, Any], params: Any, *, request_id: str, **more: Any
    ) -> AsyncIterator[Any]:
        self.prompts.append(prompt)
        try:
            await self.registers.wait()
            if self.fails:
                raise RuntimeError("out of memory")
            ending = self.requests[request_id] = asyncio.get_running_loop().create_future()
            reason = "length" if self.ends_at_once(request_id) else await ending
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        logprobs = SimpleNamespace(logprobs=[-0.5, -0.6])
        yield SimpleNamespace(
            outputs=[SimpleNamespace(index=0, token_ids=[5, 6], logprobs=logprobs, finish_reason=reason)]
        )

    async def abort(self, names: Sequence[str]) -> None:
        self.num_aborts += 1
        for name in names:
            if name in self.requests and not self.requests[name].done():
                self.requests[name].set_result(self.ends_with)
        if self.num_aborts == 2:
            self.registers.set()


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    monkeypatch.setattr("infer.vllm_api._sampling_params", lambda request: request)
    monkeypatch.setattr("infer.vllm_api._lora_request", lambda adapter: adapter)
    return FakeClient()


def engine_of(client: FakeClient) -> Engine:
    return Engine(client, device="cpu", model_dir=None)  # type: ignore[arg-type]


ADAPTER = Adapter(name="policy-v3", key=7, path="/")


async def test_requests_in_flight_end_where_they_stand_when_they_are_superseded(client: FakeClient) -> None:
    client.registers.set()
    client.ends_at_once = lambda name: name.endswith("2")
    superseded = asyncio.Event()
    asked = asyncio.create_task(engine_of(client).generate_until([wanted(), wanted()], ADAPTER, superseded))
    while len(client.requests) < 2:  # noqa: ASYNC110 - the fake tells nobody
        await asyncio.sleep(0)
    superseded.set()
    first, second = await asked
    assert (first.token_ids, first.logprobs, first.finish_reason) == ([5, 6], [-0.5, -0.6], "superseded")
    assert second.finish_reason == "length"
    assert client.num_aborts == 1
    # the prefix cache keeps what each adapter has computed apart
    assert [prompt["cache_salt"] for prompt in client.prompts] == ["policy-v3/7/s"] * 2


async def test_a_request_that_is_still_on_its_way_into_the_engine_is_ended_once_it_is_there(client: FakeClient) -> None:
    superseded = asyncio.Event()
    superseded.set()
    [answer] = await engine_of(client).generate_until([wanted()], ADAPTER, superseded)
    assert answer.finish_reason == "superseded"
    assert client.num_aborts == 3  # two are lost


async def test_an_answer_that_vllm_cuts_unasked_is_an_error(client: FakeClient) -> None:
    client.registers.set()
    asked = asyncio.create_task(engine_of(client).generate_until([wanted()], ADAPTER, asyncio.Event()))
    while not client.requests:  # noqa: ASYNC110 - the fake tells nobody
        await asyncio.sleep(0)
    await client.abort(list(client.requests))
    with pytest.raises(EngineError):
        await asked


async def test_what_fails_or_is_cancelled_leaves_nothing_running(client: FakeClient) -> None:
    client.registers.set()
    asked = asyncio.create_task(engine_of(client).generate_until([wanted()] * 3, ADAPTER, asyncio.Event()))
    while len(client.requests) < 3:  # noqa: ASYNC110 - the fake tells nobody
        await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert client.num_cancelled == 3
    client.fails = True
    with pytest.raises(RuntimeError):
        await engine_of(client).generate_until([wanted()] * 3, ADAPTER, asyncio.Event())
