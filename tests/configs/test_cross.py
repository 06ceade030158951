"""Contradictions across the three files."""

from pathlib import Path

import pytest
import yaml

from configs.common import load
from configs.cross import cross_check, joined_check, recorded
from configs.errors import SettingsError
from configs.infer import InferSettings
from configs.orch import OrchSettings
from configs.train import TrainSettings

TRAIN = {"model": "m"}
NOISE = {"max_steps": 20, "noise_scheduler": {"enabled": True}}
MERGED = {"recipe": "fp32", "weight_broadcast": {"format": "merged"}}
INFER = {"model": "m"}
LARGER = {"model": {"name": "larger"}}
ASKING = {"teachers": [{"name": "a"}, {"name": "b"}]}
SEVERAL = {
    "model": {"name": "m", "lora_adapters": ["solver", "proposer"]},
    "env": [{"id": "proposer-solver", "adapters": {"Proposer": "proposer"}}],
}
ORCH = {"model": {"name": "m"}, "env": [{"id": "reverse-text"}], "rollouts_per_example": 4}


def check(folder: Path, train: dict[str, object], infer: dict[str, object], orch: dict[str, object]) -> list[str]:
    for name, tree in (("train", TRAIN | train), ("infer", INFER | infer), ("orch", ORCH | orch)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(tree))
    try:
        cross_check(
            load(TrainSettings, file=folder / "train.yaml"),
            load(InferSettings, file=folder / "infer.yaml"),
            load(OrchSettings, file=folder / "orch.yaml"),
        )
    except SettingsError as error:
        return [str(problem).replace(f"{folder}/", "") for problem in error.problems]
    return []


def test_agreeing_files_pass(tmp_path: Path) -> None:
    assert check(tmp_path, {}, {}, {}) == []


