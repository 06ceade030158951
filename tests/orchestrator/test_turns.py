"""Servers rest while the trainer steps, and nothing of the run's own wakes them."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from configs.errors import SettingsError
from orchestrator import turns as turns_module
from orchestrator.client import Refused, ServerInfo, ServerPool
from orchestrator.loop import orchestrate
from orchestrator.monitors.timeline import read_timeline
from orchestrator.startup import Mismatch
from orchestrator.turns import Turns
from tests.orchestrator.fakes import FakeServer, FakeTrainer, settings_for, until
from transport.status import read_status

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
CAN_REST = {"rest": {"state": "awake"}}
TURNS = {"sleep_mode": True}
Answer = Callable[[web.Request], Awaitable[web.Response]]


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FakeServer]:
    server = await FakeServer(**CAN_REST).start()
    yield server
    await server.stop()


async def run(folder: Path, server: FakeServer, *, trainer: FakeTrainer | None = None, **changes: Any) -> list[Any]:
    """The lines of metrics of a run of two steps, unless told otherwise."""
    (trainer or FakeTrainer(folder, settings=TURNS)).start()
    settings = {"sleep_mode": True, "max_steps": 2, "eval": {"num_examples": 0}} | changes
    await orchestrate(settings_for(folder, server, **settings))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "reward/mean" in line]


class Watching(FakeServer):
    """Looks around whenever it is to rest."""

    def __init__(self) -> None:
        super().__init__(**CAN_REST)
        self.trainer: FakeTrainer | None = None
        self.seen: list[tuple[int, int]] = []
        """At each rest: the batches that the trainer had, and the answers that were being sampled."""
        self.now = 0

    async def _rest(self, request: web.Request) -> web.Response:
        assert self.trainer is not None
        self.seen.append((len(self.trainer.batches), self.now))
        return await super()._rest(request)

    async def sampling(self, body: dict[str, Any]) -> None:
        """Evaluations take long."""
        self.now += 1
        await asyncio.sleep(0.3 if body["temperature"] == 0 else 0)
        self.now -= 1


async def test_servers_rest_before_a_batch_leaves_and_are_woken_before_its_version_is_loaded(tmp_path: Path) -> None:
    server = await Watching().start()
    assert isinstance(server, Watching)
    server.trainer = FakeTrainer(tmp_path, settings=TURNS)
    await run(tmp_path, server, trainer=server.trainer, max_steps=3)
    run_id = server.trainer.run_folder.run_id
    assert [(rest["run_id"], rest["timeout_s"] > 0) for rest in server.rests] == [(run_id, True)] * 3
    assert server.seen == [(0, 0), (1, 0), (2, 0)]
    assert server.woken_by == ["/policy/wake"] * 3
    rests = [span for span in read_timeline(tmp_path) if span.what == "rest"]
    assert [(span.who, span.step) for span in rests] == [(f"grpo-infer {server.url.removesuffix('/v1')}", 1)] + [
        (rests[0].who, step) for step in (2, 3)
    ]
    await server.stop()


async def test_a_batch_waits_for_the_evaluation_of_the_version_before(tmp_path: Path) -> None:
    server = await Watching().start()
    assert isinstance(server, Watching)
    server.trainer = FakeTrainer(tmp_path, settings=TURNS)
    await run(tmp_path, server, trainer=server.trainer, eval={"num_examples": 2, "interval": 1})
    assert server.seen == [(0, 0), (1, 0)]
    await server.stop()


async def test_the_metrics_of_a_step_are_those_of_the_table(tmp_path: Path, server: FakeServer) -> None:
    lines = await run(tmp_path, server)
    told = {"perf/rested": 1.0, "perf/rest_freed_bytes": 4096.0, "perf/woken_early": 0.0}
    assert [{key: line[key] for key in told} for line in lines] == [told] * 2
    section = DOCS.read_text().partition("## Taking turns")[2].partition("\n## ")[0]
    documented = re.findall(r"^\| `(\w+/\w+)` \|[^|]*\|$", section, flags=re.M)
    assert sorted(documented) == sorted([*told, "time/rest_s", "time/wake_s"])
    assert all(key in line for line in lines for key in documented)


@pytest.mark.parametrize("refusal", [(409, "busy"), (503, "resting"), (500, ""), (504, "deadline"), (404, "")])
async def test_a_server_that_others_use_or_that_fails_to_rest_does_not_hold_up_the_training(
    tmp_path: Path, server: FakeServer, refusal: tuple[int, str]
) -> None:
    server.refuses_rest = refusal
    lines = await run(tmp_path, server)
    assert [line["perf/rested"] for line in lines] == [0.0, 0.0]
    assert [line["perf/woken_early"] for line in lines] == [0.0, 0.0]


@pytest.mark.parametrize("refusal", [(409, "cannot_rest"), (409, "stale_run"), (401, "")])
async def test_a_server_that_never_will_rest_ends_the_run(
    tmp_path: Path, server: FakeServer, refusal: tuple[int, str]
) -> None:
    server.refuses_rest = refusal
    with pytest.raises(Refused, match=rf"/policy/rest answered {refusal[0]}: "):
        await run(tmp_path, server)


async def test_a_wake_that_fails_is_left_to_the_next_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(FakeServer):
        async def _wake(self, request: web.Request) -> web.Response:
            return web.json_response({"error": {"type": "", "message": "a fault"}}, status=500)

    server = await Failing(**CAN_REST).start()
    lines = await run(tmp_path, server)
    assert [line["perf/rested"] for line in lines] == [1.0, 1.0]
    assert server.woken_by == ["/policy/load"] * 2
    assert "is not woken before version 1 is loaded: " in caplog.text
    await server.stop()


class Hung(FakeServer):
    """From its first request for a change on it answers nothing at all, or only what it is."""

    def __init__(self, change: str, *, answers_info: bool = False) -> None:
        super().__init__(**CAN_REST)
        self.change, self.answers_info, self.hung = change, answers_info, False
        self.released = asyncio.Event()

    async def _rest(self, request: web.Request) -> web.Response:
        return await self._unless_hung("rest", super()._rest, request)

    async def _wake(self, request: web.Request) -> web.Response:
        return await self._unless_hung("wake", super()._wake, request)

    async def _load(self, request: web.Request) -> web.Response:
        return await self._unless_hung("", super()._load, request)

    async def _info(self, request: web.Request) -> web.Response:
        return (
            await super()._info(request) if self.answers_info else await self._unless_hung("", super()._info, request)
        )

    async def _unless_hung(self, change: str, answer: Answer, request: web.Request) -> web.Response:
        self.hung |= change == self.change and len(self.live) > 0
        if self.hung:
            await self.released.wait()
        return await answer(request)


@pytest.mark.parametrize("change", ["rest", "wake"])
async def test_a_server_that_hangs_as_it_changes_is_abandoned_and_the_others_go_on(tmp_path: Path, change: str) -> None:
    server, hung = await FakeServer(**CAN_REST).start(), await Hung(change).start()
    assert isinstance(hung, Hung)
    FakeTrainer(tmp_path, settings=TURNS).start()
    client = {"base_url": [server.url, hung.url], "timeout": 600, "health_interval_s": 0.1, "health_timeout_s": 2.0}
    async with asyncio.timeout(60):
        await orchestrate(
            settings_for(tmp_path, server, sleep_mode=True, max_steps=1, eval={"num_examples": 0}, client=client)
        )
    assert hung.hung
    hung.released.set()
    await server.stop()
    await hung.stop()


@pytest.mark.parametrize("change", ["rest", "wake"])
async def test_a_change_has_a_deadline_of_its_own(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "CHANGE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(turns_module, "REST_TIMEOUT_S", 0.2)
    server = await Hung(change, answers_info=True).start()
    assert isinstance(server, Hung)
    server.live, pool = {3}, ServerPool([server.url], api_key=None, timeout_s=600)
    turns = Turns(pool, run_id="run")
    async with asyncio.timeout(60):
        rested = await turns.to_trainer(4)
        await turns.to_servers()
    assert rested["perf/rested"] == (change == "wake")
    limit_s = {"rest": "0.5", "wake": "0.3"}[change]
    assert pool.membership.out == {pool.servers[0]: f"{pool.servers[0]}/policy/{change}: no answer within {limit_s} s"}
    server.released.set()
    await pool.close()
    await server.stop()


async def test_while_a_batch_waits_for_an_evaluation_the_trainer_is_not_blamed(tmp_path: Path) -> None:
    class Evaluated(FakeServer):
        go_on = asyncio.Event()

        async def sampling(self, body: dict[str, Any]) -> None:
            if body["temperature"] == 0:
                await self.go_on.wait()

    def state() -> tuple[str, str | None]:
        said = read_status(tmp_path / "status" / "orch.json") or {}
        return said.get("state", ""), said.get("waiting_for")

    server, trainer = await Evaluated(**CAN_REST).start(), FakeTrainer(tmp_path, settings=TURNS)
    assert isinstance(server, Evaluated)
    evaluated = {"num_examples": 2, "interval": 1, "eval_base_model": True}
    running = asyncio.create_task(run(tmp_path, server, trainer=trainer, max_steps=1, eval=evaluated))
    await until(lambda: state() in [("evaluating", None), ("waiting", "trainer: version 1")])
    assert (state(), trainer.batches) == (("evaluating", None), {})
    server.go_on.set()
    await running
    await server.stop()


async def test_a_server_that_was_woken_by_somebody_else_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Asked(FakeServer):
        async def _rest(self, request: web.Request) -> web.Response:
            answer = await super()._rest(request)
            self.resting = False
            return answer

    server = await Asked(**CAN_REST).start()
    assert [line["perf/woken_early"] for line in await run(tmp_path, server)] == [1.0, 1.0]
    assert f"somebody's request woke {server.url.removesuffix('/v1')} while" in caplog.text
    await server.stop()


async def test_a_server_that_does_not_get_its_memory_at_once_tries_again(tmp_path: Path, server: FakeServer) -> None:
    server.refuses_wake = 3
    await run(tmp_path, server)
    assert server.woken_by == ["/policy/wake"] * 2


async def test_a_server_that_is_killed_at_rest_and_started_again_goes_on(
    tmp_path: Path, server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    running = asyncio.create_task(run(tmp_path, server))
    await until(lambda: server.resting)
    await server.stop()
    await until(lambda: "gets no more requests until it has proved the versions in use" in caplog.text)
    await server.start()
    lines = await running
    assert [line["perf/rested"] for line in lines] == [1.0, 1.0]
    assert lines[0]["perf/woken_early"] == 0.0


async def test_an_orchestrator_takes_over_servers_that_rest(tmp_path: Path, server: FakeServer) -> None:
    server.resting = True
    await run(tmp_path, server)
    assert server.woken_by == ["/policy/wake"] * 3


async def test_the_trainer_is_not_waited_for_while_servers_sample_and_fall_asleep(
    tmp_path: Path, server: FakeServer
) -> None:
    server.latency_s = server.rest_latency_s = 2.0
    await run(tmp_path, server, max_steps=1, max_concurrent_groups=4, wait_timeout_s=3.5)


async def test_requests_of_the_run_wait_while_it_is_the_trainers_turn(server: FakeServer) -> None:
    pool = ServerPool([server.url], api_key=None, timeout_s=5)
    server.live, turns = {3}, Turns(pool, run_id="run")
    await turns.to_trainer(4)
    scoring = asyncio.create_task(pool.score([1, 2], 3))
    await pool.on(pool.servers[0], "GET", "/policy/info", ServerInfo)
    assert (server.resting, server.scores) == (True, [])
    await turns.to_servers()
    assert await scoring == [-0.75]
    assert server.woken_by == ["/policy/wake"]
    await pool.close()


async def test_a_server_that_cannot_rest_is_refused_with_the_key_to_set(tmp_path: Path) -> None:
    server = await FakeServer().start()
    with pytest.raises(Mismatch, match=r"cannot rest, and sleep_mode is true; set sleep_mode: true for grpo-infer"):
        await run(tmp_path, server)
    await server.stop()


async def test_a_trainer_that_gives_nothing_back_is_refused(tmp_path: Path, server: FakeServer) -> None:
    with pytest.raises(SettingsError, match="sleep_mode = True: must equal the trainer's sleep_mode = False"):
        await run(tmp_path, server, trainer=FakeTrainer(tmp_path))
