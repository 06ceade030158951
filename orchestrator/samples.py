"""Makes training samples of scored rollouts: ids and log-probabilities as the server gave them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from grpo.orchestrator.advantage import Credit, StepKey
from grpo.orchestrator.filters import Filter
from grpo.orchestrator.rollouts.records import EpisodeResult, StepEvidence, TrainingRow
from grpo.transport.records import Float32, TrainingSample

RowKey = tuple[str, int]
"""(rollout id, index of the row)"""


@dataclass(slots=True)
class ScoredGroup:
    """A group's rollouts with their rewards: hooks change it in place, credit adds the samples, and then it waits for
    its batch."""

    results: list[EpisodeResult]
    """The rollouts that have a reward, as their environment gave it: the baseline is of these."""
    found: Sequence[str] = ()
    """The name of a filter for each rollout in which it found something."""
    withheld: dict[str, str] = field(default_factory=dict)
    """Why rollouts are not trained although they count in the baseline, by id: a filter for example."""
    credited: list[EpisodeResult] = field(default_factory=list)
    """The results as credit sees them, in the same order: their rewards are shaped."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Why rollouts have been taken out of the results, by id."""
    added: dict[StepKey, Float32] = field(default_factory=dict)
    """[L] on top of a step's advantage, for its sampled tokens."""
    evidence: dict[StepKey, StepEvidence] = field(default_factory=dict)
    """Why, for a credit of the user's own."""
    fields: defaultdict[RowKey, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))
    """Optional fields of the training sample that is made of a row."""
    hint_texts: dict[StepKey, str] = field(default_factory=dict)
    """Hints by step, for traces."""
    samples: Sequence[TrainingSample] = ()
    """Samples of the rollouts that are not withheld, once there is credit."""

    def __post_init__(self) -> None:
        self.credited = self.credited or list(self.results)

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that sampled any token of the group; its lag counts from it."""
        return min(result.versions[0] for result in self.results)

    @property
    def trained(self) -> list[EpisodeResult]:
        """The results that are not withheld."""
        return [result for result in self.results if result.id not in self.withheld]

    def drop(self, reasons: Mapping[str, str]) -> None:
        """Takes rollouts out, by id, with the reason for each."""
        self.dropped |= reasons
        self.withheld = {rollout_id: why for rollout_id, why in self.withheld.items() if rollout_id not in reasons}
        self.results = [one for one in self.results if one.id not in reasons]
        self.credited = [one for one in self.credited if one.id not in reasons]

    def add_evidence(self, key: StepKey, advantages_L: Float32, **evidence: Any) -> None:
        """Adds to a step's advantage, and lets credit see why: `evidence` are fields of StepEvidence."""
        self.added[key] = self.added[key] + advantages_L if key in self.added else advantages_L
        self.evidence[key] = msgspec.structs.replace(self.evidence.get(key, StepEvidence()), **evidence)


def judge_group(results: Sequence[EpisodeResult], filters: Sequence[Filter]) -> tuple[list[str], dict[str, str]]:
    """Returns what filters find in a group's rollouts, as `found` and `withheld` of a ScoredGroup. They see each answer
    alone."""
    found, withheld = list[str](), dict[str, str]()
    for result in results if filters else ():
        answers = [step.completion for one in result.walk() for step in one.steps]
        finders = [one for one in filters if any(one.finds(answer.token_ids, answer.logprobs) for answer in answers)]
        found += [one.name for one in finders]
        if enforced := [one.name for one in finders if one.enforce]:
            withheld[result.id] = enforced[0]
    return found, withheld


def add_samples(group: ScoredGroup, credit: Credit, *, number: str) -> None:
    """Turns advantages by all of a group's rollouts into samples of those that are not withheld. A rollout that is kept
    out of the loss is not sent at all: without loss tokens it would cost the trainer time and change nothing."""
    credited = [_with_evidence(result, group.evidence) for result in group.credited]
    advantages: dict[StepKey, float | Float32] = dict(credit(credited)) if credited else {}
    advantages |= {key: advantages[key] + extra for key, extra in group.added.items()}
    group.samples = training_samples(group.trained, advantages, group=number, fields=group.fields)


def _with_evidence(result: EpisodeResult, found: Mapping[StepKey, StepEvidence]) -> EpisodeResult:
    """Returns the rollout and all that it spawned, their steps with what was found."""
    if not found:
        return result
    steps = tuple(
        msgspec.structs.replace(step, evidence=found.get((result.id, index))) for index, step in enumerate(result.steps)
    )
    children = tuple(_with_evidence(child, found) for child in result.children)
    return msgspec.structs.replace(result, steps=steps, children=children)


def unfit(samples: Sequence[TrainingSample]) -> str | None:
    """Returns why the trainer would refuse one of these samples: a number that float32 does not hold, or a temperature
    by which nothing can be divided. None where it would take them all."""
    for name in ("inference_logprobs", "advantages", "temperatures", "teacher_logprobs"):
        if not _fit(name, samples):
            sample = next(one for one in samples if not _fit(name, [one]))
            expected = "finite in float32" + " and above 0" * (name == "temperatures")
            return f"rollout {sample.rollout_id} has {name} that are not {expected}"
    return None


def _fit(name: str, samples: Sequence[TrainingSample]) -> bool:
    """Returns whether these numbers of all samples fit."""
    given = [value for sample in samples if (value := getattr(sample, name)) is not None]
    numbers = np.array([value for value in given if not isinstance(value, np.ndarray)], np.float64)
    arrays = [value for value in given if isinstance(value, np.ndarray)]
    with np.errstate(over="ignore"):
        values = np.concatenate([numbers, *arrays], dtype=np.float32, casting="same_kind")
    return bool(np.isfinite(values).all()) and not (name == "temperatures" and (values <= 0).any())


def training_samples(
    results: Sequence[EpisodeResult],
    advantages: Mapping[StepKey, float | Float32],
    *,
    group: str,
    fields: Mapping[RowKey, Mapping[str, Any]] | None = None,
) -> list[TrainingSample]:
    """Returns a sample for each row of a group's rollouts and of those that they spawned; each turn's tokens have their
    step's advantage. A sample bears the id of the rollout that the group began with: that is what is trained or dropped
    as a whole. `fields`: optional ones of the samples."""
    return [
        sample
        for root in results
        for result in root.walk()
        for sample in _samples(result, advantages, fields or {}, group=group, rollout_id=root.id)
    ]


def numbered_rows(
    results: Iterable[EpisodeResult],
) -> Iterator[tuple[EpisodeResult, RowKey, EpisodeResult, TrainingRow]]:
    """Yields every row of rollouts and of those that they spawned, as (rollout of the group, key of the row, rollout
    that it is of, row)."""
    for root in results:
        for result in root.walk():
            for index, row in enumerate(result.rows):
                yield root, (result.id, index), result, row


def _samples(
    result: EpisodeResult,
    advantages: Mapping[StepKey, float | Float32],
    fields: Mapping[RowKey, Mapping[str, Any]],
    *,
    group: str,
    rollout_id: str,
) -> Iterator[TrainingSample]:
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
            env=result.task.env,
            group_id=group,
            rollout_id=rollout_id,
            reward=result.step_reward(row.steps[-1]),
            stop_reason=row.turns[-1].finish_reason,
            adapter=result.steps[row.steps[-1]].adapter,
            server=" ".join(sorted({result.steps[step].completion.server for step in row.steps})).strip(),
            **fields.get((result.id, number), {}),
        )
