"""Settings of evaluation: what applies to which environment."""

import re
from pathlib import Path
from typing import Any

import yaml

from configs.common import all_conflicts
from configs.evaluation import EnvSettings, EvalSettings
from configs.orch import OrchSettings

TRAINING = [EnvSettings(id="a"), EnvSettings(id="b", args={"n": 1})]


def held_out(**changes: Any) -> list[Any]:
    return EvalSettings.model_validate(changes).held_out(TRAINING, max_tokens=64)


def test_without_environments_of_its_own_evaluation_is_on_those_of_the_training() -> None:
    assert [(one.key, one.num_examples, one.temperature, one.max_tokens) for one in held_out()] == [
        ("a", -1, 0.0, 64),
        ("b", -1, 0.0, 64),
    ]


def test_an_environment_has_its_own_of_what_it_gives_and_the_common_of_the_rest() -> None:
    own = {
        "num_examples": 5,
        "rollouts_per_example": 8,
        "interval": 2,
        "sampling": {"temperature": 1.0, "max_tokens": 9},
    }
    common = {"num_examples": 7, "rollouts_per_example": 4, "interval": 3, "sampling": {"temperature": 0.5}}
    first, second = held_out(env=[{"id": "x"} | own, {"id": "y"}], **common)
    fields = ("num_examples", "rollouts_per_example", "interval", "temperature", "max_tokens")
    assert [getattr(first, name) for name in fields] == [5, 8, 2, 1.0, 9]
    assert [getattr(second, name) for name in fields] == [7, 4, 3, 0.5, 64]


def test_a_greedy_environment_can_stand_beside_sampled_ones() -> None:
    greedy, _ = held_out(env=[{"id": "x", "sampling": {"temperature": 0}}, {"id": "y"}], sampling={"temperature": 1})
    assert greedy.temperature == 0


def test_an_environment_that_is_a_training_one_shares_its_process_and_another_of_its_name_does_not() -> None:
    same, other = held_out(env=[{"id": "b", "args": {"n": 1}, "interval": 5}, {"id": "a", "args": {"n": 2}}])
    assert (same.key, other.key, other.label) == ("b", "eval:a", "a")


def test_an_environments_roles_have_the_adapters_of_training_unless_it_gives_its_own() -> None:
    training = [EnvSettings(id="a", adapters={"x": "one"}), EnvSettings(id="b")]
    given = [{"id": "a"}, {"id": "a", "name": "other"}, {"id": "b", "adapters": {"y": "two"}}]
    found = EvalSettings.model_validate({"env": given}).held_out(training, max_tokens=64)
    assert [one.adapters for one in found] == [{"x": "one"}, {}, {"y": "two"}]
    assert [one.key for one in found] == ["a", "eval:other", "b"]
    assert [one.adapters for one in EvalSettings().held_out(training, max_tokens=64)] == [{"x": "one"}, {}]


def test_environments_of_which_no_example_is_wanted_are_left_out() -> None:
    assert held_out(num_examples=0) == []
    assert [one.label for one in held_out(num_examples=0, env=[{"id": "x"}, {"id": "y", "num_examples": 3}])] == ["y"]


def test_the_example_in_the_documentation_holds() -> None:
    page = (Path(__file__).parents[2] / "docs/runs.md").read_text()
    [example] = re.findall(r"^```yaml\n(eval:\n.*?)^```", page, flags=re.M | re.S)
    settings = {"model": {"name": "m"}, "env": [{"id": "a"}], "rollouts_per_example": 4} | yaml.safe_load(example)
    assert list(all_conflicts(OrchSettings.model_validate(settings))) == []
