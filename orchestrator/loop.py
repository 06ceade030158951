"""The orchestrator's loops: asyncio tasks with one job each, over a scheduler that decides."""

import asyncio
import hashlib
import logging
import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from configs.orch import OrchSettings
from orchestrator.background import Bell, BusyClock, in_thread, root_cause
from orchestrator.client import ServerError, ServerPool
from orchestrator.episodes.arena import Arena, PromptTooLong
from orchestrator.episodes.clients import TokenClient
from orchestrator.episodes.episode import FailedRollout, GenerateResult, SingleTurnEpisode
from orchestrator.episodes.types import Role, Task
from orchestrator.evaluate import evaluate
from orchestrator.ledger import Ledger
from orchestrator.monitors.metrics import ScoredGroup, found_metrics
from orchestrator.monitors.recorder import Recorder
from orchestrator.monitors.summary import Summary
from orchestrator.packing import pack
from orchestrator.parts import Unverified, make_buffer, make_credit, make_filters, make_temperature
from orchestrator.relay import Relay, trainer_metrics
from orchestrator.samples import FinishedGroup, finish_group
from orchestrator.scheduler import Scheduler, Shipment, Ticket
from orchestrator.startup import Ready, check_late_server, check_spec, get_ready, make_environments, make_servers
from orchestrator.workers.failures import EnvironmentFailed
from orchestrator.workers.process import EnvironmentPool
from transport.batches.channel import open_sender
from transport.errors import DeadlineError, TransportError
from transport.status import PeerWatch, StatusFile, read_status
from transport.weights.base import NOISE_FILE, PublishedPolicy
from transport.weights.filesystem import FilesystemPolicyReader
from transport.weights.retention import InUse, write_in_use

log = logging.getLogger(__name__)

POLL_S = 0.02
REPORT_INTERVAL_S = 0.25
EXPECTED_ERRORS = (TransportError, ServerError, EnvironmentFailed, ValueError, OSError)
"""Failures of the run whose message says all; others show where they come from."""


