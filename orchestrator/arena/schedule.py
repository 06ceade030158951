"""A person's schedule in place of the sampling loop."""

from dataclasses import dataclass

from grpo.orchestrator.arena.arena import Arena
from grpo.orchestrator.sink import RolloutSink
from grpo.transport.errors import UserError
from grpo.transport.importing import load_object


@dataclass(frozen=True, slots=True)
class ArenaSchedule:
    """Has an arena work in a run."""

    arena: Arena
    sink: RolloutSink

    async def run(self) -> None:
        """Rolls out until the last batch has its rollouts. Raises ValueError where the arena ends before."""
        await self.arena.work(self.sink)

    def cancel(self, reason: str) -> int:
        """Cancels nothing: a run with an arena evaluates nothing."""
        return 0


def open_schedule(sink: RolloutSink) -> ArenaSchedule:
    """Returns the schedule that `orch.arena` names. Raises UserError."""
    location = sink.settings.arena or ""
    found = load_object(location, setting="arena")
    if not (isinstance(found, type) and issubclass(found, Arena)):
        raise UserError(f"arena = {location!r} is {found!r}, expected a class derived from grpo.Arena")
    return ArenaSchedule(found(), sink)
