"""What servers say about their load, through a whole run."""

import asyncio
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.orchestrator.fakes import FakeServer, until
from tests.orchestrator.running import run

FREE = {"num_running": 8, "num_waiting": 0, "kv_use": 0.5}


class Held(FakeServer):
    """Counts how often it is asked how it is, and holds its answers to rollouts back until it is told."""

    def __init__(self) -> None:
        super().__init__(load=FREE)
        self.answers = asyncio.Event()
        self.num_infos = 0

    async def _info(self, request: web.Request) -> web.Response:
        self.num_infos += 1
        return await super()._info(request)

    async def sampling(self, body: dict[str, Any]) -> None:
        await self.answers.wait()


async def test_a_steps_metrics_have_the_load_of_the_servers(tmp_path: Path) -> None:
    server = Held()
    await server.start()
    client = {"base_url": [server.url], "timeout": 60, "health_interval_s": 0.01}
    changes = {"max_steps": 1, "eval": {"num_examples": 0}, "client": client}
    running = asyncio.create_task(run(tmp_path, server, **changes))
    asked_from = server.num_infos
    await until(lambda: server.num_infos >= asked_from + 10)
    server.answers.set()
    line = (await running).lines[-1]
    found = {key: line[key] for key in ("perf/servers", "perf/server_running", "perf/server_kv_use")}
    assert found == {"perf/servers": 1, "perf/server_running": 8, "perf/server_kv_use": 0.5}
    await server.stop()
