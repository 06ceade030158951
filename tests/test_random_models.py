"""Tiny models of published families: what tells one family's tokenizer, template and ends from another's is there."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tools.random_models import FAMILIES, make_family

CONVERSATION = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 3?"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "Sure?"},
)
WRITTEN = {
    "qwen3": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 3?<|im_end|>\n"
        "<|im_start|>assistant\n5<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    ),
    "llama3": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
        "Today Date: 26 Jul 2024\n\nBe brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n2 + 3?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n5<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nSure?"
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "gemma3": (
        "<bos><start_of_turn>user\nBe brief.\n\n2 + 3?<end_of_turn>\n<start_of_turn>model\n5<end_of_turn>\n"
        "<start_of_turn>user\nSure?<end_of_turn>\n<start_of_turn>model\n"
    ),
    "phi4": "<|system|>Be brief.<|end|><|user|>2 + 3?<|end|><|assistant|>5<|end|><|user|>Sure?<|end|><|assistant|>",
    "lfm2": (
        "<|startoftext|><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 3?<|im_end|>\n"
        "<|im_start|>assistant\n5<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, make_family(tmp_path_factory.mktemp(request.param), request.param)


def asked(tokenizer: Any, messages: Any, **arguments: object) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **arguments)


def test_a_family_has_its_shape_and_its_ends(made: tuple[str, Path]) -> None:
    name, folder = made
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == FAMILIES[name].model_type
    assert 200_000 < sum(parameter.numel() for parameter in model.parameters()) < 900_000
    ends = tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id)
    assert set(ends) == set(FAMILIES[name].ends)
    assert len(tokenizer) <= model.config.vocab_size


def test_a_family_writes_texts_and_conversations_as_published(made: tuple[str, Path]) -> None:
    name, folder = made
    tokenizer, plain = AutoTokenizer.from_pretrained(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    text = "Grüße: 12,345 eggs 😀?\n  The rest"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert plain(text).input_ids == ids
    assert (ids[0] == tokenizer.bos_token_id) is FAMILIES[name].adds_bos
    assert asked(tokenizer, CONVERSATION, date_string="26 Jul 2024") == WRITTEN[name]


def test_qwen3_thinks_unless_it_is_told_not_to_and_forgets_earlier_thoughts(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_family(tmp_path, "qwen3"))
    question = [CONVERSATION[1]]
    assert asked(tokenizer, question, enable_thinking=False) == asked(tokenizer, question) + "<think>\n\n</think>\n\n"
    thought = [CONVERSATION[1], {"role": "assistant", "content": "<think>\n2 and 3\n</think>\n\n5"}, CONVERSATION[3]]
    assert asked(tokenizer, thought) == asked(tokenizer, CONVERSATION[1:])
    assert "2 and 3" in tokenizer.apply_chat_template(thought[:2], tokenize=False)
