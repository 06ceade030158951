"""One run of the orchestrator, from top to bottom: what is made from which settings, who gets whom, how it ends."""

import asyncio
import gc
import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack, closing
from functools import partial
from pathlib import Path

from grpo.configs.common import HttpBroadcast
from grpo.configs.orch import OrchSettings
from grpo.orchestrator.background import in_thread, root_cause
from grpo.orchestrator.buffer import make_buffer
from grpo.orchestrator.checks import check_server
from grpo.orchestrator.doubles import Doubles
from grpo.orchestrator.filters import make_filters
from grpo.orchestrator.hooks import close_hooks, open_hooks
from grpo.orchestrator.inference.client import PolicyClient
from grpo.orchestrator.inference.pool import ServerPool
from grpo.orchestrator.inference.sleep import SleepScheduler
from grpo.orchestrator.inference.watch import ServerWatch
from grpo.orchestrator.inference.weight_sync import WeightSync
from grpo.orchestrator.ledger import LEDGER_FILE, Ledger
from grpo.orchestrator.loops.assemble import Assembling
from grpo.orchestrator.loops.evaluate import Evaluating
from grpo.orchestrator.loops.report import Reporting
from grpo.orchestrator.loops.sample import Sampling, Schedule
from grpo.orchestrator.loops.versions import Versions
from grpo.orchestrator.monitoring.fates import Fates
from grpo.orchestrator.monitoring.recorder import Recorder
from grpo.orchestrator.monitoring.summary import Summary
from grpo.orchestrator.monitoring.timeline import Timeline
from grpo.orchestrator.monitoring.traces import Traces
from grpo.orchestrator.monitoring.trackers import Reporter, check_reports
from grpo.orchestrator.opponents import Opponents
from grpo.orchestrator.resuming import Progress, resume
from grpo.orchestrator.rollouts.engine import RolloutEngine
from grpo.orchestrator.rollouts.stores import ArtifactStores
from grpo.orchestrator.scheduler import make_scheduler
from grpo.orchestrator.shaping import BatchAdvantages, shaping_hooks
from grpo.orchestrator.sink import RolloutSink
from grpo.orchestrator.startup import Ready, get_ready, keys_of_run, make_environments
from grpo.orchestrator.workers.pool import WorkerPool
from grpo.transport.batches.channel import open_sender
from grpo.transport.batches.filesystem import BatchSender
from grpo.transport.digests import write_digests
from grpo.transport.hidden import hide_environment
from grpo.transport.limits import share_heaps
from grpo.transport.status import FINISHED, StatusFile, read_status
from grpo.transport.weights.identity import base_identity, resolve_model
from grpo.transport.weights.store import PolicyReader

log = logging.getLogger(__name__)


async def orchestrate(settings: OrchSettings) -> Summary:
    """One whole run. Raises the first error of whichever task failed."""
    hide_environment(keys_of_run(settings))
    share_heaps()
    async with AsyncExitStack() as opened:
        try:
            return await _orchestrate(settings, opened, began_s=time.monotonic())
        except BaseException as error:
            cause = root_cause(error)
            status = Path(settings.output_dir) / "status" / "orch.json"
            if (read_status(status) or {}).get("pid") == os.getpid():  # this process has joined: nobody is to wait
                StatusFile(status).failed(cause)
            if cause is error:
                raise
            raise cause from None


