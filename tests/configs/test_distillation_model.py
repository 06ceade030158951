"""The committed teacher of the distillation preset: what `configs/distillation/make_teacher.py` promises of it."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from configs.distillation import make_teacher
from configs.quickstart import make_model as quickstart
from orchestrator.envs import _reverse_words as task

MODEL = Path(make_teacher.__file__).parent / "teacher"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def test_it_is_small_enough_to_commit_and_holds_plain_data_only() -> None:
    assert sum(file.stat().st_size for file in MODEL.iterdir()) <= 2_000_000
    assert {file.name for file in MODEL.iterdir()} == {file.name for file in make_teacher.PUPIL.iterdir()}


def test_all_but_its_weights_are_the_students() -> None:
    for file in MODEL.iterdir():
        same = file.read_bytes() == (make_teacher.PUPIL / file.name).read_bytes()
        assert same == (file.name != "model.safetensors")


def test_it_reverses_nearly_all_words_that_it_was_not_taught(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert quickstart.greedy_accuracy(model, tokenizer, task.words(2, 200, 3, 8, "eval")) >= 0.95


def test_it_is_taught_right_answers_to_training_words_only() -> None:
    taught = [pair for batch in make_teacher.taught_batches(seed=0) for pair in batch]
    assert len(taught) == make_teacher.NUM_STEPS * make_teacher.BATCH_SIZE
    assert {task.split_of(word) for word, _ in taught} == {"train"}
    assert all(task.is_correct(answer, word) for word, answer in random.Random(0).sample(taught, 200))


def test_the_learning_rate_rises_and_falls() -> None:
    # 2e-3 · 1 / 20; the peak at step 20; 2e-3 · (200 - 110 + 1) / 180; 2e-3 / 180
    rates = [make_teacher.learning_rate(step) for step in (1, 20, 110, 200)]
    assert rates == pytest.approx([1e-4, 2e-3, 1.0111e-3, 1.1111e-5], rel=1e-4)


def test_a_teacher_that_is_not_good_enough_is_refused() -> None:
    make_teacher.check_accuracy(0.95)
    with pytest.raises(ValueError, match=r"greedy accuracy is 0\.9, expected at least 0\.95: try another --seed"):
        make_teacher.check_accuracy(0.9)
