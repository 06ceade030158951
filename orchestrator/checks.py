"""Checks that servers, environments and trainer fit together, as far as only they themselves can tell."""

from collections.abc import Mapping
from pathlib import Path

from grpo.configs.cross import versions_at_once
from grpo.configs.orch import OrchSettings
from grpo.orchestrator.evaluate import held_out
from grpo.orchestrator.workers.pool import WorkerPool
from grpo.transport.http import ServerInfo
from grpo.transport.records import PolicySpec


class Mismatch(ValueError):
    """Programs that do not fit together; the message names both values and both keys."""


def check_server(
    settings: OrchSettings, server: str, info: ServerInfo, *, identity: str, folder: Path, context_len: int = 0
) -> None:
    """Raises Mismatch where a server cannot serve this run. `identity` and `folder` are those of `model.name`;
    `context_len` is what the run has begun with, in tokens."""
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
    needed = versions_at_once(settings, norm_noise=False)
    if settings.max_opponents and info.num_slots is not None and info.num_slots < needed:
        raise Mismatch(
            f"{server} has slots for max_loras = {info.num_slots} adapters, expected at least {needed}: those in "
            f"flight with max_off_policy_steps = {settings.max_off_policy_steps}, and with each max_opponents = "
            f"{settings.max_opponents}; raise max_loras of grpo-infer, or lower one of the two"
        )
    if settings.sleep_mode and info.asleep is None:
        raise Mismatch(f"{server} cannot sleep, and sleep_mode is true; set sleep_mode: true for grpo-infer")
    answers = {"sampling.max_tokens": settings.sampling.max_tokens or 1}
    answers |= {"eval's max_tokens": settings.longest_held_out or 1} if settings.eval.num_examples else {}
    for what, max_tokens in answers.items():
        if info.max_model_len <= max_tokens:
            raise Mismatch(
                f"{server} has max_model_len = {info.max_model_len}, expected more than {what} = {max_tokens}, with "
                "room for a prompt; raise max_model_len of grpo-infer, or lower max_tokens"
            )
    if info.max_model_len < context_len:
        raise Mismatch(
            f"{server} has max_model_len = {info.max_model_len}, this run began with {context_len}; start it with the "
            "settings of the other servers"
        )


def check_roles(settings: OrchSettings, environments: Mapping[str, WorkerPool]) -> None:
    """Raises Mismatch where settings give an adapter to a role that its environment does not have."""
    assigned = [(env.label, env.label, env.adapters) for env in settings.env]
    assigned += [(one.key, one.env.label, one.env.adapters) for one in held_out(settings)]
    for key, label, adapters in assigned:
        roles = [role.id for role in environments[key].loaded.roles]
        if unknown := sorted(set(adapters) - set(roles)):
            raise Mismatch(
                f"adapters of environment {label} names the roles {', '.join(unknown)}, expected some of "
                f"{', '.join(roles)}; name a role as the environment does"
            )


def check_spec(settings: OrchSettings, spec: PolicySpec, identity: str) -> None:
    """Raises Mismatch where the manifest of version 0 names another base model than the one configured here."""
    if spec.base_model != identity:
        raise Mismatch(
            f"the trainer has a model with identity {spec.base_model}, the orchestrator model.name = "
            f"{settings.model.name} with identity {identity}; give both programs the same model"
        )
