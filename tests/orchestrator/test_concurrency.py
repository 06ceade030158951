"""The limit of rollouts in flight, stepped by hand and against a server of a few lines."""

import pytest

from orchestrator.concurrency import Concurrency
from transport.http import ServerLoad

FREE = ServerLoad(num_running=20, num_waiting=2, kv_use=0.5)
QUEUES = ServerLoad(num_running=20, num_waiting=3, kv_use=0.5)
FULL = ServerLoad(num_running=20, num_waiting=0, kv_use=0.95)


def test_the_limit_grows_by_a_twentieth_and_at_least_by_one_while_it_holds_rollouts_back() -> None:
    control = Concurrency(least=10, most=1000)
    # 10 + 1, + 1, …: 20 after ten rounds; 100 · 1.05 = 105.
    assert [control.observe([FREE], num_in_flight=10 + n) for n in range(10)] == list(range(11, 21))
    larger = Concurrency(least=100, most=1000)
    assert larger.observe([FREE], num_in_flight=100) == 105


def test_a_limit_that_is_not_reached_does_not_grow() -> None:
    assert Concurrency(least=10, most=1000).observe([FREE], num_in_flight=9) == 10


@pytest.mark.parametrize("crowded", [QUEUES, FULL])
def test_one_crowded_server_is_enough_to_shrink_the_limit(crowded: ServerLoad) -> None:
    control = Concurrency(least=10, most=1000)
    for _ in range(100):
        control.observe([FREE], num_in_flight=1000)
    # 1000 · 0.85 = 850, and again 722.5.
    assert [control.observe([FREE, crowded], num_in_flight=1000) for _ in range(2)] == [850, 722]


def test_the_limit_stays_between_its_bounds() -> None:
    control = Concurrency(least=10, most=12)
    assert [control.observe([FREE], num_in_flight=12) for _ in range(4)] == [11, 12, 12, 12]
    assert [control.observe([FULL], num_in_flight=12) for _ in range(3)] == [10, 10, 10]


def test_bounds_that_leave_nothing_are_an_error() -> None:
    for least, most in ((0, 5), (6, 5)):
        with pytest.raises(ValueError, match=f"{least}"):
            Concurrency(least=least, most=most)


@pytest.mark.parametrize("places", [24, 300])
def test_the_limit_finds_what_two_servers_can_take_and_stays_there(places: int) -> None:
    control, limits = Concurrency(least=8, most=10_000), []
    for _ in range(300):
        each = control.limit / 2
        running = min(places, round(each))
        load = ServerLoad(num_running=running, num_waiting=max(0, round(each) - places), kv_use=0.9 * running / places)
        limits.append(control.observe([load, load], num_in_flight=control.limit))
    settled = limits[100:]
    # At least 0.85 of all places are used, and at most a tenth and one step more than there are is asked.
    assert min(settled) >= 0.85 * 2 * places
    assert max(settled) <= 1.17 * 2 * places
