"""What the programs of a run say of the same things, and contradictions between them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from configs.errors import Problem, SettingsError
from configs.infer import InferSettings
from configs.keys import known_keys
from configs.loading import Loaded, S, value_at
from configs.orch import OrchSettings
from configs.train import SharedSettings, TrainSettings

DEFAULT_MAX_LORA_RANK = 16
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp8_hybrid": "bfloat16", "nvfp4": "bfloat16"}
"""The server's `dtype` that holds the same numbers as the trainer's `recipe`."""
_WAYS = [key for key in known_keys(SharedSettings) if key.startswith(("rollout_transport.", "weight_broadcast."))]
AGREED: Mapping[str, tuple[str, ...]] = {
    "model": ("train.model", "infer.model", "orch.model.name"),
    "output_dir": ("train.output_dir", "infer.output_dir", "orch.output_dir"),
    "resume": ("train.resume", "orch.resume"),
    "resume_step": ("train.ckpt.resume_step", "orch.ckpt.resume_step"),
    "colocate": ("train.colocate", "infer.colocate"),
    "sleep_mode": ("train.sleep_mode", "infer.sleep_mode", "orch.sleep_mode"),
    "sequence_len": ("train.sequence_len", "orch.seq_len"),
    "lora_rank": ("train.lora_rank", "orch.model.lora_rank"),
    "lora_alpha": ("train.lora_alpha", "orch.model.lora_alpha"),
    "lora_adapters": ("train.lora_adapters", "orch.model.lora_adapters"),
    "api_key_var": ("infer.api_key_var", "orch.client.api_key_var"),
    **{key: (f"train.{key}", f"orch.{key}") for key in _WAYS},
    **{f"ckpt.{key}": (f"train.ckpt.{key}", f"orch.ckpt.{key}") for key in ("interval", "keep_last", "keep_interval")},
    "weight_broadcast.type": (
        "train.weight_broadcast.type",
        "infer.weight_broadcast_type",
        "orch.weight_broadcast.type",
    ),
    "max_async_level": ("train.max_async_level", "orch.max_async_level"),
}
"""Keys of a run, and those of the programs that stand for the same; the programs must say the same."""
_HERE_ALONE = (
    "model",
    "output_dir",
    "resume",
    "ckpt.resume_step",
    "rollout_transport.host",
    "rollout_transport.key_var",
)
"""What another machine may call otherwise: the folder is proved by the run that both have joined, the model by its
identity, an address by the connection."""


def cross_problems(
    train: Loaded[TrainSettings], infer: Loaded[InferSettings], orch: Loaded[OrchSettings]
) -> list[Problem]:
    """Every contradiction between the three."""
    programs: dict[str, Loaded[Any]] = {"train": train, "infer": infer, "orch": orch}
    return [
        *(
            problem
            for first, *others in AGREED.values()
            for other in others
            for problem in _differing(programs, first, other)
        ),
        *_same_work(train, orch),
        *_server_fits(train, infer, orch),
    ]


def joined_check(train: Loaded[TrainSettings], orch: Loaded[OrchSettings]) -> None:
    """Raises `SettingsError` where a trainer and an orchestrator that have joined a run contradict each other. What
    only one of them acts on may be left open by the other."""
    programs: dict[str, Loaded[Any]] = {"train": train, "orch": orch}
    problems = list[Problem]()
    for targets in AGREED.values():
        keys = dict(target.split(".", 1) for target in targets if not target.startswith("infer."))
        if len(keys) < 2 or keys["train"] in _HERE_ALONE:
            continue
        last = keys["train"].rsplit(".", 1)[-1]
        of_one = "." in keys["train"] and last not in ("type", "format", "port")
        if not of_one or all(_is_changed(programs[role].settings, key) for role, key in keys.items()):
            problems += _differing(programs, f"train.{keys['train']}", f"orch.{keys['orch']}")
    if problems := [*problems, *_same_work(train, orch)]:
        raise SettingsError(problems)


def _is_changed(settings: Any, key: str) -> bool:
    *above, last = key.split(".")
    for part in above:
        settings = getattr(settings, part)
    return last in settings.changed


def recorded(cls: type[S], fields: Mapping[str, Any]) -> Loaded[S]:
    """Settings as the program recorded them in the run's folder. Raises `SettingsError`."""
    origin = f"run.json ({cls.role})"
    try:
        settings = cls.model_validate(fields)
    except ValidationError as error:
        message = f"not settings of this release of grpo: {error}; run the same release in all three programs"
        raise SettingsError([Problem(origin=origin, key="settings", value=dict(fields), message=message)]) from None
    return Loaded(settings=settings, given={key: (origin, key) for key in cls.model_fields}, file=origin)


def versions_at_once(train: TrainSettings, orch: OrchSettings, *, norm_noise: bool) -> int:
    """Number of adapters that a server is asked for at once: of the `max_off_policy_steps` + 1 newest versions, one of
    which is being loaded, those that groups were started under; one that is evaluated; one that teaches. Each is there
    once for each adapter, and once more with noise."""
    teacher = orch.teacher_model if train.loss.teacher_tau else None
    num_kept = 3 if teacher is not None and teacher.policy_every else 2
    times = max(1, len(train.lora_adapters)) * (2 if norm_noise else 1)
    return times * (orch.max_off_policy_steps + num_kept)


