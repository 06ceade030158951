"""Scored rollouts to training samples: ids and log-probabilities as the server gave them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from orchestrator.episodes.credit import CreditAssigner, StepKey
from orchestrator.episodes.tree import GenerateResult
from orchestrator.episodes.types import Rollout, RolloutRow, Step
from orchestrator.filters import Filter, Verdict, judge
from orchestrator.hints.hinting import NO_HINTS, GivenHint, HintedGroup, Hints
from transport.records import Hint, TrainingSample


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
    """What keeps a rollout out of the loss, a filter for example, by the rollout's id."""
    hinted: HintedGroup = NO_HINTS
    """What became of its rollouts' errors."""

    @property
    def hints(self) -> list[GivenHint]:
        """Those that go with the samples."""
        return [one for one in self.hinted.given if one.rollout_id.partition(".")[0] not in self.withheld]

    @property
    def oldest_version(self) -> int:
        """Of all that sampled any of its rollouts: the one that makes out its lag."""
        return min(result.versions[0] for result in self.results)

    @property
    def trained(self) -> list[str]:
        """Ids of the rollouts that are trained."""
        return list(dict.fromkeys(sample.rollout_id for sample in self.samples))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupVerdict:
    """What filters say of a group."""

    found: Sequence[str] = ()
    """The name of a filter for each rollout in which it found something."""
    withheld: Mapping[str, str] = field(default_factory=dict)
    """The name of the filter that keeps a rollout out of the loss, by the rollout's id."""


NOTHING_FOUND = GroupVerdict()


def judge_group(results: Sequence[GenerateResult], filters: Sequence[Filter]) -> GroupVerdict:
    """What `filters` say of a group's rollouts."""
    verdicts = {result.rollout.id: _verdict(result, filters) for result in results}
    return GroupVerdict(
        found=[name for verdict in verdicts.values() for name in verdict.found],
        withheld={name: verdict.withheld for name, verdict in verdicts.items() if verdict.withheld is not None},
    )


def finish_group(
    results: Sequence[GenerateResult],
    credit: CreditAssigner,
    verdict: GroupVerdict = NOTHING_FOUND,
    *,
    group: str,
    hinted: HintedGroup = NO_HINTS,
) -> FinishedGroup:
    """Advantages by all of a group's rollouts, samples of those that filters leave. A rollout that is kept out of the
    loss is not sent at all: without loss tokens it would cost the trainer time and change nothing."""
    samples = training_samples(results, credit, group=group, hints=hinted.hints)
    return FinishedGroup(
        results=results,
        samples=[sample for sample in samples if sample.rollout_id not in verdict.withheld],
        found=verdict.found,
        withheld=verdict.withheld,
        hinted=hinted,
    )


def _verdict(result: GenerateResult, filters: Sequence[Filter]) -> Verdict:
    steps = [step for rollout in result.all_rollouts() for step in rollout.steps]
    return judge(filters, [(step.completion.token_ids, step.completion.logprobs) for step in steps])


def training_samples(
    results: Sequence[GenerateResult], credit: CreditAssigner, *, group: str, hints: Hints = NO_HINTS.hints
) -> list[TrainingSample]:
    """Of all rows of a group's rollouts and of those that they spawned. A sample bears the id of the rollout that the
    group began with: that is what is trained or dropped as a whole."""
    advantages = credit.compute(results)
    return [
        sample
        for root in results
        for result in root.walk()
        for sample in _samples(result, advantages, hints, group=group, rollout_id=root.rollout.id)
    ]


def _samples(
    result: GenerateResult, advantages: Mapping[StepKey, float], hints: Hints, *, group: str, rollout_id: str
) -> Iterator[TrainingSample]:
    rollout = result.rollout
    for number, one in enumerate(rollout.rows):
        hint = hints.get((rollout.id, number))
        yield _of_row(result, one, advantages, hint, group=group, rollout_id=rollout_id)
    if not rollout.rows:
        for index, step in enumerate(rollout.steps):
            yield _of_step(result, step, advantages[rollout.id, index], group=group, rollout_id=rollout_id)


def _of_row(
    result: GenerateResult,
    one: RolloutRow,
    advantages: Mapping[StepKey, float],
    hint: Hint | None,
    *,
    group: str,
    rollout_id: str,
) -> TrainingSample:
    """A conversation's row: each turn's tokens have their step's advantage."""
    rollout, row = result.rollout, one.row
    by_turn = {turn.index: advantages[rollout.id, step] for turn, step in zip(row.turns, one.steps, strict=True)}
    return TrainingSample(
        token_ids=row.token_ids,
        loss_mask=row.sampled,
        inference_logprobs=row.logprobs,
        advantages=row.spread(by_turn),
        temperatures=row.temperatures,
        policy_versions=row.versions,
        hint=hint,
        env=rollout.task.env,
        group_id=group,
        rollout_id=rollout_id,
        reward=result.step_reward(one.steps[-1]),
        stop_reason=row.turns[-1].finish_reason,
        adapter=rollout.steps[one.steps[-1]].adapter,
    )


def _with_prompt(versions: tuple[tuple[int, int], ...], num_prompt: int) -> tuple[tuple[int, int], ...]:
    """Runs over prompt and completion: the prompt counts to the version that began to answer."""
    (first, num), *others = versions
    return ((first, num_prompt + num), *others)


def _of_step(result: GenerateResult, step: Step, advantage: float, *, group: str, rollout_id: str) -> TrainingSample:
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
        temperatures=step.temperature,
        policy_versions=_with_prompt(step.versions, num_prompt),
        env=result.rollout.task.env,
        group_id=group,
        rollout_id=rollout_id,
        reward=result.rewards[step.role],
        stop_reason=completion.finish_reason,
        adapter=step.adapter,
    )


def new_rows(rollouts: Sequence[Rollout]) -> Mapping[str, int]:
    """How often a conversation could not be continued in its row, by reason."""
    reasons: dict[str, int] = {}
    for rollout in rollouts:
        for one in rollout.rows:
            if one.row.began is not None:
                reasons[one.row.began] = reasons.get(one.row.began, 0) + 1
    return reasons
