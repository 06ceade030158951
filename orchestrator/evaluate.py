"""Evaluation: answers of one policy version to held-out prompts, and what they say about it."""

import asyncio
import logging
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from configs.evaluation import HeldOut
from orchestrator.rollouts.engine import Group, RolloutEngine
from orchestrator.rollouts.policy import PromptTooLong
from orchestrator.rollouts.records import EpisodeResult, Failure, Messages, SamplingParams, Task
from orchestrator.rollouts.roles import SHARED_ADAPTER, RoleAdapters
from orchestrator.workers.failures import EnvironmentFailed

log = logging.getLogger(__name__)

TOO_LONG = "prompt_too_long"
MEASURE = "eval/measure/"
"""Before the names of what rubrics measure, in metrics."""
CONCURRENCY = 128
"""Answers asked for at once; leaves servers room for rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """One environment's held-out prompts, and how they are answered."""

    held_out: HeldOut
    prompts: Sequence[Messages]
    params: SamplingParams
    adapters: RoleAdapters = SHARED_ADAPTER


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one version can do in one environment. Means are over examples, of the means of each example's answers, and
    standard errors are those of a draw of examples.

    Example: ``Figures(accuracy=0.5, accuracy_stderr=0.05, pass_at={1: 0.5, 2: 0.7, 4: 0.8}, ...)``
    """

    accuracy: float
    """The rubric's accuracy; an answer that could not be scored counts as wrong."""
    accuracy_stderr: float | None
    """None with a single example."""
    reward: float
    """Of the answers that could be scored."""
    reward_stderr: float | None
    """None with a single example."""
    pass_at: Mapping[int, float]
    """By k, the chance that one of k answers to a prompt has an accuracy of 1; empty with one answer a prompt."""
    measures: Mapping[str, float]
    """Of the answers that could be scored, what the rubric measured, by name."""
    num_tokens_mean: float
    """Tokens of an answer."""
    truncated: float
    """Share of answers that ran into their limit."""
    num_failed: int
    """Answers that could not be scored, and those to prompts without room for an answer."""
    num_tokens: int
    """Tokens sampled."""
    seconds: float
    """From the first question to the last answer; the environments of one evaluation are asked at the same time."""

    def metrics(self, env: str) -> dict[str, float]:
        """Under the name `env`."""
        metrics = {
            f"eval/accuracy/{env}": self.accuracy,
            f"eval/accuracy_stderr/{env}": self.accuracy_stderr,
            f"eval/reward/{env}": self.reward,
            f"eval/reward_stderr/{env}": self.reward_stderr,
            f"eval/num_tokens_mean/{env}": self.num_tokens_mean,
            f"eval/truncated/{env}": self.truncated,
            f"eval/failed/{env}": float(self.num_failed),
            f"time/evaluate_s/{env}": self.seconds,
        }
        measures = {f"{MEASURE}{name}/{env}": value for name, value in self.measures.items()}
        passes = {f"eval/pass@{k}/{env}": value for k, value in self.pass_at.items()}
        return {key: value for key, value in metrics.items() if value is not None} | measures | passes


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What one version can do. Example: ``Evaluation(version=8, figures={"reverse-text": Figures(...)}, ...)``"""

    version: int
    figures: Mapping[str, Figures]
    """By environment, of those that were due."""
    complete: bool
    """Whether all environments were due."""
    seconds: float

    def metrics(self) -> dict[str, float]:
        """One line of metrics. The mean over environments is left out where not all were due: at other versions it
        would be the mean of other things."""
        metrics = {key: value for env, one in self.figures.items() for key, value in one.metrics(env).items()}
        if self.complete:
            metrics["eval/accuracy"] = self.mean_accuracy
        return metrics | {
            "eval/failed": float(self.num_failed),
            "eval/num_tokens": float(self.num_tokens),
            "time/evaluate_s": self.seconds,
            "progress/step": float(self.version),
        }

    @property
    def accuracy(self) -> dict[str, float]:
        """By environment."""
        return {env: one.accuracy for env, one in self.figures.items()}

    @property
    def mean_accuracy(self) -> float:
        """Over environments."""
        return statistics.fmean(self.accuracy.values())

    @property
    def num_failed(self) -> int:
        """As in Figures, of all environments."""
        return sum(one.num_failed for one in self.figures.values())

    @property
    def num_tokens(self) -> int:
        """Tokens sampled."""
        return sum(one.num_tokens for one in self.figures.values())


def due(
    suites: Sequence[Suite], version: int, *, base_model: bool, max_steps: int | None, passed_over: int | None
) -> list[Suite]:
    """Those that `version` is to be evaluated on: all before the first step, if `base_model`, and after the last one.
    `passed_over`: a version that is not evaluated unless it is the last."""
    if version == 0:
        return list(suites) if base_model else []
    if version == max_steps:
        return list(suites)
    return [suite for suite in suites if version != passed_over and version % suite.held_out.interval == 0]


async def evaluate(
    engine: RolloutEngine,
    suites: Sequence[Suite],
    *,
    version: int,
    complete: bool,
    seed_of: Callable[[str], int | None] = lambda name: None,
    keep: Callable[[Sequence[EpisodeResult]], None] = lambda results: None,
) -> Evaluation:
    """Answers every prompt as often as its suite says. `seed_of` gives the seed of a request by a name that does not
    depend on the version; `keep` is given all answers.

    Raises what servers and broken environments raise, EnvironmentFailed where all answers of an environment fail,
    which is no accuracy of 0, and ValueError where all its prompts are too long.
    """
    since_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        asked = {suite.held_out.label: group.create_task(_answers(engine, suite, version, seed_of)) for suite in suites}
    answered = {label: task.result() for label, task in asked.items()}
    keep([result for answers, _ in answered.values() for of_one in answers for result in of_one])
    return Evaluation(
        version=version,
        figures={label: figures for label, (_, figures) in answered.items()},
        complete=complete,
        seconds=time.monotonic() - since_s,
    )


async def _answers(
    engine: RolloutEngine, suite: Suite, version: int, seed_of: Callable[[str], int | None]
) -> tuple[Sequence[Sequence[EpisodeResult]], Figures]:
    """By example, and what they say together."""
    env, num, since_s = suite.held_out.key, suite.held_out.rollouts_per_example, time.monotonic()
    slots = asyncio.Semaphore(max(1, CONCURRENCY // num))

    async def one(task: Task) -> Sequence[EpisodeResult]:
        seed = seed_of(f"eval/{env}/{task.index}") if suite.held_out.temperature > 0 else None
        async with slots:
            name = f"eval-{version}/{env}/{task.index}"
            group = Group(
                task=task,
                id=name,
                num=num,
                version=version,
                params=suite.params,
                adapters=suite.adapters,
                seed=seed,
            )
            try:
                return await engine.run_group(group)
            except PromptTooLong as error:
                failure = Failure(reason=TOO_LONG, message=str(error))
                return [EpisodeResult(id=f"{name}/{number}", task=task, failure=failure) for number in range(num)]

    async with asyncio.TaskGroup() as group:
        asked = [
            group.create_task(one(Task(env=env, split="eval", index=index, messages=messages)))
            for index, messages in enumerate(suite.prompts)
        ]
    answers = [task.result() for task in asked]
    num_failed = _num_failed(env, answers, version)
    return answers, figures_of(answers, num_failed=num_failed, seconds=time.monotonic() - since_s)


def figures_of(answers: Sequence[Sequence[EpisodeResult]], *, num_failed: int, seconds: float) -> Figures:
    """By example, the same number of answers each, of which at least one could be scored."""
    sizes = {len(of_one) for of_one in answers}
    assert len(sizes) == 1, f"examples have {sorted(sizes)} answers, expected the same number each"
    [num] = sizes
    accuracies = [statistics.fmean(_accuracy(answer) for answer in of_one) for of_one in answers]
    scored = [[one.reward for one in of_one if one.failure is None] for of_one in answers]
    rewards = [statistics.fmean(of_one) for of_one in scored if of_one]
    results = [one for of_one in answers for one in of_one if one.failure is None]
    num_right = [sum(_accuracy(answer) >= 1 for answer in of_one) for of_one in answers]
    every = [one for of_one in answers for one in of_one if one.failure is None or one.failure.reason != TOO_LONG]
    return Figures(
        accuracy=statistics.fmean(accuracies),
        accuracy_stderr=standard_error(accuracies),
        reward=statistics.fmean(rewards),
        reward_stderr=standard_error(rewards),
        pass_at={k: statistics.fmean(pass_at_k(num, right, k) for right in num_right) for k in ks_of(num)},
        measures=_measures(results),
        num_tokens_mean=statistics.fmean(one.num_tokens for one in every),
        truncated=statistics.fmean(one.truncated for one in every),
        num_failed=num_failed,
        num_tokens=sum(one.num_tokens for one in every),
        seconds=seconds,
    )


def _measures(results: Sequence[EpisodeResult]) -> dict[str, float]:
    """Means over all rollouts that have a measure, those that others spawned included."""
    values: dict[str, list[float]] = defaultdict(list)
    for result in results:
        for one in result.walk():
            for name, value in one.metrics.items():
                values[name].append(value)
    return {name: statistics.fmean(column) for name, column in values.items()}


def _accuracy(answer: EpisodeResult) -> float:
    return answer.accuracy if answer.failure is None else 0.0


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean: the standard deviation of a sample over the root of its size. None for a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def ks_of(num: int) -> Iterator[int]:
    """The k for which pass@k is reported: 1, 2, 4 and so on up to `num`, and `num`; none where that is 1."""
    if num > 1:
        yield from (2**power for power in range(num.bit_length()) if 2**power < num)
        yield num


def pass_at_k(num: int, num_right: int, k: int) -> float:
    """The chance that one of k answers, drawn without replacement from `num` of which `num_right` are right, is right:
    1 - C(n - c, k) / C(n, k), the unbiased estimator of Chen et al. (2021), arXiv:2107.03374."""
    return 1 - math.comb(num - num_right, k) / math.comb(num, k)


def _num_failed(env: str, answers: Sequence[Sequence[EpisodeResult]], version: int) -> int:
    """Raises EnvironmentFailed where all are, or ValueError where all prompts are too long."""
    failures = [answer.failure for of_one in answers for answer in of_one if answer.failure is not None]
    num, reasons = sum(len(of_one) for of_one in answers), Counter(failure.reason for failure in failures)
    if reasons[TOO_LONG] == num:
        raise ValueError(f"all {len(answers)} held-out prompts of {env} are too long: {failures[-1].message}")
    if len(failures) == num:
        raise EnvironmentFailed(
            f"environment {env}: all {num} answers of the evaluation of version {version} failed; "
            f"the last one ({failures[-1].reason}): {failures[-1].message}"
        )
    for reason, times in reasons.items():
        log.warning("environment %s: %d answers of the evaluation count as wrong (%s)", env, times, reason)
    return len(failures)
