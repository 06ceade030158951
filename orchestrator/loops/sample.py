"""Starts groups as the scheduler gives leave, and takes in what they bring."""

import asyncio
import itertools
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

from grpo.configs.orch import OrchSettings
from grpo.configs.rollouts import fewest_rollouts
from grpo.orchestrator.advantage import Credit, make_credit
from grpo.orchestrator.background import in_thread
from grpo.orchestrator.buffer import Buffer
from grpo.orchestrator.filters import Filter
from grpo.orchestrator.hooks import Hook
from grpo.orchestrator.ledger import Ledger
from grpo.orchestrator.monitoring.recorder import Recorder
from grpo.orchestrator.monitoring.timeline import Timeline
from grpo.orchestrator.monitoring.traces import Traces
from grpo.orchestrator.rollouts.engine import PromptTooLong, RolloutEngine
from grpo.orchestrator.rollouts.records import EpisodeResult, Group, Messages, SamplingParams, Task
from grpo.orchestrator.rollouts.roles import RoleAdapters
from grpo.orchestrator.samples import FinishedGroup, ScoredGroup, finish_group, judge_group, unfit
from grpo.orchestrator.scheduler import Scheduler, Ticket
from grpo.orchestrator.seeds import group_seed
from grpo.transport.importing import FunctionFailed

log = logging.getLogger(__name__)

