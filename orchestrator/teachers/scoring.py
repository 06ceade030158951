"""What a teacher says to sampled tokens, and the way of it into training samples.

The teacher's term of the policy loss (`trainer/loss.py`) is per token `teacher_logprob - trainer_logprob`: on-policy
distillation (GKD, arXiv:2306.13649, with the reverse KL on the student's own samples). Its expectation is
-KL(student ‖ teacher) only where both are taken of the same distribution over the same tokens: at one temperature and
with one vocabulary. Everything here serves that: what cannot be had exactly is a failure with a reason, never a number.

Legend: `L` tokens of one sample.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from orchestrator.teachers.alignment import combined, temperatures_of, with_teacher
from transport.records import Float32, Int32, TrainingSample

FailureReason = Literal[
    "down",
    "cut_off",
    "slow",
    "busy",
    "error",
    "refused",
    "nonsense",
    "not_finite",
    "other_tokens",
    "other_vocabulary",
    "temperature",
    "too_long",
]
"""`down`: cannot be reached, or, by 502, 503 or 504, not behind its proxy; `cut_off`: the connection ended before the
answer did; `slow`: no answer in time; `busy`: 429 and its like; `error`: another status of 5xx, and whatever the run's
own servers could not do; `refused`: any other status; `nonsense`: an answer that is none; `not_finite`: a
log-probability that is no finite number up to 0; `other_tokens`: the answer is about other tokens than ours;
`other_vocabulary`: the tokens' numbers mean something else to the teacher; `temperature`: it cannot score at the
student's; `too_long`: longer than it reads."""


class TeacherRefused(ValueError):
    """A teacher that this policy cannot learn from. `reason` is the word for metrics."""

    def __init__(self, reason: FailureReason, message: str) -> None:
        self.reason: FailureReason = reason
        super().__init__(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherFailure:
    """Why a row has no log-probabilities of the teacher's."""

    reason: FailureReason
    message: str
    """For people; names the teacher."""


Scored = Float32 | TeacherFailure
"""[L] natural log of each token given those before it, the first 0; or why there is none."""


class TeacherClient(Protocol):
    """Someone who knows how likely given tokens are."""

    @property
    def name(self) -> str:
        """For people: which model, and where."""

    async def score(self, rows: Sequence[Int32], temperatures: Sequence[float], *, adapter: int = 0) -> list[Scored]:
        """For each row of token ids, at its temperature. `adapter`: of the samples, by its place among the run's, for a
        teacher that is the policy itself. Never raises for what the teacher does."""

    def metrics(self) -> dict[str, float]:
        """What it was asked, and what came of it, since the last call."""

    async def close(self) -> None:
        """Gives back what it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taught:
    """Samples with what their teacher said."""

    samples: list[TrainingSample]
    """In their order, each with `teacher_logprobs`."""
    withheld: Mapping[str, TeacherFailure]
    """By rollout id: the first failure of each rollout of which at least one sample could not be scored. None of its
    samples is among `samples`: a batch has the teacher's log-probabilities for all of its samples or for none, and a
    rollout is trained as a whole."""


async def teach(samples: Sequence[TrainingSample], teacher: TeacherClient) -> Taught:
    """Asks the teacher about all samples at once, each at the temperatures of its own loss tokens."""
    asked = [(index, temperature) for index, one in enumerate(samples) for temperature in temperatures_of(one)]
    by_sample: list[dict[float, Float32]] = [{} for _ in samples]
    withheld: dict[str, TeacherFailure] = {}
    for (index, temperature), answer in await _answers(samples, asked, teacher):
        if isinstance(answer, TeacherFailure):
            withheld.setdefault(samples[index].rollout_id, answer)
        else:
            by_sample[index][temperature] = answer
    taught = [
        with_teacher(sample, combined(sample, scores))
        for sample, scores in zip(samples, by_sample, strict=True)
        if sample.rollout_id not in withheld
    ]
    return Taught(samples=taught, withheld=withheld)


async def _answers(
    samples: Sequence[TrainingSample], asked: Sequence[tuple[int, float]], teacher: TeacherClient
) -> list[tuple[tuple[int, float], Scored]]:
    """What is `asked`, (index of the sample, temperature), with the teacher's answer: one call for each adapter."""

    async def of_adapter(adapter: int) -> list[tuple[tuple[int, float], Scored]]:
        own = [one for one in asked if samples[one[0]].adapter == adapter]
        rows, temperatures = [samples[index].token_ids for index, _ in own], [temperature for _, temperature in own]
        return list(zip(own, await teacher.score(rows, temperatures, adapter=adapter), strict=True))

    adapters = sorted({sample.adapter for sample in samples})
    return [one for answers in await asyncio.gather(*map(of_adapter, adapters)) for one in answers]
