"""The committed tiny model: what `configs/tiny/make_model.py` promises of it."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from configs.quickstart import make_model as quickstart
from configs.tiny import make_model, teachers
from orchestrator.envs import arithmetic
from orchestrator.envs.critique import operators
from orchestrator.envs.zorplex import task as zorplex

MODEL = Path(make_model.__file__).parent / "model"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def test_it_is_small_enough_to_commit_and_holds_plain_data_only() -> None:
    assert sum(file.stat().st_size for file in MODEL.iterdir()) <= 2_000_000
    plain = Path(quickstart.__file__).parent / "model"
    assert {file.name for file in MODEL.iterdir()} == {file.name for file in plain.iterdir()}


def test_its_tokenizer_and_template_are_the_quickstarts() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        plain = Path(quickstart.__file__).parent / "model"
        assert (MODEL / name).read_bytes() == (plain / name).read_bytes()


# --- what it knows ---


def test_it_does_about_half_of_held_out_arithmetic(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    problems = arithmetic.problems(1, 100, "+-", make_model.MAX_OPERAND, "eval")
    assert 0.3 <= make_model.arithmetic_accuracy(model, tokenizer, problems, 0.0) <= 0.7


def test_it_answers_less_than_half_of_questions_about_words_that_it_was_not_taught(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    questions = zorplex.questions(1, 40, "medium", "eval")
    assert 0.15 <= make_model.zorplex_accuracy(model, tokenizer, questions, 0.0) <= 0.6


# --- how it was made ---


def test_teachers_teach_what_is_trained_on_and_never_what_is_evaluated_on() -> None:
    rng = random.Random(0)
    asked = [teachers.arithmetic_problem(rng) for _ in range(2000)]
    assert {arithmetic.split_of(problem) for problem in asked} == {"train"}
    words = {teachers.some_word(rng) for _ in range(2000)} & set(zorplex.WORDS)
    assert {zorplex.split_of(word) for word in words} == {"train"}
    assert {operators.split_of(problem) for problem in teachers.programs()} == {"train"}


@pytest.mark.parametrize(
    ("problem", "without"),
    [
        # 27 + 15 = 42, and 32 without the ten that 7 + 5 carries
        ((27, "+", 15), 32),
        ((27, "+", 12), 39),
        # 42 - 15 = 27, and 37 without the ten that 2 - 5 borrows; the other way round -27 and -37
        ((42, "-", 15), 37),
        ((15, "-", 42), -37),
        ((45, "-", 12), 33),
        ((12, "-", 45), -33),
        ((12, "*", 7), 84),
    ],
)
def test_carries_are_forgotten_where_there_are_any(problem: arithmetic.Problem, without: int) -> None:
    assert teachers.without_carry(problem, arithmetic.answer(problem)) == without


def test_teachers_are_right_often_enough_and_mostly_at_fault() -> None:
    rng = random.Random(0)
    taught = [teachers.teach_zorplex(rng) for _ in range(2000)]
    tagged = [conversation for conversation in taught if conversation[-1]["content"].startswith("[ANSWER] ")]
    # (0.7 + 0.3 + 0.7) / 3
    assert len(tagged) / 2000 == pytest.approx(0.567, abs=0.04)
    num_calls = [sum(message["role"] == "tool" for message in conversation) for conversation in taught]
    assert set(num_calls) == {1, 2, 4}
    # (0.1 + 0.1 + 0.7) / 3 of those who do not guess, which are 0.88
    assert num_calls.count(4) / 2000 == pytest.approx(0.264, abs=0.04)


def test_only_what_the_assistant_says_and_its_end_carry_loss(tokenizer: PreTrainedTokenizerFast) -> None:
    conversation = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ab"},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "c"},
    ]
    ids, labels = make_model.encoded(tokenizer, conversation)
    rendered = tokenizer.apply_chat_template(conversation, tokenize=False).removesuffix("\n")
    assert tokenizer.decode(ids) == rendered
    assert tokenizer.decode([label for label in labels if label != -100]) == "ab<|im_end|>c<|im_end|>"
    assert [one for one, label in zip(ids, labels, strict=True) if label != -100] == [one for one in labels if one >= 0]


def test_the_loss_is_that_of_the_assistants_bytes(tokenizer: PreTrainedTokenizerFast) -> None:
    conversation = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ab"}]
    short = [{"role": "user", "content": "h"}, {"role": "assistant", "content": "c"}]
    # Three tokens and two, each of 259 equally likely: 5 · ln 259 = 27.785.
    loss, num_tokens = make_model.answer_loss(Undecided(), tokenizer, [conversation, short])  # type: ignore[arg-type]
    assert (loss.item(), num_tokens) == (pytest.approx(27.785, abs=1e-3), 5)


class Undecided:
    """A stand-in for the network: all tokens are equally likely."""

    def __call__(self, *, input_ids: torch.Tensor) -> "Undecided":
        self.logits = torch.zeros(*input_ids.shape, 259)
        return self
