"""The policy as it was, as its own teacher."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from orchestrator.client import Refused, ServerError, Unreachable
from orchestrator.teachers.policy import PolicyTeacher
from orchestrator.teachers.scoring import Scored, TeacherClient, TeacherFailure
from transport.records import Int32


def ids(*tokens: int) -> Int32:
    return np.array(tokens, np.int32)


class Servers:
    """The run's own: a token's log-probability is -token / 100 · temperature; `error` is raised instead."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int | None, float]] = []
        self.adapters: list[str | None] = []
        self.error: Exception | None = None
        self.version: int | None = 20
        self.answer: list[float] | None = None

    async def score(
        self, token_ids: Sequence[int], version: int | None, temperature: float, adapter: str | None
    ) -> list[float]:
        self.asked.append((list(token_ids), version, temperature))
        self.adapters.append(adapter)
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return self.answer or [-token / 100 * temperature for token in token_ids[1:]]


@pytest.fixture
def servers() -> Servers:
    return Servers()


def teacher(servers: Servers) -> PolicyTeacher:
    return PolicyTeacher(servers.score, lambda: servers.version)


async def failure(servers: Servers) -> TeacherFailure:
    by = teacher(servers)
    [found] = await by.score([ids(5, 6, 7)], [1.0])
    assert isinstance(found, TeacherFailure)
    assert by.counts.failed == Counter({found.reason: 1})
    return found


def values(scored: Sequence[Scored]) -> list[Any]:
    return [pytest.approx(one.tolist()) for one in scored if isinstance(one, np.ndarray)]


async def test_rows_are_scored_under_the_version_that_teaches(servers: Servers) -> None:
    by: TeacherClient = teacher(servers)
    found = await by.score([ids(5, 6, 7), ids(5, 8)], [1.0, 0.5])
    assert values(found) == [[0, -0.06, -0.07], [0, -0.04]]
    assert servers.asked == [([5, 8], 20, 0.5), ([5, 6, 7], 20, 1.0)]
    assert by.metrics() == {
        "teacher/rows": 2,
        "teacher/tokens": 5,
        "teacher/requests": 2,
        "teacher/retries": 0,
        "teacher/failed": 0,
    }


async def test_equal_rows_cost_one_request_and_beginnings_none(servers: Servers) -> None:
    found = await teacher(servers).score([ids(5, 6), ids(5, 6, 7), ids(5, 6, 7)], [1.0] * 3)
    assert [len(one) for one in found if isinstance(one, np.ndarray)] == [2, 3, 3]
    assert servers.asked == [([5, 6, 7], 20, 1.0)]


async def test_all_rows_of_a_call_are_scored_under_one_version(servers: Servers) -> None:
    scoring = asyncio.create_task(teacher(servers).score([ids(5, n) for n in range(3)], [1.0] * 3))
    await asyncio.sleep(0)
    servers.version = 40
    await scoring
    assert {version for _, version, _ in servers.asked} == {20}


async def test_what_an_adapter_sampled_is_scored_under_the_same_one_as_it_was(servers: Servers) -> None:
    by = PolicyTeacher(servers.score, lambda: servers.version, adapters=("solver", "proposer"))
    await by.score([ids(5, 6)], [1.0])
    await by.score([ids(5, 6)], [1.0], adapter=1)
    servers.version = None
    await by.score([ids(5, 6)], [1.0], adapter=1)
    assert servers.adapters == ["solver", "proposer", None]


def test_it_says_which_version_teaches(servers: Servers) -> None:
    by = teacher(servers)
    assert by.name == "the teacher, which is the policy's version 20"
    servers.version = None
    assert by.name == "the teacher, which is the base model"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Unreachable("http://a: connection refused"), "down"),
        (Refused(404, "not_live", "http://a answered 404: version 20 is not live"), "refused"),
        (Refused(400, "bad_request", "http://a answered 400: unknown field `temperature`"), "temperature"),
        (ServerError("no inference server was in service"), "error"),
    ],
)
async def test_what_servers_cannot_do_is_a_failure_with_its_reason(
    servers: Servers, error: ServerError, reason: str
) -> None:
    servers.error = error
    found = await failure(servers)
    assert found.reason == reason
    assert found.message == f"the teacher, which is the policy's version 20: {error}"


@pytest.mark.parametrize(
    ("answer", "reason", "message"),
    [
        ([-0.1], "other_tokens", "it answered about 2 tokens, expected 3"),
        ([-0.1, float("nan")], "not_finite", "is one that is not finite"),
        ([-0.1, 3.0], "not_finite", "is 3, expected at most 0"),
    ],
)
async def test_what_is_no_log_probability_is_a_failure(
    servers: Servers, answer: list[float], reason: str, message: str
) -> None:
    servers.answer = answer
    found = await failure(servers)
    assert found.reason == reason
    assert message in found.message


async def test_what_is_no_fault_of_the_servers_is_not_caught(servers: Servers) -> None:
    servers.error = KeyError("ours")
    with pytest.raises(KeyError):
        await teacher(servers).score([ids(5, 6)], [1.0])
