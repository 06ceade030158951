"""The auxiliary losses: what the policy learns from besides rewards. A teacher's log-probabilities, hints (SDPO), and
preferences (DPO).

One whose weight in the trainer's loss is 0 is not there: it asks nobody and adds nothing to a batch.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from grpo.configs.auxiliary import ApiSettings, HintSettings
from grpo.configs.loss import DpoSettings, SdpoSettings
from grpo.configs.orch import OrchSettings
from grpo.orchestrator.auxiliary.evidence import Evidence
from grpo.orchestrator.auxiliary.hints.hinting import NO_HINTS, WITHHELD, HintedGroup, Hinter, open_hinter
from grpo.orchestrator.auxiliary.preferences.asked import AskedPairs
from grpo.orchestrator.auxiliary.preferences.pairs import kept_pairs, pairs_of_run
from grpo.orchestrator.auxiliary.teacher.scoring import ReferenceTeacher, Teaching
from grpo.orchestrator.auxiliary.teacher.served import ServedTeacher, open_teacher
from grpo.orchestrator.endpoints import Costs, Endpoint
from grpo.orchestrator.inference.client import InferenceClient
from grpo.orchestrator.ledger import Ledger
from grpo.orchestrator.resuming import Progress
from grpo.orchestrator.rollouts.engine import RolloutEngine
from grpo.orchestrator.rollouts.records import EpisodeResult
from grpo.orchestrator.samples import FinishedGroup
from grpo.orchestrator.scheduler import Scheduler
from grpo.orchestrator.shaping import RewardShaping
from grpo.orchestrator.startup import Ready
from grpo.orchestrator.workers.pool import WorkerPool
from grpo.transport.records import PreferencePair

log = logging.getLogger(__name__)

WARN_EVERY_S = 60.0


@dataclass(slots=True, kw_only=True)
class AuxiliaryLosses:
    """Those that are on."""

    teaching: Teaching | None = None
    hinter: Hinter | None = None
    asked_pairs: AskedPairs | None = None
    makes_pairs: Callable[[], bool] = lambda: True
    """Whether what teachers say becomes pairs: not where it is for advantages alone, nor once their weight is 0."""
    trains_hints: Callable[[], bool] = lambda: True
    """Whether hints go with the next batch: not where they are for advantages alone, nor once their weight is 0."""
    evidence: Evidence | None = None
    """Where hints or teachers are an advantage."""
    pairs_of_step: Callable[[int], list[PreferencePair]] = lambda step: []
    """The pairs that go with a batch, in whose transaction it is written that they do."""
    _hints: Counter[str] = field(default_factory=lambda: Counter({"errors": 0, "given": 0}))
    """What became of errors since the metrics were last asked for; what ever occurred stays in the set."""
    _next_warning_s: dict[str, float] = field(default_factory=dict)

    # --- a group, before it waits for its batch ---

    async def hinted(self, results: Sequence[EpisodeResult], *, withheld: Mapping[str, str]) -> HintedGroup:
        """Hints for what went wrong in a group, but in rollouts that are `withheld` from training. Waits for whoever
        writes them, who has a deadline."""
        if self.hinter is None or not (self.trains_hints() or (self.evidence is not None and self.evidence.hints)):
            return NO_HINTS
        hinted = await self.hinter.of_group(results, withheld=withheld)
        for kind, message in hinted.problems.items():
            self._warn(f"hints {kind}", message)
        return hinted

    async def taught(self, group: FinishedGroup) -> FinishedGroup:
        """The group with the teacher's log-probabilities; rollouts of which a sample has none are withheld. Waits for
        the teacher, who has a deadline."""
        if self.teaching is None or not group.samples:
            return group
        samples, failed = await self.teaching.teach(group.samples)
        for failure in failed.values():
            self._warn(f"teacher {failure.reason}", str(failure))
        reasons = {rollout_id: f"teacher_{failure.reason}" for rollout_id, failure in failed.items()}
        return replace(group, samples=samples, withheld={**group.withheld, **reasons})

    def offer(self, results: Sequence[EpisodeResult]) -> None:
        """Scored rollouts about which teachers may be asked, beside everything else."""
        if self.asked_pairs is not None and self.makes_pairs():
            self.asked_pairs.offer(results)

    # --- a batch ---

    def count_hints(self, groups: Sequence[FinishedGroup]) -> None:
        """Of groups that leave with a batch, or of which nothing is left to be trained."""
        for group in groups:
            self._hints.update(group.hinted.counts)
            self._hints.update(name for one in group.hints for name in ("given", f"given_{one.source}"))
            if withheld := len(group.hinted.given) - len(group.hints):
                self._hints[f"left_out_{WITHHELD}"] += withheld

    def metrics(self) -> dict[str, float]:
        """Of what is on, since the last call."""
        metrics = {} if self.teaching is None else self.teaching.metrics()
        if self.evidence is not None:
            metrics |= self.evidence.metrics()
        if self.hinter is not None:
            metrics |= {f"hints/{name}": float(num) for name, num in self._hints.items()} | self.hinter.metrics()
            self._hints = Counter(dict.fromkeys(self._hints, 0))
        if self.asked_pairs is not None:
            metrics |= self.asked_pairs.metrics()
            for kind, message in self.asked_pairs.problems().items():
                self._warn(f"preferences {kind}", message)
        return metrics

    def state(self) -> dict[str, Any]:
        """JSON, to be kept with a batch."""
        return {} if self.asked_pairs is None else self.asked_pairs.state()

    async def close(self) -> None:
        """Gives up what is not done."""
        for one in (self.asked_pairs, self.hinter):
            if one is not None:
                await one.close()

    def _warn(self, kind: str, message: str) -> None:
        """Each kind at most once in a while: metrics count them."""
        now_s = time.monotonic()
        if now_s >= self._next_warning_s.get(kind, 0.0):
            self._next_warning_s[kind] = now_s + WARN_EVERY_S
            log.warning("%s: %s", kind, message)


# --- from settings ---


async def find_teacher(
    settings: OrchSettings, ready: Ready, environments: Mapping[str, WorkerPool]
) -> ServedTeacher | None:
    """The teacher that serves already, or that the launcher starts; None where there is none, or it is the model before
    training. Raises ValueError."""
    chosen = settings.teacher_model
    if chosen is None or chosen.reference or not ready.trainer.loss.teacher_tau:
        return None
    ready.status.set("starting", waiting_for=f"the teacher at {', '.join(chosen.client.base_url or ())}")
    schedule, roles = settings.sampling.temp_scheduler, [environments[env.label].loaded.roles for env in settings.env]
    scheduled = None if schedule is None else [schedule.start_temperature, schedule.end_temperature]
    return await open_teacher(
        chosen,
        model_folder=ready.model_folder,
        api_key=os.environ.get(chosen.client.api_key_var),
        temperatures=[
            *(scheduled or [settings.sampling.temperature]),
            *(role.temperature for own in roles for role in own if role.temperature is not None),
        ],
        wait_s=settings.client.timeout,
    )


def longest_sample(settings: OrchSettings, ready: Ready, teacher: ServedTeacher | None) -> int:
    """Longest prompt with answer, in tokens, that servers and trainer take and the teacher can score. vLLM samples one
    token more than it scores, for which there must be room."""
    limits = [ready.context_len]
    if teacher is not None and teacher.longest is not None:
        limits.append(teacher.longest)
    if _servers_score(settings, ready):
        limits.append(ready.server_len - 1)
    return min(limits)


def shortest_server(settings: OrchSettings, ready: Ready) -> int:
    """The least `max_model_len` of a server that joins late."""
    return min(ready.context_len + _servers_score(settings, ready), ready.server_len)


def _reference_teaches(settings: OrchSettings, ready: Ready) -> bool:
    chosen = settings.teacher_model
    return bool(ready.trainer.loss.teacher_tau) and chosen is not None and chosen.reference


def _servers_score(settings: OrchSettings, ready: Ready) -> bool:
    """Whether the run's own servers score samples."""
    scored = settings.reward_shaping.reference_kl > 0 or settings.hints.advantage_weight > 0
    return _reference_teaches(settings, ready) or scored


