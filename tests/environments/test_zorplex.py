"""The built-in `zorplex`: its questions, and what an episode is worth."""

from collections.abc import Sequence

import pytest
from grpo.environments import zorplex as task
from grpo.environments.zorplex import Zorplex
from grpo.orchestrator.rollouts.play import play

SEED, MAX_VALUE = 0, 100
FIRST, SECOND = "apple", "plum"
VALUES = {word: task.zorplex(word, SEED, MAX_VALUE) for word in (FIRST, SECOND)}
SUM = sum(VALUES.values())
EXAMPLE = {"prompt": f"What is zorplex({FIRST}) + zorplex({SECOND})?", "answer": SUM}
LOOK_UPS = [f"LOOKUP[{FIRST}]", f"LOOKUP[{SECOND}]"]


@pytest.fixture
def environment() -> Zorplex:
    return Zorplex()


# --- questions ---


def test_training_and_evaluation_share_no_word_and_answers_follow_from_words_and_seed() -> None:
    drawn = {split: task.questions(0, 2000, "hard", split) for split in ("train", "eval")}
    question = task.Question(words=("fox", "owl", "bear"), operation="-")
    first, second, third = (task.zorplex(word, 3, 50) for word in question.words)
    assert task.prompt(question) == "What is zorplex(fox) - zorplex(owl) - zorplex(bear)?"
    assert task.answer(question, 3, 50) == first - second - third
    assert {task.zorplex(word, 3, 9) for word in task.WORDS} == set(range(1, 10))
    train, held_out = ({word for one in drawn[split] for word in one.words} for split in ("train", "eval"))
    assert train | held_out == set(task.WORDS)
    assert not train & held_out
    assert len(held_out) > 40


# --- what a rollout is worth ---


@pytest.mark.parametrize(
    ("answers", "reward", "failure_mode"),
    [
        # 1 for the right answer + 0.2 for the tag
        ([*LOOK_UPS, f"[ANSWER] {SUM}"], 1.2, "success"),
        # the same - 2 · 0.1 for the third and the fourth call
        ([*LOOK_UPS, *LOOK_UPS, f"[ANSWER] {SUM}"], 1.0, "success"),
        # no tag, and 3 · 0.1 for five calls
        ([*LOOK_UPS, *LOOK_UPS, LOOK_UPS[0], f"{SUM}"], -0.3, "wrong_format"),
        ([*LOOK_UPS, f"[ANSWER] {SUM + 1}"], 0.2, "wrong_answer"),
        # 0.2 - 2 · 0.1
        ([*LOOK_UPS, *LOOK_UPS, f"[ANSWER] {SUM + 1}"], 0.0, "tool_spam"),
        # six answers are all that are allowed; 4 · 0.1
        (LOOK_UPS * 3, -0.4, "wrong_format"),
        # the answer counts, and so the call beside it is not made
        ([f"LOOKUP[{FIRST}] [ANSWER] 1"], 0.2, "wrong_answer"),
    ],
)
async def test_reward_and_failure_mode_by_hand(
    environment: Zorplex, answers: Sequence[str], reward: float, failure_mode: str
) -> None:
    outcome = await play(environment, EXAMPLE, answers)
    assert outcome.reward == pytest.approx(reward)
    modes = {name: outcome.metrics[name] for name in ("success", "wrong_format", "tool_spam", "wrong_answer")}
    assert [name for name, value in modes.items() if value] == [failure_mode]
    assert outcome.accuracy == modes["success"]
    assert outcome.metrics["num_turns"] == len(answers)
    assert outcome.extras["failure_mode"] == failure_mode


async def test_the_policy_sees_the_values_and_they_are_in_no_prompt(environment: Zorplex) -> None:
    outcome = await play(environment, EXAMPLE, [*LOOK_UPS, f"[ANSWER] {SUM}"])
    told = [message["content"] for message in outcome.messages if message["role"] == "tool"]
    assert told == [str(VALUES[FIRST]), str(VALUES[SECOND])]
    assert (outcome.metrics["num_tool_calls"], outcome.metrics["tool_error_rate"]) == (2, 0)
    for split in ("train", "eval"):
        assert {key for example in environment.dataset(split) for key in example} == {"prompt", "answer"}
        assert not any(letter.isdigit() for example in environment.dataset(split) for letter in example["prompt"])
