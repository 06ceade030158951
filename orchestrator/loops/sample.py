"""The sampling loop: starts groups as the scheduler permits, and hands what they bring to the sink."""

import asyncio
import itertools
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from grpo.configs.orch import OrchSettings
from grpo.configs.rollouts import fewest_rollouts
from grpo.orchestrator.advantage import make_credit
from grpo.orchestrator.buffer import Buffer
from grpo.orchestrator.rollouts.engine import PromptTooLong
from grpo.orchestrator.rollouts.records import EpisodeResult, Group, Messages, SamplingParams, Task
from grpo.orchestrator.rollouts.roles import RoleAdapters
from grpo.orchestrator.seeds import group_seed
from grpo.orchestrator.sink import RolloutSink
from grpo.transport.importing import FunctionFailed

log = logging.getLogger(__name__)

MAX_FAILED = 8
"""Groups in a row for which the user's advantage or filter may fail."""
MAX_BEGINNING = 8
"""Groups that begin in one turn of the event loop, and share the ledger's transaction."""
MAX_TOO_LONG = 1000
"""How many prompts in a row may be too long, in an environment with more examples than that."""


class Schedule(Protocol):
    """Decides what is rolled out: the sampling loop, or a person's own schedule."""

    async def run(self) -> None:
        """Rolls out until the last batch has shipped."""

    def cancel(self, reason: str) -> int:
        """Cancels the groups that are being sampled. Returns how many groups that were."""


