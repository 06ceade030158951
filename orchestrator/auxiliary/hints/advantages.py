"""Hints as an advantage, beside the reward, where `loss.alpha_sdpo` makes a loss of the same signal:

    advantage of a token  +=  weight · (log π(token | with the hint) − log π(token))

π is the policy that sampled the answer, at the temperature that it was sampled at.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence

import numpy as np
from grpo.orchestrator.inference.client import ServerError
from grpo.orchestrator.monitoring.metrics import Figures
from grpo.orchestrator.rollouts.records import EpisodeResult, TrainingRow
from grpo.orchestrator.samples import RowKey, ScoredGroup, numbered_rows
from grpo.transport.records import Float32, Hint

Score = Callable[[Sequence[int], int | None, float, str | None], Awaitable[Sequence[float]]]
"""Returns [L - 1] log-probabilities of tokens 1 to L - 1 under a version, at a temperature, by one of its adapters."""


class HintAdvantages:
    """Has servers score hinted answers, and adds to the advantages of their tokens."""

    def __init__(self, weight: float, score: Score, *, adapters: Sequence[str] = ()) -> None:
        """`adapters`: names of the run's adapters, where it has several."""
        self._weight, self._score, self._adapters = weight, score, adapters
        self._num = Counter({"hinted": 0, "hints_failed": 0})

    async def add_to(self, group: ScoredGroup, hints: Mapping[RowKey, Hint]) -> None:
        """Waits for servers, who have deadlines of their own; a row that is not scored has nothing added, and is
        counted."""
        rows = [(result, row, hints[key]) for _, key, result, row in numbered_rows(group.results) if key in hints]
        scores = await asyncio.gather(*(self._scored(*one) for one in rows))
        for (result, row, hint), logprobs_K in zip(rows, scores, strict=True):
            if logprobs_K is None:
                self._num["hints_failed"] += 1
                continue
            for turn, step in zip(row.turns, row.steps, strict=True):
                mask = (turn.begins <= hint.student_index) & (hint.student_index < turn.ends)
                if mask.any():
                    gain = logprobs_K[mask] - np.asarray(result.steps[step].completion.logprobs, np.float32)
                    group.add_evidence((result.id, step), self._weight * gain, hint_logprobs=logprobs_K[mask])
                    self._num["hinted"] += 1

    async def _scored(self, result: EpisodeResult, row: TrainingRow, hint: Hint) -> Float32 | None:
        """Returns [K] log-probabilities of the tokens that the hint is for; None where a server did not say."""
        step = result.steps[row.steps[-1]]
        adapter = self._adapters[step.adapter] if self._adapters else None
        temperatures_K = row.temperatures[hint.student_index]
        logprobs_K = np.zeros(len(temperatures_K), np.float32)
        try:
            for temperature in map(float, np.unique(temperatures_K)):
                scored = await self._score(hint.teacher_token_ids.tolist(), step.version, temperature, adapter)
                mask = temperatures_K == temperature
                logprobs_K[mask] = np.asarray(scored, np.float32)[hint.teacher_index[mask] - 1]
        except ServerError:
            return None
        return logprobs_K

    def figures(self) -> Figures:
        """Returns steps that were scored and rows that were not, as `evidence/NAME`."""
        return Figures(counts={f"evidence/{name}": num for name, num in self._num.items()})
