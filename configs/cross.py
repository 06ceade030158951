"""Contradictions across the settings of the three programs."""

from collections.abc import Callable, Iterator, Mapping
from operator import eq
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from configs.errors import Problem, SettingsError
from configs.infer import InferSettings
from configs.loading import Loaded, S, value_at
from configs.orch import OrchSettings
from configs.train import TrainSettings

DEFAULT_MAX_LORA_RANK = 16


def cross_problems(
    train: Loaded[TrainSettings], infer: Loaded[InferSettings], orch: Loaded[OrchSettings]
) -> list[Problem]:
    """Every contradiction between the three."""
    return [
        *_must_equal(infer, "model", train, "model", same=_same_path),
        *_must_equal(orch, "model.name", train, "model", same=_same_path),
        *_must_equal(infer, "output_dir", train, "output_dir", same=_same_path),
        *_must_equal(orch, "output_dir", train, "output_dir", same=_same_path),
        *_same_work(train, orch),
        *_same_sockets(train, orch),
        *_must_equal(orch, "ckpt.resume_step", train, "ckpt.resume_step"),
        *_must_equal(orch, "resume", train, "resume"),
        *_must_equal(infer, "weight_broadcast_type", train, "weight_broadcast.type"),
        *_must_equal(orch, "client.api_key_var", infer, "api_key_var"),
        *_same_sleep_mode(infer, train),
        *_server_fits(train, infer, orch),
        *_colocation(train, infer),
    ]


def cross_check(train: Loaded[TrainSettings], infer: Loaded[InferSettings], orch: Loaded[OrchSettings]) -> None:
    """Raises `SettingsError` with every contradiction between the three."""
    if problems := cross_problems(train, infer, orch):
        raise SettingsError(problems)