@pytest.mark.parametrize(
    ("train", "infer", "orch", "message"),
    [
        ({}, {"model": "n"}, {}, "infer.yaml: model = 'n': must equal model = 'm' (train.yaml)"),
        ({}, {}, {"model": {"name": "n"}}, "orch.yaml: model.name = 'n': must equal model = 'm' (train.yaml)"),
        ({"output_dir": "x"}, {"output_dir": "./x"}, {"output_dir": "x"}, None),
        (
            {"output_dir": "x"},
            {"output_dir": "x"},
            {},
            "orch.yaml (default): output_dir = 'outputs/run_default': must equal output_dir = 'x' (train.yaml)",
        ),
        (
            {"sequence_len": 512},
            {},
            {},
            "orch.yaml (default): seq_len = 2048: must equal sequence_len = 512 (train.yaml)",
        ),
        (
            {"lora_rank": 8},
            {},
            {},
            "orch.yaml (default): model.lora_rank = 16: must equal lora_rank = 8 (train.yaml)",
        ),
        (
            {"lora_alpha": 64},
            {},
            {},
            "orch.yaml (default): model.lora_alpha = 32: must equal lora_alpha = 64 (train.yaml)",
        ),
        (
            {"lora_rank": 64},
            {},
            {"model": {"name": "m", "lora_rank": 64}},
            "infer.yaml (default): max_lora_rank = None: must be at least lora_rank = 64 (train.yaml); "
            "set max_lora_rank: 64",
        ),
        (
            {"max_steps": 3},
            {},
            {"max_steps": 4},
            "orch.yaml: max_steps = 4: must equal the trainer's max_steps = 3 (train.yaml), or set that to -1",
        ),
        (
            {"rollout_transport": {"type": "zmq"}},
            {},
            {},
            "orch.yaml (default): rollout_transport.type = 'filesystem': must equal rollout_transport.type = 'zmq' "
            "(train.yaml)",
        ),
        (
            {"rollout_transport": {"type": "zmq", "port": 5556}},
            {},
            {"rollout_transport": {"type": "zmq"}},
            "orch.yaml (default): rollout_transport.port = 5555: must equal rollout_transport.port = 5556 (train.yaml)",
        ),
        (
            {},
            {"enable_lora": False},
            {},
            "infer.yaml: enable_lora = False: must be true: policy versions are LoRA adapters",
        ),
        (
            MERGED,
            {"enable_lora": False},
            {},
            "orch.yaml (default): weight_broadcast.format = 'adapter': must equal weight_broadcast.format = 'merged' "
            "(train.yaml)",
        ),
        (MERGED, {"enable_lora": False}, {"weight_broadcast": {"format": "merged"}}, None),
        (
            {},
            {},
            {"buffer": {"skip_verification": True}},
            "orch.yaml: buffer.skip_verification = True: leaves nothing to learn from: rewards are 0, and so are the "
            "trainer's loss.teacher_tau, loss.alpha_sdpo and loss.beta_replay (train.yaml (default)); set one of them",
        ),
        ({"loss": {"teacher_tau": 1.0}}, {}, {"buffer": {"skip_verification": True}, "teacher_model": LARGER}, None),
        ({"loss": {"alpha_sdpo": 1.0}}, {}, {"buffer": {"skip_verification": True}}, None),
        (
            {"loss": {"beta_replay": 1.0}},
            {},
            {"buffer": {"skip_verification": True}, "preferences": ASKING | {"select": ["all"]}},
            None,
        ),
        (
            {},
            {},
            {"buffer": {"skip_verification": True}, "advantage": {"type": "custom", "import_path": "m:f"}},
            None,
        ),
        (
            MERGED,
            {},
            {"weight_broadcast": {"format": "merged"}},
            "infer.yaml (default): enable_lora = True: must be false with weight_broadcast.format = 'merged' "
            "(train.yaml): versions replace the server's own weights",
        ),
        (
            MERGED,
            {"enable_lora": False, "dtype": "bfloat16"},
            {"weight_broadcast": {"format": "merged"}},
            "infer.yaml: dtype = 'bfloat16': would round the trainer's float32 weights with weight_broadcast.format = "
            "'merged' (train.yaml); set dtype: float32",
        ),
        (
            {"recipe": "fp32", "weight_broadcast": {"type": "nccl", "format": "merged"}},
            {"enable_lora": False, "tp": 2, "weight_broadcast_type": "nccl"},
            {"weight_broadcast": {"type": "nccl", "format": "merged"}, "client": {"base_url": ["a", "b"]}},
            "train.yaml (default): weight_broadcast.inference_world_size = 1: must be 4: 2 servers of tp = 2 times "
            "dp = 1",
        ),
        (
            {},
            {"max_loras": 2},
            {},
            "infer.yaml: max_loras = 2: must be at least max_off_policy_steps + 2 = 10 (orch.yaml (default)), "
            "the versions in flight at once",
        ),
        (NOISE, {"norm_noise": True, "max_loras": 20}, {"max_steps": 20}, None),
        (
            NOISE,
            {"norm_noise": True, "max_loras": 19},
            {"max_steps": 20},
            "infer.yaml: max_loras = 19: must be at least 2 * (max_off_policy_steps + 2) = 20 (orch.yaml (default)), "
            "the versions in flight at once, each with and without noise",
        ),
        (
            {"lora_adapters": ["solver", "proposer"]},
            {"max_loras": 20},
            {},
            "orch.yaml (default): model.lora_adapters = (): must equal lora_adapters = ('solver', 'proposer') "
            "(train.yaml)",
        ),
        (
            {"lora_adapters": ["solver", "proposer"]},
            {"max_loras": 19},
            SEVERAL,
            "infer.yaml: max_loras = 19: must be at least 2 * (max_off_policy_steps + 2) = 20 (orch.yaml (default)), "
            "the versions in flight at once, each of 2 adapters",
        ),
        ({"lora_adapters": ["solver", "proposer"]}, {"max_loras": 20}, SEVERAL, None),
        (
            NOISE,
            {},
            {"max_steps": 20},
            "infer.yaml (default): norm_noise = False: must equal noise_scheduler.enabled = True (train.yaml)",
        ),
        (
            {},
            {"norm_noise": True, "max_loras": 20},
            {},
            "infer.yaml: norm_noise = True: must equal noise_scheduler.enabled = False (train.yaml (default))",
        ),
        (
            {},
            {"max_model_len": 32},
            {"sampling": {"max_tokens": 64}},
            "infer.yaml: max_model_len = 32: must exceed sampling.max_tokens = 64 (orch.yaml)",
        ),
        (
            {"sleep_mode": True},
            {"sleep_mode": True},
            {},
            "orch.yaml (default): sleep_mode = False: must equal the trainer's sleep_mode = True (train.yaml); set "
            "it for all three programs, or for none",
        ),
        (
            {"sleep_mode": True, "loss": {"beta_replay": 0.5}},
            {"sleep_mode": True},
            {"sleep_mode": True, "max_async_level": 0, "preferences": ASKING},
            "orch.yaml: sleep_mode = True: preferences asks a, b on the run's servers, while these sleep; "
            "give each a base_url, or remove sleep_mode",
        ),
        (
            {},
            {"api_key_var": "KEY"},
            {},
            "orch.yaml (default): client.api_key_var = 'VLLM_API_KEY': must equal api_key_var = 'KEY' (infer.yaml)",
        ),
    ],
)
def test_a_contradiction_names_both_files_keys_and_values(
    tmp_path: Path, train: dict[str, object], infer: dict[str, object], orch: dict[str, object], message: str | None
) -> None:
    assert check(tmp_path, train, infer, orch) == ([] if message is None else [message])


