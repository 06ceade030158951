"""Versions on several servers, of which some go and come back."""

import asyncio
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from grpo.orchestrator.inference.client import RequestRefused, ServerError
from grpo.orchestrator.inference.weight_sync import check_proof
from grpo.transport.errors import DeadlineError
from grpo.transport.http import LoadReport, ServerInfo
from grpo.transport.weights.store import read_in_use

from grpo.commands.status import run_status, text
from tests.orchestrator.fakes import OF_BASE, FakeServer, until
from tests.orchestrator.inference.serving import ask, name_of, synced
from tests.orchestrator.running import rows_of, run


async def test_a_server_that_was_restarted_proves_all_versions_in_use_before_it_gets_requests() -> None:
    one, other = FakeServer(), FakeServer()
    async with synced(one, other) as (client, sync):
        for version in (3, 4):
            await sync.load(version)
        await other.stop()
        await asyncio.gather(*(ask(client, 4) for _ in range(4)))
        await sync.load(5)
        other.loads.clear()
        await other.start()
        await until(lambda: not client.pool.out)
        assert [load["version"] for load in other.loads] == [3, 4, 5]
        other.requests.clear()
        await asyncio.gather(*(ask(client, 3) for _ in range(8)))
        assert other.requests


async def test_the_name_of_chat_users_means_the_newest_version_whatever_is_loaded_after_it() -> None:
    one, other = FakeServer(), FakeServer()
    async with synced(one, other) as (client, sync):
        await sync.load(12)
        await sync.load(10)  # it teaches a run that goes on
        assert [(load["version"], load["alias"]) for load in one.loads] == [(12, "default"), (10, None)]
        other.loads.clear()
        client.pool.eject(client.pool.servers[1], "it does not answer")
        await until(lambda: not client.pool.out)
        assert [(load["version"], load["alias"]) for load in other.loads] == [(10, None), (12, "default")]


class AtFault(FakeServer):
    """Answers `fault`, a status and a text, to what it is asked to unload and how it is."""

    fault: tuple[int, str] | None = None

    async def _info(self, request: web.Request) -> web.Response:
        return self._faulty() or await super()._info(request)

    async def _unload(self, request: web.Request) -> web.Response:
        return self._faulty() or await super()._unload(request)

    def _faulty(self) -> web.Response | None:
        return self.fault and web.Response(status=self.fault[0], text=self.fault[1])


async def test_an_old_version_that_one_of_several_servers_cannot_give_up_costs_that_server_alone() -> None:
    sound, faulty = FakeServer(), AtFault()
    async with synced(sound, faulty) as (client, sync):
        for version in (0, 1):
            await sync.load(version)
        faulty.fault = 200, '{"vers'
        assert (await sync.keep_only({1: {"newest": 1}})).keys() == {1}
        assert list(client.pool.out) == [client.pool.servers[1]]
        faulty.fault = None
        await until(lambda: not client.pool.out)
        assert faulty.live == sound.live == {1}


async def test_the_only_servers_fault_is_an_error_and_so_is_a_request_that_is_refused() -> None:
    faulty = AtFault()
    async with synced(faulty) as (_, sync):
        await sync.load(0)
        faulty.fault = 500, "out of order"
        with pytest.raises(ServerError, match="500"):
            await sync.keep_only({})
        faulty.fault = 409, '{"error": {"type": "stale_run", "message": "run 7 was asked for"}}'
        with pytest.raises(RequestRefused):
            await sync.keep_only({})
        faulty.fault, faulty.refuse_version = None, 1
        with pytest.raises(RequestRefused):
            await sync.load(1)


async def test_a_server_that_was_restarted_unnoticed_is_found_out_by_its_first_request() -> None:
    server = FakeServer()
    async with synced(server) as (client, sync):
        await sync.load(7)
        server.live.clear()
        assert await ask(client, 7) == 1
        assert [load["version"] for load in server.loads] == [7, 7]
        with pytest.raises(RequestRefused):
            await ask(client, 8)  # which was never live
        assert not client.pool.out


