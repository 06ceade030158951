"""The committed model of the quickstart: what `configs/quickstart/make_model.py` promises of it."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from configs.quickstart import make_model
from orchestrator.envs import _reverse_words as task

MODEL = Path(make_model.__file__).parent / "model"
BYTES = 256
END_OF_TEXT, IM_START, IM_END = 256, 257, 258


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(MODEL)


# --- the folder ---


def test_it_is_small_enough_to_commit() -> None:
    assert sum(file.stat().st_size for file in MODEL.iterdir()) <= 2_000_000


def test_it_holds_plain_data_only() -> None:
    assert {file.name for file in MODEL.iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_weights_are_stored_as_bfloat16_and_load_as_float32() -> None:
    with safe_open(MODEL / "model.safetensors", framework="pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118
    assert AutoModelForCausalLM.from_pretrained(MODEL).dtype == torch.float32


def test_its_generation_config_does_not_change_how_is_sampled() -> None:
    settings = json.loads((MODEL / "generation_config.json").read_text())
    assert not settings.keys() & {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens"}
    assert settings["eos_token_id"] == IM_END


# --- the tokenizer ---


@given(text=st.text())
@example(text="<|im_start|>user\n é 😀 \x00<|im_end|>")
def test_every_text_round_trips(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@given(text=st.text().filter(lambda text: not any(token in text for token in make_model.SPECIAL_TOKENS)))
def test_ids_of_plain_text_are_the_bytes_of_utf_8(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer(text).input_ids == list(text.encode())


def test_special_tokens_come_after_the_bytes(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer("<|endoftext|><|im_start|><|im_end|>").input_ids == [END_OF_TEXT, IM_START, IM_END]
    assert tokenizer.eos_token_id == IM_END
    assert tokenizer.pad_token_id == END_OF_TEXT
    assert len(tokenizer) == BYTES + 3


def test_chat_template_renders_chatml_and_adds_nothing_of_its_own(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Reverse: abc\n"},
        {"role": "assistant", "content": "cba"},
        {"role": "user", "content": "Again."},
    ]
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n Reverse: abc\n<|im_end|>\n"
        "<|im_start|>assistant\ncba<|im_end|>\n"
        "<|im_start|>user\nAgain.<|im_end|>\n"
    )
    assert tokenizer.apply_chat_template(messages, tokenize=False) == expected
    prompted = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompted == expected + "<|im_start|>assistant\n"


# --- what it knows ---


def test_it_solves_between_a_quarter_and_a_half_of_held_out_words(tokenizer: PreTrainedTokenizerFast) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    words = task.words(0, 200, 3, 8, "eval")
    accuracy = make_model.greedy_accuracy(model, tokenizer, words)
    assert 0.25 <= accuracy <= 0.5


def test_sampling_finds_right_answers_to_words_that_greedy_decoding_gets_wrong(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    words = task.words(0, 16, 8, 8, "eval")
    torch.manual_seed(0)
    texts = make_model.generate(model, tokenizer, words * 16, do_sample=True, temperature=1.0, top_k=0)
    found = {word for text, word in zip(texts, words * 16, strict=True) if task.is_correct(text, word)}
    assert len(found) >= 4  # of 16 words, in groups of 16; none of them greedily


# --- how it was made ---


def test_pre_training_sees_training_words_only() -> None:
    taught = [word for batch in make_model.taught_batches(seed=0) for word, _ in batch]
    assert len(taught) == make_model.NUM_STEPS * make_model.BATCH_SIZE
    assert {task.split_of(word) for word in taught} == {"train"}


def test_the_careless_teacher_gives_up_or_swaps_neighbours_and_is_right_otherwise() -> None:
    # "abcdefgh" → "hgfedcba"; right with probability (1 - 0.7) * (1 - 0.4) = 0.18
    rng = random.Random(0)
    answers = [make_model.careless_answer("abcdefgh", rng) for _ in range(2000)]
    assert {len(answer) for answer in answers} == {4, 8}
    assert 0.65 < sum(len(answer) == 4 for answer in answers) / 2000 < 0.75
    assert 0.14 < answers.count("hgfedcba") / 2000 < 0.22
    assert {answer for answer in answers if len(answer) == 4} == {"hgfe", "ghfe", "hfge", "hgef"}


def test_only_answers_and_their_end_carry_loss(tokenizer: PreTrainedTokenizerFast) -> None:
    # 20 nats against 258 tokens at 0: -log p is 258 / e^20 < 1e-6 where the fake is right, and 20 where it is wrong.
    model = RightHere(tokenizer("cba<|im_end|>").input_ids)
    assert make_model.answer_loss(model, tokenizer, [("abc", "cba")]).item() == pytest.approx(0, abs=1e-5)
    # One of the four tokens (c, b, b, the end) is wrong: 20 / 4.
    assert make_model.answer_loss(model, tokenizer, [("abc", "cbb")]).item() == pytest.approx(5, abs=1e-4)


class RightHere:
    """A stand-in for the network: sure of `ids` as the last tokens of a row, and of id 0 elsewhere."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = torch.tensor(ids)

    def __call__(self, *, input_ids: torch.Tensor, labels: torch.Tensor, **_: torch.Tensor) -> "RightHere":
        predicted = torch.zeros_like(input_ids)
        predicted[:, -len(self.ids) :] = self.ids
        logits = 20.0 * torch.nn.functional.one_hot(predicted, BYTES + 3).float()
        self.loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return self


def test_help_answers_without_loading_what_is_heavy() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "configs.quickstart.make_model", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=MODEL.parents[2])
    assert "--seed" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "argparse" in imported
    assert imported.isdisjoint({"torch", "transformers", "vllm"})
