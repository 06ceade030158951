"""The dotted keys of settings: which there are, which one was meant, and what pydantic's errors are about."""

import difflib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a field's annotation mentions; several where there are alternatives."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for inner in get_args(annotation) for section in sections_of(inner)]


def holds(annotation: Any, kind: type) -> bool:
    """Returns whether a field's annotation mentions a type, as `bool` or `dict`."""
    return kind in (annotation, get_origin(annotation)) or any(holds(inner, kind) for inner in get_args(annotation))


def words_of(annotation: Any) -> set[str]:
    """Returns the words of the literals in a field's annotation: `{"selective"}` of `bool | Literal["selective"]`."""
    own = {one for one in get_args(annotation) if isinstance(one, str)}
    return own.union(*(words_of(inner) for inner in get_args(annotation)))


def is_list(annotation: Any) -> bool:
    """Returns whether a field holds a list."""
    return get_origin(annotation) is tuple


def types_of(section: type[BaseModel]) -> tuple[str, ...]:
    """The values of `type` by which a section is chosen among its alternatives."""
    field = section.model_fields.get("type")
    return get_args(field.annotation) if field is not None and get_origin(field.annotation) is Literal else ()


@functools.cache
def known_keys(cls: type[BaseModel], prefix: str = "") -> tuple[str, ...]:
    """All dotted keys, sections included (`sampling`, `sampling.max_tokens`); keys of a list's members have the list's
    key."""
    keys = list[str]()
    for name, field in cls.model_fields.items():
        keys.append(prefix + name)
        for section in sections_of(field.annotation):
            keys += known_keys(section, f"{prefix}{name}.")
    return tuple(dict.fromkeys(keys))


def _walk(cls: type[BaseModel], parts: Sequence[str]) -> Iterator[list[FieldInfo]]:
    """The fields of each part of a dotted key; several where a section above has alternatives, none where unknown."""
    sections = [cls]
    for name in parts:
        found = [section.model_fields[name] for section in sections if name in section.model_fields]
        sections = [section for field in found for section in sections_of(field.annotation)]
        yield found


def find(cls: type[BaseModel], key: str) -> FieldInfo | None:
    """The field of a dotted key; None where there is none, or it belongs to a list's members."""
    *above, last = _walk(cls, key.split("."))
    in_list = any(is_list(field.annotation) for found in above for field in found)
    return None if in_list or not last else last[0]


_NOT_FOLLOWED = "is refused: it changes the distribution that tokens are drawn from, which the trainer could not follow"
_POLICY = "is for the server of the policy and its versions, and this one serves a teacher; remove it"
_STEPS = "is not known: a run is counted in steps of orch.batch_size rollouts; give their number by max_steps"
_BATCH = (
    "is not known here; orch.batch_size is the number of rollouts of a step, on all devices together, and "
    "train.gradient_accumulation_steps makes several optimizer steps of it, of so many packed micro-batches each"
)
_REFERENCE = (
    "is not known; for the KL to the reference set orch.teacher_model.reference true and train.loss.teacher_tau, or "
    "orch.reward_shaping.reference_kl to take it off the reward"
)
_DATASET = (
    """is not known; rows of a file or of the Hub are --env '{"id": "dataset", "args": {"path": …, "reward": …}}'; """
    "from Python they are grpo.train(MODEL, dataset=ROWS, reward=FUNCTION)"
)
_REWARD = "is not known; it is the environment's: --env FILE:CLASS, or args.reward of the environment `dataset`"
_INSTEAD = {
    **dict.fromkeys(("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"), _NOT_FOLLOWED),
    **{f"teacher.{key}": _POLICY for key in ("output_dir", "colocate", "sleep_mode", "enable_lora", "max_loras")},
    "teacher.model": "is given by the orchestrator's teacher_model.model.name; set that",
    "teacher.api_key_var": "is given by the orchestrator's teacher_model.client.api_key_var; set that",
    "lora_dropout": "is refused: the trainer's log-probabilities would not be the server's; remove it",
    "warmup_ratio": "is not known; give the number of steps by warmup_steps",
    **dict.fromkeys(("num_train_epochs", "total_epochs", "num_epochs", "epochs"), _STEPS),
    **dict.fromkeys(("beta", "kl_coef", "kl_loss_coef", "kl_beta", "use_kl_loss", "use_kl_in_reward"), _REFERENCE),
    **dict.fromkeys(
        ("save_steps", "save_freq", "save_interval"),
        "is not known; use the trainer's ckpt.interval (train.ckpt.interval)",
    ),
    **dict.fromkeys(
        ("eval_steps", "test_freq"), "is not known; use the orchestrator's eval.interval (orch.eval.interval)"
    ),
    **dict.fromkeys(("dataset", "train_dataset", "dataset_name", "train_files", "dataset_path", "data"), _DATASET),
    **dict.fromkeys(
        ("reward", "rewards", "reward_funcs", "reward_function", "reward_fn", "custom_reward_function"), _REWARD
    ),
    **dict.fromkeys(
        ("use_vllm", "vllm_server_base_url", "vllm_server_host"), "is not needed: there always is a vLLM server"
    ),
    "vllm_mode": "is not known; --colocate shares one copy of the base, --sleep_mode one GPU by turns",
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps", "ppo_mini_batch_size"), _BATCH),
    "push_to_hub": "is not known; when the run is over, grpo export RUN --push-to OWNER/NAME",
    "resume_from_checkpoint": "is not needed: the same command goes on; --resume_step N goes back to a checkpoint",
    "fp16": "is not known; train.recipe is bf16 or fp32",
    **dict.fromkeys(
        ("no_lora", "full_finetune", "use_peft", "use_lora"), "is not known; lora: false trains all weights"
    ),
    **dict.fromkeys(("wandb", "use_wandb"), "is not known; use orch.report_to wandb"),
}
"""Messages for keys that someone may look for here."""
_OTHER_NAMES = {
    **dict.fromkeys(("num_generations", "group_size", "rollout_n", "n", "num_rollouts"), "rollouts_per_example"),
    **dict.fromkeys(("lr", "actor_lr"), "learning_rate"),
    **dict.fromkeys(("max_completion_length", "max_new_tokens", "max_response_length"), "max_tokens"),
    **dict.fromkeys(("train_batch_size", "generation_batch_size", "rollout_batch_size"), "batch_size"),
    **dict.fromkeys(("num_iterations", "mu"), "ppo_epochs"),
    **dict.fromkeys(("total_training_steps", "steps", "num_steps"), "max_steps"),
    **dict.fromkeys(("epsilon", "clip_ratio", "clip_range", "epsilon_high", "clip_ratio_high"), "loss.token_mask_high"),
    **dict.fromkeys(("epsilon_low", "clip_ratio_low"), "loss.token_mask_low"),
    **dict.fromkeys(("entropy_coef", "entropy_coeff", "ent_coef"), "loss.entropy_tau"),
    **dict.fromkeys(("adv_estimator", "scale_rewards"), "advantage.type"),
    **dict.fromkeys(("enable_thinking", "apply_chat_template_kwargs"), "chat_template_kwargs"),
    **dict.fromkeys(("max_length", "max_seq_len", "max_seq_length", "seq_len", "context_length"), "sequence_len"),
    **dict.fromkeys(("environment", "env_name", "env_id", "envs"), "env"),
    **dict.fromkeys(("n_gpus_per_node", "num_gpus", "gpus"), "gpus"),
    **dict.fromkeys(("load_in_4bit", "qlora"), "qlora_bnb"),
    "temperature": "sampling.temperature",
    "loss_type": "loss.name",
    "bf16": "recipe",
    **dict.fromkeys(("lora_r", "peft_r"), "lora_rank"),
    "target_modules": "lora_target_modules",
    **dict.fromkeys(("model_name_or_path", "model_name", "model_path", "model_id"), "model"),
    "logging_dir": "output_dir",
    "tensor_parallel_size": "tp",
    "save_total_limit": "ckpt.keep_last",
}
"""Keys of TRL, PEFT, verl and prime-rl, and what they are called here."""


