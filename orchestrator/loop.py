"""One run of the orchestrator: its loops, from start-up to the summary, and how it ends."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from configs.orch import OrchSettings
from orchestrator.auxiliary import find_teacher, longest_sample, make_auxiliary, shortest_server
from orchestrator.background import in_thread, root_cause
from orchestrator.inference.client import ServerError, ServerPool
from orchestrator.inference.discovery import Discovery
from orchestrator.inference.health import Health
from orchestrator.inference.sleep import SleepScheduler
from orchestrator.inference.weight_sync import Relay
from orchestrator.ledger import Ledger
from orchestrator.loops.assemble import Assembling
from orchestrator.loops.evaluate import Evaluating
from orchestrator.loops.pace import Pacing
from orchestrator.loops.report import Reporting
from orchestrator.loops.sample import Sampling
from orchestrator.loops.shared import Shared
from orchestrator.loops.versions import Versions
from orchestrator.monitoring.recorder import Recorder
from orchestrator.monitoring.summary import Summary
from orchestrator.monitoring.timeline import Timeline
from orchestrator.monitoring.trackers import Reporter, check_reports, open_reporter
from orchestrator.parts import make_buffer, make_filters
from orchestrator.resuming import Progress, resume
from orchestrator.rollouts.engine import RolloutEngine
from orchestrator.rollouts.policy import TokenClient
from orchestrator.rollouts.stores import open_stores
from orchestrator.scheduler import Scheduler
from orchestrator.startup import Ready, check_late_server, get_ready, keys_of_run, make_environments, make_servers
from orchestrator.teacher.served import ServedTeacher
from orchestrator.workers.failures import EnvironmentFailed
from orchestrator.workers.pool import WorkerPool
from transport.batches.channel import open_sender
from transport.checkpoints import Checkpoints
from transport.errors import START_AGAIN, PeerFailed, TransportError
from transport.hidden import hide_environment
from transport.status import FINISHED, PeerWatch, StatusFile, read_status

log = logging.getLogger(__name__)

EXPECTED_ERRORS = (TransportError, ServerError, EnvironmentFailed, ValueError, OSError)
"""Failures of the run whose message says all; others show where they come from."""


class Orchestrator:
    """One run, from version 0, or from what an earlier process left, to the last version."""

    def __init__(
        self,
        settings: OrchSettings,
        ready: Ready,
        servers: ServerPool,
        environments: Mapping[str, WorkerPool],
        reporter: Reporter,
        *,
        began_s: float,
        teacher: ServedTeacher | None = None,
    ) -> None:
        """`began_s`: when the program started, on the monotonic clock. `teacher`: where one serves the run."""
        shared = self._shared = make_shared(
            settings, ready, servers, environments, reporter, began_s=began_s, teacher=teacher
        )
        run, transport = ready.run, settings.rollout_transport.model_dump()
        try:
            self._sender = open_sender(
                run, num_ranks=ready.trainer.gpus, send_timeout_s=settings.wait_timeout_s, **transport
            )
        except BaseException:
            self._close_files()
            raise
        sampling = Sampling(shared)
        self._evaluating = Evaluating(shared, cancel_rollouts=sampling.cancel)
        self._loops = (sampling, Assembling(shared, self._sender), Versions(shared, self._evaluating))
        self._reporting = Reporting(shared)

    def _background(self) -> list[Coroutine[Any, Any, None]]:
        """What goes on until the loops have ended."""
        shared, elastic = self._shared, self._shared.settings.client.elastic
        watches = [self._reporting.run(), shared.relay.watch(), Pacing(shared).run()]
        return watches if elastic is None else [*watches, Discovery(shared.servers, elastic).watch()]

    async def run(self) -> Summary:
        """All loops, until the last version is live and evaluated. Then tells the trainer that the run is over."""
        shared = self._shared
        gc.collect()
        gc.freeze()  # what is there stays; looking through it again and again would hold up the loop
        try:
            async with asyncio.TaskGroup() as group:
                background = [group.create_task(one) for one in self._background()]
                loops = [group.create_task(loop.run()) for loop in (*self._loops, self._evaluating)]
                await asyncio.gather(*loops)
                for task in background:
                    task.cancel()
            last_step = shared.scheduler.shipped
            await in_thread(self._sender.finish, last_step)
            if shared.ready.trainer.ckpt.interval is not None:
                await self._last_checkpoint(last_step)
            shared.ready.status.set(FINISHED, step=last_step)
            await in_thread(shared.ledger.changes())
            return await in_thread(shared.recorder.finish, shared.ledger)
        finally:
            shared.ledger.drop_unfinished("run_ended")
            await shared.auxiliary.close()
            await in_thread(self._sender.close)
            self._close_files()

    def _close_files(self) -> None:
        self._shared.recorder.close()
        self._shared.timeline.close()
        self._shared.ledger.close()  # the last one: it fails where the ledger is gone

    async def _last_checkpoint(self, step: int) -> None:
        """Completes what the trainer writes at its end, however long that takes. Where a trainer that has ended left
        none, or none comes within `wait_timeout`, the next start does it."""
        shared = self._shared
        said, deadline = shared.ready.run.status / "train.json", time.monotonic() + shared.settings.wait_timeout_s
        trainer = PeerWatch(said, name="grpo-train", resuming=False)
        shared.ready.status.set("finishing", step=step, waiting_for=f"trainer: checkpoint {step}")
        try:
            while step not in shared.checkpoints.steps() and time.monotonic() < deadline:
                trainer.check()
                if (read_status(said) or {}).get("state") == FINISHED and step not in shared.checkpoints.steps():
                    raise PeerFailed("grpo-train has ended without it")
                await asyncio.sleep(0.05)
        except PeerFailed as error:
            log.warning("the last checkpoint is not complete: %s", error)
        await self._reporting.complete_checkpoints()


def make_shared(
    settings: OrchSettings,
    ready: Ready,
    servers: ServerPool,
    environments: Mapping[str, WorkerPool],
    reporter: Reporter,
    *,
    began_s: float,
    teacher: ServedTeacher | None,
) -> Shared:
    """What the loops share, as an earlier process of the run left it, where there was one."""
    run, count = ready.run, not settings.ckpt.skip_progress
    with contextlib.ExitStack() as opened:
        ledger = opened.enter_context(contextlib.closing(Ledger(run.path / "ledger.sqlite")))
        recorder = Recorder(run.path, run_id=run.run_id, began_s=began_s, reporter=reporter)
        opened.enter_context(contextlib.closing(recorder))
        timeline = opened.enter_context(contextlib.closing(Timeline(run.path)))
        servers.busy = timeline.busy
        progress = resume(settings, run, ledger)
        if progress.resumed:
            recorder.resume(progress, dropped=ledger.num_dropped, count=count)
        stores = open_stores(
            {key: pool.loaded.stores for key, pool in environments.items()},
            ledger,
            seed=settings.seed,
            state=progress.artifacts,
        )
        policy = TokenClient(servers, context_len=longest_sample(settings, ready, teacher))
        engine = RolloutEngine(environments, policy, ready.renderer, seed=settings.seed, stores=stores)
        scheduler = make_scheduler(settings, progress)
        auxiliary = make_auxiliary(
            settings, ready, servers, engine, scheduler, ledger, teacher=teacher, progress=progress
        )
        check = partial(
            check_late_server, settings, identity=ready.model_identity, context_len=shortest_server(settings, ready)
        )
        shared = Shared(
            settings=settings,
            ready=ready,
            progress=progress,
            servers=servers,
            environments=environments,
            engine=engine,
            buffer=make_buffer(settings, ready.train_keys, progress.buffer, ledger.pools()),
            filters=make_filters(settings.filters, model_folder=ready.model_folder),
            auxiliary=auxiliary,
            scheduler=scheduler,
            ledger=ledger,
            recorder=recorder,
            reporter=reporter,
            timeline=timeline,
            relay=Relay(
                servers,
                run_id=run.run_id,
                alias=settings.model.lora_adapter,
                adapters=settings.model.lora_adapters,
                check=check,
                broadcast=settings.weight_broadcast.type == "nccl",
                loading=timeline.loading,
            ),
            health=Health(
                servers, interval_s=settings.client.health_interval_s, timeout_s=settings.client.health_timeout_s
            ),
            checkpoints=Checkpoints(run),
            sleep=SleepScheduler(servers, slept=timeline.slept) if settings.sleep_mode else None,
        )
        opened.pop_all()  # from here on the run closes them
    return shared


def make_scheduler(settings: OrchSettings, progress: Progress) -> Scheduler:
    """Goes on after what an earlier process had done."""
    return Scheduler(
        groups_per_batch=settings.batch_size // settings.rollouts_per_example,
        max_async_level=settings.max_async_level,
        max_off_policy_steps=settings.max_off_policy_steps,
        max_in_flight=settings.min_concurrent_groups or settings.most_concurrent_groups,
        max_steps=settings.max_steps,
        oversampling_factor=settings.oversampling_factor,
        shipped=progress.step,
        num_started=progress.num_groups,
        follows=settings.inflight_weight_updates,
    )


async def orchestrate(settings: OrchSettings) -> Summary:
    """One whole run. Raises the first error of whichever task failed."""
    began_s = time.monotonic()
    hide_environment(keys_of_run(settings))
    servers, environments = make_servers(settings), make_environments(settings)
    alone, teacher = contextlib.ExitStack(), None
    try:
        check_reports(settings.report_to)
        ready = await get_ready(settings, servers, environments, alone)
        reporter = open_reporter(settings.report_to, ready.run)
        alone.callback(reporter.end, None)
        teacher = await find_teacher(settings, ready, environments)
        orchestrator = Orchestrator(settings, ready, servers, environments, reporter, began_s=began_s, teacher=teacher)
        return await orchestrator.run()
    except BaseExceptionGroup as errors:
        cause = root_cause(errors)
        _say_failed(settings, cause)
        raise cause from None
    except BaseException as error:
        _say_failed(settings, error)
        raise
    finally:
        if teacher is not None:
            await teacher.close()
        await asyncio.gather(*(pool.close() for pool in environments.values()))
        await servers.close()
        alone.close()


def _say_failed(settings: OrchSettings, error: BaseException) -> None:
    """Tells the trainer not to wait, where this process has joined the run."""
    path = Path(settings.output_dir) / "status" / "orch.json"
    if (read_status(path) or {}).get("pid") == os.getpid():
        StatusFile(path).failed(error)


def run(settings: OrchSettings) -> int:
    """The exit code of `grpo-orch`: 0 done, 1 failure, `START_AGAIN` where the trainer is gone, 130 on SIGINT, 143 on
    SIGTERM."""
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
        return START_AGAIN if isinstance(error, PeerFailed) else 1
    except Exception as error:
        log.exception("unexpected failure")
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    summary.print()
    return 0
