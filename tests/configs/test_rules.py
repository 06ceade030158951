"""What cannot be honoured is refused: one case a rule, with the key that is to blame."""

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from grpo.configs.common import OnlyWith, all_conflicts
from grpo.configs.cross import cross_problems, joined_check, recorded
from grpo.configs.errors import SettingsError
from grpo.configs.infer import InferSettings
from grpo.configs.keys import sections_of
from grpo.configs.loading import LoadedSettings, S
from grpo.configs.orch import OrchSettings
from grpo.configs.train import TrainSettings
from pydantic import BaseModel, ValidationError

MERGED = {"format": "merged"}
NCCL = {"type": "nccl", "format": "merged"}
MERGING = {"recipe": "fp32", "weight_broadcast": MERGED}
OVER_NCCL = {"recipe": "fp32", "weight_broadcast": NCCL}
NOISE = {"max_steps": 20, "noise_scheduler": {"enabled": True}}
TWO_ADAPTERS = ["solver", "proposer"]
API = "http://127.0.0.1:9/v1"
TWO = [{"name": "a"}, {"name": "b"}]
KEYED = {"name": "c", "api_key_var": "K"}
POLICY = {"name": "w", "model": "policy"}
SKIP = {"skip_verification": True}
SCHEDULE = {"type": "cosine", "start_temperature": 1.2, "end_temperature": 0.6}
LEVEL = SCHEDULE | {"end_temperature": 1.2}


def keys(settings: Any) -> set[str]:
    return {key for key, _ in all_conflicts(settings)}


def sections(cls: type[BaseModel]) -> list[type[BaseModel]]:
    """A section and all below it."""
    below = [section for field in cls.model_fields.values() for section in sections_of(field.annotation)]
    return [cls, *(one for section in below for one in sections(section))]


MARKED = {
    f"{cls.__name__}.{name}": (cls, name, mark)
    for program in (TrainSettings, InferSettings, OrchSettings)
    for cls in sections(program)
    for name, field in cls.model_fields.items()
    for mark in field.metadata
    if isinstance(mark, OnlyWith)
}
REQUIRED = {"model": "m", "name": "a"}
VALUES = (None, False, True, 3, 0.3, ["solver", "proposer"], {"beta": 0.3}, {"name": "a"}, "x", "a:1", "http://a:1")


def made_with(cls: type[Any], changes: dict[str, Any]) -> Any:
    required = {name: REQUIRED[name] for name, field in cls.model_fields.items() if field.is_required()}
    return cls.model_validate(required | changes)


def some(cls: type[Any], name: str, fits: Callable[[Any], bool]) -> Any:
    """A value of a field with which the section `fits`: one of those above, or of the alternatives that it names."""
    words = re.findall(r"'(\w+)'", str(cls.model_fields[name].annotation))
    for value in (*VALUES, *words, *([word] for word in words)):
        with suppress(ValidationError):
            if fits(made_with(cls, {name: value})):
                return value
    raise AssertionError(f"no value found for {cls.__name__}.{name}")


