"""The embedded models: what `tools/make_tiny_models.py` promises of those that are committed."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from orchestrator.envs import arithmetic
from orchestrator.envs import reverse_text as reversing
from tools import make_tiny_models, teachers

CONFIGS = Path(__file__).parents[1] / "configs"
MODELS = {
    "quickstart": CONFIGS / "quickstart" / "model",
    "tiny": CONFIGS / "tiny" / "model",
    "hints": CONFIGS / "hints" / "model",
    "distillation": CONFIGS / "distillation" / "teacher",
}
IM_END = 258


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(MODELS["quickstart"])


@pytest.mark.parametrize("name", MODELS)
def test_it_is_small_plain_data_that_does_not_change_how_is_sampled(name: str) -> None:
    folder = MODELS[name]
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 2_000_000
    assert {file.suffix for file in folder.iterdir()} == {".jinja", ".json", ".safetensors"}
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        assert {weights.get_slice(key).get_dtype() for key in weights.keys()} == {"BF16"}  # noqa: SIM118
    sampling = json.loads((folder / "generation_config.json").read_text())
    assert not sampling.keys() & {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens"}
    tokenizers = {(one / "tokenizer.json").read_bytes() for one in MODELS.values()}
    assert len(tokenizers) == 1


@pytest.mark.parametrize("name", MODELS)
def test_it_can_do_its_tasks_and_has_something_left_to_learn(name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(MODELS[name], dtype=torch.float32)
    recipe = make_tiny_models.RECIPES[name]
    report = recipe.measure(make_tiny_models.Speaker(model=model, tokenizer=tokenizer))
    make_tiny_models.check(report, {key: (low - 0.1, high + 0.1) for key, (low, high) in recipe.bounds.items()})


@given(text=st.text())
@example(text="<|im_start|>user\n é 😀 \x00<|im_end|>")
def test_every_text_round_trips(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_ids_are_bytes_and_the_template_is_chatml_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer("é<|endoftext|><|im_start|><|im_end|>").input_ids == [*"é".encode(), 256, 257, IM_END]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Reverse: abc\n"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Reverse: abc\n<|im_end|>\n<|im_start|>assistant\n"
    )


def test_only_training_splits_are_taught() -> None:
    rng = random.Random(0)
    words = [teachers.teach_reversal(rng)[0]["content"].removeprefix("Reverse: ") for _ in range(200)]
    assert {reversing.split_of(word) for word in words} == {"train"}
    assert {arithmetic.split_of(teachers.arithmetic_problem(rng)) for _ in range(200)} == {"train"}


def test_only_what_the_assistant_says_and_its_end_is_learnt(tokenizer: PreTrainedTokenizerFast) -> None:
    said = [teachers.user("a"), teachers.assistant("bc"), {"role": "tool", "content": "d"}, teachers.assistant("e")]
    ids, labels = make_tiny_models.encoded(tokenizer, said)
    assert tokenizer.decode(ids) + "\n" == tokenizer.apply_chat_template(said, tokenize=False)
    assert [label for label in labels if label != -100] == [*b"bc", IM_END, *b"e", IM_END]
    # Every token has the probability 1/259 where all logits are equal.
    loss, num_tokens = make_tiny_models.answer_loss(Undecided(), tokenizer, [said, said[:2]])  # type: ignore[arg-type]
    assert num_tokens == 8
    assert loss.item() == pytest.approx(8 * torch.tensor(259.0).log().item(), rel=1e-5)


class Undecided:
    """A stand-in for the network, all of whose logits are equal."""

    def __call__(self, *, input_ids: torch.Tensor) -> Any:
        return type("Output", (), {"logits": torch.zeros(*input_ids.shape, 259)})
