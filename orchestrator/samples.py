"""Scored rollouts to training samples: ids and log-probabilities as the server gave them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from grpo.orchestrator.advantage import Credit, StepKey
from grpo.orchestrator.auxiliary.hints.hinting import NO_HINTS, GivenHint, HintedGroup, Hints
from grpo.orchestrator.filters import Filter
from grpo.orchestrator.rollouts.records import EpisodeResult
from grpo.transport.records import Float32, TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup:
    """A group that waits for its batch."""

    results: Sequence[EpisodeResult]
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


NOTHING_ADDED: Mapping[StepKey, Float32] = {}


def judge_group(results: Sequence[EpisodeResult], filters: Sequence[Filter]) -> tuple[list[str], dict[str, str]]:
    """What `filters` say of a group's rollouts, as `found` and `withheld` of a FinishedGroup. An answer that follows
    another begins anew."""
    found, withheld = list[str](), dict[str, str]()
    for result in results if filters else ():
        answers = [step.completion for one in result.walk() for step in one.steps]
        finders = [one for one in filters if any(one.finds(said.token_ids, said.logprobs) for said in answers)]
        found += [one.name for one in finders]
        if enforced := [one.name for one in finders if one.enforce]:
            withheld[result.id] = enforced[0]
    return found, withheld


def finish_group(
    results: Sequence[EpisodeResult],
    credit: Credit,
    *,
    group: str,
    found: Sequence[str] = (),
    withheld: Mapping[str, str] | None = None,
    hinted: HintedGroup = NO_HINTS,
    added: Mapping[StepKey, Float32] = NOTHING_ADDED,
) -> FinishedGroup:
    """Advantages by all of a group's rollouts, samples of those that are not `withheld`. A rollout that is kept out of
    the loss is not sent at all: without loss tokens it would cost the trainer time and change nothing. `added`: what
    goes on top of a step's advantage, [L] for its sampled tokens."""
    samples = training_samples(results, credit, group=group, hints=hinted.hints, added=added)
    withheld = withheld or {}
    return FinishedGroup(
        results=results,
        samples=[sample for sample in samples if sample.rollout_id not in withheld],
        found=found,
        withheld=withheld,
        hinted=hinted,
    )


def unfit(samples: Sequence[TrainingSample]) -> str | None:
    """Why the trainer would refuse one of these samples: a number that float32 does not hold, or a temperature by which
    nothing can be divided. None where it would take them all."""
    for sample in samples:
        for name in ("inference_logprobs", "advantages", "temperatures", "teacher_logprobs"):
            with np.errstate(over="ignore"):
                values = np.asarray(getattr(sample, name) if getattr(sample, name) is not None else 0.0, np.float32)
            if not np.isfinite(values).all():
                return f"rollout {sample.rollout_id} has {name} that are not finite in float32"
            if name == "temperatures" and not values.min() > 0:
                return f"rollout {sample.rollout_id} has a temperature of {values.min():g}, expected more than 0"
    return None


def training_samples(
    results: Sequence[EpisodeResult],
    credit: Credit,
    *,
    group: str,
    hints: Hints = NO_HINTS.hints,
    added: Mapping[StepKey, Float32] = NOTHING_ADDED,
) -> list[TrainingSample]:
    """Of all rows of a group's rollouts and of those that they spawned. A sample bears the id of the rollout that the
    group began with: that is what is trained or dropped as a whole."""
    advantages: dict[StepKey, float | Float32] = dict(credit(results))
    advantages |= {key: advantages[key] + extra for key, extra in added.items()}
    return [
        sample
        for root in results
        for result in root.walk()
        for sample in _samples(result, advantages, hints, group=group, rollout_id=root.id)
    ]


def _samples(
    result: EpisodeResult, advantages: Mapping[StepKey, float | Float32], hints: Hints, *, group: str, rollout_id: str
) -> Iterator[TrainingSample]:
    """A sample for each row: each turn's tokens have their step's advantage."""
    for number, row in enumerate(result.rows):
        by_turn = {turn.index: advantages[result.id, step] for turn, step in zip(row.turns, row.steps, strict=True)}
        single, first = len(by_turn) == 1, next(iter(by_turn.values()))  # then one number stands for all tokens
        yield TrainingSample(
            token_ids=row.token_ids,
            loss_mask=row.sampled,
            inference_logprobs=row.logprobs,
            advantages=first if single and isinstance(first, float) else row.spread(by_turn),
            temperatures=result.steps[row.steps[0]].temperature if single else row.temperatures,
            policy_versions=row.versions,
            hint=hints.get((result.id, number)),
            env=result.task.env,
            group_id=group,
            rollout_id=rollout_id,
            reward=result.step_reward(row.steps[-1]),
            stop_reason=row.turns[-1].finish_reason,
            adapter=result.steps[row.steps[-1]].adapter,
        )
