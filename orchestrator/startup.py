"""Everything that must be there before the first rollout: servers, run, tokenizer, environments; checked to fit."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.cross import joined_check, recorded
from configs.evaluation import EnvIdentity, HeldOut
from configs.loading import Loaded
from configs.orch import OrchSettings
from configs.resuming import ORCHESTRATOR_MAY_CHANGE
from configs.train import TrainSettings
from orchestrator.background import in_thread
from orchestrator.inference.client import ServerPool
from orchestrator.inference.discovery import Discovery
from orchestrator.renderer import ChatRenderer
from orchestrator.rollouts.records import Messages
from orchestrator.workers.failures import MAX_LATE_IN_A_ROW, FailureRate
from orchestrator.workers.pool import WorkerPool
from transport.batches.store import StepStore
from transport.errors import RunFolderError
from transport.hidden import key_variables
from transport.http import ServerInfo
from transport.records import PolicySpec
from transport.run import RunFolder, current_run_id, join_run, only_one, recorded_settings, wait_for_settings
from transport.status import StatusFile
from transport.weights.identity import base_identity, resolve_model
from transport.weights.store import PolicyReader

log = logging.getLogger(__name__)

FOUND_PAUSE_S = 0.2
"""Between looking whether further servers have been found, while none is up."""


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
    server_len: int
    """Longest sequence that every server takes, in tokens."""
    trainer: TrainSettings
    """The settings that the trainer has recorded in the run."""
    renderer: ChatRenderer
    train_prompts: Mapping[str, Sequence[Messages]]
    """By key of the environment's process."""
    train_keys: Mapping[str, Sequence[str]]
    """The identity of each training example, by key of the environment's process."""
    eval_prompts: Mapping[str, Sequence[Messages]]
    """By key of the environment's process."""


def environment_keys(settings: OrchSettings) -> dict[str, EnvIdentity]:
    """All environments by the key of their process; an evaluation environment that equals a training one is that."""
    return {one.key: one for one in held_out(settings)} | {env.label: env for env in settings.env}


def held_out(settings: OrchSettings) -> list[HeldOut]:
    """The environments that are evaluated."""
    return settings.eval.held_out(settings.env, max_tokens=settings.sampling.max_tokens)


def make_servers(settings: OrchSettings) -> ServerPool:
    """The client of all servers."""
    client = settings.client
    fixed = client.base_url if client.elastic is None else ()
    return ServerPool(fixed, api_key=os.environ.get(client.api_key_var), timeout_s=client.timeout)


def make_environments(settings: OrchSettings) -> dict[str, WorkerPool]:
    """The workers of all environments by key, not yet started."""
    failures = FailureRate(
        window=settings.batch_size,
        limit=settings.max_env_failure_rate,
        max_late_in_a_row=max_late_in_a_row(settings),
    )
    return {
        key: WorkerPool(
            label=key,
            env_id=env.id,
            args=env.args,
            timeout_s=settings.reward_timeout_s,
            num_workers=env.num_workers,
            record=failures.record,
            hash_keys=settings.buffer.hash_keys,
            address=env.address,
            memory_bytes=memory_bytes(env),
            hidden=keys_of_run(settings) - _strings(env.args),
        )
        for key, env in environment_keys(settings).items()
    }


def keys_of_run(settings: OrchSettings) -> set[str]:
    """Environment variables with keys that are the run's, which user code does not get unless its own arguments name
    them."""
    return key_variables(settings.model_dump(exclude={"env", "eval"}))


def _strings(value: Any) -> set[str]:
    if isinstance(value, Mapping):
        return set().union(*map(_strings, value.values()))
    if isinstance(value, list | tuple):
        return set().union(*map(_strings, value))
    return {value} if isinstance(value, str) else set()


def check_roles(settings: OrchSettings, environments: Mapping[str, WorkerPool]) -> None:
    """Raises Mismatch where an adapter is given to a role that its environment has not."""
    training: list[tuple[str, str, Mapping[str, str]]] = [(env.label, env.label, env.adapters) for env in settings.env]
    for key, label, adapters in [*training, *((one.key, one.label, one.adapters) for one in held_out(settings))]:
        roles = [role.id for role in environments[key].loaded.roles]
        if unknown := sorted(set(adapters) - set(roles)):
            raise Mismatch(
                f"adapters of environment {label} names the roles {', '.join(unknown)}, expected some of "
                f"{', '.join(roles)}; name a role as the environment does"
            )


