"""A teacher's log-probabilities of sampled tokens.

The teacher's term of the policy loss (`trainer/loss.py`) is per token `teacher_logprob - trainer_logprob`: on-policy
distillation (GKD, arXiv:2306.13649, with the reverse KL on the student's own samples). Its expectation is
-KL(student ‖ teacher) only where both are taken of the same distribution over the same tokens: at one temperature and
with one vocabulary. Where a teacher cannot score, that is a failure with a reason, or NO_TEACHER_LOGPROB for a token
that it does not know, which the trainer leaves out: never a guess.

Legend: `L` tokens of one row.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, Protocol

import numpy as np
from grpo.orchestrator.endpoints import EndpointError
from grpo.orchestrator.inference.client import RequestRefused, ServerError, ServersAway, TimedOut, Unreachable
from grpo.orchestrator.monitoring.metrics import Figures
from grpo.orchestrator.rollouts.records import EpisodeResult, TrainingRow
from grpo.orchestrator.samples import RowKey, numbered_rows
from grpo.transport.records import NO_TEACHER_LOGPROB, Bool, Float32, Int32

FailureReason = Literal["unreachable", "timeout", "error", "refused", "nonsense", "temperature"]
"""Why a teacher did not score: `temperature` where it cannot score at the student's, the others as for any endpoint.
What may pass is a `timeout` of a served teacher, because it is tried until the deadline."""
HIGHEST = 1e-3
"""Log-probabilities are at most 0; so far above it rounding may bring one."""
LOWEST = -9999.0
"""The number that vLLM's OpenAI routes give in place of minus infinity."""


class Teacher(Protocol):
    """Someone who knows how likely given tokens are."""

    @property
    def num_requests(self) -> int:
        """Returns how many requests were sent, retries included."""

    @property
    def name(self) -> str:
        """Returns the model and its address, for people."""

    async def score(self, token_ids: Int32, temperature: float) -> Float32:
        """Returns [L] the natural log of each token's probability at `temperature`, given those before it, the first 0;
        NO_TEACHER_LOGPROB for a token that it does not know. Raises EndpointError with a FailureReason."""


def checked(logprobs: Sequence[float | None], num_tokens: int) -> Float32:
    """Returns [L] log-probabilities of those of tokens 1 to L - 1, the first 0. Raises EndpointError where they are too
    few, too many, or no log-probabilities."""
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
        """Asks the least loaded server."""
        self.num_requests += 1
        try:
            return checked(await self._score(token_ids.tolist(), None, temperature), len(token_ids))
        except ServerError as error:
            kinds = {
                RequestRefused: "refused",
                TimedOut: "timeout",
                Unreachable: "unreachable",
                ServersAway: "unreachable",
            }
            raise EndpointError(kinds.get(type(error), "error"), f"{self.name}: {error}") from error


class Scoring:
    """Asks a teacher how likely rollouts are, and counts."""

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher
        self.num_groups = 0
        """Groups that it is being asked about."""
        self._num = Counter({"rows": 0, "tokens": 0, "tokens_left_out": 0, "failed": 0})

    async def score(self, results: Sequence[EpisodeResult]) -> tuple[dict[RowKey, Float32], dict[str, EndpointError]]:
        """Returns [L] log-probabilities of each row's sampled tokens, 0 of its others, and by id the first failure of
        each rollout of which any row, of those that it spawned too, could not be scored. All are asked about at once,
        each row at the temperatures that it was sampled at; equal rows once."""
        scored, failed = dict[RowKey, Float32](), dict[str, EndpointError]()
        tasks = dict[tuple[bytes, float], asyncio.Task[Float32 | EndpointError]]()
        asked = list[tuple[str, RowKey, Bool, asyncio.Task[Float32 | EndpointError]]]()
        for root, key, result, row in numbered_rows(results):
            scored[key] = np.zeros(len(row.token_ids), np.float32)
            for temperature, mask in _sampled_at(result, row).items():
                question = row.token_ids.tobytes(), temperature
                if question not in tasks:
                    tasks[question] = asyncio.create_task(self._ask(row.token_ids, temperature))
                asked.append((root.id, key, mask, tasks[question]))
        self.num_groups += 1
        try:
            await asyncio.gather(*tasks.values())
        finally:
            self.num_groups -= 1
        for rollout_id, key, mask, task in asked:
            self._num["rows"] += 1
            if isinstance(answer := task.result(), EndpointError):
                self._num.update(("failed", f"failed_{answer.reason}"))
                failed.setdefault(rollout_id, answer)
                continue
            scored[key][mask] = answer[mask]
            self._num["tokens_left_out"] += int((answer[mask] == NO_TEACHER_LOGPROB).sum())
        return scored, failed

    async def _ask(self, token_ids: Int32, temperature: float) -> Float32 | EndpointError:
        self._num["tokens"] += len(token_ids)
        try:
            return await self.teacher.score(token_ids, temperature)
        except EndpointError as failure:
            return failure

    def figures(self) -> Figures:
        """Returns counts as `teacher/NAME`; a reason once it has occurred."""
        counts = {**self._num, "requests": self.teacher.num_requests}
        return Figures(counts={f"teacher/{name}": num for name, num in counts.items()})


def _sampled_at(result: EpisodeResult, row: TrainingRow) -> dict[float, Bool]:
    """Returns [L] masks of a row's sampled tokens by temperature; one, but in conversations during which it changed."""
    masks = dict[float, Bool]()
    for turn, step in zip(row.turns, row.steps, strict=True):
        if turn.begins < turn.ends:
            mask = masks.setdefault(result.steps[step].temperature, np.zeros(len(row.token_ids), np.bool_))
            mask[turn.begins : turn.ends] = True
    return masks
