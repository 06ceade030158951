"""Scored rollouts to training samples: ids and log-probabilities as the server gave them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.episodes.credit import CreditAssigner
from orchestrator.episodes.episode import GenerateResult
from orchestrator.episodes.types import Rollout, Step
from orchestrator.filters import Filter, Verdict, judge
from transport.types import TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup:
    """A group that waits for its batch."""

    results: Sequence[GenerateResult]
    """All that have a reward: they make out the baseline."""
    samples: Sequence[TrainingSample]
    """Of those that no filter withholds."""
    found: Sequence[str]
    """The name of a filter for each rollout in which it found something."""
    withheld: Mapping[str, str]
    """The filter that keeps a rollout out of the loss, by the rollout's id."""

    @property
    def oldest_version(self) -> int:
        """Of all that sampled any of its rollouts: the one that makes out its lag."""
        return min(result.rollout.versions[0] for result in self.results)

    @property
    def trained(self) -> list[str]:
        """Ids of the rollouts that are trained."""
        return list(dict.fromkeys(sample.rollout_id for sample in self.samples))


def finish_group(
    results: Sequence[GenerateResult], credit: CreditAssigner, filters: Sequence[Filter], *, group: str
) -> FinishedGroup:
    """Advantages by all of a group's rollouts, samples of those that `filters` leave. A rollout that is kept out of the
    loss is not sent at all: without loss tokens it would cost the trainer time and change nothing."""
    verdicts = {result.rollout.id: _verdict(result.rollout, filters) for result in results}
    withheld = {name: verdict.withheld for name, verdict in verdicts.items() if verdict.withheld is not None}
    samples = training_samples(results, credit, group=group)
    return FinishedGroup(
        results=results,
        samples=[sample for sample in samples if sample.rollout_id not in withheld],
        found=[name for verdict in verdicts.values() for name in verdict.found],
        withheld=withheld,
    )


def _verdict(rollout: Rollout, filters: Sequence[Filter]) -> Verdict:
    return judge(filters, [(step.completion.token_ids, step.completion.logprobs) for step in rollout.steps])


def training_samples(results: Sequence[GenerateResult], credit: CreditAssigner, *, group: str) -> list[TrainingSample]:
    """One sample for each step of a group's rollouts."""
    advantages = credit.compute(results)
    return [
        _sample(result, step, advantages[result.rollout.id, index], group=group)
        for result in results
        for index, step in enumerate(result.rollout.steps)
    ]


def _with_prompt(versions: tuple[tuple[int, int], ...], num_prompt: int) -> tuple[tuple[int, int], ...]:
    """Runs over prompt and completion: the prompt counts to the version that began to answer."""
    (first, num), *others = versions
    return ((first, num_prompt + num), *others)


def _sample(result: GenerateResult, step: Step, advantage: float, *, group: str) -> TrainingSample:
    num_prompt, completion = len(step.prompt_token_ids), step.completion
    length = num_prompt + len(completion.token_ids)
    token_ids = np.empty(length, np.int32)
    token_ids[:num_prompt], token_ids[num_prompt:] = step.prompt_token_ids, completion.token_ids
    loss_mask = np.zeros(length, np.bool_)
    loss_mask[num_prompt:] = True
    logprobs = np.zeros(length, np.float32)
    logprobs[num_prompt:] = completion.logprobs
    return TrainingSample(
        token_ids=token_ids,
        loss_mask=loss_mask,
        inference_logprobs=logprobs,
        advantages=advantage,
        temperatures=step.role.temperature,
        policy_versions=_with_prompt(step.versions, num_prompt),
        env=result.rollout.task.env,
        group_id=group,
        rollout_id=result.rollout.id,
        reward=result.score.reward,
        stop_reason=completion.finish_reason,
    )