async def test_a_server_that_comes_back_with_other_settings_stays_out() -> None:
    one, other = FakeServer(), FakeServer()

    def check(server: str, info: ServerInfo) -> None:
        if info.max_lora_rank < 16:
            raise ValueError("takes adapters up to rank 8")

    async with synced(one, other, check=check) as (client, sync):
        await other.stop()
        await sync.load(0)
        other.info["max_lora_rank"] = 8
        await other.start()
        await until(lambda: "rank 8" in str(client.pool.out))
        assert other.live == set()
        other.info["max_lora_rank"] = 16
        await until(lambda: not client.pool.out)
        assert other.live == {0}


async def test_a_version_whose_last_requests_have_not_ended_counts_as_held() -> None:
    one, other = FakeServer(), FakeServer()
    async with synced(one, other) as (_, sync):
        for version in (0, 1, 2):
            await sync.load(version)
        other.in_flight = {0: 2, 1: 0}
        held = await sync.keep_only({2: {"newest": 1}})
        assert {version: one.pins for version, one in held.items()} == {0: {"requests in flight": 2}, 2: {"newest": 1}}
        other.in_flight = {}
        assert (await sync.keep_only({2: {"newest": 1}})).keys() == {2}
        assert (one.unloads, other.unloads) == ([0, 1], [0, 1])


async def test_what_an_earlier_orchestrator_had_loaded_goes_and_what_another_run_has_stays() -> None:
    ours, strangers = FakeServer(run_id="run"), FakeServer(run_id="another")
    for server in (ours, strangers):
        server.live = {1, 2}
    async with synced(ours, strangers) as (client, sync):
        await sync.adopt(2)
        assert (ours.live, strangers.live) == ({2}, {1, 2})
        await sync.load(3)
        assert strangers.live == {1, 2, 3}
        client.pool.eject(name_of(ours), "it does not answer")
        ours.live |= {1}
        await until(lambda: not client.pool.out)
        assert ours.live == {3}


async def test_the_orchestrator_says_which_versions_are_in_use(tmp_path: Path, server: FakeServer) -> None:
    server.in_flight = {1: 1}
    folder = (await run(tmp_path, server)).trainer.run_folder
    in_use = read_in_use(folder.broadcasts, run_id=folder.run_id)
    assert in_use is not None
    assert in_use.newest == 3
    pins = {version: held.pins for version, held in in_use.versions.items()}
    assert pins == {1: {"requests in flight": 1}, 3: {"evaluation": 1, "newest": 1}}
    proved = dict(rows_of(tmp_path, "SELECT version, snapshot FROM proofs"))
    assert {version: held.snapshot for version, held in in_use.versions.items()} == {one: proved[one] for one in (1, 3)}
    [shown] = [line for line in text(run_status(tmp_path)).splitlines() if "version 1 held" in line]
    assert shown.endswith(f"{proved[1]}, pinned by requests in flight")


class TwoSlots(FakeServer):
    """Refuses a third version, as a server with two slots does. Evaluations take `evaluation_s` longer."""

    def __init__(self, evaluation_s: float) -> None:
        super().__init__(num_slots=2)
        self.evaluation_s = evaluation_s

    async def sampling(self, body: dict[str, Any]) -> None:
        await asyncio.sleep(self.evaluation_s * (body["temperature"] == 0))

    async def _load(self, request: web.Request) -> web.Response:
        assert len(self.live | {(await request.json())["version"]}) <= 2
        return await super()._load(request)


async def test_a_version_waits_for_an_evaluation_that_holds_the_slot_it_needs(tmp_path: Path) -> None:
    pace = {"max_async_level": 0, "max_off_policy_steps": 0, "max_steps": 4, "eval": {"interval": 1}}
    async with TwoSlots(0.3) as server:
        made = await run(tmp_path, server, **pace)
        assert made.summary.versions_served == (0, 1, 2, 3, 4)
    async with TwoSlots(60) as server:
        with pytest.raises(DeadlineError, match=r"slots for version \d .*by evaluation"):
            await run(tmp_path / "late", server, **pace, wait_timeout_s=2.0)


