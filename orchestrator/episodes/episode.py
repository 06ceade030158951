"""Episodes: protocols of a rollout, executed to a scored trace."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from orchestrator.episodes.arena import Arena
from orchestrator.episodes.types import Failure, Role, Rollout, Score, Step, Task


@dataclass(slots=True)
class EpisodeState:
    """What a rollout has gathered while it runs."""

    trajectory: list[Step] = field(default_factory=list)

    @property
    def last_text(self) -> str:
        """The newest answer, which the rubric sees."""
        return self.trajectory[-1].text


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateResult:
    """A scored rollout."""

    rollout: Rollout
    score: Score


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRollout:
    """A rollout that its environment could not score."""

    rollout: Rollout
    failure: Failure


class Episode(ABC):
    """How a task is rolled out. Holds no state of a rollout, so one episode serves all tasks of an environment."""

    def __init__(self, role: Role) -> None:
        self.role = role

    @abstractmethod
    async def sample(
        self, arena: Arena, task: Task, *, num: int, version: int, seed: int | None
    ) -> Sequence[EpisodeState]:
        """`num` independent rollouts of one task, not yet scored."""

    async def generate(
        self, arena: Arena, task: Task, *, group: str, num: int, version: int, seed: int | None = None
    ) -> list[GenerateResult | FailedRollout]:
        """A group of `num` rollouts: sampled, then scored in one round trip. Rollouts are named `group/number`."""
        states = await self.sample(arena, task, num=num, version=version, seed=seed)
        scores = await arena.scorer.score(task, [state.last_text for state in states])
        results: list[GenerateResult | FailedRollout] = []
        for number, (state, score) in enumerate(zip(states, scores, strict=True)):
            rollout = Rollout(id=f"{group}/{number}", task=task, steps=tuple(state.trajectory))
            if isinstance(score, Failure):
                results.append(FailedRollout(rollout=rollout, failure=score))
            else:
                results.append(GenerateResult(rollout=rollout, score=score))
        return results


class SingleTurnEpisode(Episode):
    """One prompt, one answer. A group is one request, so that the server reads the prompt once."""

    async def sample(
        self, arena: Arena, task: Task, *, num: int, version: int, seed: int | None
    ) -> Sequence[EpisodeState]:
        prompt = arena.renderer.prompt_ids(task.messages)
        completions = await arena.policy.generate(prompt, role=self.role, num=num, version=version, seed=seed)
        return [
            EpisodeState(
                [Step(role=self.role, prompt_token_ids=prompt, completion=completion, text=text, version=version)]
            )
            for completion, text in zip(completions, arena.renderer.texts(completions), strict=True)
        ]