def joined_check(train: Loaded[TrainSettings], orch: Loaded[OrchSettings]) -> None:
    """As `cross_check`, of a trainer and an orchestrator that have joined the same run.

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
    return Loaded(settings=settings, origins=dict.fromkeys(cls.model_fields, origin), file=origin)


def _same_work(train: Loaded[TrainSettings], orch: Loaded[OrchSettings]) -> Iterator[Problem]:
    """What must agree wherever the two run."""
    yield from _must_equal(orch, "seq_len", train, "sequence_len")
    if train.settings.lora:
        yield from _must_equal(orch, "model.lora_rank", train, "lora_rank")
        yield from _must_equal(orch, "model.lora_alpha", train, "lora_alpha")
        yield from _must_equal(orch, "model.lora_adapters", train, "lora_adapters")
    yield from _must_equal(orch, "rollout_transport.type", train, "rollout_transport.type")
    if train.settings.rollout_transport.type == orch.settings.rollout_transport.type == "zmq":
        yield from _must_equal(orch, "rollout_transport.port", train, "rollout_transport.port")
    yield from _must_equal(orch, "weight_broadcast.type", train, "weight_broadcast.type")
    yield from _must_equal(orch, "weight_broadcast.format", train, "weight_broadcast.format")
    yield from _same_sleep_mode(orch, train)
    yield from _steps(train, orch)
    yield from _something_to_learn(train, orch)
    yield from _auxiliary(train, orch)


def _same_path(one: object, other: object) -> bool:
    return one == other or Path(str(one)).absolute() == Path(str(other)).absolute()


def _must_equal(
    one: Loaded[Any],
    one_key: str,
    other: Loaded[Any],
    other_key: str,
    same: Callable[[object, object], bool] = eq,
) -> Iterator[Problem]:
    expected = value_at(other.settings, other_key)
    if not same(value_at(one.settings, one_key), expected):
        yield one.problem(one_key, f"must equal {other_key} = {expected!r} ({other.origin(other_key)})")


def _same_sockets(train: Loaded[TrainSettings], orch: Loaded[OrchSettings]) -> Iterator[Problem]:
    if train.settings.rollout_transport.type == orch.settings.rollout_transport.type == "zmq":
        for name in ("host", "key_var"):
            yield from _must_equal(orch, f"rollout_transport.{name}", train, f"rollout_transport.{name}")


def _same_sleep_mode(one: Loaded[Any], train: Loaded[TrainSettings]) -> Iterator[Problem]:
    if one.settings.sleep_mode != train.settings.sleep_mode:
        other = f"the trainer's sleep_mode = {train.settings.sleep_mode} ({train.origin('sleep_mode')})"
        yield one.problem("sleep_mode", f"must equal {other}; set it for all three programs, or for none")


def _steps(train: Loaded[TrainSettings], orch: Loaded[OrchSettings]) -> Iterator[Problem]:
    limit, wanted = train.settings.max_steps, orch.settings.max_steps
    if limit != -1 and limit != wanted:
        origin = train.origin("max_steps")
        yield orch.problem("max_steps", f"must equal the trainer's max_steps = {limit} ({origin}), or set that to -1")


def _something_to_learn(train: Loaded[TrainSettings], orch: Loaded[OrchSettings]) -> Iterator[Problem]:
    loss, from_elsewhere = train.settings.loss, orch.settings.advantage.type == "custom"
    if orch.settings.buffer.skip_verification and not (
        loss.teacher_tau or loss.alpha_sdpo or loss.beta_replay or from_elsewhere
    ):
        yield orch.problem(
            "buffer.skip_verification",
            "leaves nothing to learn from: rewards are 0, and so are the trainer's loss.teacher_tau, loss.alpha_sdpo "
            f"and loss.beta_replay ({train.origin('loss.teacher_tau')}); set one of them",
        )


def _auxiliary(train: Loaded[TrainSettings], orch: Loaded[OrchSettings]) -> Iterator[Problem]:
    """What a weight in the loss needs. The other way round, a weight of 0 switches off what is set for it."""
    loss, settings = train.settings.loss, orch.settings
    if loss.teacher_tau and settings.teacher_model is None:
        why = f"is needed with the trainer's loss.teacher_tau = {loss.teacher_tau} ({train.origin('loss.teacher_tau')})"
        yield orch.problem("teacher_model", f"{why}; name a teacher, or set that to 0")
    if loss.beta_replay and not settings.preferences.gives_pairs:
        why = (
            f"are needed with the trainer's loss.beta_replay = {loss.beta_replay} ({train.origin('loss.beta_replay')})"
        )
        yield orch.problem("preferences.teachers", f"{why}; name some, or set that to 0")
    if loss.beta_replay and settings.sleep_mode:
        yield from _beside_the_training(orch)
    if train.settings.weight_broadcast.format != "adapter":
        yield from _without_base(train, orch)


def _beside_the_training(orch: Loaded[OrchSettings]) -> Iterator[Problem]:
    """Who is asked on the run's servers while these sleep."""
    asked, judge = orch.settings.preferences.teachers, orch.settings.preferences.judge
    if own := [one.name for one in (*asked, *([judge] if judge else [])) if one.base_url is None]:
        why = f"preferences asks {', '.join(own)} on the run's servers, while these sleep"
        yield orch.problem("sleep_mode", f"{why}; give each a base_url, or remove sleep_mode")


def _without_base(train: Loaded[TrainSettings], orch: Loaded[OrchSettings]) -> Iterator[Problem]:
    """What asks the base model on the run's servers, where versions replace it."""
    loss, settings, key = train.settings.loss, orch.settings, "weight_broadcast.format"
    replaced = f"{key} = {value_at(train.settings, key)!r} ({train.origin(key)}) replaces it; use adapter"
    why = f"needs the base model on the run's servers, and {replaced}"
    if loss.teacher_tau and settings.teacher_model is not None and settings.teacher_model.policy_every is not None:
        yield orch.problem("teacher_model.policy_every", why)
    if loss.beta_replay and settings.preferences.teachers:
        yield orch.problem("preferences.teachers", why)
    writer = settings.hints.model
    if loss.alpha_sdpo and writer is not None and writer.base_url is None and writer.model is None:
        yield orch.problem("hints.model.base_url", f"{why}, or name another API or model")


def _server_fits(
    train: Loaded[TrainSettings], infer: Loaded[InferSettings], orch: Loaded[OrchSettings]
) -> Iterator[Problem]:
    server = infer.settings
    if train.settings.weight_broadcast.format == "adapter":
        yield from _serves_adapters(train, infer, orch)
    else:
        yield from _serves_in_place(train, infer)
    yield from _same_world(train, infer, orch)
    max_tokens = orch.settings.sampling.max_tokens
    if server.max_model_len is not None and max_tokens is not None and max_tokens >= server.max_model_len:
        origin = orch.origin("sampling.max_tokens")
        yield infer.problem("max_model_len", f"must exceed sampling.max_tokens = {max_tokens} ({origin})")


