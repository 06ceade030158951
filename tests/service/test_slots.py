"""What the service does where the server's slots are full."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from grpo.service.errors import Refused
from grpo.service.log import Answer, Command, CommandLog
from grpo.service.sampling import Sampling
from grpo.transport.folders import step_folder
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
    log: Any = SimpleNamespace(add_canary=lambda *_: None)
    sampling = Sampling(log, create_run(tmp_path), finished=print, **options)
    sampling._http = httpx.AsyncClient(base_url="http://server", transport=httpx.MockTransport(server))
    async with asyncio.timeout(60):
        for version in (1, 2, 3):
            step_folder(sampling._run.broadcasts, version).mkdir(parents=True)
        for version in (1, 2, 1, 3, 1, 2):
            await sampling._post("/policy/score", ScoreRequest(version=version, token_ids=[1, 2]), Scored, version)
            assert version in server.live
        assert sorted(server.live) == [1, 2]
        with pytest.raises(Refused, match="snapshot 4 has been removed"):
            await sampling._post("/policy/score", ScoreRequest(version=4, token_ids=[1, 2]), Scored, 4)
    await sampling.close()


def test_a_snapshot_is_pinned_by_checkpoints_sessions_and_what_makes_it(tmp_path: Path) -> None:
    log, versions = CommandLog(tmp_path / "log"), {}
    for session in ("a", "b"):
        log.add_session(session, "t")
    for seq, path in enumerate(("kept", "ephemeral", "expired", "waiting"), start=1):
        command = Command(target="a:train:0", seq=seq, tenant="t", kind="save", body=b"{}")
        log.add(command).result()
        versions[path] = log.new_version(command, path)
        if path != "waiting":
            is_checkpoint = path in ("kept", "expired")
            done = Answer(state="done", content=b"")
            log.finish(command, done, checkpoint=(path, 1) if is_checkpoint else None).result()
    log.add_sampler("b:sample:0", "t", None, versions["ephemeral"])
    log.add_sampler("b:sample:1", "t", None, versions["ephemeral"])
    log.expire("expired", at=0.0)
    for path in log.expired():
        log.forget_checkpoint(path)
    pinned = {versions["kept"]: {"checkpoint": 1}, versions["waiting"]: {"command": 1}}
    assert log.pins(heard_since=1.0) == pinned | {versions["ephemeral"]: {"session": 2}}
    log.finish_session("b", "t")
    assert log.pins(heard_since=1.0) == pinned
    log.close()
