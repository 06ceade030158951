"""What servers answer as log-probabilities of tokens, and the way of these into samples."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from grpo.orchestrator.advantage import group_credit
from grpo.orchestrator.auxiliary.teacher.distillation import Distillation
from grpo.orchestrator.auxiliary.teacher.scoring import ReferenceTeacher, Scoring, checked
from grpo.orchestrator.endpoints import EndpointError
from grpo.orchestrator.inference.client import RequestRefused, ServerError, ServersAway, TimedOut, Unreachable
from grpo.orchestrator.rollouts.records import EpisodeResult, Step, TrainingRow, Turn
from grpo.orchestrator.samples import ScoredGroup, add_samples
from grpo.transport.records import Float32, Int32

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
        (RequestRefused(400, "x", "no"), "refused"),
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


def rollout(name: str, *rows: Sequence[int], temperatures: Sequence[float] = (1.0, 1.0)) -> EpisodeResult:
    """Rows of a prompt of one token and a turn for each of the others, at these temperatures."""
    steps, built = list[Step](), list[TrainingRow]()
    for ids in rows:
        first = len(steps)
        steps += [made.step(ids=[one], temperature=at) for one, at in zip(ids[1:], temperatures, strict=False)]
        places = range(1, len(ids))
        turns = [Turn(index=n - 1, opens=n, begins=n, ends=n + 1, finish_reason="stop") for n in places]
        built.append(
            TrainingRow(
                token_ids=np.array(ids, np.int32),
                sampled=np.arange(len(ids)) > 0,
                logprobs=np.zeros(len(ids), np.float32),
                temperatures=np.ones(len(ids), np.float32),
                versions=((0, len(ids)),),
                turns=tuple(turns),
                steps=tuple(range(first, len(steps))),
            )
        )
    return made.result(name, *steps, rows=tuple(built))


async def test_each_sampled_token_is_scored_at_its_own_temperature_and_equal_rows_once() -> None:
    teacher = Tokens()
    scoring = Scoring(teacher)
    group = [rollout("0/0", [9, 1, 2], temperatures=[1.0, 2.0]), rollout("0/1", [9, 3]), rollout("0/2", [9, 3])]
    scored, _ = await scoring.score(group)
    assert {key: logprobs.tolist() for key, logprobs in scored.items()} == {
        ("0/0", 0): pytest.approx([0, -0.1, -0.4]),
        ("0/1", 0): pytest.approx([0, -0.3]),
        ("0/2", 0): pytest.approx([0, -0.3]),
    }
    assert teacher.num_requests == 3
    names = {"rows": 4, "tokens": 8, "tokens_left_out": 0, "requests": 3, "failed": 0}
    assert scoring.figures().counts == {f"teacher/{name}": num for name, num in names.items()}


async def test_a_rollout_of_which_a_row_has_no_scores_is_withheld_as_a_whole() -> None:
    scoring = Scoring(Tokens())
    group = ScoredGroup([rollout("0/0", [9, 1], [9, 0]), rollout("0/1", [9, 1]), rollout("0/2", [9, 0])])
    group.withheld["0/2"] = "gibberish"
    await Distillation(scoring).before_credit(group)
    assert group.withheld == {"0/0": "teacher_timeout", "0/2": "gibberish"}
    add_samples(group, group_credit, number="0")
    [sample] = group.samples
    assert (sample.rollout_id, sample.teacher_logprobs.tolist()) == ("0/1", [0, pytest.approx(-0.1)])
    assert scoring.figures().counts["teacher/failed_timeout"] == 1


async def test_a_hook_names_whom_groups_wait_for() -> None:
    seen = []

    class Watched(Tokens):
        async def score(self, token_ids: Int32, temperature: float) -> Float32:
            seen.append(hook.waits_for)
            return await super().score(token_ids, temperature)

    hook = Distillation(Scoring(Watched()))
    await hook.before_credit(ScoredGroup([rollout("0/0", [9, 1])]))
    assert (seen, hook.waits_for) == (["tokens"], None)
