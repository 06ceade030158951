"""Contradictions across the settings of the three programs."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from configs.common import FilesystemBroadcast
from configs.errors import Problem, SettingsError
from configs.infer import InferSettings
from configs.loading import Loaded, S, value_at
from configs.orch import OrchSettings
from configs.sources import Given
from configs.train import TrainSettings

DEFAULT_MAX_LORA_RANK = 16
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""The server's `dtype` that holds the same numbers as the trainer's `recipe`."""
# Keys of the trainer, and what the other program calls them.
_SAME_WORK = {
    "sequence_len": "seq_len",
    "lora_rank": "model.lora_rank",
    "lora_alpha": "model.lora_alpha",
    "lora_adapters": "model.lora_adapters",
    **{key: key for key in ("rollout_transport.type", "rollout_transport.port", "sleep_mode")},
    **{key: key for key in ("weight_broadcast.type", "weight_broadcast.format")},
}
_SAME_MACHINE = {
    **{key: key for key in ("output_dir", "resume", "ckpt.resume_step")},
    **{"model": "model.name", "rollout_transport.host": "rollout_transport.host"},
    "rollout_transport.key_var": "rollout_transport.key_var",
}
_OF_SERVER = {
    **{key: key for key in ("model", "output_dir", "sleep_mode", "colocate")},
    "weight_broadcast.type": "weight_broadcast_type",
}
_PATHS = ("model", "output_dir")


def cross_problems(
    train: Loaded[TrainSettings], infer: Loaded[InferSettings], orch: Loaded[OrchSettings]
) -> list[Problem]:
    """Every contradiction between the three."""
    return [
        *_differing(infer, train, _OF_SERVER),
        *_differing(orch, train, _SAME_MACHINE),
        *_differing(orch, infer, {"api_key_var": "client.api_key_var"}),
        *_same_work(train, orch),
        *_server_fits(train, infer, orch),
        *_colocation(train, infer),
    ]


def joined_check(train: Loaded[TrainSettings], orch: Loaded[OrchSettings]) -> None:
    """Raises `SettingsError` where a trainer and an orchestrator that have joined the same run contradict each other.

    Their machines may have other paths, addresses and variables for the same things: `output_dir` is proved by the run
    that both have joined, the model by its identity, and an address by the connection.
    """
    if problems := list(_same_work(train, orch)):
        raise SettingsError(problems)


def recorded(cls: type[S], fields: Mapping[str, Any]) -> Loaded[S]:
    """Settings as the program recorded them in the run's folder. Raises `SettingsError`."""
    origin = f"run.json ({cls.role})"
    try:
        settings = cls.model_validate(fields)
    except ValidationError as error:
        message = f"not settings of this release of grpo: {error}; run the same release in all three programs"
        raise SettingsError([Problem(origin=origin, key="settings", value=dict(fields), message=message)]) from None
    return Loaded(settings=settings, given={key: Given(origin, key) for key in cls.model_fields}, file=origin)


def versions_at_once(train: TrainSettings, orch: OrchSettings, *, norm_noise: bool) -> int:
    """Number of adapters that a server is asked for at once: of the `max_off_policy_steps` + 1 newest versions, one of
    which is being loaded, those that groups were started under; one that is evaluated; one that teaches. Each is there
    once for each adapter, and once more with noise."""
    teacher = orch.teacher_model if train.loss.teacher_tau else None
    num_kept = 3 if teacher is not None and teacher.policy_every else 2
    times = max(1, len(train.lora_adapters)) * (2 if norm_noise else 1)
    return times * (orch.max_off_policy_steps + num_kept)


def _differing(one: Loaded[Any], other: Loaded[Any], keys: Mapping[str, str]) -> Iterator[Problem]:
    """Keys of `one` that must have the value which `other` has by another name."""
    for theirs, ours in keys.items():
        try:
            expected, found = value_at(other.settings, theirs), value_at(one.settings, ours)
        except AttributeError:  # a key of the other `type`, which is told itself
            continue
        if theirs in _PATHS and Path(str(found)).absolute() == Path(str(expected)).absolute():
            continue
        if found != expected:
            whose = f"{other.shown(theirs)} = {expected!r} ({other.origin(theirs)})"
            yield one.problem(ours, f"must equal {whose}; set both, or neither")


