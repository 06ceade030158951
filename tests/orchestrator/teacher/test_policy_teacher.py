"""The policy as its own teacher: which version teaches, how long servers keep it, and what it scores."""

import asyncio
from typing import Any

import numpy as np
import pytest

from orchestrator.endpoints import EndpointError
from orchestrator.inference.client import Refused, ServerError, Unreachable
from orchestrator.scheduler import Scheduler
from orchestrator.teacher.policy import PolicyTeacher

IDS = np.array([5, 6, 7], np.int32)


class Servers:
    """Answers once `ready` is set."""

    def __init__(self, error: ServerError | None = None) -> None:
        self.asked: list[Any] = []
        self.ready, self.error = asyncio.Event(), error
        self.ready.set()

    async def score(self, ids: Any, version: int | None, temperature: float, adapter: str | None) -> list[float]:
        self.asked.append((ids, version, temperature, adapter))
        await self.ready.wait()
        if self.error is not None:
            raise self.error
        return [-1.0] * (len(ids) - 1)


def teaching(every: int, *versions: int, servers: Servers | None = None) -> tuple[PolicyTeacher, Scheduler]:
    """After these versions were live."""
    scheduler = Scheduler(
        groups_per_batch=1, max_async_level=1, max_off_policy_steps=1, max_in_flight=1, max_steps=None, shipped=40
    )
    teacher = PolicyTeacher((servers or Servers()).score, every, scheduler, adapters=["a", "b"])
    go_live(teacher, scheduler, *versions)
    return teacher, scheduler


def go_live(teacher: PolicyTeacher, scheduler: Scheduler, *versions: int) -> None:
    for version in versions:
        scheduler.version_live(version)
        teacher.version_live(version)


@pytest.mark.parametrize(
    ("every", "versions", "teaches", "kept"),
    [(3, range(8), 6, {6, 7}), (0, range(8), None, {7}), (3, [0], None, {0}), (5, [17], 15, {15, 17})],
)
def test_the_newest_version_that_every_divides_teaches_and_stays(
    every: int, versions: Any, teaches: int | None, kept: set[int]
) -> None:
    teacher, scheduler = teaching(every, *versions)
    assert (teacher.version, scheduler.needed_versions()) == (teaches, kept)


async def test_a_version_under_which_something_is_being_scored_stays_until_that_is_done() -> None:
    servers = Servers()
    servers.ready.clear()
    teacher, scheduler = teaching(2, *range(3), servers=servers)
    async with asyncio.TaskGroup() as group:
        scoring = [group.create_task(teacher.score(IDS, 1.0)) for _ in range(2)]
        await asyncio.sleep(0)
        go_live(teacher, scheduler, 3, 4)
        assert (teacher.version, scheduler.needed_versions()) == (4, {2, 4})
        servers.ready.set()
    assert [task.result().tolist() for task in scoring] == [[0, -1, -1]] * 2
    assert {version for _, version, *_ in servers.asked} == {2}
    assert scheduler.needed_versions() == {4}


async def test_the_policy_scores_under_the_version_and_the_adapter_that_sampled() -> None:
    servers = Servers()
    teacher, scheduler = teaching(4, 0, servers=servers)
    await teacher.score(IDS, 1.0, adapter=1)
    go_live(teacher, scheduler, *range(1, 5))
    await teacher.score(IDS, 1.5, adapter=1)
    assert servers.asked == [([5, 6, 7], None, 1.0, None), ([5, 6, 7], 4, 1.5, "b")]


@pytest.mark.parametrize(
    ("error", "expected"),
    [(Unreachable("gone"), "unreachable"), (Refused(400, "x", "no"), "refused"), (ServerError("oops"), "error")],
)
async def test_what_the_runs_own_servers_cannot_do_is_a_failure(error: ServerError, expected: str) -> None:
    teacher, _ = teaching(3, *range(4), servers=Servers(error))
    with pytest.raises(EndpointError, match="version 3") as raised:
        await teacher.score(IDS, 1.0)
    assert raised.value.reason == expected
