"""docs/auxiliary_losses.md: its examples are settings, and words are compared as it says."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from grpo.configs.cross import joined_check
from grpo.configs.loading import load
from grpo.configs.orch import OrchSettings
from grpo.configs.train import TrainSettings
from grpo.orchestrator.auxiliary.hints.sources import BUILT_IN, load_templates
from grpo.orchestrator.auxiliary.preferences.agreement import words

from tests.pages import Page

PAGE = Page("docs/auxiliary_losses.md").text


def test_words_are_normalised_as_the_page_says() -> None:
    [row] = re.findall(r"^Two actions are the same .*?\n\n", PAGE, flags=re.M | re.S)
    same = re.findall(r"`([^`]+)` is\s`([^`]+)`", row)
    differ = re.findall(r"`([^`]+)` (?:is )?not `([^`]+)`", row)
    assert (len(same), len(differ)) == (2, 2)
    assert all(words(one) == words(other) for one, other in same)
    assert all(words(one) != words(other) for one, other in differ)


ORCH = {"model": {"name": "m"}, "env": [{"id": "reverse-text"}], "rollouts_per_example": 4}
BLOCKS = [
    re.sub("^    ", "", block, flags=re.M) for block in re.findall(r"(?:^    .*\n(?:\n(?=    ))?)+", PAGE, flags=re.M)
]
TEACHERS = re.findall(r"^    (teacher_model: .*)$", PAGE, flags=re.M)
[(DISTILLS, UNVERIFIED)] = re.findall(r"^    # train +# orch\n    (loss: \{.*?\}) +(buffer: .*)$", PAGE, flags=re.M)
[ASKING] = [block for block in BLOCKS if block.startswith("preferences:")]


def settings_of(folder: Path, *texts: str) -> tuple[TrainSettings, OrchSettings]:
    """A trainer's and an orchestrator's, each with what is its own of the texts."""
    train: dict[str, Any] = {"model": "m", "loss": {}}
    orch: dict[str, Any] = dict(ORCH)
    for text in texts:
        for key, value in yaml.safe_load(text).items():
            (train if key == "loss" else orch)[key] = value
    (folder / "train.yaml").write_text(yaml.safe_dump(train))
    (folder / "orch.yaml").write_text(yaml.safe_dump(orch))
    loaded = load(TrainSettings, file=folder / "train.yaml"), load(OrchSettings, file=folder / "orch.yaml")
    joined_check(*loaded)
    return loaded[0].settings, loaded[1].settings


@pytest.mark.parametrize("teacher", TEACHERS)
def test_a_policy_learns_from_each_teacher_of_the_page_without_rewards(tmp_path: Path, teacher: str) -> None:
    train, orch = settings_of(tmp_path, DISTILLS, UNVERIFIED, teacher)
    assert (train.loss.adv_tau, train.loss.teacher_tau) == (0, 1)
    assert orch.teacher_model is not None
    assert orch.buffer.skip_verification


def test_the_teachers_of_the_page_may_be_asked(tmp_path: Path) -> None:
    [loss] = re.findall(r"`(loss: [^`]+)`", PAGE)
    _, orch = settings_of(tmp_path, ASKING, loss)
    assert [one.name for one in orch.preferences.teachers] == ["a", "base"]


def test_the_file_of_hints_replaces_and_takes_away(tmp_path: Path) -> None:
    [block] = [block for block in BLOCKS if block.startswith("# hints.yaml")]
    (tmp_path / "hints.yaml").write_text(block)
    load_templates(str(tmp_path / "hints.yaml"))
    assert set(yaml.safe_load(block)) <= set(BUILT_IN)
    settings_of(tmp_path, f"hints: {{templates: {tmp_path / 'hints.yaml'}}}")