def _serves_adapters(
    train: Loaded[TrainSettings], infer: Loaded[InferSettings], orch: Loaded[OrchSettings]
) -> Iterator[Problem]:
    """Versions that are asked at once: of the `max_off_policy_steps` + 1 newest, one of which is being loaded, those
    that groups were started under; one that is evaluated; one that teaches. Where another one teaches by now than when
    a group began to be scored, that other one is newer than the group, and so among the first.
    """
    server = infer.settings
    if not server.enable_lora:
        yield infer.problem("enable_lora", "must be true: policy versions are LoRA adapters")
    rank, highest = train.settings.lora_rank, server.max_lora_rank or DEFAULT_MAX_LORA_RANK
    if rank > highest:
        origin = train.origin("lora_rank")
        yield infer.problem(
            "max_lora_rank", f"must be at least lora_rank = {rank} ({origin}); set max_lora_rank: {rank}"
        )
    yield from _must_equal(infer, "norm_noise", train, "noise_scheduler.enabled")
    teacher = orch.settings.teacher_model if train.settings.loss.teacher_tau else None
    teaches = teacher is not None and bool(teacher.policy_every)
    num_kept, num_adapters = 3 if teaches else 2, max(1, len(train.settings.lora_adapters))
    times = num_adapters * (2 if server.norm_noise else 1)
    if server.max_loras < (needed := times * (orch.settings.max_off_policy_steps + num_kept)):
        count = f"max_off_policy_steps + {num_kept}"
        count = f"{count if times == 1 else f'{times} * ({count})'} = {needed}"
        whose = ", with an earlier one that teaches" if teaches else ""
        origin, why = orch.origin("max_off_policy_steps"), f", each of {num_adapters} adapters" if times > 1 else ""
        why = ", each with and without noise" if server.norm_noise else why
        yield infer.problem(
            "max_loras", f"must be at least {count} ({origin}), the versions in flight at once{whose}{why}"
        )


def _serves_in_place(train: Loaded[TrainSettings], infer: Loaded[InferSettings]) -> Iterator[Problem]:
    wanted = train.settings.weight_broadcast.format
    why = f"weight_broadcast.format = {wanted!r} ({train.origin('weight_broadcast.format')})"
    if infer.settings.enable_lora:
        yield infer.problem("enable_lora", f"must be false with {why}: versions replace the server's own weights")
    if infer.settings.dtype in ("bfloat16", "float16") and train.settings.recipe == "fp32":
        yield infer.problem("dtype", f"would round the trainer's float32 weights with {why}; set dtype: float32")


def _same_world(
    train: Loaded[TrainSettings], infer: Loaded[InferSettings], orch: Loaded[OrchSettings]
) -> Iterator[Problem]:
    server, num_servers = infer.settings, len(orch.settings.client.base_url)
    size, broadcast = server.tp * server.dp * num_servers, train.settings.weight_broadcast
    if broadcast.type == "nccl" and broadcast.inference_world_size != size:
        yield train.problem(
            "weight_broadcast.inference_world_size",
            f"must be {size}: {num_servers} servers of tp = {server.tp} times dp = {server.dp}",
        )


DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""The server's `dtype` that holds the same numbers as the trainer's `recipe`."""


def _colocation(train: Loaded[TrainSettings], infer: Loaded[InferSettings]) -> Iterator[Problem]:
    """Where one is to share the base weights with the other, and the other cannot."""
    trainer, server = train.settings, infer.settings
    if trainer.colocate != server.colocate:
        other = f"the trainer's colocate = {trainer.colocate} ({train.origin('colocate')})"
        yield infer.problem("colocate", f"must equal {other}; set both, or neither")
    if not (trainer.colocate and server.colocate):
        return
    if len({trainer.device, server.device} - {"auto"}) > 1:
        why = f"must be the trainer's device = {trainer.device!r} ({train.origin('device')})"
        yield infer.problem("device", f"{why}, whose memory holds the one copy of the base weights")
    wanted = DTYPES[trainer.recipe]
    if server.dtype not in ("auto", wanted):
        why = f"must be {wanted} with the trainer's recipe = {trainer.recipe!r} ({train.origin('recipe')})"
        yield infer.problem("dtype", f"{why}, which computes on the server's weights; remove it, or change the recipe")
