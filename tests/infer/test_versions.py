"""The table of versions over a fake engine and real folders: adapters, several at once, and weights in place."""

import asyncio
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from grpo.infer.engine import EngineError
from grpo.infer.versions import NotLive, UnknownAdapter
from grpo.transport.errors import DeadlineError, PolicyRefused
from grpo.transport.folders import step_folder
from grpo.transport.http import LoadReport
from grpo.transport.records import PolicySpec
from grpo.transport.run import RunFolder, create_run

from tests.infer.versions_fakes import (
    ADAPTER,
    BASE,
    FULL,
    MERGED,
    NOISE_EFFECT,
    NOISY,
    NORMS,
    SEVERAL,
    FakeEngine,
    announce,
    canary_of,
    noise_file,
    publish,
    table_of,
)

pytestmark = pytest.mark.timeout(60)


class Server:
    """A table for versions of one kind, its engine, and its run."""

    def __init__(self, run: RunFolder, spec: PolicySpec = ADAPTER, *, num_slots: int = 10) -> None:
        self.run, self.spec, self.engine = run, spec, FakeEngine()
        max_rank = BASE.max_rank if spec.kind == "adapter" else None
        base = replace(BASE, max_rank=max_rank, noisy_norms=NORMS if spec.norm_noise else BASE.noisy_norms)
        self.table = table_of(self.engine, run, base, num_slots=num_slots)
        self.using = self.table.using

    def publish(self, *versions: int, **options: Any) -> Path:
        for version in versions:
            folder = publish(self.run, version, self.spec, **options)
        return folder

    async def load(self, *versions: int, **options: Any) -> LoadReport:
        for version in versions:
            report = await self.table.load(run_id=self.run.run_id, version=version, **options)
        return report

    async def refusal(self, version: int, **options: Any) -> str:
        with pytest.raises(PolicyRefused) as caught:
            await self.load(version, **options)
        return caught.value.reason

    async def use(self, version: int | None, **options: Any) -> None:
        async with self.using(version, **options):
            pass


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run(tmp_path / "run")


@pytest.fixture
def server(run: RunFolder) -> Server:
    return Server(run)


@pytest.fixture
def in_place(run: RunFolder) -> Server:
    return Server(run, FULL)


# --- adapters ---------------------------------------------------------------------------------------------------------


async def test_a_loaded_version_is_live_under_its_name_and_the_alias(server: Server) -> None:
    folder = server.publish(3)
    report = await server.load(3, alias="policy")
    assert (report.name, report.canary.max_abs, report.noise) == ("policy-v3", 0.0, None)
    assert set(server.engine.names) == {"policy-v3", "policy"}
    async with server.using(3) as (served, adapter), server.using(None) as (_, base):
        assert adapter is not None
        assert (served.version, adapter.path, base) == (3, str(folder.resolve()), None)
    assert await server.load(3) == report
    assert len(server.engine.adapters) == 1


async def test_a_refused_version_leaves_the_server_on_what_it_had(server: Server) -> None:
    engine = server.engine
    engine.num_replicas = 2
    server.publish(1, 2, 3)
    await server.load(1, alias="policy")
    engine.error = 0.01
    assert await server.refusal(2) == "canary_mismatch"
    engine.error, engine.serves = 0.0, 0.0
    assert await server.refusal(2) == "not_applied"
    engine.serves = None
    for replica in (0, 1):
        engine.without_adapters = {replica}
        assert await server.refusal(2) == "not_applied"
    engine.without_adapters, engine.refuses = set(), {3}
    assert await server.refusal(3) == "corrupt"
    server.publish(4, value=float("nan"))
    assert await server.refusal(4) == "not_finite"
    assert [*server.table.live] == [1]
    assert [adapter.name for adapter in engine.adapters.values()] == ["policy-v1"]
    assert engine.names["policy"].name == "policy-v1"  # type: ignore[union-attr]


async def test_a_version_published_again_with_other_weights_is_proved_again_and_serves_its_requests_to_the_end(
    server: Server,
) -> None:
    engine, table = server.engine, server.table
    server.publish(1)
    await server.load(1)
    async with server.using(1), server.using(1, follow=True) as (followed, _):
        server.publish(1, value=0.2)
        engine.error = 0.01
        assert await server.refusal(1) == "canary_mismatch"
        assert not followed.superseded.is_set()
        engine.error = 0.0
        await server.load(1)
        assert followed.superseded.is_set()
        assert ([*table.live], table.in_flight, len(engine.adapters)) == ([1], {1: 2}, 2)
    assert len(engine.adapters) == 1
    assert engine.num_forgotten == 3  # for the run, and because name and path come again, twice


