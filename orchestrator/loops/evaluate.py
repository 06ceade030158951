"""Evaluates the versions that are due, beside the training or instead of it."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

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


class Evaluating:
    """Evaluations, one after the other."""

    def __init__(self, shared: Shared, *, cancel_rollouts: Callable[[str], int]) -> None:
        """`cancel_rollouts` cancels what is being sampled for training, for a reason, and returns how many groups that
        were; it is called before an evaluation where the settings say so."""
        settings = shared.settings
        self._shared, self._cancel_rollouts = shared, cancel_rollouts
        skips = shared.progress.resumed and settings.eval.skip_eval_on_resume
        self._suites = [
            Suite(
                held_out=one,
                prompts=shared.ready.eval_prompts[one.key],
                params=SamplingParams(temperature=one.temperature, max_tokens=one.max_tokens),
                adapters=RoleAdapters(names=settings.model.lora_adapters, of_roles=one.adapters),
            )
            for one in held_out(settings)
        ]
        self._due_of = partial(
            due,
            self._suites,
            base_model=settings.eval.eval_base_model,
            max_steps=settings.max_steps,
            passed_over=shared.progress.first_version if skips else None,
        )
        self._due: asyncio.Queue[tuple[int, list[Suite]] | None] = asyncio.Queue()

    def version_live(self, version: int) -> None:
        """All servers serve `version`; it stays until it is evaluated, where that is due."""
        shared, suites = self._shared, self._due_of(version)
        if not suites or shared.recorder.has_evaluated(version):
            return
        if waiting := self._due.qsize():
            log.warning(
                "evaluation is slower than training: version %d waits for %d others; raise eval.interval, or lower "
                "eval.num_examples",
                version,
                waiting,
            )
        shared.scheduler.pin(version)
        shared.num_wanting += 1
        if shared.settings.eval.cancel_inflight_rollouts_on_eval:
            shared.scheduler.pause()
            if num := self._cancel_rollouts(CANCELLED):
                log.info("version %d: cancelled %d groups in flight, for the evaluation", version, num)
        self._due.put_nowait((version, suites))

    def no_more_versions(self) -> None:
        """The last version is live."""
        self._due.put_nowait(None)

    async def run(self) -> None:
        """Consumes: versions that are due. Waits for: them, and the servers' answers. Unblocked by: versions, servers.
        Ends when: there are no more versions."""
        shared = self._shared
        while (one := await self._due.get()) is not None:
            version, suites = one
            with shared.timeline.span(ORCHESTRATOR, "evaluate", step=version):
                evaluation = await evaluate(
                    shared.engine,
                    suites,
                    version=version,
                    complete=len(suites) == len(self._suites),
                    seed_of=partial(group_seed, shared.settings.sampling.seed),
                )
            shared.recorder.evaluated(evaluation)
            shared.scheduler.unpin(version)
            shared.num_wanting -= 1
            if shared.settings.eval.cancel_inflight_rollouts_on_eval:
                shared.scheduler.unpause()
            shared.changed.ring()
