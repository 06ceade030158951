"""What the service does where the server's slots are full."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from grpo.service.sampling import Sampling
from grpo.transport.http import Scored, ScoreRequest
from grpo.transport.run import create_run


class TwoSlots:
    """Answers as a server does that holds two versions."""

    def __init__(self) -> None:
        self.live: list[int] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        asked = json.loads(request.content or b"{}")
        version = asked.get("version")
        match request.url.path:
            case "/policy/info":
                info: dict[str, Any] = {"base_model": "m", "max_model_len": 8, "max_lora_rank": 8}
                return httpx.Response(200, json=info | {"live": dict.fromkeys(map(str, self.live), "d")})
            case "/policy/unload":
                self.live.remove(version)
            case "/policy/load" if len(self.live) == 2:
                return httpx.Response(409, json={"error": {"type": "slots", "message": "full"}})
            case "/policy/load":
                self.live.append(version)
            case _ if version not in self.live:
                return httpx.Response(404, json={"error": {"type": "not_live", "message": "not live"}})
        return httpx.Response(200, json={"version": version, "logprobs": [-1.0]})


async def test_a_snapshot_takes_the_slot_of_the_one_that_was_used_longest_ago(tmp_path: Path) -> None:
    server, options = TwoSlots(), {"url": "http://server", "key": None, "base_model": "m", "max_tokens": 8}
    log: Any = SimpleNamespace(add_canary=print)
    sampling = Sampling(log, create_run(tmp_path), finished=print, **options)
    sampling._http = httpx.AsyncClient(base_url="http://server", transport=httpx.MockTransport(server))
    async with asyncio.timeout(60):
        for version in (1, 2, 1, 3, 1, 2):
            await sampling._post("/policy/score", ScoreRequest(version=version, token_ids=[1, 2]), Scored, version)
            assert version in server.live
    assert sorted(server.live) == [1, 2]
    await sampling.close()
