"""Whether a run's environments can mark errors, for which there are hints, before anything of it is started."""

import asyncio

from configs.orch import OrchSettings
from deploy.compare import CannotCompare
from orchestrator.startup import memory_bytes
from orchestrator.workers.failures import EnvironmentFailed
from orchestrator.workers.pool import WorkerPool


def only_single_questions(settings: OrchSettings) -> bool:
    """Whether none of the environments that are trained on is one of episodes. Constructs one after the other, each in
    a process of its own as in a run, until one is; one that another machine serves may be, and is not asked. Raises
    `CannotCompare` for one that cannot be constructed."""
    try:
        return asyncio.run(_only_single_questions(settings))
    except EnvironmentFailed as error:
        raise CannotCompare(f"{error}; the runs would end with that, too") from None


async def _only_single_questions(settings: OrchSettings) -> bool:
    if any(env.address is not None for env in settings.env):
        return False
    for env in settings.env:
        pool = WorkerPool(
            label=env.label,
            env_id=env.id,
            args=env.args,
            timeout_s=settings.reward_timeout_s,
            memory_bytes=memory_bytes(env),
        )
        try:
            if not (await pool.load()).single_turn:
                return False
        finally:
            await pool.close()
    return True
