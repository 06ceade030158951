"""The presets for real models, planned for GPUs that are made up. docs/memory.md has their memory."""

from typing import Any

import pytest
from grpo.configs.facts import Hardware, planned_hardware
from grpo.configs.run import load_run
from grpo.deploy.plan import Plan, resolve

from tests.grpo.run_folder import grpo

ONE_GPU = ("gsm8k", "math", "mbpp", "reverse_text")


def plan(preset: str, num_gpus: int, *words: str) -> Plan:
    return resolve(load_run(preset, words, hardware=Hardware(gpus=tuple(map(str, range(num_gpus))))))


@pytest.mark.parametrize(
    ("preset", "num_gpus", "gpus", "expected"),
    [
        ("qwen3_4b_gsm8k", 1, {}, {"splits": True, "learning_rate": 2e-5, "optimizer": "adamw"}),
        ("qwen3_8b_math", 2, {"infer": 1, "train": 1}, {"splits": False, "learning_rate": 2e-5, "optimizer": "adamw"}),
        (
            "llama3_8b_all_weights",
            8,
            {"infer": 4, "train": 4},
            {"splits": False, "learning_rate": 1e-6, "optimizer": "adamw_8bit"},
        ),
    ],
)
def test_a_presets_defaults_are_those_of_its_gpus(
    preset: str, num_gpus: int, gpus: dict[str, int], expected: dict[str, Any]
) -> None:
    found = plan(preset, num_gpus)
    assert {role: len(names) for role, names in found.gpus.items()} == gpus
    train, orch = found.train, found.orch
    got = {"splits": found.splits, "learning_rate": train.learning_rate, "optimizer": train.optimizer}
    assert got == expected
    assert (train.recipe, found.infer.dtype) == ("bf16", "bfloat16")
    assert (train.sequence_len, train.pack_tokens, orch.pack_tokens) == (8192, 16384, 16384)
    assert found.infer.max_model_len == 8192


@pytest.mark.parametrize("preset", ONE_GPU)
def test_a_small_presets_one_gpu_is_divided_by_a_measurement_and_two_are_given_whole(preset: str) -> None:
    one, two = plan(preset, 1), plan(preset, 2)
    assert (one.splits, one.gpus) == (True, {})
    assert (two.splits, two.gpus) == (False, {"infer": ("0",), "train": ("1",)})
    assert two.infer.gpu_memory_utilization == 0.9


def test_a_dry_run_says_how_one_gpu_would_be_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    if planned_hardware().gpus != ("0",):
        pytest.skip("the first GPU of this machine cannot be had")
    shown = grpo("qwen3_4b_gsm8k", "--dry-run")
    assert shown.returncode == 0
    assert "one GPU for server and trainer" in shown.stdout
    assert "micro_batch_tokens: 16384" in shown.stdout
