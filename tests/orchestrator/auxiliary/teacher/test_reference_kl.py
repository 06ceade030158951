"""The KL to the model before training as a term of the reward, with numbers worked by hand."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from aiohttp import web
from grpo.configs.rollouts import RewardShapingSettings
from grpo.orchestrator.auxiliary.teacher.reference_kl import ReferenceKl, kl_estimates
from grpo.orchestrator.auxiliary.teacher.scoring import Scoring
from grpo.orchestrator.endpoints import EndpointError
from grpo.orchestrator.monitoring.metrics import Figures
from grpo.orchestrator.samples import ScoredGroup
from grpo.transport.records import Float32, Int32

from tests.orchestrator.fakes import FakeServer
from tests.orchestrator.questions import result
from tests.orchestrator.running import run


@pytest.mark.parametrize(
    ("estimator", "expected"),
    # d = -1 - -2 = 1 and -1 - -0.5 = -0.5: d² / 2 = 0.5 and 0.125; exp(-1) - 1 + 1 and exp(0.5) - 1 - 0.5.
    [("k1", [1, -0.5]), ("k2", [0.5, 0.125]), ("k3", [math.exp(-1), math.exp(0.5) - 1.5])],
)
def test_estimates_of_the_kl(estimator: Any, expected: list[float]) -> None:
    policy, reference = np.array([-1, -1], np.float32), np.array([-2, -0.5], np.float32)
    assert kl_estimates(policy, reference, estimator).tolist() == pytest.approx(expected)


class Reference:
    """A token's log-probability is -0.7; it does not score what ends with `unscored`."""

    name, num_requests = "reference", 0

    def __init__(self, unscored: Sequence[int] = ()) -> None:
        self.unscored = list(unscored)

    async def score(self, token_ids: Int32, temperature: float) -> Float32:
        if self.unscored and token_ids[-len(self.unscored) :].tolist() == self.unscored:
            raise EndpointError("timeout", "no")
        return np.full(len(token_ids), -0.7, np.float32)


async def test_the_kl_is_taken_off_the_rewards_that_credit_sees() -> None:
    # The policy sampled each token with -0.5, the reference has -0.7: k1 is 0.2 a token, of 4 and 5 tokens.
    group = ScoredGroup([result("0/0", "q", "abc", reward=1.0), result("0/1", "q", "abcd", reward=0.0)])
    term = ReferenceKl(RewardShapingSettings(reference_kl=0.1), Scoring(Reference()))
    await term.before_credit(group)
    assert [one.reward for one in group.credited] == pytest.approx([1 - 0.1 * 0.8, -0.1 * 1.0])
    assert [one.reward for one in group.results] == [1.0, 0.0]
    assert term.figures().since(Figures())["reward/reference_kl_penalty"] == pytest.approx(-0.09)


async def test_a_rollout_that_the_reference_does_not_score_is_dropped_with_its_reason() -> None:
    group = ScoredGroup([result("0/0", "q", "abc"), result("0/1", "q", "abd")])
    unscored = group.results[1].rows[0].token_ids[-2:].tolist()
    await ReferenceKl(RewardShapingSettings(reference_kl=0.1), Scoring(Reference(unscored))).before_credit(group)
    assert ([one.id for one in group.credited], group.dropped) == (["0/0"], {"0/1": "reference_timeout"})


class RefusesOnce(FakeServer):
    """Refuses the first request for log-probabilities."""

    async def _score(self, request: web.Request) -> web.Response:
        if self.num_refused == 0:
            self.num_refused += 1
            return web.json_response({"error": {"type": "bad_request", "message": "no"}}, status=400)
        return await super()._score(request)

    num_refused = 0


async def test_a_run_with_the_kl_in_the_reward_traces_what_was_not_scored(tmp_path: Path) -> None:
    answers = itertools.cycle(["a", "b", "ab", "ba"])  # four in each group, of which one is refused
    server = await RefusesOnce(lambda prompt, version: next(answers)).start()
    shaped = {"reference_kl": 0.5, "reference_kl_estimator": "k2"}
    made = await run(tmp_path, server, reward_shaping=shaped, eval={"num_examples": 0})
    await server.stop()
    assert {body["version"] for body in server.scores} == {None}
    assert all(batch.teacher_logprobs is None for batches in made.batches.values() for batch in batches)
    assert all(line["reward/reference_kl_penalty"] < 0 for line in made.steps)
    [(reason, num)] = made.summary.rollouts_dropped.items()
    assert reason == "reference_refused"
    reasons = [
        one for path in (tmp_path / "traces").glob("step_*") for one in pq.read_table(path)["drop_reason"].to_pylist()
    ]
    assert reasons.count(reason) == num
