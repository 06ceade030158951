"""Start-up: waits for the run with its trainer, the servers, the tokenizer and the environments."""

import asyncio
import logging
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from grpo.configs.cross import joined_check, recorded
from grpo.configs.loading import LoadedSettings
from grpo.configs.orch import OrchSettings
from grpo.configs.resuming import changes, record_of
from grpo.configs.train import TrainSettings
from grpo.orchestrator.background import in_thread
from grpo.orchestrator.checks import check_roles
from grpo.orchestrator.evaluate import environments_of, held_out
from grpo.orchestrator.inference.weight_sync import WeightSync
from grpo.orchestrator.renderer import ChatRenderer
from grpo.orchestrator.rollouts.records import Messages, Task
from grpo.orchestrator.workers.failures import FailureRate
from grpo.orchestrator.workers.pool import WorkerPool
from grpo.transport.batches.store import StepStore
from grpo.transport.errors import RunFolderError
from grpo.transport.hidden import key_variables
from grpo.transport.run import RunFolder, current_run_id, join_run, only_one, recorded_settings, wait_for_settings
from grpo.transport.run_warnings import kept_warnings
from grpo.transport.status import StatusFile
from grpo.transport.weights.store import PolicyReader

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What start-up hands to the loops."""

    run: RunFolder
    status: StatusFile
    model_identity: str
    model_folder: Path
    """The base model's folder on this machine."""
    context_len: int
    """The longest prompt with its answer that every server and the trainer take, in tokens."""
    server_len: int
    """The longest sequence that every server takes, in tokens."""
    trainer: TrainSettings
    """The settings that the trainer has recorded in the run."""
    renderer: ChatRenderer
    train_prompts: Mapping[str, Sequence[Messages]]
    """The prompts of the training examples, by environment."""
    eval_prompts: Mapping[str, Sequence[Messages]]
    """The prompts of the held-out examples, by environment."""


async def get_ready(
    settings: OrchSettings,
    sync: WeightSync,
    environments: Mapping[str, WorkerPool],
    alone: ExitStack,
    *,
    model_folder: Path,
    model_identity: str,
) -> Ready:
    """Waits for what others start and starts workers, all at once; then checks that it fits together. Until `alone` is
    closed, no other orchestrator can work in the run."""
    async with asyncio.TaskGroup() as group:
        run = group.create_task(_join(settings, alone))
        arguments = settings.model.chat_template_kwargs
        renderer = group.create_task(in_thread(ChatRenderer.of_model, model_folder, arguments))
        group.create_task(sync.wait_for_servers())
        train = group.create_task(_prompts(settings, environments))
        held_out = group.create_task(held_out_prompts(settings, environments))
        group.create_task(_check_scoring(settings, environments, train, held_out))
    check_roles(settings, environments)
    run_folder, status, trainer = run.result()
    server_len = min(sync.infos[server].max_model_len for server in sync.pool.routed)
    return Ready(
        run=run_folder,
        status=status,
        model_identity=model_identity,
        model_folder=model_folder,
        context_len=min(settings.seq_len, server_len),
        server_len=server_len,
        trainer=trainer,
        renderer=renderer.result(),
        train_prompts=train.result(),
        eval_prompts=held_out.result(),
    )


async def _join(settings: OrchSettings, alone: ExitStack) -> tuple[RunFolder, StatusFile, TrainSettings]:
    """Joins the run. Returns its folder, our status in it, and the trainer's settings. The trainer joins first: it may
    found the run, or go back in it."""
    ours = settings.model_dump(mode="json")
    trainer = await in_thread(_trainer_of, settings)
    joined_check(trainer, recorded(OrchSettings, ours))
    if settings.resume == "never" and recorded_settings(settings.output_dir, "orch") is not None:
        raise RunFolderError(
            f"{settings.output_dir} holds a run that an orchestrator has worked in, and resume is never; set resume: "
            "auto to go on with it, or give all three programs another output_dir"
        )
    alone.enter_context(only_one(settings.output_dir, "orch"))
    record = record_of(ours)
    run = join_run(
        settings.output_dir,
        role="orch",
        record=record,
        compare=partial(changes, "orch", now=record, run=Path(settings.output_dir)),
        run_id=settings.run_id,
        timeout_s=settings.wait_timeout_s,
    )
    StepStore(run.batches, run_id=run.run_id).remove_finished()
    status = StatusFile(run.status / "orch.json")
    alone.enter_context(kept_warnings(run.path, "orch", step=lambda: status.step))
    elastic = settings.client.elastic
    names = ", ".join(settings.client.base_url)
    if elastic is not None:
        names = f"those of {elastic.hostname}:{elastic.port}" if elastic.hostname else "those with this output_dir"
    status.set("starting", waiting_for=f"inference servers: {names}")
    log.info("joined run %s in %s", run.run_id, run.path)
    return run, status, trainer.settings


