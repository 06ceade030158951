"""Debates: who wins, who gets what, and what happens without a winner."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from grpo.environments import debate as task
from grpo.environments.debate import Debate
from grpo.orchestrator.rollouts.play import play

EXAMPLE = {"prompt": "Topic: tea", "topic": "tea"}


def test_a_word_counts_once_for_the_side_that_named_it_first() -> None:
    # Aff: good, fun, and fast later: 3; "good" again and "bad", which is the other's, count nothing.
    # Neg: slow, bad was said by Aff first, and "good" is the other's: 1.
    transcript = [("Aff", "Good, fun, bad."), ("Neg", "bad, slow, good."), ("Aff", "good! fast")]
    assert task.points(transcript) == {"Aff": 3, "Neg": 1}


# --- the environment ---

ANSWERS = ["good, fun.", "bad.", "safe.", "cold, bad."]
"""Aff: good, fun, safe: 3. Neg: bad, cold: 2."""


async def test_the_rule_names_the_winner_and_the_rewards_sum_to_zero() -> None:
    outcome = await play(Debate(), EXAMPLE, ANSWERS)
    assert outcome.rewards == {"Aff": 1.0, "Neg": -1.0}
    points = {"points/Aff": 3.0, "points/Neg": 2.0}
    assert outcome.metrics == {"verdict/Aff": 1.0, "verdict/Neg": -1.0, "tie": 0.0, "no_verdict": 0.0} | points
    assert (outcome.accuracy, outcome.extras) == (0.5, {"topic": "tea", "verdict": "Aff"})
    tied = await play(Debate(num_rounds=1), EXAMPLE, ["good.", "bad."])
    assert (tied.rewards, tied.metrics["tie"]) == ({"Aff": 0.0, "Neg": 0.0}, 1.0)


@pytest.mark.parametrize(
    ("plays", "speeches", "base", "won"),
    [("Aff", ["good, fun."], "bad.", 1.0), ("Neg", ["bad."], "good, fun.", 0.0), ("Neg", ["bad."], "good.", 0.5)],
)
async def test_a_held_out_debate_is_against_the_model_before_training(
    plays: str, speeches: list[str], base: str, won: float
) -> None:
    def answer(model: str, messages: Sequence[Mapping[str, Any]]) -> str:
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

    def judge(model: str, messages: Sequence[Mapping[str, Any]]) -> str:
        asked.append(messages[0]["content"])
        return "Neg was better.\nWinner: Neg"

    outcome = await play(Debate(judge="base", num_rounds=1), EXAMPLE, ["Tea is warm.", "Tea is wet."], asked=judge)
    assert outcome.rewards == {"Aff": -1.0, "Neg": 1.0}
    assert [reply.role for reply in outcome.trajectory] == ["Aff", "Neg"]
    [prompt] = asked
    assert "Aff: Tea is warm.\n\nNeg: Tea is wet." in prompt
    assert outcome.extras["judgement"] == "Neg was better.\nWinner: Neg"


# --- topics ---


def test_no_topic_is_in_both_splits() -> None:
    debate = Debate(topics=["tea", "rain", "snow"], num_eval=1)
    train, held_out = debate.dataset("train"), debate.dataset("eval")
    assert (len(train), len(held_out)) == (2, 2)
    assert {example["topic"] for example in [*train, *held_out]} == {"tea", "rain", "snow"}
    assert all(example["prompt"] == f"Topic: {example['topic']}" for example in train)
    alone = Debate(topics=["tea"], num_eval=0)
    assert [{example["topic"] for example in alone.dataset(split)} for split in ("train", "eval")] == [{"tea"}] * 2
