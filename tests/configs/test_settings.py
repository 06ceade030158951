"""Settings: precedence, and the errors for what cannot be honoured."""

import re
from pathlib import Path

import pytest
import yaml

from configs.common import dump, known_keys, load, load_settings, nearest_key
from configs.errors import SettingsError
from configs.infer import InferSettings
from configs.orch import OrchSettings
from configs.train import TrainSettings

ORCH = {"model": {"name": "m"}, "env": [{"id": "reverse-text"}], "rollouts_per_example": 4}


@pytest.fixture
def orch_file(tmp_path: Path) -> Path:
    path = tmp_path / "orch.yaml"
    path.write_text(yaml.safe_dump(ORCH))
    return path


def problems(error: pytest.ExceptionInfo[SettingsError]) -> list[str]:
    return [str(problem) for problem in error.value.problems]


def test_command_line_beats_environment_beats_file_beats_default(
    orch_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orch_file.write_text(yaml.safe_dump(ORCH | {"batch_size": 8, "seq_len": 100, "seed": 1}))
    monkeypatch.setenv("GRPO_ORCH_SEQ_LEN", "200")
    monkeypatch.setenv("GRPO_ORCH_SEED", "2")
    loaded = load(OrchSettings, file=orch_file, arguments=["--seed", "3"])
    settings = loaded.settings
    assert (settings.seed, settings.seq_len, settings.batch_size, settings.max_async_level) == (3, 200, 8, 1)
    assert loaded.origin("seed") == "command line"
    assert loaded.origin("seq_len") == "environment variable GRPO_ORCH_SEQ_LEN"
    assert loaded.origin("batch_size") == str(orch_file)
    assert loaded.origin("max_async_level") == f"{orch_file} (default)"


def test_nested_keys_are_set_from_command_line_and_environment(
    orch_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_ORCH_SAMPLING__TEMPERATURE", "0.5")
    arguments = ["--sampling.max_tokens", "64", "--client.base_url", '["http://a/v1", "http://b/v1"]']
    settings = load(OrchSettings, file=orch_file, arguments=arguments).settings
    assert (settings.sampling.max_tokens, settings.sampling.temperature) == (64, 0.5)
    assert settings.client.base_url == ("http://a/v1", "http://b/v1")


def test_environments_are_given_on_the_command_line_as_json(orch_file: Path) -> None:
    settings = load(OrchSettings, file=orch_file, arguments=["--env", '[{"id": "x", "args": {"a": 1}}]']).settings
    assert settings.env[0].id == "x"
    assert settings.env[0].args == {"a": 1}


def test_an_unknown_key_names_file_key_value_and_the_nearest_right_one(orch_file: Path) -> None:
    orch_file.write_text(yaml.safe_dump(ORCH | {"sampling": {"max_token": 64}, "batchsize": 7}))
    with pytest.raises(SettingsError) as error:
        load(OrchSettings, file=orch_file)
    assert problems(error) == [
        f"{orch_file}: sampling.max_token = 64: unknown key; did you mean sampling.max_tokens?",
        f"{orch_file}: batchsize = 7: unknown key; did you mean batch_size?",
    ]


def test_an_unknown_key_inside_a_list_is_found(orch_file: Path) -> None:
    orch_file.write_text(yaml.safe_dump(ORCH | {"env": [{"id": "a", "arg": {}}]}))
    with pytest.raises(SettingsError, match=re.escape("env.0.arg = {}: unknown key; did you mean env.args?")):
        load(OrchSettings, file=orch_file)


def test_an_unknown_option_and_an_unknown_variable_are_errors(orch_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_ORCH_SAMPLING__TEMPERATUR", "1")
    with pytest.raises(SettingsError) as error:
        load(OrchSettings, file=orch_file, arguments=["--sampling.max_tokes", "3"])
    variable, option = problems(error)
    assert variable == (
        "environment variable GRPO_ORCH_SAMPLING__TEMPERATUR: sampling.temperatur = '1': "
        "unknown key; did you mean sampling.temperature?"
    )
    assert option == "command line: sampling.max_tokes = '3': unknown key; did you mean sampling.max_tokens?"


NOISE = ("--noise_scheduler.enabled", "true", "--max_steps", "20")
SCHEDULE = [
    *("--sampling.temp_scheduler.type", "cosine"),
    *("--sampling.temp_scheduler.start_temperature", "1.2"),
    *("--sampling.temp_scheduler.end_temperature", "0.6"),
]
SKIP = ["--buffer.skip_verification", "true"]
TWO_TEACHERS = '[{"name": "a"}, {"name": "b"}]'
TWO_ENVS = '[{"id": "a"}, {"id": "b"}]'
MERGED = ("--weight_broadcast.format", "merged", "--recipe", "fp32")
NCCL = ("--weight_broadcast.type", "nccl", *MERGED)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seed", "many"], "command line: seed = 'many': Input should be a valid integer"),
        (["--batch_size", "6"], "batch_size = 6: must be a multiple of rollouts_per_example = 4"),
        (["--rollouts_per_example", "1"], "rollouts_per_example = 1: must be at least 2"),
        (["--sampling.max_tokens", "4096"], "leaves no room for a prompt in seq_len = 2048"),
        (["--max_off_policy_steps", "0"], "max_off_policy_steps = 0: must be at least max_async_level = 1"),
        (["--oversampling_factor", "0.9"], "Input should be greater than or equal to 1"),
        (["--oversampling_factor", "1.2", "--max_async_level", "0"], "and max_async_level: 0 is strictly on-policy"),
        (
            ["--inflight_weight_updates", "true", "--max_async_level", "0"],
            "has no effect with max_async_level: 0: nothing is being sampled when a version becomes live",
        ),
        (
            ["--oversampling_factor", "1.2", "--max_off_policy_steps", "1"],
            "oversampling_factor = 1.2: has no effect with max_off_policy_steps = max_async_level",
        ),
        (["--env", '[{"id": "a"}, {"id": "a"}]'], "a second environment called a; give it a name of its own"),
        (["--eval.env", '[{"id": "a"}, {"id": "b", "name": "a"}]'], "eval.env.1.id = 'b': a second environment called"),
        (["--env", '[{"id": "a", "name": "eval:b"}]'], "env.0.name = 'eval:b': must not begin with eval:"),
        (["--sleep_mode", "true"], "sleep_mode = True: needs max_async_level: 0, not 1: with batches in advance there"),
        (
            ["--sleep_mode", "true", "--max_async_level", "0", "--weight_broadcast.type", "nccl"],
            "sleep_mode = True: is for one device, and weight_broadcast.type: nccl for several; use filesystem",
        ),
        (["--sampling.min_tokens", "2"], "sampling.min_tokens = 2: is refused"),
        (["--weight_broadcast.keep_last", "3"], "weight_broadcast.keep_last = 3: has no effect on the orchestrator"),
        (
            ["--client.elastic.hostname", "h", "--client.base_url", '["http://a"]'],
            "client.base_url = ('http://a',): has no effect with client.elastic; remove one of the two",
        ),
        (
            ["--client.elastic.hostname", "h", "--weight_broadcast.type", "nccl"],
            "cannot be honoured with weight_broadcast.type: nccl, where no server can join late; set client.base_url",
        ),
        (["--client.elastic.port", "1"], "client.elastic.hostname = None: required"),
        (
            ["--client.timeout", "9", "--client.health_timeout_s", "9"],
            "client.health_timeout_s = 9.0: has no effect unless it is less than client.timeout = 9",
        ),
        (["--min_concurrent_groups", "2"], "has no effect unless it is less than max_concurrent_groups, here 2"),
        (
            ["--min_concurrent_groups", "6", "--max_concurrent_groups", "5"],
            "min_concurrent_groups = 6: has no effect unless it is less than max_concurrent_groups, here 5",
        ),
        (["--sampling.top_p", "0.9"], "sampling.top_p = 0.9: is refused: it changes the distribution that tokens are"),
        (["--sampling.top_k", "40"], "leave it at -1"),
        (["--sampling.min_p", "0.1"], "sampling.min_p = 0.1: is refused"),
        (["--sampling.repetition_penalty", "1.1"], "sampling.repetition_penalty = 1.1: is refused"),
        (["--sampling.presence_penalty", "1"], "sampling.presence_penalty = 1.0: is refused"),
        (["--sampling.frequency_penalty", "1"], "sampling.frequency_penalty = 1.0: is refused"),
        (
            [*SCHEDULE, "--max_steps", "9", "--sampling.temperature", "0.7"],
            "sampling.temperature = 0.7: has no effect with sampling.temp_scheduler; remove one of the two",
        ),
        (SCHEDULE, "needs max_steps of at least 2, to know where it ends; set max_steps"),
        ([*SCHEDULE, "--max_steps", "1"], "needs max_steps of at least 2"),
        ([*SCHEDULE[:5], "1.2", "--max_steps", "9"], "equals start_temperature, so nothing would change"),
        (SCHEDULE[:4], "sampling.temp_scheduler.end_temperature = None: required; set it in the file"),
        (
            ["--buffer.skip_verification", "true", "--hints.sources", '["sibling"]'],
            "sibling finds nobody who succeeded with buffer.skip_verification: true, where all rewards are 0; remove",
        ),
        (
            ["--buffer.skip_verification", "true", "--preferences.teachers", TWO_TEACHERS],
            "low_reward names no turn with buffer.skip_verification: true, where all rewards are 0; name others",
        ),
        (["--buffer.env_ratios", "[1, 2]"], "has 2 numbers for 1 environments; give one each"),
        (["--buffer.env_ratios", "[1]"], "buffer.env_ratios = (1.0,): has no effect with one environment; remove it"),
        (["--env", TWO_ENVS, "--buffer.env_ratios", "[0, 0]"], "must have a number above 0"),
        (["--env", TWO_ENVS, "--buffer.env_ratios", "[1, -1]"], "Input should be greater than or equal to 0"),
        (["--buffer.easy_threshold", "0.5", "--buffer.hard_threshold", "0.5"], "must be below buffer.easy_threshold"),
        (["--buffer.easy_fraction", "0.5"], "has no effect without buffer.easy_threshold; remove it or set that"),
        (["--buffer.hard_fraction", "0.5"], "has no effect without buffer.hard_threshold; remove it or set that"),
        (["--buffer.hash_keys", '["prompt", "prompt"]'], "names a field twice; remove one"),
        ([*SKIP, "--buffer.easy_threshold", "1"], "has no effect with buffer.skip_verification: true"),
        ([*SKIP, "--buffer.online_difficulty_filtering", "true"], "would drop every group with buffer.skip_verificat"),
        ([*SKIP, "--advantage.length_weighted_mean", "true"], "has no effect with buffer.skip_verification: true"),
        (["--advantage.type", "custom"], "is needed with advantage.type: custom; give module:function"),
        (["--advantage.import_path", "m:f"], "advantage.import_path = 'm:f': has no effect with advantage.type: defau"),
        (["--advantage.kwargs", '{"a": 1}'], "advantage.kwargs = {'a': 1}: has no effect with advantage.type: default"),
        (
            ["--advantage.type", "custom", "--advantage.import_path", "m:f", "--advantage.length_weighted_mean", "1"],
            "advantage.length_weighted_mean = True: has no effect with advantage.type: custom",
        ),
        (["--filters", '[{"type": "gibberish", "window": 5}]'], "filters.0.window = 5: has no effect with type: gibb"),
        (
            ["--filters", '[{"type": "repetition", "window": 5, "logprob_offset": 1}]'],
            "filters.0.logprob_offset = 1.0: has no effect with type: repetition; remove it",
        ),
        (["--filters", '[{"type": "repetition"}]'], "finds nothing: by sampling.max_tokens and seq_len no answer is"),
        (["--filters", '[{"type": "gibberish"}, {"type": "gibberish"}]'], "filters.1.type = 'gibberish': a second fil"),
        (["--filters", '[{"type": "rude"}]'], "filters.0.type = 'rude': Input should be 'gibberish' or 'repetition'"),
        (["stray"], "unexpected argument"),
    ],
)
def test_values_that_cannot_be_honoured_are_errors(orch_file: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(message)):
        load(OrchSettings, file=orch_file, arguments=["--batch_size", "8", *arguments])


API = "http://127.0.0.1:9/v1"
TWO = [{"name": "a"}, {"name": "b"}]


@pytest.mark.parametrize(
    ("channels", "message"),
    [
        ({"teacher_model": {}}, "teacher_model.model.name = None: is needed, or teacher_model.policy_every"),
        (
            {"teacher_model": {"policy_every": 0, "model": {"name": "m"}}},
            "teacher_model.model.name = 'm': has no effect with teacher_model.policy_every; remove one of the two",
        ),
        (
            {"teacher_model": {"policy_every": 5, "client": {"retries": 1}}},
            "teacher_model.client.retries = 1: has no effect with teacher_model.policy_every, where the run's own serv",
        ),
        ({"hints": {"sources": ["sibling", "sibling"]}}, "hints.sources = ('sibling', 'sibling'): names a source twic"),
        ({"hints": {"sources": []}}, "hints.sources = []: Tuple should have at least 1 item"),
        (
            {"hints": {"sources": ["environment"], "templates": "t.yaml"}},
            "hints.templates = 't.yaml': has no effect without the source templates; remove it, or add that to sources",
        ),
        (
            {"hints": {"sources": ["sibling"], "max_chars": 9}},
            "hints.max_chars = 9: has no effect with the source sibling alone; remove it",
        ),
        (
            {"hints": {"sibling_reward": 0.5}},
            "hints.sibling_reward = 0.5: has no effect without the source sibling; remove it, or add that to sources",
        ),
        ({"hints": {"sources": ["model"]}}, "hints.model = None: is needed with the source model"),
        ({"hints": {"model": {"name": "w"}}}, "has no effect without the source model"),
        (
            {"hints": {"sources": ["model"], "model": {"name": "w", "base_url": API}}},
            "hints.model.model = None: is needed with base_url; give the model's name there",
        ),
        (
            {"hints": {"sources": ["model"], "model": {"name": "w", "tool_role": "tool"}}},
            "hints.model.tool_role = 'tool': unknown key",
        ),
        ({"hints": {"sources": ["model"], "model": {"name": "w/x"}}}, "hints.model.name = 'w/x': String should match"),
        (
            {"preferences": {"pairs": "p.jsonl", "max_pairs": 3, "num_agreeing": 3}},
            "preferences.num_agreeing = 3: has no effect with preferences.pairs, where nobody is asked; remove it",
        ),
        (
            {"preferences": {"max_turns": 3}},
            "preferences.max_turns = 3: has no effect without preferences.teachers; name some",
        ),
        (
            {"preferences": {"teachers": [{"name": "a"}, {"name": "a"}]}},
            "are called ['a', 'a']; give each a name of its own",
        ),
        (
            {"preferences": {"teachers": TWO, "num_agreeing": 3}},
            "preferences.num_agreeing = 3: is more than the 2 teachers; lower it, or name more",
        ),
        (
            {"preferences": {"teachers": TWO, "agreement": "judge"}},
            "preferences.judge = None: is needed with preferences.agreement: judge",
        ),
        ({"preferences": {"teachers": TWO, "judge": {"name": "j"}}}, "has no effect without it"),
        (
            {"preferences": {"teachers": TWO, "agreement": "judge", "judge": {"name": "b"}}},
            "preferences.judge.name = 'b': is what a teacher is called too; give the judge a name of its own",
        ),
        (
            {"preferences": {"teachers": TWO, "agreement": "judge", "judge": {"name": "j", "tool_role": "tool"}}},
            "preferences.judge.tool_role = 'tool': unknown key",
        ),
        (
            {"preferences": {"teachers": TWO, "agreement": "judge", "judge": {"name": "j", "base_url": API}}},
            "preferences.judge.model = None: is needed with base_url",
        ),
        (
            {"preferences": {"teachers": TWO, "select": ["errors"], "low_reward_below": 0.5}},
            "preferences.low_reward_below = 0.5: has no effect without low_reward in preferences.select; remove it",
        ),
        (
            {"preferences": {"teachers": TWO, "max_cost": 5}},
            "preferences.max_cost = 5.0: has no effect where nobody has a price; give teachers theirs, or remove it",
        ),
        (
            {"preferences": {"teachers": [{"name": "a"}, {"name": "b", "base_url": API}]}},
            "preferences.teachers.1.model = None: is needed with base_url; give the model's name there",
        ),
        (
            {"preferences": {"teachers": [{"name": "a"}, {"name": "b", "api_key_var": "KEY"}]}},
            "preferences.teachers.1.api_key_var = 'KEY': has no effect without base_url: the run's own servers have",
        ),
    ],
)
def test_settings_of_what_else_the_policy_learns_from_that_cannot_be_honoured_are_errors(
    orch_file: Path, channels: dict[str, object], message: str
) -> None:
    orch_file.write_text(yaml.safe_dump(ORCH | channels))
    with pytest.raises(SettingsError) as error:
        load(OrchSettings, file=orch_file)
    [problem] = problems(error)
    assert message in problem


@pytest.mark.parametrize(
    "channels",
    [
        {"teacher_model": {"policy_every": 0}},
        {"teacher_model": {"model": {"name": "m"}, "client": {"retries": 1}}},
        {"hints": {"sources": ["sibling", "model"], "max_chars": 9, "model": {"name": "w", "model": "policy"}}},
        {"preferences": {"pairs": "p.jsonl", "max_pairs": 3}},
        {
            "preferences": {
                "teachers": [{"name": "a", "tool_role": "tool"}, {"name": "b"}],
                "agreement": "judge",
                "judge": {"name": "j", "price": {"prompt": 1}},
                "max_cost": 5,
            }
        },
    ],
)
def test_settings_of_what_else_the_policy_learns_from_that_agree_pass(
    orch_file: Path, channels: dict[str, object]
) -> None:
    orch_file.write_text(yaml.safe_dump(ORCH | channels))
    load(OrchSettings, file=orch_file)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--loss.sequence_clip_high", "5"], "loss.sequence_clip_high = 5.0: has no effect"),
        (["--loss.token_mask_low", "9"], "loss.token_mask_low = 9.0: must be below loss.token_mask_high = 8.0"),
        (["--loss.adv_tau", "0"], "the loss would be 0"),
        (["--lr_scheduler_type", "cosine"], "needs max_steps"),
        (["--max_steps", "3", "--warmup_steps", "3"], "warmup_steps = 3: must be below max_steps = 3"),
        (["--overwrite_output_dir", "true", "--run_id", "x"], "would remove the run that run_id joins"),
        (["--device", "cuda", "--num_threads", "2"], "num_threads = 2: has no effect with device: cuda"),
        (["--rollout_transport.port", "1"], "rollout_transport.port = 1: has no effect with rollout_transport.type"),
        (["--rollout_transport.hwm", "1"], "rollout_transport.hwm = 1: has no effect on the trainer"),
        (["--weight_broadcast.allow_rounding", "true"], "has no effect with weight_broadcast.format: adapter"),
        (["--weight_broadcast.max_shard_bytes", "9"], "has no effect with weight_broadcast.format: adapter"),
        (["--weight_broadcast.port", "9"], "has no effect with weight_broadcast.type: filesystem"),
        (["--weight_broadcast.format", "merged"], "with recipe: bf16 each update is rounded to 16 bits"),
        (["--weight_broadcast.type", "nccl"], "sends whole matrices, not adapters"),
        ([*NCCL, "--device", "cpu"], "sends from GPU to GPU, and device is cpu"),
        ([*NCCL, "--weight_broadcast.max_shard_bytes", "9"], "has no effect with weight_broadcast.type: nccl"),
        ([*NCCL, "--weight_broadcast.allow_rounding", "true"], "has no effect with recipe: fp32"),
        ([*NCCL, "--sleep_mode", "true"], "sleep_mode = True: is for one device, and weight_broadcast.type: nccl for"),
        ([*NCCL, "--lora_target_modules", '["q_proj"]'], "must have all of k_proj, q_proj, v_proj or none"),
        (["--optimizer", "sgd"], "optimizer = 'sgd': Input should be 'adamw_8bit', 'adamw', 'adamw_8bit_paged' or"),
        (["--loss.importance", "clip", "--loss.token_mask_low", "0.5"], "has no effect with loss.importance: clip"),
        (["--loss.importance", "clip", "--loss.ratio_type", "sequence"], "sequence ratios have loss.sequence_clip_hig"),
        (["--loss.sdpo.beta", "0.3"], "loss.sdpo.beta = 0.3: has no effect with loss.alpha_sdpo: 0"),
        (["--loss.dpo.beta", "0.3"], "has no effect with loss.beta_replay: 0"),
        (["--loss.alpha_sdpo", "1", "--loss.sdpo.ema_decay", "0.9"], "has no effect with loss.sdpo.teacher: current"),
        (["--lr_scheduler_type", "wsd"], "needs max_steps"),
        (["--decay_steps", "3"], "has no effect with lr_scheduler_type: constant"),
        (
            ["--lr_scheduler_type", "wsd", "--max_steps", "9", "--warmup_steps", "4", "--decay_steps", "6"],
            "decay_steps = 6: must be at most max_steps - warmup_steps = 5",
        ),
        (["--muon_momentum", "0.9"], "has no effect with optimizer: adamw_8bit"),
        (["--noise_scheduler.sigma_start", "0.1"], "has no effect with noise_scheduler.enabled: false"),
        (["--noise_scheduler.enabled", "true"], "needs max_steps of at least 10"),
        ([*NOISE, "--noise_scheduler.num_stages", "2"], "Input should be greater than or equal to 3"),
        ([*NOISE, "--noise_scheduler.sigma_end", "0.1"], "must not exceed sigma_start = 0.05"),
        (
            [*NOISE, "--recipe", "fp32", "--weight_broadcast.format", "merged"],
            "noise_scheduler.enabled = True: needs weight_broadcast.format: adapter, not merged",
        ),
        (["--ckpt.keep_last", "3", "--ckpt.interval", "null"], "has no effect without ckpt.interval"),
        (["--ckpt.keep_last", "null", "--ckpt.keep_interval", "4"], "has no effect without ckpt.keep_last"),
        (["--optimizer", "muon", "--adam_beta1", "0.5"], "adam_beta1 = 0.5: has no effect with optimizer: muon"),
        (
            ["--loss.adv_tau", "0", "--loss.alpha_sdpo", "1", "--loss.geo_mask_low", "0.5"],
            "loss.geo_mask_low = 0.5: has no effect with loss.adv_tau, kl_tau and teacher_tau 0",
        ),
        (["--ckpt.resume_step", "-1", "--overwrite_output_dir", "true"], "would remove the run that ckpt.resume_step"),
        (["--qlora_bnb", "true", "--qlora_fp8", "true"], "the base is held in one format"),
        (["--lora", "false"], "weight_broadcast.format = 'adapter': must be full with lora: false"),
        (["--lora", "false", "--lora_rank", "4"], "lora_rank = 4: has no effect with lora: false"),
        (["--lora", "false", "--qlora_fp4", "true"], "is for the frozen base of an adapter"),
        (["--weight_broadcast.format", "full"], "full is for lora: false"),
        (["--weight_broadcast.format", "merged", "--qlora_fp8", "true"], "cannot merge into a base that qlora_fp8"),
        (["--device", "cpu", "--optimizer", "adamw_8bit_paged"], "pages its state out of a GPU's memory"),
        (["--lora_adapters", '["a"]'], "has no effect with one name: one adapter is what there is without it"),
        (["--lora_adapters", '["a", "a"]'], "names an adapter twice"),
        (["--lora_adapters", '["a", "b/c"]'], "String should match pattern"),
        (["--lora_adapters", '["a", "b"]', *MERGED], "cannot all be merged into one base"),
        (["--lora_adapters", '["a", "b"]', "--lora", "false"], "lora_adapters = ('a', 'b'): has no effect"),
        (
            ["--lora_adapters", '["a", "b"]', "--noise_scheduler.enabled", "true", "--max_steps", "20"],
            "a version's noise is proved for one adapter",
        ),
        (["--zero_level", "3"], "has no effect with gpus: 1"),
        (
            ["--gpus", "2", "--zero_level", "3", "--qlora_fp8", "true"],
            "3 shares the base's weights out, which cannot be",
        ),
        (["--gpus", "2", "--zero_level", "3", *MERGED], "3 shares the base out, and versions are merged into it whole"),
        (["--colocate", "true", *MERGED], "colocate = True: needs weight_broadcast.format: adapter"),
        (
            ["--colocate", "true", "--lora", "false", "--weight_broadcast.format", "full"],
            "colocate = True: shares the frozen base of an adapter, and lora is false",
        ),
        (
            ["--colocate", "true", "--gpus", "2", "--zero_level", "3"],
            "colocate = True: shares the base whole, and zero_level 3 divides it",
        ),
    ],
)
def test_ineffective_and_contradicting_trainer_settings_are_errors(arguments: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(message)):
        load(TrainSettings, file=None, arguments=["--model", "m", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--enable_lora", "false", "--max_lora_rank", "8"],
            "max_lora_rank = 8: has no effect with enable_lora: false",
        ),
        (["--enable_auto_tool_choice", "true"], "set together with tool_call_parser"),
        (["--device", "cpu", "--gpu_memory_utilization", "0.5"], "has no effect with device: cpu"),
        (["--max_loras", "9", "--max_cpu_loras", "4"], "must not exceed max_cpu_loras = 4"),
        (["--norm_noise", "true", "--enable_lora", "false"], "norm_noise = True: needs enable_lora: true"),
        (["--weight_broadcast_type", "nccl"], "receives whole matrices, not adapters; set enable_lora: false"),
        (["--colocate", "true", "--enable_lora", "false"], "colocate = True: needs enable_lora: true"),
        (["--colocate", "true", "--tp", "2"], "colocate = True: lends whole weights, and tp = 2 servers have parts"),
        (["--colocate", "true", "--dp", "2", "--device", "cpu"], "lends one copy on a CPU, and dp = 2 servers have"),
        (["--weight_broadcast_type", "nccl", "--device", "cpu"], "receives from GPU to GPU, and device is cpu"),
        (
            ["--weight_broadcast_type", "nccl", "--enable_lora", "false", "--sleep_mode", "true"],
            "sleep_mode = True: is for one device, and weight_broadcast_type: nccl for several; use filesystem",
        ),
        (["--port", "0"], "port = '0': Input should be greater than or equal to 1"),
    ],
)
def test_ineffective_and_contradicting_server_settings_are_errors(arguments: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(message)):
        load(InferSettings, file=None, arguments=["--model", "m", *arguments])


