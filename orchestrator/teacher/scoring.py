"""What a teacher says to sampled tokens, and the way of it into training samples.

The teacher's term of the policy loss (`trainer/loss.py`) is per token `teacher_logprob - trainer_logprob`: on-policy
distillation (GKD, arXiv:2306.13649, with the reverse KL on the student's own samples). Its expectation is
-KL(student ‖ teacher) only where both are taken of the same distribution over the same tokens: at one temperature and
with one vocabulary. Everything here serves that: what cannot be had exactly is a failure with a reason, never a number.

Legend: `L` tokens of one sample.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from msgspec.structs import replace

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
HIGHEST = 1e-3
"""Log-probabilities are at most 0; so far above it rounding may bring one."""
LOWEST = -9999.0
"""What vLLM's OpenAI routes say for minus infinity."""


class TeacherFailure(ValueError):
    """Why tokens have no log-probabilities of the teacher's. The message is for people and names the teacher."""

    def __init__(self, reason: FailureReason, message: str, *, pause_s: float = 0.0) -> None:
        """`pause_s`: how long the server asks not to be asked again."""
        super().__init__(message)
        self.reason: FailureReason = reason
        self.pause_s = pause_s


class Teacher(ABC):
    """Someone who knows how likely given tokens are."""

    num_requests = 0
    """Retries included."""
    num_retries = 0

    @property
    @abstractmethod
    def name(self) -> str:
        """For people: which model, and where."""

    @abstractmethod
    async def score(self, token_ids: Int32, temperature: float, *, adapter: int = 0) -> Float32:
        """[L] natural log of each token at `temperature`, given those before it, the first 0. `adapter`: of the sample,
        by its place among the run's, for a teacher that is the policy itself. Raises TeacherFailure."""

    async def close(self) -> None:  # noqa: B027 (some hold nothing)
        """Gives back what it holds."""


def checked(logprobs: Sequence[float | None], token_ids: Int32) -> Float32:
    """[L] of those of tokens 1 to L - 1, the first 0. Raises TeacherFailure where they are too few or too many, or no
    log-probabilities."""
    if len(logprobs) != len(token_ids) - 1:
        raise TeacherFailure(
            "other_tokens",
            f"it answered about {len(logprobs) + 1} tokens, expected {len(token_ids)}; a server that adds tokens to a "
            "prompt of ids, or cuts it, cannot be a teacher",
        )
    with np.errstate(over="ignore"):
        scored = np.array([0.0, *logprobs], np.float64).astype(np.float32)
    wrong = scored[~((scored > LOWEST) & (scored <= HIGHEST))]  # a NaN is neither
    if len(wrong):
        raise TeacherFailure(
            "not_finite",
            f"among its log-probabilities is {wrong[0]:g}, expected finite ones up to 0; a vLLM server must not run "
            "with --logprobs-mode raw_logits or processed_logits",
        )
    return np.minimum(scored, np.float32(0))


# --- samples ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Taught:
    """Samples with what their teacher said."""

    samples: list[TrainingSample]
    """In their order, each with `teacher_logprobs`."""
    withheld: Mapping[str, TeacherFailure]
    """By rollout id: the first failure of each rollout of which at least one sample could not be scored. None of its
    samples is among `samples`: a batch has the teacher's log-probabilities for all of its samples or for none, and a
    rollout is trained as a whole."""


class Teaching:
    """Asks a teacher about samples, and counts."""

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher
        self._num: Counter[str] = Counter()
        self._told: Counter[str] = Counter()

    async def teach(self, samples: Sequence[TrainingSample]) -> Taught:
        """All samples at once, each at the temperatures of its own loss tokens; equal ones are asked about once."""
        places = [(index, temperature) for index, one in enumerate(samples) for temperature in temperatures_of(one)]
        rows = {self._key(samples[index], temperature): samples[index] for index, temperature in places}
        scores = await asyncio.gather(*(self._score(sample, key[2]) for key, sample in rows.items()))
        by_key = dict(zip(rows, scores, strict=True))
        self._num["rows"] += len(places)
        by_sample: list[dict[float, Float32]] = [{} for _ in samples]
        withheld: dict[str, TeacherFailure] = {}
        for index, temperature in places:
            answer = by_key[self._key(samples[index], temperature)]
            if isinstance(answer, TeacherFailure):
                self._num.update(("failed", f"failed_{answer.reason}"))
                withheld.setdefault(samples[index].rollout_id, answer)
            else:
                by_sample[index][temperature] = answer
        taught = [
            with_teacher(sample, scores)
            for sample, scores in zip(samples, by_sample, strict=True)
            if sample.rollout_id not in withheld
        ]
        return Taught(samples=taught, withheld=withheld)

    @staticmethod
    def _key(sample: TrainingSample, temperature: float) -> tuple[int, bytes, float]:
        return sample.adapter, sample.token_ids.tobytes(), temperature

    async def _score(self, sample: TrainingSample, temperature: float) -> Float32 | TeacherFailure:
        self._num["tokens"] += len(sample.token_ids)
        try:
            return await self.teacher.score(sample.token_ids, temperature, adapter=sample.adapter)
        except TeacherFailure as failure:
            return failure

    def metrics(self) -> dict[str, float]:
        """Counts since the last call, as `teacher/NAME`; a reason once it has occurred."""
        now = Counter({"rows": 0, "tokens": 0, "failed": 0})
        now.update(self._num)
        now["requests"], now["retries"] = self.teacher.num_requests, self.teacher.num_retries
        told, self._told = self._told, now
        return {f"teacher/{name}": float(num - told[name]) for name, num in now.items()}


def temperatures_of(sample: TrainingSample) -> tuple[float, ...]:
    """The temperatures that the sample's loss tokens were sampled at, ascending; one, but in conversations during which
    it changed. None where it has no loss tokens."""
    if not sample.loss_mask.any():
        return ()
    if isinstance(sample.temperatures, np.ndarray):
        return tuple(float(one) for one in np.unique(sample.temperatures[sample.loss_mask]))
    return (float(sample.temperatures),)


def with_teacher(sample: TrainingSample, by_temperature: Mapping[float, Float32]) -> TrainingSample:
    """The sample with each loss token's log-probability at the temperature that it was sampled at, and 0 on all others,
    where the trainer reads none. `by_temperature` has [L] for each of `temperatures_of(sample)`."""
    logprobs = np.zeros(len(sample.token_ids), np.float32)
    for temperature in temperatures_of(sample):
        places = sample.loss_mask & (np.asarray(sample.temperatures, np.float64) == temperature)
        logprobs[places] = by_temperature[temperature][places]
    return replace(sample, teacher_logprobs=logprobs)