async def test_a_snapshot_has_its_name_from_its_policy_files_and_another_one_is_refused(server: Server) -> None:
    server.publish(1, value=0.1)
    first = (await server.load(1)).snapshot
    assert server.table.live == {1: first}
    server.publish(1, value=0.2)
    assert await server.refusal(1, snapshot=first) == "other_snapshot"
    assert server.table.live == {1: first}
    second = (await server.load(1)).snapshot
    assert second != first
    server.publish(1, value=0.1, metrics__json=b'{"time/train_s": 1}')
    assert (await server.load(1, snapshot=first)).snapshot == first, "metrics are no part of it"


async def test_another_run_in_the_folder_retires_the_versions_of_the_one_before(server: Server) -> None:
    first = server.run
    server.publish(1)
    await server.load(1)
    async with server.using(1, follow=True) as (served, _):
        server.run = create_run(first.path, overwrite=True)
        server.publish(2)
        await server.load(2)
        assert not served.superseded.is_set(), "nobody goes on under another run"
    assert [*server.table.live] == [2]
    assert [adapter.name for adapter in server.engine.adapters.values()] == ["policy-v2"]
    assert server.engine.num_forgotten == 2, "names of versions mean others in each run"
    server.run = first
    assert await server.refusal(1) == "stale_run"


async def test_an_unloaded_version_serves_its_requests_to_the_end(server: Server) -> None:
    engine, table = server.engine, server.table
    server.publish(1)
    await server.load(1)
    async with server.using(1):
        await table.unload(1)
        assert ([*table.live], table.in_flight, engine.names) == ([], {1: 1}, {})
        assert engine.adapters
        with pytest.raises(NotLive):
            await server.use(1)
    assert (engine.adapters, table.in_flight) == ({}, {})
    with pytest.raises(NotLive):
        await table.unload(1)


class Copies:
    """The versions of a run, as fetched ones."""

    def __init__(self, run: RunFolder) -> None:
        self._run, self.kept = run, set[int]()

    def fetch(self, run_id: str, version: int) -> Path:
        return step_folder(self._run.broadcasts, version)

    def keep_only(self, versions: Collection[int]) -> None:
        self.kept = set(versions)


async def test_more_adapters_than_slots_wait_for_requests_that_end_or_are_refused_by_name(run: RunFolder) -> None:
    server = Server(run, SEVERAL, num_slots=4)
    engine, table = server.engine, server.table
    server.publish(1, 2, 3)
    await server.load(1, 2)
    with pytest.raises(PolicyRefused, match=r"version 3 has 2 adapters, and of max_loras = 4 .* at least 6") as refused:
        await server.load(3)
    assert refused.value.reason == "slots"
    first, second = ([*engine.adapters][place] for place in (0, 2))
    async with table.using_key(second), table.using_key(first):
        async with server.using(1):
            await table.unload(1)
            loading = asyncio.create_task(server.load(3))
            while "version 1 (2 slots, 2 requests in flight)" not in table._waits_for:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.001)
            assert len(engine.adapters) == 4
        assert not loading.done()
    await loading
    assert [*table.live] == [2, 3]
    assert {adapter.name for adapter in engine.adapters.values()} == {
        f"policy-v{version}{name}" for version in (2, 3) for name in ("", "-proposer")
    }
    with pytest.raises(ValueError, match="not served any more"):
        table.using_key(first)


async def test_who_waits_for_a_slot_in_vain_is_told_who_holds_it(run: RunFolder) -> None:
    server = Server(run, num_slots=2)
    server.publish(1, 2, 3)
    await server.load(1, 2)
    async with server.using(1):
        await server.table.unload(1)
        server.table.timeout_s = 0.5
        with pytest.raises(
            DeadlineError, match=r"max_loras = 2 slots, held by version 1 \(1 slot, 1 requests in flight\)"
        ):
            await server.load(3)
    server.table.timeout_s = 60.0
    await server.load(3)


async def test_a_version_that_is_published_again_takes_its_own_slot_where_there_is_no_other(run: RunFolder) -> None:
    server = Server(run, num_slots=2)
    server.publish(1, 2)
    await server.load(1, 2)
    server.publish(2, value=0.2)
    await server.load(2)
    assert [adapter.name for adapter in server.engine.adapters.values()] == ["policy-v1", "policy-v2"]


async def test_fetched_copies_stay_as_long_as_their_version_is_live_or_serves_a_request(server: Server) -> None:
    copies = Copies(server.run)
    server.table = table_of(server.engine, server.run, fetched=copies)
    server.publish(1, 2, 3, 4)
    await server.load(1)
    async with server.table.using(1):
        await server.load(2)
        await server.table.unload(1)
        await server.load(3)
        assert copies.kept == {1, 2, 3}
    await server.load(4)
    assert copies.kept == {2, 3, 4}