def make_shaping(settings: OrchSettings, client: InferenceClient) -> RewardShaping:
    """With the model before training as the reference, where the KL to it is taken off rewards."""
    if not settings.reward_shaping.reference_kl:
        return RewardShaping(settings)
    return RewardShaping(settings, Teaching(ReferenceTeacher(client.score)))


def make_auxiliary(
    settings: OrchSettings,
    ready: Ready,
    client: InferenceClient,
    engine: RolloutEngine,
    scheduler: Scheduler,
    ledger: Ledger,
    *,
    teacher: ServedTeacher | None,
    progress: Progress,
) -> AuxiliaryLosses:
    """`teacher` is the one that was found. Raises ValueError for what cannot be honoured."""
    loss, chosen, preferences = ready.trainer.loss, settings.teacher_model, settings.preferences
    hints_on = loss.alpha_sdpo or settings.hints.advantage_weight
    preferences_on = loss.beta_replay or preferences.advantage_weight
    for name, is_set, weight, value in (
        ("teacher_model", chosen is not None, "teacher_tau", loss.teacher_tau),
        ("hints", settings.hints != HintSettings(), "alpha_sdpo", hints_on),
        ("preferences", preferences.gives_pairs, "beta_replay", preferences_on),
    ):
        if is_set and not value:
            log.info("%s is off: the trainer's loss.%s is 0", name, weight)
    auxiliary = AuxiliaryLosses(teaching=None if teacher is None else Teaching(teacher))
    adapters, key_var = settings.model.lora_adapters, settings.client.api_key_var
    if _reference_teaches(settings, ready):
        auxiliary.teaching = Teaching(ReferenceTeacher(client.score))

    def opened(api: ApiSettings, costs: Costs) -> Endpoint:
        return Endpoint(
            api,
            costs,
            own_servers=lambda: client.pool.routed,
            own_key_var=key_var if os.environ.get(key_var) else None,
            own_model=settings.model.name,
        )

    def counts(weight: float, term: SdpoSettings | DpoSettings) -> bool:
        """Whether the next batch's loss has the term."""
        falls = term.decay_steps is not None and scheduler.shipped >= term.warmup_steps + term.decay_steps
        return weight > 0 and not falls

    auxiliary.trains_hints = partial(counts, loss.alpha_sdpo, loss.sdpo)
    auxiliary.makes_pairs = partial(counts, loss.beta_replay, loss.dpo)
    if hints_on:
        auxiliary.hinter = open_hinter(settings, engine, opened)
    if preferences_on and preferences.pairs is not None:
        pairs = pairs_of_run(
            Path(preferences.pairs),
            base_model=ready.model_identity,
            seq_len=settings.seq_len,
            num_adapters=max(1, len(adapters)),
        )
        auxiliary.pairs_of_step = partial(kept_pairs, pairs, max_pairs=preferences.max_pairs, seed=settings.seed)
    elif preferences_on:
        auxiliary.asked_pairs = asked = AskedPairs(
            preferences,
            ledger,
            partial(client.score, version=None),
            engine.templates.of,
            opened,
            base_model=ready.model_identity,
            sequence_len=settings.seq_len,
            step=progress.step,
            state=progress.costs,
        )
        auxiliary.pairs_of_step = asked.take
    if settings.hints.advantage_weight or preferences.advantage_weight:
        auxiliary.evidence = Evidence(
            hints=settings.hints.advantage_weight,
            teachers=preferences.advantage_weight,
            score=client.score,
            answers=None if auxiliary.asked_pairs is None else auxiliary.asked_pairs.answers,
            select=preferences.select,
            adapters=adapters,
        )
    return auxiliary