class Orchestrator:
    """One run, from version 0 to the last."""

    def __init__(
        self,
        settings: OrchSettings,
        ready: Ready,
        servers: ServerPool,
        environments: EnvironmentPool,
        *,
        began_s: float,
    ) -> None:
        """`began_s`: when the program started, on the monotonic clock."""
        self._settings, self._ready = settings, ready
        self._servers, self._environments = servers, environments
        self._credit = make_credit(settings)
        self._buffer = make_buffer(settings, ready.train_keys)
        for env, num in self._buffer.num_duplicates.items():
            log.info("environment %s: left out %d examples that are there already, by buffer.hash_keys", env, num)
        self._filters = make_filters(settings.filters, model_folder=ready.model_folder)
        self._temperature = make_temperature(settings)
        run, sampling = ready.run, settings.sampling
        self._ledger = Ledger(run.path / "ledger.sqlite")
        self._recorder = Recorder(run.path, run_id=run.run_id, began_s=began_s)
        transport = settings.rollout_transport.model_dump()
        self._sender = open_sender(run, num_ranks=ready.num_ranks, send_timeout_s=settings.wait_timeout, **transport)
        self._reader = FilesystemPolicyReader(run.broadcasts, run_id=run.run_id)
        check = partial(check_late_server, settings, identity=ready.model_identity, context_len=ready.context_len)
        self._relay = Relay(
            servers,
            run_id=run.run_id,
            alias=settings.model.lora_adapter,
            check=check,
            broadcast=settings.weight_broadcast.type == "nccl",
        )
        self._one_version = settings.weight_broadcast.format != "adapter"
        policy = TokenClient(servers, context_len=ready.context_len)
        self._arena = Arena(policy=policy, renderer=ready.renderer, scorer=environments)
        verifies = not settings.buffer.skip_verification
        self._training_arena = self._arena if verifies else replace(self._arena, scorer=Unverified())
        role = partial(Role, id="policy", max_tokens=sampling.max_tokens, min_tokens=sampling.min_tokens)
        self._training_role = partial(role, noisy=True)
        self._greedy = SingleTurnEpisode(role(temperature=0.0))
        self._group_size = settings.rollouts_per_example
        groups_per_batch = settings.batch_size // self._group_size
        self._scheduler = Scheduler(
            groups_per_batch=groups_per_batch,
            max_async_level=settings.max_async_level,
            max_off_policy_steps=settings.max_off_policy_steps,
            max_in_flight=settings.max_concurrent_groups or math.ceil(settings.oversampling_factor * groups_per_batch),
            max_steps=settings.max_steps,
            oversampling_factor=settings.oversampling_factor,
        )
        self._num_too_long: Counter[str] = Counter()
        self._waiting: dict[int, FinishedGroup] = {}
        self._shipped_at_s: dict[int, float] = {}
        self._evaluations: asyncio.Queue[int | None] = asyncio.Queue()
        self._trainer = PeerWatch(run.status / "train.json", name="grpo-train")
        self._changed = Bell()
        self._generating = BusyClock()

    async def run(self) -> Summary:
        """All loops, until the last version is live and evaluated. Then tells the trainer that the run is over."""
        try:
            async with asyncio.TaskGroup() as group:
                background = [group.create_task(self._report()), group.create_task(self._relay.watch())]
                loops = [self._sample(), self._assemble(), self._relay_versions(), self._evaluate()]
                await asyncio.gather(*(group.create_task(loop) for loop in loops))
                for task in background:
                    task.cancel()
            last_step = self._scheduler.shipped
            await in_thread(self._sender.finish, last_step)
            self._ready.status.set("finished", step=last_step)
            self._ledger.flush()
            return await in_thread(self._recorder.finish, self._ledger, generate_s=self._generating.total_s)
        finally:
            self._ledger.drop_unfinished("run_ended")
            self._ledger.close()
            self._recorder.close()
            await in_thread(self._sender.close)

    # --- sample ---

    async def _sample(self) -> None:
        """Consumes: tasks. Waits for: leave to start a group, by a new version, a shipped batch or a failed group.
        Unblocked by: relay, assemble, and its own groups. Ends when: the last batch has shipped."""
        async with asyncio.TaskGroup() as group:
            while not self._scheduler.finished:
                while (ticket := self._scheduler.start()) is not None:
                    group.create_task(self._roll_out(ticket))
                await self._changed.wait()

    async def _roll_out(self, ticket: Ticket) -> None:
        """One group: sampled by a server, scored by its environment's process, given advantages."""
        task, episode = self._task_of(ticket), self._episode_of(ticket)
        self._ledger.issued(
            ticket.group, num=self._group_size, env=task.env, example=task.index, version=ticket.version
        )
        try:
            with self._generating:
                results = await episode.generate(
                    self._training_arena,
                    task,
                    group=str(ticket.group),
                    num=self._group_size,
                    version=ticket.version,
                    seed=group_seed(self._settings.sampling.seed, ticket.group),
                )
        except PromptTooLong as error:
            self._skip(ticket, task, error)
        else:
            self._num_too_long[task.env] = 0
            self._take_in(ticket, results)
        self._changed.ring()

    def _task_of(self, ticket: Ticket) -> Task:
        example = self._buffer.issue(ticket.group)
        messages = self._ready.train_prompts[example.env][example.index]
        return Task(env=example.env, split="train", index=example.index, messages=messages)

    def _episode_of(self, ticket: Ticket) -> SingleTurnEpisode:
        return SingleTurnEpisode(self._training_role(temperature=self._temperature(ticket.version)))

    def _take_in(self, ticket: Ticket, results: list[GenerateResult | FailedRollout]) -> None:
        usable = []
        for result in results:
            if isinstance(result, FailedRollout):
                self._ledger.dropped([result.rollout.id], result.failure.reason)
                continue
            self._recorder.sampled(result.rollout.num_sampled_tokens)
            self._ledger.scored(
                result.rollout.id, reward=result.score.reward, num_tokens=result.rollout.num_sampled_tokens
            )
            usable.append(result)
        if len(usable) < 2:
            self._come_to_nothing(ticket, [result.rollout.id for result in usable], "group_too_small")
            return
        reason = self._buffer.returned(ticket.group, [result.score.reward for result in usable])
        if reason is not None:
            self._come_to_nothing(ticket, [result.rollout.id for result in usable], reason)
            return
        group = finish_group(usable, self._credit, self._filters, group=str(ticket.group))
        for rollout_id, name in group.withheld.items():
            self._ledger.dropped([rollout_id], name)
        if not group.samples:
            self._come_to_nothing(ticket, [], "all_withheld")
            return
        self._waiting[ticket.group] = group
        self._scheduler.completed(ticket.group)

    def _come_to_nothing(self, ticket: Ticket, rollout_ids: Sequence[str], reason: str) -> None:
        """Drops what is left of a group; another one may start in its place."""
        self._ledger.dropped(rollout_ids, reason)
        self._buffer.closed(ticket.group)
        self._scheduler.failed(ticket.group)

    def _skip(self, ticket: Ticket, task: Task, error: PromptTooLong) -> None:
        """Drops a group whose prompt is too long. Raises where all prompts of its environment are."""
        rollout_ids = [f"{ticket.group}/{n}" for n in range(self._group_size)]
        self._come_to_nothing(ticket, rollout_ids, "prompt_too_long")
        self._num_too_long[task.env] += 1
        if self._num_too_long[task.env] >= sum(self._buffer.num_examples(task.env).values()):
            raise ValueError(f"all {self._num_too_long[task.env]} prompts of {task.env} are too long: {error}")

    # --- assemble ---

    async def _assemble(self) -> None:
        """Consumes: finished groups. Waits for: enough of them, and the version that lets the batch ship.
        Unblocked by: sample, relay. Ends when: the last batch has shipped."""
        while not self._scheduler.finished:
            shipment = self._scheduler.ship()
            if shipment is None:
                await self._changed.wait()
                continue
            await self._send(shipment)
            self._changed.ring()

    async def _send(self, shipment: Shipment) -> None:
        step, groups = shipment.step, [self._waiting.pop(ticket.group) for ticket in shipment.tickets]
        for ticket in shipment.tickets:
            self._buffer.closed(ticket.group)
        samples = [sample for group in groups for sample in group.samples]
        batches = pack(
            samples,
            seq_len=self._settings.seq_len,
            num_ranks=self._ready.num_ranks,
            run_id=self._ready.run.run_id,
            step=step,
        )
        self._shipped_at_s[step] = time.monotonic()
        self._ledger.shipped((rollout_id for group in groups for rollout_id in group.trained), step)
        scored = [
            ScoredGroup(results=group.results, lag=shipment.lag(ticket), found=group.found)
            for ticket, group in zip(shipment.tickets, groups, strict=True)
        ]
        self._recorder.shipped(
            step,
            scored,
            dropped=self._ledger.num_dropped,
            generate_s=self._generating.total_s,
            more=self._buffer.metrics() | found_metrics(scored, [one.name for one in self._filters]),
        )
        await in_thread(self._sender.send, step, batches)

    # --- relay ---

    async def _relay_versions(self) -> None:
        """Consumes: versions that the trainer publishes. Waits for: the next one, and for every server to prove it.
        Unblocked by: trainer, servers. Ends when: the last step's version is live."""
        version, noticed_s = 0, time.monotonic()
        while self._settings.max_steps is None or version <= self._settings.max_steps:
            policy, waited_s = await self._published(version, earlier_s=noticed_s)
            noticed_s = time.monotonic()
            if version == 0:
                check_spec(self._settings, policy.manifest.spec, self._ready.model_identity)
            if self._one_version:
                await self._drained()
            proof = await self._relay.load(version, noisy=NOISE_FILE in policy.manifest.files)
            self._scheduler.version_live(version)
            if version > 0:
                self._ledger.trained(version)
                del self._shipped_at_s[version]
                self._recorder.trained(version, trainer_metrics(policy), wait_trainer_s=waited_s)
            self._recorder.live(proof)
            if self._evaluation_due(version):
                self._scheduler.pin(version)
                self._evaluations.put_nowait(version)
            self._changed.ring()
            held = await self._relay.keep_only(self._scheduler.needed_versions())
            await in_thread(self._say_what_is_in_use, held, version)
            version += 1
        self._evaluations.put_nowait(None)

    async def _drained(self) -> None:
        """Returns when no request needs the version that servers are about to replace; nothing starts meanwhile."""
        self._scheduler.hold()
        while not self._scheduler.drained:
            await self._changed.wait()

    def _say_what_is_in_use(self, versions: frozenset[int], newest: int) -> None:
        """For whoever removes old versions. Where it cannot be written, they stay."""
        run = self._ready.run
        try:
            write_in_use(run.broadcasts, InUse(versions=versions, newest=newest), run_id=run.run_id)
        except OSError as error:
            log.warning("old policy versions stay: %s", error)

    async def _published(self, version: int, *, earlier_s: float) -> tuple[PublishedPolicy, float]:
        """The version, once it is there, and for how many seconds the trainer was waited for. Its time runs from when
        it had the batch and had published the version before, at `earlier_s`: batches may be there in advance."""
        limit_s = self._settings.wait_timeout

        def waited_s() -> float:
            now_s = time.monotonic()
            shipped_s = earlier_s if version == 0 else self._shipped_at_s.get(version, now_s)
            return now_s - max(earlier_s, shipped_s)

        while (policy := self._reader.poll(version)) is None:
            if waited_s() > limit_s:
                raise DeadlineError(
                    f"waited wait_timeout = {limit_s:g} s for the trainer to publish version {version}; see its log"
                )
            self._trainer.check()
            await asyncio.sleep(POLL_S)
        return policy, waited_s()

    # --- evaluate ---

    def _evaluation_due(self, version: int) -> bool:
        if self._settings.eval.num_examples == 0:
            return False
        if version == 0:
            return self._settings.eval.eval_base_model
        return version == self._settings.max_steps or version % self._settings.eval.interval == 0

    async def _evaluate(self) -> None:
        """Consumes: versions that are due. Waits for: them, and the servers' answers. Unblocked by: relay, servers.
        Ends when: relay says that no more come."""
        while (version := await self._evaluations.get()) is not None:
            evaluation = await evaluate(self._arena, self._greedy, self._ready.eval_prompts, version=version)
            self._scheduler.unpin(version)
            self._changed.ring()
            self._recorder.evaluated(evaluation)

    # --- report ---

    async def _report(self) -> None:
        """Consumes: the state of all loops. Waits for: the clock. Unblocked by: it. Ends when: it is cancelled."""
        while True:
            self._ledger.flush()
            state, waiting_for = self._state()
            self._ready.status.set(state, step=self._scheduler.shipped + 1, waiting_for=waiting_for)
            await asyncio.sleep(REPORT_INTERVAL_S)

    def _state(self) -> tuple[str, str | None]:
        """What goes on, and whom it waits for."""
        if not (members := self._servers.membership).routed:
            return "waiting", f"inference servers: {', '.join(members.out)}"
        if (environments := self._environments.scoring) and self._servers.num_in_flight == 0:
            return "scoring", f"environment {', '.join(environments)}"
        if self._scheduler.num_in_flight > 0:
            return "sampling", None
        if self._relay.loading is not None:
            version, servers = self._relay.loading
            return f"loading version {version}", f"inference servers: {', '.join(sorted(servers))}"
        if (live := self._scheduler.live) is None:
            return "waiting", "trainer: version 0"
        if self._scheduler.finished and live == self._settings.max_steps:
            return "evaluating", None
        return "waiting", f"trainer: version {live + 1}"


