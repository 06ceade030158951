"""Settings of evaluation: what applies to which environment."""

from typing import Any

from grpo.configs.evaluation import EnvSettings, EvalSettings

TRAINING = [EnvSettings(id="a"), EnvSettings(id="b", args={"n": 1}, adapters={"x": "one"})]


def held_out(**changes: Any) -> list[Any]:
    return EvalSettings.model_validate(changes).held_out(TRAINING, max_tokens=64)


def test_without_environments_of_its_own_evaluation_is_on_those_of_the_training() -> None:
    assert [(one.key, one.num_examples, one.temperature, one.max_tokens) for one in held_out()] == [
        ("a", -1, 0.0, 64),
        ("b", -1, 0.0, 64),
    ]
    assert held_out(num_examples=0) == []


def test_an_environment_that_is_a_training_one_shares_its_process_and_another_of_its_name_does_not() -> None:
    same, other = held_out(env=[{"id": "b", "args": {"n": 1}}, {"id": "a", "args": {"n": 2}}])
    assert (same.key, other.key, other.label) == ("b", "eval:a", "a")


def test_an_environments_roles_have_the_adapters_of_training_unless_it_gives_its_own() -> None:
    given = [{"id": "b", "args": {"n": 1}}, {"id": "b", "name": "other"}, {"id": "a", "adapters": {"y": "two"}}]
    assert [one.adapters for one in held_out(env=given)] == [{"x": "one"}, {}, {"y": "two"}]
