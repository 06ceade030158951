"""Which version of the policy teaches it, and how long servers keep it."""

import asyncio
import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Literal

import pytest

from orchestrator.frozen import FrozenVersion
from orchestrator.scheduler import Scheduler, Ticket


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


# --- how many versions are asked at once (`max_loras` in configs/cross.py) ---

Event = tuple[Literal["start", "teach", "finish", "train"], int]


def most_at_once(max_lag: int, every: int, events: Iterable[Event]) -> int:
    """Versions that are sampled under, scored under or loaded at once, at most, when groups and versions come so. The
    number of an event chooses among the groups that it can be about."""
    scheduler = Scheduler(
        groups_per_batch=2,
        max_async_level=min(1, max_lag),
        max_off_policy_steps=max_lag,
        max_in_flight=100,
        max_steps=None,
        oversampling_factor=3.0,
    )
    frozen, sampled, taught = FrozenVersion(every, scheduler), list[Ticket](), list[tuple[Ticket, int, ExitStack]]()
    most, live = 0, 0
    for told in (scheduler, frozen):
        told.version_live(0)
    for what, which in events:
        if what == "start":
            while (ticket := scheduler.start()) is not None:
                sampled.append(ticket)
        elif what == "teach" and sampled:
            using = ExitStack()
            using.enter_context(frozen.using())
            taught.append((sampled.pop(which % len(sampled)), frozen.version or 0, using))
        elif what == "finish" and taught:
            ticket, _, using = taught.pop(which % len(taught))
            using.close()
            scheduler.completed(ticket.group)
        elif what == "train":
            while scheduler.ship() is not None:
                pass
            loading = {live + 1} if live < scheduler.shipped else set()
            scored_under = {version for _, version, _ in taught if version}
            most = max(most, len({ticket.version for ticket in sampled} | scored_under | loading))
            for version in loading:
                live = version
                scheduler.version_live(live)
                frozen.version_live(live)
    return most


def drawn(seed: int) -> Iterator[Event]:
    """Groups of all speeds, the newer ones often the faster."""
    draw = random.Random(seed)
    for _ in range(300):
        yield draw.choice(("start", "teach", "teach", "finish", "train")), draw.choice((0, 1, 3, -1, -1, -1, -1))


@pytest.mark.parametrize(("every", "num_more"), [(0, 0), (1, 0), (3, 1)])
@pytest.mark.parametrize("max_lag", [1, 2])
def test_besides_the_versions_of_groups_in_flight_and_the_one_that_is_loaded_one_teaches_and_no_other(
    max_lag: int, every: int, num_more: int
) -> None:
    most = max(most_at_once(max_lag, every, drawn(seed)) for seed in range(100))
    assert most == max_lag + 1 + num_more
