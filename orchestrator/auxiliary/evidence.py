"""Evidence as an advantage: what a hint and what teachers say of an answer, beside its reward.

    advantage of a token  +=  w_hints · (log π(token | with the hint) − log π(token))  +  w_teachers · consensus

π is the policy that sampled the answer, at the temperature that it was sampled at. The consensus is the share of the
teachers that would have done the same, less the largest share that would have done one other thing: from -1 to 1. It
stands for a reward of the process, where `loss.alpha_sdpo` and `loss.beta_replay` make losses of the same signals.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from grpo.configs.auxiliary import Selection
from grpo.orchestrator.advantage import StepKey
from grpo.orchestrator.auxiliary.hints.hinting import Hints
from grpo.orchestrator.auxiliary.preferences.agreement import Action, Tools, words
from grpo.orchestrator.auxiliary.preferences.turns import Turn, chosen_turns
from grpo.orchestrator.inference.client import ServerError
from grpo.orchestrator.rollouts.records import EpisodeResult, StepEvidence, TrainingRow, levels, walk_all
from grpo.transport.records import Float32, Hint

Score = Callable[[Sequence[int], int | None, float, str | None], Awaitable[Sequence[float]]]
"""Gives [L - 1] log-probabilities of tokens 1 to L - 1 under a version, at a temperature, by one of its adapters."""
Answers = Callable[[Sequence[Mapping[str, Any]], Tools], Awaitable[Mapping[str, Action | None]]]
"""Gives what each teacher would do after messages; None of one that did not answer."""


@dataclass(kw_only=True)
class Evidence:
    """Gathers evidence about a group's steps; weights of 0 gather none."""

    hints: float
    """Weight of what hints say."""
    teachers: float
    """Weight of what teachers say."""
    score: Score
    answers: Answers | None = None
    """Asks the teachers, where `teachers` is not 0."""
    select: Sequence[Selection] = ()
    """Which turns they are asked about."""
    adapters: Sequence[str] = ()
    """Names of the run's adapters, where it has several."""
    _num: Counter[str] = field(default_factory=Counter)

    async def of_group(
        self, results: Sequence[EpisodeResult], hints: Hints, *, withheld: Mapping[str, str]
    ) -> dict[StepKey, StepEvidence]:
        """What is known of each step of which anything is, but in rollouts that are `withheld` from training. Waits
        for servers and teachers, who have deadlines of their own; an answer that does not come is no evidence, and
        is counted."""
        kept = [result for result in results if result.id not in withheld]
        found: dict[StepKey, StepEvidence] = {}
        rows = [
            (result, row, hints[result.id, number])
            for result in walk_all(kept)
            for number, row in enumerate(result.rows)
            if self.hints and (result.id, number) in hints
        ]
        turns = [turn for level in levels(kept) for turn in self._chosen(level)]
        logprobs, answers = await asyncio.gather(
            asyncio.gather(*(self._hinted(*one) for one in rows)),
            asyncio.gather(*(self._asked(turn) for turn in turns)),
        )
        for (result, row, hint), known in zip(rows, logprobs, strict=True):
            if known is not None:
                found |= {(result.id, step): one for step, one in _by_step(row, hint, known).items()}
        for turn, given in zip(turns, answers, strict=True):
            if given:
                key = (turn.rollout.id, turn.step)
                teachers = {name: action.written() for name, action in given.items()}
                one = msgspec.structs.replace(found.get(key, StepEvidence()), teachers=teachers)
                found[key] = msgspec.structs.replace(one, consensus=consensus(given, turn.action))
        self._num.update(hinted=sum(one.hint_logprobs is not None for one in found.values()))
        self._num.update(asked=sum(one.consensus is not None for one in found.values()))
        return found

    def added(self, results: Sequence[EpisodeResult], found: Mapping[StepKey, StepEvidence]) -> dict[StepKey, Float32]:
        """What goes on top of each step's advantage, [L] for its sampled tokens."""
        added = {}
        for result in walk_all(results):
            for place, step in enumerate(result.steps):
                if (one := found.get((result.id, place))) is None:
                    continue
                own = np.asarray(step.completion.logprobs, np.float32)
                gain = 0.0 if one.hint_logprobs is None else self.hints * (one.hint_logprobs - own)
                added[result.id, place] = gain + np.full_like(own, self.teachers * (one.consensus or 0.0))
        return added

    def metrics(self) -> dict[str, float]:
        """Counts since the last call, as `evidence/NAME`."""
        now, self._num = self._num, Counter()
        return {f"evidence/{name}": float(now[name]) for name in ("hinted", "hints_failed", "asked")}

    def _chosen(self, level: Sequence[EpisodeResult]) -> list[Turn]:
        return chosen_turns(level, self.select) if self.teachers and self.answers is not None else []

    async def _asked(self, turn: Turn) -> dict[str, Action]:
        assert self.answers is not None
        answers = await self.answers(turn.messages, turn.tools)
        return {name: action for name, action in answers.items() if action is not None}

    async def _hinted(self, result: EpisodeResult, row: TrainingRow, hint: Hint) -> Float32 | None:
        """[K] of the tokens that the hint is for; None where a server did not say."""
        step = result.steps[row.steps[-1]]
        adapter = self.adapters[step.adapter] if self.adapters else None
        temperatures_K = row.temperatures[hint.student_index]
        logprobs_K = np.zeros(len(temperatures_K), np.float32)
        try:
            for temperature in map(float, np.unique(temperatures_K)):
                scored = await self.score(hint.teacher_token_ids.tolist(), step.version, temperature, adapter)
                places = temperatures_K == temperature
                logprobs_K[places] = np.asarray(scored, np.float32)[hint.teacher_index[places] - 1]
        except ServerError:
            self._num["hints_failed"] += 1
            return None
        return logprobs_K


def _by_step(row: TrainingRow, hint: Hint, logprobs_K: Float32) -> dict[int, StepEvidence]:
    """The log-probabilities of the steps whose turns the hint is for."""
    found = {}
    for turn, step in zip(row.turns, row.steps, strict=True):
        places = (turn.begins <= hint.student_index) & (hint.student_index < turn.ends)
        if places.any():
            found[step] = StepEvidence(hint_logprobs=logprobs_K[places])
    return found


def consensus(answers: Mapping[str, Action], student: Action) -> float:
    """The share of the answers that are the student's, less the largest share that is one other action: 1 where all
    teachers would have done the same, -1 where all would have done one other thing. Two actions are the same where
    their `words` are. `answers`: at least one."""
    own, said = words(student.written()), Counter(tuple(words(action.written())) for action in answers.values())
    same = said.pop(tuple(own), 0)
    return (same - max(said.values(), default=0)) / len(answers)


def with_evidence(result: EpisodeResult, found: Mapping[StepKey, StepEvidence]) -> EpisodeResult:
    """The rollout and all that it spawned, their steps with what was found, for a credit of the user's own."""
    steps = tuple(
        msgspec.structs.replace(step, evidence=found.get((result.id, place))) for place, step in enumerate(result.steps)
    )
    children = tuple(with_evidence(child, found) for child in result.children)
    return msgspec.structs.replace(result, steps=steps, children=children)
