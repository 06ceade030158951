"""The auxiliary losses: what the policy learns from besides rewards. A teacher's log-probabilities, hints (SDPO), and
preferences (DPO).

One whose weight in the trainer's loss is 0 is not there: it asks nobody and adds nothing to a batch.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from configs.auxiliary import ApiSettings, HintSettings
from configs.orch import OrchSettings
from configs.train import TrainSettings
from orchestrator.frozen import FrozenVersion
from orchestrator.hints.hinting import NO_HINTS, WITHHELD, HintedGroup, Hinter, open_hinter
from orchestrator.inference.client import InferenceClient
from orchestrator.ledger import Ledger
from orchestrator.preferences.asked import AskedPairs
from orchestrator.preferences.pairs import KeptPairs, pairs_of_run
from orchestrator.preferences.teachers import Api, Costs, open_api
from orchestrator.resuming import Progress
from orchestrator.rollouts.engine import RolloutEngine
from orchestrator.rollouts.records import EpisodeResult
from orchestrator.samples import FinishedGroup
from orchestrator.scheduler import Scheduler
from orchestrator.startup import Ready
from orchestrator.teacher.policy import PolicyTeacher
from orchestrator.teacher.scoring import Teaching
from orchestrator.teacher.served import ServedTeacher, open_teacher
from orchestrator.workers.pool import WorkerPool
from transport.records import PreferencePair

log = logging.getLogger(__name__)

WARN_EVERY_S = 60.0


class RareWarnings:
    """Warnings in the log, each kind at most once in a while."""

    def __init__(self) -> None:
        self._next_s: dict[str, float] = {}
        self._num: Counter[str] = Counter()

    def add(self, kind: str, message: str) -> None:
        """Says it, with how often it happened since it was last said."""
        self._num[kind] += 1
        now_s = time.monotonic()
        if now_s >= self._next_s.get(kind, 0.0):
            self._next_s[kind] = now_s + WARN_EVERY_S
            log.warning("%s (%d times since this was last said)", message, self._num.pop(kind))


@dataclass(slots=True, kw_only=True)
class AuxiliaryLosses:
    """Those that are on."""

    teaching: Teaching | None = None
    frozen: FrozenVersion | None = None
    """Of a teacher that is the policy itself."""
    hinter: Hinter | None = None
    asked_pairs: AskedPairs | None = None
    kept_pairs: KeptPairs | None = None
    """Of another run, instead of asking."""
    num_being_taught: int = 0
    """Groups for which the teacher is asked."""
    _hints: Counter[str] = field(default_factory=Counter)
    """What became of errors since the metrics were last asked for; what ever occurred stays in the set."""
    _warnings: RareWarnings = field(default_factory=RareWarnings)

    # --- a group, before it waits for its batch ---

    async def hinted(self, results: Sequence[EpisodeResult], *, withheld: Mapping[str, str]) -> HintedGroup:
        """Hints for what went wrong in a group, but in rollouts that are `withheld` from training. Waits for whoever
        writes them, who has a deadline."""
        if self.hinter is None:
            return NO_HINTS
        hinted = await self.hinter.of_group(results, withheld=withheld)
        for kind, message in hinted.problems.items():
            self._warnings.add(f"hints {kind}", message)
        return hinted

    async def taught(self, group: FinishedGroup) -> FinishedGroup:
        """The group with the teacher's log-probabilities; rollouts of which a sample has none are withheld. Waits for
        the teacher, who has a deadline."""
        if self.teaching is None or not group.samples:
            return group
        self.num_being_taught += 1
        try:
            with self.frozen.using() if self.frozen is not None else nullcontext():
                taught = await self.teaching.teach(group.samples)
        finally:
            self.num_being_taught -= 1
        for failure in taught.withheld.values():
            self._warnings.add(f"teacher {failure.reason}", str(failure))
        reasons = {rollout_id: f"teacher_{failure.reason}" for rollout_id, failure in taught.withheld.items()}
        return replace(group, samples=taught.samples, withheld={**group.withheld, **reasons})

    def offer(self, results: Sequence[EpisodeResult]) -> None:
        """Scored rollouts about which teachers may be asked, beside everything else."""
        if self.asked_pairs is not None:
            self.asked_pairs.offer(results)

    # --- a batch ---

    def count_hints(self, groups: Sequence[FinishedGroup]) -> None:
        """Of groups that leave with a batch, or of which nothing is left to be trained."""
        for group in groups:
            self._hints.update(_counts(group))

    def pairs(self, step: int) -> list[PreferencePair]:
        """Those that go with batch `step`, in whose transaction it is written that they do."""
        if self.kept_pairs is not None:
            return self.kept_pairs.take(step)
        return [] if self.asked_pairs is None else self.asked_pairs.take(step)

    def metrics(self) -> dict[str, float]:
        """Of what is on, since the last call."""
        metrics = {} if self.teaching is None else self.teaching.metrics()
        if self.hinter is not None:
            metrics |= {f"hints/{name}": float(num) for name, num in self._hints.items()}
            metrics |= self.hinter.metrics()
            self._hints = Counter(dict.fromkeys(self._hints, 0))
        if self.asked_pairs is not None:
            metrics |= self.asked_pairs.metrics()
            for kind, message in self.asked_pairs.problems().items():
                self._warnings.add(f"preferences {kind}", f"preferences: {message}")
        return metrics

    def state(self) -> dict[str, Any]:
        """JSON, to be kept with a batch."""
        return {} if self.asked_pairs is None else self.asked_pairs.state()

    async def close(self) -> None:
        """Gives up what is not done."""
        if self.asked_pairs is not None:
            await self.asked_pairs.close()
        if self.hinter is not None:
            await self.hinter.close()
        if self.teaching is not None:
            await self.teaching.teacher.close()


def _counts(group: FinishedGroup) -> Counter[str]:
    hinted, given = group.hinted, group.hints
    counts = Counter({"errors": hinted.num_errors, "given": len(given)})
    counts.update(f"given_{one.source}" for one in given)
    counts.update({f"declined_{reason}": num for reason, num in hinted.declined.items()})
    counts.update({f"left_out_{reason}": num for reason, num in hinted.left_out.items()})
    if withheld := len(hinted.given) - len(given):
        counts[f"left_out_{WITHHELD}"] += withheld
    return counts


# --- from settings ---


async def find_teacher(
    settings: OrchSettings, ready: Ready, environments: Mapping[str, WorkerPool]
) -> ServedTeacher | None:
    """The teacher that serves already, or that the launcher starts; None where there is none, or it is the policy
    itself. Raises TeacherFailure, and ValueError without an address."""
    chosen = settings.teacher_model
    if chosen is None or chosen.policy_every is not None or not ready.trainer.loss.teacher_tau:
        return None
    ready.status.set("starting", waiting_for=f"the teacher at {', '.join(chosen.client.base_url or ())}")
    return await open_teacher(
        chosen,
        model_folder=ready.model_folder,
        api_key=os.environ.get(chosen.client.api_key_var),
        temperatures=sorted(set(_temperatures(settings, environments))),
        seq_len=settings.seq_len,
        wait_s=settings.client.timeout,
    )


def _temperatures(settings: OrchSettings, environments: Mapping[str, WorkerPool]) -> Iterator[float]:
    """All that the run may sample at."""
    if (schedule := settings.sampling.temp_scheduler) is None:
        yield settings.sampling.temperature
    else:
        yield schedule.start_temperature
        yield schedule.end_temperature
    for env in settings.env:
        roles = environments[env.label].loaded.roles
        yield from (role.temperature for role in roles if role.temperature is not None)


def longest_sample(settings: OrchSettings, ready: Ready, teacher: ServedTeacher | None) -> int:
    """Longest prompt with answer, in tokens, that servers and trainer take and the teacher can score. vLLM samples one
    token more than it scores, for which there must be room."""
    limits = [ready.context_len]
    if teacher is not None and teacher.longest is not None:
        limits.append(teacher.longest)
    if _own_servers_teach(settings, ready):
        limits.append(ready.server_len - 1)
    return min(limits)


def shortest_server(settings: OrchSettings, ready: Ready) -> int:
    """The least `max_model_len` of a server that joins late."""
    return min(ready.context_len + _own_servers_teach(settings, ready), ready.server_len)


def _own_servers_teach(settings: OrchSettings, ready: Ready) -> bool:
    chosen = settings.teacher_model
    return bool(ready.trainer.loss.teacher_tau) and chosen is not None and chosen.policy_every is not None


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
    _say_what_is_off(settings, ready.trainer)
    loss, auxiliary = ready.trainer.loss, AuxiliaryLosses(teaching=None if teacher is None else Teaching(teacher))
    chosen = settings.teacher_model
    if loss.teacher_tau and chosen is not None and chosen.policy_every is not None:
        auxiliary.frozen = frozen = FrozenVersion(chosen.policy_every, scheduler)
        names = settings.model.lora_adapters
        auxiliary.teaching = Teaching(PolicyTeacher(client.score, lambda: frozen.entered, adapters=names))

    def opened(api: ApiSettings, costs: Costs) -> Api:
        key_var = settings.client.api_key_var
        return open_api(
            api,
            costs,
            own_servers=lambda: client.pool.routed,
            own_key_var=key_var if os.environ.get(key_var) else None,
            own_model=settings.model.name,
        )

    if loss.alpha_sdpo:
        auxiliary.hinter = open_hinter(settings, ready.renderer, engine, opened)
    if loss.beta_replay and settings.preferences.pairs is not None:
        pairs = pairs_of_run(
            Path(settings.preferences.pairs),
            base_model=ready.model_identity,
            seq_len=settings.seq_len,
            num_adapters=max(1, len(settings.model.lora_adapters)),
        )
        auxiliary.kept_pairs = KeptPairs(pairs, max_pairs=settings.preferences.max_pairs, seed=settings.seed)
    elif loss.beta_replay:
        auxiliary.asked_pairs = AskedPairs(
            settings.preferences,
            ledger,
            partial(client.score, version=None),
            engine.templates.of,
            opened,
            base_model=ready.model_identity,
            sequence_len=settings.seq_len,
            seed=settings.seed,
            step=progress.step,
            state=progress.costs,
        )
    return auxiliary


def _say_what_is_off(settings: OrchSettings, trainer: TrainSettings) -> None:
    loss = trainer.loss
    for name, is_set, weight, value in (
        ("teacher_model", settings.teacher_model is not None, "teacher_tau", loss.teacher_tau),
        ("hints", settings.hints != HintSettings(), "alpha_sdpo", loss.alpha_sdpo),
        ("preferences", settings.preferences.gives_pairs, "beta_replay", loss.beta_replay),
    ):
        if is_set and not value:
            log.info("%s is off: the trainer's loss.%s is 0", name, weight)
