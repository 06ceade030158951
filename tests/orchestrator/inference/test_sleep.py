"""Servers sleep while the trainer steps, and are woken before anything is asked of them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from grpo.orchestrator.checks import Mismatch
from grpo.orchestrator.inference import sleep
from grpo.orchestrator.inference.client import ServerError
from grpo.orchestrator.inference.sleep import SleepScheduler
from grpo.orchestrator.monitoring.timeline import read_timeline
from grpo.transport.status import read_status

from tests.orchestrator import running
from tests.orchestrator.fakes import FakeServer, FakeTrainer, until
from tests.orchestrator.inference.serving import client_of, name_of

CAN_SLEEP = {"asleep": False}
SLEEP = {"sleep_mode": True}


@pytest.fixture
def server(server: FakeServer) -> FakeServer:
    server.info |= CAN_SLEEP
    return server


async def run(folder: Path, server: FakeServer, *, trainer: FakeTrainer | None = None, **changes: Any) -> list[Any]:
    """The lines of metrics of a run of two steps, unless told otherwise."""
    settings = {"sleep_mode": True, "max_steps": 2, "eval": {"num_examples": 0}} | changes
    return (await running.run(folder, server, trainer=trainer or {"settings": SLEEP}, **settings)).steps


def state_of(folder: Path) -> tuple[str, str]:
    """What the orchestrator says of itself: its state, and for whom it waits."""
    said = read_status(folder / "status" / "orch.json") or {}
    return said.get("state", ""), said.get("waiting_for") or ""


class Watching(FakeServer):
    """Looks around whenever it is to sleep."""

    def __init__(self) -> None:
        super().__init__(**CAN_SLEEP)
        self.trainer: FakeTrainer | None = None
        self.seen: list[tuple[int, int]] = []
        """At each time: the batches that the trainer had, and the answers that were being sampled."""
        self.now = 0

    async def _sleep(self, request: web.Request) -> web.Response:
        assert self.trainer is not None
        self.seen.append((len(self.trainer.batches), self.now))
        return await super()._sleep(request)

    async def sampling(self, body: dict[str, Any]) -> None:
        """Evaluations take long."""
        self.now += 1
        await asyncio.sleep(0.3 if body["temperature"] == 0 else 0)
        self.now -= 1


async def test_servers_sleep_before_a_batch_leaves_and_wake_before_its_version_is_loaded(tmp_path: Path) -> None:
    async with Watching() as server:
        server.trainer = FakeTrainer(tmp_path, settings=SLEEP)
        lines = await run(tmp_path, server, trainer=server.trainer, eval={"num_examples": 2, "interval": 1})
    assert server.seen == [(0, 0), (1, 0)]  # after the evaluation of the version before, too
    assert server.told == ["wake", "load", "sleep", "wake", "load", "sleep", "wake", "load"]
    assert [span.step for span in read_timeline(tmp_path) if span.what == "sleep"] == [1, 2]
    assert all(key in line for line in lines for key in ("time/sleep_s", "time/wake_s"))


async def test_a_server_that_cannot_sleep_ends_the_run(tmp_path: Path, server: FakeServer) -> None:
    server.refuses_sleep = True
    with pytest.raises(ServerError, match="/policy/sleep"):
        await run(tmp_path, server)


@pytest.mark.parametrize("path", ["_sleep", "_wake"])
async def test_a_server_that_hangs_is_abandoned_by_itself(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    released = asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        await released.wait()
        return web.Response(status=500)

    monkeypatch.setattr(sleep, "TIMEOUT_S", 2.0)
    hung = FakeServer(**CAN_SLEEP)
    setattr(hung, path, hang)
    async with hung, FakeServer(**CAN_SLEEP) as other, asyncio.timeout(60):
        client = client_of(other.url, hung.url, timeout_s=600)
        scheduler = SleepScheduler(client)
        await scheduler.sleep(1)
        assert other.asleep
        await scheduler.wake()
        assert not other.asleep
        assert list(client.pool.out) == [name_of(hung)]
        released.set()
        await client.close()


async def test_a_server_that_is_killed_asleep_and_started_again_goes_on(tmp_path: Path, server: FakeServer) -> None:
    task = asyncio.create_task(run(tmp_path, server))
    await until(lambda: server.asleep)
    await server.stop()
    await until(lambda: name_of(server) in state_of(tmp_path)[1])
    await server.start()
    assert len(await task) == 2


async def test_an_orchestrator_takes_over_servers_that_sleep(tmp_path: Path, server: FakeServer) -> None:
    server.asleep = True
    assert len(await run(tmp_path, server)) == 2


async def test_a_server_without_sleep_mode_is_refused(tmp_path: Path, server: FakeServer) -> None:
    server.info["asleep"] = None
    with pytest.raises(Mismatch, match="sleep_mode"):
        await run(tmp_path, server)
