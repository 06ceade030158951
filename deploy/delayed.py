"""An environment whose rewards take longer: it lengthens generation without using the processor."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.envs.base import Environment
from orchestrator.envs.registry import make_environment
from orchestrator.episodes.context import RolloutContext
from orchestrator.episodes.rubric import Rubric, Scores
from orchestrator.episodes.state import EpisodeState


class DelayedRubric(Rubric):
    """Scores as another rubric does, `delay_s` seconds later."""

    def __init__(self, rubric: Rubric, delay_s: float) -> None:
        self._rubric, self._delay_s = rubric, delay_s

    async def score(
        self, state: EpisodeState, ctx: RolloutContext, *, extras: Mapping[str, Any] | None = None
    ) -> Scores:
        """As the other rubric."""
        await asyncio.sleep(self._delay_s)
        return await self._rubric.score(state, ctx, extras=extras)


class Delayed(Environment):
    """The environment `id` with its `args`, each reward of which takes `delay_s` seconds more."""

    def __init__(self, *, id: str, args: dict[str, Any], delay_s: float) -> None:
        self._environment = make_environment(id, args)
        self.rubric = DelayedRubric(self._environment.rubric, delay_s)

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        """The other environment's."""
        return self._environment.dataset(split)