async def test_who_follows_gets_the_newest_version_and_is_told_when_a_newer_one_is_proved(server: Server) -> None:
    server.publish(1, 2, 3)
    await server.load(2)
    async with server.using(1, follow=True) as (served, adapter):
        assert adapter is not None
        assert (served.version, adapter.name) == (2, "policy-v2")
        await server.load(1)
        assert not served.superseded.is_set(), "nobody goes back to an earlier version"
        server.engine.error = 0.01
        await server.refusal(3)
        assert not served.superseded.is_set(), "version 3 has not been proved"
        server.engine.error = 0.0
        await server.load(3)
        assert served.superseded.is_set()
    with pytest.raises(NotLive):
        await server.use(4, follow=True)


async def test_an_engine_that_does_not_get_to_the_canary_ends_at_the_deadline(server: Server) -> None:
    server.table.timeout_s = 0.2
    server.publish(1)
    server.engine.stuck = True
    with pytest.raises(DeadlineError, match="canary_timeout_s"):
        await server.load(1)
    assert (server.engine.adapters, [*server.table.live]) == ({}, [])
    server.engine.stuck, server.table.timeout_s = False, 60.0
    await server.load(1)


async def test_a_version_with_several_adapters_is_live_once_each_is_proved(run: RunFolder) -> None:
    server = Server(run, SEVERAL)
    folder = server.publish(3).resolve()
    report = await server.load(3, alias="policy")
    assert (report.canary.max_abs, report.adapters["proposer"].max_abs) == (0.0, 0.0)
    names = {name: adapter.name for name, adapter in server.engine.names.items() if adapter is not None}
    own, other = "policy-v3", "policy-v3-proposer"
    assert names == {own: own, "policy": own, other: other, "policy-proposer": other}
    paths = {}
    for name in (None, "solver", "proposer"):
        async with server.using(2, adapter=name, follow=True) as (_, adapter):
            assert adapter is not None
            paths[name] = adapter.path
    assert paths == {None: str(folder), "solver": str(folder), "proposer": str(folder / "adapters/proposer")}
    with pytest.raises(UnknownAdapter, match=r"judge.*solver, proposer"):
        await server.use(3, adapter="judge")
    # The server finds 4.5 nats.
    server.publish(4, **{"adapters/proposer/canary__json": canary_of(4, below=4.0).to_json()})
    assert await server.refusal(4) == "canary_mismatch"
    assert len(server.engine.adapters) == 2
    await server.table.unload(3)
    assert (server.engine.adapters, server.engine.names) == ({}, {})


async def test_a_version_with_noise_is_live_with_and_without_it(run: RunFolder) -> None:
    server = Server(run, NOISY)
    server.publish(0, 3, 4)
    report = await server.load(0, 3)
    assert report.noise is not None
    assert (report.canary.max_abs, report.noise.max_abs) == (0.0, 0.0)
    asked = {}
    for version in (0, 3, None):
        for noisy in (False, True):
            async with server.using(version, noisy=noisy) as (_, adapter):
                asked[version, noisy] = None if adapter is None else adapter.name
    plain = {(version, noisy): f"policy-v{version}" for version in (0, 3) for noisy in (False, True)}
    assert asked == {**plain, (3, True): "policy-v3+noise", (None, False): None, (None, True): None}
    assert not any("noise" in name for name in server.engine.names)
    server.publish(3, noise__safetensors=noise_file(1.2))
    await server.load(3)
    server.engine.noise_effect = 0.9 * NOISE_EFFECT
    assert await server.refusal(4) == "noise_mismatch"
    assert sorted(server.engine.adapters) == [1, 4, 5]


# --- weights in the place of the model's own --------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [FULL, MERGED], ids=["full", "merged"])
async def test_one_version_at_a_time_replaces_the_base_model(run: RunFolder, spec: PolicySpec) -> None:
    server = Server(run, spec)
    await server.use(None)
    for version in (0, 1, 2):
        server.publish(version)
        assert (await server.load(version, alias="default")).canary.max_abs == 0
        assert ([*server.table.live], set(server.engine.names)) == ([version], {f"policy-v{version}", "default"})
    await server.load(2)
    assert server.engine.loads == [0, 1, 2]
    for gone in (1, None):
        with pytest.raises(NotLive, match=r"\[2\]"):
            await server.use(gone)
    server.publish(2, value=0.7)
    await server.load(2)
    assert server.engine.loads == [0, 1, 2, 2], "it was published again with other weights"


async def test_a_switch_waits_for_requests_that_run_and_new_ones_wait_for_it(in_place: Server) -> None:
    in_place.publish(0, 1)
    await in_place.load(0)
    async with in_place.using(0):
        switching = asyncio.create_task(in_place.load(1))
        while in_place.table._open.is_set():  # noqa: ASYNC110 - the table tells nobody
            await asyncio.sleep(0.001)
        early, late = asyncio.create_task(in_place.use(0)), asyncio.create_task(in_place.use(1))
        await asyncio.sleep(0.02)
        assert not any(task.done() for task in (switching, early, late))
        assert (in_place.table.in_flight, in_place.engine.loads) == ({0: 1}, [0])
    await switching
    await late
    with pytest.raises(NotLive):
        await early


