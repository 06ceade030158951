"""The channels that a run has, opened from its settings: which are on, the trainer's loss decides."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from configs.channels import HintSettings
from configs.orch import OrchSettings
from configs.train import TrainSettings
from orchestrator.channels import Channels
from orchestrator.client import ServerPool
from orchestrator.disagreement.asked import AskedForHints
from orchestrator.disagreement.opening import open_channel, open_hint_model
from orchestrator.disagreement.records import PAIRS_FILE, KeptPairs, pairs_of_run
from orchestrator.episodes.engine import RolloutEngine
from orchestrator.frozen import FrozenVersion
from orchestrator.hints.hinting import Hinter
from orchestrator.hints.sources import FromEnvironment, FromModel, FromSiblings, FromTemplates, HintSource
from orchestrator.hints.templates import HintTemplates
from orchestrator.hints.writing import HintWriter
from orchestrator.resuming import Progress
from orchestrator.scheduler import Scheduler
from orchestrator.startup import Ready
from orchestrator.teachers.client import HttpTeacher
from orchestrator.teachers.opening import open_teacher
from orchestrator.teachers.policy import PolicyTeacher
from orchestrator.workers.pool import WorkerPool

log = logging.getLogger(__name__)


class BaseScorer:
    """The base model on the run's servers, as the reference of preferences."""

    def __init__(self, servers: ServerPool) -> None:
        self._servers = servers

    async def logprobs(self, token_ids: Sequence[int]) -> Sequence[float]:
        """[L] natural log, at temperature 1, the first 0. Raises ServerError."""
        return [0.0, *await self._servers.score(token_ids, None)]


async def find_teacher(
    settings: OrchSettings, ready: Ready, environments: Mapping[str, WorkerPool]
) -> HttpTeacher | None:
    """The teacher that serves already, or that the launcher starts; None where there is none, or it is the policy
    itself. Raises TeacherRefused, and ValueError without an address."""
    chosen = settings.teacher_model
    if chosen is None or chosen.policy_every is not None or not ready.trainer.loss.teacher_tau:
        return None
    ready.status.set("starting", waiting_for=f"the teacher at {', '.join(chosen.client.base_url or ())}")
    return await open_teacher(
        chosen,
        model_folder=ready.model_folder,
        renderer=ready.renderer,
        api_key=os.environ.get(chosen.client.api_key_var),
        temperatures=sorted(set(_temperatures(settings, environments))),
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


def longest_sample(settings: OrchSettings, ready: Ready, teacher: HttpTeacher | None) -> int:
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


def make_channels(
    settings: OrchSettings,
    ready: Ready,
    servers: ServerPool,
    engine: RolloutEngine,
    scheduler: Scheduler,
    *,
    teacher: HttpTeacher | None,
    progress: Progress,
) -> Channels:
    """`teacher` is the one that was found. Raises ValueError for what cannot be honoured."""
    _say_what_is_off(settings, ready.trainer)
    loss, channels = ready.trainer.loss, Channels(teacher=teacher, max_pairs=settings.preferences.max_pairs)
    chosen = settings.teacher_model
    if loss.teacher_tau and chosen is not None and chosen.policy_every is not None:
        channels.frozen = frozen = FrozenVersion(chosen.policy_every, scheduler)
        names = settings.model.lora_adapters
        channels.teacher = PolicyTeacher(servers.score, lambda: frozen.entered, adapters=names)
    if loss.alpha_sdpo:
        if (model := settings.hints.model) is not None:
            channels.hint_model = open_hint_model(
                model,
                own_servers=lambda: servers.membership.routed,
                own_api_key_var=settings.client.api_key_var,
                base_model_name=settings.model.name,
                seed=settings.seed,
            )
        channels.hinter = _hinter(settings, ready, engine, channels.hint_model)
    if loss.beta_replay and settings.preferences.pairs is not None:
        path = Path(settings.preferences.pairs)
        pairs = pairs_of_run(
            path,
            base_model=ready.model_identity,
            seq_len=settings.seq_len,
            num_adapters=max(1, len(settings.model.lora_adapters)),
        )
        channels.kept_pairs = KeptPairs(pairs, max_pairs=settings.preferences.max_pairs, seed=settings.seed)
    elif loss.beta_replay:
        channels.disagreement = open_channel(
            settings.preferences,
            own_servers=lambda: servers.membership.routed,
            own_api_key_var=settings.client.api_key_var,
            base_model_name=settings.model.name,
            base_model=ready.model_identity,
            reference=BaseScorer(servers),
            template_of=engine.templates.of,
            sequence_len=settings.seq_len,
            seed=settings.seed,
            path=ready.run.path / PAIRS_FILE,
            budget_state=progress.teachers_budget,
            pairs_state=progress.pairs,
            has_left=progress.has_left,
            step=progress.step,
        )
    return channels


def _say_what_is_off(settings: OrchSettings, trainer: TrainSettings) -> None:
    loss = trainer.loss
    for name, is_set, weight, value in (
        ("teacher_model", settings.teacher_model is not None, "teacher_tau", loss.teacher_tau),
        ("hints", settings.hints != HintSettings(), "alpha_sdpo", loss.alpha_sdpo),
        ("preferences", settings.preferences.gives_pairs, "beta_replay", loss.beta_replay),
    ):
        if is_set and not value:
            log.info("%s is off: the trainer's loss.%s is 0", name, weight)


def _hinter(settings: OrchSettings, ready: Ready, engine: RolloutEngine, ask: AskedForHints | None) -> Hinter:
    if all(engine.is_single_turn(env.label) for env in settings.env):
        raise ValueError(
            "loss.alpha_sdpo of the trainer is above 0, and no environment marks errors: all are single questions; set "
            "it to 0, or train on an environment of episodes"
        )
    chosen = settings.hints
    sources: dict[str, HintSource] = {
        "templates": FromTemplates(
            HintTemplates.loaded(chosen.templates, setting="hints.templates"), max_chars=chosen.max_chars
        ),
        "environment": FromEnvironment(max_chars=chosen.max_chars),
        "sibling": FromSiblings(min_reward=chosen.sibling_reward),
    }
    if chosen.model is not None and ask is not None:
        sources["model"] = FromModel(ask, ready.renderer, timeout_s=chosen.model.timeout, max_chars=chosen.max_chars)
    return Hinter(
        HintWriter.of(engine.templates.of(None), chosen.role),
        [sources[name] for name in chosen.sources],
        seq_len=settings.seq_len,
        first=chosen.max_per_sample,
        until_end=chosen.until_end,
    )
