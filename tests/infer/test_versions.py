"""The table of versions over a fake engine and real folders: adapters, several at once, and weights in place."""

import asyncio
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest
from grpo.infer.engine import EngineError
from grpo.infer.versions import NotLive, UnknownAdapter, VersionTable
from grpo.transport.errors import DeadlineError, PolicyRefused
from grpo.transport.folders import step_folder
from grpo.transport.http import LoadReport
from grpo.transport.records import PolicySpec
from grpo.transport.run import RunFolder, create_run

from tests.infer.versions_fakes import (
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
IN_PLACE = replace(BASE, max_rank=None)
WITH_NOISE = replace(BASE, noisy_norms=NORMS)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run(tmp_path / "run")


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def table(engine: FakeEngine, run: RunFolder) -> VersionTable:
    return table_of(engine, run)


@pytest.fixture
def in_place(engine: FakeEngine, run: RunFolder) -> VersionTable:
    return table_of(engine, run, IN_PLACE)


async def load(table: VersionTable, run: RunFolder, *versions: int, alias: str | None = None) -> LoadReport:
    for version in versions:
        report = await table.load(run_id=run.run_id, version=version, alias=alias)
    return report


async def refusal(table: VersionTable, run: RunFolder, version: int) -> str:
    with pytest.raises(PolicyRefused) as caught:
        await load(table, run, version)
    return caught.value.reason


async def use(table: VersionTable, version: int | None) -> None:
    async with table.using(version):
        pass


# --- adapters ---------------------------------------------------------------------------------------------------------


async def test_a_loaded_version_is_live_under_its_name_and_the_alias(
    table: VersionTable, run: RunFolder, engine: FakeEngine
) -> None:
    folder = publish(run, 3)
    report = await load(table, run, 3, alias="policy")
    assert (report.name, report.canary.max_abs, report.noise) == ("policy-v3", 0.0, None)
    assert set(engine.names) == {"policy-v3", "policy"}
    async with table.using(3) as (served, adapter), table.using(None) as (_, base):
        assert adapter is not None
        assert (served.version, adapter.path, base) == (3, str(folder.resolve()), None)
    assert await load(table, run, 3) == report
    assert len(engine.adapters) == 1


@pytest.mark.parametrize("replica", [0, 1])
async def test_each_of_several_engines_proves_a_version(
    table: VersionTable, run: RunFolder, engine: FakeEngine, replica: int
) -> None:
    engine.num_replicas = 2
    publish(run, 1)
    publish(run, 2)
    await load(table, run, 1)
    engine.without_adapters = {replica}
    assert await refusal(table, run, 2) == "not_applied"
    assert table.live == [1]


async def test_a_refused_version_leaves_the_server_on_what_it_had(
    table: VersionTable, run: RunFolder, engine: FakeEngine
) -> None:
    for version in (1, 2, 3):
        publish(run, version)
    await load(table, run, 1, alias="policy")
    engine.error = 0.01
    assert await refusal(table, run, 2) == "canary_mismatch"
    engine.error, engine.serves = 0.0, 0.0
    assert await refusal(table, run, 2) == "not_applied"
    engine.serves, engine.refuses = None, {3}
    assert await refusal(table, run, 3) == "corrupt"
    publish(run, 4, value=float("nan"))
    assert await refusal(table, run, 4) == "not_finite"
    assert table.live == [1]
    assert [adapter.name for adapter in engine.adapters.values()] == ["policy-v1"]
    assert engine.names["policy"].name == "policy-v1"  # type: ignore[union-attr]


async def test_a_version_published_again_with_other_weights_is_proved_again_and_serves_its_requests_to_the_end(
    table: VersionTable, run: RunFolder, engine: FakeEngine
) -> None:
    publish(run, 1)
    await load(table, run, 1)
    async with table.using(1), table.using(1, follow=True) as (followed, _):
        publish(run, 1, value=0.2)
        engine.error = 0.01
        assert await refusal(table, run, 1) == "canary_mismatch"
        assert not followed.superseded.is_set()
        engine.error = 0.0
        await load(table, run, 1)
        assert followed.superseded.is_set()
        assert (table.live, table.in_flight, len(engine.adapters)) == ([1], {1: 2}, 2)
    assert len(engine.adapters) == 1
    assert engine.num_forgotten == 3  # for the run, and because name and path come again, twice


async def test_another_run_in_the_folder_retires_the_versions_of_the_one_before(
    table: VersionTable, run: RunFolder, engine: FakeEngine
) -> None:
    publish(run, 1)
    await load(table, run, 1)
    async with table.using(1, follow=True) as (served, _):
        second = create_run(run.path, overwrite=True)
        publish(second, 2)
        await load(table, second, 2)
        assert not served.superseded.is_set(), "nobody goes on under another run"
    assert table.live == [2]
    assert [adapter.name for adapter in engine.adapters.values()] == ["policy-v2"]
    assert engine.num_forgotten == 2, "names of versions mean others in each run"
    assert await refusal(table, run, 1) == "stale_run"


async def test_an_unloaded_version_serves_its_requests_to_the_end(
    table: VersionTable, run: RunFolder, engine: FakeEngine
) -> None:
    publish(run, 1)
    await load(table, run, 1)
    async with table.using(1):
        await table.unload(1)
        assert (table.live, table.in_flight, engine.names) == ([], {1: 1}, {})
        assert engine.adapters
        with pytest.raises(NotLive):
            await use(table, 1)
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


async def test_fetched_copies_stay_as_long_as_their_version_is_live_or_serves_a_request(
    run: RunFolder, engine: FakeEngine
) -> None:
    copies = Copies(run)
    table = table_of(engine, run, fetched=copies)
    for version in (1, 2, 3, 4):
        publish(run, version)
    await load(table, run, 1)
    async with table.using(1):
        await load(table, run, 2)
        await table.unload(1)
        await load(table, run, 3)
        assert copies.kept == {1, 2, 3}
    await load(table, run, 4)
    assert copies.kept == {2, 3, 4}


async def test_who_follows_gets_the_newest_version_and_is_told_when_a_newer_one_is_proved(
    table: VersionTable, run: RunFolder, engine: FakeEngine
) -> None:
    for version in (1, 2, 3):
        publish(run, version)
    await load(table, run, 2)
    async with table.using(1, follow=True) as (served, adapter):
        assert adapter is not None
        assert (served.version, adapter.name) == (2, "policy-v2")
        await load(table, run, 1)
        assert not served.superseded.is_set(), "nobody goes back to an earlier version"
        engine.error = 0.01
        await refusal(table, run, 3)
        assert not served.superseded.is_set(), "version 3 has not been proved"
        engine.error = 0.0
        await load(table, run, 3)
        assert served.superseded.is_set()
    with pytest.raises(NotLive):
        async with table.using(4, follow=True):
            pass


async def test_an_engine_that_does_not_get_to_the_canary_ends_at_the_deadline(
    run: RunFolder, engine: FakeEngine
) -> None:
    table = table_of(engine, run, timeout_s=0.2)
    publish(run, 1)
    engine.stuck = True
    with pytest.raises(DeadlineError, match="canary_timeout_s"):
        await load(table, run, 1)
    assert (engine.adapters, table.live) == ({}, [])
    engine.stuck = False
    await load(table, run, 1)


async def test_a_version_with_several_adapters_is_live_once_each_is_proved(
    table: VersionTable, run: RunFolder, engine: FakeEngine
) -> None:
    folder = publish(run, 3, SEVERAL).resolve()
    report = await load(table, run, 3, alias="policy")
    assert (report.canary.max_abs, report.adapters["proposer"].max_abs) == (0.0, 0.0)
    names = {name: adapter.name for name, adapter in engine.names.items() if adapter is not None}
    own, other = "policy-v3", "policy-v3-proposer"
    assert names == {own: own, "policy": own, other: other, "policy-proposer": other}
    paths = {}
    for name in (None, "solver", "proposer"):
        async with table.using(2, adapter=name, follow=True) as (_, adapter):
            assert adapter is not None
            paths[name] = adapter.path
    assert paths == {None: str(folder), "solver": str(folder), "proposer": str(folder / "adapters/proposer")}
    with pytest.raises(UnknownAdapter, match=r"judge.*solver, proposer"):
        async with table.using(3, adapter="judge"):
            pass
    wrong = {"adapters/proposer/canary__json": canary_of(4, below=4.0).to_json()}  # the server finds 4.5
    publish(run, 4, SEVERAL, **wrong)
    assert await refusal(table, run, 4) == "canary_mismatch"
    assert len(engine.adapters) == 2
    await table.unload(3)
    assert (engine.adapters, engine.names) == ({}, {})


async def test_a_version_with_noise_is_live_with_and_without_it(run: RunFolder, engine: FakeEngine) -> None:
    table = table_of(engine, run, WITH_NOISE)
    for version in (0, 3):
        publish(run, version, NOISY)
    report = await load(table, run, 0, 3)
    assert report.noise is not None
    assert (report.canary.max_abs, report.noise.max_abs) == (0.0, 0.0)
    asked = {}
    for version in (0, 3, None):
        for noisy in (False, True):
            async with table.using(version, noisy=noisy) as (_, adapter):
                asked[version, noisy] = None if adapter is None else adapter.name
    plain = {(version, noisy): f"policy-v{version}" for version in (0, 3) for noisy in (False, True)}
    assert asked == {**plain, (3, True): "policy-v3+noise", (None, False): None, (None, True): None}
    assert not any("noise" in name for name in engine.names)
    publish(run, 3, NOISY, **{"noise__safetensors": noise_file(1.2)})
    await load(table, run, 3)
    assert sorted(engine.adapters) == [1, 4, 5]


async def test_a_server_that_applies_another_noise_is_found_out(run: RunFolder, engine: FakeEngine) -> None:
    table = table_of(engine, run, WITH_NOISE)
    publish(run, 3, NOISY)
    engine.noise_effect = 0.9 * NOISE_EFFECT
    assert await refusal(table, run, 3) == "noise_mismatch"
    assert not engine.adapters


# --- weights in the place of the model's own --------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [FULL, MERGED], ids=["full", "merged"])
async def test_one_version_at_a_time_replaces_the_base_model(
    in_place: VersionTable, run: RunFolder, engine: FakeEngine, spec: PolicySpec
) -> None:
    await use(in_place, None)
    for version in (0, 1, 2):
        publish(run, version, spec)
        assert (await load(in_place, run, version, alias="default")).canary.max_abs == 0
        assert (in_place.live, set(engine.names)) == ([version], {f"policy-v{version}", "default"})
    await load(in_place, run, 2)
    assert engine.loads == [0, 1, 2]
    for gone in (1, None):
        with pytest.raises(NotLive, match=r"\[2\]"):
            await use(in_place, gone)
    publish(run, 2, spec, value=0.7)
    await load(in_place, run, 2)
    assert engine.loads == [0, 1, 2, 2], "it was published again with other weights"


async def until_closed(table: VersionTable) -> None:
    while table._open.is_set():  # noqa: ASYNC110 - the table tells nobody
        await asyncio.sleep(0.001)


async def test_a_switch_waits_for_requests_that_run_and_new_ones_wait_for_it(
    in_place: VersionTable, run: RunFolder, engine: FakeEngine
) -> None:
    for version in (0, 1):
        publish(run, version, FULL)
    await load(in_place, run, 0)
    async with in_place.using(0):
        switching = asyncio.create_task(load(in_place, run, 1))
        await until_closed(in_place)
        early, late = asyncio.create_task(use(in_place, 0)), asyncio.create_task(use(in_place, 1))
        await asyncio.sleep(0.02)
        assert not any(task.done() for task in (switching, early, late))
        assert (in_place.in_flight, engine.loads) == ({0: 1}, [0])
    await switching
    await late
    with pytest.raises(NotLive):
        await early


async def test_who_follows_ends_for_the_switch_and_goes_on_after_it_with_whatever_is_live(
    in_place: VersionTable, run: RunFolder, engine: FakeEngine
) -> None:
    for version in (0, 1):
        publish(run, version, FULL)
    await load(in_place, run, 0)
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
    await load(in_place, run, 1)
    await following
    assert versions == [0, 1]


async def test_requests_that_never_end_make_the_switch_fail_at_the_deadline_and_change_nothing(
    run: RunFolder, engine: FakeEngine
) -> None:
    table = table_of(engine, run, IN_PLACE, timeout_s=0.2)
    for version in (0, 1):
        publish(run, version, FULL)
    await load(table, run, 0)
    async with table.using(0):
        with pytest.raises(DeadlineError, match="in flight"):
            await load(table, run, 1)
    await use(table, 0)
    assert engine.loads == [0]


@pytest.mark.parametrize(("fails", "before"), [("load", None), ("proof", 3)])
async def test_a_version_that_fails_in_place_leaves_the_server_on_what_it_had(
    in_place: VersionTable, run: RunFolder, engine: FakeEngine, fails: str, before: int | None
) -> None:
    if before is not None:
        publish(run, before, FULL)
        await load(in_place, run, before)
    publish(run, 4, FULL, value=float("nan"))
    assert await refusal(in_place, run, 4) == "not_finite"
    publish(run, 5, FULL, canary__json=canary_of(5, below=5.5 if fails == "proof" else 5.0).to_json())
    engine.refuses = {5} if fails == "load" else set()
    with pytest.raises((EngineError, PolicyRefused)):
        await load(in_place, run, 5)
    await use(in_place, before)
    assert (engine.loads[-1], engine.fault_text) == (before, None)


async def test_another_canary_than_the_versions_before_is_refused_where_the_base_cannot_be_scored(
    in_place: VersionTable, run: RunFolder, engine: FakeEngine
) -> None:
    publish(run, 1, FULL)
    publish(run, 2, FULL, canary__json=canary_of(2, token_ids=(5, 6, 8)).to_json())
    await load(in_place, run, 1)
    assert await refusal(in_place, run, 2) == "corrupt"
    assert (in_place.live, engine.loads, engine.fault_text) == ([1], [1], None)


@pytest.mark.parametrize("before", [None, 3])
async def test_a_server_whose_weights_from_before_score_otherwise_ends_to_be_started_again(
    in_place: VersionTable, run: RunFolder, engine: FakeEngine, before: int | None
) -> None:
    for version in (3, 5):
        publish(run, version, FULL)
    await (use(in_place, None) if before is None else load(in_place, run, before))
    load_weights = engine.load_weights

    async def spoils(folder: Path | None) -> None:
        await load_weights(folder)
        engine.error = 0.01

    engine.load_weights = spoils  # type: ignore[method-assign]
    assert await refusal(in_place, run, 5) == "canary_mismatch"
    assert engine.loads[-1] == before
    assert "version 5" in str(engine.fault_text)


async def test_a_server_whose_weights_are_nobodys_ends_to_be_started_again(
    in_place: VersionTable, run: RunFolder, engine: FakeEngine
) -> None:
    for version in (3, 5):
        publish(run, version, FULL)
    await load(in_place, run, 3)
    engine.refuses = {3, 5}
    with pytest.raises(EngineError):
        await load(in_place, run, 5)
    assert "version 5" in str(engine.fault_text)


async def test_another_run_begins_with_the_base_models_weights(
    in_place: VersionTable, run: RunFolder, engine: FakeEngine
) -> None:
    publish(run, 5, FULL)
    await load(in_place, run, 5)
    other = create_run(run.path, overwrite=True)
    publish(other, 0, FULL)
    await load(in_place, other, 0)
    assert engine.loads == [5, None, 0]


async def test_announced_weights_are_received_once_and_a_failure_ends_the_server(
    in_place: VersionTable, run: RunFolder, engine: FakeEngine
) -> None:
    for version in (0, 1):
        announce(run, version)
        for _ in range(2):
            await in_place.load(run_id=run.run_id, version=version, rank_offset=2)
    assert (engine.received, in_place.live) == ([2, 2], [1])
    engine.refuses = {2}
    announce(run, 2)
    with pytest.raises(EngineError):
        await load(in_place, run, 2)
    assert "version 2" in str(engine.fault_text)


async def test_a_live_version_is_received_again_from_a_trainer_that_was_started_again(
    in_place: VersionTable, run: RunFolder, engine: FakeEngine
) -> None:
    engine.serves = 0.0
    announce(run, 0)
    await load(in_place, run, 0)
    announce(run, 0, session="second")
    await in_place.load(run_id=run.run_id, version=0, rank_offset=3)
    assert engine.received[-1] == 3
