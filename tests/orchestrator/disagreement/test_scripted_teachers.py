"""The scripted teachers of the end-to-end tests know their tasks."""

from collections.abc import Sequence
from typing import Any

import pytest

from orchestrator.envs.arithmetic import Arithmetic
from orchestrator.envs.base import Environment
from orchestrator.envs.reverse_text import ReverseText
from orchestrator.envs.zorplex.environment import Zorplex
from orchestrator.episodes.replay import play
from tests.e2e.scripted_teachers import TEACHERS


async def accuracy(environment: Environment, teacher: str) -> float:
    """On four held-out examples, with tools speaking as users, as they do to teachers."""

    def answer(_: str, messages: Sequence[dict[str, Any]]) -> str:
        return TEACHERS[teacher]([{**m, "role": "user"} if m["role"] == "tool" else m for m in messages])

    outcomes = [await play(environment, example, answer) for example in environment.dataset("eval")[:4]]
    return sum(outcome.accuracy for outcome in outcomes) / len(outcomes)


@pytest.mark.parametrize("environment", [Arithmetic(), ReverseText()], ids=["arithmetic", "reverse-text"])
async def test_two_are_right_and_one_is_not(environment: Environment) -> None:
    assert [await accuracy(environment, name) for name in TEACHERS] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("difficulty", ["medium", "hard"])
async def test_they_look_words_up_before_they_answer(difficulty: Any) -> None:
    environment = Zorplex(difficulty=difficulty, system_prompt="")
    try:
        assert [await accuracy(environment, name) for name in TEACHERS] == [1.0, 1.0, 0.0]
    finally:
        await environment.pool.close()


def test_another_question_is_refused() -> None:
    with pytest.raises(ValueError, match="no teacher knows 'Who are you"):
        TEACHERS["right"]([{"role": "user", "content": "Who are you?"}])
