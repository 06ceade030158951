"""Which version of the policy teaches it, and how long servers keep it."""

import asyncio

from orchestrator.frozen import FrozenVersion
from orchestrator.scheduler import Scheduler


def scheduler(shipped: int = 40) -> Scheduler:
    return Scheduler(
        groups_per_batch=1, max_async_level=1, max_off_policy_steps=1, max_in_flight=1, max_steps=None, shipped=shipped
    )


def live(frozen: FrozenVersion, told: Scheduler, *versions: int) -> None:
    for version in versions:
        told.version_live(version)
        frozen.version_live(version)


def test_the_newest_version_that_every_divides_teaches_and_stays() -> None:
    told = scheduler()
    frozen = FrozenVersion(3, told)
    live(frozen, told, *range(8))
    assert frozen.version == 6
    assert told.needed_versions() == {6, 7}


def test_version_0_is_the_base_model_for_which_no_server_keeps_anything() -> None:
    told = scheduler()
    always, first = FrozenVersion(0, told), FrozenVersion(3, scheduler())
    live(always, told, *range(8))
    live(first, scheduler(), 0)
    assert (always.version, first.version) == (None, None)
    assert told.needed_versions() == {7}


def test_a_version_under_which_something_is_being_scored_stays_until_that_is_done() -> None:
    told = scheduler()
    frozen = FrozenVersion(2, told)
    live(frozen, told, *range(3))
    with frozen.using():
        live(frozen, told, 3, 4)
        assert (frozen.entered, frozen.version) == (2, 4)
        assert told.needed_versions() == {2, 4}
    assert told.needed_versions() == {4}


def test_a_run_that_goes_on_has_the_teacher_that_it_had() -> None:
    told = scheduler(shipped=17)
    frozen = FrozenVersion(5, told)
    assert frozen.due(17) == 15
    live(frozen, told, 17)
    assert (frozen.version, told.needed_versions()) == (15, {15, 17})


async def test_who_is_asked_later_is_asked_under_the_version_that_stays() -> None:
    told = scheduler()
    frozen = FrozenVersion(2, told)
    live(frozen, told, *range(3))

    async def asked() -> int | None:
        await asyncio.sleep(0)
        return frozen.entered

    with frozen.using():
        asking = asyncio.gather(asked(), asked())
        live(frozen, told, 3, 4)
        assert await asking == [2, 2]
    assert await asked() == 4