IN_PLACE: dict[str, object] = {"enable_lora": False}
TAUGHT_BY_ITSELF = {"teacher_model": {"policy_every": 10}}
WRITER = {"sources": ["model"], "model": {"name": "w"}}
REPLACED = (
    "needs the base model on the run's servers, and weight_broadcast.format = 'merged' (train.yaml) replaces it; use "
    "adapter"
)


@pytest.mark.parametrize(
    ("train", "infer", "orch", "message"),
    [
        (
            {"loss": {"teacher_tau": 0.5}},
            {},
            {},
            "orch.yaml (default): teacher_model = None: is needed with the trainer's loss.teacher_tau = 0.5 "
            "(train.yaml); name a teacher, or set that to 0",
        ),
        (
            {"loss": {"beta_replay": 0.5}},
            {},
            {},
            "orch.yaml (default): preferences.teachers = (): are needed with the trainer's loss.beta_replay = 0.5 "
            "(train.yaml); name some, or set that to 0",
        ),
        ({"loss": {"beta_replay": 0.5}}, {}, {"preferences": {"pairs": "pairs.jsonl"}}, None),
        ({"loss": {"alpha_sdpo": 0.5}}, {}, {}, None),
        ({}, {}, {"teacher_model": LARGER, "hints": {"max_per_sample": 1}, "preferences": ASKING}, None),
        (
            MERGED | {"loss": {"teacher_tau": 0.5}},
            IN_PLACE,
            {"teacher_model": {"policy_every": 0}},
            f"orch.yaml: teacher_model.policy_every = 0: {REPLACED}",
        ),
        (MERGED | {"loss": {"teacher_tau": 0.5}}, IN_PLACE, {"teacher_model": LARGER}, None),
        (MERGED, IN_PLACE, TAUGHT_BY_ITSELF, None),
        (
            MERGED | {"loss": {"alpha_sdpo": 0.5}},
            IN_PLACE,
            {"hints": WRITER},
            f"orch.yaml (default): hints.model.base_url = None: {REPLACED}, or name another API or model",
        ),
        (MERGED, IN_PLACE, {"hints": WRITER}, None),
        (MERGED | {"loss": {"beta_replay": 0.5}}, IN_PLACE, {"preferences": {"pairs": "pairs.jsonl"}}, None),
        (MERGED, IN_PLACE, {"preferences": ASKING}, None),
        ({"loss": {"teacher_tau": 0.5}}, {"max_loras": 11}, TAUGHT_BY_ITSELF, None),
        (
            {"loss": {"teacher_tau": 0.5}},
            {"max_loras": 10},
            TAUGHT_BY_ITSELF,
            "infer.yaml: max_loras = 10: must be at least max_off_policy_steps + 3 = 11 (orch.yaml (default)), the "
            "versions in flight at once, with an earlier one that teaches",
        ),
        (
            NOISE | {"loss": {"teacher_tau": 0.5}},
            {"norm_noise": True, "max_loras": 21},
            TAUGHT_BY_ITSELF | {"max_steps": 20},
            "infer.yaml: max_loras = 21: must be at least 2 * (max_off_policy_steps + 3) = 22 (orch.yaml (default)), "
            "the versions in flight at once, with an earlier one that teaches, each with and without noise",
        ),
        ({"loss": {"teacher_tau": 0.5}}, {}, {"teacher_model": {"policy_every": 0}}, None),
        ({}, {}, TAUGHT_BY_ITSELF, None),
    ],
)
def test_what_a_weight_in_the_loss_needs_is_there_and_a_weight_of_0_needs_nothing(
    tmp_path: Path, train: dict[str, object], infer: dict[str, object], orch: dict[str, object], message: str | None
) -> None:
    if train.get("weight_broadcast"):
        orch = {"weight_broadcast": {"format": "merged"}} | orch
    assert check(tmp_path, train, infer, orch) == ([] if message is None else [message])


