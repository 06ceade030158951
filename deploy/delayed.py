"""An environment whose rewards take longer: it lengthens generation without using the processor."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.envs.base import Environment
from orchestrator.envs.registry import make_environment
from orchestrator.episodes.rubric import Rubric
from orchestrator.episodes.types import Score


class DelayedRubric(Rubric):
    """Scores as another rubric does, `delay_s` seconds later."""

    def __init__(self, rubric: Rubric, delay_s: float) -> None:
        self._rubric, self._delay_s = rubric, delay_s

    async def score(self, completion: str, example: Any) -> Score:
        """As the other rubric."""
        time.sleep(self._delay_s)  # noqa: ASYNC251 (the environment's process does one thing at a time)
        return await self._rubric.score(completion, example)


class Delayed(Environment):
    """The environment `id` with its `args`, each reward of which takes `delay_s` seconds more."""

    def __init__(self, *, id: str, args: dict[str, Any], delay_s: float) -> None:
        self._environment = make_environment(id, args)
        self.rubric = DelayedRubric(self._environment.rubric, delay_s)

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        """The other environment's."""
        return self._environment.dataset(split)