def _differing(programs: Mapping[str, Loaded[Any]], first: str, second: str) -> Iterator[Problem]:
    """Two keys, each with its program before it, that must have the same value."""
    (whose, theirs), (mine, ours) = first.split(".", 1), second.split(".", 1)
    other, one = programs[whose], programs[mine]
    if theirs.startswith("lora_") and not other.settings.lora:
        return
    try:
        expected, found = value_at(other.settings, theirs), value_at(one.settings, ours)
    except AttributeError:  # a key of the other `type`, which is told itself
        return
    if theirs in ("model", "output_dir") and Path(str(found)).absolute() == Path(str(expected)).absolute():
        return
    if found != expected and (theirs, expected) != ("max_async_level", None):
        said = f"{other.shown(theirs)} = {expected!r} ({other.origin(theirs)})"
        yield one.problem(ours, f"must equal {said}; set both, or neither")


def _same_work(train: Loaded[TrainSettings], orch: Loaded[OrchSettings]) -> Iterator[Problem]:
    """What must agree wherever the two run."""
    trainer, settings, loss = train.settings, orch.settings, train.settings.loss
    if trainer.max_steps not in (-1, settings.max_steps):
        wanted = f"{train.shown('max_steps')} = {trainer.max_steps} ({train.origin('max_steps')})"
        yield orch.problem("max_steps", f"must equal {wanted}, or set that to -1")
    others = loss.teacher_tau or loss.alpha_sdpo or loss.beta_replay or settings.advantage.type == "custom"
    if settings.buffer.skip_verification and not others:
        keys = "loss.teacher_tau, loss.alpha_sdpo and loss.beta_replay"
        yield orch.problem("buffer.skip_verification", f"leaves nothing to learn from: set one of the trainer's {keys}")
    for weight, key, is_given in (
        ("teacher_tau", "teacher_model", settings.teacher_model is not None),
        ("beta_replay", "preferences.teachers", settings.preferences.gives_pairs),
    ):
        if (value := getattr(loss, weight)) and not is_given:
            why = f"is needed with loss.{weight} = {value} ({train.origin(f'loss.{weight}')})"
            yield orch.problem(key, f"{why}; give it, or set that to 0")
    if loss.beta_replay and settings.sleep_mode:
        asked = [*settings.preferences.teachers, *filter(None, [settings.preferences.judge])]
        if own := [one.name for one in asked if one.base_url is None]:
            why = f"puts the servers to sleep that are asked as {', '.join(own)} by preferences"
            yield orch.problem("sleep_mode", f"{why}; give each a base_url, or remove sleep_mode")
    if trainer.weight_broadcast.format != "adapter":
        teacher, writer = settings.teacher_model, settings.hints.model
        asks_base = {
            "teacher_model.policy_every": loss.teacher_tau and teacher and teacher.policy_every is not None,
            "preferences.teachers": loss.beta_replay and settings.preferences.teachers,
            "hints.model.base_url": loss.alpha_sdpo and writer and writer.base_url is None and writer.model is None,
        }
        for key in [key for key, asks in asks_base.items() if asks]:
            why = f"needs the base model on the servers, which {trainer.weight_broadcast.format} versions replace"
            yield orch.problem(key, f"{why}; use weight_broadcast.format: adapter, or another API")


def _server_fits(
    train: Loaded[TrainSettings], infer: Loaded[InferSettings], orch: Loaded[OrchSettings]
) -> Iterator[Problem]:
    trainer, server, broadcast = train.settings, infer.settings, train.settings.weight_broadcast
    adapters = broadcast.format == "adapter"
    if server.enable_lora != adapters:
        why = f"weight_broadcast.format = {broadcast.format!r} ({train.origin('weight_broadcast.format')})"
        yield infer.problem("enable_lora", f"must be {str(adapters).lower()} with {why}")
    elif adapters and trainer.lora_rank > (server.max_lora_rank or DEFAULT_MAX_LORA_RANK):
        yield infer.problem("max_lora_rank", f"must be at least lora_rank = {trainer.lora_rank}; set it to that")
    elif adapters and trainer.noise_scheduler.enabled != server.norm_noise:
        yield infer.problem("norm_noise", "must equal the trainer's noise_scheduler.enabled; set both, or neither")
    elif adapters:
        needed = versions_at_once(trainer, orch.settings, norm_noise=server.norm_noise)
        if server.max_loras < needed:
            why = f"max_off_policy_steps = {orch.settings.max_off_policy_steps} ({orch.origin('max_off_policy_steps')})"
            yield infer.problem("max_loras", f"must be at least {needed}, the adapters in flight at once with {why}")
    elif server.dtype in ("bfloat16", "float16") and trainer.recipe == "fp32":
        yield infer.problem("dtype", "would round the trainer's float32 weights; set dtype: float32")
    size = server.tp * server.dp * len(orch.settings.client.base_url)
    if broadcast.type == "nccl" and broadcast.inference_world_size != size:
        yield train.problem("weight_broadcast.inference_world_size", f"must be {size}: the servers times tp times dp")
    longest, max_tokens = server.max_model_len, orch.settings.sampling.max_tokens
    if longest is not None and max_tokens is not None and max_tokens >= longest:
        why = f"sampling.max_tokens = {max_tokens} ({orch.origin('sampling.max_tokens')})"
        yield infer.problem("max_model_len", f"must exceed {why}")
