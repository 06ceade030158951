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
_TYPE = "weight_broadcast.type"
_WAYS = [key for key in known_keys(SharedSettings) if key.startswith(("rollout_transport.", "weight_broadcast."))]
_SAME_NAME = ["resume", *_WAYS, "ckpt.interval", "ckpt.keep_last", "ckpt.keep_interval", "max_async_level"]
AGREED: Mapping[str, tuple[str, ...]] = {
    **{key: (f"train.{key}", f"orch.{key}") for key in _SAME_NAME},
    **{key: (f"train.{key}", f"infer.{key}", f"orch.{key}") for key in ("output_dir", "sleep_mode")},
    **{key: (f"train.{key}", f"orch.model.{key}") for key in ("lora_rank", "lora_alpha", "lora_adapters")},
    "model": ("train.model", "infer.model", "orch.model.name"),
    "resume_step": ("train.ckpt.resume_step", "orch.ckpt.resume_step"),
    "colocate": ("train.colocate", "infer.colocate"),
    "fp32_lm_head": ("train.fp32_lm_head", "infer.fp32_lm_head"),
    "sequence_len": ("train.sequence_len", "orch.seq_len"),
    "api_key_var": ("infer.api_key_var", "orch.client.api_key_var"),
    _TYPE: (f"train.{_TYPE}", f"orch.{_TYPE}", "infer.weight_broadcast_type"),
}
"""Keys of a run, and those of the programs that stand for the same; the programs must say the same."""
_APART = {"model", "output_dir", "resume", "resume_step", "rollout_transport.host", "rollout_transport.key_var"}
"""What another machine may call otherwise: the folder is proved by the run that both have joined, the model by its
identity, an address by the connection."""


def cross_problems(
    train: Loaded[TrainSettings], infer: Loaded[InferSettings], orch: Loaded[OrchSettings]
) -> list[Problem]:
    """Every contradiction between the three."""
    programs: dict[str, Loaded[Any]] = {"train": train, "infer": infer, "orch": orch}
    differing = [one for name in AGREED for one in _differing(programs, name)]
    return [*differing, *_same_work(train, orch), *_server_fits(train, infer, orch)]


def joined_check(train: Loaded[TrainSettings], orch: Loaded[OrchSettings]) -> None:
    """Raises `SettingsError` where a trainer and an orchestrator that have joined a run contradict each other."""
    programs: dict[str, Loaded[Any]] = {"train": train, "orch": orch}
    differing = [one for name in AGREED if name not in _APART for one in _differing(programs, name, apart=True)]
    if problems := [*differing, *_same_work(train, orch)]:
        raise SettingsError(problems)


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


def _differing(programs: Mapping[str, Loaded[Any]], name: str, *, apart: bool = False) -> Iterator[Problem]:
    """What these programs say otherwise of a key of the run. `apart`: they have files of their own, in which one may
    leave open what the other one alone acts on."""
    (first, theirs), *others = [
        (programs[r], key) for r, _, key in (t.partition(".") for t in AGREED[name]) if r in programs
    ]
    if theirs.startswith("lora_") and not first.settings.lora:
        return
    may_be_open = apart and "." in name and not name.endswith((".type", ".format", ".port"))
    for one, ours in others:
        try:
            expected, found = value_at(first.settings, theirs), value_at(one.settings, ours)
        except AttributeError:  # a key of the other `type`, which is told itself
            continue
        is_path = name in ("model", "output_dir") and Path(str(found)).absolute() == Path(str(expected)).absolute()
        is_open = name == "max_async_level" and expected is None
        is_open |= may_be_open and not (_is_changed(first.settings, theirs) and _is_changed(one.settings, ours))
        if found != expected and not is_path and not is_open:
            said = f"{first.shown(theirs)} = {expected!r} ({first.origin(theirs)})"
            yield one.problem(ours, f"must equal {said}; set both, or neither")


def _is_changed(settings: Any, key: str) -> bool:
    *above, last = key.split(".")
    for part in above:
        settings = getattr(settings, part)
    return last in settings.changed


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
    elif adapters and trainer.quantization != server.base_quantization:
        why = (
            f"must be {trainer.quantization or 'null'}, as the trainer's qlora_* settings say; set that, or change them"
        )
        yield infer.problem("base_quantization", why)
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
