"""The scheduler, stepped by hand."""

from typing import Any

import pytest
from grpo.orchestrator.scheduler import Scheduler, Shipment
from hypothesis import example, given
from hypothesis import strategies as st

pytestmark = pytest.mark.timeout(90)


def scheduler(groups: int = 2, level: int = 0, off_policy: int | None = None, **more: Any) -> Scheduler:
    return Scheduler(
        groups_per_batch=groups,
        max_async_level=level,
        max_off_policy_steps=level if off_policy is None else off_policy,
        **{"max_in_flight": 100, "max_steps": None, "oversampling_factor": 1.0, "follows": False} | more,
    )


def ship(machine: Scheduler) -> Shipment:
    """The next batch, which must be there."""
    shipment = machine.ship()
    assert shipment is not None
    return shipment


def start_all(machine: Scheduler) -> list[int]:
    return [group for group in iter(machine.start, None) if group is not None]


def test_level_0_samples_each_batch_under_the_version_before_it() -> None:
    machine = scheduler(groups=2, level=0)
    for version in range(3):
        machine.version_live(version)
        groups = start_all(machine)
        assert len(groups) == 2
        assert machine.pinned().keys() == {version}
        assert machine.ship() is None
        for group in groups:
            machine.completed(group)
        shipment = ship(machine)
        assert shipment.step == version + 1
        assert [shipment.lag(group) for group in shipment.versions] == [0, 0]
        assert start_all(machine) == []


def test_groups_that_follow_keep_no_version_and_hold_nobody_up() -> None:
    for follows in (False, True):
        machine = scheduler(groups=2, level=1, follows=follows)
        machine.version_live(0)
        groups = start_all(machine)
        for group in groups[:2]:
            machine.completed(group)
        ship(machine)
        assert machine.drained == follows
        with machine.pin(0, by="a test"):
            assert not machine.drained, "an evaluation does not follow"
            assert machine.servers_wanted
            machine.version_live(1)
            assert machine.pinned().keys() == {0, 1}
        assert machine.pinned().keys() == ({1} if follows else {0, 1})
        assert not machine.servers_wanted


def test_each_pinned_version_tells_who_needs_it() -> None:
    machine = scheduler(groups=2, level=1)
    machine.version_live(0)
    groups = start_all(machine)
    for group in groups[:2]:
        machine.completed(group)
    ship(machine)
    machine.version_live(1)
    with machine.pin(0, by="evaluation"), machine.pin(0, by="evaluation"), machine.pin(1, by="a tenant"):
        running = {"groups in flight": machine.num_in_flight}
        assert machine.pinned() == {0: {"evaluation": 2} | running, 1: {"a tenant": 1, "newest": 1}}
    assert machine.pinned() == {0: running, 1: {"newest": 1}}


def test_nothing_starts_while_anybody_blocks_it() -> None:
    machine = scheduler(groups=2)
    machine.version_live(0)
    with machine.block("evaluation"):
        with machine.block("loading"), machine.block("evaluation"):
            assert machine.start() is None
        assert (machine.start(), machine.servers_wanted, machine.blocks["loading"]) == (None, True, 0)
    assert len(start_all(machine)) == 2
    assert not machine.servers_wanted


def test_a_delayed_group_holds_neither_slot_nor_version_and_ships_only_where_it_still_can() -> None:
    machine = scheduler(groups=1, level=0, off_policy=1, max_in_flight=1)
    machine.version_live(0)
    [late] = start_all(machine)
    machine.delay(late)
    [too_late] = start_all(machine)
    machine.delay(too_late)
    assert (machine.num_in_flight, machine.drained) == (0, True)
    [other] = start_all(machine)
    machine.completed(other)
    ship(machine)
    machine.version_live(1)
    assert machine.pinned() == {1: {"newest": 1}}
    assert machine.completed(late), "batch 2 may have a group of version 0"
    assert [*ship(machine).versions] == [late]
    machine.version_live(2)
    assert not machine.completed(too_late), "batch 3 may not"
    assert machine.num_in_flight == 0


def test_lag_is_counted_by_the_oldest_version_that_sampled() -> None:
    machine = scheduler(groups=1, level=1, off_policy=1, oversampling_factor=2.0, follows=True)
    machine.version_live(0)
    slow, first = start_all(machine)[:2]
    machine.completed(first, oldest=0)
    shipment = ship(machine)
    assert [shipment.lag(group) for group in shipment.versions] == [0]
    machine.version_live(1)
    [late] = start_all(machine)
    machine.completed(late, oldest=1)
    assert machine.ship() is None, "the slow group might have begun under version 0, and could not wait any longer"
    machine.completed(slow, oldest=1)
    second, third = ship(machine), ship(machine)
    assert [(group, second.lag(group)) for group in second.versions] == [(slow, 0)]
    assert [(group, third.lag(group)) for group in third.versions] == [(late, 1)]


