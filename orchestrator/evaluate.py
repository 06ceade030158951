"""Evaluation: greedy answers of one policy version to held-out prompts."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from configs.orch import EVAL_PREFIX
from orchestrator.episodes.arena import Arena, PromptTooLong
from orchestrator.episodes.episode import Episode, GenerateResult
from orchestrator.episodes.types import Failure, Messages, Task
from orchestrator.workers.failures import EnvironmentFailed

log = logging.getLogger(__name__)

TOO_LONG = "prompt_too_long"
CONCURRENCY = 128
"""Answers asked for at once; leaves servers room for rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What one version can do. Example: ``Evaluation(version=8, accuracy={"reverse-text": 0.93}, ...)``"""

    version: int
    accuracy: Mapping[str, float]
    """Mean of the rubric's accuracy by environment; an answer that could not be scored counts as wrong."""
    num_failed: int
    """Answers that could not be scored, and prompts without room for an answer."""
    num_tokens: int
    """Tokens sampled."""
    seconds: float

    def metrics(self) -> dict[str, float]:
        """One line of metrics."""
        metrics = {f"eval/accuracy/{env}": value for env, value in self.accuracy.items()}
        return metrics | {
            "eval/accuracy": self.mean_accuracy,
            "eval/failed": float(self.num_failed),
            "time/evaluate_s": self.seconds,
            "progress/step": float(self.version),
        }

    @property
    def mean_accuracy(self) -> float:
        """Over environments."""
        return sum(self.accuracy.values()) / len(self.accuracy)


async def evaluate(
    arena: Arena, episode: Episode, prompts: Mapping[str, Sequence[Messages]], *, version: int
) -> Evaluation:
    """Answers every prompt once. Raises what servers and broken environments raise, EnvironmentFailed where all
    answers of an environment fail, which is no accuracy of 0, and ValueError where all its prompts are too long."""
    since_s, slots = time.monotonic(), asyncio.Semaphore(CONCURRENCY)

    async def one(task: Task) -> GenerateResult | Failure:
        async with slots:
            group = f"eval-{version}/{task.env}/{task.index}"
            try:
                [result] = await episode.generate(arena, task, group=group, num=1, version=version)
            except PromptTooLong as error:
                return Failure(reason=TOO_LONG, message=str(error))
        return result if isinstance(result, GenerateResult) else result.failure

    async with asyncio.TaskGroup() as group:
        asked = {
            env: [
                group.create_task(one(Task(env=env, split="eval", index=index, messages=messages)))
                for index, messages in enumerate(messages_of)
            ]
            for env, messages_of in prompts.items()
        }
    answers = {env: [task.result() for task in tasks] for env, tasks in asked.items()}
    num_failed = sum(_num_failed(env, results, version) for env, results in answers.items())
    scored = {env: [one for one in results if isinstance(one, GenerateResult)] for env, results in answers.items()}
    return Evaluation(
        version=version,
        accuracy={
            env.removeprefix(EVAL_PREFIX): sum(result.score.accuracy for result in results) / len(answers[env])
            for env, results in scored.items()
        },
        num_failed=num_failed,
        num_tokens=sum(result.rollout.num_sampled_tokens for results in scored.values() for result in results),
        seconds=time.monotonic() - since_s,
    )


def _num_failed(env: str, results: Sequence[GenerateResult | Failure], version: int) -> int:
    """Raises EnvironmentFailed where all are, or ValueError where all prompts are too long."""
    failures = [result for result in results if isinstance(result, Failure)]
    reasons = Counter(failure.reason for failure in failures)
    if reasons[TOO_LONG] == len(results):
        raise ValueError(f"all {len(results)} held-out prompts of {env} are too long: {failures[-1].message}")
    if len(failures) == len(results):
        raise EnvironmentFailed(
            f"environment {env}: all {len(failures)} answers of the evaluation of version {version} failed; "
            f"the last one ({failures[-1].reason}): {failures[-1].message}"
        )
    for reason, num in reasons.items():
        log.warning("environment %s: %d answers of the evaluation count as wrong (%s)", env, num, reason)
    return len(failures)
