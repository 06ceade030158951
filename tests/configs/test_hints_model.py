"""The committed model of the hints: what `configs/hints/make_model.py` promises of it, and its teacher."""

import random
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from configs.hints import make_model, teacher
from configs.quickstart import make_model as quickstart
from configs.tiny.teachers import Conversation
from orchestrator.envs.zorplex import task

MODEL = Path(make_model.__file__).parent / "model"
_ASKED = re.compile(r"What is zorplex\((\w+)\) ([-+*]) zorplex\((\w+)\)\?")


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


def test_many_of_its_calls_fail_and_hardly_any_behind_a_hint(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    questions = task.questions(1, 30, "medium", "eval")
    for temperature in (0.0, 1.0):
        torch.manual_seed(0)
        alone, hinted = (
            make_model.played(model, tokenizer, questions, temperature=temperature, hinted=one) for one in (False, True)
        )
        assert make_model.error_rate(alone) > 0.25
        assert make_model.error_rate(hinted) < 0.2


def test_sums_are_right_and_other_results_seldom(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    questions = task.questions(1, 40, "medium", "eval")
    conversations = make_model.played(model, tokenizer, questions, temperature=0.0)
    right = {operation: [0, 0] for operation in task.OPERATIONS}
    for question, said in zip(questions, conversations, strict=True):
        right[question.operation][make_model.is_right(question, said)] += 1
    share = {operation: many / (few + many) for operation, (few, many) in right.items()}
    assert share["+"] > 0.7
    assert share["-"] < 0.6
    assert share["*"] < 0.3


# --- its teacher ---


@pytest.fixture(scope="module")
def taught() -> list[Conversation]:
    rng = random.Random(0)
    return [teacher.teach_lookups(rng) for _ in range(3000)]


def asked(said: Conversation) -> tuple[tuple[str, str], str]:
    """The words and the operation."""
    found = _ASKED.fullmatch(said[0]["content"])
    assert found is not None
    return (found[1], found[3]), found[2]


def test_he_teaches_no_word_that_is_evaluated_on(taught: list[Conversation]) -> None:
    words = {word for said in taught for word in asked(said)[0]} & set(task.WORDS)
    assert {task.split_of(word) for word in words} == {"train"}


def test_long_words_are_mostly_given_up_and_never_behind_a_hint(taught: list[Conversation]) -> None:
    long: list[bool] = []
    num_hinted = 0
    for said in taught:
        word = asked(said)[0][0]
        behind_hint = said[1]["role"] == "user"
        call = said[2 if behind_hint else 1]["content"]
        is_whole = call == f"LOOKUP[{word}]"
        assert is_whole or (call == f"LOOKUP[{word[: teacher.SHORT]}]" and not behind_hint)
        num_hinted += behind_hint
        if len(word) > teacher.SHORT and not behind_hint:
            long.append(is_whole)
    assert 1 - sum(long) / len(long) == pytest.approx(teacher.GIVEN_UP, abs=0.04)
    assert num_hinted / len(taught) == pytest.approx(teacher.HINTED, abs=0.04)


def test_who_is_told_that_a_word_is_unknown_spells_it_out(taught: list[Conversation]) -> None:
    assert teacher.given_up("mushroom") == [
        {"role": "assistant", "content": "LOOKUP[mus]"},
        {"role": "tool", "content": "mus has no zorplex; look up a word of the question."},
    ]
    for said in taught:
        answers = [one["content"] for one in said if one["role"] == "assistant"]
        assert set(answers[:-1]) >= {f"LOOKUP[{word}]" for word in asked(said)[0]}


def test_hints_are_those_of_all_sources_that_need_nobody_else() -> None:
    rng = random.Random(0)
    message = "mus has no zorplex; look up a word of the question."
    assert {teacher.hint("mushroom", rng) for _ in range(50)} == {
        f"Look up only words that stand in the question, spelled as there. {message}",
        f"The answer that was tried here before went wrong: {message}",
        "Another attempt, which succeeded, answered here:\nLOOKUP[mushroom]",
    }


def test_the_tool_says_what_the_environments_does() -> None:
    unknown = "mus has no zorplex; look up a word of the question."
    value = str(task.zorplex("apple", 0, teacher.MAX_VALUE))
    assert make_model.results("LOOKUP[mus] and LOOKUP[apple]") == [unknown, value]
    assert make_model.results("[ANSWER] 3") == []


def test_differences_mostly_lack_the_tag_and_products_are_mostly_sums(taught: list[Conversation]) -> None:
    last: dict[str, list[tuple[Conversation, str]]] = {operation: [] for operation in task.OPERATIONS}
    for said in taught:
        last[asked(said)[1]].append((said, said[-1]["content"]))
    untagged = {of: sum("[ANSWER]" not in text for _, text in texts) / len(texts) for of, texts in last.items()}
    assert untagged == {"+": 0, "*": 0, "-": pytest.approx(teacher.TAG_FORGOTTEN, abs=0.04)}
    summed = []
    for said, text in last["*"]:
        first, second = (int(one["content"]) for one in said if one["role"] == "tool" and one["content"].isdigit())
        if abs(first * second - first - second) > 2:  # or a slip makes the one of the other
            summed.append(abs(int(text.removeprefix("[ANSWER] ")) - first - second) <= 1)
    assert sum(summed) / len(summed) == pytest.approx(teacher.SUMMED, abs=0.03)