@pytest.mark.parametrize(("cls", "name", "mark"), MARKED.values(), ids=MARKED)
def test_a_changed_setting_is_refused_while_what_it_needs_is_off(cls: Any, name: str, mark: OnlyWith) -> None:
    changed = some(cls, name, lambda one: name in one.changed and getattr(one, name) is not None)
    for is_on in (False, True):
        other = some(cls, mark.key, lambda one: mark.holds(one) == is_on)  # noqa: B023 (called at once)
        refused = [key.partition(".")[0] for key in keys(made_with(cls, {mark.key: other, name: changed}))]
        assert (name in refused) != is_on


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"lr_scheduler_type": "cosine"}, "lr_scheduler_type"),
        ({"max_steps": 3, "warmup_steps": 3}, "warmup_steps"),
        ({"lr_scheduler_type": "wsd", "max_steps": 9, "warmup_steps": 4, "decay_steps": 6}, "decay_steps"),
        ({"optimizer": "muon", "adam_beta1": 0.5}, "adam_beta1"),
        ({"device": "cpu", "optimizer": "adamw_8bit_paged"}, "optimizer"),
        ({"zero_level": 2}, "zero_level"),
        ({"gpus": 2, "zero_level": 3, "qlora_fp8": True}, "zero_level"),
        ({"gpus": 2, "zero_level": 3, **MERGING}, "zero_level"),
        ({"overwrite_output_dir": True, "run_id": "x"}, "overwrite_output_dir"),
        ({"overwrite_output_dir": True, "ckpt": {"resume_step": -1}}, "overwrite_output_dir"),
        ({"resume": "never", "ckpt": {"resume_step": 3}}, "resume"),
        ({"loss": {"token_mask_low": 9}}, "loss.token_mask_low"),
        ({"loss": {"adv_tau": 0}}, "loss.adv_tau"),
        ({"loss": {"kl_tau": 0.1, "silent_share": 1}}, "loss.silent_share"),
        ({"loss": {"adv_tau": 0, "alpha_sdpo": 1, "geo_mask_low": 0.5}}, "loss.geo_mask_low"),
        ({"loss": {"importance": "clip", "ratio_type": "sequence"}}, "loss.importance"),
        ({"noise_scheduler": {"enabled": True}}, "noise_scheduler.num_stages"),
        ({"max_steps": 20, "noise_scheduler": {"enabled": True, "sigma_end": 0.1}}, "noise_scheduler.sigma_end"),
        (NOISE | MERGING, "noise_scheduler.enabled"),
        ({"qlora_bnb": True, "qlora_fp8": True}, "qlora_fp8"),
        ({"lora": False}, "weight_broadcast.format"),
        ({"weight_broadcast": {"format": "full"}}, "weight_broadcast.format"),
        ({"weight_broadcast": MERGED}, "weight_broadcast.format"),
        ({"weight_broadcast": MERGED, "qlora_fp8": True}, "weight_broadcast.format"),
        ({"recipe": "fp32", "weight_broadcast": MERGED | {"allow_rounding": True}}, "weight_broadcast.allow_rounding"),
        (OVER_NCCL | {"device": "cpu"}, "weight_broadcast.type"),
        (OVER_NCCL | {"sleep_mode": True}, "sleep_mode"),
        ({"sleep_mode": True, "device": "cpu"}, "sleep_mode"),
        (OVER_NCCL | {"lora_target_modules": ["q_proj"]}, "lora_target_modules"),
        (OVER_NCCL | {"lora_target_modules": ["w1", "w2"]}, "lora_target_modules"),
        ({"lora_target_modules": ["all-linear", "q_proj"]}, "lora_target_modules"),
        ({"lora_adapters": ["a"]}, "lora_adapters"),
        ({"lora_adapters": ["a", "a"]}, "lora_adapters"),
        ({"lora_adapters": ["a", "b"], **MERGING}, "lora_adapters"),
        ({"lora_adapters": ["a", "b"], **NOISE}, "lora_adapters"),
        (MERGING | {"colocate": True}, "colocate"),
        ({"colocate": True, "lora": False, "weight_broadcast": {"format": "full"}}, "colocate"),
        ({"colocate": True, "gpus": 2, "zero_level": 3}, "zero_level"),
        ({"device": "cpu", "recipe": "fp8-hybrid"}, "recipe"),
        ({"transport_type": "zmq", "rollout_transport": {"type": "filesystem"}}, "transport_type"),
    ],
)
def test_trainer_settings_without_effect_or_against_each_other_are_refused(changes: dict[str, Any], key: str) -> None:
    assert keys(TrainSettings.model_validate({"model": "m"} | changes)) == {key}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"enable_auto_tool_choice": True}, "enable_auto_tool_choice"),
        ({"vllm": {"logprobs_mode": "raw_logits"}}, "vllm.logprobs_mode"),
        ({"vllm": {"seed": 1}}, "vllm.seed"),
        ({"vllm": {"--seed": 1}}, "vllm.--seed"),
        ({"vllm": {"speculative_config": {"rejection_sample_method": "synthetic"}}}, "vllm.speculative_config"),
        ({"max_loras": 9, "max_cpu_loras": 4}, "max_loras"),
        ({"weight_broadcast_type": "nccl"}, "weight_broadcast_type"),
        ({"weight_broadcast_type": "nccl", "enable_lora": False, "device": "cpu"}, "weight_broadcast_type"),
        ({"weight_broadcast_type": "nccl", "enable_lora": False, "sleep_mode": True}, "sleep_mode"),
        ({"sleep_mode": True, "device": "cpu"}, "sleep_mode"),
        (
            {"weight_broadcast_type": "http", "weight_broadcast_url": "http://a:1", "base_quantization": "nf4"},
            "base_quantization",
        ),
        ({"colocate": True, "enable_lora": False}, "colocate"),
        ({"colocate": True, "tp": 2}, "colocate"),
        ({"colocate": True, "dp": 2, "device": "cpu"}, "colocate"),
    ],
)
def test_server_settings_without_effect_or_against_each_other_are_refused(changes: dict[str, Any], key: str) -> None:
    assert keys(InferSettings.model_validate({"model": "m"} | changes)) == {key}


