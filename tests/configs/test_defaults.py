"""Defaults that follow from the device, the model and each other, where the person has set nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from grpo.configs.defaults import GIB
from grpo.configs.errors import Problem, SettingsError
from grpo.configs.facts import Hardware, model_facts, planned_hardware
from grpo.configs.loading import load
from grpo.configs.run import PRESETS, LoadedRun, load_run
from grpo.configs.train import TrainSettings

CPU, GPU, GPUS = Hardware(), Hardware(gpus=("0",)), Hardware(gpus=("0", "1"))
QUICKSTART = str(PRESETS / "quickstart" / "model")
ORCH: dict[str, Any] = {"env": [{"id": "reverse-text"}]}
QWEN3_4B = {
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "dtype": "bfloat16",
}


def run_of(folder: Path, *arguments: str, hardware: Hardware = CPU, **changes: Any) -> LoadedRun:
    (folder / "run.yaml").write_text(yaml.safe_dump({"model": "m", "orch": ORCH} | changes))
    return load_run(folder, arguments, hardware=hardware)


def problems(*arguments: Any, **changes: Any) -> list[Problem]:
    with pytest.raises(SettingsError) as caught:
        run_of(*arguments, **changes)
    return caught.value.problems


def lengths(run: LoadedRun) -> tuple[int, int, int | None]:
    """Of samples, micro-batches and the server's sequences; the programs must say the same."""
    train, orch = run.train.settings, run.orch.settings
    assert (train.sequence_len, train.micro_batch_tokens) == (orch.seq_len, orch.micro_batch_tokens)
    return train.sequence_len, train.pack_tokens, run.infer.settings.max_model_len


