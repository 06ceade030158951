"""Settings that the programs of a run share, and contradictions between them."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from grpo.configs.errors import Problem, SettingsError
from grpo.configs.infer import InferSettings
from grpo.configs.keys import known_keys
from grpo.configs.loading import LoadedSettings, S, value_at
from grpo.configs.orch import OrchSettings
from grpo.configs.train import SharedSettings, TrainSettings
from pydantic import ValidationError

DEFAULT_MAX_LORA_RANK = 16
_BROADCAST = ("train.weight_broadcast.", "orch.weight_broadcast.", "infer.weight_broadcast_")
_WAYS = [key for key in known_keys(SharedSettings) if key.startswith(("rollout_transport.", "weight_broadcast."))]
_CKPT = ("ckpt.interval", "ckpt.keep_last", "ckpt.keep_interval")
_SAME_NAME = ["resume", *_WAYS, *_CKPT, "max_async_level", "proofs.on_failure"]
AGREED: Mapping[str, tuple[str, ...]] = {
    **{key: (f"train.{key}", f"orch.{key}") for key in _SAME_NAME},
    **{key: (f"train.{key}", f"infer.{key}", f"orch.{key}") for key in ("output_dir", "sleep_mode")},
    **{key: (f"train.{key}", f"orch.model.{key}") for key in ("lora_rank", "lora_alpha", "lora_adapters")},
    "model": ("train.model", "infer.model", "orch.model.name"),
    "resume_step": ("train.ckpt.resume_step", "orch.ckpt.resume_step"),
    "colocate": ("train.colocate", "infer.colocate"),
    "chat_template_kwargs": ("infer.chat_template_kwargs", "orch.model.chat_template_kwargs"),
    "fp32_lm_head": ("train.fp32_lm_head", "infer.fp32_lm_head"),
    "sequence_len": ("train.sequence_len", "orch.seq_len"),
    "micro_batch_tokens": ("train.micro_batch_tokens", "orch.micro_batch_tokens"),
    "api_key_var": ("infer.api_key_var", "orch.client.api_key_var"),
    **{f"weight_broadcast.{key}": tuple(f"{one}{key}" for one in _BROADCAST) for key in ("type", "key_var")},
}
"""Keys of a run, and those of the programs that stand for the same; the programs must say the same."""
_WORK = ("lora_rank", "lora_alpha", "lora_adapters", "sequence_len", "sleep_mode", "max_async_level", "resume_step")
_JOINED = (*_WORK, *(key for key in _WAYS if key.endswith((".type", ".format", ".port"))))
"""Keys that must be the same where trainer and orchestrator have files of their own. The run that both have joined
proves the folder, the model's identity the model, the connection an address; one alone acts on the rest."""
_APART = {"ckpt.interval", "ckpt.keep_last", "ckpt.keep_interval", "max_async_level"}
"""Keys that a run's file does not set for all programs."""
Found: TypeAlias = Iterator[tuple[LoadedSettings[Any], str, str]]
"""A program, its key, and what is wrong with the value."""


def cross_problems(
    train: LoadedSettings[TrainSettings], infer: LoadedSettings[InferSettings], orch: LoadedSettings[OrchSettings]
) -> list[Problem]:
    """Returns every contradiction between the three."""
    programs: dict[str, LoadedSettings[Any]] = {"train": train, "infer": infer, "orch": orch}
    return _problems(_differing(programs, AGREED), _same_work(train, orch), _server_fits(train, infer, orch))


def joined_check(train: LoadedSettings[TrainSettings], orch: LoadedSettings[OrchSettings]) -> None:
    """Raises `SettingsError` where a trainer and an orchestrator that have joined a run contradict each other."""
    if problems := _problems(_differing({"train": train, "orch": orch}, _JOINED), _same_work(train, orch)):
        raise SettingsError(problems)


def _problems(*found: Found) -> list[Problem]:
    return [program.problem(key, message) for some in found for program, key, message in some]