ORCH = {"model": {"name": "m"}, "env": [{"id": "a"}], "batch_size": 8, "rollouts_per_example": 4, "seq_len": 512}
ADAPTERS = {"model": {"name": "m", "lora_adapters": TWO_ADAPTERS}}
TRAINED = {"env": [{"id": "a", "adapters": {"Proposer": "proposer"}}]}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"batch_size": 6}, "batch_size"),
        ({"rollouts_per_example": 1}, "rollouts_per_example"),
        ({"max_off_policy_steps": 0}, "max_off_policy_steps"),
        ({"oversampling_factor": 1.2, "max_async_level": 0}, "oversampling_factor"),
        ({"oversampling_factor": 1.2, "max_off_policy_steps": 1}, "oversampling_factor"),
        ({"inflight_weight_updates": True, "max_async_level": 0}, "inflight_weight_updates"),
        ({"sleep_mode": True}, "sleep_mode"),
        ({"client": {"elastic": {"hostname": "h"}}, "weight_broadcast": {"type": "nccl"}}, "client.elastic"),
        ({"sampling": {"max_tokens": 512}}, "sampling.max_tokens"),
        ({"sampling": {"temp_scheduler": SCHEDULE}}, "sampling.temp_scheduler"),
        ({"max_steps": 9, "sampling": {"temp_scheduler": SCHEDULE, "temperature": 0.7}}, "sampling.temperature"),
        ({"max_steps": 9, "sampling": {"temp_scheduler": LEVEL}}, "sampling.temp_scheduler.end_temperature"),
        ({"buffer": {"env_ratios": [1, 2]}}, "buffer.env_ratios"),
        ({"buffer": {"env_ratios": [1]}}, "buffer.env_ratios"),
        ({"env": [{"id": "a"}, {"id": "b"}], "buffer": {"env_ratios": [0, 0]}}, "buffer.env_ratios"),
        ({"buffer": {"easy_threshold": 0.5, "hard_threshold": 0.5}}, "buffer.hard_threshold"),
        ({"buffer": {"hash_keys": ["prompt", "prompt"]}}, "buffer.hash_keys"),
        ({"buffer": SKIP | {"online_difficulty_filtering": True}}, "buffer.online_difficulty_filtering"),
        ({"buffer": SKIP, "advantage": {"length_weighted_mean": True}}, "advantage.length_weighted_mean"),
        ({"buffer": SKIP, "advantage": {"type": "episodic"}}, "advantage.type"),
        ({"buffer": SKIP, "hints": {"sources": ["sibling"]}}, "hints.sources"),
        ({"buffer": SKIP, "preferences": {"teachers": TWO}}, "preferences.select"),
        ({"filters": [{"type": "repetition", "window": 600}]}, "filters.0.window"),
        ({"filters": [{"type": "gibberish"}, {"type": "gibberish"}]}, "filters.1.type"),
        ({"env": [{"id": "a"}, {"id": "a"}], "eval": {"num_examples": 0}}, "env.1.id"),
        ({"env": [{"id": "a", "name": "eval:b"}]}, "env.0.name"),
        ({"env": [{"id": "a", "adapters": {"x": "one"}}]}, "env.0.adapters"),
        (ADAPTERS, "model.lora_adapters"),
        (ADAPTERS | TRAINED | {"eval": {"env": [{"id": "a", "adapters": {"x": "other"}}]}}, "eval.env.0.adapters"),
        ({"client": {"elastic": {"hostname": "h"}, "base_url": ["http://a"]}}, "client.base_url"),
        ({"report_to": {"interval": 5}}, "report_to.interval"),
        ({"eval": {"rollouts_per_example": 4}}, "eval.rollouts_per_example"),
        ({"eval": {"sampling": {"max_tokens": 512}}}, "eval.sampling.max_tokens"),
        ({"eval": {"num_examples": 0, "interval": 5}}, "eval.interval"),
        ({"teacher_model": {}}, "teacher_model.model.name"),
        ({"teacher_model": {"reference": True, "model": {"name": "m"}}}, "teacher_model.model.name"),
        ({"teacher_model": {"reference": True, "client": {"timeout": 1}}}, "teacher_model.client.timeout"),
        ({"hints": {"sources": ["sibling", "sibling"]}}, "hints.sources"),
        ({"hints": {"sources": ["model"]}}, "hints.model"),
        ({"hints": {"sources": ["model"], "model": {"name": "w", "base_url": API}}}, "hints.model.model"),
        ({"preferences": {"pairs": "p.jsonl", "num_agreeing": 3}}, "preferences.num_agreeing"),
        ({"preferences": {"max_waiting": 3}}, "preferences.max_waiting"),
        ({"preferences": {"teachers": [{"name": "a"}, {"name": "a"}]}}, "preferences.teachers"),
        ({"preferences": {"teachers": TWO, "num_agreeing": 3}}, "preferences.num_agreeing"),
        ({"preferences": {"teachers": TWO, "max_cost": 5}}, "preferences.max_cost"),
        (
            {"preferences": {"teachers": [*TWO, {"name": "c", "api_key_var": "K"}]}},
            "preferences.teachers.2.api_key_var",
        ),
        (ADAPTERS | TRAINED, None),
        ({"teacher_model": {"model": {"name": "m"}, "client": {"timeout": 1}}}, None),
        ({"preferences": {"pairs": "p.jsonl", "max_pairs": 3}}, None),
        ({"hints": {"sources": ["sibling", "model"], "max_per_sample": 9, "model": POLICY}}, None),
    ],
)
def test_orchestrator_settings_without_effect_or_against_each_other_are_refused_and_no_others(
    changes: dict[str, Any], key: str | None
) -> None:
    assert keys(OrchSettings.model_validate(ORCH | changes)) == ({key} - {None})


