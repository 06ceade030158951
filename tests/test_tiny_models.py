"""The embedded models: what `tools/make_tiny_models.py` promises of those that are committed.

That they can do something of their tasks, and have something left to learn, is seen by the runs of tests/e2e."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoTokenizer, PreTrainedTokenizerFast

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