def test_a_required_key_that_is_missing_says_how_to_give_it() -> None:
    with pytest.raises(SettingsError, match=r"model = None: required; set it in the file, or give --model"):
        load(TrainSettings, file=None)


def test_a_file_that_is_missing_or_no_mapping_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no such file"):
        load(TrainSettings, file=tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- a\n")
    with pytest.raises(SettingsError, match="holds a list, expected a mapping"):
        load(TrainSettings, file=tmp_path / "list.yaml")
    (tmp_path / "torn.yaml").write_text("a: [1,")
    with pytest.raises(SettingsError, match="cannot be read as YAML"):
        load(TrainSettings, file=tmp_path / "torn.yaml")


def test_a_key_that_stands_twice_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "orch.yaml"
    path.write_text("seed: 1\nsampling:\n  max_tokens: 5\nsampling:\n  temperature: 2\n")
    with pytest.raises(SettingsError, match=r"(?s)the key sampling stands twice; merge the two.*line 4"):
        load(OrchSettings, file=path)


def test_numbers_in_scientific_notation_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("model: m\nlearning_rate: 5e-7\n")  # YAML 1.1 reads 5e-7 as a text
    assert load(TrainSettings, file=path).settings.learning_rate == 5e-7


def test_null_on_the_command_line_means_none(orch_file: Path) -> None:
    orch_file.write_text(yaml.safe_dump(ORCH | {"max_steps": 5}))
    assert load(OrchSettings, file=orch_file, arguments=["--max_steps", "null"]).settings.max_steps is None


@pytest.mark.parametrize("cls", [TrainSettings, InferSettings, OrchSettings])
def test_every_key_has_a_docstring_that_help_prints(
    cls: type[TrainSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        load_settings(cls, ["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert exit_.value.code == 0
    for key, field in cls.model_fields.items():
        assert field.description, key
        assert f"--{key}" in text
        assert " ".join(field.description.split())[:40] in text
    assert all(key.split(".")[0] in cls.model_fields for key in known_keys(cls))


def test_dry_run_prints_settings_that_load_again(
    orch_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        load_settings(OrchSettings, [str(orch_file), "--dry-run", "--seed", "7"])
    printed = capsys.readouterr().out
    assert exit_.value.code == 0
    (tmp_path / "again.yaml").write_text(printed)
    again = load(OrchSettings, file=tmp_path / "again.yaml").settings
    assert again == load(OrchSettings, file=orch_file, arguments=["--seed", "7"]).settings
    assert dump(again) == printed


def test_bad_settings_end_a_program_with_status_2_and_every_problem(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        load_settings(TrainSettings, ["--modle", "x", "--seed", "y"])
    lines = capsys.readouterr().err.splitlines()
    assert exit_.value.code == 2
    assert len(lines) == 3
    assert all(line.startswith("error: ") for line in lines)


def test_the_nearest_key_is_found_by_its_last_part() -> None:
    assert nearest_key(OrchSettings, "max_tokens") == "sampling.max_tokens"
    assert nearest_key(OrchSettings, "zzzzzz") is None


def test_fewer_merged_versions_than_adapters_stay_on_disk_unless_the_setting_says_so() -> None:
    kept = {
        arguments: load(
            TrainSettings, file=None, arguments=["--model", "m", "--recipe", "fp32", *arguments]
        ).settings.weight_broadcast.of_publisher()["keep_last"]
        for arguments in (
            (),
            ("--weight_broadcast.format", "merged"),
            ("--weight_broadcast.format", "merged", "--weight_broadcast.keep_last", "5"),
        )
    }
    assert list(kept.values()) == [8, 2, 5]