@pytest.mark.parametrize("sampling", [{"repetition_penalty": 1.1}, {"min_tokens": 3}])
def test_what_would_draw_tokens_as_the_trainer_cannot_follow_is_refused(sampling: dict[str, float]) -> None:
    with pytest.raises(ValidationError) as caught:
        OrchSettings.model_validate(ORCH | {"sampling": sampling})
    assert [error["loc"] for error in caught.value.errors()] == [("sampling", *sampling)]


def loaded(settings: S) -> LoadedSettings[S]:
    return LoadedSettings(settings=settings, given={}, file=f"{settings.role}.yaml")


def crossed(train: dict[str, Any], infer: dict[str, Any], orch: dict[str, Any]) -> list[str]:
    problems = cross_problems(
        loaded(TrainSettings.model_validate({"model": "m"} | train)),
        loaded(InferSettings.model_validate({"model": "m"} | infer)),
        loaded(OrchSettings.model_validate({"model": {"name": "m"}, "env": [{"id": "a"}]} | orch)),
    )
    return [problem.key for problem in problems]


ALL = {"sleep_mode": True}
TWO_RANKS = {"enable_lora": False, "tp": 2, "weight_broadcast_type": "nccl"}
REPLAYS = {"loss": {"beta_replay": 0.5}}
ZMQ = {"rollout_transport": {"type": "zmq"}}
TWO_SERVERS = {"client": {"base_url": ["http://a/v1", "http://b/v1"]}}
FOUR = NCCL | {"inference_world_size": 4}
IN_PLACE = {"enable_lora": False}
READS = {"weight_broadcast": MERGED}
SEVERAL = {"model": {"name": "m", "lora_adapters": TWO_ADAPTERS}}
BY_ITSELF = {"teacher_model": {"reference": True}}
WRITER = {"sources": ["model"], "model": {"name": "w"}}