def recorded(cls: type[S], fields: Mapping[str, Any]) -> LoadedSettings[S]:
    """Settings as the program recorded them in the run's folder. Raises `SettingsError`."""
    origin = f"run.json ({cls.role})"
    try:
        settings = cls.model_validate(fields)
    except ValidationError as error:
        message = f"not settings of this release of grpo: {error}; run the same release in all three programs"
        raise SettingsError([Problem(origin=origin, key="settings", value=dict(fields), message=message)]) from None
    return LoadedSettings(settings=settings, given={key: (origin, key) for key in cls.model_fields}, file=origin)


def versions_at_once(orch: OrchSettings, *, norm_noise: bool) -> int:
    """Number of adapters that a server is asked for at once: of the `max_off_policy_steps` + 1 newest versions (at
    least 2), one of which is being loaded, those that groups were started under; one that is evaluated. With each come
    the `max_opponents` that its games meet. Each is there once for each adapter, and once more with noise."""
    times = max(1, len(orch.model.lora_adapters)) * (2 if norm_noise else 1)
    return times * (max(1, orch.max_off_policy_steps) + 2) * (1 + orch.max_opponents)


class AuxiliaryLoss(NamedTuple):
    """Something besides rewards that a run can learn from."""

    section: str
    """The section of the orchestrator's settings that describes it."""
    switch: str
    """The settings that switch it on."""
    weight: float
    """0 where it is off."""
    module: str
    """Its module below `grpo.orchestrator.auxiliary`."""


def auxiliary_losses(train: TrainSettings, orch: OrchSettings) -> list[AuxiliaryLoss]:
    """Returns those that are on, and those that are described although they are off, in the order in which groups of
    rollouts pass them."""
    loss, hints, preferences, kl = train.loss, orch.hints, orch.preferences, orch.reward_shaping.reference_kl
    switches = "loss.alpha_sdpo or hints.advantage_weight", "loss.beta_replay or preferences.advantage_weight"
    by_hints, by_teachers = loss.alpha_sdpo or hints.advantage_weight, loss.beta_replay or preferences.advantage_weight
    described = {"teacher_model": orch.teacher_model, "hints": hints.changed, "preferences": preferences.gives_pairs}
    known = [
        AuxiliaryLoss("reward_shaping", "reward_shaping.reference_kl", kl, "teacher.reference_kl"),
        AuxiliaryLoss("teacher_model", "loss.teacher_tau", loss.teacher_tau, "teacher.distillation"),
        AuxiliaryLoss("hints", switches[0], by_hints, "hints.hinting"),
        AuxiliaryLoss("preferences", switches[1], by_teachers, "preferences.asking"),
    ]
    return [one for one in known if one.weight or described.get(one.section)]


def _differing(programs: Mapping[str, LoadedSettings[Any]], names: Iterable[str]) -> Found:
    """Yields the keys of the run on which these programs differ."""
    for name in names:
        targets = [target.partition(".") for target in AGREED[name]]
        (first, theirs), *others = [(programs[role], key) for role, _, key in targets if role in programs]
        for one, ours in others:
            try:
                expected, found = value_at(first.settings, theirs), value_at(one.settings, ours)
            except AttributeError:  # a key of the other `type`, which is told itself
                continue
            is_path = name in ("model", "output_dir") and Path(str(found)).absolute() == Path(str(expected)).absolute()
            is_idle = theirs.startswith("lora_") and not first.settings.lora
            if found != expected and not (is_path or is_idle or (name == "max_async_level" and expected is None)):
                both = f"; set {name}, which holds for all programs" if first.prefix and name not in _APART else ""
                yield one, ours, f"must equal {first.described(theirs)}{both}"