async def _orchestrate(settings: OrchSettings, opened: AsyncExitStack, *, began_s: float) -> Summary:
    """Finds all who take part, and runs with them."""
    check_reports(settings.report_to)
    chosen, model_folder = settings.client, resolve_model(settings.model.name)
    identity = base_identity(model_folder)
    alone = opened.enter_context(ExitStack())
    client = PolicyClient(
        ServerPool(chosen.base_url if chosen.elastic is None else ()),
        api_key=os.environ.get(chosen.api_key_var),
        timeout_s=chosen.timeout,
    )
    opened.push_async_callback(client.close)
    sync = WeightSync(
        client,
        alias=settings.model.lora_adapter,
        adapters=settings.model.lora_adapters,
        check=partial(check_server, settings, identity=identity, folder=model_folder),
        broadcast=settings.weight_broadcast.type == "nccl",
    )
    environments = make_environments(settings)
    opened.push_async_callback(lambda: asyncio.gather(*(pool.close() for pool in environments.values())))
    async with asyncio.TaskGroup() as background:
        watch = ServerWatch(
            sync,
            interval_s=chosen.health_interval_s,
            timeout_s=chosen.health_timeout_s,
            elastic=chosen.elastic,
            folder=Path(settings.output_dir) / "status",
        )
        watching = background.create_task(watch.run())
        ready = await get_ready(settings, sync, environments, alone, model_folder=model_folder, model_identity=identity)
        sync.run_id = ready.run.run_id
        _admit(sync, settings, ready)
        if isinstance(broadcast := settings.weight_broadcast, HttpBroadcast):
            from grpo.transport.weights.http import VersionServer  # imports a web server

            address, key = (broadcast.host, broadcast.port), ready.run.key(broadcast.key_var)
            store = VersionServer(ready.run.broadcasts, run_id=ready.run.run_id, address=address, key=key)
            opened.enter_context(closing(store))
        reporter = Reporter(ready.run, settings.report_to)
        alone.callback(reporter.end, None)
        summary = await _train(settings, ready, watch, sync, environments, reporter, began_s=began_s)
        await in_thread(partial(write_digests, ready.run.path, run_id=ready.run.run_id))
        watching.cancel()
    return summary


def _admit(sync: WeightSync, settings: OrchSettings, ready: Ready, *, room: int = 0) -> None:
    """Has servers that join late refused that do not take the run's longest sample and `room` further tokens, as far as
    those do that it began with."""
    limit = min(ready.context_len + room, ready.server_len)
    identity, folder = ready.model_identity, ready.model_folder
    sync.check = partial(check_server, settings, identity=identity, folder=folder, context_len=limit)


async def _train(
    settings: OrchSettings,
    ready: Ready,
    watch: ServerWatch,
    sync: WeightSync,
    environments: Mapping[str, WorkerPool],
    reporter: Reporter,
    *,
    began_s: float,
) -> Summary:
    """Runs all loops until the last version is live and evaluated. Then tells the trainer that the run is over.
    `began_s`: when the program started, on the monotonic clock."""
    run, client = ready.run, sync.client
    async with AsyncExitStack() as files:
        # What is remembered.
        ledger = files.enter_context(closing(Ledger(run.path / LEDGER_FILE)))
        files.callback(ledger.drop_unfinished, "run_ended")
        timeline = files.enter_context(closing(Timeline(run.path)))
        sync.timed, sync.noted = timeline.loading, ledger.proved
        traces = files.enter_context(closing(Traces(run.path, settings.traces, num_ranks=ready.trainer.num_ranks)))
        traces.vocabulary(ready.renderer.vocabulary())
        recorder = Recorder(run.path, run_id=run.run_id, began_s=began_s, reporter=reporter)
        files.callback(recorder.close)
        progress = resume(settings, run, ledger)
        if progress.resumed:
            recorder.resume(progress, dropped=ledger.num_dropped, count=not settings.ckpt.skip_progress)

        # What makes rollouts, and what is learned from.
        scheduler = make_scheduler(settings, progress)
        opened = await open_hooks(settings, ready, client, environments, scheduler, ledger, progress)
        files.push_async_callback(close_hooks, opened)
        hooks = [*shaping_hooks(settings), *opened]
        _admit(sync, settings, ready, room=max((hook.server_room for hook in hooks), default=0))
        # No sample gets longer than servers, trainer and hooks take.
        limits = [ready.context_len, *(hook.longest for hook in hooks if hook.longest is not None)]
        limits += [ready.server_len - hook.server_room for hook in hooks]
        opponents = Opponents(
            settings=settings,
            pools={key: pool.loaded.pools for key, pool in environments.items()},
            scheduler=scheduler,
            sync=sync,
            ledger=ledger,
            reader=PolicyReader(run.broadcasts, run_id=run.run_id),
            base_digest=ready.model_identity,
        )
        engine = RolloutEngine(
            environments,
            client,
            ready.renderer,
            context_len=min(limits),
            seed=settings.seed,
            max_prompt_length=settings.buffer.max_prompt_length,
            stores=ArtifactStores(ledger, seed=f"{settings.seed}/{progress.num_groups}"),
            opponents=opponents,
        )
        sink = RolloutSink(
            settings=settings,
            engine=engine,
            scheduler=scheduler,
            fates=Fates(ledger, recorder, timeline, traces, _doubles(settings, ledger, progress)),
            filters=make_filters(settings.filters, model_folder=ready.model_folder),
            hooks=hooks,
        )

        # What is done.
        sender = open_sender(
            run,
            num_ranks=ready.trainer.num_ranks,
            send_timeout_s=settings.wait_timeout_s,
            **settings.rollout_transport.model_dump(),
        )
        sys.setswitchinterval(0.001)  # seconds; a thread that computes gives the loop its turn
        gc.collect()
        gc.freeze()  # what is there stays; looking through it again and again would hold up the loop
        # Thousands of rollouts in flight are no garbage either: the collector looks often at a few thousand new ones of
        # their objects, which takes milliseconds, and seldom at all.
        gc.set_threshold(5_000, 200, 20)
        try:
            await _run_loops(sink, ready, watch, sync, environments, sender, progress, opponents)
            await in_thread(sender.finish, scheduler.shipped)
            ready.status.set(FINISHED, step=scheduler.shipped)
            ledger.drop_unfinished("run_ended")  # what waits for a reward finds no batch any more
            await in_thread(ledger.changes())
            return await in_thread(recorder.finish, ledger)
        finally:
            await in_thread(sender.close)