def test_the_group_with_the_oldest_tokens_ships_first_though_it_was_started_later() -> None:
    machine = scheduler(groups=1, level=1, off_policy=3, follows=True)
    machine.version_live(0)
    first, second = start_all(machine)
    machine.version_live(1)
    machine.completed(first, oldest=1)
    machine.completed(second, oldest=0)
    assert [next(iter(ship(machine).versions)) for _ in range(2)] == [second, first]


def test_versions_become_live_in_their_order() -> None:
    machine = scheduler()
    with pytest.raises(ValueError, match="order"):
        machine.version_live(1)  # of a batch that has not left
    machine.version_live(0)
    machine.version_live(1)
    for version in (0, 1, 3):
        with pytest.raises(ValueError, match="order"):
            machine.version_live(version)
    assert machine.live == 1


def test_oversampled_groups_ship_later_so_that_a_batch_need_not_wait_for_a_slow_one() -> None:
    machine = scheduler(groups=2, level=1, off_policy=3, oversampling_factor=1.5)
    machine.version_live(0)
    # Batches 1 and 2 are within reach: 1.5 · 2 · 2 = 6 groups.
    slow, *others = start_all(machine)
    assert len(others) == 5
    for group in others[:4]:
        machine.completed(group)
    first, second = ship(machine), ship(machine)
    assert slow not in {*first.versions, *second.versions}
    machine.version_live(1)
    # Batch 3 is within reach: 1.5 · 2 = 3 groups, of which two are on their way.
    assert len(start_all(machine)) == 1
    machine.completed(slow)
    machine.completed(others[4])
    third = ship(machine)
    assert [(group, third.lag(group)) for group in third.versions] == [(slow, 2), (others[4], 2)]


@given(
    groups=st.integers(1, 4),
    level=st.integers(0, 3),
    patience=st.integers(0, 3),
    oversampling=st.sampled_from([1.0, 1.3, 2.0, 5.0]),
    choices=st.lists(
        st.tuples(st.sampled_from(["complete", "fail", "train", "delay", "return"]), st.integers(0, 1000)), max_size=200
    ),
)
# What returns late finds the last batches taken.
@example(
    groups=1,
    level=3,
    patience=1,
    oversampling=1.0,
    choices=[(event, 0) for event in ("complete", "complete", "train", "train", "delay", "return")],
)
def test_in_any_order_of_events_lags_stay_bounded_and_every_batch_ships(
    groups: int, level: int, patience: int, oversampling: float, choices: list[tuple[str, int]]
) -> None:
    machine = scheduler(groups, level, level + patience, max_steps=6, oversampling_factor=oversampling)
    machine.version_live(0)
    in_flight, delayed, shipped = list[int](), list[int](), list[int]()

    def settle() -> None:
        in_flight.extend(start_all(machine))
        while shipment := machine.ship():
            assert shipment.step == len(shipped) // groups + 1
            assert machine.live is not None
            assert machine.live >= shipment.step - 1 - level
            assert all(0 <= shipment.lag(group) <= level + patience for group in shipment.versions)
            shipped.extend(shipment.versions)
            in_flight.extend(start_all(machine))

    def train() -> None:
        assert machine.live is not None
        if machine.live < machine.shipped:
            machine.version_live(machine.live + 1)

    settle()
    for event, number in choices:
        if event == "train":
            train()
        elif event == "return":
            if delayed:
                group = delayed.pop(number % len(delayed))
                machine.failed(group) if number % 5 == 4 else machine.completed(group)
        elif event == "delay" and in_flight:
            delayed.append(in_flight.pop(number % len(in_flight)))
            machine.delay(delayed[-1])
            machine.delay(delayed[-1])
        elif in_flight:
            group = in_flight.pop(number % len(in_flight))
            if event == "complete":
                assert machine.completed(group), "only what was delayed may be too late"
            else:
                machine.failed(group)
        settle()
    while not machine.finished:
        if in_flight:
            machine.completed(in_flight.pop())
        train()
        settle()
    assert len(shipped) == len(set(shipped)) == 6 * groups
    assert machine.num_in_flight == 0
