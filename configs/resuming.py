"""Settings that may differ when a program goes on with a run: how long it lasts, where its files and peers are, how it
computes the same, and what the user may steer by hand. All others decide the run's result and must stay. A key stands
for all below it; members of a list have the list's key. That the base model is the same is checked by its identity.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from grpo.configs.code import digests
from grpo.configs.errors import Problem, SettingsError
from grpo.configs.infer import InferSettings

Change = tuple[str, Any, Any]
"""A dotted key with its values before and now, or `code KEY FILE` with the file's digests."""

_TRAINER = frozenset(
    {
        *("max_steps", "wait_timeout_s", "ckpt", "resume", "resume_with_changed_code"),
        *("model", "output_dir", "overwrite_output_dir", "run_id", "rollout_transport"),
        *("device", "gpus", "nodes", "min_nodes", "rendezvous", "zero_level", "num_threads", "offload"),
        *("gradient_checkpointing", "compile", "colocate", "sleep_mode"),
        "proofs",
        *("learning_rate", "lr_scheduler_type", "decay_steps", "warmup_steps"),
        *("weight_broadcast.type", "weight_broadcast.timeout", "transport_type", "logging_steps", "max_async_level"),
        *("weight_broadcast.keep_last", "weight_broadcast.keep_interval"),
        *("weight_broadcast.host", "weight_broadcast.port", "weight_broadcast.key_var"),
        "weight_broadcast.inference_world_size",
    }
)
_ORCHESTRATOR = frozenset(
    {
        *("max_steps", "wait_timeout_s", "ckpt", "resume", "resume_with_changed_code"),
        *("model.name", "model.lora_adapter", "output_dir", "run_id", "rollout_transport", "weight_broadcast"),
        *("client", "teacher_model.client", "hints.model.base_url", "preferences.teachers.base_url"),
        *("env.address", "env.num_workers", "env.memory_gb", "reward_timeout_s", "max_env_failure_rate"),
        *("max_concurrent_groups", "sleep_mode"),
        *("buffer.easy_fraction", "buffer.hard_fraction"),
        *("eval", "traces", "report_to", "proofs"),
    }
)
_SERVER = frozenset(InferSettings.model_fields) - {
    *("dtype", "seed", "max_model_len", "rope_scaling", "trust_remote_code", "enable_lora", "norm_noise"),
    "base_quantization",
}
_MAY_CHANGE = {"train": _TRAINER, "orch": _ORCHESTRATOR, "infer": _SERVER}


def record_of(settings: Mapping[str, Any], base_model: str | None = None) -> dict[str, Any]:
    """Returns what a program records in the run that it joins: its settings as plain data, digests of the files that
    they name, and the base model's identity where it knows that."""
    base = {} if base_model is None else {"base_model": base_model}
    return {"settings": settings, "code": digests(settings), **base}


def changes(
    role: Literal["train", "orch", "infer"], earlier: Mapping[str, Any], now: Mapping[str, Any], *, run: Path
) -> list[Change]:
    """Returns what differs between the records of two programs of a role, of which the later one goes on with `run`.
    Nothing differs from an empty record. Raises `SettingsError` for a base model, settings and files that must stay."""
    differing = list(differences(earlier.get("settings", now["settings"]), now["settings"]))
    before, files = earlier.get("code", {}), now["code"]
    changed = [(f"code {name}", before[name], files[name]) for name in sorted(before.keys() & files.keys())
               if before[name] != files[name]]  # fmt: skip
    origin, stay = f"the run in {run}", "set it as it was, give another output_dir, or set overwrite_output_dir: true"
    problems = [
        Problem(origin=origin, key=key, value=value, message=f"was {was!r} when the run began; {stay}")
        for key, was, value in differing
        if not _may_change(role, key)
    ]
    if (known := earlier.get("base_model")) not in (None, now.get("base_model", known)):
        model = now["settings"].get("model")
        mend = "give the model that it was started with, or another output_dir"
        problems.append(Problem(origin=origin, key="model", value=model, message=f"is another base model; {mend}"))
    if not now["settings"].get("resume_with_changed_code"):
        mend = "put it back, give another output_dir, or set resume_with_changed_code: true to go on with it as it is"
        named = [name.split(" ", 2)[1:] for name, *_ in changed]
        problems += [
            Problem(origin=origin, key=key, value=file, message=f"this file has changed since the run began; {mend}")
            for key, file in named
        ]
    if problems:
        raise SettingsError(problems)
    return differing + changed


def differences(before: Any, now: Any, key: str = "") -> Iterator[Change]:
    """Yields the dotted keys whose values differ, with both values; None stands for one that is missing. Members of a
    list have the list's key."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted(before.keys() | now.keys()):
            yield from differences(before.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for one, other in zip(before, now, strict=True):
            yield from differences(one, other, key)
    elif before != now:
        yield key, before, now


def _may_change(role: str, key: str) -> bool:
    """Returns whether `key`, or a section that it belongs to, may differ."""
    parts = key.split(".")
    return any(".".join(parts[:number]) in _MAY_CHANGE[role] for number in range(1, len(parts) + 1))