def _same_work(train: LoadedSettings[TrainSettings], orch: LoadedSettings[OrchSettings]) -> Found:
    """Yields contradictions that matter wherever the two run."""
    trainer, settings, loss = train.settings, orch.settings, train.settings.loss
    teacher, teachers, writer = settings.teacher_model, settings.preferences.teachers, settings.hints.model
    if trainer.max_steps not in (-1, settings.max_steps):
        mend = "set max_steps, which holds for both programs" if orch.prefix else "or set that to -1"
        yield orch, "max_steps", f"must equal {train.described('max_steps')}; {mend}"
    others = loss.teacher_tau or loss.alpha_sdpo or loss.beta_replay or settings.advantage.type == "custom"
    if settings.buffer.skip_verification and not others:
        keys = "loss.teacher_tau, loss.alpha_sdpo and loss.beta_replay"
        yield orch, "buffer.skip_verification", f"leaves nothing to learn from: set one of the trainer's {keys}"
    if loss.teacher_tau and teacher is None:
        yield orch, "teacher_model", f"is needed with {train.described('loss.teacher_tau')}; give it, or set that to 0"
    if loss.beta_replay and not settings.preferences.gives_pairs:
        message = f"is needed with {train.described('loss.beta_replay')}; give it, or set that to 0"
        yield orch, "preferences.teachers", message
    own = [one.name for one in (*teachers, settings.preferences.judge) if one and one.base_url is None]
    asks_teachers = loss.beta_replay or settings.preferences.advantage_weight
    if asks_teachers and settings.sleep_mode and own:
        why = f"puts the servers to sleep that are asked as {', '.join(own)} by preferences"
        yield orch, "sleep_mode", f"{why}; give each a base_url, or remove sleep_mode"
    asks_writer = loss.alpha_sdpo or settings.hints.advantage_weight
    if trainer.weight_broadcast.format != "adapter":
        why = f"needs the base model on the servers, which {trainer.weight_broadcast.format} versions replace"
        for key, asks in {
            "teacher_model.reference": loss.teacher_tau and teacher and teacher.reference,
            "preferences.teachers": asks_teachers and teachers,
            "hints.model.base_url": asks_writer and writer and writer.base_url is None and writer.model is None,
        }.items():
            if asks:
                yield orch, key, f"{why}; use weight_broadcast.format: adapter, or another API"


def _server_fits(
    train: LoadedSettings[TrainSettings], infer: LoadedSettings[InferSettings], orch: LoadedSettings[OrchSettings]
) -> Found:
    trainer, server, broadcast = train.settings, infer.settings, train.settings.weight_broadcast
    adapters = broadcast.format == "adapter"
    needed = versions_at_once(orch.settings, norm_noise=server.norm_noise)
    if server.enable_lora != adapters:
        message = f"must be {str(adapters).lower()} with {train.described('weight_broadcast.format')}"
        yield infer, "enable_lora", message
    elif adapters and trainer.lora_rank > (server.max_lora_rank or DEFAULT_MAX_LORA_RANK):
        yield infer, "max_lora_rank", f"must be at least {train.described('lora_rank')}; set it to that"
    elif adapters and trainer.noise_scheduler.enabled != server.norm_noise:
        yield infer, "norm_noise", "must equal the trainer's noise_scheduler.enabled; set both, or neither"
    elif adapters and trainer.quantization != server.base_quantization:
        wanted = trainer.quantization or "null"
        yield infer, "base_quantization", f"must be {wanted}, as the trainer's qlora_* say; set that, or change them"
    elif adapters and server.max_loras < needed:
        why = f"the adapters in flight at once with {orch.described('max_off_policy_steps')}"
        why += f" and {orch.described('max_opponents')}" if orch.settings.max_opponents else ""
        yield infer, "max_loras", f"must be at least {needed}, {why}"
    elif not adapters and server.dtype in ("bfloat16", "float16") and trainer.recipe == "fp32":
        yield infer, "dtype", "would round the trainer's float32 weights; set dtype: float32"
    size = server.tp * server.dp * len(orch.settings.client.base_url)
    if broadcast.type == "nccl" and broadcast.inference_world_size != size:
        yield train, "weight_broadcast.inference_world_size", f"must be {size}: the servers times tp times dp"
    longest, max_tokens = server.max_model_len, orch.settings.sampling.max_tokens
    if longest is not None and max_tokens is not None and max_tokens >= longest:
        more = f"raise {infer.prefix}max_model_len too, by the length of prompts"
        yield infer, "max_model_len", f"must exceed {orch.described('sampling.max_tokens')}; {more}"