def memory_bytes(env: EnvIdentity) -> int | None:
    """What an environment's process may allocate."""
    return None if env.memory_gb is None else int(env.memory_gb * 1e9)


def max_late_in_a_row(settings: OrchSettings) -> int:
    """After how many deadlines an environment is said to hang: 8, or as many as fit into half of wait_timeout_s, so
    that the environment is named before the trainer has waited too long; at least 2."""
    return max(2, min(MAX_LATE_IN_A_ROW, int(settings.wait_timeout_s / 2 / settings.reward_timeout_s)))


async def get_ready(
    settings: OrchSettings, servers: ServerPool, environments: Mapping[str, WorkerPool], alone: ExitStack
) -> Ready:
    """Waits for what others start and starts what is ours, all at once; then checks that it fits together. Until
    `alone` is closed, no other orchestrator can work in the run."""
    folder = resolve_model(settings.model.name)
    identity = base_identity(folder)
    async with asyncio.TaskGroup() as group:
        run = group.create_task(_join(settings, alone))
        renderer = group.create_task(in_thread(ChatRenderer.of_model, folder))
        infos = group.create_task(_check_servers(settings, servers, identity, folder))
        train = group.create_task(_prompts(environments, [env.label for env in settings.env], "train"))
        asked = group.create_task(_held_out_prompts(environments, held_out(settings)))
    check_roles(settings, environments)
    run_folder, status, trainer = run.result()
    server_len = min(info.max_model_len for info in infos.result())
    return Ready(
        run=run_folder,
        status=status,
        model_identity=identity,
        model_folder=folder,
        context_len=min(settings.seq_len, server_len),
        server_len=server_len,
        trainer=trainer,
        renderer=renderer.result(),
        train_prompts=train.result(),
        train_keys={env.label: environments[env.label].identities for env in settings.env},
        eval_prompts=asked.result(),
    )


async def _join(settings: OrchSettings, alone: ExitStack) -> tuple[RunFolder, StatusFile, TrainSettings]:
    """The run, our status in it, and the trainer's settings. The trainer joins first: it may found the run, or go back
    in it."""
    ours = settings.model_dump(mode="json")
    trainer = await in_thread(_trainer_of, settings)
    joined_check(trainer, recorded(OrchSettings, ours))
    if settings.resume == "never" and recorded_settings(settings.output_dir, "orch") is not None:
        raise RunFolderError(
            f"{settings.output_dir} holds a run that an orchestrator has worked in, and resume is never; set resume: "
            "auto to go on with it, or give all three programs another output_dir"
        )
    alone.enter_context(only_one(settings.output_dir, "orch"))
    run = join_run(
        settings.output_dir,
        role="orch",
        settings=ours,
        run_id=settings.run_id,
        may_change=ORCHESTRATOR_MAY_CHANGE,
        timeout_s=settings.wait_timeout_s,
    )
    StepStore(run.batches, run_id=run.run_id).remove_finished()
    status = StatusFile(run.status / "orch.json")
    elastic = settings.client.elastic
    names = ", ".join(settings.client.base_url) if elastic is None else f"those of {elastic.hostname}:{elastic.port}"
    status.set("starting", waiting_for=f"inference servers: {names}")
    log.info("joined run %s in %s", run.run_id, run.path)
    return run, status, trainer.settings


def _trainer_of(settings: OrchSettings) -> Loaded[TrainSettings]:
    """The settings of the trainer, once it has joined. It does so before it loads its model. One that has published the
    last version may have ended."""
    path, theirs = Path(settings.output_dir), None
    if (run_id := current_run_id(path)) is not None and settings.max_steps is not None:
        newest = PolicyReader(RunFolder(path=path, run_id=run_id).broadcasts, run_id=run_id).latest() or 0
        if newest >= settings.max_steps and settings.ckpt.resume_step in (None, -1):
            theirs = recorded_settings(path, "train")
    return recorded(TrainSettings, theirs or wait_for_settings(path, "train", timeout_s=settings.wait_timeout_s))