def group_seed(seed: int | None, group: int) -> int | None:
    """A request's seed; the server adds the number of the rollout."""
    if seed is None:
        return None
    return int.from_bytes(hashlib.sha256(f"{seed}/{group}".encode()).digest()[:7])


async def orchestrate(settings: OrchSettings) -> Summary:
    """One whole run. Raises the first error of whichever task failed."""
    began_s = time.monotonic()
    servers, environments = make_servers(settings), make_environments(settings)
    try:
        ready = await get_ready(settings, servers, environments)
        orchestrator = Orchestrator(settings, ready, servers, environments, began_s=began_s)
        return await orchestrator.run()
    except BaseExceptionGroup as errors:
        cause = root_cause(errors)
        _say_failed(settings, cause)
        raise cause from None
    except BaseException as error:
        _say_failed(settings, error)
        raise
    finally:
        await environments.close()
        await servers.close()


def _say_failed(settings: OrchSettings, error: BaseException) -> None:
    """Tells the trainer not to wait, where this process has joined the run."""
    path = Path(settings.output_dir) / "status" / "orch.json"
    if (read_status(path) or {}).get("pid") == os.getpid():
        StatusFile(path).failed(error)


def run(settings: OrchSettings) -> int:
    """The exit code of `grpo-orch`: 0 done, 1 failure, 130 on SIGINT, 143 on SIGTERM."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    ended_by: list[signal.Signals] = []

    async def until_signal() -> Summary:
        task = asyncio.ensure_future(orchestrate(settings))

        def end(number: signal.Signals) -> None:
            ended_by.append(number)
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, end, number)
        return await task

    try:
        summary = asyncio.run(until_signal())
    except asyncio.CancelledError:
        print(f"ended by {ended_by[0].name}", file=sys.stderr)
        return 128 + ended_by[0]
    except EXPECTED_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        log.exception("unexpected failure")
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    summary.print()
    return 0
