"""Evaluation: answers of one policy version to held-out prompts, and what they say about it."""

import asyncio
import logging
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from grpo.configs.evaluation import HeldOut
from grpo.configs.orch import OrchSettings
from grpo.orchestrator.rollouts.engine import PromptTooLong, RolloutEngine
from grpo.orchestrator.rollouts.records import EpisodeResult, Group, Messages, SamplingParams, Task
from grpo.orchestrator.rollouts.roles import RoleAdapters
from grpo.orchestrator.seeds import group_seed
from grpo.orchestrator.workers.failures import EnvironmentFailed
from grpo.transport.errors import UserError

log = logging.getLogger(__name__)

TOO_LONG = "prompt_too_long"
CONCURRENCY = 128
"""Answers asked for at once in one environment; leaves servers room for rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Result of evaluating one version. Example: ``Evaluation(version=8, accuracy={"reverse-text": 0.5},
    metrics={...})``"""

    version: int
    accuracy: Mapping[str, float]
    """Accuracy by environment, for the environments that were due."""
    metrics: Mapping[str, float]
    """One line, told in docs/metrics.md."""
    results: Sequence[EpisodeResult]
    """All answers."""


def due(settings: OrchSettings, version: int, *, passed_over: int | None) -> list[HeldOut]:
    """Returns the environments that `version` is to be evaluated on: all of them before the first step, if
    `eval_base_model`, and after the last one. `passed_over`: a version that is not evaluated unless it is the last."""
    if version == 0:
        return settings.held_out if settings.eval.eval_base_model else []
    if version == settings.max_steps:
        return settings.held_out
    return [one for one in settings.held_out if version != passed_over and version % one.interval == 0]


async def evaluate(
    engine: RolloutEngine,
    settings: OrchSettings,
    prompts: Mapping[str, Sequence[Messages]],
    *,
    version: int,
    held_out: Sequence[HeldOut] | None = None,
) -> Evaluation:
    """Answers every prompt as often as the settings say, in all environments at the same time. `prompts`: of the
    held-out examples, by environment. `held_out`: None for all environments; the mean over them is left out where some
    are not due, because it would be the mean of other things.

    Raises what servers and broken environments raise, EnvironmentFailed where all answers of an environment fail,
    which is no accuracy of 0, and ValueError where all its prompts are too long.
    """
    chosen = settings.held_out if held_out is None else held_out
    since_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        asked = {
            one.label: group.create_task(_answered(engine, settings, one, prompts[one.key], version)) for one in chosen
        }
    answers = {env: task.result()[0] for env, task in asked.items()}
    metrics = {
        "eval/failed": float(sum(one.failure is not None for own in answers.values() for of in own for one in of)),
        "eval/num_tokens": float(sum(one.num_tokens for own in answers.values() for of in own for one in of)),
        "time/evaluate_s": time.monotonic() - since_s,
        "progress/step": float(version),
    }
    for env, task in asked.items():
        own, seconds = task.result()
        metrics |= {f"{name}/{env}": value for name, value in figures_of(own).items()}
        metrics[f"time/evaluate_s/{env}"] = seconds
    accuracy = {env: metrics[f"eval/accuracy/{env}"] for env in asked}
    if len(chosen) == len(settings.held_out):
        metrics["eval/accuracy"] = statistics.fmean(accuracy.values())
    results = [one for own in answers.values() for of_one in own for one in of_one]
    return Evaluation(version=version, accuracy=accuracy, metrics=metrics, results=results)


Answers = Sequence[Sequence[EpisodeResult]]
"""Answers by example, the same number for each."""