def _same_work(train: Loaded[TrainSettings], orch: Loaded[OrchSettings]) -> Iterator[Problem]:
    """What must agree wherever the two run."""
    trainer, settings = train.settings, orch.settings
    without_lora = () if trainer.lora else ("lora_rank", "lora_alpha", "lora_adapters")
    yield from _differing(orch, train, {key: one for key, one in _SAME_WORK.items() if key not in without_lora})
    if trainer.max_steps not in (-1, settings.max_steps):
        wanted = f"{train.shown('max_steps')} = {trainer.max_steps} ({train.origin('max_steps')})"
        yield orch.problem("max_steps", f"must equal {wanted}, or set that to -1")
    loss = trainer.loss
    others = loss.teacher_tau or loss.alpha_sdpo or loss.beta_replay or settings.advantage.type == "custom"
    if settings.buffer.skip_verification and not others:
        why = "leaves nothing to learn from: rewards are 0, and so are"
        keys = "loss.teacher_tau, loss.alpha_sdpo and loss.beta_replay"
        yield orch.problem("buffer.skip_verification", f"{why} the trainer's {keys}; set one of them")
    for weight, key, given in (
        ("teacher_tau", "teacher_model", settings.teacher_model is not None),
        ("beta_replay", "preferences.teachers", settings.preferences.gives_pairs),
    ):
        if (value := getattr(loss, weight)) and not given:
            why = f"is needed with loss.{weight} = {value} ({train.origin(f'loss.{weight}')})"
            yield orch.problem(key, f"{why}; give it, or set that to 0")
    if loss.beta_replay and settings.sleep_mode:
        asked = [*settings.preferences.teachers, *filter(None, [settings.preferences.judge])]
        if own := [one.name for one in asked if one.base_url is None]:
            why = f"puts the servers to sleep that are asked as {', '.join(own)} by preferences"
            yield orch.problem("sleep_mode", f"{why}; give each a base_url, or remove sleep_mode")
    if trainer.weight_broadcast.format != "adapter":
        yield from _without_base(train, orch)


def _without_base(train: Loaded[TrainSettings], orch: Loaded[OrchSettings]) -> Iterator[Problem]:
    """What asks the base model on the run's servers, where versions replace it."""
    loss, settings, writer = train.settings.loss, orch.settings, orch.settings.hints.model
    kind = f"weight_broadcast.format = {train.settings.weight_broadcast.format!r}"
    why = f"needs the base model on the run's servers, and {kind} replaces it; use adapter"
    if loss.teacher_tau and settings.teacher_model is not None and settings.teacher_model.policy_every is not None:
        yield orch.problem("teacher_model.policy_every", why)
    if loss.beta_replay and settings.preferences.teachers:
        yield orch.problem("preferences.teachers", why)
    if loss.alpha_sdpo and writer is not None and writer.base_url is None and writer.model is None:
        yield orch.problem("hints.model.base_url", f"{why}, or name another API or model")


def _server_fits(
    train: Loaded[TrainSettings], infer: Loaded[InferSettings], orch: Loaded[OrchSettings]
) -> Iterator[Problem]:
    trainer, server, broadcast = train.settings, infer.settings, train.settings.weight_broadcast
    adapters = broadcast.format == "adapter"
    if server.enable_lora != adapters:
        why = f"weight_broadcast.format = {broadcast.format!r} ({train.origin('weight_broadcast.format')})"
        yield infer.problem("enable_lora", f"must be {str(adapters).lower()} with {why}")
    if adapters:
        if trainer.lora_rank > (server.max_lora_rank or DEFAULT_MAX_LORA_RANK):
            yield infer.problem("max_lora_rank", f"must be at least lora_rank = {trainer.lora_rank}; set it to that")
        yield from _differing(infer, train, {"noise_scheduler.enabled": "norm_noise"})
        needed = versions_at_once(trainer, orch.settings, norm_noise=server.norm_noise)
        if server.max_loras < needed:
            why = f"max_off_policy_steps = {orch.settings.max_off_policy_steps} ({orch.origin('max_off_policy_steps')})"
            yield infer.problem("max_loras", f"must be at least {needed}, the adapters in flight at once with {why}")
    elif server.dtype in ("bfloat16", "float16") and trainer.recipe == "fp32":
        yield infer.problem("dtype", "would round the trainer's float32 weights; set dtype: float32")
    size = server.tp * server.dp * len(orch.settings.client.base_url)
    if not isinstance(broadcast, FilesystemBroadcast) and broadcast.inference_world_size != size:
        yield train.problem("weight_broadcast.inference_world_size", f"must be {size}: the servers times tp times dp")
    longest, max_tokens = server.max_model_len, orch.settings.sampling.max_tokens
    if longest is not None and max_tokens is not None and max_tokens >= longest:
        why = f"sampling.max_tokens = {max_tokens} ({orch.origin('sampling.max_tokens')})"
        yield infer.problem("max_model_len", f"must exceed {why}")


def _colocation(train: Loaded[TrainSettings], infer: Loaded[InferSettings]) -> Iterator[Problem]:
    """Where both are to share the base weights, and cannot."""
    trainer, server = train.settings, infer.settings
    if not (trainer.colocate and server.colocate):
        return
    if len({trainer.device, server.device} - {"auto"}) > 1:
        why = f"must be the trainer's device = {trainer.device!r} ({train.origin('device')})"
        yield infer.problem("device", f"{why}, whose memory holds the one copy of the base weights")
    if server.dtype not in ("auto", wanted := DTYPES[trainer.recipe]):
        why = f"must be {wanted} with the trainer's recipe = {trainer.recipe!r} ({train.origin('recipe')})"
        yield infer.problem("dtype", f"{why}, which computes on the server's weights")
