"""Evaluation: greedy answers of one policy version to held-out prompts."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.episodes.arena import Arena, PromptTooLong
from orchestrator.episodes.episode import Episode, GenerateResult
from orchestrator.episodes.types import Messages, Task

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
    """Answers every prompt once. Raises what servers and broken environments raise."""
    since_s, slots = time.monotonic(), asyncio.Semaphore(CONCURRENCY)

    async def one(task: Task) -> GenerateResult | None:
        async with slots:
            group = f"eval-{version}/{task.env}/{task.index}"
            try:
                [result] = await episode.generate(arena, task, group=group, num=1, version=version)
            except PromptTooLong:
                return None
        return result if isinstance(result, GenerateResult) else None

    async with asyncio.TaskGroup() as group:
        asked = {
            env: [
                group.create_task(one(Task(env=env, split="eval", index=index, messages=messages)))
                for index, messages in enumerate(messages_of)
            ]
            for env, messages_of in prompts.items()
        }
    answers = {env: [task.result() for task in tasks] for env, tasks in asked.items()}
    scored = [result for results in answers.values() for result in results if result is not None]
    return Evaluation(
        version=version,
        accuracy={
            env.removeprefix("eval:"): sum(result.score.accuracy for result in results if result) / len(results)
            for env, results in answers.items()
        },
        num_failed=sum(result is None for results in answers.values() for result in results),
        num_tokens=sum(result.rollout.num_sampled_tokens for result in scored),
        seconds=time.monotonic() - since_s,
    )