def model_in(folder: Path, num_bytes: int, **changes: Any) -> Path:
    """A model's folder with weights of that size, which take no space on the disk."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_4B | changes))
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(num_bytes)
    return folder


@pytest.mark.parametrize(
    ("hardware", "words", "recipe", "dtype"),
    [
        (CPU, (), "fp32", "float32"),
        (GPU, (), "bf16", "bfloat16"),
        (GPU, ("--device", "cpu"), "fp32", "float32"),
        (CPU, ("--device", "cuda"), "bf16", "bfloat16"),
        (CPU, ("--train.recipe", "bf16"), "bf16", "bfloat16"),
        (GPU, ("--train.recipe", "fp8_hybrid"), "fp8_hybrid", "bfloat16"),
        (GPU, ("--train.recipe", "fp32"), "fp32", "float32"),
    ],
)
def test_a_gpu_computes_in_bfloat16_a_cpu_in_float32_and_the_server_as_the_trainer(
    tmp_path: Path, hardware: Hardware, words: tuple[str, ...], recipe: str, dtype: str
) -> None:
    run = run_of(tmp_path, *words, hardware=hardware)
    assert (run.train.settings.recipe, run.infer.settings.dtype) == (recipe, dtype)


def test_a_trainer_alone_has_the_type_of_its_device(tmp_path: Path) -> None:
    for device, recipe in (("cpu", "fp32"), ("cuda", "bf16")):
        (tmp_path / "train.yaml").write_text(yaml.safe_dump({"model": "m", "device": device}))
        assert load(TrainSettings, file=tmp_path / "train.yaml").settings.recipe == recipe


def test_each_kind_of_training_has_its_own_learning_rate_and_optimizer(tmp_path: Path) -> None:
    def chosen(*words: str) -> tuple[float, str]:
        train = run_of(tmp_path, *words).train.settings
        return train.learning_rate, train.optimizer

    assert chosen() == (2e-5, "adamw")
    assert chosen("--lora", "false") == (1e-6, "adamw_8bit")
    assert chosen("--lora", "false", "--train.learning_rate", "3e-6", "--train.optimizer", "muon") == (3e-6, "muon")
    [problem] = problems(tmp_path, "--lora=perhaps")
    assert problem.key == "lora"


@pytest.mark.parametrize(
    ("hardware", "words", "expected"),
    [
        (CPU, (), (2048, 2048, 2048)),
        (GPU, (), (8192, 16384, 8192)),
        (GPU, ("--sequence_len", "32000"), (32000, 32000, 32000)),
        (GPU, ("--micro_batch_tokens", "9000"), (8192, 9000, 8192)),
        (GPU, ("--infer.max_model_len", "4096"), (8192, 16384, 4096)),
        (CPU, ("--max_tokens", "4096"), (5120, 5120, 5120)),
        (GPU, ("--max_tokens", "16384"), (17408, 17408, 17408)),
        (GPU, ("--max_tokens", "16384", "--orch.buffer.max_prompt_length", "256"), (16640, 16640, 16640)),
        (GPU, ("--orch.eval.sampling.max_tokens", "16384"), (17408, 17408, 17408)),
    ],
)
def test_lengths_follow_from_the_device_and_the_longest_answer(
    tmp_path: Path, hardware: Hardware, words: tuple[str, ...], expected: tuple[int, int, int]
) -> None:
    assert lengths(run_of(tmp_path, *words, hardware=hardware)) == expected


def test_a_longer_answer_raises_a_presets_lengths_and_says_so_and_none_that_a_person_set(tmp_path: Path) -> None:
    before, raised = load_run("gsm8k", hardware=GPUS), load_run("gsm8k", ["--max_tokens", "4096"], hardware=GPUS)
    assert not before.notes
    assert lengths(before) == (8192, 16384, 2048)
    assert lengths(raised) == (8192, 16384, 4608)  # the preset's prompts have up to 512 tokens
    [line] = raised.notes
    assert "max_model_len 4,608" in line
    assert "4,096" in line
    assert lengths(load_run("gsm8k", ["--max_tokens", "9000"], hardware=GPUS)) == (9512, 16384, 9512)
    [problem] = problems(tmp_path, "--max_tokens", "4096", infer={"max_model_len": 2048})
    assert problem.key == "infer.max_model_len"
    [problem] = problems(tmp_path, "--max_tokens", "4096", sequence_len=2048)
    assert problem.key == "max_tokens"


def test_no_length_exceeds_what_the_model_reads(tmp_path: Path) -> None:
    model = str(model_in(tmp_path / "model", GIB, max_position_embeddings=3000))
    assert lengths(run_of(tmp_path, model=model, hardware=GPU)) == (3000, 16384, 3000)
    assert lengths(run_of(tmp_path, "--max_tokens", "2800", model=model, hardware=GPU))[0] == 3000
    assert lengths(run_of(tmp_path, model=QUICKSTART)) == (512, 2048, 512)
    assert lengths(run_of(tmp_path, "--sequence_len", "400", model=QUICKSTART)) == (400, 400, 400)
    [problem] = problems(tmp_path, "--max_tokens", "3000", model=model)
    assert (problem.key, "3,000" in problem.message) == ("max_tokens", True)


def test_what_is_known_of_a_model_is_read_from_its_folder(tmp_path: Path) -> None:
    found = model_facts(str(model_in(tmp_path / "model", 8 * GIB)))
    assert found is not None
    assert (found.positions, found.num_values) == (40960, 4 * GIB)
    assert found.cache_values == 2 * 36 * 8 * 128  # keys and values, layers, heads, their size
    stretched = model_in(tmp_path / "long", 8 * GIB, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    assert getattr(model_facts(str(stretched)), "positions", 0) is None
    (tmp_path / "model" / "consolidated.safetensors").write_bytes(bytes(100))
    assert model_facts(str(tmp_path / "model")) == found
    assert model_facts(str(tmp_path)) is model_facts(None) is None


def test_a_model_of_the_hub_is_known_once_it_is_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert model_facts("some/model") is None
    run = load_run(None, ["--model", "some/model", "--env", "reverse-text", "--seed", "7"], hardware=GPU)
    assert lengths(run) == (8192, 16384, 8192)
    cached = tmp_path / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots").mkdir()
    model_in(cached / "snapshots" / "abc", GIB, max_position_embeddings=4096)
    again = load_run(*run.source, hardware=run.hardware)
    assert lengths(again) == (4096, 16384, 4096)
    assert again.train.settings.seed == 7


@pytest.mark.parametrize(
    ("changes", "positions"),
    [
        ({"sliding_window": 512}, 512),
        ({"sliding_window": 512, "use_sliding_window": False}, 40960),
        ({"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]}, 512),
        ({"sliding_window": 512, "layer_types": ["full_attention"]}, 40960),
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096}, 4096),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096}}, 4096),
    ],
)
def test_lengths_stay_below_what_the_trainer_computes_as_a_server_does(
    tmp_path: Path, changes: dict[str, Any], positions: int
) -> None:
    model = str(model_in(tmp_path / "model", GIB, **changes))
    found = model_facts(model)
    assert found is not None
    assert found.positions == positions
    assert lengths(run_of(tmp_path, model=model, hardware=GPU))[0] == min(positions, 8192)


def test_lengths_fit_into_the_memory_or_are_refused_with_figures(tmp_path: Path) -> None:
    model = str(model_in(tmp_path / "model", 8 * GIB))  # 144 KiB of cache a token, 1.125 GiB of 8,192

    def run(gpu_gib: float, *words: str, gpus: tuple[str, ...] = ("0",)) -> LoadedRun:
        hardware = Hardware(gpus=gpus, gpu_bytes=int(gpu_gib * GIB))
        return run_of(tmp_path, *words, model=model, hardware=hardware)

    assert lengths(run(20))[0] == 8192  # two bases of 8, 2 besides
    assert lengths(run(18.6))[0] == 4096
    assert lengths(run(11.2, "--colocate"))[0] == lengths(run(11.2, gpus=("0", "1")))[0] == 8192
    with pytest.raises(SettingsError) as caught:
        run(20, "--max_tokens", "16384")
    [problem] = caught.value.problems
    assert problem.key == "max_tokens"
    assert all(figure in problem.message for figure in ("17,408", "2.39 GiB", "8.00 GiB", "20.00 GiB"))
    with pytest.raises(SettingsError, match="--colocate"):
        run(17)
    with pytest.raises(SettingsError, match="this machine"):
        run_of(tmp_path, model=model, hardware=Hardware(main_bytes=24 * GIB))  # float32, twice


def test_a_dry_run_can_be_made_for_gpus_that_are_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo.configs.facts.visible_gpus", lambda *_: ())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert planned_hardware().gpus == ("0", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert planned_hardware().gpus == ()
