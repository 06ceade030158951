"""On-policy distillation: a teacher's log-probabilities go with every sample of a batch."""

import os

from grpo.configs.orch import OrchSettings
from grpo.orchestrator.auxiliary.teacher.scoring import ReferenceTeacher, Scoring
from grpo.orchestrator.auxiliary.teacher.served import ServedTeacher, open_teacher
from grpo.orchestrator.hooks import Hook, Opening
from grpo.orchestrator.monitoring.metrics import Figures
from grpo.orchestrator.samples import ScoredGroup


class Distillation(Hook):
    """Has the teacher score every rollout that is trained. One of which it does not score a row is withheld: a batch
    has the teacher's log-probabilities for all of its samples or for none."""

    def __init__(self, scoring: Scoring, *, server_room: int = 0, longest: int | None = None) -> None:
        self._scoring, self.server_room, self.longest = scoring, server_room, longest

    @property
    def waits_for(self) -> str | None:
        """Returns the teacher's name while it is asked."""
        return self._scoring.teacher.name if self._scoring.num_groups else None

    async def before_credit(self, group: ScoredGroup) -> None:
        """Waits for the teacher."""
        scored, failed = await self._scoring.score(group.trained)
        for key, logprobs_L in scored.items():
            group.fields[key]["teacher_logprobs"] = logprobs_L
        for rollout_id, failure in failed.items():
            group.withheld[rollout_id] = f"teacher_{failure.reason}"
            self.warn(f"teacher {failure.reason}", str(failure))

    def figures(self) -> Figures:
        """Returns what was asked."""
        return self._scoring.figures()

    async def close(self) -> None:
        """Closes the teacher's connections."""
        if isinstance(teacher := self._scoring.teacher, ServedTeacher):
            await teacher.close()


async def open(opening: Opening) -> Distillation:
    """Waits for a teacher that serves already, or that the launcher starts. Raises ValueError where it cannot teach."""
    settings, ready, chosen = opening.settings, opening.ready, opening.settings.teacher_model
    if chosen is None:
        raise ValueError("loss.teacher_tau is above 0, and there is no teacher_model; give one, or set that to 0")
    if chosen.reference:
        # vLLM samples one token more than it scores.
        return Distillation(Scoring(ReferenceTeacher(opening.client.score)), server_room=1)
    ready.status.set("starting", waiting_for=f"the teacher at {', '.join(chosen.client.base_url or ())}")
    roles = [role for env in settings.env for role in opening.environments[env.label].loaded.roles]
    teacher = await open_teacher(
        chosen,
        model_folder=ready.model_folder,
        api_key=os.environ.get(chosen.client.api_key_var),
        temperatures=[*_temperatures(settings), *(one.temperature for one in roles if one.temperature is not None)],
        wait_s=settings.client.timeout,
    )
    return Distillation(Scoring(teacher), longest=teacher.longest)


def _temperatures(settings: OrchSettings) -> list[float]:
    """Returns the run's own temperature, or the first and the last of its schedule."""
    if (schedule := settings.sampling.temp_scheduler) is None:
        return [settings.sampling.temperature]
    return [schedule.start_temperature, schedule.end_temperature]
