"""Evaluates the versions that are due, beside the training or instead of it."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from grpo.configs.orch import OrchSettings
from grpo.orchestrator.evaluate import evaluate, held_out, is_due
from grpo.orchestrator.monitoring.fates import Fates
from grpo.orchestrator.monitoring.timeline import ORCHESTRATOR
from grpo.orchestrator.rollouts.engine import RolloutEngine
from grpo.orchestrator.rollouts.records import Messages
from grpo.orchestrator.scheduler import Scheduler

log = logging.getLogger(__name__)


EVALUATION = "evaluation"
"""Why no group starts."""
CANCELLED = "cancelled_for_eval"
"""Why a training rollout was dropped."""


@dataclass(kw_only=True)
class Evaluating:
    """Evaluations, one after the other. While one waits for its turn, no other version but the last is evaluated."""

    settings: OrchSettings
    prompts: Mapping[str, Sequence[Messages]]
    """The prompts of the held-out examples, by environment."""
    passed_over: int | None
    """The version that a resumed run begins with, where it is not evaluated again."""
    scheduler: Scheduler
    engine: RolloutEngine
    fates: Fates
    cancel_rollouts: Callable[[str], int]
    """Cancels what is being sampled for training, for a reason, and returns how many groups that were; called before an
    evaluation where the settings say so."""
    _due: asyncio.Queue[tuple[int, ExitStack] | None] = field(default_factory=asyncio.Queue, init=False)
    _num_skipped: int = field(default=0, init=False)
    """Versions that were due and are not evaluated."""
    _num_skipped_before: int = field(default=0, init=False)
    """At the evaluation before."""

    def version_live(self, version: int) -> None:
        """All servers serve `version`; it stays until it is evaluated, where that is due."""
        scheduler, settings = self.scheduler, self.settings
        due = bool(held_out(settings)) and is_due(settings, version, passed_over=self.passed_over)
        if not due or self.fates.recorder.has_evaluated(version):
            return
        if self._due.qsize() and version != self.settings.max_steps:  # servers hold each version that waits
            self._num_skipped += 1
            if self._num_skipped.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ...
                log.warning(
                    "evaluation is slower than training: version %d is not evaluated, because another one waits "
                    "already (%d until now); raise eval.interval, or lower eval.num_examples",
                    version,
                    self._num_skipped,
                )
            return
        until_evaluated = ExitStack()
        until_evaluated.enter_context(scheduler.pin(version, by=EVALUATION))
        if self.settings.eval.cancel_inflight_rollouts_on_eval:
            until_evaluated.enter_context(scheduler.block(EVALUATION))
            if num := self.cancel_rollouts(CANCELLED):
                log.info("version %d: cancelled %d groups in flight, for the evaluation", version, num)
        self._due.put_nowait((version, until_evaluated))

    def no_more_versions(self) -> None:
        """The last version is live."""
        self._due.put_nowait(None)

    async def run(self) -> None:
        """Consumes: versions that are due. Waits for: them, and the servers' answers. Unblocked by: versions, servers.
        Ends when: there are no more versions."""
        while (due := await self._due.get()) is not None:
            version, until_evaluated = due
            with until_evaluated:
                with self.fates.timeline.span(ORCHESTRATOR, "evaluate", step=version):
                    evaluation = await evaluate(self.engine, self.settings, self.prompts, version=version)
                skipped = float(self._num_skipped - self._num_skipped_before)
                self._num_skipped_before = self._num_skipped
                self.fates.evaluated(replace(evaluation, metrics={**evaluation.metrics, "eval/skipped": skipped}))
