"""Evaluates the versions that are due, beside the training or instead of it."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from configs.evaluation import HeldOut
from orchestrator.evaluate import Suite, due, evaluate
from orchestrator.loops.shared import Shared
from orchestrator.monitoring.timeline import ORCHESTRATOR
from orchestrator.rollouts.records import SamplingParams
from orchestrator.rollouts.roles import RoleAdapters
from orchestrator.seeds import group_seed
from orchestrator.startup import held_out

log = logging.getLogger(__name__)


CANCELLED = "cancelled_for_eval"
"""Why a training rollout was dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Due:
    version: int
    suites: list[Suite]


class Evaluating:
    """Evaluations, one after the other."""

    def __init__(self, shared: Shared, *, cancel_rollouts: Callable[[str], int]) -> None:
        """`cancel_rollouts` cancels what is being sampled for training, for a reason, and returns how many groups that
        were; it is called before an evaluation where the settings say so."""
        self._shared, self._cancel_rollouts = shared, cancel_rollouts
        skips = shared.progress.resumed and shared.settings.eval.skip_eval_on_resume
        self._passed_over = shared.progress.first_version if skips else None
        self._suites = [self._suite(one) for one in held_out(shared.settings)]
        self._due: asyncio.Queue[_Due | None] = asyncio.Queue()

    def _suite(self, one: HeldOut) -> Suite:
        return Suite(
            held_out=one,
            prompts=self._shared.ready.eval_prompts[one.key],
            params=SamplingParams(temperature=one.temperature, max_tokens=one.max_tokens),
            adapters=RoleAdapters(names=self._shared.settings.model.lora_adapters, of_roles=one.adapters),
        )

    def version_live(self, version: int) -> None:
        """All servers serve `version`; it stays until it is evaluated, where that is due."""
        settings, scheduler = self._shared.settings, self._shared.scheduler
        suites = due(
            self._suites,
            version,
            base_model=settings.eval.eval_base_model,
            max_steps=settings.max_steps,
            passed_over=self._passed_over,
        )
        if not suites or self._shared.recorder.has_evaluated(version):
            return
        if waiting := self._due.qsize():
            log.warning(
                "evaluation is slower than training: version %d waits for %d others; raise eval.interval, or lower "
                "eval.num_examples",
                version,
                waiting,
            )
        scheduler.pin(version)
        self._shared.num_wanting += 1
        if settings.eval.cancel_inflight_rollouts_on_eval:
            scheduler.pause()
            if num := self._cancel_rollouts(CANCELLED):
                log.info("version %d: cancelled %d groups in flight, for the evaluation", version, num)
        self._due.put_nowait(_Due(version=version, suites=suites))

    def no_more_versions(self) -> None:
        """The last version is live."""
        self._due.put_nowait(None)

    async def run(self) -> None:
        """Consumes: versions that are due. Waits for: them, and the servers' answers. Unblocked by: versions, servers.
        Ends when: there are no more versions."""
        shared = self._shared
        while (due := await self._due.get()) is not None:
            with shared.timeline.span(ORCHESTRATOR, "evaluate", step=due.version):
                evaluation = await evaluate(
                    shared.engine,
                    due.suites,
                    version=due.version,
                    complete=len(due.suites) == len(self._suites),
                    seed_of=self._seed_of,
                )
            shared.recorder.evaluated(evaluation)
            shared.scheduler.unpin(due.version)
            shared.num_wanting -= 1
            if shared.settings.eval.cancel_inflight_rollouts_on_eval:
                shared.scheduler.unpause()
            shared.changed.ring()

    def _seed_of(self, name: str) -> int | None:
        return group_seed(self._shared.settings.sampling.seed, name)