def _trainer_of(settings: OrchSettings) -> LoadedSettings[TrainSettings]:
    """Waits until the trainer has joined, which it does before it loads its model, and returns its settings. A trainer
    that has published the last version may have ended."""
    path, theirs = Path(settings.output_dir), None
    if (run_id := current_run_id(path)) is not None and settings.max_steps is not None:
        newest = PolicyReader(RunFolder(path=path, run_id=run_id).broadcasts, run_id=run_id).latest() or 0
        if newest >= settings.max_steps and settings.ckpt.resume_step in (None, -1):
            theirs = recorded_settings(path, "train")
    return recorded(TrainSettings, theirs or wait_for_settings(path, "train", timeout_s=settings.wait_timeout_s))


async def _prompts(settings: OrchSettings, environments: Mapping[str, WorkerPool]) -> dict[str, Sequence[Messages]]:
    return {env.label: await environments[env.label].prompts("train") for env in settings.env}


async def _check_scoring(
    settings: OrchSettings,
    environments: Mapping[str, WorkerPool],
    train: Awaitable[Mapping[str, Sequence[Messages]]],
    held_out: Awaitable[object],
) -> None:
    """Raises EnvironmentFailed where an environment can score no answer; meanwhile servers are waited for."""
    prompts = await train
    await held_out  # whose worker the trial may end
    if not settings.buffer.skip_verification:
        for label, messages in prompts.items():
            await environments[label].check_scoring(Task(env=label, split="train", index=0, messages=messages[0]))


async def held_out_prompts(
    settings: OrchSettings, environments: Mapping[str, WorkerPool]
) -> dict[str, Sequence[Messages]]:
    """Returns the held-out prompts by the key of their environment. Raises EnvironmentFailed."""
    num = settings.eval.num_examples
    prompts = {one.key: await environments[one.key].prompts("eval") for one in held_out(settings)}
    return prompts if num < 0 else {key: some[:num] for key, some in prompts.items()}


# --- environments ---


def make_environments(settings: OrchSettings) -> dict[str, WorkerPool]:
    """Returns the workers of all environments by key, not yet started."""
    failures = failure_rate(settings)
    return {
        key: WorkerPool(
            label=key,
            env_id=env.id,
            args=env.args,
            timeout_s=settings.reward_timeout_s,
            num_workers=env.num_workers,
            record=partial(failures.record, key),
            hash_keys=settings.buffer.hash_keys,
            address=env.address,
            memory_bytes=None if env.memory_gb is None else int(env.memory_gb * 1e9),
            hidden=keys_of_run(settings) - _strings(env.args),
        )
        for key, env in environments_of(settings).items()
    }


def failure_rate(settings: OrchSettings) -> FailureRate:
    """Returns what ends the run where too many rollouts fail."""
    return FailureRate(window=settings.batch_size, limit=settings.max_env_failure_rate)


def keys_of_run(settings: OrchSettings) -> set[str]:
    """Returns the environment variables with the run's keys. User code gets none but those that its own arguments
    name."""
    return key_variables(settings.model_dump(exclude={"env", "eval"}))


def _strings(value: Any) -> set[str]:
    if isinstance(value, Mapping | list | tuple):
        return set().union(*map(_strings, value.values() if isinstance(value, Mapping) else value))
    return {value} if isinstance(value, str) else set()