def test_teachers_that_disagree_need_the_base_model_as_their_reference(tmp_path: Path) -> None:
    train: dict[str, object] = {**MERGED, "loss": {"beta_replay": 0.5}}
    orch: dict[str, object] = {"weight_broadcast": {"format": "merged"}, "preferences": ASKING}
    [problem] = check(tmp_path, train, IN_PLACE, orch)
    assert problem.startswith("orch.yaml: preferences.teachers = (TeacherApiSettings(")
    assert problem.endswith(f": {REPLACED}")


def joined(train: dict[str, object], orch: dict[str, object]) -> list[str]:
    """What `joined_check` says of settings as programs record them."""
    ours = OrchSettings.model_validate(ORCH | orch).model_dump(mode="json")
    theirs = TrainSettings.model_validate(TRAIN | train).model_dump(mode="json")
    try:
        joined_check(recorded(TrainSettings, theirs), recorded(OrchSettings, ours))
    except SettingsError as error:
        return [str(problem) for problem in error.problems]
    return []


def test_programs_that_have_joined_a_run_must_do_the_same_work() -> None:
    assert joined({"max_steps": 5, "rollout_transport": {"type": "zmq"}, "lora_rank": 8}, {"max_steps": 10}) == [
        "run.json (orch): model.lora_rank = 16: must equal lora_rank = 8 (run.json (train))",
        "run.json (orch): rollout_transport.type = 'filesystem': must equal rollout_transport.type = 'zmq' "
        "(run.json (train))",
        "run.json (orch): max_steps = 10: must equal the trainer's max_steps = 5 (run.json (train)), or set that to -1",
    ]


def test_programs_that_have_joined_a_run_may_have_other_names_for_its_folder_model_and_address() -> None:
    zmq = {"type": "zmq", "port": 6000}
    assert not joined(
        {"model": "/a/m", "output_dir": "/a", "rollout_transport": zmq | {"host": "10.0.0.2", "key_var": "KEY"}},
        {"output_dir": "/b", "rollout_transport": zmq | {"host": "0.0.0.0"}},
    )


def test_recorded_settings_of_another_release_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"run\.json \(train\): settings = .*not settings of this release of grpo"):
        recorded(TrainSettings, {"model": "m", "novelty": 1})
