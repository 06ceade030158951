"""Settings of evaluation and of reports: what applies to which environment, and what is refused."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.evaluation import EnvSettings, EvalSettings
from configs.orch import OrchSettings

TRAINING = [EnvSettings(id="a"), EnvSettings(id="b", args={"n": 1})]


def held_out(**changes: Any) -> list[Any]:
    return EvalSettings.model_validate(changes).held_out(TRAINING, max_tokens=64)


def problems(**changes: Any) -> list[str]:
    settings = OrchSettings.model_validate(
        {"model": {"name": "m"}, "env": [{"id": "a"}], "rollouts_per_example": 4, "seq_len": 512} | changes
    )
    return [f"{key}: {message}" for key, message in settings.conflicts()]


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


ADAPTERS = {
    "model": {"name": "m", "lora_adapters": ["one", "two"]},
    "env": [{"id": "a", "adapters": {"x": "two"}}],
}
REFUSED = [
    ({"eval": {"rollouts_per_example": 4}}, "eval.rollouts_per_example: makes the same answer again and again"),
    (
        {"eval": {"env": [{"id": "x", "rollouts_per_example": 4}]}},
        "eval.env.0.rollouts_per_example: makes the same answer again and again at temperature 0; set "
        "eval.env.0.sampling.temperature above 0",
    ),
    (
        {
            "eval": {
                "rollouts_per_example": 4,
                "sampling": {"temperature": 1},
                "env": [{"id": "x", "sampling": {"temperature": 0}}, {"id": "y"}],
            }
        },
        "eval.rollouts_per_example: makes the same answer again and again",
    ),
    ({"eval": {"sampling": {"max_tokens": 512}}}, "eval.sampling.max_tokens: leaves no room for a prompt in seq_len"),
    (
        {"eval": {"env": [{"id": "x", "sampling": {"max_tokens": 600}}]}},
        "eval.env.0.sampling.max_tokens: leaves no room for a prompt in seq_len = 512",
    ),
    ({"eval": {"num_examples": 0, "interval": 5}}, "eval.interval: has no effect with num_examples: 0"),
    ({"eval": {"num_examples": 0, "env": [{"id": "x"}]}}, "eval.env: has no effect with num_examples: 0"),
    (
        {"eval": {"num_examples": 0, "sampling": {"temperature": 1}}},
        "eval.sampling: has no effect with num_examples: 0, which switches evaluation off",
    ),
    (
        {"eval": {"env": [{"id": "x"}, {"id": "y", "num_examples": 0}]}},
        "eval.env.1.num_examples: the environment would never be evaluated on; remove it",
    ),
    (
        {"eval": {"num_examples": 0, "env": [{"id": "x", "num_examples": 2}, {"id": "y"}]}},
        "eval.env.1.num_examples: is eval.num_examples = 0: the environment would never be evaluated on; remove it",
    ),
    (
        {"eval": {"interval": 5, "env": [{"id": "x", "interval": 2}, {"id": "y", "interval": 3}]}},
        "eval.interval: has no effect: every environment of eval.env has its own interval; remove it",
    ),
    (
        {"eval": {"sampling": {"temperature": 1}, "env": [{"id": "x", "sampling": {"temperature": 0.5}}]}},
        "eval.sampling.temperature: has no effect: every environment of eval.env has its own temperature",
    ),
    (
        {"env": [{"id": "a", "adapters": {"x": "one"}}]},
        "env.0.adapters: one must be among model.lora_adapters, which names none",
    ),
    (
        ADAPTERS | {"eval": {"env": [{"id": "a", "adapters": {"x": "three"}}]}},
        "eval.env.0.adapters: three must be among model.lora_adapters, which has one, two",
    ),
    (
        ADAPTERS | {"model": {"name": "m", "lora_adapters": ["one", "two", "three"]}},
        "model.lora_adapters: no role has three; give it to one by env[].adapters, or remove it",
    ),
    ({"model": {"name": "m", "lora_adapters": ["one"]}}, "model.lora_adapters: has no effect with one name"),
    ({"eval": {"env": [{"id": "x"}, {"id": "x"}]}}, "eval.env.1.id: a second environment called x"),
    ({"eval": {"env": [{"id": "eval:x"}]}}, "eval.env.0.name: must not begin with eval:"),
    ({"report_to": {"interval": 5}}, "report_to.interval: has no effect without report_to.samples or report_to.dist"),
    ({"report_to": {"interval": 5, "distributions": False}}, "report_to.interval: has no effect without"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_has_no_effect_or_cannot_be_honoured_is_refused(changes: dict[str, Any], message: str) -> None:
    [problem] = problems(**changes)
    assert problem.startswith(message)


def test_the_example_in_the_readme_holds() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    [example] = re.findall(r"^```yaml\n(eval:\n.*?)^```", readme, flags=re.M | re.S)
    assert problems(**yaml.safe_load(example)) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"eval": {"num_examples": 0}},
        {"eval": {"rollouts_per_example": 4, "sampling": {"temperature": 0.5}}},
        {"eval": {"interval": 5, "env": [{"id": "x", "interval": 2}, {"id": "y"}]}},
        {"eval": {"num_examples": 3, "interval": 5, "env": [{"id": "x", "num_examples": 2}, {"id": "y"}]}},
        {"report_to": {}},
        {"report_to": {"interval": 5, "samples": 2}},
        {"report_to": {"interval": 5, "distributions": True}},
    ],
)
def test_what_has_an_effect_is_not(changes: dict[str, Any]) -> None:
    assert problems(**changes) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval": {"num_examples": -2}}, "eval.num_examples"),
        ({"eval": {"rollouts_per_example": 0}}, "eval.rollouts_per_example"),
        ({"eval": {"sampling": {"temperature": -0.5}}}, "eval.sampling.temperature"),
        ({"report_to": {"project": ""}}, "report_to.project"),
        ({"report_to": {"samples": 0}}, "report_to.samples"),
        ({"report_to": {"api_key": "x"}}, "report_to.api_key"),
    ],
)
def test_values_outside_their_range_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        problems(**changes)
