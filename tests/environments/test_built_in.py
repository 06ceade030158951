"""The small built-in environments: what they ask, and what answers earn."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from grpo.environments import arithmetic, debate, proposer_solver, reverse_text, zorplex
from grpo.environments.arithmetic import Arithmetic
from grpo.environments.debate import Debate
from grpo.environments.proposer_solver import ProposerSolver
from grpo.environments.reverse_text import ReverseText
from grpo.environments.zorplex import Zorplex
from grpo.orchestrator.rollouts.registry import make_environment

from grpo import Environment, EpisodeState, RolloutContext, play

Messages = Sequence[Mapping[str, Any]]
Told = Mapping[str, Any]
"""What is said of a rollout beside its rewards: `accuracy`, metrics by name, and what its `children` earned."""
Case = tuple[Environment, dict[str, Any], Any, Mapping[str, float] | float, Told]


def policy(worth: Mapping[str, float], environment: Environment, example: dict[str, Any], metric: str) -> list[Case]:
    """Single answers, each with its reward, which is that metric too."""
    return [(environment, example, [text], reward, {metric: reward}) for text, reward in worth.items()]


ADDED, TAKEN = {"prompt": "Compute: 0+7", "answer": "7"}, {"prompt": "Compute: 3-8", "answer": "-5"}
NUMBERS = {"-5": 1.0, " -5\n": 1.0, r"Eight is more, so it is \boxed{-5}": 1.0, "5": 0.0, "-50": 0.0, "": 0.0}
COPIES = {"0+7": 0.0, "Compute: 0+7": 0.0, r"\boxed{0+7}": 0.0, "0+7 = 0+7": 0.0, "0+7=7": 1.0}  # is no answer
ABC = {"prompt": "Reverse: abc", "word": "abc"}

LOOK_UPS = ["LOOKUP[apple]", "LOOKUP[plum]"]
VALUES = [zorplex.zorplex(word, seed=0, max_value=100) for word in ("apple", "plum")]
FRUIT = {"prompt": "What is zorplex(apple) + zorplex(plum)?", "answer": sum(VALUES)}
RIGHT, WRONG = f"[ANSWER] {sum(VALUES)}", f"[ANSWER] {sum(VALUES) + 1}"


def looked_up(reward: float, mode: str, *answers: str) -> Case:
    modes = dict.fromkeys(zorplex.MODES, 0.0) | {mode: 1.0}
    told = {"accuracy": modes["success"], "num_turns": len(answers), **modes}
    return Zorplex(), FRUIT, answers, pytest.approx(reward), told


TEA = {"prompt": "Topic: tea", "topic": "tea"}
SUM = {"prompt": "Ask a sum like 1+1.", "question": "1+1"}


def players(proposal: str, *answers: str) -> Callable[[str, Messages], str]:
    """A Proposer that says `proposal`, and Solvers that say `answers` in turn."""
    left = iter(answers)
    return lambda role, messages: proposal if role == "Proposer" else next(left)


def cases() -> Iterator[Case]:
    yield from policy(NUMBERS | {"it is more": 0.0}, Arithmetic(), TAKEN, "correct")
    yield from policy(COPIES, Arithmetic(), ADDED, "correct")
    # abc backwards is cba: "cbx" has 2 of 3 letters in place, "cbaxx" 3 of 5; 0.5 · 0 + 0.5 · 2/3, and 0.5 · 3/5.
    for answer, reward in {"cbx": 1 / 3, "cbaxx": 0.3, "": 0.0}.items():
        yield ReverseText(reward="partial"), ABC, [answer], pytest.approx(reward), {"accuracy": 0}
    yield ReverseText(), ABC, [" cba "], 1.0, {"accuracy": 1.0}
    yield ReverseText(), ABC, ["cbx"], 0.0, {"accuracy": 0.0}
    # 1 for the right answer + 0.2 for the tag, - 0.1 for each call beyond two
    yield looked_up(1.2, "success", *LOOK_UPS, RIGHT)
    yield looked_up(1.0, "success", *LOOK_UPS, *LOOK_UPS, RIGHT)
    yield looked_up(-0.3, "wrong_format", *LOOK_UPS, *LOOK_UPS, LOOK_UPS[0], f"{sum(VALUES)}")
    yield looked_up(0.2, "wrong_answer", *LOOK_UPS, WRONG)
    yield looked_up(0.0, "tool_spam", *LOOK_UPS, *LOOK_UPS, WRONG)
    yield looked_up(-0.4, "wrong_format", *LOOK_UPS * 3)  # six answers are all that are allowed
    yield looked_up(0.2, "wrong_answer", "LOOKUP[apple] [ANSWER] 1")  # the call beside an answer is not made
    # Aff: good, fun, safe: 3. Neg: bad, cold: 2.
    points = {"accuracy": 0.5, "points/Aff": 3.0, "points/Neg": 2.0, "tie": 0.0, "no_verdict": 0.0}
    yield Debate(), TEA, ["good, fun.", "bad.", "safe.", "cold, bad."], {"Aff": 1.0, "Neg": -1.0}, points
    yield Debate(num_rounds=1), TEA, ["good.", "bad."], {"Aff": 0.0, "Neg": 0.0}, {"tie": 1.0}
    # One of four solvers is right: pass rate 1/4, reward 1 - 2 * |1/4 - 1/2| = 1/2.
    solved = {"goldilocks": 0.5, "parsable": 1.0, "pass_rate": 0.25, "children": [1.0, 0.0, 0.0, 0.0]}
    yield ProposerSolver(), SUM, players("Question: 6 * 7", "42", "It is 43.", "", "-42"), {"Proposer": 0.5}, solved
    unasked = {"parsable": 0.0, "pass_rate": 0.0, "children": []}
    yield ProposerSolver(), SUM, ["What about tea?"], {"Proposer": -1.0}, unasked


@pytest.mark.parametrize(("environment", "example", "answers", "rewards", "told"), [*cases()])
async def test_what_answers_earn(
    environment: Environment, example: dict[str, Any], answers: Any, rewards: Any, told: Told
) -> None:
    outcome = await play(environment, example, answers)
    assert (outcome.rewards if isinstance(rewards, Mapping) else outcome.reward) == rewards
    found = outcome.metrics | {"accuracy": outcome.accuracy, "children": [child.reward for child in outcome.children]}
    assert {name: found[name] for name in told} == told


# --- what is asked ---


@pytest.mark.parametrize("env_id", ["arithmetic", "reverse-text", "zorplex"])
def test_examples_follow_from_the_seed_and_no_prompt_is_in_both_splits(env_id: str) -> None:
    def prompts(split: str, **args: int) -> list[str]:
        made = make_environment(env_id, {"num_train": 2000, "num_eval": 200, "seed": 1, **args})
        return [example["prompt"] for example in made.dataset(split)]

    assert (len(prompts("train")), len(prompts("eval"))) == (2000, 200)
    assert not set(prompts("train")) & set(prompts("eval"))
    assert prompts("train") == prompts("train", num_train=2500)[:2000] != prompts("train", seed=2)


def test_a_problem_is_in_the_same_split_turned_round() -> None:
    pairs = [(first, second) for first in range(21) for second in range(first)]
    for operation in "+*":
        splits = [{arithmetic.split_of((a, operation, b)), arithmetic.split_of((b, operation, a))} for a, b in pairs]
        assert {len(both) for both in splits} == {1}
        assert 0.05 < splits.count({"eval"}) / len(splits) < 0.15


def test_words_stay_the_same_for_runs_that_are_resumed_and_a_tenth_is_held_out() -> None:
    words = reverse_text.words(1, 50, 3, 8, "train")
    assert words[:3] == ["oubd", "mjfmxk", "talsfyx"]
    assert {len(word) for word in words} == {3, 4, 5, 6, 7, 8}
    held_out = [reverse_text.split_of(f"{number}") for number in range(3000)].count("eval")
    assert 240 < held_out < 360  # 300 ± 3.6 standard deviations of √(3000 · 0.1 · 0.9)


def test_questions_are_about_words_of_one_split_whose_values_are_in_no_prompt() -> None:
    drawn = {split: zorplex.questions(0, 2000, "hard", split) for split in ("train", "eval")}
    train, held_out = ({word for one in drawn[split] for word in one.words} for split in ("train", "eval"))
    assert train | held_out == set(zorplex.WORDS)
    assert not train & held_out
    assert len(held_out) > 40
    question = zorplex.Question(words=("fox", "owl", "bear"), operation="-")
    first, second, third = (zorplex.zorplex(word, 3, 50) for word in question.words)
    assert zorplex.prompt(question) == "What is zorplex(fox) - zorplex(owl) - zorplex(bear)?"
    assert zorplex.answer(question, 3, 50) == first - second - third
    values = [[zorplex.zorplex(word, seed, 9) for word in zorplex.WORDS] for seed in (3, 4)]
    assert set(values[0]) == set(values[1]) == set(range(1, 10))
    assert values[0] != values[1]
    for example in Zorplex(num_train=200).dataset("train"):
        assert example.keys() == {"prompt", "answer"}
        assert not any(letter.isdigit() for letter in example["prompt"])


async def test_the_policy_sees_the_values_that_it_looks_up() -> None:
    outcome = await play(Zorplex(), FRUIT, [*LOOK_UPS, RIGHT])
    assert [message["content"] for message in outcome.messages if message["role"] == "tool"] == [*map(str, VALUES)]
    assert (outcome.metrics["num_tool_calls"], outcome.metrics["tool_error_rate"]) == (2, 0)
    assert outcome.extras == {"failure_mode": "success", "num_tool_calls": 2}


# --- debates ---


def test_a_word_counts_once_for_the_side_that_named_it_first() -> None:
    # Aff: good, fun, and fast later: 3; "good" again and "bad", which is the other's, count nothing.
    # Neg: slow, bad was said by Aff first, and "good" is the other's: 1.
    transcript = [("Aff", "Good, fun, bad."), ("Neg", "bad, slow, good."), ("Aff", "good! fast")]
    assert debate.points(transcript) == {"Aff": 3, "Neg": 1}


@pytest.mark.parametrize(
    ("plays", "speeches", "base", "won"),
    [("Aff", ["good, fun."], "bad.", 1.0), ("Neg", ["bad."], "good, fun.", 0.0), ("Neg", ["bad."], "good.", 0.5)],
)
async def test_a_held_out_debate_is_against_the_model_before_training(
    plays: str, speeches: list[str], base: str, won: float
) -> None:
    def answer(model: str, messages: Messages) -> str:
        assert model == "base"
        assert [message["role"] for message in messages] == ["system", "user"]
        return base

    environment = Debate(num_rounds=1)
    example = next(one for one in environment.dataset("eval") if one["plays"] == plays)
    outcome = await play(environment, example, speeches, asked=answer, split="eval")
    assert [reply.role for reply in outcome.trajectory] == [plays]
    assert (outcome.accuracy, outcome.metrics[f"against_base/{plays}"]) == (won, won)
    assert set(outcome.rewards) == {"Aff", "Neg"}


async def test_a_model_that_judges_sees_the_transcript_and_is_no_role() -> None:
    asked: list[str] = []

    def judge(model: str, messages: Messages) -> str:
        asked.append(messages[0]["content"])
        return "Neg was better.\nWinner: Neg"

    outcome = await play(Debate(judge="base", num_rounds=1), TEA, ["Tea is warm.", "Tea is wet."], asked=judge)
    assert outcome.rewards == {"Aff": -1.0, "Neg": 1.0}
    assert [reply.role for reply in outcome.trajectory] == ["Aff", "Neg"]
    assert "Aff: Tea is warm.\n\nNeg: Tea is wet." in asked[0]
    assert outcome.extras == {"topic": "tea", "verdict": "Neg", "judgement": "Neg was better.\nWinner: Neg"}


def test_no_topic_is_in_both_splits() -> None:
    three, alone = Debate(topics=["tea", "rain", "snow"], num_eval=1), Debate(topics=["tea"], num_eval=0)
    topics = [[example["topic"] for example in three.dataset(split)] for split in ("train", "eval")]
    assert [len(one) for one in topics] == [2, 2]  # each held-out topic from both sides
    assert {topic for one in topics for topic in one} == {"tea", "rain", "snow"}
    assert all({one["prompt"] for one in alone.dataset(split)} == {"Topic: tea"} for split in ("train", "eval"))


# --- proposed questions ---


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("Question: 3+4", "3+4"),
        ("I think.\nquestion:  12 * (3 - 4) = ?", "12*(3-4)"),
        ("Question: 1+2\nQuestion: -5-6.", "-5-6"),
        ("Question: 3+", None),
        ("Question: 2**9", None),
        ("Question: 3(4)", None),
        ("Question: 1234567+1", None),
        ("Question: __import__('os')", None),
    ],
)
def test_only_small_whole_number_arithmetic_is_a_question(text: str, question: str | None) -> None:
    assert proposer_solver.question_of(text) == question
    assert question is None or proposer_solver.value_of(question) == eval(question)


class Keeping(ProposerSolver):
    """Is its own store."""

    async def rollout(self, ctx: RolloutContext, state: EpisodeState) -> None:
        store: Any = self
        self.added: list[tuple[str, float]] = []
        ctx.stores = {"questions": store}
        await super().rollout(ctx, state)

    async def add(self, data: str, *, weight: float) -> None:
        self.added.append((data, weight))


@pytest.mark.parametrize(
    ("answers", "split", "stored"),
    [
        ("42 42 1 1", "train", [("6*7", 1.0)]),
        ("42 1 1 1", "train", [("6*7", 0.5)]),
        ("42 42 42 42", "train", []),
        ("42 42 1 1", "eval", []),
    ],
)
async def test_questions_that_worked_are_stored_by_how_well_in_training_alone(
    answers: str, split: str, stored: list[tuple[str, float]]
) -> None:
    environment = Keeping()
    await play(environment, SUM, players("Question: 6*7", *answers.split()), split=split)
    assert environment.added == stored


async def test_questions_in_words_are_answered_in_words_and_a_model_says_what_is_right(tmp_path: Path) -> None:
    (tmp_path / "questions.csv").write_text("question\nWhat is tea?\nWho was Bach?\nWhere is Oslo?\n")
    judged: list[str] = []

    def judge(model: str, messages: Messages) -> str:
        judged.append(messages[0]["content"])
        return f"Verdict: {'right' if 'Norway' in judged[-1] else 'wrong'}"

    environment = ProposerSolver(questions=str(tmp_path / "questions.csv"), judge="base", num_solvers=2)
    assert [len(environment.dataset(split)) for split in ("train", "eval")] == [2, 1]
    answers = players("Question: Where is Bergen?", "In Norway.", "On Mars.")
    outcome = await play(environment, environment.dataset("train")[0], answers, asked=judge)
    assert "What is tea?" in outcome.trajectory[0].messages[0]["content"]
    assert [child.rewards for child in outcome.children] == [{"Solver": 1.0}, {"Solver": 0.0}]
    assert (outcome.rewards, outcome.extras) == ({"Proposer": 1.0}, {"question": "Where is Bergen?", "pass_rate": 0.5})
    assert all("Where is Bergen?" in asked for asked in judged)


@pytest.mark.parametrize("seed", [{"question": "2+2", "ground_truth": 5}, {"prompt": "2+2"}, {"question": 4}, {}, 4])
def test_a_seed_question_that_says_more_or_less_than_a_question_is_refused(seed: Any) -> None:
    with pytest.raises(ValueError, match="seed_questions"):
        ProposerSolver(seed_questions=["1+1", seed])


async def test_one_side_of_a_debate_may_be_a_snapshot() -> None:
    environment = Debate(opponent="past", every=2, num_rounds=1)
    [topic, *_] = environment.dataset("train")
    state = await play(environment, topic, lambda role, messages: {"Aff": "good", "Neg": "tea"}[role], seed=1)
    [(bound, player)] = state.players.items()
    [own] = state.roles
    assert player.name == "past"
    assert {own, bound} == {"Aff", "Neg"}
    assert state.rewards == {"Aff": 1.0, "Neg": -1.0}
    assert state.accuracy == float(own == "Aff")
    assert state.reward == state.rewards[own]
