"""Hooks: how what is no part of the core takes part in a run.

A hook sees every scored group before it gets credit, and every batch before it is packed; it reports figures, and keeps
state with every batch. The auxiliary losses are hooks. The core opens those that the settings ask for by the names of
their modules, and knows nothing else of them.
"""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from grpo.configs.auxiliary import ApiSettings
from grpo.configs.cross import auxiliary_losses
from grpo.configs.orch import OrchSettings
from grpo.configs.train import TrainSettings
from grpo.orchestrator.endpoints import ApiModel, Costs
from grpo.orchestrator.inference.client import PolicyClient
from grpo.orchestrator.ledger import Ledger
from grpo.orchestrator.monitoring.metrics import Figures
from grpo.orchestrator.resuming import Progress
from grpo.orchestrator.samples import ScoredGroup
from grpo.orchestrator.scheduler import Scheduler
from grpo.orchestrator.startup import Ready
from grpo.orchestrator.workers.pool import WorkerPool
from grpo.transport.errors import UserError
from grpo.transport.records import PreferencePair

log = logging.getLogger(__name__)

AUXILIARY = "grpo.orchestrator.auxiliary"
"""The package that the core can do without."""
STATE = "hooks"
"""The key of the hooks' state among what is kept with a batch."""
WARN_EVERY_S = 60.0


class Hook:
    """Takes part in a run. A feature overrides what it needs."""

    longest: int | None = None
    """Tokens of the longest sample that it can work on; None: any."""
    section: str = ""
    """The section of the settings that has opened it."""
    server_room: int = 0
    """Tokens that every server must take beyond the longest sample."""
    _warned_s: dict[str, float] | None = None

    @property
    def waits_for(self) -> str | None:
        """Returns whom groups wait for in `before_credit` now, for people; None: nobody."""
        return None

    async def before_credit(self, group: ScoredGroup) -> None:
        """Changes a group in place before it gets its advantages: what it waits for must have a deadline."""

    def before_batch(self, step: int) -> Sequence[PreferencePair]:
        """Returns preference pairs that go with batch `step`, which is about to be packed."""
        return ()

    def figures(self) -> Figures:
        """Returns what it has counted since this process began, without side effects."""
        return Figures()

    def state(self) -> dict[str, Any]:
        """Returns JSON that is kept with every batch; `open` is given the newest that was ever kept."""
        return {}

    async def close(self) -> None:
        """Gives up what is not done."""

    def warn(self, kind: str, message: str) -> None:
        """Logs a problem, each kind at most once in WARN_EVERY_S: metrics count them all."""
        now_s, self._warned_s = time.monotonic(), self._warned_s or {}
        if now_s - self._warned_s.get(kind, -WARN_EVERY_S) >= WARN_EVERY_S:
            self._warned_s[kind] = now_s
            log.warning("%s: %s", kind, message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What a feature's `open(opening)` may use of the run. It returns its Hook, or raises ValueError."""

    settings: OrchSettings
    ready: Ready
    client: PolicyClient
    environments: Mapping[str, WorkerPool]
    scheduler: Scheduler
    ledger: Ledger
    progress: Progress
    state: Mapping[str, Any]
    """The newest that the feature kept with a batch; empty in a new run."""

    @property
    def trainer(self) -> TrainSettings:
        """Returns the trainer's settings."""
        return self.ready.trainer

    def endpoint(self, api: ApiSettings, costs: Costs) -> ApiModel:
        """Returns the model behind an API; without an address, the base model on the run's own servers."""
        key_var = self.settings.client.api_key_var
        return ApiModel(
            api,
            costs,
            own_servers=lambda: self.client.pool.routed,
            own_key_var=key_var if os.environ.get(key_var) else None,
            own_model=self.settings.model.name,
        )


async def open_hooks(
    settings: OrchSettings,
    ready: Ready,
    client: PolicyClient,
    environments: Mapping[str, WorkerPool],
    scheduler: Scheduler,
    ledger: Ledger,
    progress: Progress,
) -> list[Hook]:
    """Opens the hooks of the features that the settings ask for, in the order in which groups pass them. Raises
    UserError for one that is not installed, and ValueError for settings that cannot be honoured."""
    hooks, kept = list[Hook](), (progress.newest_state or {}).get(STATE, {})
    try:
        for loss in auxiliary_losses(ready.trainer, settings):
            if not loss.weight:
                log.info("%s is off: %s is 0", loss.section, loss.switch)
                continue
            opening = Opening(
                settings=settings,
                ready=ready,
                client=client,
                environments=environments,
                scheduler=scheduler,
                ledger=ledger,
                progress=progress,
                state=kept.get(loss.section, {}),
            )
            hook: Hook = await _module(loss.module, loss.switch).open(opening)
            hook.section = loss.section
            hooks.append(hook)
    except BaseException:
        await close_hooks(hooks)
        raise
    return hooks


def _module(name: str, switch: str) -> Any:
    try:
        return import_module(f"{AUXILIARY}.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or not f"{AUXILIARY}.{name}".startswith(error.name):
            raise
        message = f"{switch} is set, and {AUXILIARY} is not installed here; install it, or set that to 0"
        raise UserError(message) from None


def kept_state(hooks: Sequence[Hook]) -> dict[str, Any]:
    """Returns what is to be kept with a batch: the state of each hook by the section of the settings that opened it."""
    return {hook.section: state for hook in hooks if (state := hook.state())}


async def close_hooks(hooks: Sequence[Hook]) -> None:
    """Closes all of them."""
    for hook in hooks:
        await hook.close()