@pytest.mark.parametrize(
    ("train", "infer", "orch", "key"),
    [
        ({}, {"model": "n"}, {}, "model"),
        ({}, {}, {"model": {"name": "n"}}, "model.name"),
        ({"output_dir": "x"}, {"output_dir": "./x"}, {"output_dir": "x"}, None),
        ({"output_dir": "x"}, {"output_dir": "x"}, {}, "output_dir"),
        ({"sequence_len": 512}, {}, {}, "seq_len"),
        ({"lora_rank": 8}, {}, {}, "model.lora_rank"),
        ({"lora_alpha": 64}, {}, {}, "model.lora_alpha"),
        ({"lora_rank": 64}, {}, {"model": {"name": "m", "lora_rank": 64}}, "max_lora_rank"),
        ({"max_steps": 3}, {}, {"max_steps": 4}, "max_steps"),
        ({"resume": "never"}, {}, {}, "resume"),
        ({"ckpt": {"resume_step": 3}}, {}, {}, "ckpt.resume_step"),
        (ZMQ, {}, {}, "rollout_transport.type"),
        ({"rollout_transport": {"type": "zmq", "port": 5556}}, {}, ZMQ, "rollout_transport.port"),
        ({}, IN_PLACE, {}, "enable_lora"),
        (MERGING, IN_PLACE, {}, "weight_broadcast.format"),
        (MERGING, IN_PLACE, READS, None),
        (MERGING, {}, READS, "enable_lora"),
        (MERGING, IN_PLACE | {"dtype": "bfloat16"}, READS, "dtype"),
        (OVER_NCCL, TWO_RANKS, {"weight_broadcast": NCCL}, "weight_broadcast.inference_world_size"),
        (OVER_NCCL | {"weight_broadcast": FOUR}, TWO_RANKS, {"weight_broadcast": FOUR, **TWO_SERVERS}, None),
        ({}, {"max_loras": 9}, {}, "max_loras"),
        (NOISE, {"norm_noise": True, "max_loras": 20}, {"max_steps": 20}, None),
        (NOISE, {"norm_noise": True, "max_loras": 19}, {"max_steps": 20}, "max_loras"),
        (NOISE, {}, {"max_steps": 20}, "norm_noise"),
        ({"qlora_fp8": True}, {"base_quantization": "fp8"}, {}, None),
        ({"qlora_fp8": True}, {}, {}, "base_quantization"),
        ({}, {"base_quantization": "nf4"}, {}, "base_quantization"),
        ({"lora_adapters": TWO_ADAPTERS}, {"max_loras": 20}, {}, "model.lora_adapters"),
        ({"lora_adapters": TWO_ADAPTERS}, {"max_loras": 19}, SEVERAL, "max_loras"),
        ({}, {"max_model_len": 32}, {"sampling": {"max_tokens": 64}}, "max_model_len"),
        (ALL, ALL, {}, "sleep_mode"),
        (ALL | REPLAYS, ALL, ALL | {"preferences": {"teachers": TWO}}, "sleep_mode"),
        ({"colocate": True}, {}, {}, "colocate"),
        ({}, {"api_key_var": "KEY"}, {}, "client.api_key_var"),
        ({}, {}, {"buffer": SKIP}, "buffer.skip_verification"),
        ({}, {}, {"buffer": SKIP, "advantage": {"type": "custom", "import_path": "m:f"}}, None),
        ({"loss": {"teacher_tau": 0.5}}, {}, {}, "teacher_model"),
        (REPLAYS, {}, {}, "preferences.teachers"),
        (REPLAYS, {}, {"preferences": {"pairs": "pairs.jsonl"}}, None),
        (MERGING | REPLAYS, IN_PLACE, READS | {"preferences": {"teachers": TWO}}, "preferences.teachers"),
        (MERGING | {"loss": {"teacher_tau": 0.5}}, IN_PLACE, READS | BY_ITSELF, "teacher_model.reference"),
        (MERGING | {"loss": {"alpha_sdpo": 0.5}}, IN_PLACE, READS | {"hints": WRITER}, "hints.model.base_url"),
        (MERGING, IN_PLACE, READS | {"hints": WRITER}, None),
    ],
)
def test_programs_with_files_of_their_own_must_agree(
    train: dict[str, Any], infer: dict[str, Any], orch: dict[str, Any], key: str | None
) -> None:
    assert crossed(train, infer, orch) == ([] if key is None else [key])


def joined(train: dict[str, Any], orch: dict[str, Any]) -> list[str]:
    ours = OrchSettings.model_validate(ORCH | orch).model_dump(mode="json")
    theirs = TrainSettings.model_validate({"model": "m", "sequence_len": 512} | train).model_dump(mode="json")
    try:
        joined_check(recorded(TrainSettings, theirs), recorded(OrchSettings, ours))
    except SettingsError as error:
        return [problem.key for problem in error.problems]
    return []


def test_programs_that_have_joined_a_run_must_do_the_same_work() -> None:
    other = ZMQ | {"max_steps": 5, "lora_rank": 8}
    assert sorted(joined(other, {"max_steps": 10})) == ["max_steps", "model.lora_rank", "rollout_transport.type"]


def test_programs_that_have_joined_a_run_may_have_other_names_for_its_folder_model_and_address() -> None:
    zmq = {"type": "zmq", "port": 6000}
    theirs = {"model": "/a/m", "output_dir": "/a", "rollout_transport": zmq | {"host": "10.0.0.2", "key_var": "KEY"}}
    assert joined(theirs, {"output_dir": "/b", "rollout_transport": zmq | {"host": "0.0.0.0"}}) == []


def test_recorded_settings_of_another_release_are_refused() -> None:
    with pytest.raises(SettingsError):
        recorded(TrainSettings, {"model": "m", "novelty": 1})
