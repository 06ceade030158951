"""An engine that ends by itself: whoever waits for it is told, and nothing is promised in its name any more."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from configs.infer import InferSettings
from infer.policies import PolicyTable
from infer.routes import PolicyRoutes
from infer.vllm_api import Adapter, Engine, EngineEnded, SamplingRequest, while_alive
from tests.infer.test_policies import ALL_SHAPES, BASE, FakeEngine, FakeNames, publish
from transport.run import RunFolder, create_run

ADAPTER = Adapter(name="policy-v3", key=7, path="/", noisy=True)
REQUEST = SamplingRequest(
    prompt_token_ids=[1, 2],
    n=1,
    max_tokens=2,
    min_tokens=0,
    temperature=1.0,
    seed=None,
    stop_token_ids=[],
    cache_salt=None,
)
CALLS: dict[str, Callable[[Engine], Awaitable[object]]] = {
    "get_supported_tasks": lambda engine: engine.supported_tasks(),
    "generate": lambda engine: engine.generate(REQUEST, ADAPTER),
    "add_lora": lambda engine: engine.add_adapter(replace(ADAPTER, noisy=False)),
    "load_norm_noise": lambda engine: engine.add_adapter(ADAPTER),
    "remove_lora": lambda engine: engine.remove_adapter(ADAPTER),
    "reset_prefix_cache": lambda engine: engine.forget_prefixes(),
    "pause_generation": lambda engine: engine.load_weights(None),
    "sleep": lambda engine: engine.sleep(),
    "wake_up": lambda engine: engine.wake(),
    "export_base_weights": lambda engine: engine.export_base_weights(Path("run"), "base"),
}
"""By vLLM's call that is never answered."""


class FakeClient:
    """As vLLM's: never answers one of its calls, whatever becomes of the engine; refuses all once that is known."""

    def __init__(self, unanswered: str) -> None:
        self.asked, self.errored, self._unanswered = asyncio.Event(), False, unanswered
        self.model_config = SimpleNamespace(max_model_len=64, get_vocab_size=lambda: 8, dtype="float32")

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> None:
            await self._call(str(args[0]) if name == "collective_rpc" else name)

        return call

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        await self._call("generate")
        yield

    async def _call(self, name: str) -> None:
        if self.errored:
            raise RuntimeError("EngineCore encountered an issue")
        if name == self._unanswered:
            self.asked.set()
            await asyncio.Future()


@dataclass
class MortalEngine(FakeEngine):
    """Never gets to taking an adapter out."""

    asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def remove_adapter(self, adapter: Adapter) -> None:
        self.asked.set()
        await asyncio.Future()


@pytest.fixture(autouse=True)
def looked_at_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.vllm_api.ENGINE_CHECK_S", 0.01)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run(tmp_path / "run")


@pytest.fixture
def engine() -> MortalEngine:
    return MortalEngine()


@pytest.fixture
def http(run: RunFolder, engine: MortalEngine) -> httpx.AsyncClient:
    base, names, served = replace(BASE, linear_shapes=ALL_SHAPES), FakeNames(), FastAPI()
    table = PolicyTable(engine=engine, names=names, output_dir=run.path, base=base, tolerance=None, timeout_s=60.0)
    fake: Any = engine
    PolicyRoutes(settings=InferSettings(model="m"), engine=fake, table=table).attach(served)
    return httpx.AsyncClient(transport=httpx.ASGITransport(served), base_url="http://server")


def said(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["type"]


@pytest.mark.parametrize("name", CALLS)
async def test_whoever_waits_for_an_engine_that_dies_is_told_and_so_is_who_asks_afterwards(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infer.vllm_api._sampling_params", lambda request: request)
    monkeypatch.setattr("infer.vllm_api._lora_request", lambda adapter: adapter)
    client = FakeClient(name)
    engine = Engine(client, device="cpu", model_dir=Path("base"))
    waiting = asyncio.ensure_future(CALLS[name](engine))
    async with asyncio.timeout(60):
        await client.asked.wait()
        client.errored = True
        for told in (waiting, CALLS[name](engine)):
            with pytest.raises(EngineEnded):
                await told


async def test_one_that_is_cancelled_while_the_engine_lives_is_not_told_that_it_has_ended() -> None:
    engine = MortalEngine()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05), while_alive(engine):
            await asyncio.Future()
    async with while_alive(engine):
        pass


async def test_a_version_that_cannot_leave_a_dying_engine_is_answered_with_its_end(
    run: RunFolder, engine: MortalEngine, http: httpx.AsyncClient
) -> None:
    publish(run, 1)
    assert (await http.post("/policy/load", json={"run_id": run.run_id, "version": 1})).status_code == 200
    unloading = asyncio.ensure_future(http.post("/policy/unload", json={"version": 1}))
    async with asyncio.timeout(60):
        await engine.asked.wait()
        engine.dead = True
        assert said(await unloading) == (503, "engine_ended")


async def test_a_dead_engine_proves_no_version_and_has_nothing_to_say_of_itself(
    run: RunFolder, engine: MortalEngine, http: httpx.AsyncClient
) -> None:
    publish(run, 1)
    load = {"run_id": run.run_id, "version": 1}
    assert (await http.post("/policy/load", json=load)).status_code == 200
    engine.dead = True
    assert said(await http.post("/policy/load", json=load)) == (503, "engine_ended")
    assert said(await http.get("/policy/info")) == (503, "engine_ended")