async def test_who_follows_ends_for_the_switch_and_goes_on_after_it_with_whatever_is_live(in_place: Server) -> None:
    in_place.publish(0, 1)
    await in_place.load(0)
    versions: list[int | None] = []

    async def follow() -> None:
        while versions[-1:] != [1]:
            async with in_place.using(0, follow=True) as (served, adapter):
                assert adapter is None
                versions.append(served.version)
                if served.version == 0:
                    await served.superseded.wait()

    following = asyncio.create_task(follow())
    while not versions:  # noqa: ASYNC110 - the table tells nobody
        await asyncio.sleep(0)
    await in_place.load(1)
    await following
    assert versions == [0, 1]


async def test_requests_that_never_end_make_the_switch_fail_at_the_deadline_and_change_nothing(
    in_place: Server,
) -> None:
    in_place.publish(0, 1)
    await in_place.load(0)
    in_place.table.timeout_s = 0.2
    async with in_place.using(0):
        with pytest.raises(DeadlineError, match="in flight"):
            await in_place.load(1)
    await in_place.use(0)
    assert in_place.engine.loads == [0]


@pytest.mark.parametrize(("fails", "before"), [("load", None), ("proof", 3)])
async def test_a_version_that_fails_in_place_leaves_the_server_on_what_it_had(
    in_place: Server, fails: str, before: int | None
) -> None:
    if before is not None:
        in_place.publish(before)
        await in_place.load(before)
    in_place.publish(4, value=float("nan"))
    assert await in_place.refusal(4) == "not_finite"
    in_place.publish(5, canary__json=canary_of(5, below=5.5 if fails == "proof" else 5.0).to_json())
    in_place.engine.refuses = {5} if fails == "load" else set()
    with pytest.raises((EngineError, PolicyRefused)):
        await in_place.load(5)
    await in_place.use(before)
    assert (in_place.engine.loads[-1], in_place.engine.fault_text) == (before, None)


async def test_another_canary_than_the_versions_before_is_refused_where_the_base_cannot_be_scored(
    in_place: Server,
) -> None:
    in_place.publish(1)
    in_place.publish(2, canary__json=canary_of(2, token_ids=(5, 6, 8)).to_json())
    await in_place.load(1)
    assert await in_place.refusal(2) == "corrupt"
    assert ([*in_place.table.live], in_place.engine.loads, in_place.engine.fault_text) == ([1], [1], None)


@pytest.mark.parametrize("before", [None, 3])
async def test_a_server_whose_weights_from_before_score_otherwise_ends_to_be_started_again(
    in_place: Server, before: int | None
) -> None:
    engine = in_place.engine
    in_place.publish(3, 5)
    await (in_place.use(None) if before is None else in_place.load(before))
    load_weights = engine.load_weights

    async def spoils(folder: Path | None) -> None:
        await load_weights(folder)
        engine.error = 0.01

    engine.load_weights = spoils  # type: ignore[method-assign]
    assert await in_place.refusal(5) == "canary_mismatch"
    assert engine.loads[-1] == before
    assert "version 5" in str(engine.fault_text)


async def test_a_server_whose_weights_are_nobodys_ends_to_be_started_again(in_place: Server) -> None:
    in_place.publish(3, 5)
    await in_place.load(3)
    in_place.engine.refuses = {3, 5}
    with pytest.raises(EngineError):
        await in_place.load(5)
    assert "version 5" in str(in_place.engine.fault_text)


async def test_another_run_begins_with_the_base_models_weights(in_place: Server) -> None:
    in_place.publish(5)
    await in_place.load(5)
    in_place.run = create_run(in_place.run.path, overwrite=True)
    in_place.publish(0)
    await in_place.load(0)
    assert in_place.engine.loads == [5, None, 0]


async def test_announced_weights_are_received_once_from_each_trainer_and_a_failure_ends_the_server(
    in_place: Server,
) -> None:
    engine = in_place.engine
    for version in (0, 1):
        announce(in_place.run, version)
        await in_place.load(version, version, rank_offset=2)
    assert (engine.joined, engine.received, [*in_place.table.live]) == ([2], ["first"] * 2, [1])
    engine.serves = 1.0
    announce(in_place.run, 1, session="again")
    await in_place.load(1, rank_offset=3)
    assert (engine.joined, engine.received) == ([2, 3], ["first", "first", "again"])
    engine.refuses = {3}
    announce(in_place.run, 2)
    with pytest.raises(EngineError):
        await in_place.load(2)
    assert "version 2" in str(engine.fault_text)