@dataclass(kw_only=True)
class Sampling:
    """Groups of examples, from the buffer to the sink."""

    prompts: Mapping[str, Sequence[Messages]]
    """The prompts of the training examples, by environment."""
    solutions: Mapping[str, Sequence[str]]
    """The examples' own solutions, by environment; none where an environment has none."""
    buffer: Buffer
    sink: RolloutSink
    _running: dict[asyncio.Task[None], Group] = field(default_factory=dict, init=False)
    _sampled: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    """The running ones that are not cancelled any more."""
    _cancelled: dict[str, str] = field(default_factory=dict, init=False)
    """Reasons by group."""
    _num_too_long: Counter[str] = field(default_factory=Counter, init=False)
    _num_failed: int = field(default=0, init=False)
    """Groups in a row for which the user's advantage or filter failed."""

    def __post_init__(self) -> None:
        settings = self._settings = self.sink.settings
        self._scheduler, self._fates, self._credit = self.sink.scheduler, self.sink.fates, make_credit(settings)
        names = settings.model.lora_adapters
        self._adapters = {env.label: RoleAdapters(names=names, of_roles=env.adapters) for env in settings.env}

    async def run(self) -> None:
        """Consumes: examples. Waits for: permission to start a group, by a new version, a shipped batch or a failed
        group. Unblocked by: versions, assemble, and its own groups. Ends when: the last batch has shipped."""
        async with asyncio.TaskGroup() as tasks:
            while not self._scheduler.finished:
                groups = list(itertools.islice(iter(self._scheduler.start, None), MAX_BEGINNING))
                for group in map(self._issue, groups):
                    rolling = tasks.create_task(self._roll_out(group))
                    self._running[rolling] = group
                    rolling.add_done_callback(self._ended)
                if groups:
                    await asyncio.sleep(0)  # a thousand groups that begin at once would hold up all other tasks
                else:
                    await self._scheduler.changed.wait()
            for rolling in self._running:  # what waits for a reward finds no batch any more
                rolling.cancel()

    def cancel(self, reason: str) -> int:
        """Cancels the groups that are being sampled; their examples are asked again. What has been sampled is scored
        and kept. Returns how many groups that were."""
        cancelled = [one for rolling, one in self._running.items() if rolling not in self._sampled and rolling.cancel()]
        self._cancelled |= {group.id: reason for group in cancelled}
        return len(cancelled)

    def _ended(self, rolling: asyncio.Task[None]) -> None:
        group = self._running.pop(rolling)
        self._sampled.discard(rolling)
        if (reason := self._cancelled.pop(group.id, None)) is not None and rolling.cancelled():
            self.buffer.withdrawn(int(group.id))
            self._drop(group, group.failed(reason, "cancelled"), reason)

    # --- one group ---

    def _issue(self, number: int) -> Group:
        """Returns the next example as the group with this number, which is to be rolled out."""
        settings, version = self._settings, self._scheduler.live
        assert version is not None, "the scheduler starts groups under a version"
        env, index, epoch = self.buffer.issue(number)
        solutions = self.solutions[env]
        task = Task(
            env=env,
            split="train",
            index=index,
            messages=self.prompts[env][index],
            epoch=epoch,
            solution=solutions[index] if solutions else "",
        )
        group = Group(
            task=task,
            id=str(number),
            num=settings.rollouts_per_example,
            version=version,
            params=training_params(settings, version),
            adapters=self._adapters[env],
            seed=group_seed(settings.sampling.seed, f"{env}/{epoch}/{index}"),
            score=not settings.buffer.skip_verification,
        )
        self._fates.issued(group)
        return group

    async def _roll_out(self, group: Group) -> None:
        """Has one group sampled by a server, scored by its environment's workers, and given advantages."""
        rolling, env = asyncio.current_task(), group.task.env
        assert rolling is not None
        sampled = partial(self._sampled.add, rolling)

        def delayed() -> None:
            sampled()
            self._scheduler.delay(int(group.id))

        await self._fates.written()
        try:
            results = await self.sink.engine.run_group(group, sampled=sampled, delayed=delayed)
        except PromptTooLong as error:
            self._drop(group, group.failed("prompt_too_long", str(error)), "prompt_too_long")
            self._num_too_long[env] += 1
            num_examples = sum(self.buffer.num_examples(env).values())
            if self._num_too_long[env] < min(num_examples, MAX_TOO_LONG):
                return
            raise ValueError(
                f"the last {self._num_too_long[env]} prompts of {env}, of {num_examples}, are all too long: {error}"
            ) from None
        self._num_too_long[env] = 0
        sampled()
        await self._take_in(group, results)

    async def _take_in(self, group: Group, results: Sequence[EpisodeResult]) -> None:
        usable = self.sink.take(results)
        if len(usable) < fewest_rollouts(self._settings.advantage):
            self._drop(group, usable, "group_too_small")
            return
        rewards, of_roles = [result.reward for result in usable], defaultdict[str, list[float]](list)
        for result in usable:
            for role in result.roles:
                of_roles[role].append(result.rewards[role])
        if (reason := self.buffer.returned(int(group.id), rewards, of_roles=[*of_roles.values()])) is not None:
            self._drop(group, usable, reason)
            return
        try:
            made = await self.sink.finish(usable, self._credit, group=group.id)
        except FunctionFailed as error:
            self._failed(group, usable, error)
            return
        self._num_failed = 0
        if not self.sink.complete(int(group.id), made):
            self.buffer.closed(int(group.id))

    def _failed(self, group: Group, results: Sequence[EpisodeResult], error: FunctionFailed) -> None:
        """The user's advantage or filter has failed for a group. Raises its error where it fails always."""
        self._num_failed += 1
        if self._num_failed >= MAX_FAILED:
            raise error
        if self._num_failed == 1:
            log.error("group %s is not trained: %s", group.id, error)
        self._drop(group, results, "function_failed")

    def _drop(self, group: Group, results: Sequence[EpisodeResult], reason: str) -> None:
        """Drops what is left of a group; another one may start in its place."""
        self._fates.dropped(results, reason)
        self.buffer.closed(int(group.id))
        self._scheduler.failed(int(group.id))


def training_params(settings: OrchSettings, version: int) -> SamplingParams:
    """Returns how a version is sampled for training."""
    return SamplingParams(
        temperature=temperature_of(settings, version),
        max_tokens=settings.sampling.max_tokens,
        noisy=True,
        follow=settings.inflight_weight_updates,
    )


def temperature_of(settings: OrchSettings, version: int) -> float:
    """Returns the sampling temperature of a version. Of a schedule it is start + (end - start) · f(x), with x =
    version / (max_steps - 1), at most 1; f(x) = x for `linear` and (1 - cos(π x)) / 2 for `cosine`. Version
    max_steps - 1 is the newest that the last batch can be sampled under."""
    if (schedule := settings.sampling.temp_scheduler) is None:
        return settings.sampling.temperature
    assert settings.max_steps is not None, "the settings are checked"
    x = min(version / (settings.max_steps - 1), 1.0)
    share = x if schedule.type == "linear" else (1 - math.cos(math.pi * x)) / 2
    return schedule.start_temperature + (schedule.end_temperature - schedule.start_temperature) * share
