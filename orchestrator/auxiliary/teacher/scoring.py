"""What a teacher says to sampled tokens, and the way of it into training samples.

The teacher's term of the policy loss (`trainer/loss.py`) is per token `teacher_logprob - trainer_logprob`: on-policy
distillation (GKD, arXiv:2306.13649, with the reverse KL on the student's own samples). Its expectation is
-KL(student ‖ teacher) only where both are taken of the same distribution over the same tokens: at one temperature and
with one vocabulary. What cannot be had is a failure with a reason, or for a token that the teacher does not know
UNTAUGHT, which the trainer leaves out: never a guess.

Legend: `L` tokens of one sample.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, Protocol

import numpy as np
from grpo.orchestrator.endpoints import EndpointError
from grpo.orchestrator.inference.client import Refused, ServerError, ServersAway, TimedOut, Unreachable
from grpo.transport.records import UNTAUGHT, Float32, Int32, TrainingSample
from msgspec.structs import replace

FailureReason = Literal["unreachable", "timeout", "error", "refused", "nonsense", "temperature"]
"""`unreachable`, `timeout`, `error`, `refused` and `nonsense` as of any endpoint; of a served teacher whatever may pass
is a `timeout`, because it is tried until the deadline. `temperature`: it cannot score at the student's."""
HIGHEST = 1e-3
"""Log-probabilities are at most 0; so far above it rounding may bring one."""
LOWEST = -9999.0
"""What vLLM's OpenAI routes say for minus infinity."""


class Teacher(Protocol):
    """Someone who knows how likely given tokens are."""

    @property
    def num_requests(self) -> int:
        """Retries included."""

    @property
    def name(self) -> str:
        """For people: which model, and where."""

    async def score(self, token_ids: Int32, temperature: float) -> Float32:
        """[L] natural log of each token at `temperature`, given those before it, the first 0; UNTAUGHT of a token that
        it does not know. Raises EndpointError with a FailureReason."""


def checked(logprobs: Sequence[float | None], num_tokens: int) -> Float32:
    """[L] of those of tokens 1 to L - 1, the first 0. Raises EndpointError where they are too few or too many, or no
    log-probabilities."""
    if len(logprobs) != num_tokens - 1:
        raise EndpointError(
            "nonsense",
            f"it answered about {len(logprobs) + 1} tokens, expected {num_tokens}; a server that adds tokens to a "
            "prompt of ids, or cuts it, cannot be a teacher",
        )
    with np.errstate(over="ignore"):
        scored = np.array([0.0, *logprobs], np.float64).astype(np.float32)
    wrong = scored[~((scored > LOWEST) & (scored <= HIGHEST))]  # a NaN is neither
    if len(wrong):
        raise EndpointError(
            "nonsense",
            f"among its log-probabilities is {wrong[0]:g}, expected finite ones up to 0; a vLLM server must not run "
            "with --logprobs-mode raw_logits or processed_logits",
        )
    return np.minimum(scored, np.float32(0))


class ReferenceTeacher:
    """The model before training: the run's own servers have it as their base."""

    name = "the model before training, as a teacher"

    def __init__(self, score: Callable[[Sequence[int], int | None, float], Awaitable[Sequence[float]]]) -> None:
        """`score` gives [L - 1] log-probabilities of token ids [L] under a version (None: the base model) at a
        temperature, or raises ServerError; tries, turns and deadlines are its own."""
        self._score = score
        self.num_requests = 0

    async def score(self, token_ids: Int32, temperature: float) -> Float32:
        """By the least loaded server."""
        self.num_requests += 1
        try:
            return checked(await self._score(token_ids.tolist(), None, temperature), len(token_ids))
        except ServerError as error:
            kinds = {Refused: "refused", TimedOut: "timeout", Unreachable: "unreachable", ServersAway: "unreachable"}
            raise EndpointError(kinds.get(type(error), "error"), f"{self.name}: {error}") from error


class Teaching:
    """Asks a teacher about samples, and counts."""

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher
        self.num_groups = 0
        """Groups that it is being asked about."""
        self._num: Counter[str] = Counter()
        self._told: Counter[str] = Counter()

    async def teach(
        self, samples: Sequence[TrainingSample]
    ) -> tuple[list[TrainingSample], Mapping[str, EndpointError]]:
        """The samples with `teacher_logprobs`, in their order, and by rollout id the first failure of each rollout of
        which at least one sample could not be scored. None of its samples is among the first: a batch has the teacher's
        log-probabilities for all of its samples or for none, and a rollout is trained as a whole. All are asked about
        at once, each at the temperatures of its own loss tokens; equal ones once."""
        rows = {key: sample for sample in samples for key in _rows_of(sample)}
        self.num_groups += 1
        try:
            asked = (self._score(sample, temperature) for (_, temperature), sample in rows.items())
            scores = dict(zip(rows, await asyncio.gather(*asked), strict=True))
        finally:
            self.num_groups -= 1
        taught, failed = [], dict[str, EndpointError]()
        for sample in samples:
            logprobs = np.zeros(len(sample.token_ids), np.float32)  # 0 where the trainer reads none
            for key in _rows_of(sample):
                self._num["rows"] += 1
                if isinstance(answer := scores[key], EndpointError):
                    self._num.update(("failed", f"failed_{answer.reason}"))
                    failed.setdefault(sample.rollout_id, answer)
                    continue
                places = sample.loss_mask & (np.asarray(sample.temperatures, np.float64) == key[-1])
                logprobs[places] = answer[places]
            self._num["tokens_left_out"] += int((logprobs == UNTAUGHT).sum())
            taught.append(replace(sample, teacher_logprobs=logprobs))
        return [one for one in taught if one.rollout_id not in failed], failed

    async def _score(self, sample: TrainingSample, temperature: float) -> Float32 | EndpointError:
        self._num["tokens"] += len(sample.token_ids)
        try:
            return await self.teacher.score(sample.token_ids, temperature)
        except EndpointError as failure:
            return failure

    def metrics(self) -> dict[str, float]:
        """Counts since the last call, as `teacher/NAME`; a reason once it has occurred."""
        now = Counter({"rows": 0, "tokens": 0, "tokens_left_out": 0, "failed": 0})
        now.update(self._num)
        now["requests"] = self.teacher.num_requests
        told, self._told = self._told, now
        return {f"teacher/{name}": float(num - told[name]) for name, num in now.items()}


def _rows_of(sample: TrainingSample) -> list[tuple[bytes, float]]:
    """What is asked about a sample: its tokens, and each temperature of its loss tokens; one, but in conversations
    during which it changed."""
    temperatures = np.broadcast_to(np.asarray(sample.temperatures, np.float64), sample.loss_mask.shape)
    row = sample.token_ids.tobytes()
    return [(row, float(one)) for one in np.unique(temperatures[sample.loss_mask])]