def _doubles(settings: OrchSettings, ledger: Ledger, progress: Progress) -> Doubles:
    """Returns what looks for examples that come again; with `ckpt.skip_buffer` they are meant to."""
    goes_on = progress.resumed and not settings.ckpt.skip_buffer
    return Doubles(ledger.in_batches() if goes_on else (), step=progress.step)


async def _run_loops(
    sink: RolloutSink,
    ready: Ready,
    watch: ServerWatch,
    sync: WeightSync,
    environments: Mapping[str, WorkerPool],
    sender: BatchSender,
    progress: Progress,
    opponents: Opponents,
) -> None:
    """Runs all loops until the last version is live and evaluated."""
    settings, scheduler, fates = sink.settings, sink.scheduler, sink.fates
    sleep = SleepScheduler(sync.client, slept=fates.timeline.slept) if settings.sleep_mode else None
    keys = {env.label: environments[env.label].identities for env in settings.env}
    buffer = make_buffer(settings, keys, progress)
    solutions = {env.label: environments[env.label].solutions for env in settings.env}
    sampling = Sampling(prompts=ready.train_prompts, solutions=solutions, buffer=buffer, sink=sink)
    schedule = sampling if settings.arena is None else _arena_schedule(sink)
    assembling = Assembling(
        ready=ready,
        sink=sink,
        buffer=buffer,
        advantages=BatchAdvantages(settings.advantage, progress.state),
        watch=watch,
        sleep=sleep,
        sender=sender,
        tolerances=sync.tolerances,
    )
    evaluating = Evaluating(
        settings=settings,
        prompts=ready.eval_prompts,
        passed_over=progress.first_version if progress.resumed and settings.eval.skip_eval_on_resume else None,
        scheduler=scheduler,
        engine=sink.engine,
        fates=fates,
        cancel_rollouts=schedule.cancel,
    )
    versions = Versions(
        settings=settings,
        ready=ready,
        first_version=progress.first_version,
        scheduler=scheduler,
        sync=sync,
        sleep=sleep,
        fates=fates,
        evaluating=evaluating,
        opponents=opponents,
    )
    reporting = Reporting(
        settings=settings,
        ready=ready,
        first_version=progress.first_version,
        scheduler=scheduler,
        sync=sync,
        sleep=sleep,
        environments=environments,
        hooks=sink.hooks,
        ledger=fates.ledger,
    )
    async with asyncio.TaskGroup() as group:
        background = group.create_task(reporting.run())
        loops = (schedule.run(), assembling.run(), evaluating.run(), versions.run())
        await asyncio.gather(*map(group.create_task, loops))
        background.cancel()


def _arena_schedule(sink: RolloutSink) -> Schedule:
    """Returns the schedule that `orch.arena` names. Raises UserError."""
    from grpo.orchestrator.arena.schedule import open_schedule  # the rest knows of no arena

    return open_schedule(sink)
