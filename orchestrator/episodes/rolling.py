"""How a task becomes a group of scored rollouts."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from orchestrator.episodes.policy import Backends
from orchestrator.episodes.roles import POLICY, SHARED_ADAPTER, RoleAdapters
from orchestrator.episodes.tree import FailedRollout, GenerateResult
from orchestrator.episodes.types import Failure, Rollout, SamplingParams, Step, Task


class Roller(ABC):
    """Rolls out tasks of an environment. Holds no state of a rollout, so one serves all."""

    @abstractmethod
    async def generate(
        self, backends: Backends, task: Task, *, group: str, num: int, version: int, seed: int | None = None
    ) -> list[GenerateResult | FailedRollout]:
        """A group of `num` rollouts, sampled by `version` and scored, which are named `group/number`. Raises
        PromptTooLong, and what servers and broken environments raise."""


class SingleTurn(Roller):
    """One prompt, one answer. A group is one request, so that the server reads the prompt once, and its answers are
    scored in one round trip."""

    def __init__(self, params: SamplingParams, adapters: RoleAdapters = SHARED_ADAPTER) -> None:
        self._params, self._adapter = replace(params, adapter=adapters.name(POLICY)), adapters.place(POLICY)

    async def generate(
        self, backends: Backends, task: Task, *, group: str, num: int, version: int, seed: int | None = None
    ) -> list[GenerateResult | FailedRollout]:
        steps = await self._sample(backends, task, num=num, version=version, seed=seed)
        scores = await backends.scorer.score(task, [step.text for step in steps])
        results: list[GenerateResult | FailedRollout] = []
        for number, (step, score) in enumerate(zip(steps, scores, strict=True)):
            rollout = Rollout(id=f"{group}/{number}", task=task, steps=(step,))
            if isinstance(score, Failure):
                results.append(FailedRollout(rollout=rollout, failure=score))
                continue
            rewards = {POLICY: score.reward}
            results.append(
                GenerateResult(rollout=rollout, rewards=rewards, accuracy=score.accuracy, metrics=score.metrics)
            )
        return results

    async def _sample(
        self, backends: Backends, task: Task, *, num: int, version: int, seed: int | None
    ) -> Sequence[Step]:
        prompt = backends.renderer.prompt_ids(task.messages)
        completions = await backends.policy.generate(prompt, params=self._params, num=num, version=version, seed=seed)
        return [
            Step(
                role=POLICY,
                temperature=self._params.temperature,
                prompt_token_ids=prompt,
                completion=completion,
                text=text,
                version=version,
                adapter=self._adapter,
            )
            for completion, text in zip(completions, backends.renderer.texts(completions), strict=True)
        ]
