"""Everything that must be there before the first rollout: servers, run, tokenizer, environments; checked to fit."""

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.cross import joined_check, recorded
from configs.orch import EVAL_PREFIX, EnvSettings, OrchSettings
from configs.train import TrainSettings
from orchestrator.background import in_thread
from orchestrator.client import ServerInfo, ServerPool
from orchestrator.episodes.types import Messages
from orchestrator.renderer import ChatRenderer
from orchestrator.workers.failures import MAX_LATE_IN_A_ROW, FailureRate
from orchestrator.workers.process import EnvironmentPool, EnvironmentProcess
from transport.run import RunFolder, join_run, wait_for_settings
from transport.status import StatusFile
from transport.types import PolicySpec
from transport.weights.identity import base_identity, resolve_model

log = logging.getLogger(__name__)


class Mismatch(ValueError):
    """Programs that do not fit together; the message names both values and both keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What start-up leaves to the loops."""

    run: RunFolder
    status: StatusFile
    model_identity: str
    model_folder: Path
    """Of the base model, on this machine."""
    context_len: int
    """Longest prompt with answer that every server and the trainer take, in tokens."""
    num_ranks: int
    """Data-parallel ranks of the trainer, each of which gets its own micro-batches."""
    renderer: ChatRenderer
    train_prompts: Mapping[str, Sequence[Messages]]
    """By key of the environment's process."""
    train_keys: Mapping[str, Sequence[str]]
    """The identity of each training example, by key of the environment's process."""
    eval_prompts: Mapping[str, Sequence[Messages]]
    """By key of the environment's process."""


def environment_keys(settings: OrchSettings) -> dict[str, EnvSettings]:
    """All environments by the key of their process; an evaluation environment that equals a training one is that."""
    return {env.label: env for env in settings.env} | eval_environments(settings)


def eval_environments(settings: OrchSettings) -> dict[str, EnvSettings]:
    """The evaluation environments by the key of their process; none without evaluation. One that has the name of a
    training environment, but not its arguments, is kept apart."""
    if settings.eval.num_examples == 0:
        return {}
    environments = settings.eval.env or settings.env
    return {env.label if env in settings.env else f"{EVAL_PREFIX}{env.label}": env for env in environments}


def make_servers(settings: OrchSettings) -> ServerPool:
    """The client of all servers."""
    client = settings.client
    return ServerPool(client.base_url, api_key=os.environ.get(client.api_key_var), timeout_s=client.timeout)


def make_environments(settings: OrchSettings) -> EnvironmentPool:
    """The processes of all environments, not yet started."""
    timeout_s = settings.reward_timeout
    failures = FailureRate(
        window=settings.batch_size,
        limit=settings.max_env_failure_rate,
        max_late_in_a_row=max_late_in_a_row(settings),
    )
    return EnvironmentPool(
        [
            EnvironmentProcess(
                label=key,
                env_id=env.id,
                args=env.args,
                timeout_s=timeout_s,
                record=failures.record,
                hash_keys=settings.buffer.hash_keys,
            )
            for key, env in environment_keys(settings).items()
        ]
    )


def max_late_in_a_row(settings: OrchSettings) -> int:
    """After how many deadlines an environment is said to hang: 8, or as many as fit into half of wait_timeout, so that
    the environment is named before the trainer has waited too long; at least 2."""
    return max(2, min(MAX_LATE_IN_A_ROW, int(settings.wait_timeout / 2 / settings.reward_timeout)))


async def get_ready(settings: OrchSettings, servers: ServerPool, environments: EnvironmentPool) -> Ready:
    """Waits for what others start and starts what is ours, all at once; then checks that it fits together."""
    folder = resolve_model(settings.model.name)
    identity = base_identity(folder)
    async with asyncio.TaskGroup() as group:
        run = group.create_task(_join(settings))
        renderer = group.create_task(in_thread(ChatRenderer.of_model, folder))
        infos = group.create_task(_check_servers(settings, servers, identity, folder))
        train = group.create_task(_prompts(environments, [env.label for env in settings.env], "train"))
        held_out = group.create_task(_prompts(environments, list(eval_environments(settings)), "eval"))
    limit, (run_folder, status, num_ranks) = settings.eval.num_examples, run.result()
    return Ready(
        run=run_folder,
        status=status,
        model_identity=identity,
        model_folder=folder,
        context_len=min(settings.seq_len, *(info.max_model_len for info in infos.result())),
        num_ranks=num_ranks,
        renderer=renderer.result(),
        train_prompts=train.result(),
        train_keys={env.label: environments.identities(env.label) for env in settings.env},
        eval_prompts={key: prompts if limit < 0 else prompts[:limit] for key, prompts in held_out.result().items()},
    )