async def _prompts(
    environments: Mapping[str, WorkerPool], keys: Sequence[str], split: str
) -> dict[str, list[Messages]]:
    return {key: await environments[key].prompts(split) for key in keys}


async def _held_out_prompts(
    environments: Mapping[str, WorkerPool], chosen: Sequence[HeldOut]
) -> dict[str, list[Messages]]:
    prompts = await _prompts(environments, [one.key for one in chosen], "eval")
    return {one.key: prompts[one.key][: None if one.num_examples < 0 else one.num_examples] for one in chosen}


# --- servers ---


async def _check_servers(settings: OrchSettings, servers: ServerPool, identity: str, folder: Path) -> list[ServerInfo]:
    """What the servers that are up say, as soon as one is up. The others are taken out, and join when they come; only
    where versions are broadcast, all are waited for. Those that are found by name are looked for meanwhile."""

    async def one(server: str) -> ServerInfo:
        since_s = time.monotonic()
        await servers.wait_healthy(server)
        info = await servers.on(server, "GET", "/policy/info", ServerInfo)
        check_server(settings, server, info, identity, folder)
        log.info("%s is up after %.1f s", server, time.monotonic() - since_s)
        return info

    tasks = {server: asyncio.create_task(one(server)) for server in servers.servers}
    searching = None
    try:
        if (elastic := settings.client.elastic) is not None:
            discovery = Discovery(servers, elastic)
            await discovery.wait_for_any()
            searching = asyncio.create_task(discovery.watch())
            await _any_up(servers, tasks, one)
        else:
            together = settings.weight_broadcast.type == "nccl"
            when = asyncio.FIRST_EXCEPTION if together else asyncio.FIRST_COMPLETED
            await asyncio.wait(tasks.values(), return_when=when)
        done = {server: task.result() for server, task in tasks.items() if task.done()}
        for server in servers.servers:
            if server in done:
                servers.membership.admit(server)
            else:
                servers.membership.take_out(server, "it is not up yet")
        return list(done.values())
    finally:
        pending: list[asyncio.Task[Any]] = [*tasks.values(), *([searching] if searching else [])]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def _any_up(
    servers: ServerPool,
    tasks: dict[str, asyncio.Task[ServerInfo]],
    check: Callable[[str], Coroutine[Any, Any, ServerInfo]],
) -> None:
    """Returns when one of `tasks` is done, of which each server has one; those that are found meanwhile get one too."""
    while not any(task.done() for task in tasks.values()):
        tasks |= {server: asyncio.create_task(check(server)) for server in servers.servers if server not in tasks}
        await asyncio.wait(tasks.values(), timeout=FOUND_PAUSE_S, return_when=asyncio.FIRST_COMPLETED)


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
    if settings.min_concurrent_groups is not None and info.load is None:
        raise Mismatch(
            f"{server} does not say how much it has to do, which min_concurrent_groups needs; run the same release of "
            "grpo in all three programs"
        )
    if settings.sleep_mode and info.asleep is None:
        raise Mismatch(f"{server} cannot sleep, and sleep_mode is true; set sleep_mode: true for grpo-infer")
    max_tokens = settings.sampling.max_tokens or 1
    if info.max_model_len <= max_tokens:
        raise Mismatch(
            f"{server} has max_model_len = {info.max_model_len}, expected more than sampling.max_tokens = "
            f"{max_tokens}, with room for a prompt; raise max_model_len of grpo-infer"
        )
    for one in held_out(settings):
        if info.max_model_len <= (one.max_tokens or 1):
            raise Mismatch(
                f"{server} has max_model_len = {info.max_model_len}, expected more than the {one.max_tokens} tokens of "
                f"eval's answers of {one.label}; raise max_model_len of grpo-infer, or lower eval.sampling.max_tokens"
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


def check_spec(settings: OrchSettings, spec: PolicySpec, identity: str) -> None:
    """Raises Mismatch where version 0 is of another policy than the one that is configured here: what only the files
    of the models and the manifest can tell, whatever the settings say."""
    if spec.base_model != identity:
        raise Mismatch(
            f"the trainer has a model with identity {spec.base_model}, the orchestrator model.name = "
            f"{settings.model.name} with identity {identity}; give both programs the same model"
        )
