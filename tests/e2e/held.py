"""The quickstart's environment, whose rewards stop at a gate: a run comes so far and stands still until the gate is
opened, however slow the test is that wants to do something in its middle."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.envs.reverse_text import ReverseText
from orchestrator.rollouts.context import RolloutContext
from orchestrator.rollouts.rubric import Rubric, Scores
from orchestrator.rollouts.state import EpisodeState


class HeldRubric(Rubric):
    """Scores as another rubric does, after the first `free` times only once the gate is open."""

    def __init__(self, rubric: Rubric, gate: Path, free: int) -> None:
        self._rubric, self._gate, self._free = rubric, gate, free

    async def score(
        self, state: EpisodeState, ctx: RolloutContext, *, extras: Mapping[str, Any] | None = None
    ) -> Scores:
        """As the other rubric. Counts in a file, since the environment's process may be another one by now."""
        with self._gate.with_suffix(".scored").open("ab") as scored:
            scored.write(b".")
            scored.flush()
            num_scored = scored.tell()
        while num_scored > self._free and not self._gate.exists():  # noqa: ASYNC110 (a file has no event)
            await asyncio.sleep(0.02)
        return await self._rubric.score(state, ctx, extras=extras)


class Held(ReverseText):
    """Nothing else is scored before the gate, a file, is there."""

    def __init__(self, *, gate: str, free: int) -> None:
        super().__init__()
        self.rubric = HeldRubric(self.rubric, Path(gate), free)


def held(gate: Path, *, free: int) -> tuple[str, str, str, str]:
    """Options of `grpo configs/quickstart` for a run that stands still after `free` rewards until `gate` is there."""
    env: Mapping[str, Any] = {"id": f"{Path(__file__)}:Held", "args": {"gate": str(gate), "free": free}}
    return "--orch.env", json.dumps([env]), "--orch.reward_timeout_s", "600"
