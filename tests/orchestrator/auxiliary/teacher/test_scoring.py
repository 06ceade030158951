"""What servers answer as log-probabilities of tokens, and the way of these into samples."""

from typing import Any

import numpy as np
import pytest
from grpo.orchestrator.auxiliary.teacher.scoring import ReferenceTeacher, Teaching, checked
from grpo.orchestrator.endpoints import EndpointError
from grpo.orchestrator.inference.client import Refused, ServerError, ServersAway, TimedOut, Unreachable
from grpo.transport.records import Float32, Int32, TrainingSample

from tests.orchestrator import made

IDS = np.array([5, 6, 7], np.int32)


@pytest.mark.parametrize(
    "logprobs", [[-0.5], [-0.5, float("nan")], [-0.5, None], [-0.5, -9999.0], [-0.5, 0.01], [-0.5, -0.5, -0.5]]
)
def test_what_are_no_log_probabilities_of_the_tokens_is_refused(logprobs: list[float | None]) -> None:
    with pytest.raises(EndpointError):
        checked(logprobs, len(IDS))


def test_what_rounding_brings_above_0_is_0() -> None:
    assert checked([-0.5, 1e-4], len(IDS)).tolist() == [0, -0.5, 0]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Unreachable("gone"), "unreachable"),
        (ServersAway("none"), "unreachable"),
        (TimedOut("late"), "timeout"),
        (Refused(400, "x", "no"), "refused"),
        (ServerError("oops"), "error"),
    ],
)
async def test_what_the_runs_own_servers_cannot_do_costs_a_rollout(error: ServerError, expected: str) -> None:
    async def score(*question: Any) -> list[float]:
        raise error

    with pytest.raises(EndpointError) as raised:
        await ReferenceTeacher(score).score(IDS, 1.0)
    assert raised.value.reason == expected


class Tokens:
    """A token's log-probability is -token · temperature / 10; it does not score what ends with 0."""

    name, num_requests = "tokens", 0

    async def score(self, token_ids: Int32, temperature: float) -> Float32:
        self.num_requests += 1
        if token_ids[-1] == 0:
            raise EndpointError("timeout", "no")
        return (-token_ids * temperature / 10).astype(np.float32)


def sample(rollout: str, *tokens: int, temperatures: Any = 1.0) -> TrainingSample:
    return made.sample(rollout, tokens, temperatures=temperatures)


async def test_each_loss_token_is_scored_at_its_own_temperature_and_equal_rows_once() -> None:
    teacher = Tokens()
    teaching = Teaching(teacher)
    mixed = np.array([1, 1, 2], np.float32)
    taught, _ = await teaching.teach([sample("a", 9, 1, 2, temperatures=mixed), sample("b", 9, 3), sample("c", 9, 3)])
    logprobs = [one.teacher_logprobs.tolist() for one in taught if one.teacher_logprobs is not None]
    assert logprobs == [pytest.approx([0, -0.1, -0.4]), pytest.approx([0, -0.3]), pytest.approx([0, -0.3])]
    assert teacher.num_requests == 3
    names = {"rows": 4, "tokens": 8, "tokens_left_out": 0, "requests": 3, "failed": 0}
    assert teaching.metrics() == {f"teacher/{name}": num for name, num in names.items()}
    assert teaching.metrics()["teacher/rows"] == 0


async def test_a_rollout_of_which_a_sample_has_no_scores_is_withheld_as_a_whole() -> None:
    teaching = Teaching(Tokens())
    taught, failed = await teaching.teach([sample("a", 9, 1), sample("a", 9, 0), sample("b", 9, 1)])
    assert [one.rollout_id for one in taught] == ["b"]
    assert {name: failure.reason for name, failure in failed.items()} == {"a": "timeout"}
    assert teaching.metrics()["teacher/failed_timeout"] == 1