async def _answered(
    engine: RolloutEngine, settings: OrchSettings, asked: HeldOut, prompts: Sequence[Messages], version: int
) -> tuple[Answers, float]:
    """With the seconds from the first question to the last answer. Seeds do not depend on the version."""
    env, num, since_s = asked.key, asked.rollouts_per_example, time.monotonic()
    seed = settings.sampling.seed if asked.temperature > 0 else None
    slots = asyncio.Semaphore(max(1, CONCURRENCY // num))

    async def ask(index: int, messages: Messages) -> Sequence[EpisodeResult]:
        group = Group(
            task=Task(env=env, split="eval", index=index, messages=messages),
            id=f"eval-{version}/{env}/{index}",
            num=num,
            version=version,
            params=SamplingParams(temperature=asked.temperature, max_tokens=asked.max_tokens),
            adapters=RoleAdapters(names=settings.model.lora_adapters, of_roles=asked.adapters),
            seed=group_seed(seed, f"eval/{env}/{index}"),
        )
        async with slots:
            try:
                return await engine.run_group(group)
            except PromptTooLong as error:
                return group.failed(TOO_LONG, str(error))

    async with asyncio.TaskGroup() as asking:
        tasks = [asking.create_task(ask(index, messages)) for index, messages in enumerate(prompts)]
    answers = [task.result() for task in tasks]
    _check(env, answers, version)
    return answers, time.monotonic() - since_s


def _check(env: str, answers: Answers, version: int) -> None:
    """Raises EnvironmentFailed where all answers failed, or UserError where all prompts are too long."""
    failures = [answer.failure for of_one in answers for answer in of_one if answer.failure is not None]
    num, reasons = sum(len(of_one) for of_one in answers), Counter(failure.reason for failure in failures)
    if reasons[TOO_LONG] == num:
        raise UserError(f"all {len(answers)} held-out prompts of {env} are too long: {failures[-1].message}")
    if len(failures) == num:
        raise EnvironmentFailed(
            f"environment {env}: all {num} answers of the evaluation of version {version} failed; "
            f"the last one ({failures[-1].reason}): {failures[-1].message}"
        )
    for reason, times in reasons.items():
        log.warning("environment %s: %d answers of the evaluation count as wrong (%s)", env, times, reason)


def figures_of(answers: Answers) -> dict[str, float]:
    """Returns the metrics of one version in one environment, by the metric's name without the environment's. Means are
    over examples, of the means of each example's answers, and standard errors are those of a draw of examples. An
    answer that could not be scored counts as wrong; at least one could."""
    [num] = {len(of_one) for of_one in answers}
    accuracies = [statistics.fmean(map(_accuracy, of_one)) for of_one in answers]
    scored = [[one for one in of_one if one.failure is None] for of_one in answers]
    rewards = [statistics.fmean(one.reward for one in of_one) for of_one in scored if of_one]
    asked = [one for of_one in answers for one in of_one if one.failure is None or one.failure.reason != TOO_LONG]
    num_right = [sum(_accuracy(answer) >= 1 for answer in of_one) for of_one in answers]
    figures = {
        "eval/accuracy": statistics.fmean(accuracies),
        "eval/reward": statistics.fmean(rewards),
        "eval/num_tokens_mean": statistics.fmean(one.num_tokens for one in asked),
        "eval/truncated": statistics.fmean(one.truncated for one in asked),
        "eval/failed": float(sum(one.failure is not None for of_one in answers for one in of_one)),
    }
    for name, values in (("accuracy", accuracies), ("reward", rewards)):
        if len(values) > 1:
            figures[f"eval/{name}_stderr"] = statistics.stdev(values) / math.sqrt(len(values))
    for k in ks_of(num):
        figures[f"eval/pass@{k}"] = statistics.fmean(pass_at_k(num, right, k) for right in num_right)
    measures: dict[str, list[float]] = defaultdict(list)
    for one in (one for of_one in scored for root in of_one for one in root.walk()):
        for name, value in one.metrics.items():
            measures[f"eval/measure/{name}"].append(value)
    return figures | {name: statistics.fmean(values) for name, values in measures.items()}


def _accuracy(answer: EpisodeResult) -> float:
    return answer.accuracy if answer.failure is None else 0.0


def ks_of(num: int) -> Iterator[int]:
    """The k for which pass@k is reported: 1, 2, 4 and so on up to `num`, and `num`; none where that is 1."""
    if num > 1:
        yield from (2**power for power in range(num.bit_length()) if 2**power < num)
        yield num


def pass_at_k(num: int, num_right: int, k: int) -> float:
    """The chance that one of k answers, drawn without replacement from `num` of which `num_right` are right, is right:
    1 - C(n - c, k) / C(n, k), the unbiased estimator of Chen et al. (2021), arXiv:2107.03374."""
    return 1 - math.comb(num - num_right, k) / math.comb(num, k)