def unknown(cls: type[BaseModel], key: str) -> str:
    """Returns the message for an unknown key: an alternative that has it, or the nearest known key."""
    parts = [part for part in key.split(".") if not part.isdigit()]
    plain, last = ".".join(parts), parts[-1] if parts else ""
    above = list(_walk(cls, parts[:-1]))
    sections = [section for field in (above[-1] if above else []) for section in sections_of(field.annotation)]
    if types := [one for section in sections if last in section.model_fields for one in types_of(section)]:
        return f"is a key of type: {' or '.join(dict.fromkeys(types))} only; remove it, or set that type"
    if message := _INSTEAD.get(plain) or _INSTEAD.get(last):
        return message
    for number, fields in enumerate(above, 1):
        if plain == key and any(is_list(field.annotation) for field in fields):
            whole = ".".join(parts[:number])
            of_env = ", or --env FILE:CLASS" if parts[number - 1] == "env" and last == "id" else ""
            return f"{whole} is a list; give it whole, as in --{whole} '[{{\"{last}\": …}}]', or in a file{of_env}"
        if number == len(above) and any(holds(field.annotation, dict) for field in fields):
            whole = ".".join(parts[:-1])
            return f"{whole} is a mapping; give it whole, as in --{whole} '{{\"{last}\": …}}', or in a file"
    meant = _OTHER_NAMES.get(last)
    if found := [one for one in known_keys(cls) if meant and (one == meant or one.endswith(f".{meant}"))]:
        return f"unknown key; did you mean {min(found, key=lambda one: one.count('.'))}?"
    known = [name for name in known_keys(cls) if not plain.startswith(f"{name}.")]
    ends = {name.rsplit(".", 1)[-1]: name for name in reversed(known)}
    close = difflib.get_close_matches(plain.lower(), known, n=1, cutoff=0.75)
    close = close or [ends[one] for one in difflib.get_close_matches(last.lower(), ends, n=1, cutoff=0.6)]
    return f"unknown key; did you mean {close[0]}?" if close else "unknown key; --help lists the known ones"


def key_of(cls: type[BaseModel], loc: Sequence[str | int]) -> str:
    """The dotted key of the place that pydantic's error names, which has the `type` of alternatives in between."""
    sections, parts = [cls], list[str]()
    for part in map(str, loc):
        found = [section.model_fields[part] for section in sections if part in section.model_fields]
        if not found and any(part in types_of(section) for section in sections):
            sections = [section for section in sections if part in types_of(section)]
            continue
        parts.append(part)
        if found:
            sections = [section for field in found for section in sections_of(field.annotation)]
    return ".".join(parts)


def get(tree: Any, key: str, default: Any = None) -> Any:
    """The value of a dotted key in a tree, or `default` where it is not there."""
    for part in key.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return default
        tree = tree[part]
    return tree


def put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Sets a dotted key of a tree, unless it is there, or stands below a value that is no section."""
    *path, last = key.split(".")
    for part in path:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            return
    tree.setdefault(last, value)


def drop(tree: dict[str, Any], key: str) -> None:
    """Removes a dotted key from a tree, where it is there."""
    above, _, last = key.rpartition(".")
    section = get(tree, above) if above else tree
    if isinstance(section, dict):
        section.pop(last, None)
