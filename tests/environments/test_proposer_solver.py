"""Proposed questions: how they are read, what they are worth, and whose reward is compared with whose."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from grpo.environments import proposer_solver as task
from grpo.environments.proposer_solver import ProposerSolver
from grpo.orchestrator.rollouts.context import RolloutContext
from grpo.orchestrator.rollouts.play import ScriptedBackend, play
from grpo.orchestrator.rollouts.state import EpisodeState
from grpo.orchestrator.workers.protocol import Call, Store

EXAMPLE = {"prompt": "Ask a sum like 1+1.", "question": "1+1"}


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
    assert task.question_of(text) == question
    assert question is None or task.value_of(question) == eval(question)


# --- the environment ---


def players(proposal: str, answers: Sequence[str]) -> Callable[[str, Sequence[Mapping[str, Any]]], str]:
    """A Proposer that says `proposal`, and Solvers that say `answers` in turn."""
    left = iter(answers)
    return lambda role, messages: proposal if role == "Proposer" else next(left)


async def test_solvers_answer_the_question_and_the_proposer_is_paid_for_its_difficulty() -> None:
    # One of four is right: pass rate 1/4, reward 1 - 2 * |1/4 - 1/2| = 1/2.
    outcome = await play(ProposerSolver(), EXAMPLE, players("Question: 6 * 7", ["42", "It is 43.", "", "-42"]))
    assert outcome.rewards == {"Proposer": 0.5}
    assert [child.rewards for child in outcome.children] == [{"Solver": reward} for reward in (1.0, 0.0, 0.0, 0.0)]
    assert outcome.metrics == {"goldilocks": 0.5, "parsable": 1.0, "pass_rate": 0.25}
    assert outcome.extras == {"question": "6*7", "pass_rate": 0.25}


async def test_what_is_no_question_is_not_solved_and_costs_the_proposer() -> None:
    outcome = await play(ProposerSolver(), EXAMPLE, ["What about tea?"])
    assert (outcome.rewards, outcome.children) == ({"Proposer": -1.0}, [])
    assert (outcome.metrics["parsable"], outcome.metrics["pass_rate"]) == (0.0, 0.0)


# --- the store ---


class Recording(ScriptedBackend):
    """Keeps what is done to stores."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.done: list[tuple[str, Mapping[str, Any]]] = []

    async def __call__(self, call: Call) -> Any:
        if isinstance(call, Store):
            self.done.append((call.operation, call.arguments))
        return await super().__call__(call)


@pytest.mark.parametrize(
    ("answers", "split", "stored"),
    [
        (["42", "42", "1", "1"], "train", [("add", {"data": "6*7", "weight": 1.0})]),
        (["42", "1", "1", "1"], "train", [("add", {"data": "6*7", "weight": 0.5})]),
        (["42", "42", "42", "42"], "train", []),
        (["42", "42", "1", "1"], "eval", []),
    ],
)
async def test_questions_that_worked_are_stored_by_how_well_in_training_alone(
    answers: list[str], split: str, stored: list[tuple[str, Mapping[str, Any]]]
) -> None:
    environment = ProposerSolver()
    backend = Recording(environment.stores, players("Question: 6*7", answers))
    ctx = RolloutContext(
        backend,
        state=EpisodeState(example=EXAMPLE),
        roles=environment.roles,
        split=split,
        seed=0,
        episodes=environment.episodes,
        stores=environment.stores,
    )
    await environment.run(ctx)
    assert backend.done == stored


async def test_questions_in_words_are_answered_in_words_and_a_model_says_what_is_right(tmp_path: Path) -> None:
    (tmp_path / "questions.csv").write_text("question\nWhat is tea?\nWho was Bach?\nWhere is Oslo?\n")
    judged: list[str] = []

    def judge(model: str, messages: Sequence[Mapping[str, Any]]) -> str:
        judged.append(messages[0]["content"])
        return f"Verdict: {'right' if 'Norway' in judged[-1] else 'wrong'}"

    environment = ProposerSolver(questions=str(tmp_path / "questions.csv"), judge="base", num_solvers=2)
    assert [len(environment.dataset(split)) for split in ("train", "eval")] == [2, 1]
    answers = players("Question: Where is Bergen?", ["In Norway.", "On Mars."])
    outcome = await play(environment, environment.dataset("train")[0], answers, asked=judge)
    assert "What is tea?" in outcome.trajectory[0].messages[0]["content"]
    assert [child.rewards for child in outcome.children] == [{"Solver": 1.0}, {"Solver": 0.0}]
    assert (outcome.rewards, outcome.extras["question"]) == ({"Proposer": 1.0}, "Where is Bergen?")
    assert all("Where is Bergen?" in asked for asked in judged)


@pytest.mark.parametrize("seed", [{"question": "2+2", "ground_truth": 5}, {"prompt": "2+2"}, {"question": 4}, {}, 4])
def test_a_seed_question_that_says_more_or_less_than_a_question_is_refused(seed: Any) -> None:
    with pytest.raises(ValueError, match="seed_questions"):
        ProposerSolver(seed_questions=["1+1", seed])