async def test_servers_that_receive_a_broadcast_get_their_ranks_and_must_all_be_there() -> None:
    one, other = FakeServer(num_workers=2), FakeServer(num_workers=4)
    async with synced(one, other, broadcast=True) as (client, sync):
        await sync.load(0)
        assert [server.loads[0]["rank_offset"] for server in (one, other)] == [1, 3]
        client.pool.eject(name_of(one), "it is gone")
        with pytest.raises(ServerError, match="it is gone"):
            sync.check_complete()


class OneVersion(FakeServer):
    """Holds the newest version alone; counts the requests that it has when it is to load another."""

    def __init__(self) -> None:
        super().__init__(kinds=["merged", "full"])
        self.latency_s, self.running, self.at_switch = 0.05, 0, list[int]()

    async def sampling(self, body: dict[str, Any]) -> None:
        self.running += 1
        await super().sampling(body)
        self.running -= 1

    async def _load(self, request: web.Request) -> web.Response:
        self.at_switch.append(self.running)
        self.live.clear()
        return await super()._load(request)


async def test_where_servers_hold_one_version_they_drain_before_each_switch(tmp_path: Path) -> None:
    merged = {"weight_broadcast": {"format": "merged"}}
    trainer = {"kind": "merged", "step_s": 0.05, "settings": merged}
    pace = {"max_async_level": 2, "max_steps": 5, "eval": {"interval": 2}}
    async with OneVersion() as server:
        made = await run(tmp_path, server, trainer=trainer, **merged, **pace)
    assert made.summary.rollouts_trained == 80
    assert server.at_switch == [0] * 6


async def test_a_version_is_live_when_every_server_has_proved_it_and_its_noise_and_so_again_when_it_returns() -> None:
    one, other = FakeServer(), FakeServer()
    one.noisy = other.noisy = {3}
    async with synced(one, other) as (client, sync):
        assert (await sync.load(2)).canary_max_abs == 2e-6
        assert (await sync.load(3, noisy=True)).canary_max_abs == 3e-6
        other.noisy = set()
        client.pool.eject(name_of(other), "it does not answer")
        await until(lambda: "proof of noise" in client.pool.out.get(name_of(other), ""))
        other.noisy = {3}
        await until(lambda: not client.pool.out)


class LoadsLate(FakeServer):
    """Reports what it has loaded once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may = asyncio.Event()
        self.may.set()

    async def _load(self, request: web.Request) -> web.Response:
        report = await super()._load(request)
        await self.may.wait()
        return report


async def test_the_proof_of_a_version_that_is_published_again_meanwhile_does_not_count() -> None:
    one, late = FakeServer(), LoadsLate()
    async with synced(one, late) as (client, sync):
        await sync.load(1, snapshot="first")
        late.may.clear()
        late.loads.clear()
        client.pool.eject(name_of(late), "it does not answer")
        await until(lambda: late.loads)
        await sync.load(1, snapshot="second")
        assert list(client.pool.out) == [name_of(late)]
        late.may.set()
        await until(lambda: not client.pool.out)
        assert [load["snapshot"] for load in late.loads] == ["first", "second"]


FIGURES = {"max_abs": 4e-6, "mean_abs": 1e-6, "tolerance": 1e-4, **OF_BASE}


@pytest.mark.parametrize(
    ("changes", "noisy", "says"),
    [
        ({}, False, None),
        ({"version": 2}, False, "version 2"),
        ({"noise": FIGURES}, False, "noise"),
        ({}, True, "noise"),
        ({"adapters": {}}, False, "proposer"),
        ({"canary": FIGURES | {"max_abs": math.inf}}, False, "another policy"),
        ({"adapters": {"proposer": FIGURES | {"mean_abs": 2e-4}}}, False, "another policy"),
    ],
)
def test_a_report_proves_a_version_by_all_its_figures(changes: dict[str, Any], noisy: bool, says: str | None) -> None:
    fields = {
        "version": 1,
        "name": "v1",
        "snapshot": "s",
        "canary": FIGURES,
        "adapters": {"proposer": FIGURES},
        **changes,
    }
    report = msgspec.convert({"load_s": 0, "canary_s": 0, **fields}, LoadReport)
    with nullcontext() if says is None else pytest.raises(ServerError, match=says):
        check_proof("http://server", 1, report, noisy=noisy, adapters=("solver", "proposer"))
