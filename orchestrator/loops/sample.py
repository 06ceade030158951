"""Starts groups as the scheduler gives leave, and takes in what they bring."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial

from configs.rollouts import fewest_rollouts
from orchestrator.background import in_thread
from orchestrator.loops.shared import Shared
from orchestrator.parts import make_credit, make_temperature
from orchestrator.rollouts.engine import Group
from orchestrator.rollouts.policy import PromptTooLong
from orchestrator.rollouts.records import EpisodeResult, SamplingParams, Task
from orchestrator.rollouts.roles import RoleAdapters
from orchestrator.samples import finish_group, judge_group
from orchestrator.scheduler import Ticket
from orchestrator.seeds import group_seed


class Sampling:
    """Groups, from their example to the batch that they wait for."""

    def __init__(self, shared: Shared) -> None:
        """Raises ValueError where `advantage.import_path` leads to no function."""
        self._shared, settings = shared, shared.settings
        self._credit, self._temperature = make_credit(settings), make_temperature(settings)
        sampling = settings.sampling
        self._params = partial(
            SamplingParams, max_tokens=sampling.max_tokens, noisy=True, follow=settings.inflight_weight_updates
        )
        names = settings.model.lora_adapters
        self._adapters = {env.label: RoleAdapters(names=names, of_roles=env.adapters) for env in settings.env}
        self._group_size = settings.rollouts_per_example
        self._num_too_long: Counter[str] = Counter()
        self._sampling: dict[asyncio.Task[None], Ticket] = {}
        """Groups that can still be cancelled."""
        self._cancelled: dict[int, str] = {}
        """Reasons by group."""
        self._writing = asyncio.Lock()

    async def run(self) -> None:
        """Consumes: tasks. Waits for: leave to start a group, by a new version, a shipped batch or a failed group.
        Unblocked by: versions, assemble, and its own groups. Ends when: the last batch has shipped."""
        scheduler = self._shared.scheduler
        async with asyncio.TaskGroup() as group:
            while not scheduler.finished:
                if (ticket := scheduler.start()) is None:
                    await self._shared.changed.wait()
                    continue
                rolling = group.create_task(self._roll_out(ticket, self._issue(ticket)))
                self._sampling[rolling] = ticket
                rolling.add_done_callback(partial(self._ended, ticket))
                await asyncio.sleep(0)  # a thousand groups that begin at once would hold up all other tasks

    def cancel(self, reason: str) -> int:
        """Cancels the groups that are being sampled; their examples are asked again. What has been sampled is scored
        and kept. Returns how many groups that were."""
        cancelled = {rolling: ticket for rolling, ticket in self._sampling.items() if rolling.cancel()}
        self._cancelled |= {ticket.group: reason for ticket in cancelled.values()}
        return len(cancelled)

    def _sampled(self) -> None:
        """The group's tokens are there, and are not cancelled any more."""
        if (rolling := asyncio.current_task()) is not None:
            self._sampling.pop(rolling, None)

    def _ended(self, ticket: Ticket, rolling: asyncio.Task[None]) -> None:
        self._sampling.pop(rolling, None)
        if (reason := self._cancelled.pop(ticket.group, None)) is None or not rolling.cancelled():
            return
        shared = self._shared
        shared.ledger.dropped(self._rollout_ids(ticket), reason)
        shared.buffer.withdrawn(ticket.group)
        shared.scheduler.failed(ticket.group)
        shared.changed.ring()

    def _issue(self, ticket: Ticket) -> Task:
        task = self._task_of(ticket)
        self._shared.ledger.issued(
            ticket.group, num=self._group_size, env=task.env, example=task.index, version=ticket.version
        )
        return task

    async def _written(self) -> None:
        """Returns when the ledger has every rollout that was issued until now. Groups that begin together share a
        transaction."""
        async with self._writing:
            if self._shared.ledger.has_unwritten:
                await in_thread(self._shared.ledger.changes())

    def _rollout_ids(self, ticket: Ticket) -> list[str]:
        return [f"{ticket.group}/{n}" for n in range(self._group_size)]

    async def _roll_out(self, ticket: Ticket, task: Task) -> None:
        """One group: sampled by a server, scored by its environment's workers, given advantages."""
        shared = self._shared
        group = Group(
            task=task,
            id=str(ticket.group),
            num=self._group_size,
            version=ticket.version,
            params=self._params(temperature=self._temperature(ticket.version)),
            adapters=self._adapters[task.env],
            seed=group_seed(shared.settings.sampling.seed, f"{task.env}/{task.epoch}/{task.index}"),
            score=not shared.settings.buffer.skip_verification,
        )
        await self._written()
        try:
            with shared.generating, shared.timeline.group(ticket.group):
                results = await shared.engine.run_group(group, sampled=self._sampled)
        except PromptTooLong as error:
            self._skip(ticket, task, error)
        else:
            self._num_too_long[task.env] = 0
            self._sampled()
            await self._take_in(ticket, results)
        shared.changed.ring()

    def _task_of(self, ticket: Ticket) -> Task:
        example = self._shared.buffer.issue(ticket.group)
        messages = self._shared.ready.train_prompts[example.env][example.index]
        solutions = self._shared.environments[example.env].solutions
        return Task(
            env=example.env,
            split="train",
            index=example.index,
            messages=messages,
            epoch=example.epoch,
            solution=solutions[example.index] if solutions else "",
        )

    async def _take_in(self, ticket: Ticket, results: list[EpisodeResult]) -> None:
        shared, usable = self._shared, []
        for result in results:
            if result.failure is not None:
                shared.ledger.dropped([result.id], result.failure.reason)
                continue
            shared.recorder.sampled(result.num_tokens)
            shared.ledger.scored(result.id, reward=result.reward, num_tokens=result.num_tokens)
            usable.append(result)
        if len(usable) < fewest_rollouts(shared.settings.advantage):
            self._come_to_nothing(ticket, [result.id for result in usable], "group_too_small")
            return
        reason = shared.buffer.returned(ticket.group, [result.reward for result in usable])
        if reason is not None:
            self._come_to_nothing(ticket, [result.id for result in usable], reason)
            return
        verdicts = judge_group(usable, shared.filters)
        hinted = await shared.auxiliary.hinted(usable, withheld=verdicts.withheld)
        group = finish_group(usable, self._credit, verdicts, group=str(ticket.group), hinted=hinted)
        group = await shared.auxiliary.taught(group)
        for rollout_id, why in group.withheld.items():
            shared.ledger.dropped([rollout_id], why)
        if not group.samples:
            shared.auxiliary.count_hints([group])
            self._come_to_nothing(ticket, [], "all_withheld")
            return
        shared.auxiliary.offer(usable)
        shared.waiting[ticket.group] = group
        shared.scheduler.completed(ticket.group, oldest=group.oldest_version)

    def _come_to_nothing(self, ticket: Ticket, rollout_ids: Sequence[str], reason: str) -> None:
        """Drops what is left of a group; another one may start in its place."""
        self._shared.ledger.dropped(rollout_ids, reason)
        self._shared.buffer.closed(ticket.group)
        self._shared.timeline.came_to_nothing(ticket.group)
        self._shared.scheduler.failed(ticket.group)

    def _skip(self, ticket: Ticket, task: Task, error: PromptTooLong) -> None:
        """Drops a group whose prompt is too long. Raises where all prompts of its environment are."""
        self._come_to_nothing(ticket, self._rollout_ids(ticket), "prompt_too_long")
        self._num_too_long[task.env] += 1
        if self._num_too_long[task.env] >= sum(self._shared.buffer.num_examples(task.env).values()):
            raise ValueError(f"all {self._num_too_long[task.env]} prompts of {task.env} are too long: {error}")
