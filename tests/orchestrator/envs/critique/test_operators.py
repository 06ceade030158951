"""The small problems of `critique`, and the rule that revises their programs."""

import pytest

from orchestrator.envs.critique import operators
from orchestrator.envs.critique.judging import judgement_of
from orchestrator.envs.critique.problems import problem_from_record
from orchestrator.envs.critique.testing import CallTest, InputTest, UnitTest


def test_the_small_problems_come_in_all_three_styles_and_no_two_splits_share_one() -> None:
    train, held_out = operators.records("train"), operators.records("eval")
    prompts = [(record["question"], record["program"]) for record in train + held_out]
    assert len(prompts) == len(set(prompts)) == 3 * 3 * 9 * 3  # styles, questions, numbers, programs
    assert len(held_out) >= 20
    for records in (train, held_out):
        kinds = {type(problem_from_record(record).tests[0]) for record in records}
        assert kinds == {InputTest, UnitTest, CallTest}


def test_the_right_critique_leads_to_the_right_program_for_every_problem() -> None:
    for record in operators.records("train") + operators.records("eval"):
        critique = operators.right_critique(record["question"], record["program"])
        revised = operators.revise_by_rule(record["program"], critique)
        right = {"Add": "+", "Take": "-", "Times": "*"}[record["question"].split()[0]]
        assert revised.rstrip(")")[-2] == right, record
        assert (judgement_of(critique) == "correct") == (revised == record["program"])


@pytest.mark.parametrize(
    ("critique", "program"),
    [
        ("Use *. Overall judgment: Incorrect", "def f(n): return n*3"),
        ("Do not use +, use *. Overall judgment: Incorrect", "def f(n): return n*3"),
        ("Use *. Overall judgment: Correct", "def f(n): return n-3"),
        ("Overall judgment: Incorrect", "def f(n): return n-3"),
        ("", "def f(n): return n-3"),
    ],
)
def test_the_rule_changes_a_program_only_where_it_is_judged_incorrect_and_a_bug_is_named(
    critique: str, program: str
) -> None:
    assert operators.revise_by_rule("def f(n): return n-3", critique) == program


def test_the_rule_leaves_a_program_without_an_operator_alone() -> None:
    assert operators.revise_by_rule("print(1)", "Use +. Overall judgment: Incorrect") == "print(1)"