async def _join(settings: OrchSettings) -> tuple[RunFolder, StatusFile, int]:
    """The run, our status in it, and the number of the trainer's ranks."""
    recorded_settings = settings.model_dump(mode="json")
    run = await in_thread(
        join_run,
        settings.output_dir,
        role="orch",
        settings=recorded_settings,
        run_id=settings.run_id,
        timeout_s=settings.wait_timeout,
    )
    status = StatusFile(run.status / "orch.json")
    status.set("starting", waiting_for=f"inference servers: {', '.join(settings.client.base_url)}")
    log.info("joined run %s in %s", run.run_id, run.path)
    return run, status, await _check_trainer(settings, run, recorded_settings)


async def _prompts(environments: EnvironmentPool, keys: Sequence[str], split: str) -> dict[str, list[Messages]]:
    return {key: await environments.prompts(key, split) for key in keys}


# --- servers ---


async def _check_servers(settings: OrchSettings, servers: ServerPool, identity: str, folder: Path) -> list[ServerInfo]:
    """What the servers that are up say, as soon as one is up. The others are taken out, and join when they come; only
    where versions are broadcast, all are waited for."""

    async def one(server: str) -> ServerInfo:
        since_s = time.monotonic()
        await servers.wait_healthy(server)
        info = await servers.on(server, "GET", "/policy/info", ServerInfo)
        check_server(settings, server, info, identity, folder)
        log.info("%s is up after %.1f s", server, time.monotonic() - since_s)
        return info

    tasks = [asyncio.create_task(one(server)) for server in servers.servers]
    try:
        together = settings.weight_broadcast.type == "nccl"
        when = asyncio.FIRST_EXCEPTION if together else asyncio.FIRST_COMPLETED
        done, _ = await asyncio.wait(tasks, return_when=when)
        infos = [task.result() for task in tasks if task in done]
        for server, task in zip(servers.servers, tasks, strict=True):
            if task not in done:
                servers.membership.take_out(server, "it is not up yet")
        return infos
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def check_server(settings: OrchSettings, server: str, info: ServerInfo, identity: str, folder: Path) -> None:
    """Raises Mismatch where a server cannot serve this run."""
    if info.base_model != identity and not settings.client.skip_model_check:
        raise Mismatch(
            f"{server} serves a base model with identity {info.base_model}, expected {identity} of model.name = "
            f"{settings.model.name} ({folder}); give both programs the same model, or set client.skip_model_check"
        )
    if (kind := settings.weight_broadcast.format) not in info.kinds:
        raise Mismatch(
            f"{server} serves policy versions of kind {' or '.join(info.kinds)}, expected {kind} of "
            f"weight_broadcast.format; set enable_lora: {str(kind == 'adapter').lower()} for grpo-infer"
        )
    if kind == "adapter" and info.max_lora_rank < settings.model.lora_rank:
        raise Mismatch(
            f"{server} takes adapters up to max_lora_rank = {info.max_lora_rank}, expected at least model.lora_rank = "
            f"{settings.model.lora_rank}; raise max_lora_rank of grpo-infer"
        )
    max_tokens = settings.sampling.max_tokens or 1
    if info.max_model_len <= max_tokens:
        raise Mismatch(
            f"{server} has max_model_len = {info.max_model_len}, expected more than sampling.max_tokens = "
            f"{max_tokens}, with room for a prompt; raise max_model_len of grpo-infer"
        )


def check_late_server(
    settings: OrchSettings, server: str, info: ServerInfo, *, identity: str, context_len: int
) -> None:
    """Raises Mismatch where a server that joins a running run cannot serve it."""
    check_server(settings, server, info, identity, Path(settings.model.name))
    if info.max_model_len < context_len:
        raise Mismatch(
            f"{server} has max_model_len = {info.max_model_len}, this run began with {context_len}; "
            "start it with the settings of the other servers"
        )


# --- the trainer ---


async def _check_trainer(settings: OrchSettings, run: RunFolder, ours: dict[str, Any]) -> int:
    """The number of the trainer's ranks. Raises SettingsError where the settings that it has recorded contradict ours.
    It records them before it loads its model."""
    theirs = await in_thread(wait_for_settings, run, "train", timeout_s=settings.wait_timeout)
    trainer = recorded(TrainSettings, theirs)
    joined_check(trainer, recorded(OrchSettings, ours))
    return trainer.settings.gpus


def check_spec(settings: OrchSettings, spec: PolicySpec, identity: str) -> None:
    """Raises Mismatch where version 0 is of another policy than the one that is configured here: what only the files
    of the models and the manifest can tell, whatever the settings say."""
    if spec.base_model != identity:
        raise Mismatch(
            f"the trainer has a model with identity {spec.base_model}, the orchestrator model.name = "
            f"{settings.model.name} with identity {identity}; give both programs the same model"
        )
