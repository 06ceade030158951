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
from grpo.service.training import CANARY_SEED, TrainedModel
from grpo.trainer.publishing import CanaryMaker, canary_ids
from grpo.transport.folders import step_folder
from grpo.transport.http import Scored, ScoreRequest
from grpo.transport.records import Canary
from grpo.transport.run import create_run
from grpo.transport.weights.store import CANARY_FILE

from tests.service.data import SHAPE, tiny_base, trained


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


async def test_a_snapshot_is_published_with_the_canary_of_its_weights(tmp_path: Path) -> None:
    """As one that computes the base's log-probabilities for itself makes it."""
    model = TrainedModel(tiny_base(tmp_path / "model"), SHAPE)
    for seed in (1, 2):  # and not those of weights that were published before
        trained(model, steps=1, seed=seed)
        model.base.use(model.policy)
        version, run = 1, create_run(tmp_path / f"run{seed}")
        log = CommandLog(run.path / "commands.sqlite")
        options: Any = {"urls": ["http://server"], "key": None, "base_model": "m", "max_tokens": 8}
        sampling = Sampling(log, run, finished=print, **options)
        sampling.servers[0].http = httpx.AsyncClient(
            base_url="http://server", transport=httpx.MockTransport(TwoSlots())
        )
        command = Command(target="m", seq=1, tenant="t", kind="save_weights_for_sampler", body=b"{}")
        async with asyncio.timeout(60):
            proved = await asyncio.to_thread(sampling.publish, model, command, "tinker://m/sampler_weights/one")
            assert await asyncio.wrap_future(proved) == version
        await sampling.close()
        (written,) = run.broadcasts.rglob(CANARY_FILE)
        ids = canary_ids(model.policy.causal_lm.config, seed=CANARY_SEED)
        snapshot = model.policy.weights.snapshot()
        expected = CanaryMaker(model.policy, ids).begin(version=version, noise={})(snapshot)
        assert Canary.from_json(written.read_bytes()) == expected
        assert expected.logprobs != expected.base_logprobs


async def test_a_snapshot_takes_the_slot_of_the_one_that_was_used_longest_ago(tmp_path: Path) -> None:
    server, options = TwoSlots(), {"urls": ["http://server"], "key": None, "base_model": "m", "max_tokens": 8}
    log: Any = SimpleNamespace(add_canary=lambda *_: None)
    sampling = Sampling(log, create_run(tmp_path), finished=print, **options)
    sampling.servers[0].http = httpx.AsyncClient(base_url="http://server", transport=httpx.MockTransport(server))
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


class OneOfTwo(TwoSlots):
    """Is gone while it is told so, and holds its samples until it may answer."""

    def __init__(self, go: asyncio.Event) -> None:
        super().__init__()
        self.go, self.is_gone, self.num_asked, self.changed = go, False, 0, asyncio.Condition()

    async def until_asked(self, times: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: self.num_asked >= times)

    async def answer(self, request: httpx.Request) -> httpx.Response:
        if self.is_gone:
            raise httpx.ConnectError("nobody listens")
        if request.url.path == "/policy/score":
            async with self.changed:
                self.num_asked += 1
                self.changed.notify_all()
            await self.go.wait()
        return httpx.Response(200) if request.url.path == "/health" else self(request)


async def test_requests_are_spread_over_servers_and_those_of_one_that_is_gone_are_made_of_others(
    tmp_path: Path,
) -> None:
    go = asyncio.Event()
    servers = [OneOfTwo(go) for _ in range(2)]
    urls = ["http://first", "http://second"]
    log: Any = SimpleNamespace(add_canary=lambda *_: None, waiting=lambda _: [])
    options: Any = {"urls": urls, "key": None, "base_model": "m", "max_tokens": 8}
    sampling = Sampling(log, create_run(tmp_path), finished=print, **options)
    for one, url, server in zip(sampling.servers, urls, servers, strict=True):
        one.http = httpx.AsyncClient(base_url=url, transport=httpx.MockTransport(server.answer))
    step_folder(sampling._run.broadcasts, 1).mkdir(parents=True)
    sampling.start()
    async with asyncio.timeout(60):
        await sampling._load_everywhere(1)
        assert [server.live for server in servers] == [[1], [1]]
        score = ScoreRequest(version=1, token_ids=[1, 2])
        asked = [asyncio.create_task(sampling._post("/policy/score", score, Scored, 1)) for _ in range(4)]
        for server in servers:
            await server.until_asked(2)
        servers[0].is_gone = True
        await sampling.servers[0].gone.wait()
        assert sampling.left_out == urls[:1]
        await servers[1].until_asked(4)  # those of the server that is gone too
        go.set()
        await asyncio.gather(*asked)
        servers[0].live, servers[0].is_gone = [], False
        await sampling.servers[0].there.wait()
        await asyncio.gather(*(sampling._post("/policy/score", score, Scored, 1) for _ in range(2)))
        assert servers[0].live == [1], "a server that comes back empty loads what it is asked for"
    await sampling.close()


def test_an_inflight_session_has_the_newest_version_that_a_server_has_proved(tmp_path: Path) -> None:
    log, path = CommandLog(tmp_path / "log"), "tinker://a:train:0/inflight"
    log.add_session("a", "t")
    log.add_sampler("a:sample:0", "t", path, None)
    log.add_sampler("a:sample:1", "t", None, None)
    versions = []
    for seq in (1, 2):
        command = Command(target="a:train:0", seq=seq, tenant="t", kind="save_weights_for_sampler", body=b"{}")
        log.add(command).result()
        versions.append(log.new_version(command, path))
        log.finish(command, Answer(state="done", content=b"")).result()
    assert log.sampler("a:sample:0", "t") == (path, None)
    assert log.pins(heard_since=1.0) == {}
    for version in versions:
        log.add_canary(version, "{}")
        assert log.sampler("a:sample:0", "t") == (path, version)
        assert log.pins(heard_since=1.0) == {version: {"session": 1}}
    assert log.sampler("a:sample:1", "t") == (None, None), "the base"
    log.close()