MAX_FAILED = 8
"""Groups in a row for which the user's advantage or filter may come to nothing."""
MAX_BEGINNING = 8
"""Groups that begin in one turn of the event loop, and share the ledger's transaction."""
MAX_TOO_LONG = 1000
"""So many prompts in a row that are too long are an error, or all where there are fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """Rollouts, from the engine to a group that waits for its batch."""

    settings: OrchSettings
    engine: RolloutEngine
    scheduler: Scheduler
    timeline: Timeline
    ledger: Ledger
    recorder: Recorder
    traces: Traces
    filters: Sequence[Filter]
    hooks: Sequence[Hook]
    finished: dict[int, FinishedGroup] = field(default_factory=dict)
    """Groups that wait for their batch, by number."""

    def params(self, version: int) -> SamplingParams:
        """How a version is sampled for training."""
        settings = self.settings
        return SamplingParams(
            temperature=temperature_of(settings, version),
            max_tokens=settings.sampling.max_tokens,
            noisy=True,
            follow=settings.inflight_weight_updates,
        )

    def take(self, results: Sequence[EpisodeResult]) -> list[EpisodeResult]:
        """Returns the rollouts that have a reward; the others are dropped."""
        usable = []
        for result in results:
            if result.failure is not None:
                self._drop(result, result.failure.reason)
                continue
            num_tokens = result.num_tokens
            self.recorder.sampled(num_tokens)
            self.ledger.scored(result.id, reward=result.reward, num_tokens=num_tokens)
            usable.append(result)
        return usable

    async def finish(self, usable: Sequence[EpisodeResult], credit: Credit, *, group: str) -> FinishedGroup:
        """Returns the group's samples. Rollouts that filters and hooks withhold are dropped, and all where the trainer
        would refuse one. Raises FunctionFailed."""
        scored = ScoredGroup(list(usable), *judge_group(usable, self.filters))
        for hook in self.hooks:
            await hook.before_credit(scored)
        if scored.dropped and len(scored.results) < fewest_rollouts(self.settings.advantage):
            scored.drop({result.id: "group_too_small" for result in scored.results})
        made = finish_group(scored, credit, group=group)
        if (why := unfit(made.samples)) is not None:
            log.error("group %s is not trained: %s", group, why)
            refused = {result.id: "not_finite" for result in made.results if result.id not in made.withheld}
            made = replace(made, samples=(), withheld={**made.withheld, **refused})
        for result in usable:
            if result.id in made.dropped or not made.samples:
                self._drop(result, {**made.dropped, **made.withheld}[result.id])
            elif result.id in made.withheld:  # traced with its batch
                self.ledger.dropped([result.id], made.withheld[result.id])
        return made

    def _drop(self, result: EpisodeResult, reason: str) -> None:
        self.ledger.dropped([result.id], reason)
        self.traces.dropped([result], reason)

    def complete(self, number: int, group: FinishedGroup) -> None:
        """The group with this number waits for its batch."""
        self.finished[number] = group
        self.scheduler.completed(number, oldest=group.oldest_version)


@dataclass(kw_only=True)
class Sampling:
    """Groups, from their example to the batch that they wait for."""

    settings: OrchSettings
    prompts: Mapping[str, Sequence[Messages]]
    """Of the training examples, by environment."""
    solutions: Mapping[str, Sequence[str]]
    """The same of their own solutions; none where an environment has none."""
    buffer: Buffer
    intake: Intake
    _tasks: dict[asyncio.Task[None], Ticket] = field(default_factory=dict, init=False)
    """Groups that can still be cancelled."""
    _parked: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    """Groups that wait for rewards that come later."""
    _cancelled: dict[int, str] = field(default_factory=dict, init=False)
    """Reasons by group."""
    _num_too_long: Counter[str] = field(default_factory=Counter, init=False)
    _num_failed: int = field(default=0, init=False)
    """Groups in a row for which the user's advantage or filter came to nothing."""
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def __post_init__(self) -> None:
        settings, intake = self.settings, self.intake
        self._scheduler, self._ledger, self._credit = intake.scheduler, intake.ledger, make_credit(settings)
        names = settings.model.lora_adapters
        self._adapters = {env.label: RoleAdapters(names=names, of_roles=env.adapters) for env in settings.env}

    async def run(self) -> None:
        """Consumes: examples. Waits for: leave to start a group, by a new version, a shipped batch or a failed group.
        Unblocked by: versions, assemble, and its own groups. Ends when: the last batch has shipped."""
        async with asyncio.TaskGroup() as group:
            while not self._scheduler.finished:
                tickets = list(itertools.islice(iter(self._scheduler.start, None), MAX_BEGINNING))
                for ticket in tickets:
                    rolling = group.create_task(self._roll_out(ticket, self._issue(ticket)))
                    self._tasks[rolling] = ticket
                    rolling.add_done_callback(partial(self._ended, ticket))
                if tickets:
                    await asyncio.sleep(0)  # a thousand groups that begin at once would hold up all other tasks
                else:
                    await self._scheduler.changed.wait()
            for rolling in self._parked:  # no batch is left for them
                rolling.cancel()

    def cancel(self, reason: str) -> int:
        """Cancels the groups that are being sampled; their examples are asked again. What has been sampled is scored
        and kept. Returns how many groups that were."""
        cancelled = {rolling: ticket for rolling, ticket in self._tasks.items() if rolling.cancel()}
        self._cancelled |= {ticket.group: reason for ticket in cancelled.values()}
        return len(cancelled)

    def _sampled(self) -> None:
        """The group's tokens are there, and are not cancelled any more."""
        if (rolling := asyncio.current_task()) is not None:
            self._tasks.pop(rolling, None)

    def _ended(self, ticket: Ticket, rolling: asyncio.Task[None]) -> None:
        self._tasks.pop(rolling, None)
        if (reason := self._cancelled.pop(ticket.group, None)) is not None and rolling.cancelled():
            self._ledger.dropped(self._rollout_ids(ticket), reason)
            self.buffer.withdrawn(ticket.group)
            self._scheduler.failed(ticket.group)

    # --- one group ---

    def _issue(self, ticket: Ticket) -> Task:
        example = self.buffer.issue(ticket.group)
        self._ledger.issued(
            ticket.group,
            num=self.settings.rollouts_per_example,
            env=example.env,
            example=example.index,
            version=ticket.version,
        )
        solutions = self.solutions[example.env]
        return Task(
            env=example.env,
            split="train",
            index=example.index,
            messages=self.prompts[example.env][example.index],
            epoch=example.epoch,
            solution=solutions[example.index] if solutions else "",
        )

    async def _roll_out(self, ticket: Ticket, task: Task) -> None:
        """One group: sampled by a server, scored by its environment's workers, given advantages."""
        settings = self.settings
        group = Group(
            task=task,
            id=str(ticket.group),
            num=settings.rollouts_per_example,
            version=ticket.version,
            params=self.intake.params(ticket.version),
            adapters=self._adapters[task.env],
            seed=group_seed(settings.sampling.seed, f"{task.env}/{task.epoch}/{task.index}"),
            score=not settings.buffer.skip_verification,
        )
        await self._written()
        rolling, spans = asyncio.current_task(), ExitStack()
        assert rolling is not None

        def park() -> None:
            if rolling not in self._parked:
                self._tasks.pop(rolling, None)
                self._parked.add(rolling)
                self._scheduler.park(ticket.group)
                spans.close()

        try:
            with spans:
                spans.enter_context(self.intake.timeline.group(ticket.group))
                results = await self.intake.engine.run_group(group, sampled=self._sampled, delayed=park)
        except PromptTooLong as error:
            self._ledger.dropped(self._rollout_ids(ticket), "prompt_too_long")
            self._drop(ticket, [], "prompt_too_long")
            self._num_too_long[task.env] += 1
            num_examples = sum(self.buffer.num_examples(task.env).values())
            if self._num_too_long[task.env] < min(num_examples, MAX_TOO_LONG):
                return
            raise ValueError(
                f"the last {self._num_too_long[task.env]} prompts of {task.env}, of {num_examples}, are all too long: "
                f"{error}"
            ) from None
        self._num_too_long[task.env] = 0
        self._sampled()
        was_parked = rolling in self._parked
        self._parked.discard(rolling)
        if was_parked and not self._scheduler.unpark(ticket.group):
            self._drop(ticket, self.intake.take(results), "too_late")
            return
        await self._take_in(ticket, results)

    async def _written(self) -> None:
        """Returns when the ledger has every rollout that was issued until now. Groups that begin together share a
        transaction."""
        async with self._writing:
            if self._ledger.has_unwritten:
                await in_thread(self._ledger.changes())

    async def _take_in(self, ticket: Ticket, results: Sequence[EpisodeResult]) -> None:
        usable = self.intake.take(results)
        if len(usable) < fewest_rollouts(self.settings.advantage):
            self._drop(ticket, usable, "group_too_small")
            return
        rewards, of_roles = [result.reward for result in usable], defaultdict[str, list[float]](list)
        for result in usable:
            for role in result.roles:
                of_roles[role].append(result.rewards[role])
        if (reason := self.buffer.returned(ticket.group, rewards, of_roles=[*of_roles.values()])) is not None:
            self._drop(ticket, usable, reason)
            return
        try:
            group = await self.intake.finish(usable, self._credit, group=str(ticket.group))
        except FunctionFailed as error:
            self._failed(ticket, usable, error)
            return
        self._num_failed = 0
        if not group.samples:
            self._drop(ticket, [], "all_withheld")
            return
        self.intake.complete(ticket.group, group)

    def _failed(self, ticket: Ticket, results: Sequence[EpisodeResult], error: FunctionFailed) -> None:
        """The user's advantage or filter came to nothing for a group. Raises what it did where it does so always."""
        self._num_failed += 1
        if self._num_failed >= MAX_FAILED:
            raise error
        if self._num_failed == 1:
            log.error("group %d is not trained: %s", ticket.group, error)
        self._drop(ticket, results, "function_failed")

    def _rollout_ids(self, ticket: Ticket) -> list[str]:
        return [f"{ticket.group}/{number}" for number in range(self.settings.rollouts_per_example)]

    def _drop(self, ticket: Ticket, results: Sequence[EpisodeResult], reason: str) -> None:
        """Drops what is left of a group; another one may start in its place."""
        self._ledger.dropped([result.id for result in results], reason)
        self.intake.traces.dropped(results, reason)
        self.buffer.closed(ticket.group)
        self.intake.timeline.came_to_nothing(ticket.group)
        self._scheduler.failed(ticket.group)


def temperature_of(settings: OrchSettings, version: int) -> float:
    """Of a schedule it is start + (end - start) · f(x), with x = version / (max_steps - 1), at most 1; f(x) = x for
    `linear` and (1 - cos(π x)) / 2 for `cosine`. Version max_steps - 1 is the newest that the last batch can be sampled
    under."""
    if (schedule := settings.sampling.temp_scheduler) is None:
        return settings.sampling.temperature
    assert settings.max_steps is not None, "the settings are checked"
    x = min(version / (settings.max_steps - 1), 1.0)
    share = x if schedule.type == "linear" else (1 - math.cos(math.pi * x)) / 2
    return schedule.start_temperature + (schedule.end_temperature - schedule.start_temperature) * share
