"""Evaluation: answers of one policy version to held-out prompts, and what they say about it."""

import asyncio
import logging
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from grpo.configs.evaluation import EVAL_PREFIX, EnvSettings
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
    """Accuracy by environment."""
    metrics: Mapping[str, float]
    """One line, told in docs/metrics.md."""
    results: Sequence[EpisodeResult]
    """All answers."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One environment that is evaluated."""

    key: str
    """Its workers' key: the label, or with a prefix where a training environment of the same name is another one."""
    env: EnvSettings


def held_out(settings: OrchSettings) -> list[HeldOut]:
    """Returns the environments that are evaluated. One that is a training environment shares its workers, and one of
    the same name its adapters, unless it gives its own."""
    training, found = {env.label: env for env in settings.env}, []
    for env in (settings.eval.env or settings.env) if settings.eval.num_examples else ():
        same = training.get(env.label)
        if same is not None and not env.adapters:
            env = env.model_copy(update={"adapters": same.adapters})
        is_training = same is not None and env.model_dump(exclude={"name"}) == same.model_dump(exclude={"name"})
        found.append(HeldOut(env.label if is_training else f"{EVAL_PREFIX}{env.label}", env))
    return found


def environments_of(settings: OrchSettings) -> dict[str, EnvSettings]:
    """Returns all environments, those of training and of evaluation, by the key of their workers."""
    return {one.key: one.env for one in held_out(settings)} | {env.label: env for env in settings.env}


def is_due(settings: OrchSettings, version: int, *, passed_over: int | None) -> bool:
    """Returns whether `version` is to be evaluated: before the first step, if `eval_base_model`, at each interval, and
    after the last step. `passed_over` is a version that is not evaluated unless it is the last."""
    if version == 0:
        return settings.eval.eval_base_model
    return version == settings.max_steps or (version != passed_over and version % settings.eval.interval == 0)


async def evaluate(
    engine: RolloutEngine,
    settings: OrchSettings,
    prompts: Mapping[str, Sequence[Messages]],
    *,
    version: int,
) -> Evaluation:
    """Answers every prompt as often as the settings say, in all environments at the same time. `prompts` are those of
    the held-out examples, by the key of their environment.

    Raises what servers and broken environments raise, EnvironmentFailed where all answers of an environment fail,
    which is no accuracy of 0, and ValueError where all its prompts are too long.
    """
    since_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        asked = {
            one.env.label: group.create_task(_answered(engine, settings, one, prompts[one.key], version))
            for one in held_out(settings)
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
    metrics["eval/accuracy"] = statistics.fmean(accuracy.values())
    results = [one for own in answers.values() for of_one in own for one in of_one]
    return Evaluation(version=version, accuracy=accuracy, metrics=metrics, results=results)


Answers = Sequence[Sequence[EpisodeResult]]
"""Answers by example, the same number for each."""


async def _answered(
    engine: RolloutEngine, settings: OrchSettings, asked: HeldOut, prompts: Sequence[Messages], version: int
) -> tuple[Answers, float]:
    """Returns the answers, and the seconds from the first question to the last answer. Seeds do not depend on the
    version."""
    env, num, since_s = asked.key, settings.eval.rollouts_per_example, time.monotonic()
    temperature = settings.eval.sampling.temperature
    seed = settings.sampling.seed if temperature > 0 else None
    slots = asyncio.Semaphore(max(1, CONCURRENCY // num))

    async def ask(index: int, messages: Messages) -> Sequence[EpisodeResult]:
        group = Group(
            task=Task(env=env, split="eval", index=index, messages=messages),
            id=f"eval-{version}/{env}/{index}",
            num=num,
            version=version,
            params=SamplingParams(temperature=temperature, max_tokens=settings.longest_held_out),
            adapters=RoleAdapters(names=settings.model.lora_adapters, of_roles=asked.env.adapters),
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
